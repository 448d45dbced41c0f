/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Budget: bytes of requests and replies that the process holds at a time, both doors together. Whoever buffers takes from
 * it first, and gives back what it took.
 */

#include <stdbool.h>
#include <stdint.h>

typedef struct Budget {
	uint64_t limit;
	uint64_t used;
	uint64_t refused; /* how often it did not suffice, for the metrics */
} Budget;

static inline bool budget_take(Budget *budget, uint64_t bytes) {
	if (bytes > budget->limit - budget->used) {
		budget->refused++;
		return false;
	}
	budget->used += bytes;
	return true;
}

static inline void budget_give(Budget *budget, uint64_t bytes) {
	budget->used -= bytes;
}
