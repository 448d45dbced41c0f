/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * GrpcSession: one HTTP/2 connection with gRPC calls in it, without a socket and without a clock.
 *
 * Bytes go in by grpc_session_receive() and come out by grpc_session_output(); whoever has the socket passes the
 * time, in milliseconds of a clock that never goes back. HTTP/2 itself is nghttp2's. A complete request is handed
 * to GrpcHandler.call when its owner says so, by grpc_session_run(); it is answered at once or later.
 *
 * A peer's worst case is its own end. What a session may hold is bounded, whatever its peer does:
 *   - messages, in and out: GrpcLimits.connection_bytes, by flow control, and all sessions together by a Budget,
 *     beyond which calls are refused with RESOURCE_EXHAUSTED. The last quarter of that is for those that hold little, so
 *     that a peer that makes the gateway hold much cannot shut out the others;
 *   - what nghttp2 allocates: GrpcLimits.library_bytes, beyond which the connection ends;
 *   - time: for the preface, for a request to arrive, for a reply to be read, and without any call;
 *   - frames that ask for work and bring none (resets, pings, settings, empty ones): a bucket of tokens for each kind.
 */

#include <nghttp2/nghttp2.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "budget.h"
#include "grpc-wire.h"

typedef struct GrpcCall GrpcCall;
typedef struct GrpcSession GrpcSession;

/* at most @burst at once, refilled by @rate a second */
typedef struct GrpcRate {
	uint32_t burst;
	uint32_t rate;
} GrpcRate;

typedef struct GrpcLimits {
	size_t connection_bytes; /* of messages; a single larger one is still taken when it is alone */
	size_t share_bytes;	 /* of messages, which a connection may hold also when others hold most of the budget */
	size_t library_bytes;	 /* of nghttp2's own state */
	uint32_t streams;	 /* calls at once */
	uint32_t metadata_bytes; /* a request's headers, as HTTP/2 counts them: name, value and 32 for each */
	uint64_t preface_ms;	 /* until the client's first SETTINGS */
	uint64_t request_ms;	 /* from a call's headers to its last byte, and for its reply to be read */
	uint64_t idle_ms;	 /* without a call */
	GrpcRate resets;	 /* calls that ended badly: reset by the client, or by us because of an error */
	GrpcRate nuisances;	 /* pings, settings, priorities, frames without content */
} GrpcLimits;

extern const GrpcLimits grpc_limits_default;

/*
 * What a session asks of its owner. message_max: the longest message, also when inflated, that the method @path
 * takes; 0 when there is no such method; *@ret_stream is false before, and set to true for a method of two streams. call: a request is complete, and call->message has it; it must be
 * finished by grpc_call_finish(), now or later. Of a stream each message is handed over when the one before is done with,
 * by grpc_call_next(), and its reply is sent; grpc_call_finish() ends such a call early. cancel: a call that was handed over and is not finished has gone (its
 * client reset it, its deadline passed, the connection ended); the pointer is not valid after this returns, and
 * the call must not be finished.
 */
typedef struct GrpcHandler {
	size_t (*message_max)(void *userdata, const char *path, bool *ret_stream);
	void (*call)(void *userdata, GrpcCall *call);
	void (*cancel)(void *userdata, GrpcCall *call);
} GrpcHandler;

typedef enum GrpcCallState {
	GRPC_CALL_RECEIVING,
	GRPC_CALL_READY,    /* complete, and waits for its turn */
	GRPC_CALL_HANDLED,  /* with the handler */
	GRPC_CALL_FINISHED, /* answered; goes when the reply is sent */
} GrpcCallState;

enum {
	GRPC_PATH_MAX = 127,
	GRPC_AUTHORIZATION_MAX = 4096,
};

struct GrpcCall {
	/* for the handler to read */
	GrpcSession *session;
	char path[GRPC_PATH_MAX + 1];
	char *authorization; /* the value of that header, NULL without one */
	bool everything;     /* shmbroker-scope: everything */
	uint8_t *message;
	size_t message_size;
	void *userdata; /* the handler's own, NULL at first */

	/* the session's */
	int32_t stream;
	GrpcCallState state;
	GrpcCall *previous, *next; /* in the order of their headers */
	uint64_t deadline;	   /* the client's, UINT64_MAX without one */
	uint64_t patience;	   /* when the session gives up on the present state, UINT64_MAX never */
	GrpcEncoding encoding;
	uint32_t metadata_size;
	bool has_path, has_method_post, has_content_type, has_bad_timeout;
	bool request_complete;
	bool is_stream;
	bool has_headers; /* of the reply, which are sent */
	uint8_t *backlog; /* of a stream, what came behind the message that is worked on; charged */
	size_t backlog_size;

	uint8_t prefix[GRPC_PREFIX_SIZE];
	size_t prefix_size;
	size_t message_max;
	size_t declared;   /* by the prefix */
	size_t capacity;   /* of message, all of it charged */
	bool waiting;	   /* for room: what came is not yet given back to the client's window */
	size_t unconsumed; /* bytes of the window that are kept back */

	uint8_t *out; /* a prefixed message, all of it charged */
	size_t out_size, out_sent;
	int status;
	char *status_text; /* encoded; NULL for none */
	size_t status_text_size;
};

/*
 * A session of a connection that was accepted at @now. Borrows @limits, @budget and @handler for its life.
 * Returns 0, or -ENOMEM.
 */
int grpc_session_new(GrpcSession **ret, const GrpcLimits *limits, Budget *budget, const GrpcHandler *handler,
		     void *userdata, uint64_t now);

/* Cancels the calls that are with the handler, and frees everything. Takes NULL; returns NULL. */
GrpcSession *grpc_session_free(GrpcSession *session);

/*
 * Takes bytes from the peer. Returns false when the connection is of no more use:
 * what grpc_session_output() has is still worth sending, nothing more is worth reading.
 */
bool grpc_session_receive(GrpcSession *session, const uint8_t *data, size_t size, uint64_t now);

/*
 * What to send next, which stays valid until the next call with this session. *@ret_size is 0 when there is
 * nothing. Returns false when nothing more will ever come: close once everything is sent.
 */
bool grpc_session_output(GrpcSession *session, const uint8_t **ret, size_t *ret_size);

/* The first @size bytes of the output went out. */
void grpc_session_sent(GrpcSession *session, size_t size, uint64_t now);

/* Whether a request is complete that may be handed over, while the peer reads its replies. */
bool grpc_session_is_ready(const GrpcSession *session);

/* Hands the first of them over. Returns false when there is none. */
bool grpc_session_run(GrpcSession *session, uint64_t now);

/* False while the peer reads so slowly that nothing more should be read from it. */
bool grpc_session_wants_input(const GrpcSession *session);

/* When grpc_session_tick() should be called, at the latest. */
uint64_t grpc_session_deadline(const GrpcSession *session);

/* Ends what has taken too long. Returns false when that is the connection itself. */
bool grpc_session_tick(GrpcSession *session, uint64_t now);

/* Tells the client to make no more calls; those that are there go on, then the session ends. */
void grpc_session_shutdown(GrpcSession *session);

/* How many calls there are, streams in which nothing happens not counted. */
size_t grpc_session_calls(const GrpcSession *session);

/* What grpc_session_new() was given. */
void *grpc_session_userdata(const GrpcSession *session);

/*
 * Room for the reply's message, of @size bytes, to be written before the call is finished. NULL when there is no
 * memory, or the budget is used up: the call is then to be finished with RESOURCE_EXHAUSTED, and whatever was
 * asked for is done. At most once for a call.
 */
uint8_t *grpc_call_reply(GrpcCall *call, size_t size);

/*
 * The message of a stream is done with: its reply, for which grpc_call_reply() had room, is sent, and the next message may
 * come. When the client will send none, this ends the call. @call is the session's from here, until then.
 */
void grpc_call_next(GrpcCall *call);

/*
 * Ends a call with a status of gRPC, and a text that is not empty only when it is not OK. Without a message from
 * grpc_call_reply(), or with a status other than OK, no message is sent. @call is the session's from here.
 */
void grpc_call_finish(GrpcCall *call, int status, const char *text, size_t length);
