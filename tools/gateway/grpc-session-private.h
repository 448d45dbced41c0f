/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What grpc-session.c, which has the connection, and grpc-call.c, which has the calls in it, know of each other.
 * Nobody else includes this.
 */

#include "grpc-session.h"

enum {
	GRPC_WINDOW = 16384, /* bytes that a client may send of a call before we have seen its length */
};

typedef struct Bucket {
	uint64_t thousandths; /* of a token */
	uint64_t filled;      /* when */
} Bucket;

struct GrpcSession {
	const GrpcLimits *limits;
	Budget *budget;
	const GrpcHandler *handler;
	void *userdata;
	nghttp2_session *http2;
	uint64_t now;

	GrpcCall *first, *last;
	size_t n_calls;
	size_t held;	      /* bytes of messages, charged */
	size_t held_out;      /* of them, in replies */
	size_t library_bytes; /* of nghttp2, and whatever it allocates below limits->library_bytes */

	uint64_t preface_until; /* UINT64_MAX once it came */
	uint64_t idle_since;
	Bucket resets, nuisances;
	bool ending; /* no more input, output until it is drained */

	uint8_t *output;
	size_t output_size, output_sent, output_capacity;
	uint64_t output_since; /* last progress */
};

/*
 * Bytes of messages, held in the name of this session. False, and nothing charged, when there are too many: when the
 * budget does not have them, or when its last quarter would be needed and the session has more than its share of that.
 */
bool grpc_session_charge(GrpcSession *session, size_t size);
void grpc_session_refund(GrpcSession *session, size_t size);

/*
 * Lets calls with long messages go on, in their order, while the connection may hold the whole of them. One is
 * always let through, or nothing would ever go on; what the others hold meanwhile is a window each.
 */
void grpc_session_grant(GrpcSession *session);

/* A call whose headers begin. NULL without memory. */
GrpcCall *grpc_call_new(GrpcSession *session, int32_t stream);

/* Gives back all that the call holds. Returns NULL. */
GrpcCall *grpc_call_free(GrpcCall *call);

/* What came of a request, in this order. Each may answer the call, after which the rest is ignored. */
void grpc_call_take_field(GrpcCall *call, const char *name, size_t name_size, const char *value, size_t size);
void grpc_call_end_headers(GrpcCall *call);
void grpc_call_take(GrpcCall *call, const uint8_t *data, size_t size);
void grpc_call_end_request(GrpcCall *call);

/* A message that is to be handed over: it is complete, and the reply to the one before has left. */
bool grpc_call_is_ready(const GrpcCall *call);

/* Replaces a compressed message. False when it could not, and the call is answered. */
bool grpc_call_inflate(GrpcCall *call);

/* Returns bytes that were taken to the client's window for this call. */
void grpc_call_consume(GrpcCall *call);

/* Ends a call early; when its handler has it, that is told first. */
void grpc_call_abort(GrpcCall *call, int status, const char *text);

/* The reply, or as much of it as there is so far, is sent. */
void grpc_call_sent(GrpcCall *call);

/* The reply is sent, or not wanted. */
void grpc_call_drop_reply(GrpcCall *call);
