/* SPDX-License-Identifier: Apache-2.0 */

/* Shapes of the shared memories, and what a lease page counts whatever a hostile consumer writes into it. */

#include "wire/layout.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t seed[2] = { 11, 13 };

/* what the broker has of a consumer's page: its own copy of the shape, and a mapping with a hole behind it */
typedef struct Page {
	LeasePageHeader shape;
	LeasePageHeader *written;    /* the consumer's mapping */
	const LeasePageHeader *read; /* the broker's mapping */
	int fd;
} Page;

static void page_init(Page *page, uint32_t capacity, uint32_t lanes) {
	uint64_t size = layout_lease_page_init(&page->shape, capacity, lanes, WIRE_ATTACH_RMW, 5);
	uint8_t *room;

	assert_true(size > 0);
	page->fd = memfd_create("lease-page", MFD_CLOEXEC);
	assert_true(page->fd >= 0);
	assert_int_equal(ftruncate(page->fd, (off_t)size), 0);
	page->written = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, page->fd, 0);
	assert_true(page->written != MAP_FAILED);
	room = mmap(NULL, size + LAYOUT_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_true(room != MAP_FAILED);
	page->read = mmap(room, size, PROT_READ, MAP_SHARED | MAP_FIXED, page->fd, 0);
	assert_true(page->read == (void *)room);
	memcpy((void *)page->written, (const void *)&page->shape, sizeof(page->shape));
}

static void page_deinit(Page *page) {
	assert_int_equal(munmap(page->written, page->shape.total_size), 0);
	assert_int_equal(munmap((void *)page->read, page->shape.total_size + LAYOUT_PAGE), 0);
	assert_int_equal(close(page->fd), 0);
}

static void page_use_lane(Page *page, uint32_t lane) {
	atomic_fetch_or(&page->written->lanes_used, UINT64_C(1) << lane);
}

static LaneCounter *page_counter(Page *page, uint32_t lane, uint32_t slot) {
	return layout_lane(&page->shape, lane) - layout_lane(&page->shape, 0) + slot +
	       (LaneCounter *)((uintptr_t)page->written + page->shape.lanes_offset);
}

static void page_set(Page *page, uint32_t lane, uint32_t slot, uint32_t acquired, uint32_t released) {
	LaneCounter *counter = page_counter(page, lane, slot);

	atomic_store(&counter->acquired, acquired);
	atomic_store(&counter->released, released);
}

static uint32_t page_count(const Page *page, uint32_t slot) {
	return layout_lease_page_count(page->read, &page->shape, slot);
}

static void test_words(void **state) {
	uint64_t generation = layout_generation((1 << 22) - 1, (UINT64_C(1) << 40) - 1);

	(void)state;
	assert_true(generation == (UINT64_C(1) << LAYOUT_GENERATION_BITS) - 1);
	for (uint32_t s = 0; s < 4; s++) {
		uint64_t word = layout_word(generation, s);

		assert_true(layout_word_generation(word) == generation);
		assert_int_equal(layout_word_state(word), s);
		assert_int_equal(layout_word_grants(word), s == WIRE_STATE_ACTIVE || s == WIRE_STATE_LAZY);
	}
	assert_false(layout_word_grants(0));
}

static void test_registry_shape(void **state) {
	static const uint32_t capacities[] = { 1, 2, 3, 63, 64, 65, 1000, 65535, 65536, 65537, LAYOUT_CAPACITY_MAX };

	(void)state;
	for (size_t i = 0; i < sizeof(capacities) / sizeof(capacities[0]); i++) {
		uint32_t capacity = capacities[i];
		RegistryHeader header;
		uint64_t size = layout_registry_init(&header, capacity, capacity / 2 + 1, 77, seed);

		assert_true(size > 0 && size % LAYOUT_PAGE == 0);
		assert_true(header.total_size == size);
		assert_int_equal(header.capacity, capacity);
		assert_int_equal(header.index_size & (header.index_size - 1), 0);
		assert_true(header.index_size >= 2 * capacity && header.index_size < 4 * capacity);
		assert_true(header.index_offset >= sizeof(header));
		assert_true(header.index_offset + header.index_size * 8ull <= header.sessions_offset);
		assert_true(header.sessions_offset + header.session_capacity * 8ull <= header.slots_offset);
		assert_true(header.slots_offset + capacity * sizeof(RegistrySlot) <= header.details_offset);
		assert_true(header.details_offset + capacity * sizeof(RegistryDetail) <= size);
		assert_true(header.details_offset + capacity * sizeof(RegistryDetail) + LAYOUT_PAGE > size);
		assert_int_equal(header.slots_offset % 64, 0);
		assert_int_equal(header.details_offset % 64, 0);
		assert_int_equal(header.state, LAYOUT_OPEN);
		assert_true(header.epoch == 77 && header.hash_seed[0] == 11 && header.hash_seed[1] == 13);
		assert_int_equal(layout_registry_check(&header, size), 0);
	}
}

static void test_registry_shapes_that_cannot_be(void **state) {
	RegistryHeader header;

	(void)state;
	assert_true(layout_registry_init(&header, 0, 1, 0, seed) == 0);
	assert_true(layout_registry_init(&header, LAYOUT_CAPACITY_MAX + 1, 1, 0, seed) == 0);
	assert_true(layout_registry_init(&header, UINT32_MAX, 1, 0, seed) == 0);
	assert_true(layout_registry_init(&header, UINT32_C(0x80000001), 1, 0, seed) == 0);
	assert_true(layout_registry_init(&header, 1, 0, 0, seed) == 0);
	assert_true(layout_registry_init(&header, 1, UINT32_MAX, 0, seed) == 0);
	assert_true(layout_registry_init(&header, 1, 1, 1 << 22, seed) == 0);
	assert_true(layout_registry_init(&header, 1, 1, (1 << 22) - 1, seed) > 0);
}

static void test_registry_check(void **state) {
	RegistryHeader right;
	uint64_t size = layout_registry_init(&right, 100, 10, 3, seed);

	(void)state;
	assert_int_equal(layout_registry_check(&right, size), 0);
	assert_int_equal(layout_registry_check(&right, size - 1), -EINVAL);
	assert_int_equal(layout_registry_check(&right, size + LAYOUT_PAGE), -EINVAL);
	assert_int_equal(layout_registry_check(&right, 0), -EINVAL);
#define WRONG(_field, _value)                                                   \
	do {                                                                    \
		RegistryHeader wrong;                                           \
                                                                                \
		(void)layout_registry_init(&wrong, 100, 10, 3, seed);           \
		wrong._field = (_value);                                        \
		assert_int_equal(layout_registry_check(&wrong, size), -EINVAL); \
	} while (0)
	WRONG(magic, 0);
	WRONG(magic, LAYOUT_LEASE_MAGIC);
	WRONG(version, LAYOUT_VERSION + 1);
	WRONG(header_size, sizeof(RegistryHeader) + 8);
	WRONG(slot_size, sizeof(RegistrySlot) + 64);
	WRONG(total_size, size + LAYOUT_PAGE);
	WRONG(epoch, UINT64_MAX);
	WRONG(capacity, 0);
	WRONG(capacity, 99 + LAYOUT_PAGE);
	WRONG(capacity, UINT32_MAX);
	WRONG(index_size, 128);
	WRONG(index_size, 0);
	WRONG(session_capacity, 0);
	WRONG(session_capacity, 10000);
	WRONG(index_offset, 0);
	WRONG(sessions_offset, UINT64_MAX - 7);
	WRONG(slots_offset, size);
	WRONG(details_offset, 0);
	WRONG(detail_size, sizeof(RegistryDetail) + 64);
	WRONG(state, 0);
	WRONG(state, LAYOUT_CLOSED + 1);
#undef WRONG
	right.state = LAYOUT_CLOSED;
	assert_int_equal(layout_registry_check(&right, size), 0);
}

static void test_lease_page_shape(void **state) {
	static const uint32_t lanes[] = { 1, 2, 16, 63, 64 };

	(void)state;
	for (size_t i = 0; i < sizeof(lanes) / sizeof(lanes[0]); i++) {
		LeasePageHeader header;
		uint64_t size = layout_lease_page_init(&header, 1001, lanes[i], WIRE_ATTACH_ASYMMETRIC, 9);
		uint64_t end = header.lanes_offset + (uint64_t)lanes[i] * 1001 * sizeof(LaneCounter);

		assert_true(size > 0 && size % LAYOUT_PAGE == 0 && header.total_size == size);
		assert_true(header.rung_offset >= sizeof(header));
		assert_true(header.rung_offset + 1001 * sizeof(uint32_t) <= header.lanes_offset);
		assert_true(end <= size && end + LAYOUT_PAGE > size);
		assert_true((uintptr_t)(layout_lane(&header, lanes[i] - 1) + 1001) - (uintptr_t)&header == end);
		assert_true(header.session == 9 && header.lanes_used == 0);
		assert_int_equal(layout_lease_page_check(&header, size), 0);
	}
}

static void test_lease_page_check(void **state) {
	LeasePageHeader header;
	uint64_t size;

	(void)state;
	assert_true(layout_lease_page_init(&header, 0, 1, WIRE_ATTACH_RMW, 9) == 0);
	assert_true(layout_lease_page_init(&header, LAYOUT_CAPACITY_MAX + 1, 1, WIRE_ATTACH_RMW, 9) == 0);
	assert_true(layout_lease_page_init(&header, 1, 0, WIRE_ATTACH_RMW, 9) == 0);
	assert_true(layout_lease_page_init(&header, 1, LAYOUT_LANES_MAX + 1, WIRE_ATTACH_RMW, 9) == 0);
	assert_true(layout_lease_page_init(&header, 1, 1, WIRE_ATTACH_AUTO, 9) == 0);
	assert_true(layout_lease_page_init(&header, 1, 1, 3, 9) == 0);
	assert_true(layout_lease_page_init(&header, LAYOUT_CAPACITY_MAX, LAYOUT_LANES_MAX, WIRE_ATTACH_RMW, 9) >=
		    UINT64_C(8) * LAYOUT_CAPACITY_MAX * LAYOUT_LANES_MAX);

	size = layout_lease_page_init(&header, 100, 4, WIRE_ATTACH_RMW, 9);
	assert_int_equal(layout_lease_page_check(&header, size), 0);
	assert_int_equal(layout_lease_page_check(&header, size - 1), -EINVAL);
	assert_int_equal(layout_lease_page_check(&header, 0), -EINVAL);
#define WRONG(_field, _value)                                                     \
	do {                                                                      \
		LeasePageHeader wrong;                                            \
                                                                                  \
		(void)layout_lease_page_init(&wrong, 100, 4, WIRE_ATTACH_RMW, 9); \
		wrong._field = (_value);                                          \
		assert_int_equal(layout_lease_page_check(&wrong, size), -EINVAL); \
	} while (0)
	WRONG(magic, LAYOUT_REGISTRY_MAGIC);
	WRONG(version, 0);
	WRONG(header_size, 0);
	WRONG(total_size, 0);
	WRONG(capacity, 0);
	WRONG(capacity, UINT32_MAX);
	WRONG(lanes, 0);
	WRONG(lanes, UINT32_MAX);
	WRONG(mode, WIRE_ATTACH_AUTO);
	WRONG(rung_offset, 0);
	WRONG(lanes_offset, UINT64_MAX - 7);
#undef WRONG
}

static void test_count(void **state) {
	Page page;

	(void)state;
	page_init(&page, 1000, 4);
	assert_int_equal(page_count(&page, 999), 0);
	page_use_lane(&page, 0);
	page_use_lane(&page, 3);
	page_set(&page, 0, 999, 7, 5);
	page_set(&page, 3, 999, 10, 9);
	assert_int_equal(page_count(&page, 999), 3);
	/* acquired by one thread, released by another: only the sums count */
	page_set(&page, 0, 999, 5, 0);
	page_set(&page, 3, 999, 0, 5);
	assert_int_equal(page_count(&page, 999), 0);
	/* neighbours of a slot do not count */
	page_set(&page, 0, 998, 1, 0);
	page_set(&page, 1, 0, 1, 0);
	assert_int_equal(page_count(&page, 999), 0);
	assert_int_equal(page_count(&page, 998), 1);
	/* counters wrap */
	page_set(&page, 0, 0, 1, UINT32_MAX);
	assert_int_equal(page_count(&page, 0), 2);
	page_set(&page, 0, 0, UINT32_MAX, UINT32_MAX);
	page_set(&page, 3, 0, 1, 1);
	assert_int_equal(page_count(&page, 0), 0);
	page_deinit(&page);
}

static void test_lane_that_is_not_flagged_is_not_read(void **state) {
	struct stat before, after;
	Page page;

	(void)state;
	page_init(&page, 65536, 16);
	page_use_lane(&page, 2);
	page_set(&page, 2, 40000, 1, 0);
	assert_int_equal(fstat(page.fd, &before), 0);
	assert_int_equal(page_count(&page, 40000), 1);
	assert_int_equal(fstat(page.fd, &after), 0);
	/* a read through a mapping fills a hole with a page, at the broker's expense */
	assert_int_equal(after.st_blocks, before.st_blocks);

	page_set(&page, 5, 40000, 1, 0);
	assert_int_equal(page_count(&page, 40000), 1);
	page_use_lane(&page, 5);
	assert_int_equal(page_count(&page, 40000), 2);
	page_deinit(&page);
}

/* the broker maps nothing behind the page: a read there would be a SIGSEGV */
static void test_hostile_lanes_used(void **state) {
	Page page;

	(void)state;
	page_init(&page, 512, 2);
	atomic_store(&page.written->lanes_used, UINT64_MAX);
	page_set(&page, 0, 511, 4, 1);
	page_set(&page, 1, 511, 2, 2);
	assert_int_equal(page_count(&page, 511), 3);
	page_deinit(&page);

	page_init(&page, 512, 64);
	atomic_store(&page.written->lanes_used, UINT64_MAX);
	page_set(&page, 63, 511, 4, 1);
	assert_int_equal(page_count(&page, 511), 3);
	page_deinit(&page);
}

static void test_hostile_header(void **state) {
	Page page;

	(void)state;
	page_init(&page, 512, 2);
	page_use_lane(&page, 1);
	page_set(&page, 1, 100, 9, 8);
	page.written->capacity = UINT32_MAX;
	page.written->lanes = UINT32_MAX;
	page.written->lanes_offset = UINT64_C(1) << 60;
	page.written->total_size = UINT64_MAX;
	page.written->mode = 99;
	assert_int_equal(page_count(&page, 100), 1);
	page_deinit(&page);
}

/* released = acquired + 1 in one page must not make up for a lease in another */
static void test_hostile_page_does_not_balance_another(void **state) {
	Page victim, hostile;
	uint32_t held, forged;

	(void)state;
	page_init(&victim, 64, 2);
	page_init(&hostile, 64, 2);
	page_use_lane(&victim, 0);
	page_use_lane(&hostile, 0);
	page_set(&victim, 0, 7, 1, 0);
	page_set(&hostile, 0, 7, 4, 5);
	held = page_count(&victim, 7);
	forged = page_count(&hostile, 7);
	assert_int_equal(held, 1);
	assert_int_equal(forged, UINT32_MAX);
	/* summed they would look idle, which is why nobody may sum them; and the forger's own page is not idle */
	assert_int_equal((uint32_t)(held + forged), 0);
	page_set(&victim, 0, 7, 1, 1);
	assert_int_equal(page_count(&victim, 7), 0);
	assert_int_not_equal(page_count(&hostile, 7), 0);
	page_deinit(&victim);
	page_deinit(&hostile);
}

typedef struct Churn {
	Page page;
	_Atomic bool stop;
	_Atomic uint64_t rounds;
} Churn;

static void *churn_main(void *data) {
	Churn *churn = data;
	LaneCounter *taken = page_counter(&churn->page, 0, 3), *given = page_counter(&churn->page, 1, 3);

	while (!atomic_load(&churn->stop)) {
		atomic_fetch_add_explicit(&taken->acquired, 1, memory_order_relaxed);
		atomic_fetch_add_explicit(&given->released, 1, memory_order_release);
		atomic_fetch_add(&churn->rounds, 1);
	}
	return NULL;
}

/* releases are read first: a release that is counted has its acquire counted, so the difference is never negative */
static void test_count_is_never_negative(void **state) {
	Churn churn = { .stop = false };
	pthread_t thread;
	int32_t least = 0;

	(void)state;
	page_init(&churn.page, 64, 2);
	page_use_lane(&churn.page, 0);
	page_use_lane(&churn.page, 1);
	assert_int_equal(pthread_create(&thread, NULL, churn_main, &churn), 0);
	while (atomic_load(&churn.rounds) < 500000) {
		int32_t count = (int32_t)page_count(&churn.page, 3);

		if (count < least)
			least = count;
	}
	atomic_store(&churn.stop, true);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_int_equal(least, 0);
	assert_int_equal(page_count(&churn.page, 3), 0);
	page_deinit(&churn.page);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_words),
		cmocka_unit_test(test_registry_shape),
		cmocka_unit_test(test_registry_shapes_that_cannot_be),
		cmocka_unit_test(test_registry_check),
		cmocka_unit_test(test_lease_page_shape),
		cmocka_unit_test(test_lease_page_check),
		cmocka_unit_test(test_count),
		cmocka_unit_test(test_lane_that_is_not_flagged_is_not_read),
		cmocka_unit_test(test_hostile_lanes_used),
		cmocka_unit_test(test_hostile_header),
		cmocka_unit_test(test_hostile_page_does_not_balance_another),
		cmocka_unit_test(test_count_is_never_negative),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
