/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Grpc: the gRPC door. Connections of one libevent base, each a GrpcSession (grpc-session.h, where the limits are), and
 * the methods that are called through them.
 *
 * At the cap of connections the one that has been without a call for longest makes room for a new one.
 */

#include <event2/event.h>
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "access.h"
#include "budget.h"
#include "core.h"
#include "grpc-session.h"
#include "listen.h"
#include "options.h"
#include "turns.h"

typedef struct Grpc Grpc;
typedef struct GrpcMethod GrpcMethod;

/* what happened since the start, for the metrics */
typedef struct GrpcCounters {
	uint64_t connections;
	uint64_t cap_hits; /* connections that came when there were as many as there may be */
	uint64_t calls;
	uint64_t cancelled;	   /* of them, before they were answered */
	uint64_t replies[17];	   /* by status, of calls that reached a method */
	uint64_t refused_messages; /* that could not be read */
} GrpcCounters;

int grpc_new(Grpc **ret, struct event_base *base, const Options *options, const Access *access, Core *core,
	     Budget *budget, Turns *turns, const ListenSet *listening);
/* Accepts no more, and closes each connection when it has no call; @done once there is none. */
void grpc_stop(Grpc *grpc, void (*done)(void *userdata), void *userdata);
/* Closes everything; calls that a method has are cancelled. Takes NULL; returns NULL. */
Grpc *grpc_free(Grpc *grpc);
uint32_t grpc_n_connections(const Grpc *grpc);
const GrpcCounters *grpc_counters(const Grpc *grpc);

/* ---- for methods ---- */

/*
 * A call that a method has: from GrpcMethod.call until one of the replies below, of which there is exactly one, at once
 * or later, or until @cancelled is called, after which there is none. The request is freed with either.
 */
typedef struct GrpcRequest {
	Grpc *grpc;
	Core *core;
	const Options *options;
	const GrpcMethod *method;
	GrpcCall *call;
	Caller caller;
	ProtobufCMessage *message;			/* of the method's type; lives as long as the request */
	void (*cancelled)(struct GrpcRequest *request); /* the method's own, NULL at first */
	void *userdata;					/* the method's own, NULL at first */
	ProtobufCAllocator allocator;			/* of @message */
} GrpcRequest;

enum {
	GRPC_METHOD_OPEN = 1,	 /* answers without a credential, too */
	GRPC_METHOD_TENSORS = 2, /* messages as long as --grpc-max-input-size, instead of CORE_REQUEST_MAX */
	GRPC_METHOD_STREAM = 4,	 /* two streams, of which each message is a request of its own: see grpc_reply() */
};

/* the beginning of the paths of Triton's methods */
#define GRPC_SERVICE "/inference.GRPCInferenceService/"

typedef void GrpcMethodCall(GrpcRequest *request);

struct GrpcMethod {
	const char *path;			/* NULL ends a table */
	const ProtobufCMessageDescriptor *type; /* of the request */
	GrpcMethodCall *call;
	uint32_t flags; /* of GRPC_METHOD_ */
};

/*
 * Each ends the request, which is gone then. @response stays the caller's. In a stream the response, and an answer that is
 * not fine, go into a ModelStreamInferResponse, and the stream goes on.
 */
void grpc_reply(GrpcRequest *request, const ProtobufCMessage *response);
/* With the answer "fine" an empty message. The answer is deinited. */
void grpc_reply_answer(GrpcRequest *request, Answer *answer);

/* bytes of a message as the core takes them, and back (borrowed) */
static inline Bytes grpc_bytes(ProtobufCBinaryData data) {
	return (Bytes){ (const char *)data.data, data.len };
}

static inline ProtobufCBinaryData grpc_binary(const char *text) {
	return (ProtobufCBinaryData){ .len = __builtin_strlen(text), .data = (uint8_t *)text };
}

/* ---- the tables of methods; grpc-method.c has the list of them ---- */

extern const GrpcMethod grpc_server_methods[]; /* health and metadata */
extern const GrpcMethod grpc_shm_methods[];    /* the shared-memory extension */
extern const GrpcMethod grpc_models_methods[]; /* readiness, metadata and configuration of the reference models */
extern const GrpcMethod grpc_infer_methods[];  /* inference by them */

/* the method at @path, or NULL */
const GrpcMethod *grpc_method_find(const char *path);
