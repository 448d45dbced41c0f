/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* HttpConnection and Http, for http.c and http-connection.c only. */

#include <event2/bufferevent.h>
#include <event2/listener.h>
#include <sys/queue.h>
#include <time.h>

#include "http.h"

typedef enum HttpState {
	HTTP_IDLE,  /* between requests, nothing has arrived */
	HTTP_HEAD,  /* a part of a head has */
	HTTP_BODY,  /* of connection->request */
	HTTP_READY, /* it is complete, and waits for its turn */
	HTTP_BUSY,  /* a route has the request */
	HTTP_WRITE, /* the reply leaves */
	HTTP_DRAIN, /* the last reply has left; what still arrives is thrown away */
} HttpState;

struct HttpConnection {
	Http *http;
	struct bufferevent *bev;
	struct event *timer; /* ends the connection */
	HttpState state;
	Caller caller;	      /* as at the connection's beginning */
	HttpRequest *request; /* from HTTP_BODY to HTTP_BUSY */
	Turn turn;
	HttpChunks chunks;
	uint64_t left;	 /* of a body with a length */
	uint64_t max;	 /* of this body */
	uint64_t output; /* taken from the budget for the reply */
	bool served;	 /* it has had a request */
	bool last;	 /* no request after this one */
	bool unread;	 /* of a body; it is thrown away */
	struct timespec idle_since;
	TAILQ_ENTRY(HttpConnection) link;
};

TAILQ_HEAD(HttpConnections, HttpConnection);

struct Http {
	struct event_base *base;
	const Options *options;
	const Access *access;
	Core *core;
	Budget *budget;
	Turns *turns;
	HttpRoute *const *routes; /* NULL at the end */
	void *userdata;		  /* of the routes */
	struct HttpConnections connections;
	uint32_t n_connections;
	uint32_t n_listeners;
	struct evconnlistener *listeners[LISTEN_MAX];
	struct event *retry; /* looks whether there is room for those that wait */
	HttpCounters counters;
	void (*stopped)(void *userdata);
	void *stopped_userdata;
	bool stopping;
};

/* Takes @fd over, whatever comes. 0 or -ENOMEM. */
int http_connection_new(Http *http, int fd);
void http_connection_free(HttpConnection *connection);
/* the reply of the connection's request is in its output: what comes next */
void http_connection_replied(HttpConnection *connection, bool last);
void http_request_free(HttpRequest *request);
/* asks the routes */
void http_route(HttpRequest *request);
/* a connection less: there may be room again, or all are gone */
void http_connection_gone(Http *http);
