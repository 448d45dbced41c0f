/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Ranges: overflow-safe windows. A window of @size bytes at @offset is within @whole bytes, or it is not.
 */

#include <stdbool.h>
#include <stdint.h>

static inline bool range_within(uint64_t offset, uint64_t size, uint64_t whole) {
	uint64_t end;

	return !__builtin_add_overflow(offset, size, &end) && end <= whole;
}
