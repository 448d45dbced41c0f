/* SPDX-License-Identifier: Apache-2.0 */

/* GrpcSession with a client that means well, or at least speaks HTTP/2. Nothing here is random. */

#include "grpc-fixture.h"

#include <zlib.h>

static void check_status(const Call *call, int status, const char *text) {
	char digits[8];

	(void)snprintf(digits, sizeof(digits), "%d", status);
	assert_true(call->closed);
	assert_string_equal(call->http_status, "200");
	assert_string_equal(call->grpc_status, digits);
	if (text)
		assert_string_equal(call->text, text);
	assert_int_equal(call->reply_size, 0);
}

/* the oldest call that was handed over is answered */
static void answer_first(Fixture *f) {
	GrpcCall *call;

	assert_true(f->n_handled > 0);
	call = f->handled[0];
	memmove(f->handled, f->handled + 1, --f->n_handled * sizeof(*f->handled));
	answer(f, call);
}

static uint8_t *pattern(size_t size) {
	uint8_t *data = malloc(size + 1);

	assert_non_null(data);
	for (size_t i = 0; i < size; i++)
		data[i] = (uint8_t)(i ^ i >> 8);
	return data;
}

static void test_echo(void **state) {
	static const size_t sizes[] = { 0, 1, 16379, 16384, 16385, 65535, MESSAGE_MAX };
	Fixture *f = *state;

	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		uint8_t *data = pattern(sizes[i]);
		Call *call = begin(f, (Request){ 0 }, data, sizes[i]);

		pump(f);
		check_ok(call, data, sizes[i]);
		assert_string_equal(call->accept, GRPC_ENCODINGS);
		free(data);
	}
	assert_int_equal(f->budget.used, 0);
	assert_int_equal(grpc_session_calls(f->session), 0);
}

static void test_status_text(void **state) {
	Fixture *f = *state;
	Call *call = begin(f, (Request){ .authorization = "refuse" }, "x", 1);

	pump(f);
	check_status(call, GRPC_PERMISSION_DENIED, "not 100%25 allowed%0A");
}

static void test_unknown_method(void **state) {
	Fixture *f = *state;
	char path[400] = "/test/";
	Call *call = begin(f, (Request){ .path = "/test/none" }, "x", 1);

	pump(f);
	check_status(call, GRPC_UNIMPLEMENTED, "there is no method /test/none");
	memset(path + 6, 'x', sizeof(path) - 7);
	call = begin(f, (Request){ .path = path }, "x", 1);
	pump(f);
	check_status(call, GRPC_UNIMPLEMENTED, NULL);
	assert_int_equal(f->n_called, 0);
}

static void test_not_grpc(void **state) {
	Fixture *f = *state;
	Call *get = begin(f, (Request){ .method = "GET" }, "x", 1);
	Call *json = begin(f, (Request){ .content_type = "application/json" }, "{}", 2);

	pump(f);
	assert_string_equal(get->http_status, "405");
	assert_string_equal(json->http_status, "415");
	assert_string_equal(get->grpc_status, "");
	assert_true(get->closed && json->closed);
	assert_int_equal(f->n_called, 0);
}

static void test_framing(void **state) {
	Fixture *f = *state;
	static const struct {
		const char *body;
		size_t size;
		const char *encoding;
		int status;
	} cases[] = {
		{ "", 0, NULL, GRPC_INTERNAL },
		{ "\0\0\0\0", 4, NULL, GRPC_INTERNAL },
		{ "\0\0\0\0\2a", 6, NULL, GRPC_INTERNAL },
		{ "\0\0\0\0\1ab", 7, NULL, GRPC_INTERNAL },
		{ "\0\0\0\0\1a\0\0\0\0\1a", 12, NULL, GRPC_INTERNAL },
		{ "\2\0\0\0\1a", 6, NULL, GRPC_INTERNAL },
		{ "\1\0\0\0\1a", 6, NULL, GRPC_INTERNAL },
		{ "\1\0\0\0\1a", 6, "identity", GRPC_INTERNAL },
		{ "\1\0\0\0\1a", 6, "gzip", GRPC_INTERNAL },
		{ "\0\0\0\0\1a", 6, "snappy", GRPC_UNIMPLEMENTED },
		{ "\0\0\1\0\1a", 6, NULL, GRPC_RESOURCE_EXHAUSTED },
		{ "\0\377\377\377\377a", 6, NULL, GRPC_RESOURCE_EXHAUSTED },
		/* the flag may say that a message is not compressed, whatever the encoding */
		{ "\0\0\0\0\1a", 6, "gzip", GRPC_OK },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		Call *call = begin_raw(f, (Request){ .encoding = cases[i].encoding }, cases[i].body, cases[i].size);

		pump(f);
		if (cases[i].status == GRPC_OK)
			check_ok(call, "a", 1);
		else
			check_status(call, cases[i].status, NULL);
		assert_string_equal(call->accept, GRPC_ENCODINGS);
	}
	assert_true(f->server_alive);
	assert_int_equal(f->budget.used, 0);
}

/* one is refused as soon as its length is known, and its client need not send the rest */
static void test_too_large_is_refused_early(void **state) {
	Fixture *f = *state;
	uint8_t *data = pattern(MESSAGE_MAX + 1);
	Call *call = begin(f, (Request){ 0 }, data, MESSAGE_MAX + 1);

	pump(f);
	check_status(call, GRPC_RESOURCE_EXHAUSTED, "Received message larger than max (65537 vs. 65536)");
	assert_true(call->request_sent < call->request_size);
	assert_int_equal(call->error, NGHTTP2_NO_ERROR);
	call = begin(f, (Request){ 0 }, data, MESSAGE_MAX);
	pump(f);
	check_ok(call, data, MESSAGE_MAX);
	free(data);
}

static Call *begin_gzip(Fixture *f, const void *data, size_t size) {
	z_stream z = { .next_in = (Bytef *)data, .avail_in = (uInt)size };
	uint8_t *body = malloc(size / 2 + 1024);
	Call *call;

	assert_non_null(body);
	assert_int_equal(deflateInit2(&z, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
	z.next_out = body + GRPC_PREFIX_SIZE;
	z.avail_out = (uInt)(size / 2 + 1000);
	assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
	grpc_prefix(body, (uint32_t)z.total_out);
	body[0] = 1;
	call = begin_raw(f, (Request){ .encoding = "gzip" }, body, GRPC_PREFIX_SIZE + z.total_out);
	assert_int_equal(deflateEnd(&z), Z_OK);
	free(body);
	return call;
}

static void test_compressed(void **state) {
	Fixture *f = *state;
	uint8_t *data = calloc(1, 8 << 20);
	Call *call;

	assert_non_null(data);
	call = begin_gzip(f, data, MESSAGE_MAX);
	pump(f);
	check_ok(call, data, MESSAGE_MAX);
	call = begin_gzip(f, data, 8 << 20);
	pump(f);
	check_status(call, GRPC_RESOURCE_EXHAUSTED, NULL);
	free(data);
}

static void test_metadata_limit(void **state) {
	Fixture *f = *state;
	char *extra = malloc(20001);
	Call *call;

	assert_non_null(extra);
	memset(extra, 'm', 20000);
	extra[20000] = 0;
	call = begin(f, (Request){ .extra = extra }, "x", 1);
	pump(f);
	check_status(call, GRPC_RESOURCE_EXHAUSTED, NULL);
	extra[15000] = 0;
	call = begin(f, (Request){ .extra = extra }, "x", 1);
	pump(f);
	check_ok(call, "x", 1);
	free(extra);
}

static void test_later(void **state) {
	Fixture *f = *state;

	f->later = true;
	/* the client hears how many calls it may make at once */
	pump(f);
	for (int i = 0; i < 200; i++)
		(void)begin(f, (Request){ 0 }, &i, sizeof(i));
	pump(f);
	assert_int_equal(f->n_handled, 32);
	for (int i = 0; i < 200; i++) {
		assert_int_equal(grpc_session_calls(f->session), 200 - i < 32 ? 200 - i : 32);
		answer_first(f);
		pump(f);
		check_ok(&f->calls[i], &i, sizeof(i));
	}
	assert_int_equal(f->n_called, 200);
}

static void test_cancelled_by_client(void **state) {
	Fixture *f = *state;
	Call *call;

	f->later = true;
	call = begin(f, (Request){ 0 }, "x", 1);
	(void)begin(f, (Request){ 0 }, "y", 1);
	pump(f);
	assert_int_equal(f->n_handled, 2);
	assert_int_equal(nghttp2_submit_rst_stream(f->client, 0, call->stream, NGHTTP2_CANCEL), 0);
	pump(f);
	assert_int_equal(f->n_cancelled, 1);
	assert_int_equal(f->n_handled, 1);
	answer_first(f);
	pump(f);
	check_ok(&f->calls[1], "y", 1);
}

static void test_cancelled_by_end_of_connection(void **state) {
	Fixture *f = *state;

	f->later = true;
	(void)begin(f, (Request){ 0 }, "x", 1);
	pump(f);
	assert_int_equal(f->n_handled, 1);
	f->session = grpc_session_free(f->session);
	assert_int_equal(f->n_cancelled, 1);
}

static void test_deadline(void **state) {
	Fixture *f = *state;
	Call *call;

	f->later = true;
	call = begin(f, (Request){ .timeout = "50m" }, "x", 1);
	pump(f);
	assert_int_equal(grpc_session_deadline(f->session), f->now + 50);
	f->now += 49;
	assert_true(grpc_session_tick(f->session, f->now));
	pump(f);
	assert_false(call->closed);
	f->now++;
	assert_true(grpc_session_tick(f->session, f->now));
	pump(f);
	check_status(call, GRPC_DEADLINE_EXCEEDED, "Deadline Exceeded");
	assert_int_equal(f->n_cancelled, 1);

	call = begin(f, (Request){ .timeout = "soon" }, "x", 1);
	pump(f);
	check_status(call, GRPC_INTERNAL, NULL);
}

/* a handler may take as long as it wants, when the client set no deadline */
static void test_handler_takes_long(void **state) {
	Fixture *f = *state;
	Call *call;

	f->later = true;
	call = begin(f, (Request){ 0 }, "x", 1);
	pump(f);
	f->now += 3600 * 1000;
	assert_true(grpc_session_tick(f->session, f->now));
	answer_first(f);
	pump(f);
	check_ok(call, "x", 1);
}

static void test_preface_deadline(void **state) {
	Fixture *f = *state;

	assert_int_equal(grpc_session_deadline(f->session), f->now + f->limits.preface_ms);
	assert_true(grpc_session_tick(f->session, f->now + f->limits.preface_ms - 1));
	assert_false(grpc_session_tick(f->session, f->now + f->limits.preface_ms));
}

/* the deadline is absolute: a byte now and then does not move it */
static void test_request_deadline(void **state) {
	Fixture *f = *state;
	Call *call;

	call = begin_raw(f, (Request){ .hold_end = true }, "\0\0\0\0\5a", 6);
	pump(f);
	f->now += f->limits.request_ms - 1;
	assert_true(grpc_session_tick(f->session, f->now));
	pump(f);
	assert_false(call->closed);
	f->now++;
	assert_true(grpc_session_tick(f->session, f->now));
	pump(f);
	check_status(call, GRPC_DEADLINE_EXCEEDED, NULL);
}

static void test_idle(void **state) {
	Fixture *f = *state;

	(void)begin(f, (Request){ 0 }, "x", 1);
	pump(f);
	f->now += f->limits.idle_ms - 1;
	assert_true(grpc_session_tick(f->session, f->now));
	pump(f);
	assert_true(f->server_alive);
	f->now++;
	assert_true(grpc_session_tick(f->session, f->now));
	pump(f);
	assert_false(f->server_alive);
	assert_true(f->goaway);
	assert_int_equal(f->goaway_error, NGHTTP2_NO_ERROR);
}

static void test_shutdown(void **state) {
	Fixture *f = *state;
	Call *call;

	f->later = true;
	call = begin(f, (Request){ 0 }, "x", 1);
	pump(f);
	grpc_session_shutdown(f->session);
	pump(f);
	assert_true(f->goaway);
	assert_true(f->server_alive);
	answer_first(f);
	pump(f);
	check_ok(call, "x", 1);
	assert_false(f->server_alive);
}

/* long messages go one after the other through what a connection may hold, and all arrive */
static void test_long_messages_wait(void **state) {
	Fixture *f = *state;
	const size_t size = 700000;
	uint8_t *data = pattern(size);

	for (int i = 0; i < 8; i++)
		(void)begin(f, (Request){ .path = "/test/long" }, data, size);
	while (pump_once(f))
		assert_true(f->budget.used < f->limits.connection_bytes + size + 32 * 65536);
	for (int i = 0; i < 8; i++)
		check_ok(&f->calls[i], data, size);
	free(data);
}

/* one that is longer than what a connection may hold is taken when it is alone */
static void test_longest_message(void **state) {
	Fixture *f = *state;
	uint8_t *data = pattern(LONG_MESSAGE_MAX);
	Call *first = begin(f, (Request){ .path = "/test/long" }, data, LONG_MESSAGE_MAX);
	Call *second = begin(f, (Request){ .path = "/test/long" }, data, LONG_MESSAGE_MAX);

	pump(f);
	check_ok(first, data, LONG_MESSAGE_MAX);
	check_ok(second, data, LONG_MESSAGE_MAX);
	free(data);
}

static void test_process_budget(void **state) {
	Fixture *f = *state;
	uint8_t *data = pattern(MESSAGE_MAX);
	Call *call;

	f->budget.limit = 80000;
	call = begin(f, (Request){ 0 }, data, MESSAGE_MAX);
	pump(f);
	check_status(call, GRPC_RESOURCE_EXHAUSTED, NULL);

	/* the request fits, its reply does not */
	call = begin(f, (Request){ 0 }, data, 50000);
	pump(f);
	check_status(call, GRPC_RESOURCE_EXHAUSTED, "no room");

	/* others hold most of it */
	f->budget.used += 70000;
	call = begin(f, (Request){ 0 }, data, 1000);
	pump(f);
	check_ok(call, data, 1000);
	f->budget.used -= 70000;
	call = begin(f, (Request){ 0 }, data, 1000);
	pump(f);
	check_ok(call, data, 1000);
	free(data);
}

/* a client that opens no window: a bounded number of replies is made, and none for longer than a request may take */
static void test_window_0(void **state) {
	Fixture *f = *state;

	f->deaf = true;
	f->reply_size = 300000;
	for (int i = 0; i < 100; i++)
		(void)begin(f, (Request){ 0 }, "x", 1);
	pump(f);
	assert_true(f->budget.used < f->limits.connection_bytes + 400000);
	assert_true(f->n_called < 8);
	for (int i = 0; i < 100 && grpc_session_calls(f->session) > 0; i++) {
		f->now += f->limits.request_ms;
		if (!grpc_session_tick(f->session, f->now))
			break;
		pump(f);
		assert_true(f->budget.used < f->limits.connection_bytes + 400000);
	}
	assert_int_equal(grpc_session_calls(f->session), 0);
	assert_int_equal(f->budget.used, 0);
}

/* a peer that does not read its socket: input stops, and the connection ends */
static void test_unread_output(void **state) {
	Fixture *f = *state;
	const uint8_t *data;
	size_t size;
	ssize_t n;

	f->reply_size = 300000;
	for (int i = 0; i < 30; i++)
		(void)begin(f, (Request){ 0 }, "x", 1);
	while (grpc_session_wants_input(f->session) && (n = nghttp2_session_mem_send(f->client, &data)) > 0) {
		assert_true(grpc_session_receive(f->session, data, (size_t)n, f->now));
		run(f);
		assert_true(grpc_session_output(f->session, &data, &size));
	}
	assert_false(grpc_session_wants_input(f->session));
	assert_true(grpc_session_tick(f->session, f->now + f->limits.request_ms - 1));
	assert_false(grpc_session_tick(f->session, f->now + f->limits.request_ms));
}

/* a body of @n messages, the sizes of which grow by @step */
static uint8_t *stream_body(size_t n, size_t step, size_t *ret_size) {
	size_t size = 0;
	uint8_t *body;

	for (size_t i = 0; i < n; i++)
		size += GRPC_PREFIX_SIZE + i * step;
	body = malloc(size + 1);
	assert_non_null(body);
	*ret_size = size;
	size = 0;
	for (size_t i = 0; i < n; i++) {
		grpc_prefix(body + size, (uint32_t)(i * step));
		memset(body + size + GRPC_PREFIX_SIZE, (int)('a' + i % 26), i * step);
		size += GRPC_PREFIX_SIZE + i * step;
	}
	return body;
}

static void check_stream(const Call *call, const uint8_t *body, size_t size) {
	assert_true(call->closed);
	assert_int_equal(call->error, NGHTTP2_NO_ERROR);
	assert_string_equal(call->http_status, "200");
	assert_string_equal(call->grpc_status, "0");
	assert_int_equal(call->reply_size, size);
	assert_memory_equal(call->reply, body, size);
}

static void test_stream(void **state) {
	static const size_t steps[] = { 0, 1, 100, 2000, 20000 };
	Fixture *f = *state;

	for (size_t i = 0; i < sizeof(steps) / sizeof(*steps); i++) {
		size_t n = steps[i] > 2000 ? 4 : 30, size;
		uint8_t *body = stream_body(n, steps[i], &size);
		Call *call = begin_raw(f, (Request){ .path = "/test/stream" }, body, size);

		f->n_called = 0;
		pump(f);
		check_stream(call, body, size);
		assert_int_equal(f->n_called, n);
		free(body);
	}
	assert_int_equal(f->budget.used, 0);
}

/* one message at a time, in order; what comes meanwhile is no more than a window */
static void test_stream_later(void **state) {
	Fixture *f = *state;
	size_t size;
	uint8_t *body = stream_body(60, 1000, &size);
	Call *call = begin_raw(f, (Request){ .path = "/test/stream" }, body, size);

	f->later = true;
	pump(f);
	for (int i = 0; i < 60; i++) {
		assert_int_equal(f->n_handled, 1);
		assert_true(f->budget.used < 2 * 65536 + 60000);
		assert_false(call->closed);
		answer_first(f);
		pump(f);
	}
	check_stream(call, body, size);
	free(body);
}

static void test_stream_without_messages(void **state) {
	Fixture *f = *state;
	Call *call = begin_raw(f, (Request){ .path = "/test/stream" }, "", 0);

	pump(f);
	check_status(call, GRPC_OK, "");
	call = begin_raw(f, (Request){ .path = "/test/stream" }, "\0\0\0\0\2a", 6);
	pump(f);
	check_status(call, GRPC_INTERNAL, NULL);
	assert_int_equal(f->n_called, 0);
}

/* a stream may be idle for long, and is then neither a call under way nor for ever */
static void test_stream_idle(void **state) {
	Fixture *f = *state;
	Call *call = begin_raw(f, (Request){ .path = "/test/stream", .hold_end = true }, "\0\0\0\0\1a", 6);

	pump(f);
	assert_int_equal(call->reply_size, 6);
	assert_int_equal(grpc_session_calls(f->session), 0);
	f->now += f->limits.idle_ms - 1;
	assert_true(grpc_session_tick(f->session, f->now));
	pump(f);
	assert_false(call->closed);
	f->now++;
	assert_true(grpc_session_tick(f->session, f->now));
	pump(f);
	assert_true(call->closed);
	assert_string_equal(call->grpc_status, "14");
}

static void test_stream_cancelled(void **state) {
	Fixture *f = *state;
	Call *call;

	f->later = true;
	call = begin_raw(f, (Request){ .path = "/test/stream", .hold_end = true }, "\0\0\0\0\1a\0\0\0\0\1b", 12);
	pump(f);
	assert_int_equal(f->n_handled, 1);
	assert_int_equal(nghttp2_submit_rst_stream(f->client, 0, call->stream, NGHTTP2_CANCEL), 0);
	pump(f);
	assert_int_equal(f->n_cancelled, 1);
	assert_int_equal(f->budget.used, 0);
}

/* the message that did not all come when its time was over ends the stream */
static void test_stream_deadline(void **state) {
	Fixture *f = *state;
	Call *call = begin_raw(f, (Request){ .path = "/test/stream", .hold_end = true }, "\0\0\0\0\1a\0\0\0", 9);

	pump(f);
	assert_int_equal(call->reply_size, 6);
	f->now += f->limits.request_ms;
	assert_true(grpc_session_tick(f->session, f->now));
	pump(f);
	assert_true(call->closed);
	assert_string_equal(call->grpc_status, "4");
}

static void test_stream_shutdown(void **state) {
	Fixture *f = *state;
	Call *call = begin_raw(f, (Request){ .path = "/test/stream", .hold_end = true }, "\0\0\0\0\1a", 6);

	pump(f);
	grpc_session_shutdown(f->session);
	pump(f);
	assert_true(call->closed);
	assert_string_equal(call->grpc_status, "14");
	assert_false(f->server_alive);
}

/* every amount of memory that nghttp2 may have too little: the connection ends, or the call goes through */
static void test_library_memory(void **state) {
	size_t n_through = 0;

	(void)state;
	for (size_t bytes = 0; bytes < 200000; bytes += 97) {
		const GrpcLimits *limits;
		Fixture *f = calloc(1, sizeof(*f));
		void *pointer = f;
		Call *call;

		assert_non_null(f);
		f->limits = grpc_limits_default;
		f->limits.library_bytes = bytes;
		f->budget.limit = 1 << 20;
		f->server_alive = true;
		limits = &f->limits;
		make_client(f);
		if (grpc_session_new(&f->session, limits, &f->budget, &handler, f, 0) == 0) {
			call = begin(f, (Request){ 0 }, "x", 1);
			pump(f);
			if (call->closed && call->error == NGHTTP2_NO_ERROR) {
				check_ok(call, "x", 1);
				n_through++;
			}
		}
		assert_int_equal(teardown(&pointer), 0);
	}
	assert_true(n_through > 0);
}

int main(void) {
#define TEST(_name) cmocka_unit_test_setup_teardown(_name, setup, teardown)
	const struct CMUnitTest tests[] = {
		TEST(test_echo),
		TEST(test_status_text),
		TEST(test_unknown_method),
		TEST(test_not_grpc),
		TEST(test_framing),
		TEST(test_too_large_is_refused_early),
		TEST(test_compressed),
		TEST(test_metadata_limit),
		TEST(test_later),
		TEST(test_cancelled_by_client),
		TEST(test_cancelled_by_end_of_connection),
		TEST(test_deadline),
		TEST(test_handler_takes_long),
		TEST(test_preface_deadline),
		TEST(test_request_deadline),
		TEST(test_idle),
		TEST(test_shutdown),
		TEST(test_long_messages_wait),
		TEST(test_longest_message),
		TEST(test_process_budget),
		TEST(test_window_0),
		TEST(test_unread_output),
		TEST(test_stream),
		TEST(test_stream_later),
		TEST(test_stream_without_messages),
		TEST(test_stream_idle),
		TEST(test_stream_cancelled),
		TEST(test_stream_deadline),
		TEST(test_stream_shutdown),
		cmocka_unit_test(test_library_memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
