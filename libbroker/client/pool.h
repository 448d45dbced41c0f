/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Pool: a region that is divided into blocks of one size, which the sessions that have it open acquire and release
 * among themselves, without the broker.
 *
 *	0               PoolHeader, written before the region is registered; what follows `sequence` changes
 *	words_offset    u64[n_blocks], a word for each block
 *	blocks_offset   the blocks, stride bytes from one to the next
 *
 * All that is known of a block is in its word: who holds it, in which of its uses. Every step is one compare-and-swap of
 * that word, so a process may be killed between any two instructions and no block is held twice or lost: a holder is its
 * session, the registry says of each session whether it lives, and whoever finds no free block takes that of a dead one by
 * the same compare-and-swap.
 *
 *	63       42 41         22 21       2 1   0
 *	generation  counter       index      state
 *
 * The holder is a session: its index in the registry's session table, and the low 20 bits of the counter in its id. It
 * lives while the table has an id with these bits at that index. The id of a dead session is not used again, so what was
 * found dead stays dead. When a later session of the same index has the same 20 bits (one in 2^20 does), what the
 * dead one held is not given out before that one ends too; it is never given out too early. The epoch of the ids is in the header:
 * a pool of another registry is not opened.
 *
 * The generation, 22 bits, is one more with each holder and stays as it is when the block becomes free. What was written
 * down of a use is mistaken for a later one only where the block has changed hands a multiple of 2^22 times in between
 * and is held by the same session again (release), or given again (take). A claim of a free block, or of a dead one's, needs
 * no generation to be right.
 *
 * Waiters set bit 0 of `sequence`, look at all the words, and sleep on it; a release makes the word free, and then looks
 * at that bit. Nobody relies on being woken: a waiter looks again after POOL_LOOK_MS.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "client.h"

#define POOL_MAGIC UINT64_C(0x6c6f6f70706d6873) /* "shmppool" */
#define POOL_VERSION 1
#define POOL_LOOK_MS 100
#define POOL_ALIGNMENT 64
#define POOL_ALIGNMENT_MAX 4096
#define POOL_COUNTER_BITS 20
#define POOL_INDEX_BITS 20
#define POOL_GENERATION_BITS 22

enum {
	POOL_FREE,
	POOL_HELD,
	POOL_GIVEN, /* held by its giver until somebody takes it */
	POOL_STATE_MASK = 3,
};

typedef struct PoolHeader {
	uint64_t magic;
	uint32_t version;
	uint32_t header_size;
	uint64_t total_size; /* of all, at most that of the region */
	uint32_t epoch;	     /* of the sessions that are named in words */
	uint32_t n_blocks;
	uint64_t block_size;
	uint64_t stride;
	uint64_t words_offset;
	uint64_t blocks_offset;
	_Atomic uint32_t sequence; /* a futex: bit 0 is set when somebody waits */
	uint32_t reserved[15];
} PoolHeader;

_Static_assert(sizeof(PoolHeader) == 128 && offsetof(PoolHeader, sequence) == 64,
	       "the part that changes has a line of its own");
_Static_assert(POOL_GENERATION_BITS + POOL_COUNTER_BITS + POOL_INDEX_BITS + 2 == 64, "all is in one word");
_Static_assert(LAYOUT_CAPACITY_MAX <= UINT32_C(1) << POOL_INDEX_BITS, "every session has an index that fits");

/* One for each pool that a client has open, however often it opened it: its blocks are those of the session. */
struct shmb_pool {
	struct shmb_client *client;
	struct shmb_pool *next; /* of the client's; like n_refs under its map_lock */
	uint32_t n_refs;
	char *name;
	uint8_t *base;
	_Atomic uint32_t *sequence;
	_Atomic uint64_t *words;
	/* checked once: what stands in the shared header is not looked at again */
	uint32_t n_blocks;
	uint64_t block_size;
	uint64_t stride;
	uint64_t blocks_offset;
	uint64_t holder; /* index and counter of this session, where they are in a word */
	const _Atomic uint64_t *sessions;
	uint32_t session_capacity;
	uint32_t slot; /* and the generation of the region */
	uint64_t generation;
	struct shmb_region *region; /* of the one that created it */
	struct shmb_lease lease;    /* of others; its client is NULL when there is none */
};

#define POOL_HOLDER_MASK (((UINT64_C(1) << (POOL_COUNTER_BITS + POOL_INDEX_BITS)) - 1) << 2)
#define POOL_GENERATION_MASK ((UINT32_C(1) << POOL_GENERATION_BITS) - 1)

static inline uint64_t pool_holder(uint64_t session, uint32_t index) {
	return (session & ((UINT64_C(1) << POOL_COUNTER_BITS) - 1)) << (2 + POOL_INDEX_BITS) | (uint64_t)index << 2;
}

static inline uint64_t pool_word(uint32_t generation, uint64_t holder, uint32_t state) {
	return (uint64_t)generation << (64 - POOL_GENERATION_BITS) | holder | state;
}

static inline uint32_t pool_word_state(uint64_t word) {
	return word & POOL_STATE_MASK;
}

static inline uint32_t pool_word_generation(uint64_t word) {
	return (uint32_t)(word >> (64 - POOL_GENERATION_BITS));
}

static inline uint32_t pool_word_index(uint64_t word) {
	return (uint32_t)(word >> 2) & ((UINT32_C(1) << POOL_INDEX_BITS) - 1);
}

/* whether the session that a word names lives */
static inline bool pool_holder_lives(const struct shmb_pool *pool, uint64_t word) {
	uint32_t index = pool_word_index(word);
	uint64_t session;

	if (index >= pool->session_capacity)
		return false;
	session = atomic_load(&pool->sessions[index]);
	return session && pool_holder(session, index) == (word & POOL_HOLDER_MASK);
}

/* makes every block free that this session holds */
void pool_release_all(struct shmb_pool *pool);
