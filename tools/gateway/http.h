/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Http: the HTTP door. Connections of one libevent base, requests one after the other on each, replies in order.
 *
 * Limits: connections (an idle one makes room for a new one), bytes of a head, of a body, of all that is held; a request
 * must have arrived, and a reply must have left, within the request timeout, however the bytes trickle. Whatever is wrong
 * is answered with {"error": ...}; where the next request can no longer be found, the connection closes after that.
 * The parser is http-parse.h: evhttp of libevent 2.1 has no hook between head and body, where a body that is too
 * large has to be answered, and understands several heads that others understand differently.
 *
 * An HttpRequest is valid from the call of its route until its reply, of which there is exactly one; a route may reply
 * later, and then must keep nothing but the pointer. When the connection ends before, the request stays valid and the
 * reply goes nowhere.
 */

#include <event2/buffer.h>
#include <event2/event.h>
#include <json-c/json.h>
#include <stdbool.h>
#include <stdint.h>

#include "access.h"
#include "budget.h"
#include "core.h"
#include "http-parse.h"
#include "listen.h"
#include "options.h"
#include "turns.h"

#define HTTP_SEGMENTS_MAX 8
/* the longest JSON of an inference, whose tensors may follow it */
#define HTTP_INFER_JSON_MAX (1 << 20)

typedef struct Http Http;
typedef struct HttpConnection HttpConnection;

typedef struct HttpRequest {
	Http *http;
	HttpConnection *connection; /* NULL once that has ended */
	Core *core;
	const Options *options;
	Caller caller;
	HttpHead head;
	struct evbuffer *body; /* complete; what HTTP_CHUNKED and lengths said is undone */
	/* the path between its slashes, percent-decoded; n_segments is 0 when it cannot be decoded or is too long */
	Bytes segments[HTTP_SEGMENTS_MAX];
	size_t n_segments;
	uint64_t
		oversize; /* not 0: so long is the body, which is too much and was not kept (http_request_check_size) */
	struct evbuffer *reply_headers; /* "Name: value\r\n" for http_reply_header() */
	uint64_t reserved;		/* of the budget */
	char bytes[];			/* what head and segments point to */
} HttpRequest;

/*
 * A part of the HTTP door: answers @request when the path is one of its own, else returns false and leaves it alone. Parts
 * are asked in the order of the table in http.c.
 */
typedef bool HttpRoute(HttpRequest *request);

/*
 * Serves at the sockets of @listening that are of @door, "http" or "metrics". @routes, NULL at the end, are borrowed, as is
 * @userdata, which is theirs; @routes NULL is Triton's door.
 */
int http_new(Http **ret, struct event_base *base, const Options *options, const Access *access, Core *core,
	     Budget *budget, Turns *turns, const ListenSet *listening, const char *door, HttpRoute *const *routes,
	     void *userdata);
void *http_userdata(const Http *http);
/* Accepts no more, and closes each connection when it has no request; @done once there is none. */
void http_stop(Http *http, void (*done)(void *userdata), void *userdata);
/* Closes everything. Requests that were not answered must be forgotten: they are freed. NULL is fine. */
Http *http_free(Http *http);
uint32_t http_n_connections(const Http *http);

typedef struct HttpCounters {
	uint64_t requests;
	uint64_t replies[6];	/* by the first digit of their status */
	uint64_t refused_heads; /* malformed, or too large */
	uint64_t timed_out;	/* connections that were too slow */
	uint64_t cap_hits;	/* connections that found no room, or pushed an idle one out */
} HttpCounters;
const HttpCounters *http_counters(const Http *http);

/* ---- for routes ---- */

/* whether the path's segments from @first on are @words (NULL at the end), and no others; "*" is any one segment */
bool http_path_is(const HttpRequest *request, size_t first, const char *const *words);
/* Answers 405 and returns false unless the method is @method. */
bool http_method_is(HttpRequest *request, const char *method);
/* ANSWER_OK when the body was kept, else the refusal. A route that does not look at the body need not ask. */
AnswerCode http_request_check_size(const HttpRequest *request, Answer *answer);
/*
 * The body as one JSON document, whose numbers are exact up to 2^64 - 1; larger ones, fractions and negative ones are no
 * unsigned integers. ANSWER_OK with @ret, to be put (NULL is the document null); ANSWER_INTERNAL with Triton's sentence, or
 * what http_request_check_size() says; ANSWER_RESOURCE_EXHAUSTED when it would cost more than @cost_max (json_cost()), or
 * than there is room for. Takes @size bytes of the beginning out of the body, SIZE_MAX for all.
 */
AnswerCode http_request_json(HttpRequest *request, size_t size, size_t cost_max, struct json_object **ret,
			     Answer *answer);

/*
 * Bytes that may still be held for this request; and taking some of them, until it ends. The last HTTP_RESERVE-th of the
 * budget is for requests that hold little, see budget.h.
 */
#define HTTP_RESERVE 32
uint64_t http_request_room(const HttpRequest *request);
bool http_request_reserve(HttpRequest *request, uint64_t bytes);

/* Adds its text to @out. 0 or -ENOMEM. */
int http_add_json(struct evbuffer *out, struct json_object *borrowed);
/* to be said in the reply; both are trusted text */
void http_reply_header(HttpRequest *request, const char *name, const char *value);
/* Each of these ends the request. @status as a number; what is @borrowed stays the caller's. */
void http_reply_empty(HttpRequest *request, int status);
void http_reply_json(HttpRequest *request, int status, struct json_object *borrowed);
/* {"error": text} with the status of the code; with ANSWER_OK an empty 200. The answer stays the caller's. */
void http_reply_answer(HttpRequest *request, const Answer *answer);
void http_reply_error(HttpRequest *request, int status, const char *text);
/* @body is emptied into the reply; NULL for none */
void http_reply_buffer(HttpRequest *request, int status, const char *content_type, struct evbuffer *body);

/* ---- the parts ---- */

HttpRoute http_server_route; /* health and metadata */
HttpRoute http_shm_route;    /* shared memory */
HttpRoute dashboard_route;   /* the page for people, and what it shows */
HttpRoute http_models_route; /* the reference models */
