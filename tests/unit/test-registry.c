/* SPDX-License-Identifier: Apache-2.0 */

/* The registry as a consumer sees it, against the broker's own books. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "region.h"
#include "registry.h"
#include "wire/name.h"

#define CAPACITY 4096

typedef struct Fixture {
	Registry registry;
	const RegistryHeader *seen; /* through the fd that consumers get */
	Object *object;
} Fixture;

static int setup(void **state) {
	Fixture *fixture = calloc(1, sizeof(*fixture));
	struct stat st;

	assert_int_equal(registry_init(&fixture->registry, CAPACITY, 64), 0);
	assert_int_equal(fstat(fixture->registry.read_only_fd, &st), 0);
	fixture->seen = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fixture->registry.read_only_fd, 0);
	assert_ptr_not_equal(fixture->seen, MAP_FAILED);
	assert_int_equal(layout_registry_check(fixture->seen, (uint64_t)st.st_size), 0);
	fixture->object = calloc(1, sizeof(*fixture->object));
	fixture->object->id = 7;
	*state = fixture;
	return 0;
}

static int teardown(void **state) {
	Fixture *fixture = *state;

	munmap((void *)fixture->seen, fixture->seen->total_size);
	registry_deinit(&fixture->registry);
	free(fixture->object);
	free(fixture);
	return 0;
}

static Region *region_make(Fixture *fixture, const char *name) {
	Region *region = calloc(1, sizeof(*region) + strlen(name) + 1);

	region->name_length = strlen(name);
	memcpy(region->name, name, region->name_length);
	region->object = fixture->object;
	region->size = 4096;
	region->kind = WIRE_KIND_MEMORY;
	region->access = WIRE_ACCESS_READ;
	return region;
}

/* what a reader finds: the slot number, or UINT32_MAX */
static uint32_t probe(const Fixture *fixture, const char *name) {
	const RegistryHeader *registry = fixture->seen;
	uint64_t hash = wire_name_hash(registry->hash_seed, name, strlen(name));

	for (uint32_t i = 0; i < LAYOUT_PROBE_MAX; ++i) {
		uint64_t entry =
			atomic_load(&layout_index(registry)[((uint32_t)hash + i) & (registry->index_size - 1)]);
		const RegistrySlot *slot;

		if (!entry)
			return UINT32_MAX;
		if (entry == LAYOUT_TOMBSTONE || entry >> 32 != hash >> 32)
			continue;
		slot = &layout_slots(registry)[(uint32_t)entry - 1];
		if (slot->name_length == strlen(name) && !memcmp(slot->name, name, slot->name_length))
			return (uint32_t)entry - 1;
	}
	return UINT32_MAX;
}

static void publish(Fixture *fixture, Region *region) {
	assert_int_equal(registry_reserve(&fixture->registry, region), 0);
	registry_publish(&fixture->registry, region, NULL);
}

static void a_published_region_is_found_and_a_released_one_is_not(void **state) {
	Fixture *fixture = *state;
	Region *region = region_make(fixture, "frame");
	const RegistrySlot *slot;

	assert_int_equal(probe(fixture, "frame"), UINT32_MAX);
	publish(fixture, region);
	assert_int_equal(probe(fixture, "frame"), region->slot);
	assert_ptr_equal(registry_find(&fixture->registry, "frame", 5), region);
	slot = &layout_slots(fixture->seen)[region->slot];
	assert_true(layout_word_grants(slot->word));
	assert_int_equal(layout_word_generation(slot->word), region->generation);
	assert_int_equal(layout_details(fixture->seen)[region->slot].object, 7);

	registry_release(&fixture->registry, region);
	assert_int_equal(probe(fixture, "frame"), UINT32_MAX);
	assert_null(registry_find(&fixture->registry, "frame", 5));
	assert_int_equal(slot->word, 0);
	free(region);
}

static void a_generation_is_never_used_again(void **state) {
	Fixture *fixture = *state;
	uint64_t last = 0;

	for (int i = 0; i < 100; ++i) {
		Region *region = region_make(fixture, "same");

		publish(fixture, region);
		assert_true(region->generation > last);
		assert_ptr_equal(registry_at(&fixture->registry, region->slot, region->generation), region);
		assert_null(registry_at(&fixture->registry, region->slot, last));
		last = region->generation;
		registry_release(&fixture->registry, region);
		free(region);
	}
	assert_int_equal(last >> LAYOUT_COUNTER_BITS, fixture->seen->epoch);
}

static void replace_moves_the_name_in_one_store(void **state) {
	Fixture *fixture = *state;
	Region *old = region_make(fixture, "frame"), *new = region_make(fixture, "frame");

	publish(fixture, old);
	assert_int_equal(registry_reserve(&fixture->registry, new), 0);
	registry_publish(&fixture->registry, new, old);
	assert_int_equal(probe(fixture, "frame"), new->slot);
	assert_ptr_equal(registry_find(&fixture->registry, "frame", 5), new);
	assert_false(old->named);
	registry_release(&fixture->registry, old);
	assert_int_equal(probe(fixture, "frame"), new->slot);
	registry_release(&fixture->registry, new);
	free(old);
	free(new);
}

/* a full registry, emptied in another order and filled again: every name that is indexed is found by a reader */
static void the_index_survives_removals(void **state) {
	Fixture *fixture = *state;
	Region *regions[CAPACITY], extra = { .object = fixture->object };
	char name[32];

	for (int round = 0; round < 4; ++round) {
		for (int i = 0; i < CAPACITY; ++i) {
			snprintf(name, sizeof(name), "region_%d_%06d", round, i);
			regions[i] = region_make(fixture, name);
			publish(fixture, regions[i]);
		}
		assert_int_equal(registry_reserve(&fixture->registry, &extra), REGISTRY_E_FULL);
		for (int i = 0; i < CAPACITY; ++i) {
			if (!(regions[i]->flags & WIRE_REGION_UNINDEXED))
				assert_int_equal(probe(fixture, regions[i]->name), regions[i]->slot);
			assert_ptr_equal(registry_find(&fixture->registry, regions[i]->name, regions[i]->name_length),
					 regions[i]);
		}
		for (int i = 0; i < CAPACITY; ++i) {
			int at = (int)((unsigned)i * 2654435761u % CAPACITY);

			for (; !regions[at]; at = (at + 1) % CAPACITY)
				;
			registry_release(&fixture->registry, regions[at]);
			free(regions[at]);
			regions[at] = NULL;
		}
		assert_int_equal(fixture->registry.n_regions, 0);
		assert_int_equal(fixture->registry.n_unindexed, 0);
	}
	/* nothing is left behind that later probes would have to step over */
	for (uint32_t i = 0; i < fixture->seen->index_size; ++i)
		assert_int_equal(layout_index(fixture->seen)[i], 0);
}

static void names_that_do_not_fit_resolve_by_message_only(void **state) {
	Fixture *fixture = *state;
	_Atomic uint64_t *index = layout_index(fixture->registry.header);
	Region *region = region_make(fixture, "crowded");

	for (uint32_t i = 0; i < fixture->seen->index_size; ++i)
		index[i] = UINT64_C(1) << 32 | 1;
	publish(fixture, region);
	assert_true(region->flags & WIRE_REGION_UNINDEXED);
	assert_int_equal(fixture->registry.n_unindexed, 1);
	assert_int_equal(probe(fixture, "crowded"), UINT32_MAX);
	assert_ptr_equal(registry_find(&fixture->registry, "crowded", 7), region);
	registry_release(&fixture->registry, region);
	assert_int_equal(fixture->registry.n_unindexed, 0);
	free(region);
}

static void consumers_cannot_write(void **state) {
	Fixture *fixture = *state;

	assert_ptr_equal(mmap(NULL, LAYOUT_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fixture->registry.read_only_fd, 0),
			 MAP_FAILED);
	assert_int_equal(write(fixture->registry.read_only_fd, "x", 1), -1);
}

static void sessions_are_marked_and_their_entries_used_again(void **state) {
	Fixture *fixture = *state;
	uint32_t indices[64];

	for (int i = 0; i < 64; ++i) {
		indices[i] = registry_session_reserve(&fixture->registry);
		assert_int_not_equal(indices[i], UINT32_MAX);
		registry_session_set(&fixture->registry, indices[i], 1000 + (uint64_t)i);
		assert_int_equal(layout_sessions(fixture->seen)[indices[i]], 1000 + i);
	}
	assert_int_equal(registry_session_reserve(&fixture->registry), UINT32_MAX);
	registry_session_release(&fixture->registry, indices[5]);
	assert_int_equal(layout_sessions(fixture->seen)[indices[5]], 0);
	assert_int_equal(registry_session_reserve(&fixture->registry), indices[5]);
}

static void an_end_closes_the_registry_for_readers(void **state) {
	Fixture *fixture = *state;

	assert_int_equal(fixture->seen->state, LAYOUT_OPEN);
	registry_deinit(&fixture->registry);
	assert_int_equal(fixture->seen->state, LAYOUT_CLOSED);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(a_published_region_is_found_and_a_released_one_is_not, setup, teardown),
		cmocka_unit_test_setup_teardown(a_generation_is_never_used_again, setup, teardown),
		cmocka_unit_test_setup_teardown(replace_moves_the_name_in_one_store, setup, teardown),
		cmocka_unit_test_setup_teardown(the_index_survives_removals, setup, teardown),
		cmocka_unit_test_setup_teardown(names_that_do_not_fit_resolve_by_message_only, setup, teardown),
		cmocka_unit_test_setup_teardown(consumers_cannot_write, setup, teardown),
		cmocka_unit_test_setup_teardown(sessions_are_marked_and_their_entries_used_again, setup, teardown),
		cmocka_unit_test_setup_teardown(an_end_closes_the_registry_for_readers, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
