/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Lanes: each thread counts in a lane of its own, so that no two write to one cache line. The lane of the client that a
 * thread used last is found without a call; lane_select() finds it, or takes one, for any other. A child of fork()
 * has no lane of its parent's clients: whoever finds the lane ready needs not ask whether the client is foreign.
 */

#include "client.h"

typedef struct LaneCache {
	uint64_t client;       /* its id, 0 for none */
	LaneCounter *counters; /* by slot */
	bool plain;	       /* releases: the lane has one writer, and the broker calls membarrier for its page */
	uint32_t undo;	       /* a slot on which one acquire too many was counted, or LANE_NO_UNDO */
} LaneCache;

#define LANE_NO_UNDO UINT32_MAX

extern __thread LaneCache lane_cache __attribute__((tls_model("initial-exec"), visibility("hidden")));

/* makes @client's lane of this thread the one in lane_cache; the client must have a lease page and not be foreign */
void lane_select(struct shmb_client *client);

static inline bool lane_is_ready(const struct shmb_client *client) {
	return __builtin_expect(lane_cache.client == client->id, 1);
}

/*
 * One acquire more on @slot, before anything that this thread looks at afterwards. Always by a locked instruction: what
 * it orders is what keeps the memory. layout.h says why membarrier is not trusted with that.
 */
static inline void lane_count_acquire(uint32_t slot) {
	atomic_fetch_add(&lane_cache.counters[slot].acquired, 1);
}

/*
 * One more in a counter of lane_cache, before anything that this thread looks at afterwards, for what the broker may
 * see late. Release, so that what the holder has read comes before a release that is seen. The compiler must not move
 * the count past the look; the broker's membarrier and its second look, or the locked instruction, do the rest.
 */
static inline void lane_count(_Atomic uint32_t *counter) {
	if (__builtin_expect(lane_cache.plain, 1)) {
		atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + 1,
				      memory_order_release);
		atomic_signal_fence(memory_order_seq_cst);
	} else {
		atomic_fetch_add(counter, 1);
	}
}

static inline void lane_count_release(uint32_t slot) {
	lane_count(&lane_cache.counters[slot].released);
}
