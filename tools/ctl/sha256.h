/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* SHA-256 (FIPS 180-4) of a stream of bytes: init, update any number of times, final once. */

#include <stddef.h>
#include <stdint.h>

#define SHA256_HEX_MAX 65

typedef struct Sha256 {
	uint32_t state[8];
	uint64_t n; /* bytes so far */
	uint8_t block[64];
} Sha256;

void sha256_init(Sha256 *sha);
void sha256_update(Sha256 *sha, const void *data, size_t size);
/* lower-case hexadecimal digits and a zero */
void sha256_final(Sha256 *sha, char ret[SHA256_HEX_MAX]);
