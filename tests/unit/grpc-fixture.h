/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A GrpcSession, and a client that nghttp2 makes, over arrays instead of sockets and with a clock of the test's own.
 * The handler echoes messages, at once or when the test says so. After each test nothing is held any more.
 */

#include "tools/gateway/grpc-session.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum {
	CALLS_MAX = 256,
	MESSAGE_MAX = 65536,
	LONG_MESSAGE_MAX = 3 << 20,
};

/* a call as the client sees it */
typedef struct Call {
	int32_t stream;
	uint8_t *request;
	size_t request_size, request_sent;
	bool hold_end; /* do not end the request */
	char http_status[8], grpc_status[8], text[GRPC_TEXT_ENCODED_MAX + 1], accept[64];
	uint8_t *reply;
	size_t reply_size;
	bool closed;
	uint32_t error;
} Call;

typedef struct Fixture {
	GrpcLimits limits;
	Budget budget;
	GrpcSession *session;
	nghttp2_session *client;
	uint64_t now;
	bool server_alive;
	bool goaway;
	uint32_t goaway_error;
	bool deaf; /* the client gives no window back */
	Call calls[CALLS_MAX];
	size_t n_calls;

	/* the handler */
	bool later;
	GrpcCall *handled[CALLS_MAX];
	size_t n_handled;
	size_t n_called, n_cancelled;
	size_t reply_size; /* instead of an echo */
} Fixture;

/* --- the handler */

static size_t message_max(void *userdata, const char *path, bool *ret_stream) {
	(void)userdata;
	if (strcmp(path, "/test/echo") == 0)
		return MESSAGE_MAX;
	if (strcmp(path, "/test/stream") == 0) {
		*ret_stream = true;
		return MESSAGE_MAX;
	}
	if (strcmp(path, "/test/long") == 0)
		return LONG_MESSAGE_MAX;
	return 0;
}

static void answer(Fixture *f, GrpcCall *call) {
	size_t size = f->reply_size > 0 ? f->reply_size : call->message_size;
	uint8_t *reply = grpc_call_reply(call, size);

	if (!reply) {
		grpc_call_finish(call, GRPC_RESOURCE_EXHAUSTED, "no room", 7);
		return;
	}
	if (f->reply_size > 0)
		memset(reply, 'r', size);
	else if (size > 0)
		memcpy(reply, call->message, size);
	if (strcmp(call->path, "/test/stream") == 0) {
		grpc_call_next(call);
		return;
	}
	grpc_call_finish(call, GRPC_OK, NULL, 0);
}

static void on_call(void *userdata, GrpcCall *call) {
	Fixture *f = userdata;

	f->n_called++;
	if (f->later) {
		assert_true(f->n_handled < CALLS_MAX);
		call->userdata = f;
		f->handled[f->n_handled++] = call;
	} else if (call->authorization && strcmp(call->authorization, "refuse") == 0) {
		grpc_call_finish(call, GRPC_PERMISSION_DENIED, "not 100% allowed\n", 17);
	} else {
		answer(f, call);
	}
}

static void on_cancel(void *userdata, GrpcCall *call) {
	Fixture *f = userdata;

	assert_ptr_equal(call->userdata, f);
	for (size_t i = 0; i < f->n_handled; i++) {
		if (f->handled[i] == call) {
			f->handled[i] = f->handled[--f->n_handled];
			f->n_cancelled++;
			return;
		}
	}
	fail_msg("a call was cancelled that was not handed over");
}

static const GrpcHandler handler = { message_max, on_call, on_cancel };

/* --- the client */

static Call *call_of(Fixture *f, int32_t stream) {
	for (size_t i = 0; i < f->n_calls; i++)
		if (f->calls[i].stream == stream)
			return &f->calls[i];
	return NULL;
}

static void copy_text(char *out, size_t room, const uint8_t *value, size_t size) {
	assert_true(size < room);
	memcpy(out, value, size);
	out[size] = 0;
}

static int client_header(nghttp2_session *http2, const nghttp2_frame *frame, const uint8_t *name, size_t name_size,
			 const uint8_t *value, size_t size, uint8_t flags, void *userdata) {
	Call *call = call_of(userdata, frame->hd.stream_id);

	(void)http2;
	(void)flags;
	(void)name_size;
	if (!call)
		return 0;
	if (strcmp((const char *)name, ":status") == 0)
		copy_text(call->http_status, sizeof(call->http_status), value, size);
	else if (strcmp((const char *)name, "grpc-status") == 0)
		copy_text(call->grpc_status, sizeof(call->grpc_status), value, size);
	else if (strcmp((const char *)name, "grpc-message") == 0)
		copy_text(call->text, sizeof(call->text), value, size);
	else if (strcmp((const char *)name, "grpc-accept-encoding") == 0)
		copy_text(call->accept, sizeof(call->accept), value, size);
	return 0;
}

static int client_data(nghttp2_session *http2, uint8_t flags, int32_t stream, const uint8_t *data, size_t size,
		       void *userdata) {
	Fixture *f = userdata;
	Call *call = call_of(f, stream);

	(void)flags;
	if (!f->deaf)
		assert_int_equal(nghttp2_session_consume(http2, stream, size), 0);
	if (!call)
		return 0;
	call->reply = realloc(call->reply, call->reply_size + size);
	assert_non_null(call->reply);
	memcpy(call->reply + call->reply_size, data, size);
	call->reply_size += size;
	return 0;
}

static int client_close(nghttp2_session *http2, int32_t stream, uint32_t error, void *userdata) {
	Call *call = call_of(userdata, stream);

	(void)http2;
	if (call) {
		call->closed = true;
		call->error = error;
	}
	return 0;
}

static int client_frame(nghttp2_session *http2, const nghttp2_frame *frame, void *userdata) {
	Fixture *f = userdata;

	(void)http2;
	if (frame->hd.type == NGHTTP2_GOAWAY) {
		f->goaway = true;
		f->goaway_error = frame->goaway.error_code;
	}
	return 0;
}

static ssize_t client_read(nghttp2_session *http2, int32_t stream, uint8_t *buffer, size_t length, uint32_t *flags,
			   nghttp2_data_source *source, void *userdata) {
	Call *call = call_of(userdata, stream);
	size_t n = call->request_size - call->request_sent;

	(void)http2;
	(void)source;
	if (n > length)
		n = length;
	if (n == 0 && call->hold_end)
		return NGHTTP2_ERR_DEFERRED;
	memcpy(buffer, call->request + call->request_sent, n);
	call->request_sent += n;
	if (call->request_sent == call->request_size && !call->hold_end)
		*flags |= NGHTTP2_DATA_FLAG_EOF;
	return (ssize_t)n;
}

/* what is complete is answered */
static inline void run(Fixture *f) {
	while (grpc_session_run(f->session, f->now))
		;
}

static bool pump_once(Fixture *f) {
	const uint8_t *data;
	bool moved = false;
	size_t size;
	ssize_t n;

	while (f->server_alive && grpc_session_wants_input(f->session) &&
	       (n = nghttp2_session_mem_send(f->client, &data)) > 0) {
		moved = true;
		if (!grpc_session_receive(f->session, data, (size_t)n, f->now))
			break;
		run(f);
	}
	while (f->server_alive) {
		f->server_alive = grpc_session_output(f->session, &data, &size);
		if (size == 0)
			break;
		moved = true;
		assert_int_equal(nghttp2_session_mem_recv(f->client, data, size), size);
		grpc_session_sent(f->session, size, f->now);
		run(f);
	}
	return moved;
}

/* until both have nothing to say */
static inline void pump(Fixture *f) {
	while (pump_once(f))
		;
}

#define FIELD(_name, _value) \
	((nghttp2_nv){ (uint8_t *)(_name), (uint8_t *)(_value), strlen(_name), strlen(_value), NGHTTP2_NV_FLAG_NONE })

typedef struct Request {
	const char *path, *method, *content_type, *encoding, *timeout, *authorization;
	const char *extra; /* a header of this value */
	bool hold_end;
} Request;

/* begins a call whose body is exactly @size bytes */
static Call *begin_raw(Fixture *f, Request request, const void *body, size_t size) {
	const nghttp2_data_provider provider = { .read_callback = client_read };
	Call *call = &f->calls[f->n_calls];
	nghttp2_nv fields[16];
	size_t n = 0;

	assert_true(f->n_calls < CALLS_MAX);
	fields[n++] = FIELD(":method", request.method ? request.method : "POST");
	fields[n++] = FIELD(":scheme", "http");
	fields[n++] = FIELD(":path", request.path ? request.path : "/test/echo");
	fields[n++] = FIELD(":authority", "localhost");
	fields[n++] = FIELD("content-type", request.content_type ? request.content_type : "application/grpc");
	fields[n++] = FIELD("te", "trailers");
	if (request.encoding)
		fields[n++] = FIELD("grpc-encoding", request.encoding);
	if (request.timeout)
		fields[n++] = FIELD("grpc-timeout", request.timeout);
	if (request.authorization)
		fields[n++] = FIELD("authorization", request.authorization);
	if (request.extra)
		fields[n++] = FIELD("x-extra", request.extra);
	call->request = malloc(size + 1);
	assert_non_null(call->request);
	memcpy(call->request, body, size);
	call->request_size = size;
	call->hold_end = request.hold_end;
	call->stream = nghttp2_submit_request(f->client, NULL, fields, n, &provider, NULL);
	assert_true(call->stream > 0);
	f->n_calls++;
	return call;
}

/* begins a call with one message of @size bytes */
static inline Call *begin(Fixture *f, Request request, const void *message, size_t size) {
	uint8_t *body = malloc(GRPC_PREFIX_SIZE + size);
	Call *call;

	assert_non_null(body);
	grpc_prefix(body, (uint32_t)size);
	if (size > 0)
		memcpy(body + GRPC_PREFIX_SIZE, message, size);
	call = begin_raw(f, request, body, GRPC_PREFIX_SIZE + size);
	free(body);
	return call;
}

static inline void check_ok(const Call *call, const void *message, size_t size) {
	uint8_t prefix[GRPC_PREFIX_SIZE];

	assert_true(call->closed);
	assert_int_equal(call->error, NGHTTP2_NO_ERROR);
	assert_string_equal(call->http_status, "200");
	assert_string_equal(call->grpc_status, "0");
	assert_string_equal(call->text, "");
	assert_int_equal(call->reply_size, GRPC_PREFIX_SIZE + size);
	grpc_prefix(prefix, (uint32_t)size);
	assert_memory_equal(call->reply, prefix, sizeof(prefix));
	if (size > 0)
		assert_memory_equal(call->reply + GRPC_PREFIX_SIZE, message, size);
}

/* --- the fixture */

static void make_client(Fixture *f) {
	nghttp2_session_callbacks *callbacks;
	nghttp2_option *option;

	assert_int_equal(nghttp2_session_callbacks_new(&callbacks), 0);
	assert_int_equal(nghttp2_option_new(&option), 0);
	nghttp2_session_callbacks_set_on_header_callback(callbacks, client_header);
	nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, client_data);
	nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, client_close);
	nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, client_frame);
	nghttp2_option_set_no_auto_window_update(option, 1);
	assert_int_equal(nghttp2_session_client_new2(&f->client, callbacks, f, option), 0);
	nghttp2_session_callbacks_del(callbacks);
	nghttp2_option_del(option);
	assert_int_equal(nghttp2_submit_settings(f->client, NGHTTP2_FLAG_NONE, NULL, 0), 0);
}

static int setup(void **state) {
	Fixture *f = calloc(1, sizeof(*f));

	assert_non_null(f);
	f->limits = grpc_limits_default;
	f->budget.limit = 32 << 20;
	f->now = 1000;
	f->server_alive = true;
	assert_int_equal(grpc_session_new(&f->session, &f->limits, &f->budget, &handler, f, f->now), 0);
	make_client(f);
	*state = f;
	return 0;
}

static int teardown(void **state) {
	Fixture *f = *state;

	grpc_session_free(f->session);
	assert_int_equal(f->budget.used, 0);
	assert_int_equal(f->n_handled, 0);
	nghttp2_session_del(f->client);
	for (size_t i = 0; i < f->n_calls; i++) {
		free(f->calls[i].request);
		free(f->calls[i].reply);
	}
	free(f);
	return 0;
}
