/* SPDX-License-Identifier: Apache-2.0 */

/* What gRPC puts on top of HTTP/2, as functions of bytes. Nothing here is random. */

#include "tools/gateway/grpc-wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <zlib.h>

static void test_encoding(void **state) {
	(void)state;
	assert_int_equal(grpc_encoding("identity", 8), GRPC_ENCODING_IDENTITY);
	assert_int_equal(grpc_encoding("gzip", 4), GRPC_ENCODING_GZIP);
	assert_int_equal(grpc_encoding("deflate", 7), GRPC_ENCODING_DEFLATE);
	assert_int_equal(grpc_encoding("gzip2", 5), GRPC_ENCODING_UNKNOWN);
	assert_int_equal(grpc_encoding("gzi", 3), GRPC_ENCODING_UNKNOWN);
	assert_int_equal(grpc_encoding("snappy", 6), GRPC_ENCODING_UNKNOWN);
	assert_int_equal(grpc_encoding("", 0), GRPC_ENCODING_UNKNOWN);
}

static void test_content_type(void **state) {
	static const struct {
		const char *value;
		bool yes;
	} cases[] = {
		{ "application/grpc", true },
		{ "application/grpc+proto", true },
		{ "application/grpc;charset=utf-8", true },
		{ "Application/GRPC", true },
		{ "application/grpc-web", false },
		{ "application/json", false },
		{ "application/grp", false },
		{ "", false },
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
		assert_int_equal(grpc_content_type(cases[i].value, strlen(cases[i].value)), cases[i].yes);
}

static void test_timeout(void **state) {
	static const struct {
		const char *value;
		bool yes;
		uint64_t ms;
	} cases[] = {
		{ "1H", true, 3600000 },    { "2M", true, 120000 },
		{ "3S", true, 3000 },	    { "4m", true, 4 },
		{ "0m", true, 0 },	    { "1u", true, 1 },
		{ "1001u", true, 2 },	    { "1n", true, 1 },
		{ "1000001n", true, 2 },    { "99999999H", true, 99999999ull * 3600 * 1000 },
		{ "100000000S", false, 0 }, { "S", false, 0 },
		{ "", false, 0 },	    { "5", false, 0 },
		{ "5s", false, 0 },	    { "-5S", false, 0 },
		{ "+5S", false, 0 },	    { " 5S", false, 0 },
		{ "5 S", false, 0 },	    { "0x5S", false, 0 },
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		uint64_t ms = 0;

		assert_int_equal(grpc_timeout(cases[i].value, strlen(cases[i].value), &ms), cases[i].yes);
		assert_int_equal(ms, cases[i].ms);
	}
}

static void test_text(void **state) {
	static const struct {
		const char *text, *encoded;
	} cases[] = {
		{ "", "" },	      { "plain 'text' ~", "plain 'text' ~" },
		{ "100%", "100%25" }, { "a\nb\tc", "a%0Ab%09c" },
		{ "\x7f", "%7F" },    { "\xc3\xa9", "%C3%A9" },
	};
	char out[GRPC_TEXT_ENCODED_MAX], text[GRPC_TEXT_MAX + 3];

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		size_t n = grpc_text_encode(cases[i].text, strlen(cases[i].text), out);

		assert_int_equal(n, strlen(cases[i].encoded));
		assert_memory_equal(out, cases[i].encoded, n);
	}

	/* the longest, each byte of which becomes three */
	memset(text, '%', sizeof(text));
	assert_int_equal(grpc_text_encode(text, sizeof(text), out), sizeof(out));

	/* the cut would be inside of a character of three bytes, which goes whole */
	memset(text, 'a', sizeof(text));
	memcpy(text + GRPC_TEXT_MAX - 2, "\xe2\x82\xac", 3);
	assert_int_equal(grpc_text_encode(text, sizeof(text), out), GRPC_TEXT_MAX - 2);
}

static void test_prefix(void **state) {
	static const uint8_t want[GRPC_PREFIX_SIZE] = { 0, 0x12, 0x34, 0x56, 0x78 };
	uint8_t prefix[GRPC_PREFIX_SIZE];

	(void)state;
	grpc_prefix(prefix, 0x12345678);
	assert_memory_equal(prefix, want, sizeof(want));
}

/* compresses @size bytes; the caller frees what is returned */
static uint8_t *compressed(GrpcEncoding encoding, const void *data, size_t size, size_t *ret_size) {
	z_stream z = { .next_in = (Bytef *)data, .avail_in = (uInt)size };
	size_t room = size + 1024;
	uint8_t *out = malloc(room);

	assert_non_null(out);
	assert_int_equal(deflateInit2(&z, Z_BEST_COMPRESSION, Z_DEFLATED, encoding == GRPC_ENCODING_GZIP ? 15 + 16 : 15,
				      8, Z_DEFAULT_STRATEGY),
			 Z_OK);
	z.next_out = out;
	z.avail_out = (uInt)room;
	assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
	*ret_size = z.total_out;
	assert_int_equal(deflateEnd(&z), Z_OK);
	return out;
}

static void check_inflate(GrpcEncoding encoding, size_t size) {
	uint8_t *data = malloc(size + 1), *packed, *again = NULL;
	size_t packed_size, again_size = 0;

	assert_non_null(data);
	for (size_t i = 0; i < size; i++)
		data[i] = (uint8_t)(i * i >> 3);
	packed = compressed(encoding, data, size, &packed_size);

	assert_int_equal(grpc_inflate(encoding, packed, packed_size, size, &again, &again_size), 0);
	assert_int_equal(again_size, size);
	assert_memory_equal(again, data, size);
	free(again);
	if (size > 0)
		assert_int_equal(grpc_inflate(encoding, packed, packed_size, size - 1, &again, &again_size),
				 GRPC_INFLATE_E_TOO_LARGE);

	/* every cut of it is refused, and so is anything behind it */
	for (size_t cut = 0; cut < packed_size; cut += 1 + packed_size / 64)
		assert_int_equal(grpc_inflate(encoding, packed, cut, size, &again, &again_size), GRPC_INFLATE_E_BAD);
	packed[packed_size] = 0;
	assert_int_equal(grpc_inflate(encoding, packed, packed_size + 1, size, &again, &again_size),
			 GRPC_INFLATE_E_BAD);
	packed[packed_size / 2] ^= 0x55;
	packed[packed_size - 3] ^= 0x55;
	assert_true(grpc_inflate(encoding, packed, packed_size, size, &again, &again_size) > 0);
	free(packed);
	free(data);
}

static void test_inflate(void **state) {
	static const size_t sizes[] = { 0, 1, 1023, 1024, 1025, 70000 };

	(void)state;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		check_inflate(GRPC_ENCODING_GZIP, sizes[i]);
		check_inflate(GRPC_ENCODING_DEFLATE, sizes[i]);
	}
}

static void test_inflate_wrong_encoding(void **state) {
	uint8_t *packed, *again;
	size_t packed_size, again_size;

	(void)state;
	packed = compressed(GRPC_ENCODING_GZIP, "abc", 3, &packed_size);
	assert_int_equal(grpc_inflate(GRPC_ENCODING_DEFLATE, packed, packed_size, 100, &again, &again_size),
			 GRPC_INFLATE_E_BAD);
	assert_int_equal(grpc_inflate(GRPC_ENCODING_IDENTITY, packed, packed_size, 100, &again, &again_size),
			 GRPC_INFLATE_E_BAD);
	free(packed);
}

/* 64 MiB of zeros in 64 kB: what is kept is bounded, and so is the work */
static void test_inflate_bomb(void **state) {
	const size_t size = 64 << 20;
	uint8_t *data = calloc(1, size), *packed, *again = NULL;
	size_t packed_size, again_size;

	(void)state;
	assert_non_null(data);
	packed = compressed(GRPC_ENCODING_GZIP, data, size, &packed_size);
	free(data);
	assert_true(packed_size < 128 << 10);
	assert_int_equal(grpc_inflate(GRPC_ENCODING_GZIP, packed, packed_size, 65536, &again, &again_size),
			 GRPC_INFLATE_E_TOO_LARGE);
	free(packed);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_encoding),
		cmocka_unit_test(test_content_type),
		cmocka_unit_test(test_timeout),
		cmocka_unit_test(test_text),
		cmocka_unit_test(test_prefix),
		cmocka_unit_test(test_inflate),
		cmocka_unit_test(test_inflate_wrong_encoding),
		cmocka_unit_test(test_inflate_bomb),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
