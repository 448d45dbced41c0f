/* SPDX-License-Identifier: Apache-2.0 */

/* Names: what is accepted, what is said about what is not, and a hash that spreads them. Nothing here is random. */

#include "wire/name.h"
#include "wire/protocol.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define EMPTY "the name is empty"
#define LONG "the name is longer than 255 bytes"
#define UTF8 "the name is not valid UTF-8"
#define CONTROL "the name has control characters"
#define THE_NAME 8 /* bytes of "the name" */

typedef struct Case {
	const char *name;
	size_t size;
	const char *why; /* NULL when the name is good */
} Case;

#define CASE(_name, _why) \
	{ _name, sizeof(_name) - 1, _why }

static const Case cases[] = {
	CASE("a", NULL),
	CASE("input_frame", NULL),
	CASE("a name with spaces / and: signs~", NULL),
	CASE("\xc2\xa0", NULL),		/* U+00A0, the first after the C1 controls */
	CASE("\xdf\xbf", NULL),		/* U+07FF */
	CASE("\xe0\xa0\x80", NULL),	/* U+0800 */
	CASE("\xed\x9f\xbf", NULL),	/* U+D7FF, the last before the surrogates */
	CASE("\xee\x80\x80", NULL),	/* U+E000, the first after them */
	CASE("\xef\xbf\xbf", NULL),	/* U+FFFF */
	CASE("\xf0\x90\x80\x80", NULL), /* U+10000 */
	CASE("\xf4\x8f\xbf\xbf", NULL), /* U+10FFFF */
	CASE("b\xc3\xbchne-\xe2\x82\xac-\xf0\x9f\x8e\x89", NULL),
	CASE("", EMPTY),
	CASE("\x80", UTF8),
	CASE("\xbf", UTF8),
	CASE("a\x80", UTF8),
	CASE("\xc0\x80", UTF8), /* overlong NUL */
	CASE("\xc1\xbf", UTF8), /* overlong U+007F */
	CASE("\xe0\x80\x80", UTF8),
	CASE("\xe0\x9f\xbf", UTF8), /* overlong U+07FF */
	CASE("\xf0\x80\x80\x80", UTF8),
	CASE("\xf0\x8f\xbf\xbf", UTF8), /* overlong U+FFFF */
	CASE("\xed\xa0\x80", UTF8),	/* U+D800 */
	CASE("\xed\xbf\xbf", UTF8),	/* U+DFFF */
	CASE("\xf4\x90\x80\x80", UTF8), /* U+110000 */
	CASE("\xf7\xbf\xbf\xbf", UTF8),
	CASE("\xf8\x88\x80\x80\x80", UTF8),
	CASE("\xfe", UTF8),
	CASE("\xff", UTF8),
	CASE("\xc3", UTF8), /* cut */
	CASE("\xe2\x82", UTF8),
	CASE("\xf0\x9f\x8e", UTF8),
	CASE("\xc3(", UTF8), /* not continued */
	CASE("\xe2(\xa1", UTF8),
	CASE("\xe2\x82(", UTF8),
	CASE("\xf0\x9f\x8e(", UTF8),
	CASE("\xf0\x9f\x8e\xc3", UTF8),
	CASE("\0", CONTROL),
	CASE("a\0b", CONTROL),
	CASE("a\n", CONTROL),
	CASE("\tb", CONTROL),
	CASE("\x1f", CONTROL),
	CASE("\x7f", CONTROL),
	CASE("\xc2\x80", CONTROL),
	CASE("\xc2\x9f", CONTROL),
	CASE("\x1b[2J\xff", UTF8),
};

/* in a heap block of its own size, so that a sanitizer sees the first byte too many */
static int check(const char *name, size_t size, const char **ret_why) {
	char *copy = malloc(size + (size == 0));
	int r;

	assert_non_null(copy);
	memcpy(copy, name, size);
	r = wire_name_check(copy, size, ret_why);
	free(copy);
	return r;
}

static void test_check(void **state) {
	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		const char *why = NULL;
		int r = check(cases[i].name, cases[i].size, &why);

		if (!cases[i].why) {
			assert_int_equal(r, 0);
			assert_null(why);
		} else {
			assert_int_equal(r, SHMB_E_BAD_NAME);
			assert_string_equal(why, cases[i].why);
		}
	}
}

/* what is no name is no key for the same reason, but for the empty one */
static void test_check_key(void **state) {
	char text[256];

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		const char *why = NULL;
		int r = wire_key_check(cases[i].name, cases[i].size, &why);

		if (!cases[i].why || !cases[i].size) {
			assert_int_equal(r, 0);
			assert_null(why);
			continue;
		}
		assert_int_equal(r, SHMB_E_BAD_NAME);
		assert_memory_equal(why, "the key", strlen("the key"));
		assert_string_equal(why + strlen("the key"), cases[i].why + THE_NAME);
	}
	memset(text, 'k', sizeof(text));
	assert_int_equal(wire_key_check(text, 255, &(const char *){ NULL }), 0);
	assert_int_equal(wire_key_check(text, 256, &(const char *){ NULL }), SHMB_E_BAD_NAME);
}

static void test_check_every_ascii_byte(void **state) {
	(void)state;
	for (int c = 0; c < 0x80; c++) {
		const char name[] = { 'a', (char)c };
		const char *why = NULL;

		assert_int_equal(check(name, 2, &why) == 0, c >= 0x20 && c != 0x7f);
	}
}

static void test_check_length(void **state) {
	char name[65535];
	const char *why = NULL;

	(void)state;
	memset(name, 'n', sizeof(name));
	assert_int_equal(check(name, WIRE_NAME_MAX, &why), 0);
	assert_int_equal(check(name, WIRE_NAME_MAX + 1, &why), SHMB_E_BAD_NAME);
	assert_string_equal(why, LONG);
	assert_int_equal(check(name, sizeof(name), &why), SHMB_E_BAD_NAME);
	assert_string_equal(why, LONG);
	/* the limit is in bytes, and may cut a character */
	memcpy(name + 254, "\xc3\xbc", 2);
	assert_int_equal(check(name, 254, &why), 0);
	assert_int_equal(check(name, 255, &why), SHMB_E_BAD_NAME);
	assert_string_equal(why, UTF8);
}

typedef struct Vector {
	size_t size;
	uint64_t plain; /* seed 0, 0 */
	uint64_t keyed; /* seed 0123456789abcdef, fedcba9876543210 */
} Vector;

/* of "abc…zabc…", computed by another program: the registry of a running broker is read by older libraries */
static const Vector vectors[] = {
	{ 0, UINT64_C(0x8f92ca2fc560d803), UINT64_C(0x452ccc4b930b4808) },
	{ 1, UINT64_C(0xfa4fe47546bb84b9), UINT64_C(0x38d274609665bd25) },
	{ 2, UINT64_C(0xa0795d1531eccc8f), UINT64_C(0x2a3194e83e2c4ce2) },
	{ 3, UINT64_C(0x2c616a20e77f22ca), UINT64_C(0xd1e8d43ac6a0672a) },
	{ 4, UINT64_C(0x9dc9344dddbcd241), UINT64_C(0x3d0e5de7de7a9d0b) },
	{ 7, UINT64_C(0xb89c7cfe91adb26d), UINT64_C(0xd179023d7b89c193) },
	{ 8, UINT64_C(0x3f929fddf17e8897), UINT64_C(0x19d58df57d396d27) },
	{ 9, UINT64_C(0x55911903043ea391), UINT64_C(0xd0346d71d38d8820) },
	{ 15, UINT64_C(0xce168b022281abcd), UINT64_C(0x0d2dbc264348dbad) },
	{ 16, UINT64_C(0x6717a35c7df196b6), UINT64_C(0x5204738a07102aef) },
	{ 17, UINT64_C(0x85dbbef06b588df3), UINT64_C(0xf5b2cfc6fdde21c9) },
	{ 23, UINT64_C(0x679e96a75d27d887), UINT64_C(0x4daad0b8803087c6) },
	{ 24, UINT64_C(0x318761e9f5826b67), UINT64_C(0x8f3cd18ad83d265e) },
	{ 31, UINT64_C(0xf59ff7d06c5ace5e), UINT64_C(0x122092cf3d208f4c) },
	{ 32, UINT64_C(0xafd763b017510cd4), UINT64_C(0xefb1d798514f6118) },
	{ 33, UINT64_C(0x2639c370e829107e), UINT64_C(0x63a699054b397d04) },
	{ 48, UINT64_C(0xff0d3c327d0a7a23), UINT64_C(0xe221188f94a12264) },
	{ 255, UINT64_C(0x610295c2227c386d), UINT64_C(0x5321c5bda905a823) },
};

static void test_hash_vectors(void **state) {
	static const uint64_t none[2] = { 0, 0 };
	static const uint64_t seed[2] = { UINT64_C(0x0123456789abcdef), UINT64_C(0xfedcba9876543210) };

	(void)state;
	for (size_t i = 0; i < sizeof(vectors) / sizeof(vectors[0]); i++) {
		size_t size = vectors[i].size;
		/* odd address, and nothing readable around it */
		char *room = malloc(size + 1);

		assert_non_null(room);
		for (size_t j = 0; j < size; j++)
			room[j + 1] = (char)('a' + j % 26);
		assert_true(wire_name_hash(none, room + 1, size) == vectors[i].plain);
		assert_true(wire_name_hash(seed, room + 1, size) == vectors[i].keyed);
		free(room);
	}
}

static uint64_t draw(uint64_t *state) {
	*state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return *state ^ *state >> 29;
}

#define TRIALS 512

/*
 * Flipping any bit of the name or the seed flips any bit of the hash in about half of the trials. 256 flips of 512
 * are expected, the standard deviation is 11.3; the bound is 6.5 of them, for a million pairs of bits.
 */
static void avalanche(size_t size, bool of_seed) {
	size_t n_bits = of_seed ? 128 : size * 8;
	uint64_t random = size;

	for (size_t bit = 0; bit < n_bits; bit++) {
		unsigned flips[64] = { 0 };

		for (size_t trial = 0; trial < TRIALS; trial++) {
			uint64_t seed[2] = { draw(&random), draw(&random) };
			uint8_t name[64];
			uint64_t difference;

			for (size_t i = 0; i < size; i++)
				name[i] = (uint8_t)(' ' + draw(&random) % 95);
			difference = wire_name_hash(seed, name, size);
			if (of_seed)
				seed[bit / 64] ^= UINT64_C(1) << bit % 64;
			else
				name[bit / 8] ^= (uint8_t)(1 << bit % 8);
			difference ^= wire_name_hash(seed, name, size);
			for (size_t i = 0; i < 64; i++)
				flips[i] += difference >> i & 1;
		}
		for (size_t i = 0; i < 64; i++)
			assert_in_range(flips[i], TRIALS / 2 - 74, TRIALS / 2 + 74);
	}
}

static void test_hash_avalanche(void **state) {
	static const size_t sizes[] = { 1, 2, 3, 4, 6, 8, 11, 16, 17, 20, 24, 30, 32, 40, 64 };

	(void)state;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		avalanche(sizes[i], false);
		avalanche(sizes[i], true);
	}
}

static int compare(const void *a, const void *b) {
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

#define N_NAMES (1 << 17)
#define N_BUCKETS (1 << 12)

/* chi square of the bits of @hashes from @shift on; 4095 is expected, the standard deviation is 90 */
static double chi_square(const uint64_t *hashes, unsigned shift) {
	static unsigned buckets[N_BUCKETS];
	double sum = 0, expected = (double)N_NAMES / N_BUCKETS;

	memset(buckets, 0, sizeof(buckets));
	for (size_t i = 0; i < N_NAMES; i++)
		buckets[hashes[i] >> shift & (N_BUCKETS - 1)]++;
	for (size_t i = 0; i < N_BUCKETS; i++)
		sum += (buckets[i] - expected) * (buckets[i] - expected) / expected;
	return sum;
}

/* names as programs make them: a prefix and a number */
static void test_hash_spreads_numbered_names(void **state) {
	static const char *const formats[] = { "%zu", "t%zu", "input_%zu", "model/input_tensor/%06zu",
					       "%zu_frame_of_camera_by_the_door" };
	static const uint64_t seed[2] = { UINT64_C(0x9d2c5680efc60000), 42 };
	static uint64_t hashes[N_NAMES];

	(void)state;
	for (size_t f = 0; f < sizeof(formats) / sizeof(formats[0]); f++) {
		size_t n_same_tag = 0;

		for (size_t i = 0; i < N_NAMES; i++) {
			char name[64];
			int size = snprintf(name, sizeof(name), formats[f], i);

			hashes[i] = wire_name_hash(seed, name, (size_t)size);
		}
		for (unsigned shift = 0; shift <= 52; shift += 4) {
			double chi = chi_square(hashes, shift);

			assert_true(chi > 4095 - 6 * 90 && chi < 4095 + 6 * 90);
		}
		qsort(hashes, N_NAMES, sizeof(hashes[0]), compare);
		for (size_t i = 1; i < N_NAMES; i++) {
			assert_true(hashes[i] != hashes[i - 1]);
			n_same_tag += hashes[i] >> 32 == hashes[i - 1] >> 32;
		}
		/* two are expected among so many tags of 32 bits */
		assert_in_range(n_same_tag, 0, 15);
	}
}

static void test_hash_tells_lengths_and_seeds_apart(void **state) {
	static const uint8_t zeroes[256];
	uint64_t hashes[256 + 128];

	(void)state;
	for (size_t i = 0; i < 256; i++) {
		static const uint64_t seed[2] = { 5, 6 };

		hashes[i] = wire_name_hash(seed, zeroes, i);
	}
	for (size_t i = 0; i < 128; i++) {
		uint64_t seed[2] = { 5, 6 };

		seed[i / 64] ^= UINT64_C(1) << i % 64;
		hashes[256 + i] = wire_name_hash(seed, zeroes, 20);
	}
	qsort(hashes, 256 + 128, sizeof(hashes[0]), compare);
	for (size_t i = 1; i < 256 + 128; i++)
		assert_true(hashes[i] != hashes[i - 1]);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_check),
		cmocka_unit_test(test_check_key),
		cmocka_unit_test(test_check_every_ascii_byte),
		cmocka_unit_test(test_check_length),
		cmocka_unit_test(test_hash_vectors),
		cmocka_unit_test(test_hash_avalanche),
		cmocka_unit_test(test_hash_spreads_numbered_names),
		cmocka_unit_test(test_hash_tells_lengths_and_seeds_apart),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
