/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A consumer: one client, a few workers that take leases on whatever there is. A worker holds the last few leases
 * that it took, looks at the memory of each when it gets it and before it gives it back, and after a burst of them
 * lets others run. Some leases are given to other workers, which release them; a worker's thread ends from time to
 * time, and what it holds is released by the thread that goes on.
 *
 * Before a lease is taken or given back, stores to memory that is in no cache fill the processor's store buffer: a
 * count without a fence stays behind them, unseen by others, while the slot's word is read. That is when a fence or a
 * barrier matters.
 */

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "lease.h"
#include "map.h"
#include "stress.h"

#define HELD 4
#define BURST 256
#define BLIND 1024 /* one of so many leases is asked for without looking first, while others are held */
#define COLD_STORES 48
#define HOLD_NS 15000	     /* longer than the broker takes to tell an owner that a generation is gone */
#define BURSTS_OF_A_THREAD 8 /* it ends before its process is killed, mostly */
#define GIVEN 8
#define CHECKED 4 /* words of a window */

typedef struct Held {
	struct shmb_lease lease;
	uint32_t region;
	uint64_t since_ns;
	uint64_t serial; /* what was all over the memory at first; 0 when it was no serial number */
} Held;

typedef struct Consumer Consumer;

typedef struct Worker {
	Consumer *consumer;
	uint64_t random;
	uint64_t leases;
	uint64_t by_handle;
	Held held[HELD];
	uint32_t n_held; /* a ring: at n % HELD */
	uint32_t n_released;
} Worker;

struct Consumer {
	const Stress *stress;
	Shared *shared;
	struct shmb_client *client;
	char names[STRESS_REGIONS][STRESS_NAME_SIZE];
	atomic_bool asked[STRESS_REGIONS];
	pthread_mutex_t lock;
	Held given[GIVEN]; /* leases that whoever comes releases; under the lock */
	uint32_t n_given;
	Worker workers[STRESS_THREADS];
	uint32_t n_working; /* under the lock */
	pthread_cond_t changed;
};

static uint64_t now_ns(void) {
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static uint64_t word_at(const struct shmb_lease *lease, size_t i) {
	_Atomic uint64_t *words = lease->address;

	return atomic_load_explicit(&words[i * (STRESS_WINDOW_SIZE / sizeof(*words) / CHECKED)], memory_order_relaxed);
}

/* its owner revoked it, or is about to: anything may be in the memory */
static bool is_forced(Shared *shared, uint64_t generation) {
	const Record *record = stress_record(shared, generation);

	return atomic_load(&record->generation) == generation && atomic_load(&record->forced);
}

/* the serial number of a generation; 0 as long as its owner has not told */
static uint64_t serial_of(Shared *shared, uint64_t generation) {
	const Record *record = stress_record(shared, generation);
	uint64_t serial = atomic_load(&record->serial);

	return atomic_load(&record->generation) == generation ? serial : 0;
}

/*
 * The memory must have one serial number all over, that of the lease's generation; at the end of a lease also the one
 * that it had at the beginning.
 */
static void check(Shared *shared, Held *held, bool at_end) {
	uint64_t generation = held->lease.generation, expected, seen;

	for (size_t i = 0; i < CHECKED; ++i) {
		seen = word_at(&held->lease, i);
		expected = serial_of(shared, generation);
		if (!held->serial && !at_end && seen >> 56 == STRESS_SERIAL >> 56)
			held->serial = seen;
		if (seen == held->serial && (!expected || seen == expected))
			continue;
		/* told before it is revoked, and the memory is changed after that */
		if (is_forced(shared, generation))
			return;
		stress_wrong(shared,
			     seen == STRESS_POISON  ? WRONG_POISON
			     : seen != held->serial ? WRONG_CHANGED
						    : WRONG_CANARY,
			     held->region, generation, seen, expected ? expected : held->serial);
		return;
	}
	if (at_end && !expected)
		atomic_fetch_add(&shared->late, 1);
}

static void be_cold(Worker *worker) {
	_Atomic uint64_t *cold = worker->consumer->stress->cold;

	for (int i = 0; i < COLD_STORES; ++i) {
		uint64_t at = stress_random(&worker->random) % (STRESS_COLD_SIZE / sizeof(*cold));

		atomic_store_explicit(&cold[at], at, memory_order_relaxed);
	}
}

static void release(Worker *worker, Held *held) {
	const Consumer *consumer = worker->consumer;
	uint64_t generation = held->lease.generation;
	int r;

	check(consumer->shared, held, true);
	be_cold(worker);
	r = shmb_lease_release(&held->lease);
	if (r == SHMB_E_REVOKED) {
		if (!is_forced(consumer->shared, generation))
			stress_wrong(consumer->shared, WRONG_REVOKED, held->region, generation, 0, 0);
	} else if (r) {
		stress_fail("release", r);
	}
}

static void release_oldest(Worker *worker) {
	const Held *held = &worker->held[worker->n_released % HELD];

	while (now_ns() - held->since_ns < HOLD_NS)
		;
	release(worker, &worker->held[worker->n_released++ % HELD]);
}

/* what another worker took, if there is any */
static void release_given(Worker *worker) {
	Consumer *consumer = worker->consumer;
	Held held;
	bool found;

	pthread_mutex_lock(&consumer->lock);
	found = consumer->n_given;
	if (found)
		held = consumer->given[--consumer->n_given];
	pthread_mutex_unlock(&consumer->lock);
	if (found)
		release(worker, &held);
}

static bool give(Consumer *consumer, const Held *held) {
	bool has_room;

	pthread_mutex_lock(&consumer->lock);
	has_room = consumer->n_given < GIVEN;
	if (has_room)
		consumer->given[consumer->n_given++] = *held;
	pthread_mutex_unlock(&consumer->lock);
	return has_room;
}

static bool is_no_failure(int r) {
	return r == SHMB_E_NOT_FOUND || r == SHMB_E_STALE || r == SHMB_E_REVOKED || r == SHMB_E_RETIRING ||
	       r == SHMB_E_AGAIN;
}

/* by one that others have made, or by one of our own */
static int get_by_handle(const Worker *worker, uint32_t region, Held *ret) {
	struct shmb_client *client = worker->consumer->client;
	const Name *name = &worker->consumer->shared->names[region];
	struct shmb_handle handle = { .generation = atomic_load(&name->used), .slot = atomic_load(&name->slot) };
	int r = 0;

	if (handle.generation != atomic_load(&name->live))
		r = shmb_handle_open(client, worker->consumer->names[region], &handle);
	return r ?: shmb_handle_get_memory_info(client, &handle, 0, SHMB_REST, SHMB_READ, &ret->lease);
}

/* what is to be had of a name, as far as can be seen without asking */
typedef enum Sight {
	SIGHT_NONE,	/* no region, or one that is retiring */
	SIGHT_UNMAPPED, /* to be had from the broker */
	SIGHT_MAPPED,	/* to be had without asking */
} Sight;

static Sight see(const Consumer *consumer, uint32_t region) {
	const Name *name = &consumer->shared->names[region];
	uint64_t live = atomic_load(&name->live);
	uint32_t slot = atomic_load(&name->slot);

	if (!live)
		return SIGHT_NONE;
	if (atomic_load(&name->used) != live)
		return SIGHT_UNMAPPED;
	if (atomic_load(&consumer->client->slots[slot].word) != layout_word(live, WIRE_STATE_ACTIVE))
		return SIGHT_NONE;
	return atomic_load(&consumer->client->maps[slot].generation) == live ? SIGHT_MAPPED : SIGHT_UNMAPPED;
}

static bool get(Worker *worker, uint32_t region) {
	Consumer *consumer = worker->consumer;
	Name *name = &consumer->shared->names[region];
	Held *held = &worker->held[worker->n_held % HELD];
	bool by_handle = stress_random(&worker->random) & 1;
	uint64_t over;
	int r;

	if (worker->n_held - worker->n_released == HELD)
		release_oldest(worker);
	held->region = region;
	held->serial = 0;
	over = atomic_load(&name->over);
	be_cold(worker);
	r = by_handle ? get_by_handle(worker, region, held)
		      : shmb_client_get_memory_info(consumer->client, consumer->names[region], 0, SHMB_REST, SHMB_READ,
						    &held->lease);
	if (r) {
		if (!is_no_failure(r))
			stress_fail(by_handle ? "get by handle" : "get by name", r);
		return false;
	}
	worker->n_held++;
	held->since_ns = now_ns();
	if (held->lease.generation <= over)
		stress_wrong(consumer->shared, WRONG_GRANTED, region, held->lease.generation, over, 0);
	check(consumer->shared, held, false);
	if (atomic_load_explicit(&name->used, memory_order_relaxed) < held->lease.generation) {
		atomic_store(&name->slot, (uint32_t)held->lease.internal[LEASE_SLOT]);
		atomic_store(&name->used, held->lease.generation);
	}
	worker->leases++;
	worker->by_handle += by_handle;
	return true;
}

static void flush(Worker *worker) {
	Shared *shared = worker->consumer->shared;

	atomic_fetch_add(&shared->leases, worker->leases);
	atomic_fetch_add(&shared->by_handle, worker->by_handle);
	worker->leases = worker->by_handle = 0;
}

/* a lease on what is not mapped, unless another worker is asking for it */
static void ask(Worker *worker, uint32_t region) {
	Consumer *consumer = worker->consumer;

	if (atomic_exchange(&consumer->asked[region], true))
		return;
	if (get(worker, region))
		release(worker, &worker->held[worker->n_released++ % HELD]);
	atomic_store(&consumer->asked[region], false);
}

static void burst(Worker *worker) {
	Consumer *consumer = worker->consumer;

	/* whoever asks the broker waits, and others wait for what he holds: so mostly he holds nothing */
	for (uint32_t i = 0; i < STRESS_REGIONS; ++i)
		if (see(consumer, i) == SIGHT_UNMAPPED)
			ask(worker, i);
	for (int i = 0; i < BURST; ++i) {
		uint32_t region = (uint32_t)(stress_random(&worker->random) >> 8) % STRESS_REGIONS;

		if (see(consumer, region) == SIGHT_MAPPED || stress_random(&worker->random) % BLIND == 0)
			(void)get(worker, region);
	}
	if (worker->n_held != worker->n_released && stress_random(&worker->random) % 16 == 0 &&
	    give(consumer, &worker->held[worker->n_released % HELD])) {
		worker->n_released++;
		atomic_fetch_add(&consumer->shared->handed_over, 1);
	} else {
		release_given(worker);
	}
	flush(worker);
}

static void *work(void *data);

static void start(Worker *worker) {
	pthread_t thread;

	if (pthread_create(&thread, NULL, work, worker) || pthread_detach(thread))
		stress_fail("thread", -1);
}

static void *work(void *data) {
	Worker *worker = data;
	Consumer *consumer = worker->consumer;

	for (int i = 0; i < BURSTS_OF_A_THREAD && !atomic_load(&consumer->shared->stop_consumers); ++i) {
		burst(worker);
		while (worker->n_held != worker->n_released)
			release_oldest(worker);
		sched_yield();
	}
	atomic_fetch_add(&consumer->shared->threads, 1);
	/* the next thread releases what this one holds */
	burst(worker);
	if (!atomic_load(&consumer->shared->stop_consumers)) {
		start(worker);
		return NULL;
	}
	pthread_mutex_lock(&consumer->lock);
	consumer->n_working--;
	pthread_cond_signal(&consumer->changed);
	pthread_mutex_unlock(&consumer->lock);
	return NULL;
}

void consumer_run(const Stress *stress, uint32_t number, uint64_t seed) {
	Consumer *consumer = calloc(1, sizeof(*consumer));
	uint32_t flags = stress->mode == STRESS_ASYMMETRIC ? 0 : SHMB_FORCE_RMW;
	int r;

	if (!consumer)
		stress_fail("memory", -1);
	consumer->stress = stress;
	consumer->shared = stress->shared;
	consumer->n_working = STRESS_THREADS;
	pthread_mutex_init(&consumer->lock, NULL);
	pthread_cond_init(&consumer->changed, NULL);
	r = shmb_client_new(&consumer->client, stress->socket, SHMB_ROLE_CONSUMER, flags);
	if (r)
		stress_fail("connect", r);
	if (consumer->client->mode != (flags ? WIRE_ATTACH_RMW : WIRE_ATTACH_ASYMMETRIC))
		stress_fail("mode", (int)consumer->client->mode);
	for (uint32_t i = 0; i < STRESS_REGIONS; ++i)
		stress_name(consumer->names[i], i);

	(void)madvise(stress->cold, STRESS_COLD_SIZE, MADV_POPULATE_WRITE);
	for (uint32_t i = 0; i < STRESS_THREADS; ++i) {
		Worker *worker = &consumer->workers[i];

		worker->consumer = consumer;
		worker->random = seed * 1000 + number * 100 + i + 1;
		start(worker);
	}
	pthread_mutex_lock(&consumer->lock);
	while (consumer->n_working)
		pthread_cond_wait(&consumer->changed, &consumer->lock);
	pthread_mutex_unlock(&consumer->lock);
	for (uint32_t i = 0; i < STRESS_THREADS; ++i)
		while (consumer->workers[i].n_held != consumer->workers[i].n_released)
			release_oldest(&consumer->workers[i]);
	while (consumer->n_given)
		release_given(&consumer->workers[0]);
	shmb_client_free(consumer->client);
	exit(0);
}
