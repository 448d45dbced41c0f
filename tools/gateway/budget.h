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

/* what connections that hold little have for themselves: this much each, with what they ask for */
#define BUDGET_SHARE 32768

/*
 * What a connection that holds @held bytes may take: the last @reserve bytes are for those that, with it, hold no more than
 * @share, so that few slow readers of large replies keep nobody from small ones.
 */
static inline uint64_t budget_room(const Budget *budget, uint64_t reserve, uint64_t held, uint64_t share) {
	uint64_t left = budget->limit - budget->used;
	uint64_t large = left > reserve ? left - reserve : 0;
	uint64_t small = held < share ? share - held : 0;

	if (small > left)
		small = left;
	return large > small ? large : small;
}

/* @room is what budget_room() says, or all that is left */
static inline bool budget_take_of(Budget *budget, uint64_t room, uint64_t bytes) {
	if (bytes > room) {
		budget->refused++;
		return false;
	}
	budget->used += bytes;
	return true;
}

static inline bool budget_take(Budget *budget, uint64_t bytes) {
	return budget_take_of(budget, budget->limit - budget->used, bytes);
}

static inline void budget_give(Budget *budget, uint64_t bytes) {
	budget->used -= bytes;
}
