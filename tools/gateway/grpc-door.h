/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Grpc, for grpc.c, which has the connections, and grpc-method.c, which has the calls. Nobody else includes this. */

#include <event2/listener.h>
#include <sys/queue.h>

#include "grpc.h"

typedef struct GrpcConnection GrpcConnection;

TAILQ_HEAD(GrpcConnections, GrpcConnection);

struct Grpc {
	struct event_base *base;
	const Options *options;
	const Access *access;
	Core *core;
	Budget *budget;
	Turns *turns;
	GrpcLimits limits;
	struct GrpcConnections connections;
	uint32_t n_connections;
	uint32_t n_listeners;
	struct evconnlistener *listeners[LISTEN_MAX];
	struct event *retry; /* listens again after accept failed */
	GrpcCounters counters;
	void (*stopped)(void *userdata);
	void *stopped_userdata;
	bool stopping;
};

/* A complete call, of a method that there is. */
void grpc_request_begin(Grpc *grpc, const Caller *caller, GrpcCall *call);
/* The call of a method that has not replied goes. */
void grpc_request_cancel(GrpcCall *call);
/* A reply was given to a call of @session: it is sent, once the loop runs. */
void grpc_connection_wake(GrpcSession *session);
