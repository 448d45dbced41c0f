/* SPDX-License-Identifier: Apache-2.0 */

/* Blocks of a pool: every change is one compare-and-swap of the block's word, as pool.h says. */

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>

#include "pool.h"
#include "wire/range.h"

/* where this thread looks first: behind what it acquired, or at what it released, which is in its cache */
static __thread uint32_t start_at __attribute__((tls_model("initial-exec")));
static _Atomic uint32_t n_threads;

/* threads that have acquired nothing begin at different places */
static uint32_t start_get(const struct shmb_pool *pool) {
	if (!start_at)
		start_at = (atomic_fetch_add(&n_threads, 1) * UINT32_C(0x9e3779b1) ^ (uint32_t)(pool->holder >> 2)) | 1;
	return start_at % pool->n_blocks;
}

static void block_fill(const struct shmb_pool *pool, uint32_t index, uint64_t word, struct shmb_block *ret) {
	uint64_t offset = pool->blocks_offset + index * pool->stride;

	*ret = (struct shmb_block){
		.address = pool->base + offset,
		.offset = offset,
		.size = pool->block_size,
		.index = index,
		.generation = pool_word_generation(word),
		.internal = word,
	};
}

/* ---- acquire ---- */

/* a dead session must not claim: what it holds is anybody's */
static int check_session(const struct shmb_pool *pool) {
	const struct shmb_client *client = pool->client;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (atomic_load_explicit(&client->registry->state, memory_order_acquire) != LAYOUT_OPEN ||
	    atomic_load_explicit(atomic_load_explicit(&client->session_word, memory_order_relaxed),
				 memory_order_acquire) != client->session)
		return error_set(SHMB_E_DETACHED, "the broker has ended this session");
	return 0;
}

static int check_region(const struct shmb_pool *pool) {
	uint64_t word = atomic_load_explicit(&pool->client->slots[pool->slot].word, memory_order_acquire);

	if (layout_word_generation(word) == pool->generation && layout_word_grants(word))
		return 0;
	if (word == layout_word(pool->generation, WIRE_STATE_REVOKED))
		return error_plain(SHMB_E_REVOKED);
	return error_set(SHMB_E_RETIRING,
			 "the pool's region was retired, or its owner has ended: no block is acquired any more");
}

/* @word becomes one that this session holds; false when it is @word no more */
static bool claim(struct shmb_pool *pool, uint32_t index, uint64_t word, struct shmb_block *ret) {
	uint32_t generation = (pool_word_generation(word) + 1) & POOL_GENERATION_MASK;
	uint64_t held = pool_word(generation, pool->holder, POOL_HELD);

	if (!atomic_compare_exchange_strong(&pool->words[index], &word, held))
		return false;
	block_fill(pool, index, held, ret);
	return true;
}

/* Any block that is free, or with @dead that of a session that does not live. */
static bool try(struct shmb_pool *pool, bool dead, struct shmb_block *ret) {
	uint32_t index = start_get(pool);

	for (uint32_t i = 0; i < pool->n_blocks; ++i) {
		uint64_t word = atomic_load(&pool->words[index]);

		if ((pool_word_state(word) == POOL_FREE || (dead && !pool_holder_lives(pool, word))) &&
		    claim(pool, index, word, ret)) {
			start_at = index + 1;
			return true;
		}
		if (++index == pool->n_blocks)
			index = 0;
	}
	return false;
}

/* not private: those who wait are in other processes */
static long futex(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *timeout) {
	return syscall(SYS_futex, word, op, value, timeout, NULL, 0);
}

static void wait_for_change(struct shmb_pool *pool, uint32_t sequence, int64_t left_ms) {
	struct timespec timeout = { .tv_nsec = (left_ms < POOL_LOOK_MS ? left_ms : POOL_LOOK_MS) * 1000000 };

	(void)futex(pool->sequence, FUTEX_WAIT, sequence, &timeout);
}

static __attribute__((noinline)) int acquire_slowly(struct shmb_pool *pool, int timeout_ms, struct shmb_block *ret) {
	int64_t deadline = timeout_ms < 0 ? DEADLINE_NONE : client_now() + timeout_ms, now;
	uint32_t sequence = 0;
	int r;

	for (;;) {
		if (try(pool, true, ret))
			return 0;
		now = timeout_ms ? client_now() : deadline;
		if (now >= deadline)
			return error_set(SHMB_E_TIMED_OUT, "every block is held");
		/* what becomes free from here on is announced; what did so before is seen by another look */
		if (!(sequence & 1)) {
			sequence = atomic_fetch_or(pool->sequence, 1) | 1;
			continue;
		}
		wait_for_change(pool, sequence, deadline - now);
		sequence = 0;
		r = check_session(pool) ?: check_region(pool);
		if (r)
			return r;
	}
}

int shmb_pool_acquire(struct shmb_pool *pool, int timeout_ms, struct shmb_block *ret) {
	int r = check_session(pool) ?: check_region(pool);

	if (r)
		return r;
	if (timeout_ms < -1)
		return error_set(SHMB_E_INVALID, "a time to wait is -1 for ever, or 0 and more milliseconds");
	return try(pool, false, ret) ? 0 : acquire_slowly(pool, timeout_ms, ret);
}

/* ---- release ---- */

/*
 * One of those who wait is woken. When nobody sleeps, the bit is taken back in a way that whoever is about to sleep
 * notices, and whoever fell asleep meanwhile is woken to set it again.
 */
static __attribute__((noinline, cold)) void wake(struct shmb_pool *pool) {
	uint32_t sequence = atomic_fetch_add(pool->sequence, 2) + 2;

	if (futex(pool->sequence, FUTEX_WAKE, 1, NULL) > 0)
		return;
	if (sequence & 1 && atomic_compare_exchange_strong(pool->sequence, &sequence, sequence + 1))
		(void)futex(pool->sequence, FUTEX_WAKE, INT_MAX, NULL);
}

static bool make_free(struct shmb_pool *pool, uint32_t index, uint64_t word) {
	uint64_t free_word = pool_word(pool_word_generation(word), 0, POOL_FREE);

	if (!atomic_compare_exchange_strong(&pool->words[index], &word, free_word))
		return false;
	if (__builtin_expect(atomic_load(pool->sequence) & 1, 0))
		wake(pool);
	return true;
}

/* why a block is not this session's: @word is what the caller has, and it did not stand in the pool */
static int refuse(const struct shmb_pool *pool, uint64_t word) {
	if (pool_word_state(word) == POOL_FREE || (word & POOL_HOLDER_MASK) == pool->holder)
		return error_set(SHMB_E_STALE, "the block was released, or given and taken, before");
	return error_set(SHMB_E_PERMISSION, "another session holds the block");
}

/* 0 when the caller may try to change @block's word */
static int check_block(const struct shmb_pool *pool, const struct shmb_block *block) {
	if (client_is_foreign(pool->client))
		return error_plain(SHMB_E_FORKED);
	if (block->index >= pool->n_blocks)
		return error_set(SHMB_E_INVALID, "the pool has no such block");
	if (pool_word_state(block->internal) == POOL_FREE || (block->internal & POOL_HOLDER_MASK) != pool->holder)
		return refuse(pool, block->internal);
	return 0;
}

int shmb_block_release(struct shmb_pool *pool, struct shmb_block *block) {
	uint64_t holding;
	int r = check_block(pool, block);

	if (r)
		return r;
	holding = block->internal & ~(uint64_t)POOL_STATE_MASK;
	/* a copy of the struct may have been given meanwhile, or one that was given be released */
	if (!make_free(pool, block->index, holding | POOL_HELD) && !make_free(pool, block->index, holding | POOL_GIVEN))
		return refuse(pool, block->internal);
	start_at = block->index + pool->n_blocks;
	block->internal = 0;
	block->address = NULL;
	return 0;
}

void pool_release_all(struct shmb_pool *pool) {
	for (uint32_t index = 0; index < pool->n_blocks; ++index) {
		uint64_t word = atomic_load(&pool->words[index]);

		if (pool_word_state(word) != POOL_FREE && (word & POOL_HOLDER_MASK) == pool->holder)
			(void)make_free(pool, index, word);
	}
}

/* ---- from one session to another ---- */

int shmb_block_give(struct shmb_pool *pool, struct shmb_block *block) {
	uint64_t held, given;
	int r = check_block(pool, block);

	if (r)
		return r;
	held = (block->internal & ~(uint64_t)POOL_STATE_MASK) | POOL_HELD;
	given = (block->internal & ~(uint64_t)POOL_STATE_MASK) | POOL_GIVEN;
	if (!atomic_compare_exchange_strong(&pool->words[block->index], &held, given) && held != given)
		return refuse(pool, block->internal);
	block->internal = given;
	return 0;
}

static int block_at(const struct shmb_pool *pool, uint64_t offset, uint64_t size, uint32_t *ret_index) {
	uint64_t index = offset >= pool->blocks_offset ? (offset - pool->blocks_offset) / pool->stride : UINT64_MAX;

	if (index >= pool->n_blocks ||
	    !range_within(offset - pool->blocks_offset - index * pool->stride, size, pool->block_size))
		return error_set(SHMB_E_OUT_OF_BOUNDS, "offset and size are not within one block");
	*ret_index = (uint32_t)index;
	return 0;
}

int shmb_block_take(struct shmb_pool *pool, uint64_t offset, uint32_t generation, struct shmb_block *ret) {
	uint32_t index;
	uint64_t word;
	int r = check_session(pool) ?: block_at(pool, offset, 0, &index);

	if (r)
		return r;
	word = atomic_load(&pool->words[index]);
	if (pool_word_generation(word) == generation && pool_word_state(word) == POOL_HELD)
		return error_set(SHMB_E_PERMISSION, "the holder has not given the block");
	if (pool_word_generation(word) != generation || pool_word_state(word) == POOL_FREE ||
	    !claim(pool, index, word, ret))
		return error_set(SHMB_E_STALE, "the block was taken, or taken back, before");
	return 0;
}

int shmb_pool_find(struct shmb_pool *pool, uint64_t offset, uint64_t size, struct shmb_block *ret) {
	uint32_t index;
	uint64_t word;
	int r;

	if (client_is_foreign(pool->client))
		return error_plain(SHMB_E_FORKED);
	r = block_at(pool, offset, size, &index);
	if (r)
		return r;
	word = atomic_load(&pool->words[index]);
	if (pool_word_state(word) == POOL_FREE)
		return error_set(SHMB_E_STALE, "nobody holds the block");
	block_fill(pool, index, word, ret);
	return 0;
}

int shmb_pool_count_free(struct shmb_pool *pool, uint32_t *ret) {
	uint32_t n = 0;

	if (client_is_foreign(pool->client))
		return error_plain(SHMB_E_FORKED);
	for (uint32_t index = 0; index < pool->n_blocks; ++index) {
		uint64_t word = atomic_load(&pool->words[index]);

		n += pool_word_state(word) == POOL_FREE || !pool_holder_lives(pool, word);
	}
	*ret = n;
	return 0;
}
