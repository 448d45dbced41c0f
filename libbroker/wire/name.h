/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Names of regions: 1 to 255 bytes of valid UTF-8 (no overlong forms, no surrogates) without control
 * characters (U+0000 to U+001F, U+007F to U+009F). Keys, by which others may know a region, are the same, or empty.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Returns 0, or SHMB_E_BAD_NAME with a sentence that says what is wrong in @ret_why (static). */
int wire_name_check(const char *name, size_t size, const char **ret_why);
/* The same for a key. */
int wire_key_check(const char *key, size_t size, const char **ret_why);

/*
 * The hash: 16 bytes are combined with a key by one 64 × 64 → 128 bit multiplication whose halves are xored. All
 * steps but the last are chained; the last one, which may overlap the one before, stands by itself, so that the two
 * steps of a name of 17 to 32 bytes run side by side. The length goes into the final multiplication, so that
 * overlapping reads of names of different lengths differ. The constants are the fractional parts of the square roots
 * of 2, 3, 5 and 7, made odd.
 */
#define NAME_HASH_A UINT64_C(0x6a09e667f3bcc909)
#define NAME_HASH_B UINT64_C(0xbb67ae8584caa73b)
#define NAME_HASH_C UINT64_C(0x3c6ef372fe94f82b)
#define NAME_HASH_D UINT64_C(0xa54ff53a5f1d36f1)

__extension__ typedef unsigned __int128 NameProduct;

static inline uint64_t name_fold(uint64_t a, uint64_t b) {
	NameProduct product = (NameProduct)a * b;

	return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t name_load64(const uint8_t *at) {
	uint64_t value;

	memcpy(&value, at, sizeof(value));
	return value;
}

static inline uint64_t name_load32(const uint8_t *at) {
	uint32_t value;

	memcpy(&value, at, sizeof(value));
	return value;
}

/* keyed hash of a name; the same for the broker that writes the index and for the readers that probe it */
static inline uint64_t wire_name_hash(const uint64_t seed[2], const void *name, size_t size) {
	const uint8_t *at = name;
	uint64_t state = seed[0] ^ NAME_HASH_A;
	uint64_t key = seed[1] ^ NAME_HASH_B;
	uint64_t last_state = seed[0] ^ NAME_HASH_C;
	uint64_t last_key = seed[1] ^ NAME_HASH_D;
	size_t left = size;
	uint64_t low, high;

	for (; left > 16; left -= 16, at += 16)
		state = name_fold(name_load64(at) ^ key, name_load64(at + 8) ^ state);

	if (size > 16) {
		low = name_load64(at + left - 16);
		high = name_load64(at + left - 8);
	} else if (size >= 8) {
		low = name_load64(at);
		high = name_load64(at + size - 8);
	} else if (size >= 4) {
		low = name_load32(at);
		high = name_load32(at + size - 4);
	} else if (size > 0) {
		low = (uint64_t)at[0] << 16 | (uint64_t)at[size / 2] << 8 | at[size - 1];
		high = 0;
	} else {
		low = 0;
		high = 0;
	}
	state ^= name_fold(low ^ last_key, high ^ last_state);
	return name_fold(state, size ^ key);
}
