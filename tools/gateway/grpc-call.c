/* SPDX-License-Identifier: Apache-2.0 */

#include "grpc-session-private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char no_room[] = "the gateway holds as many bytes of messages as it may";

/* --- calls */

GrpcCall *grpc_call_new(GrpcSession *session, int32_t stream) {
	GrpcCall *call = calloc(1, sizeof(*call));

	if (!call)
		return NULL;
	call->session = session;
	call->stream = stream;
	call->deadline = UINT64_MAX;
	call->patience = session->now + session->limits->request_ms;
	call->previous = session->last;
	*(session->last ? &session->last->next : &session->first) = call;
	session->last = call;
	session->n_calls++;
	return call;
}

static void call_drop_request(GrpcCall *call) {
	free(call->message);
	grpc_session_refund(call->session, call->capacity);
	call->message = NULL;
	call->message_size = 0;
	call->capacity = 0;
	call->waiting = false;
}

void grpc_call_drop_reply(GrpcCall *call) {
	free(call->out);
	grpc_session_refund(call->session, call->out_size);
	call->session->held_out -= call->out_size;
	call->out = NULL;
	call->out_size = 0;
	call->out_sent = 0;
}

static void call_drop_backlog(GrpcCall *call) {
	free(call->backlog);
	grpc_session_refund(call->session, call->backlog_size);
	call->backlog = NULL;
	call->backlog_size = 0;
}

GrpcCall *grpc_call_free(GrpcCall *call) {
	GrpcSession *session = call->session;

	*(call->previous ? &call->previous->next : &session->first) = call->next;
	*(call->next ? &call->next->previous : &session->last) = call->previous;
	session->n_calls--;
	if (session->n_calls == 0)
		session->idle_since = session->now;
	call_drop_request(call);
	call_drop_backlog(call);
	grpc_call_drop_reply(call);
	free(call->authorization);
	free(call->status_text);
	free(call);
	return NULL;
}

/* gives the bytes back to the windows of the client, so that it may send as many more */
void grpc_call_consume(GrpcCall *call) {
	/* what waits is kept back, so that not much more of it comes */
	size_t kept = call->waiting ? call->unconsumed : call->backlog_size;

	if (call->unconsumed > kept)
		(void)nghttp2_session_consume_stream(call->session->http2, call->stream, call->unconsumed - kept);
	call->unconsumed = kept;
}

#define FIELD(_name, _value, _size)                                                       \
	((nghttp2_nv){ (uint8_t *)(_name), (uint8_t *)(_value), sizeof(_name) - 1, _size, \
		       NGHTTP2_NV_FLAG_NO_COPY_NAME })
#define FIELD_TEXT(_name, _value) FIELD(_name, _value, sizeof(_value) - 1)

static size_t status_fields(const GrpcCall *call, char digits[4], nghttp2_nv *fields) {
	size_t n = 0;

	(void)snprintf(digits, 4, "%d", call->status);
	fields[n++] = FIELD("grpc-status", digits, strlen(digits));
	if (call->status_text_size > 0)
		fields[n++] = FIELD("grpc-message", call->status_text, call->status_text_size);
	return n;
}

static ssize_t read_reply(nghttp2_session *http2, int32_t stream, uint8_t *buffer, size_t length, uint32_t *flags,
			  nghttp2_data_source *source, void *userdata) {
	GrpcCall *call = source->ptr;
	size_t n = call->out_size - call->out_sent;
	nghttp2_nv fields[2];
	char digits[4];

	(void)userdata;
	if (n > length)
		n = length;
	if (n > 0)
		memcpy(buffer, call->out + call->out_sent, n);
	call->out_sent += n;
	/* more may follow in a stream, for which grpc_call_next() wakes it */
	if (n == 0 && call->state != GRPC_CALL_FINISHED)
		return NGHTTP2_ERR_DEFERRED;
	if (call->out_sent == call->out_size && call->state == GRPC_CALL_FINISHED) {
		*flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
		if (nghttp2_submit_trailer(http2, stream, fields, status_fields(call, digits, fields)) != 0)
			return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
	}
	return (ssize_t)n;
}

/* the headers of a reply; with the @n fields of its status when that is all there is of it */
static void call_begin_reply(GrpcCall *call, const nghttp2_nv *status, size_t n) {
	const nghttp2_data_provider provider = { .source.ptr = call, .read_callback = read_reply };
	nghttp2_nv fields[5] = {
		FIELD_TEXT(":status", "200"),
		FIELD_TEXT("content-type", "application/grpc"),
		FIELD_TEXT("grpc-accept-encoding", GRPC_ENCODINGS),
	};

	for (size_t i = 0; i < n; i++)
		fields[3 + i] = status[i];
	call->has_headers = true;
	/* when that fails the connection has no memory, and ends for it */
	if (nghttp2_submit_response(call->session->http2, call->stream, fields, 3 + n, n > 0 ? NULL : &provider) != 0)
		call->session->ending = true;
}

/* the call is answered: what it held for its request goes, and its reply has its own time to be read */
static void call_finished(GrpcCall *call) {
	GrpcSession *session = call->session;

	call->state = GRPC_CALL_FINISHED;
	call->deadline = UINT64_MAX;
	call->patience = session->now + session->limits->request_ms;
	call_drop_request(call);
	call_drop_backlog(call);
	grpc_call_consume(call);
}

/* an answer of HTTP, for what is not a request of gRPC */
static void call_finish_http(GrpcCall *call, const char status[4]) {
	nghttp2_nv fields[] = { FIELD(":status", status, 3) };

	call_finished(call);
	(void)nghttp2_submit_response(call->session->http2, call->stream, fields, 1, NULL);
}

static void call_finish(GrpcCall *call, int status, const char *text) {
	grpc_call_finish(call, status, text, strlen(text));
}

void grpc_call_finish(GrpcCall *call, int status, const char *text, size_t length) {
	GrpcSession *session = call->session;
	nghttp2_nv fields[2];
	char digits[4];
	bool with_message = status == GRPC_OK && call->out;

	call->status = status;
	/* before the request goes, which the text may be of */
	if (status != GRPC_OK && length > 0) {
		call->status_text = malloc(GRPC_TEXT_ENCODED_MAX);
		if (call->status_text)
			call->status_text_size = grpc_text_encode(text, length, call->status_text);
	}
	call_finished(call);

	if (call->has_headers) {
		/* fails where it is not asleep, and then it comes to the end by itself */
		(void)nghttp2_session_resume_data(session->http2, call->stream);
	} else if (with_message) {
		call_begin_reply(call, NULL, 0);
	} else {
		grpc_call_drop_reply(call);
		call_begin_reply(call, fields, status_fields(call, digits, fields));
	}
}

uint8_t *grpc_call_reply(GrpcCall *call, size_t size) {
	GrpcSession *session = call->session;
	size_t whole = GRPC_PREFIX_SIZE + size;

	if (size > UINT32_MAX || call->out || !grpc_session_charge(session, whole))
		return NULL;
	call->out = malloc(whole);
	if (!call->out) {
		grpc_session_refund(session, whole);
		return NULL;
	}
	call->out_size = whole;
	session->held_out += whole;
	grpc_prefix(call->out, (uint32_t)size);
	return call->out + GRPC_PREFIX_SIZE;
}

/* ends a call early, for what its handler should hear of when it has the call */
void grpc_call_abort(GrpcCall *call, int status, const char *text) {
	GrpcSession *session = call->session;

	if (call->state == GRPC_CALL_HANDLED)
		session->handler->cancel(session->userdata, call);
	grpc_call_drop_reply(call);
	call_finish(call, status, text);
}

/* --- a request's message */

/* larger room for a message, all of it charged; answers the call itself when there is none */
static bool call_reserve(GrpcCall *call, size_t capacity) {
	GrpcSession *session = call->session;
	uint8_t *larger;

	if (capacity <= call->capacity)
		return true;
	if (!grpc_session_charge(session, capacity - call->capacity)) {
		call_finish(call, GRPC_RESOURCE_EXHAUSTED, no_room);
		return false;
	}
	larger = realloc(call->message, capacity);
	if (!larger) {
		grpc_session_refund(session, capacity - call->capacity);
		call_finish(call, GRPC_RESOURCE_EXHAUSTED, "the gateway is out of memory");
		return false;
	}
	call->message = larger;
	call->capacity = capacity;
	return true;
}

void grpc_session_grant(GrpcSession *session) {
	const size_t limit = session->limits->connection_bytes;
	size_t granted = 0;

	for (GrpcCall *call = session->first; call; call = call->next)
		if (call->declared > GRPC_WINDOW && !call->waiting && call->state != GRPC_CALL_FINISHED)
			granted += call->declared;
	for (GrpcCall *call = session->first, *next; call; call = next) {
		next = call->next;
		if (!call->waiting)
			continue;
		if (granted > 0 && (granted >= limit || call->declared > limit - granted))
			return;
		call->waiting = false;
		if (!call_reserve(call, call->declared))
			continue;
		granted += call->declared;
		grpc_call_consume(call);
	}
}

static bool call_has_message(const GrpcCall *call) {
	return call->state == GRPC_CALL_RECEIVING && call->prefix_size == GRPC_PREFIX_SIZE &&
	       call->message_size == call->declared;
}

/* the five bytes before the message are there */
static void call_begin_message(GrpcCall *call) {
	const uint8_t *p = call->prefix;
	char text[96];

	call->declared = (size_t)p[1] << 24 | (size_t)p[2] << 16 | (size_t)p[3] << 8 | p[4];
	if (p[0] > 1) {
		call_finish(call, GRPC_INTERNAL, "a message begins with neither 0 nor 1");
	} else if (p[0] == 1 && call->encoding == GRPC_ENCODING_IDENTITY) {
		call_finish(call, GRPC_INTERNAL, "a compressed message, and grpc-encoding names no compression");
	} else if (call->declared > call->message_max) {
		(void)snprintf(text, sizeof(text), "Received message larger than max (%zu vs. %zu)", call->declared,
			       call->message_max);
		call_finish(call, GRPC_RESOURCE_EXHAUSTED, text);
	} else if (call->declared > GRPC_WINDOW) {
		call->waiting = true;
		grpc_session_grant(call->session);
	} else {
		(void)call_reserve(call, call->declared);
	}
}

/* keeps what came while a message of the stream is worked on: no more than a window, since none of it is consumed */
static void call_keep(GrpcCall *call, const uint8_t *data, size_t size) {
	GrpcSession *session = call->session;
	uint8_t *larger = NULL;

	if (size == 0)
		return;
	if (grpc_session_charge(session, size)) {
		larger = realloc(call->backlog, call->backlog_size + size);
		if (!larger)
			grpc_session_refund(session, size);
	}
	if (!larger) {
		grpc_call_abort(call, GRPC_RESOURCE_EXHAUSTED, no_room);
		return;
	}
	call->backlog = larger;
	memcpy(call->backlog + call->backlog_size, data, size);
	call->backlog_size += size;
}

bool grpc_call_is_ready(const GrpcCall *call) {
	return call->state == GRPC_CALL_READY && !call->out;
}

void grpc_call_take(GrpcCall *call, const uint8_t *data, size_t size) {
	while (size > 0 && call->state == GRPC_CALL_RECEIVING) {
		size_t n;

		if (call->is_stream && call->prefix_size == 0)
			call->patience = call->session->now + call->session->limits->request_ms;

		if (call->prefix_size < GRPC_PREFIX_SIZE) {
			call->prefix[call->prefix_size++] = *data++;
			size--;
			if (call->prefix_size == GRPC_PREFIX_SIZE)
				call_begin_message(call);
			if (call->is_stream && call_has_message(call))
				call->state = GRPC_CALL_READY;
			continue;
		}
		n = call->declared - call->message_size;
		if (n > size)
			n = size;
		if (n == 0) {
			call_finish(call, GRPC_INTERNAL, "more than one message in a call that takes one");
			return;
		}
		if (call->message_size + n > call->capacity && !call_reserve(call, call->message_size + n))
			return;
		memcpy(call->message + call->message_size, data, n);
		call->message_size += n;
		data += n;
		size -= n;
		if (call->is_stream && call_has_message(call))
			call->state = GRPC_CALL_READY;
	}
	if (call->is_stream && call->state != GRPC_CALL_FINISHED)
		call_keep(call, data, size);
}

/* false when the message could not be inflated, and the call is answered */
bool grpc_call_inflate(GrpcCall *call) {
	GrpcSession *session = call->session;
	uint8_t *inflated;
	size_t size;
	char text[96];
	int r;

	r = grpc_inflate(call->encoding, call->message, call->message_size, call->message_max, &inflated, &size);
	if (r == GRPC_INFLATE_E_TOO_LARGE) {
		(void)snprintf(text, sizeof(text), "Received message larger than max (more than %zu when inflated)",
			       call->message_max);
		call_finish(call, GRPC_RESOURCE_EXHAUSTED, text);
		return false;
	}
	if (r > 0) {
		call_finish(call, GRPC_INTERNAL, "a message that cannot be inflated");
		return false;
	}
	if (r < 0) {
		call_finish(call, GRPC_RESOURCE_EXHAUSTED, "the gateway is out of memory");
		return false;
	}
	free(call->message);
	grpc_session_refund(session, call->capacity);
	call->message = NULL;
	call->message_size = 0;
	call->capacity = 0;
	if (!grpc_session_charge(session, size)) {
		free(inflated);
		call_finish(call, GRPC_RESOURCE_EXHAUSTED, no_room);
		return false;
	}
	call->message = inflated;
	call->message_size = size;
	call->capacity = size;
	return true;
}

void grpc_call_end_request(GrpcCall *call) {
	call->request_complete = true;
	if (call->state != GRPC_CALL_RECEIVING)
		return;
	if (call->is_stream && call->prefix_size == 0)
		call_finish(call, GRPC_OK, "");
	else if (!call_has_message(call))
		call_finish(call, GRPC_INTERNAL, "the request ends before its message does");
	else
		call->state = GRPC_CALL_READY;
}

void grpc_call_sent(GrpcCall *call) {
	GrpcSession *session = call->session;

	grpc_call_drop_reply(call);
	if (call->is_stream && call->state == GRPC_CALL_RECEIVING && call->prefix_size == 0)
		call->patience = session->now + session->limits->idle_ms;
}

void grpc_call_next(GrpcCall *call) {
	GrpcSession *session = call->session;
	uint8_t *backlog = call->backlog;
	size_t size = call->backlog_size;

	call_drop_request(call);
	call->state = GRPC_CALL_RECEIVING;
	call->prefix_size = 0;
	call->declared = 0;
	call->patience = session->now + (call->out ? session->limits->request_ms : session->limits->idle_ms);
	if (call->out && call->has_headers)
		(void)nghttp2_session_resume_data(session->http2, call->stream);
	else if (call->out)
		call_begin_reply(call, NULL, 0);

	call->backlog = NULL;
	call->backlog_size = 0;
	grpc_session_refund(session, size);
	grpc_call_take(call, backlog, size);
	free(backlog);
	if (call->request_complete)
		grpc_call_end_request(call);
	grpc_call_consume(call);
}

/* --- a request's headers */

void grpc_call_take_field(GrpcCall *call, const char *name, size_t name_size, const char *value, size_t size) {
	uint64_t ms;

#define IS(_text) (name_size == sizeof(_text) - 1 && memcmp(name, _text, name_size) == 0)
	if (IS(":method")) {
		call->has_method_post = size == 4 && memcmp(value, "POST", 4) == 0;
	} else if (IS(":path")) {
		call->has_path = size <= GRPC_PATH_MAX && !memchr(value, 0, size);
		if (call->has_path)
			memcpy(call->path, value, size);
	} else if (IS("content-type")) {
		call->has_content_type = grpc_content_type(value, size);
	} else if (IS("grpc-encoding")) {
		call->encoding = grpc_encoding(value, size);
	} else if (IS("grpc-timeout")) {
		if (grpc_timeout(value, size, &ms))
			call->deadline = call->session->now + ms;
		else
			call->has_bad_timeout = true;
	} else if (IS("shmbroker-scope")) {
		call->everything = size == 10 && memcmp(value, "everything", 10) == 0;
	} else if (IS("authorization")) {
		if (size <= GRPC_AUTHORIZATION_MAX && !call->authorization)
			call->authorization = strndup(value, size);
	}
#undef IS
}

void grpc_call_end_headers(GrpcCall *call) {
	GrpcSession *session = call->session;
	char text[64 + GRPC_PATH_MAX];

	/* its deadline may have passed between two frames of headers */
	if (call->state != GRPC_CALL_RECEIVING)
		return;
	if (call->metadata_size > session->limits->metadata_bytes) {
		call_finish(call, GRPC_RESOURCE_EXHAUSTED, "received metadata size exceeds limit");
	} else if (!call->has_method_post) {
		call_finish_http(call, "405");
	} else if (!call->has_content_type) {
		call_finish_http(call, "415");
	} else if (call->encoding == GRPC_ENCODING_UNKNOWN) {
		call_finish(call, GRPC_UNIMPLEMENTED, "grpc-encoding names a compression that is not supported");
	} else if (call->has_bad_timeout) {
		call_finish(call, GRPC_INTERNAL, "grpc-timeout is not a duration");
	} else {
		call->message_max =
			call->has_path ? session->handler->message_max(session->userdata, call->path, &call->is_stream)
				       : 0;
		if (call->is_stream)
			call->patience = session->now + session->limits->idle_ms;
		if (call->message_max == 0) {
			(void)snprintf(text, sizeof(text), "there is no method %s",
				       call->has_path ? call->path : "of a name as long");
			call_finish(call, GRPC_UNIMPLEMENTED, text);
		}
	}
}
