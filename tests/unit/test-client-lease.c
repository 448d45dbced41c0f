/* SPDX-License-Identifier: Apache-2.0 */

/* Leases, mappings, lanes and events of the library, against a fake broker whose registry the test writes. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "client-broker.h"

#define OBJECT_SIZE 20000
#define THREADS 40
#define ROUNDS 2000
#define EVENTS_MAX 4096
#define EVENTS_SENT (EVENTS_MAX + 904)

static FakeBroker fake;
static struct shmb_client *client;
static int memory;

static void start_as(uint32_t mode, uint32_t flags) {
	client = fake_start(&fake, mode, flags);
	memory = memfd_create("memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_true(memory >= 0);
	assert_int_equal(ftruncate(memory, OBJECT_SIZE), 0);
	assert_int_equal(pwrite(memory, "zero", 4, 0), 4);
	assert_int_equal(pwrite(memory, "one", 3, 5000), 3);
	fake_register(&fake, 0, 100, (FakeRegion){ .name = "r", .size = 5000, .object = 9, .fd = memory });
	fake_register(&fake, 1, 101,
		      (FakeRegion){ .name = "s", .offset = 5000, .size = 15000, .object = 9, .fd = memory });
}

static int start(void **state) {
	(void)state;
	start_as(WIRE_ATTACH_RMW, SHMB_FORCE_RMW);
	return 0;
}

static int start_asymmetric(void **state) {
	(void)state;
	start_as(WIRE_ATTACH_ASYMMETRIC, 0);
	return 0;
}

static int stop(void **state) {
	(void)state;
	fake_stop(&fake, client);
	(void)close_fd(memory);
	return 0;
}

static uint32_t asked(uint16_t opcode) {
	return atomic_load(&fake.n_asked[opcode]);
}

/* whatever was sent before has been dealt with */
static void settle(void) {
	assert_int_equal(shmb_client_ping(client, NULL), 0);
}

static int try(const char *name, uint32_t access, struct shmb_lease *ret) {
	return shmb_client_get_memory_info(client, name, 0, SHMB_REST, access, ret);
}

static struct shmb_lease get(const char *name) {
	struct shmb_lease lease;

	assert_int_equal(try(name, SHMB_READ, &lease), 0);
	return lease;
}

static void give_back(struct shmb_lease *lease) {
	assert_int_equal(shmb_lease_release(lease), 0);
}

static bool is_mapped(void *address) {
	uint8_t *page = (uint8_t *)((uintptr_t)address & ~(uintptr_t)(getpagesize() - 1));
	unsigned char resident;

	return !mincore(page, 1, &resident);
}

static void gone(void) {
	atomic_fetch_add(&((RegistryHeader *)fake.registry)->gone_sequence, 1);
}

/* ---- mappings ---- */

static void the_second_use_asks_nothing(void **state) {
	struct shmb_lease lease = get("r");
	uint32_t lookups = asked(WIRE_OP_LOOKUP), maps = asked(WIRE_OP_MAP);

	(void)state;
	assert_memory_equal(lease.address, "zero", 4);
	assert_int_equal(lease.size, 5000);
	assert_int_equal(maps, 1);
	for (int i = 0; i < 100; ++i) {
		struct shmb_lease more = get("r");

		assert_ptr_equal(more.address, lease.address);
		assert_int_equal(fake_count(&fake, 0), 2);
		give_back(&more);
	}
	give_back(&lease);
	settle();
	assert_int_equal(fake_count(&fake, 0), 0);
	assert_int_equal(asked(WIRE_OP_LOOKUP), lookups);
	assert_int_equal(asked(WIRE_OP_MAP), maps);
	assert_int_equal(asked(WIRE_OP_NOTIFY), 0);
}

static void windows_of_an_object_share_its_mapping(void **state) {
	struct shmb_lease zero = get("r"), one = get("s");

	(void)state;
	assert_int_equal(fake.last_map.have_object, 9);
	assert_ptr_equal(one.address, (uint8_t *)zero.address + 5000);
	assert_memory_equal(one.address, "one", 3);
	give_back(&zero);
	give_back(&one);
}

static void bounds_are_those_of_the_region(void **state) {
	struct shmb_lease lease = get("r"), other;

	(void)state;
	assert_int_equal(shmb_client_get_memory_info(client, "r", 5000, 1, SHMB_READ, &other), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_client_get_memory_info(client, "r", 5001, SHMB_REST, SHMB_READ, &other),
			 SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_client_get_memory_info(client, "r", UINT64_MAX - 1, 4, SHMB_READ, &other),
			 SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_client_get_memory_info(client, "r", 5000, 0, SHMB_READ, &other), 0);
	give_back(&other);
	give_back(&lease);
	assert_int_equal(fake_count(&fake, 0), 0);
}

static void memory_is_unmapped_when_its_generation_is_over(void **state) {
	static const uint32_t states[] = { WIRE_STATE_LAZY, WIRE_STATE_RETIRING, WIRE_STATE_REVOKED };
	struct shmb_lease lease = get("r");
	void *address = lease.address;

	(void)state;
	give_back(&lease);
	for (size_t i = 0; i < sizeof(states) / sizeof(states[0]); ++i) {
		fake_set(&fake, 0, 100, states[i]);
		gone();
		assert_int_equal(shmb_client_process(client), 0);
		assert_true(is_mapped(address));
	}
	fake_set(&fake, 0, 0, 0);
	gone();
	assert_int_equal(shmb_client_process(client), 0);
	assert_false(is_mapped(address));
	assert_int_equal(try("r", SHMB_READ, &lease), SHMB_E_NOT_FOUND);
	/* the next generation is asked for and mapped */
	fake_set(&fake, 0, 102, WIRE_STATE_ACTIVE);
	lease = get("r");
	assert_int_equal(lease.generation, 102);
	assert_int_equal(asked(WIRE_OP_MAP), 2);
	give_back(&lease);
}

static void an_object_stays_mapped_for_its_other_windows(void **state) {
	struct shmb_lease zero = get("r"), one = get("s");
	void *address = one.address;

	(void)state;
	give_back(&zero);
	fake_set(&fake, 0, 0, 0);
	gone();
	assert_int_equal(shmb_client_process(client), 0);
	assert_memory_equal(one.address, "one", 3);
	give_back(&one);
	fake_set(&fake, 1, 0, 0);
	gone();
	assert_int_equal(shmb_client_process(client), 0);
	assert_false(is_mapped(address));
}

static void *get_late(void *data) {
	*(struct shmb_lease *)data = get("r");
	return NULL;
}

/* two generations of a slot are mapped at once, and the answer for the first comes last */
static void an_answer_that_was_overtaken_unmaps_nothing(void **state) {
	_cleanup_(closep) int other = memfd_create("other", MFD_CLOEXEC);
	struct shmb_lease lease, late;
	pthread_t thread;

	(void)state;
	assert_int_equal(pwrite(other, "next", 4, 0), 4);
	atomic_store(&fake.holds_map, true);
	assert_int_equal(pthread_create(&thread, NULL, get_late, &late), 0);
	while (atomic_load(&fake.holds_map))
		sched_yield();
	fake_register(&fake, 0, 102, (FakeRegion){ .name = "r", .size = 4, .object = 10, .fd = other });
	lease = get("r");
	settle();
	pthread_join(thread, NULL);
	assert_int_equal(lease.generation, 102);
	assert_int_equal(late.generation, 102);
	/* it was found mapped: had it been unmapped in between, it would have been asked for again */
	assert_int_equal(asked(WIRE_OP_MAP), 2);
	assert_memory_equal(lease.address, "next", 4);
	assert_ptr_equal(late.address, lease.address);
	assert_int_equal(fake_count(&fake, 0), 2);
	give_back(&lease);
	give_back(&late);
}

static void what_the_kernel_says_to_a_mapping_is_passed_on(void **state) {
	struct shmb_lease lease;

	(void)state;
	assert_int_equal(fcntl(memory, F_ADD_SEALS, F_SEAL_WRITE), 0);
	assert_int_equal(try("r", SHMB_READ | SHMB_WRITE, &lease), -EPERM);
	assert_int_equal(asked(WIRE_OP_MAP), 1);
	assert_int_equal(fake_count(&fake, 0), 0);
	assert_int_equal(try("r", SHMB_READ, &lease), 0);
	give_back(&lease);
}

static void unsealed_memory_is_copied_only(void **state) {
	struct shmb_lease lease;
	char copy[4];

	(void)state;
	fake.regions[0].flags = WIRE_REGION_UNSEALED;
	assert_int_equal(try("r", SHMB_READ, &lease), SHMB_E_UNSEALED);
	assert_int_equal(try("r", SHMB_READ | SHMB_COPY, &lease), 0);
	assert_null(lease.address);
	assert_int_equal(shmb_lease_copy_out(&lease, 0, copy, 4), 0);
	assert_memory_equal(copy, "zero", 4);
	assert_int_equal(shmb_lease_copy_out(&lease, 4999, copy, 2), SHMB_E_OUT_OF_BOUNDS);
	assert_int_equal(shmb_lease_copy_in(&lease, 0, copy, 4), SHMB_E_ACCESS);
	assert_int_equal(ftruncate(memory, 2), 0);
	assert_int_equal(shmb_lease_copy_out(&lease, 0, copy, 4), SHMB_E_TRUNCATED);
	give_back(&lease);
	assert_int_equal(shmb_lease_copy_out(&lease, 0, copy, 4), SHMB_E_STALE);
}

static void the_file_behind_a_lease(void **state) {
	struct shmb_lease lease;
	struct stat st, meant;
	uint64_t offset = 0;
	uint32_t maps;
	int fd = -1;

	(void)state;
	assert_int_equal(shmb_client_get_memory_info(client, "s", 100, 50, SHMB_READ, &lease), 0);
	assert_int_equal(shmb_lease_get_fd(&lease, &fd, &offset), 0);
	assert_int_equal(offset, 5100);
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(fstat(memory, &meant), 0);
	assert_int_equal(st.st_ino, meant.st_ino);
	assert_int_not_equal(fd, memory);
	maps = asked(WIRE_OP_MAP);
	assert_int_equal(shmb_lease_get_fd(&lease, &fd, NULL), 0);
	assert_int_equal(asked(WIRE_OP_MAP), maps);
	give_back(&lease);
	assert_int_equal(shmb_lease_get_fd(&lease, &fd, &offset), SHMB_E_STALE);
}

/* ---- counts and notices ---- */

static void a_notice_is_sent_once_for_each_scan(void **state) {
	struct shmb_lease leases[3] = { get("r"), get("r"), get("r") };

	(void)state;
	fake_set(&fake, 0, 100, WIRE_STATE_RETIRING);
	give_back(&leases[0]);
	settle();
	assert_int_equal(asked(WIRE_OP_NOTIFY), 1);
	assert_int_equal(atomic_load(&fake.notified), 100);
	give_back(&leases[1]);
	settle();
	assert_int_equal(asked(WIRE_OP_NOTIFY), 1);
	/* the broker has looked, and found one lease */
	atomic_fetch_add(&fake_detail(&fake, 0)->scan, 1);
	assert_int_equal(fake_count(&fake, 0), 1);
	give_back(&leases[2]);
	settle();
	assert_int_equal(asked(WIRE_OP_NOTIFY), 2);
	assert_int_equal(fake_count(&fake, 0), 0);
}

/* an acquire that is taken back late may have counted where the next generation already waits */
static void a_count_on_the_next_generation_is_told_to_it(void **state) {
	struct shmb_lease lease = get("r");

	(void)state;
	fake_set(&fake, 0, 105, WIRE_STATE_RETIRING);
	give_back(&lease);
	settle();
	assert_int_equal(asked(WIRE_OP_NOTIFY), 1);
	assert_int_equal(atomic_load(&fake.notified), 105);
}

static void a_revoked_lease_says_so(void **state) {
	struct shmb_lease lease = get("r");

	(void)state;
	fake_set(&fake, 0, 100, WIRE_STATE_REVOKED);
	assert_int_equal(shmb_lease_release(&lease), SHMB_E_REVOKED);
	settle();
	assert_int_equal(asked(WIRE_OP_NOTIFY), 1);
	assert_int_equal(fake_count(&fake, 0), 0);
}

static void a_session_that_was_ended_gets_no_lease(void **state) {
	struct shmb_lease lease = get("r"), other;
	RegistryHeader *registry = (RegistryHeader *)fake.registry;

	(void)state;
	atomic_store(&layout_sessions(registry)[FAKE_SESSION_INDEX], 0);
	assert_int_equal(try("r", SHMB_READ, &other), SHMB_E_DETACHED);
	assert_int_equal(fake_count(&fake, 0), 1);
	atomic_store(&layout_sessions(registry)[FAKE_SESSION_INDEX], FAKE_SESSION);
	atomic_store(&registry->state, LAYOUT_CLOSED);
	assert_int_equal(try("r", SHMB_READ, &other), SHMB_E_DETACHED);
	assert_int_equal(fake_count(&fake, 0), 1);
	give_back(&lease);
}

static void is_back_to_lazy(FakeBroker *broker, uint32_t slot) {
	fake_set(broker, slot, 100, WIRE_STATE_LAZY);
}

static void who_meets_a_scan_waits_for_its_end(void **state) {
	struct shmb_handle handle;
	struct shmb_lease lease = get("r"), more;

	(void)state;
	assert_int_equal(shmb_handle_open(client, "r", &handle), 0);
	fake.before_lookup = is_back_to_lazy;
	fake_set(&fake, 0, 100, WIRE_STATE_RETIRING);
	more = get("r");
	give_back(&more);
	fake_set(&fake, 0, 100, WIRE_STATE_RETIRING);
	assert_int_equal(shmb_handle_get_memory_info(client, &handle, 0, SHMB_REST, SHMB_READ, &more), 0);
	give_back(&more);
	/* and where it does not go back, both are told so */
	fake.before_lookup = NULL;
	fake_set(&fake, 0, 100, WIRE_STATE_RETIRING);
	assert_int_equal(try("r", SHMB_READ, &more), SHMB_E_NOT_FOUND);
	assert_int_equal(shmb_handle_get_memory_info(client, &handle, 0, SHMB_REST, SHMB_READ, &more), SHMB_E_RETIRING);
	assert_int_equal(fake_count(&fake, 0), 1);
	give_back(&lease);
	fake_set(&fake, 0, 106, WIRE_STATE_ACTIVE);
	assert_int_equal(shmb_handle_get_memory_info(client, &handle, 0, SHMB_REST, SHMB_READ, &more), SHMB_E_STALE);
}

static void is_replaced(FakeBroker *broker, uint32_t slot) {
	uint64_t word = atomic_load(&fake_slot(broker, slot)->word);

	fake_set(broker, slot, layout_word_generation(word) + 1, WIRE_STATE_ACTIVE);
}

static void a_name_that_never_stands_still_is_given_up(void **state) {
	struct shmb_lease lease;

	(void)state;
	fake.before_lookup = is_replaced;
	assert_int_equal(try("r", SHMB_READ, &lease), SHMB_E_AGAIN);
	assert_int_equal(asked(WIRE_OP_LOOKUP), CLIENT_TRIES);
	assert_int_equal(fake_count(&fake, 0), 0);
}

typedef struct Releaser {
	struct shmb_lease *lease;
	pthread_barrier_t *barrier;
	bool is_second;
	uint32_t n_given;
	uint32_t n_stale;
} Releaser;

/* in turn, never at once: that would be the caller's race */
static void *release_in_turn(void *data) {
	Releaser *releaser = data;

	for (int i = 0; i < ROUNDS; ++i) {
		int r;

		pthread_barrier_wait(releaser->barrier);
		if (releaser->is_second)
			pthread_barrier_wait(releaser->barrier);
		r = shmb_lease_release(releaser->lease);
		releaser->n_given += !r;
		releaser->n_stale += r == SHMB_E_STALE;
		if (!releaser->is_second)
			pthread_barrier_wait(releaser->barrier);
		pthread_barrier_wait(releaser->barrier);
	}
	return NULL;
}

static void of_two_releases_the_second_is_refused_on_any_thread(void **state) {
	struct shmb_lease lease;
	pthread_barrier_t barrier;
	Releaser releasers[2] = { { .lease = &lease, .barrier = &barrier },
				  { .lease = &lease, .barrier = &barrier, .is_second = true } };
	pthread_t threads[2];

	(void)state;
	pthread_barrier_init(&barrier, NULL, 3);
	for (int i = 0; i < 2; ++i)
		assert_int_equal(pthread_create(&threads[i], NULL, release_in_turn, &releasers[i]), 0);
	for (int i = 0; i < ROUNDS; ++i) {
		lease = get("r");
		for (int point = 0; point < 3; ++point)
			pthread_barrier_wait(&barrier);
		assert_int_equal(fake_count(&fake, 0), 0);
	}
	for (int i = 0; i < 2; ++i)
		pthread_join(threads[i], NULL);
	assert_int_equal(releasers[0].n_given, ROUNDS);
	assert_int_equal(releasers[1].n_stale, ROUNDS);
	pthread_barrier_destroy(&barrier);
}

/* ---- lanes ---- */

static void *get_and_release(void *data) {
	struct shmb_lease lease;

	(void)data;
	for (int i = 0; i < ROUNDS / 10; ++i) {
		lease = get("r");
		give_back(&lease);
	}
	return NULL;
}

static void threads_that_end_give_their_lanes_back(void **state) {
	pthread_t thread;

	(void)state;
	for (int i = 0; i < THREADS; ++i) {
		assert_int_equal(pthread_create(&thread, NULL, get_and_release, NULL), 0);
		pthread_join(thread, NULL);
	}
	assert_int_equal(fake_lanes_used(&fake), 1);
	assert_int_equal(fake_count(&fake, 0), 0);
}

static void *get_and_hold(void *data) {
	pthread_barrier_t *barrier = data;
	struct shmb_lease lease;

	get_and_release(NULL);
	lease = get("r");
	pthread_barrier_wait(barrier);
	pthread_barrier_wait(barrier);
	give_back(&lease);
	return NULL;
}

static void threads_beyond_the_lanes_share_the_last(void **state) {
	pthread_barrier_t barrier;
	pthread_t threads[THREADS];

	(void)state;
	pthread_barrier_init(&barrier, NULL, THREADS + 1);
	for (int i = 0; i < THREADS; ++i)
		assert_int_equal(pthread_create(&threads[i], NULL, get_and_hold, &barrier), 0);
	pthread_barrier_wait(&barrier);
	assert_int_equal(fake_lanes_used(&fake), (1 << FAKE_LANES) - 1);
	assert_int_equal(fake_count(&fake, 0), THREADS);
	pthread_barrier_wait(&barrier);
	for (int i = 0; i < THREADS; ++i)
		pthread_join(threads[i], NULL);
	assert_int_equal(fake_count(&fake, 0), 0);
	pthread_barrier_destroy(&barrier);
}

static void a_thread_outlives_its_clients(void **state) {
	struct shmb_lease lease;

	(void)state;
	for (int i = 0; i < 3 * THREADS; ++i) {
		lease = get("r");
		assert_int_equal(fake_lanes_used(&fake), 1);
		give_back(&lease);
		stop(NULL);
		start(NULL);
	}
}

/* ---- after a fork ---- */

static bool refuses_all(struct shmb_lease *lease) {
	struct shmb_client_info info = { .struct_size = sizeof(info) };
	struct shmb_lookup_spec spec = {
		.struct_size = sizeof(spec), .name = "r", .size = SHMB_REST, .access = SHMB_READ
	};
	struct shmb_region_spec region_spec = {
		.struct_size = sizeof(region_spec), .name = "t", .fd = memory, .size = 1
	};
	struct shmb_message_lease message;
	struct shmb_status_iter *iter;
	struct shmb_region *region;
	struct shmb_handle handle = {};
	struct shmb_lease other;
	struct shmb_event event;
	uint64_t id = 1;
	char byte = 0;
	int result;

	return shmb_client_get_info(client, &info) == SHMB_E_FORKED && shmb_client_process(client) == SHMB_E_FORKED &&
	       shmb_client_ping(client, NULL) == SHMB_E_FORKED &&
	       shmb_region_create(client, "t", 1, NULL, &region) == SHMB_E_FORKED &&
	       shmb_region_adopt(client, "t", memory, 0, 1, NULL, &region) == SHMB_E_FORKED &&
	       shmb_region_adopt_many(client, &region_spec, 1, &result) == SHMB_E_FORKED &&
	       shmb_client_unregister(client, &spec.name, 1, 0, 0, &result) == SHMB_E_FORKED &&
	       shmb_client_unregister_all(client, SHMB_ALL_SESSION, 0, 0, NULL) == SHMB_E_FORKED &&
	       try("r", SHMB_READ, &other) == SHMB_E_FORKED &&
	       shmb_handle_open(client, "r", &handle) == SHMB_E_FORKED &&
	       shmb_handle_get_memory_info(client, &handle, 0, 1, SHMB_READ, &other) == SHMB_E_FORKED &&
	       shmb_client_lookup(client, &spec, 1, &message, &result) == SHMB_E_FORKED &&
	       shmb_client_release(client, &id, 1, &result) == SHMB_E_FORKED &&
	       shmb_status_iter_new(client, NULL, &iter) == SHMB_E_FORKED &&
	       shmb_client_subscribe(client, 1) == SHMB_E_FORKED &&
	       shmb_client_next_event(client, &event, 0) == SHMB_E_FORKED &&
	       shmb_lease_copy_out(lease, 0, &byte, 1) == SHMB_E_FORKED &&
	       shmb_lease_get_fd(lease, &result, NULL) == SHMB_E_FORKED && shmb_lease_release(lease) == SHMB_E_FORKED;
}

static void a_child_is_refused_and_does_no_harm(void **state) {
	struct shmb_lease lease = get("r");
	int status;
	pid_t pid = fork();

	(void)state;
	assert_true(pid >= 0);
	if (!pid) {
		bool refused = refuses_all(&lease);

		shmb_client_free(client);
		_exit(refused ? 0 : 1);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_int_equal(fake_count(&fake, 0), 1);
	settle();
	give_back(&lease);
}

/* ---- requests and events ---- */

static void *ping(void *data) {
	(void)data;
	assert_int_equal(shmb_client_ping(client, NULL), 0);
	return NULL;
}

static void replies_find_their_callers_in_any_order(void **state) {
	pthread_t threads[THREADS];

	(void)state;
	fake.n_held = THREADS;
	for (int i = 0; i < THREADS; ++i)
		assert_int_equal(pthread_create(&threads[i], NULL, ping, NULL), 0);
	for (int i = 0; i < THREADS; ++i)
		pthread_join(threads[i], NULL);
	assert_int_equal(asked(WIRE_OP_PING), THREADS);
}

static void names_that_cannot_be_are_refused_one_by_one(void **state) {
	static const char *const names[] = { "", "r", "line\nbreak", "s" };
	struct shmb_lookup_spec specs[4] = {};
	struct shmb_message_lease leases[4];
	int results[4];

	(void)state;
	assert_int_equal(shmb_client_unregister(client, names, 4, SHMB_RETIRE_STRICT, 0, results), 0);
	assert_int_equal(results[0], SHMB_E_BAD_NAME);
	assert_int_equal(results[1], 0);
	assert_int_equal(results[2], SHMB_E_BAD_NAME);
	assert_int_equal(results[3], 0);
	for (int i = 0; i < 4; ++i)
		specs[i] = (struct shmb_lookup_spec){
			.struct_size = sizeof(specs[i]),
			.name = names[i],
			.size = SHMB_REST,
			.access = SHMB_READ,
		};
	assert_int_equal(shmb_client_lookup(client, specs, 4, leases, results), 0);
	assert_int_equal(results[0], SHMB_E_BAD_NAME);
	assert_int_equal(results[1], 0);
	assert_int_equal(leases[1].generation, 100);
	assert_int_equal(results[2], SHMB_E_BAD_NAME);
	assert_int_equal(results[3], 0);
	assert_int_equal(leases[3].generation, 101);
}

static void structs_and_flags_that_are_not_set_are_refused(void **state) {
	struct shmb_region_options options = { .flags = SHMB_REGION_OPT_READ_ONLY };
	struct shmb_status_filter filter = { .name = "r" };
	struct shmb_status_iter *iter;
	struct shmb_region *region;
	struct shmb_client *other;

	(void)state;
	assert_int_equal(shmb_region_create(client, "t", 1, &options, &region), SHMB_E_INVALID);
	options.struct_size = sizeof(options);
	options.flags = 1 << 30;
	assert_int_equal(shmb_region_create(client, "t", 1, &options, &region), SHMB_E_INVALID);
	options.flags = 0;
	options.n_allowed_uids = UINT32_MAX;
	options.n_allowed_gids = 1;
	assert_int_equal(shmb_region_create(client, "t", 1, &options, &region), SHMB_E_INVALID);
	assert_int_equal(shmb_status_iter_new(client, &filter, &iter), SHMB_E_INVALID);
	assert_int_equal(shmb_client_new(&other, fake.path, 0, 1 << 30), SHMB_E_INVALID);
}

static void events_that_are_not_kept_are_counted(void **state) {
	struct shmb_event event;

	(void)state;
	assert_int_equal(shmb_client_subscribe(client, SHMB_EVENT_MASK_ALL), 0);
	assert_int_equal(shmb_client_next_event(client, &event, 0), SHMB_E_TIMED_OUT);
	fake.n_events = EVENTS_SENT;
	settle();
	for (uint64_t i = 1; i <= EVENTS_MAX; ++i) {
		assert_int_equal(shmb_client_next_event(client, &event, -1), 0);
		assert_int_equal(event.generation, i);
		assert_string_equal(event.name, "e");
	}
	assert_int_equal(shmb_client_next_event(client, &event, -1), 0);
	assert_int_equal(event.type, SHMB_EVENT_OVERFLOW);
	assert_int_equal(event.count, EVENTS_SENT - EVENTS_MAX);
	assert_int_equal(shmb_client_next_event(client, &event, 1), SHMB_E_TIMED_OUT);
}

typedef struct Seen {
	uint32_t n;
	uint64_t n_lost;
} Seen;

/* no lock is held here: it may ask for whatever it likes */
static void see(void *userdata, const struct shmb_event *event) {
	Seen *seen = userdata;
	struct shmb_lease lease;

	seen->n += event->type == SHMB_EVENT_REGISTERED;
	seen->n_lost += event->count;
	lease = get("r");
	give_back(&lease);
}

static void a_callback_hears_of_all_events(void **state) {
	Seen seen = {};

	(void)state;
	assert_int_equal(shmb_client_subscribe(client, SHMB_EVENT_MASK_ALL), 0);
	shmb_client_set_event_callback(client, see, &seen);
	fake.n_events = EVENTS_SENT;
	settle();
	assert_int_equal(seen.n, EVENTS_MAX);
	assert_int_equal(seen.n_lost, EVENTS_SENT - EVENTS_MAX);
}

static void leases_outlive_the_broker(void **state) {
	struct shmb_lease lease = get("r"), other;
	struct shmb_event event;

	(void)state;
	assert_int_equal(shutdown(client->fd, SHUT_RDWR), 0);
	assert_int_equal(shmb_client_ping(client, NULL), -ECONNRESET);
	other = get("r");
	give_back(&other);
	assert_int_equal(try("s", SHMB_READ, &other), -ECONNRESET);
	assert_int_equal(shmb_client_next_event(client, &event, -1), -ECONNRESET);
	assert_int_equal(shmb_client_process(client), -ECONNRESET);
	fake_set(&fake, 0, 100, WIRE_STATE_RETIRING);
	give_back(&lease);
	assert_int_equal(fake_count(&fake, 0), 0);
}

#define both_modes(_test)                                                   \
	cmocka_unit_test_setup_teardown(_test, start, stop), {              \
#_test " (asymmetric)", _test, start_asymmetric, stop, NULL \
	}

int main(void) {
	const struct CMUnitTest tests[] = {
		both_modes(the_second_use_asks_nothing),
		both_modes(windows_of_an_object_share_its_mapping),
		both_modes(bounds_are_those_of_the_region),
		both_modes(memory_is_unmapped_when_its_generation_is_over),
		both_modes(an_object_stays_mapped_for_its_other_windows),
		both_modes(an_answer_that_was_overtaken_unmaps_nothing),
		both_modes(what_the_kernel_says_to_a_mapping_is_passed_on),
		both_modes(unsealed_memory_is_copied_only),
		both_modes(the_file_behind_a_lease),
		both_modes(a_notice_is_sent_once_for_each_scan),
		both_modes(a_count_on_the_next_generation_is_told_to_it),
		both_modes(a_revoked_lease_says_so),
		both_modes(a_session_that_was_ended_gets_no_lease),
		both_modes(who_meets_a_scan_waits_for_its_end),
		both_modes(a_name_that_never_stands_still_is_given_up),
		both_modes(of_two_releases_the_second_is_refused_on_any_thread),
		both_modes(threads_that_end_give_their_lanes_back),
		both_modes(threads_beyond_the_lanes_share_the_last),
		both_modes(a_child_is_refused_and_does_no_harm),
		both_modes(leases_outlive_the_broker),
		cmocka_unit_test_setup_teardown(a_thread_outlives_its_clients, start, stop),
		cmocka_unit_test_setup_teardown(replies_find_their_callers_in_any_order, start, stop),
		cmocka_unit_test_setup_teardown(names_that_cannot_be_are_refused_one_by_one, start, stop),
		cmocka_unit_test_setup_teardown(structs_and_flags_that_are_not_set_are_refused, start, stop),
		cmocka_unit_test_setup_teardown(events_that_are_not_kept_are_counted, start, stop),
		cmocka_unit_test_setup_teardown(a_callback_hears_of_all_events, start, stop),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
