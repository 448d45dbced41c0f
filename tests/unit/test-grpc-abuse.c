/* SPDX-License-Identifier: Apache-2.0 */

/* GrpcSession with a peer that sends frames as no client does. Nothing here is random. */

#include "grpc-fixture.h"

typedef struct Frames {
	uint8_t data[70000];
	size_t size;
} Frames;

static void put_frame(Frames *frames, uint8_t type, uint8_t flags, uint32_t stream, const void *payload, size_t size) {
	const uint8_t head[9] = {
		(uint8_t)(size >> 16),	 (uint8_t)(size >> 8),	  (uint8_t)size,	  type,		  flags,
		(uint8_t)(stream >> 24), (uint8_t)(stream >> 16), (uint8_t)(stream >> 8), (uint8_t)stream
	};

	assert_true(frames->size + sizeof(head) + size <= sizeof(frames->data));
	memcpy(frames->data + frames->size, head, sizeof(head));
	if (size > 0)
		memcpy(frames->data + frames->size + sizeof(head), payload, size);
	frames->size += sizeof(head) + size;
}

/* a complete header block of a call, without the dynamic table */
static size_t put_block(uint8_t *block) {
	static const char *const fields[][2] = {
		{ ":method", "POST" },
		{ ":scheme", "http" },
		{ ":path", "/test/echo" },
		{ ":authority", "a" },
		{ "content-type", "application/grpc" },
	};
	size_t n = 0;

	for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++) {
		block[n++] = 0;
		for (int j = 0; j < 2; j++) {
			block[n++] = (uint8_t)strlen(fields[i][j]);
			memcpy(block + n, fields[i][j], strlen(fields[i][j]));
			n += strlen(fields[i][j]);
		}
	}
	return n;
}

/* sends @frames and forgets the answers, as a hostile client does; false once the connection is of no more use */
static bool attack(Fixture *f, Frames *frames, bool read) {
	const uint8_t *data;
	size_t size;
	bool alive;

	alive = grpc_session_receive(f->session, frames->data, frames->size, f->now);
	run(f);
	frames->size = 0;
	while (read) {
		alive = grpc_session_output(f->session, &data, &size) && alive;
		if (size == 0)
			break;
		grpc_session_sent(f->session, size, f->now);
		run(f);
	}
	return alive;
}

static void put_preface(Frames *frames) {
	memcpy(frames->data, NGHTTP2_CLIENT_MAGIC, NGHTTP2_CLIENT_MAGIC_LEN);
	frames->size = NGHTTP2_CLIENT_MAGIC_LEN;
	put_frame(frames, NGHTTP2_SETTINGS, 0, 0, NULL, 0);
}

typedef enum Flood {
	FLOOD_RESET,
	FLOOD_MADE_RESET,
	FLOOD_PING,
	FLOOD_SETTINGS,
	FLOOD_EMPTY_DATA,
	FLOOD_PRIORITY,
	FLOOD_CONTINUATION,
	FLOOD_REFUSED,
} Flood;

static void put_flood(Frames *frames, Flood flood, uint32_t i) {
	static const uint8_t zero[5];
	uint8_t block[256];
	size_t n = put_block(block);
	uint32_t stream = 2 * i + 1;

	switch (flood) {
	case FLOOD_RESET:
		put_frame(frames, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, stream, block, n);
		put_frame(frames, NGHTTP2_RST_STREAM, 0, stream, "\0\0\0\10", 4);
		break;
	case FLOOD_MADE_RESET:
		put_frame(frames, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, stream, block, n);
		put_frame(frames, NGHTTP2_WINDOW_UPDATE, 0, stream, "\177\377\377\377", 4);
		break;
	case FLOOD_PING:
		put_frame(frames, NGHTTP2_PING, 0, 0, "12345678", 8);
		break;
	case FLOOD_SETTINGS:
		put_frame(frames, NGHTTP2_SETTINGS, 0, 0, NULL, 0);
		break;
	case FLOOD_EMPTY_DATA:
		if (i == 0)
			put_frame(frames, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1, block, n);
		put_frame(frames, NGHTTP2_DATA, 0, 1, NULL, 0);
		break;
	case FLOOD_PRIORITY:
		put_frame(frames, NGHTTP2_PRIORITY, 0, stream, zero, 5);
		break;
	case FLOOD_CONTINUATION:
		put_frame(frames, i == 0 ? NGHTTP2_HEADERS : NGHTTP2_CONTINUATION, 0, 1, block, i == 0 ? n : 0);
		break;
	case FLOOD_REFUSED:
		put_frame(frames, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, stream, block, n);
		break;
	}
}

/* the connection ends before @most of them, and holds little until then */
static void check_flood(Flood flood, uint32_t most, bool read) {
	static Frames frames;
	Fixture *f;
	void *state;
	bool alive = true;
	uint32_t i = 0;

	assert_int_equal(setup(&state), 0);
	f = state;
	frames.size = 0;
	put_preface(&frames);
	while (alive && i < most) {
		while (frames.size < 8192)
			put_flood(&frames, flood, i++);
		alive = attack(f, &frames, read);
		assert_true(f->budget.used < 100000);
		/* what an owner does with a peer that does not read: nothing more is read from it either */
		if (!read && !grpc_session_wants_input(f->session))
			break;
	}
	assert_true(i < most);
	assert_int_equal(teardown(&state), 0);
}

static void test_floods(void **state) {
	(void)state;
	for (int read = 0; read < 2; read++) {
		check_flood(FLOOD_RESET, 1000, read);
		check_flood(FLOOD_MADE_RESET, 1000, read);
		check_flood(FLOOD_PING, 5000, read);
		check_flood(FLOOD_SETTINGS, 5000, read);
		check_flood(FLOOD_EMPTY_DATA, 5000, read);
		check_flood(FLOOD_PRIORITY, 5000, read);
		check_flood(FLOOD_REFUSED, 1000, read);
#ifdef HAVE_NGHTTP2_OPTION_SET_MAX_CONTINUATIONS
		check_flood(FLOOD_CONTINUATION, 5000, read);
#endif
	}
}

/* what is refused by rate is allowed by time: a client may ping for ever, in moderation */
static void test_moderate_pings(void **state) {
	Fixture *f = *state;
	static Frames frames;

	frames.size = 0;
	put_preface(&frames);
	for (int i = 0; i < 20000; i++) {
		put_frame(&frames, NGHTTP2_PING, 0, 0, "12345678", 8);
		f->now += 10;
		assert_true(attack(f, &frames, true));
	}
}

static void test_not_http2(void **state) {
	static const char text[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
	Fixture *f = *state;
	const uint8_t *data;
	size_t size;

	assert_false(grpc_session_receive(f->session, (const uint8_t *)text, sizeof(text) - 1, f->now));
	while (grpc_session_output(f->session, &data, &size))
		grpc_session_sent(f->session, size, f->now);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_floods),
		cmocka_unit_test_setup_teardown(test_moderate_pings, setup, teardown),
		cmocka_unit_test_setup_teardown(test_not_http2, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
