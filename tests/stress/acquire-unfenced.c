/* SPDX-License-Identifier: Apache-2.0 */

/* Acquires as they must not be: counted by a plain store. For the consumers that the stress has to find wrong. */

#include "lane.h"

static inline void lane_count_acquire_unfenced(uint32_t slot) {
	_Atomic uint32_t *counter = &lane_cache.counters[slot].acquired;

	atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + 1, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst);
}

#define lane_count_acquire lane_count_acquire_unfenced
#include "client/acquire.c"
