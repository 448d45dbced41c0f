/* SPDX-License-Identifier: Apache-2.0 */

#include <stdbool.h>
#include <string.h>

#include "name.h"
#include "protocol.h"

/* the length of the UTF-8 character at @at and its code point, or 0 when there is none */
static size_t name_decode(const uint8_t *at, size_t left, uint32_t *ret_point) {
	static const uint32_t smallest[] = { 0, 0, 0x80, 0x800, 0x10000 };
	uint32_t point;
	size_t length;

	if (at[0] < 0x80) {
		*ret_point = at[0];
		return 1;
	} else if ((at[0] & 0xe0) == 0xc0) {
		point = at[0] & 0x1f;
		length = 2;
	} else if ((at[0] & 0xf0) == 0xe0) {
		point = at[0] & 0x0f;
		length = 3;
	} else if ((at[0] & 0xf8) == 0xf0) {
		point = at[0] & 0x07;
		length = 4;
	} else {
		return 0;
	}
	if (length > left)
		return 0;
	for (size_t i = 1; i < length; i++) {
		if ((at[i] & 0xc0) != 0x80)
			return 0;
		point = point << 6 | (at[i] & 0x3f);
	}
	if (point < smallest[length] || point > 0x10ffff || (point >= 0xd800 && point <= 0xdfff))
		return 0;
	*ret_point = point;
	return length;
}

int wire_name_check(const char *name, size_t size, const char **ret_why) {
	const uint8_t *at = (const uint8_t *)name;
	bool control = false;

	if (size == 0) {
		*ret_why = "the name is empty";
		return SHMB_E_BAD_NAME;
	}
	if (size > WIRE_NAME_MAX) {
		*ret_why = "the name is longer than 255 bytes";
		return SHMB_E_BAD_NAME;
	}
	for (size_t i = 0; i < size;) {
		uint32_t point = 0;
		size_t length = name_decode(at + i, size - i, &point);

		if (length == 0) {
			*ret_why = "the name is not valid UTF-8";
			return SHMB_E_BAD_NAME;
		}
		control |= point < 0x20 || (point >= 0x7f && point < 0xa0);
		i += length;
	}
	if (control) {
		*ret_why = "the name has control characters";
		return SHMB_E_BAD_NAME;
	}
	return 0;
}

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

uint64_t wire_name_hash(const uint64_t seed[2], const void *name, size_t size) {
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
