/* SPDX-License-Identifier: Apache-2.0 */

#include <endian.h>
#include <stdio.h>
#include <string.h>

#include "sha256.h"

/* the first 32 bits of the fractional parts of the cube roots of the first 64 primes */
static const uint32_t constants[64] = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, unsigned n) {
	return x >> n | x << (32 - n);
}

static void compress(uint32_t state[8], const uint8_t *block) {
	uint32_t w[64], s[8];

	for (size_t i = 0; i < 16; ++i) {
		memcpy(&w[i], block + 4 * i, 4);
		w[i] = be32toh(w[i]);
	}
	for (size_t i = 16; i < 64; ++i) {
		uint32_t x = w[i - 15], y = w[i - 2];

		w[i] = w[i - 16] + (rotate(x, 7) ^ rotate(x, 18) ^ x >> 3) + w[i - 7] +
		       (rotate(y, 17) ^ rotate(y, 19) ^ y >> 10);
	}
	memcpy(s, state, sizeof(s));
	/* instead of moving eight words along in each round, the names move: word k of round i is s[(k - i) % 8] */
	for (unsigned i = 0; i < 64; ++i) {
		uint32_t *a = &s[-i % 8], *b = &s[(1 - i) % 8], *c = &s[(2 - i) % 8], *d = &s[(3 - i) % 8];
		uint32_t *e = &s[(4 - i) % 8], *f = &s[(5 - i) % 8], *g = &s[(6 - i) % 8], *h = &s[(7 - i) % 8];
		uint32_t choice = (*e & *f) ^ (~*e & *g), majority = (*a & *b) ^ (*a & *c) ^ (*b & *c);
		uint32_t t = *h + (rotate(*e, 6) ^ rotate(*e, 11) ^ rotate(*e, 25)) + choice + constants[i] + w[i];

		*d += t;
		*h = t + (rotate(*a, 2) ^ rotate(*a, 13) ^ rotate(*a, 22)) + majority;
	}
	for (size_t i = 0; i < 8; ++i)
		state[i] += s[i];
}

void sha256_init(Sha256 *sha) {
	/* of the square roots of the first 8 primes */
	static const uint32_t initial[8] = {
		0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
	};

	memset(sha, 0, sizeof(*sha));
	memcpy(sha->state, initial, sizeof(initial));
}

void sha256_update(Sha256 *sha, const void *data, size_t size) {
	const uint8_t *at = data;
	size_t used = sha->n % sizeof(sha->block);

	sha->n += size;
	if (used) {
		size_t part = sizeof(sha->block) - used;

		if (part > size)
			part = size;
		memcpy(sha->block + used, at, part);
		at += part;
		size -= part;
		if (used + part < sizeof(sha->block))
			return;
		compress(sha->state, sha->block);
	}
	for (; size >= sizeof(sha->block); at += sizeof(sha->block), size -= sizeof(sha->block))
		compress(sha->state, at);
	memcpy(sha->block, at, size);
}

void sha256_final(Sha256 *sha, char ret[SHA256_HEX_MAX]) {
	static const uint8_t padding[64] = { 0x80 };
	uint64_t bits = htobe64(sha->n * 8);
	size_t used = sha->n % sizeof(sha->block);

	sha256_update(sha, padding, (used < 56 ? 56 : 120) - used);
	sha256_update(sha, &bits, sizeof(bits));
	for (size_t i = 0; i < 8; ++i)
		sprintf(ret + 8 * i, "%08x", sha->state[i]);
}
