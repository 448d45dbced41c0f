/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Names of regions: 1 to 255 bytes of valid UTF-8 (no overlong forms, no surrogates) without control
 * characters (U+0000 to U+001F, U+007F to U+009F).
 */

#include <stddef.h>
#include <stdint.h>

/* Returns 0, or SHMB_E_BAD_NAME with a sentence that says what is wrong in @ret_why (static). */
int wire_name_check(const char *name, size_t size, const char **ret_why);

/* keyed hash of a name; the same for the broker that writes the index and for the readers that probe it */
uint64_t wire_name_hash(const uint64_t seed[2], const void *name, size_t size);
