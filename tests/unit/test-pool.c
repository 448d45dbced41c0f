/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pools against a fake broker, whose table of sessions the test writes. The pool's memory is that of a region which the
 * test has mapped too: it looks at words, and plays other members by writing them.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <stdbool.h>
#include <sys/wait.h>

#include "client-broker.h"
#include "pool.h"

#define BLOCKS 8
#define BLOCK_SIZE 1000
#define STRIDE 1024
#define BLOCKS_OFFSET (128 + BLOCKS * 8)
#define MEMORY_SIZE (BLOCKS_OFFSET + BLOCKS * STRIDE)
#define SLOT 2
#define GENERATION 150
#define OTHER_INDEX 5
#define OTHER 99 /* id of another session */
#define ROUNDS 20000
#define THREADS 4

static FakeBroker fake;
static struct shmb_client *client;
static int memory;
static uint8_t *base;
static PoolHeader *header;

static _Atomic uint64_t *session_at(uint32_t index) {
	return &layout_sessions((RegistryHeader *)fake.registry)[index];
}

static _Atomic uint64_t *words(void) {
	return (_Atomic uint64_t *)(base + sizeof(PoolHeader));
}

static uint64_t other_word(uint32_t generation, uint32_t state) {
	return pool_word(generation, pool_holder(OTHER, OTHER_INDEX), state);
}

static int start(void **state) {
	(void)state;
	client = fake_start(&fake, WIRE_ATTACH_RMW, SHMB_FORCE_RMW);
	memory = memfd_create("memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_true(memory >= 0);
	assert_int_equal(ftruncate(memory, MEMORY_SIZE), 0);
	base = mmap(NULL, MEMORY_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	assert_true(base != MAP_FAILED);
	header = (PoolHeader *)base;
	*header = (PoolHeader){
		.magic = POOL_MAGIC,
		.version = POOL_VERSION,
		.header_size = sizeof(*header),
		.total_size = MEMORY_SIZE,
		.n_blocks = BLOCKS,
		.block_size = BLOCK_SIZE,
		.stride = STRIDE,
		.words_offset = sizeof(*header),
		.blocks_offset = BLOCKS_OFFSET,
	};
	fake_register(&fake, SLOT, GENERATION,
		      (FakeRegion){ .name = "p", .size = MEMORY_SIZE, .object = 9, .fd = memory });
	atomic_store(session_at(OTHER_INDEX), OTHER);
	return 0;
}

static int stop(void **state) {
	(void)state;
	assert_int_equal(fake_count(&fake, SLOT), 0);
	fake_stop(&fake, client);
	munmap(base, MEMORY_SIZE);
	(void)close_fd(memory);
	return 0;
}

static struct shmb_pool *open_pool(void) {
	struct shmb_pool *pool;

	assert_int_equal(shmb_pool_open(client, "p", &pool), 0);
	return pool;
}

static struct shmb_block acquire(struct shmb_pool *pool) {
	struct shmb_block block;

	assert_int_equal(shmb_pool_acquire(pool, 0, &block), 0);
	return block;
}

static uint32_t count_free(struct shmb_pool *pool) {
	uint32_t n;

	assert_int_equal(shmb_pool_count_free(pool, &n), 0);
	return n;
}

/* everything belongs to the other session */
static void fill_words(uint32_t generation, uint32_t state) {
	for (int i = 0; i < BLOCKS; ++i)
		atomic_store(&words()[i], other_word(generation, state));
}

/* ---- opening ---- */

static void a_pool_is_what_its_header_says(void **state) {
	struct shmb_pool *pool = open_pool();

	(void)state;
	assert_string_equal(shmb_pool_get_name(pool), "p");
	assert_int_equal(shmb_pool_get_n_blocks(pool), BLOCKS);
	assert_int_equal(shmb_pool_get_block_size(pool), BLOCK_SIZE);
	assert_int_equal(shmb_pool_get_generation(pool), GENERATION);
	assert_int_equal(count_free(pool), BLOCKS);
	/* the lease lasts as long as the pool */
	assert_int_equal(fake_count(&fake, SLOT), 1);
	assert_null(shmb_pool_free(pool));
	assert_null(shmb_pool_free(NULL));
}

static void the_same_pool_again_is_the_same(void **state) {
	struct shmb_pool *pool = open_pool(), *again = open_pool();
	struct shmb_block block = acquire(pool);

	(void)state;
	assert_ptr_equal(pool, again);
	shmb_pool_free(again);
	/* what is held goes with the last one */
	assert_int_equal(pool_word_state(atomic_load(&words()[block.index])), POOL_HELD);
	shmb_pool_free(pool);
	assert_int_equal(pool_word_state(atomic_load(&words()[block.index])), POOL_FREE);
}

typedef struct Lie {
	size_t at;
	size_t size;
	uint64_t value;
	int expected;
} Lie;

static void a_header_that_lies_is_refused(void **state) {
#define LIE(field, value, expected) \
	{ offsetof(PoolHeader, field), sizeof(header->field), value, expected }
	static const Lie lies[] = {
		LIE(magic, 0, SHMB_E_INVALID),
		LIE(version, 2, SHMB_E_VERSION),
		LIE(epoch, 1, SHMB_E_STALE),
		LIE(header_size, 64, SHMB_E_INVALID),
		LIE(total_size, MEMORY_SIZE + 1, SHMB_E_INVALID),
		LIE(total_size, MEMORY_SIZE - 1, SHMB_E_INVALID),
		LIE(total_size, UINT64_MAX, SHMB_E_INVALID),
		LIE(n_blocks, 0, SHMB_E_INVALID),
		LIE(n_blocks, BLOCKS + 1, SHMB_E_INVALID),
		LIE(n_blocks, UINT32_MAX, SHMB_E_INVALID),
		LIE(block_size, 0, SHMB_E_INVALID),
		LIE(block_size, STRIDE + 1, SHMB_E_INVALID),
		LIE(stride, STRIDE + 1, SHMB_E_INVALID),
		LIE(stride, UINT64_MAX / BLOCKS + 2, SHMB_E_INVALID),
		LIE(words_offset, 136, SHMB_E_INVALID),
		LIE(words_offset, UINT64_MAX, SHMB_E_INVALID),
		LIE(blocks_offset, BLOCKS_OFFSET - 1, SHMB_E_INVALID),
		LIE(blocks_offset, BLOCKS_OFFSET + 1, SHMB_E_INVALID),
		LIE(blocks_offset, UINT64_MAX, SHMB_E_INVALID),
	};
	PoolHeader good = *header;
	struct shmb_pool *pool;

	(void)state;
	for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); ++i) {
		memcpy((uint8_t *)header + lies[i].at, &lies[i].value, lies[i].size);
		assert_int_equal(shmb_pool_open(client, "p", &pool), lies[i].expected);
		assert_int_equal(fake_count(&fake, SLOT), 0);
		*header = good;
	}
	shmb_pool_free(open_pool());
	assert_int_equal(shmb_pool_open(client, "nothing", &pool), SHMB_E_NOT_FOUND);
}

static void too_small_or_at_an_odd_place_is_no_pool(void **state) {
	struct shmb_pool *pool;

	(void)state;
	fake_register(&fake, 3, 151, (FakeRegion){ .name = "small", .size = 127, .object = 9, .fd = memory });
	fake_register(&fake, 4, 152,
		      (FakeRegion){ .name = "odd", .offset = 4, .size = MEMORY_SIZE - 4, .object = 9, .fd = memory });
	memmove(base + 4, base, sizeof(*header));
	assert_int_equal(shmb_pool_open(client, "small", &pool), SHMB_E_INVALID);
	assert_int_equal(shmb_pool_open(client, "odd", &pool), SHMB_E_INVALID);
}

/* what members write later is no matter of where others read and write */
static void a_header_is_read_once(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block block;

	(void)state;
	memset(base, 0xff, sizeof(*header));
	for (int i = 0; i < BLOCKS; ++i) {
		block = acquire(pool);
		assert_in_range(block.offset, BLOCKS_OFFSET, MEMORY_SIZE - BLOCK_SIZE);
		memset(block.address, 1, block.size);
	}
	for (int i = 0; i < BLOCKS; ++i)
		atomic_store(&words()[i], ~UINT64_C(0));
	/* no session is there, so that nobody lives who holds them */
	block = acquire(pool);
	assert_int_equal(shmb_block_release(pool, &block), 0);
	shmb_pool_free(pool);
}

/* ---- creating ---- */

static void a_pool_is_created_with_its_shape(void **state) {
	struct shmb_pool_options options = { .struct_size = sizeof(options), .alignment = 4096 };
	struct shmb_pool *pool;
	struct shmb_block block;

	(void)state;
	assert_int_equal(shmb_pool_create(client, "q", 3, 5000, &options, &pool), 0);
	assert_int_equal(shmb_pool_get_n_blocks(pool), 3);
	for (int i = 0; i < 3; ++i) {
		/* the fake's answer to a registration is not in its registry */
		fake_set(&fake, 0, 200, WIRE_STATE_ACTIVE);
		block = acquire(pool);
		assert_int_equal((uintptr_t)block.address % 4096, 0);
		assert_int_equal(block.offset, 4096 + block.index * 8192);
		assert_int_equal(block.size, 5000);
		memset(block.address, 1, block.size);
	}
	assert_int_equal(shmb_region_get_size(shmb_pool_get_region(pool)), 4096 + 3 * 8192);
	shmb_pool_free(pool);
	assert_int_equal(atomic_load(&fake.n_asked[WIRE_OP_UNREGISTER]), 1);
	pool = open_pool();
	assert_null(shmb_pool_get_region(pool));
	shmb_pool_free(pool);
}

static void shapes_that_cannot_be_are_refused(void **state) {
	struct shmb_region_options read_only = { .struct_size = sizeof(read_only), .flags = SHMB_REGION_OPT_READ_ONLY };
	struct shmb_region_options huge = { .struct_size = sizeof(huge), .huge_pages = SHMB_HUGE_2M };
	struct shmb_pool_options options = { .struct_size = sizeof(options) };
	struct shmb_pool *pool;

	(void)state;
	assert_int_equal(shmb_pool_create(client, "q", 0, 1, NULL, &pool), SHMB_E_INVALID);
	assert_int_equal(shmb_pool_create(client, "q", SHMB_POOL_BLOCKS_MAX + 1, 1, NULL, &pool), SHMB_E_INVALID);
	assert_int_equal(shmb_pool_create(client, "q", 1, 0, NULL, &pool), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_pool_create(client, "q", 1, UINT64_MAX, NULL, &pool), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_pool_create(client, "q", 2, UINT64_MAX - 4096, NULL, &pool), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_pool_create(client, "q", 1, UINT64_MAX - 100, NULL, &pool), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_pool_create(client, "", 1, 1, NULL, &pool), SHMB_E_BAD_NAME);
	options.alignment = 96;
	assert_int_equal(shmb_pool_create(client, "q", 1, 1, &options, &pool), SHMB_E_INVALID);
	options.alignment = 8192;
	assert_int_equal(shmb_pool_create(client, "q", 1, 1, &options, &pool), SHMB_E_INVALID);
	options.alignment = 1;
	options.region = &read_only;
	assert_int_equal(shmb_pool_create(client, "q", 1, 1, &options, &pool), SHMB_E_UNSUPPORTED);
	options.region = &huge;
	assert_int_equal(shmb_pool_create(client, "q", 1, 1, &options, &pool), SHMB_E_UNSUPPORTED);
	options.struct_size = 0;
	assert_int_equal(shmb_pool_create(client, "q", 1, 1, &options, &pool), SHMB_E_INVALID);
	assert_int_equal(atomic_load(&fake.n_asked[WIRE_OP_REGISTER]), 0);
}

/* ---- holding ---- */

static void every_block_is_acquired_once(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block blocks[BLOCKS], more;
	uint32_t seen = 0;

	(void)state;
	for (int i = 0; i < BLOCKS; ++i) {
		blocks[i] = acquire(pool);
		assert_ptr_equal((uint8_t *)blocks[i].address - blocks[i].offset + BLOCKS_OFFSET,
				 (uint8_t *)blocks[0].address - blocks[0].offset + BLOCKS_OFFSET);
		assert_int_equal(blocks[i].offset, BLOCKS_OFFSET + blocks[i].index * STRIDE);
		assert_int_equal((uintptr_t)blocks[i].address % 64, 0);
		seen |= 1U << blocks[i].index;
	}
	assert_int_equal(seen, (1U << BLOCKS) - 1);
	assert_int_equal(count_free(pool), 0);
	assert_int_equal(shmb_pool_acquire(pool, 0, &more), SHMB_E_TIMED_OUT);
	assert_int_equal(shmb_pool_acquire(pool, 1, &more), SHMB_E_TIMED_OUT);
	assert_int_equal(shmb_pool_acquire(pool, -2, &more), SHMB_E_INVALID);
	assert_int_equal(shmb_block_release(pool, &blocks[5]), 0);
	assert_int_equal(count_free(pool), 1);
	more = acquire(pool);
	assert_int_equal(more.index, blocks[5].index);
	shmb_pool_free(pool);
	assert_int_equal(atomic_load(&fake.n_asked[WIRE_OP_NOTIFY]), 0);
}

static void a_second_release_is_refused(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block block = acquire(pool), copy = block, next;

	(void)state;
	assert_int_equal(shmb_block_release(pool, &block), 0);
	assert_null(block.address);
	assert_int_equal(shmb_block_release(pool, &block), SHMB_E_STALE);
	assert_int_equal(shmb_block_release(pool, &copy), SHMB_E_STALE);
	/* nor when the same block is held again by the same session */
	next = acquire(pool);
	assert_int_equal(next.index, copy.index);
	assert_int_not_equal(next.generation, copy.generation);
	assert_int_equal(shmb_block_release(pool, &copy), SHMB_E_STALE);
	assert_int_equal(shmb_block_give(pool, &copy), SHMB_E_STALE);
	assert_int_equal(shmb_block_release(pool, &next), 0);
	copy.index = BLOCKS;
	assert_int_equal(shmb_block_release(pool, &copy), SHMB_E_INVALID);
	shmb_pool_free(pool);
}

static void a_foreign_release_is_refused(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block block;

	(void)state;
	fill_words(7, POOL_HELD);
	assert_int_equal(shmb_pool_find(pool, BLOCKS_OFFSET, 1, &block), 0);
	assert_int_equal(shmb_block_release(pool, &block), SHMB_E_PERMISSION);
	assert_int_equal(shmb_block_give(pool, &block), SHMB_E_PERMISSION);
	assert_int_equal(atomic_load(&words()[0]), other_word(7, POOL_HELD));
	/* closing takes nothing from others either */
	shmb_pool_free(pool);
	for (int i = 0; i < BLOCKS; ++i)
		assert_int_equal(atomic_load(&words()[i]), other_word(7, POOL_HELD));
}

static void generations_wrap_around(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block block;

	(void)state;
	for (int i = 0; i < BLOCKS; ++i)
		atomic_store(&words()[i], pool_word(POOL_GENERATION_MASK, 0, POOL_FREE));
	block = acquire(pool);
	assert_int_equal(block.generation, 0);
	assert_int_equal(pool_word_state(atomic_load(&words()[block.index])), POOL_HELD);
	assert_int_equal(shmb_block_release(pool, &block), 0);
	assert_int_equal(atomic_load(&words()[block.index]), 0);
	shmb_pool_free(pool);
}

static void a_block_goes_from_one_to_another(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block block = acquire(pool), copy = block, taken;

	(void)state;
	assert_int_equal(shmb_block_take(pool, block.offset, block.generation, &taken), SHMB_E_PERMISSION);
	assert_int_equal(shmb_block_give(pool, &block), 0);
	assert_int_equal(shmb_block_give(pool, &copy), 0);
	assert_int_equal(shmb_block_take(pool, block.offset, block.generation + 1, &taken), SHMB_E_STALE);
	assert_int_equal(shmb_block_take(pool, block.offset + 1, block.generation, &taken), 0);
	assert_int_equal(taken.index, block.index);
	assert_int_equal(taken.generation, block.generation + 1);
	assert_int_equal(shmb_block_take(pool, block.offset, block.generation, &block), SHMB_E_STALE);
	assert_int_equal(shmb_block_release(pool, &block), SHMB_E_STALE);
	assert_int_equal(shmb_block_release(pool, &taken), 0);

	/* what another session gives is not ours before we take it */
	fill_words(7, POOL_GIVEN);
	assert_int_equal(shmb_pool_find(pool, BLOCKS_OFFSET, 1, &block), 0);
	assert_int_equal(shmb_block_release(pool, &block), SHMB_E_PERMISSION);
	assert_int_equal(shmb_block_take(pool, block.offset, 7, &taken), 0);
	assert_int_equal(shmb_block_release(pool, &taken), 0);
	assert_int_equal(shmb_block_take(pool, block.offset, 7, &taken), SHMB_E_STALE);

	/* taken back by a release, by way of what was copied before */
	block = acquire(pool);
	copy = block;
	assert_int_equal(shmb_block_give(pool, &block), 0);
	assert_int_equal(shmb_block_release(pool, &copy), 0);
	assert_int_equal(shmb_block_take(pool, block.offset, block.generation, &taken), SHMB_E_STALE);
	assert_int_equal(shmb_block_take(pool, 0, 1, &taken), SHMB_E_OUT_OF_BOUNDS);
	shmb_pool_free(pool);
}

static void a_range_is_found_within_one_block(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block block = acquire(pool), found;
	uint64_t offset = block.offset;

	(void)state;
	assert_int_equal(shmb_pool_find(pool, offset + 10, BLOCK_SIZE - 10, &found), 0);
	assert_int_equal(found.index, block.index);
	assert_int_equal(found.offset, offset);
	assert_ptr_equal(found.address, block.address);
	assert_int_equal(found.generation, block.generation);
	assert_int_equal(shmb_pool_find(pool, offset + 10, BLOCK_SIZE - 9, &found), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_pool_find(pool, offset + BLOCK_SIZE + 1, 0, &found), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_pool_find(pool, BLOCKS_OFFSET - 1, 1, &found), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_pool_find(pool, MEMORY_SIZE, 0, &found), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_pool_find(pool, UINT64_MAX, UINT64_MAX, &found), SHMB_E_OUT_OF_BOUNDS);
	/* its holder may give it back by what it has found */
	assert_int_equal(shmb_block_release(pool, &found), 0);
	assert_int_equal(shmb_pool_find(pool, offset, 1, &found), SHMB_E_STALE);
	shmb_pool_free(pool);
}

/* ---- those who die ---- */

static void blocks_of_the_dead_come_back(void **state) {
	/* it ended; its place has the next one; its place has one that is not so unlike it */
	static const uint64_t sessions[] = { 0, OTHER + 1, OTHER + (1 << 19) };
	struct shmb_pool *pool = open_pool();
	struct shmb_block block;

	(void)state;
	for (size_t i = 0; i < sizeof(sessions) / sizeof(sessions[0]); ++i) {
		fill_words(7, i ? POOL_HELD : POOL_GIVEN);
		assert_int_equal(count_free(pool), 0);
		assert_int_equal(shmb_pool_acquire(pool, 0, &block), SHMB_E_TIMED_OUT);
		atomic_store(session_at(OTHER_INDEX), sessions[i]);
		assert_int_equal(count_free(pool), BLOCKS);
		for (int n = 0; n < BLOCKS; ++n) {
			block = acquire(pool);
			assert_int_equal(block.generation, 8);
		}
		atomic_store(session_at(OTHER_INDEX), OTHER);
		assert_int_equal(shmb_pool_acquire(pool, 0, &block), SHMB_E_TIMED_OUT);
	}
	/* a session that nobody can have */
	for (int i = 0; i < BLOCKS; ++i)
		atomic_store(&words()[i], pool_word(1, pool_holder(OTHER, 8), POOL_HELD));
	assert_int_equal(count_free(pool), BLOCKS);
	shmb_pool_free(pool);
}

/* a free block is preferred: a holder that is away for a moment is left in peace as long as can be */
static void the_free_are_acquired_first(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block block;

	(void)state;
	fill_words(7, POOL_HELD);
	atomic_store(session_at(OTHER_INDEX), 0);
	for (uint32_t i = 0; i < BLOCKS; ++i) {
		atomic_store(&words()[i], 0);
		block = acquire(pool);
		assert_int_equal(block.index, i);
		atomic_store(&words()[i], other_word(7, POOL_HELD));
	}
	shmb_pool_free(pool);
}

typedef struct Waiter {
	struct shmb_pool *pool;
	int timeout;
	int result;
	struct shmb_block block;
	pthread_t thread;
} Waiter;

static void *wait_for_block(void *data) {
	Waiter *waiter = data;

	waiter->result = shmb_pool_acquire(waiter->pool, waiter->timeout, &waiter->block);
	return NULL;
}

static void waiter_start(Waiter *waiter, struct shmb_pool *pool) {
	*waiter = (Waiter){ .pool = pool, .timeout = -1 };
	assert_int_equal(pthread_create(&waiter->thread, NULL, wait_for_block, waiter), 0);
	while (!(atomic_load(&header->sequence) & 1))
		sched_yield();
}

static void a_waiter_gets_what_becomes_free(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block blocks[BLOCKS];
	Waiter waiter;

	(void)state;
	for (int i = 0; i < BLOCKS; ++i)
		blocks[i] = acquire(pool);
	waiter_start(&waiter, pool);
	assert_int_equal(shmb_block_release(pool, &blocks[3]), 0);
	pthread_join(waiter.thread, NULL);
	assert_int_equal(waiter.result, 0);
	assert_int_equal(waiter.block.index, blocks[3].index);
	/* it was announced */
	assert_true(atomic_load(&header->sequence) >> 1);
	/* whoever releases takes the bit back when nobody waits any more */
	while (atomic_load(&header->sequence) & 1) {
		assert_int_equal(shmb_block_release(pool, &waiter.block), 0);
		waiter.block = acquire(pool);
	}
	shmb_pool_free(pool);
}

static void a_waiter_notices_who_dies(void **state) {
	struct shmb_pool *pool = open_pool();
	Waiter waiter;

	(void)state;
	fill_words(7, POOL_HELD);
	waiter_start(&waiter, pool);
	atomic_store(session_at(OTHER_INDEX), 0);
	pthread_join(waiter.thread, NULL);
	assert_int_equal(waiter.result, 0);
	shmb_pool_free(pool);
}

static void a_waiter_is_told_that_all_is_over(void **state) {
	struct shmb_pool *pool = open_pool();
	Waiter waiter;

	(void)state;
	fill_words(7, POOL_HELD);
	waiter_start(&waiter, pool);
	fake_set(&fake, SLOT, GENERATION, WIRE_STATE_RETIRING);
	pthread_join(waiter.thread, NULL);
	assert_int_equal(waiter.result, SHMB_E_RETIRING);
	fake_set(&fake, SLOT, GENERATION, WIRE_STATE_ACTIVE);
	atomic_store(&header->sequence, 0);
	waiter_start(&waiter, pool);
	atomic_store(session_at(FAKE_SESSION_INDEX), 0);
	pthread_join(waiter.thread, NULL);
	assert_int_equal(waiter.result, SHMB_E_DETACHED);
	atomic_store(session_at(FAKE_SESSION_INDEX), FAKE_SESSION);
	shmb_pool_free(pool);
}

static void nothing_is_acquired_once_it_is_over(void **state) {
	struct shmb_pool *pool = open_pool();
	struct shmb_block block = acquire(pool), more;

	(void)state;
	fake_set(&fake, SLOT, GENERATION, WIRE_STATE_LAZY);
	more = acquire(pool);
	fake_set(&fake, SLOT, GENERATION, WIRE_STATE_RETIRING);
	assert_int_equal(shmb_pool_acquire(pool, 0, &more), SHMB_E_RETIRING);
	fake_set(&fake, SLOT, GENERATION, WIRE_STATE_REVOKED);
	assert_int_equal(shmb_pool_acquire(pool, 0, &more), SHMB_E_REVOKED);
	fake_set(&fake, SLOT, GENERATION + 1, WIRE_STATE_ACTIVE);
	assert_int_equal(shmb_pool_acquire(pool, 0, &more), SHMB_E_RETIRING);
	fake_set(&fake, SLOT, GENERATION, WIRE_STATE_ACTIVE);
	/* what is held is given, taken and released */
	fake_set(&fake, SLOT, GENERATION, WIRE_STATE_RETIRING);
	assert_int_equal(shmb_block_give(pool, &block), 0);
	assert_int_equal(shmb_block_take(pool, block.offset, block.generation, &more), 0);
	assert_int_equal(shmb_block_release(pool, &more), 0);
	fake_set(&fake, SLOT, GENERATION, WIRE_STATE_ACTIVE);
	/* a session that has ended claims nothing: it would be anybody's */
	block = acquire(pool);
	assert_int_equal(shmb_block_give(pool, &block), 0);
	atomic_store(session_at(FAKE_SESSION_INDEX), 0);
	assert_int_equal(shmb_pool_acquire(pool, 0, &more), SHMB_E_DETACHED);
	assert_int_equal(shmb_block_take(pool, block.offset, block.generation, &more), SHMB_E_DETACHED);
	atomic_store(session_at(FAKE_SESSION_INDEX), FAKE_SESSION);
	atomic_store(&((RegistryHeader *)fake.registry)->state, LAYOUT_CLOSED);
	assert_int_equal(shmb_pool_acquire(pool, 0, &more), SHMB_E_DETACHED);
	assert_int_equal(shmb_block_release(pool, &block), 0);
	shmb_pool_free(pool);
}

/* ---- threads, processes, clients ---- */

static void *use_blocks(void *data) {
	struct shmb_pool *pool = data;
	struct shmb_block block;

	for (int i = 0; i < ROUNDS; ++i) {
		_Atomic uint64_t *canary;

		if (shmb_pool_acquire(pool, -1, &block))
			return "acquire";
		canary = block.address;
		if (atomic_exchange(canary, 1))
			return "two at once";
		atomic_store(canary, 0);
		if (shmb_block_release(pool, &block))
			return "release";
	}
	return NULL;
}

static void threads_share_few_blocks(void **state) {
	struct shmb_pool *pool = open_pool();
	pthread_t threads[THREADS];
	void *failed;

	(void)state;
	/* two are left, so that they wait */
	for (int i = 2; i < BLOCKS; ++i)
		atomic_store(&words()[i], other_word(1, POOL_HELD));
	for (int i = 0; i < THREADS; ++i)
		assert_int_equal(pthread_create(&threads[i], NULL, use_blocks, pool), 0);
	for (int i = 0; i < THREADS; ++i) {
		pthread_join(threads[i], &failed);
		assert_null(failed);
	}
	assert_int_equal(count_free(pool), 2);
	shmb_pool_free(pool);
}

static void a_child_is_refused(void **state) {
	struct shmb_pool *pool = open_pool(), *again = open_pool(), *other;
	struct shmb_block block = acquire(pool), more;
	uint64_t word = atomic_load(&words()[block.index]);
	uint32_t n;
	int status;
	pid_t pid;

	(void)state;
	pid = fork();
	if (!pid) {
		bool good = shmb_pool_acquire(pool, -1, &more) == SHMB_E_FORKED &&
			    shmb_block_release(pool, &block) == SHMB_E_FORKED &&
			    shmb_block_give(pool, &block) == SHMB_E_FORKED &&
			    shmb_block_take(pool, block.offset, block.generation, &more) == SHMB_E_FORKED &&
			    shmb_pool_find(pool, block.offset, 1, &more) == SHMB_E_FORKED &&
			    shmb_pool_count_free(pool, &n) == SHMB_E_FORKED &&
			    shmb_pool_open(client, "p", &other) == SHMB_E_FORKED &&
			    shmb_pool_create(client, "q", 1, 1, NULL, &other) == SHMB_E_FORKED &&
			    !shmb_pool_get_region(pool) && !shmb_pool_free(pool) &&
			    shmb_pool_get_n_blocks(again) == BLOCKS && !shmb_pool_free(again);

		_exit(!good);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_int_equal(atomic_load(&words()[block.index]), word);
	assert_int_equal(shmb_block_release(pool, &block), 0);
	shmb_pool_free(again);
	shmb_pool_free(pool);
}

static void without_a_lease_page_there_is_no_pool(void **state) {
	FakeBroker bare;
	struct shmb_client *blind;
	struct shmb_pool *pool;

	(void)state;
	blind = fake_start(&bare, WIRE_ATTACH_RMW, SHMB_NO_LEASE_PAGE);
	assert_int_equal(shmb_pool_open(blind, "p", &pool), SHMB_E_NOT_ATTACHED);
	assert_int_equal(shmb_pool_create(blind, "p", 1, 1, NULL, &pool), SHMB_E_NOT_ATTACHED);
	assert_null(shmb_client_free(blind));
	fake_die(&bare);
	(void)unlink(bare.path);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void) {
	const struct CMUnitTest tests[] = {
		TEST(a_pool_is_what_its_header_says),
		TEST(the_same_pool_again_is_the_same),
		TEST(a_header_that_lies_is_refused),
		TEST(too_small_or_at_an_odd_place_is_no_pool),
		TEST(a_header_is_read_once),
		TEST(a_pool_is_created_with_its_shape),
		TEST(shapes_that_cannot_be_are_refused),
		TEST(every_block_is_acquired_once),
		TEST(a_second_release_is_refused),
		TEST(a_foreign_release_is_refused),
		TEST(generations_wrap_around),
		TEST(a_block_goes_from_one_to_another),
		TEST(a_range_is_found_within_one_block),
		TEST(blocks_of_the_dead_come_back),
		TEST(the_free_are_acquired_first),
		TEST(a_waiter_gets_what_becomes_free),
		TEST(a_waiter_notices_who_dies),
		TEST(a_waiter_is_told_that_all_is_over),
		TEST(nothing_is_acquired_once_it_is_over),
		TEST(threads_share_few_blocks),
		TEST(a_child_is_refused),
		cmocka_unit_test(without_a_lease_page_there_is_no_pool),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
