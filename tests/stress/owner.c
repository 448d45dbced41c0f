/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An owner: goes round its names. A name without a region gets one, in the window that has been poisoned for
 * longest; a region that a consumer has used is retired. Owner 0 retires one at a time, the others by batches.
 */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "shmbroker.h"
#include "stress.h"

#define WORDS (STRESS_WINDOW_SIZE / sizeof(uint64_t))
#define STUCK_MS 20000
#define LAZY_MS 5 /* a name that is in use all the time may never be idle: then strictly */
#define BATCH 4
#define USED_ROUNDS 8	  /* time to be used by others, too */
#define UNUSED_ROUNDS 400 /* what no consumer cares for is retired in the end */
#define IDLE_NS 20000

typedef struct Held {
	char name[STRESS_NAME_SIZE];
	struct shmb_region *region; /* NULL while the name is free */
	uint32_t window;
	uint32_t rounds;
} Held;

typedef struct Owner {
	const Stress *stress;
	Shared *shared;
	struct shmb_client *client;
	Name *names;
	int fd;
	uint64_t *memory;
	uint64_t random;
	Held held[STRESS_NAMES];
	uint32_t windows[STRESS_WINDOWS]; /* free ones, a ring: used from the head, given back at the tail */
	uint32_t head;
	uint32_t tail;
} Owner;

static void fill(Owner *owner, uint32_t window, uint64_t value) {
	_Atomic uint64_t *words = (_Atomic uint64_t *)owner->memory + (size_t)window * WORDS;

	for (size_t i = 0; i < WORDS; ++i)
		atomic_store_explicit(&words[i], value, memory_order_relaxed);
}

/* what the consumers may know of it */
static void owner_tell(Owner *owner, const Held *held, uint64_t serial) {
	uint64_t generation = shmb_region_get_generation(held->region);
	Record *record = stress_record(owner->shared, generation);

	atomic_store(&record->generation, 0);
	atomic_store(&record->serial, serial);
	atomic_store(&record->forced, 0);
	atomic_store(&record->generation, generation);
	atomic_store(&owner->names[held - owner->held].live, generation);
}

static void owner_register(Owner *owner, Held **helds, uint32_t n) {
	struct shmb_region_spec specs[STRESS_NAMES];
	uint64_t serial = atomic_fetch_add(&owner->shared->serial, n) + 1;
	int results[STRESS_NAMES], r;

	for (uint32_t i = 0; i < n; ++i) {
		helds[i]->window = owner->windows[owner->head++ % STRESS_WINDOWS];
		helds[i]->rounds = 0;
		fill(owner, helds[i]->window, STRESS_SERIAL | (serial + i));
		specs[i] = (struct shmb_region_spec){
			.struct_size = sizeof(specs[i]),
			.name = helds[i]->name,
			.fd = owner->fd,
			.offset = (uint64_t)helds[i]->window * STRESS_WINDOW_SIZE,
			.size = STRESS_WINDOW_SIZE,
		};
	}
	r = shmb_region_adopt_many(owner->client, specs, n, results);
	for (uint32_t i = 0; i < n; ++i) {
		if (r || results[i])
			stress_fail("register", r ?: results[i]);
		helds[i]->region = specs[i].region;
		owner_tell(owner, helds[i], STRESS_SERIAL | (serial + i));
	}
}

/*
 * The end of a generation: @r is what the broker says of it. The memory of one that does not come to its end is not
 * used again.
 */
static void owner_gone(Owner *owner, Held *held, int r, _Atomic uint64_t *counter) {
	Name *name = &owner->names[held - owner->held];

	atomic_store(&name->live, 0);
	if (r == SHMB_E_TIMED_OUT) {
		atomic_fetch_add(&owner->shared->stuck, 1);
	} else if (r) {
		stress_fail("retire", r);
	} else {
		fill(owner, held->window, STRESS_POISON);
		atomic_store(&name->over, shmb_region_get_generation(held->region));
		owner->windows[owner->tail++ % STRESS_WINDOWS] = held->window;
		atomic_fetch_add(counter, 1);
	}
	held->region = shmb_region_free(held->region);
}

static void owner_retire(Owner *owner, Held *held) {
	uint64_t kind = owner->stress->control ? 7 : stress_random(&owner->random) % 8;
	int r;

	if (kind == 0) {
		atomic_store(&stress_record(owner->shared, shmb_region_get_generation(held->region))->forced, 1);
		r = shmb_region_retire(held->region, SHMB_RETIRE_FORCE | SHMB_RETIRE_WAIT, STUCK_MS);
		owner_gone(owner, held, r, &owner->shared->forced);
	} else if (kind == 1) {
		r = shmb_region_retire(held->region, SHMB_RETIRE_LAZY | SHMB_RETIRE_WAIT, LAZY_MS);
		if (r == SHMB_E_TIMED_OUT)
			r = shmb_region_retire(held->region, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, STUCK_MS);
		/* the last lease was over before that arrived */
		if (r == SHMB_E_NOT_FOUND || r == SHMB_E_STALE)
			r = 0;
		owner_gone(owner, held, r, &owner->shared->lazy);
	} else {
		r = shmb_region_retire(held->region, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, STUCK_MS);
		owner_gone(owner, held, r, &owner->shared->strict);
	}
}

static void owner_retire_many(Owner *owner, Held **helds) {
	const char *names[BATCH];
	int results[BATCH], r;

	for (uint32_t i = 0; i < BATCH; ++i)
		names[i] = helds[i]->name;
	r = shmb_client_unregister(owner->client, names, BATCH, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, STUCK_MS,
				   results);
	for (uint32_t i = 0; i < BATCH; ++i) {
		owner_gone(owner, helds[i], r ?: results[i], &owner->shared->strict);
	}
}

static bool is_due(Owner *owner, Held *held) {
	uint64_t used = atomic_load(&owner->names[held - owner->held].used);

	held->rounds++;
	return held->rounds > (used >= shmb_region_get_generation(held->region) ? USED_ROUNDS : UNUSED_ROUNDS);
}

static bool owner_turn(Owner *owner, bool by_batches) {
	Held *due[STRESS_NAMES];
	uint32_t n = 0, size = by_batches ? BATCH : 1;
	bool worked = false;

	for (uint32_t i = 0; i < STRESS_NAMES; ++i)
		if (!owner->held[i].region && n < owner->tail - owner->head)
			due[n++] = &owner->held[i];
	if (n)
		owner_register(owner, due, n);
	worked = n;
	n = 0;
	for (uint32_t i = 0; i < STRESS_NAMES; ++i)
		if (owner->held[i].region && is_due(owner, &owner->held[i]))
			due[n++] = &owner->held[i];
	for (uint32_t i = 0; i + size <= n; i += size) {
		if (by_batches)
			owner_retire_many(owner, due + i);
		else
			owner_retire(owner, due[i]);
		worked = true;
	}
	return worked;
}

void owner_run(const Stress *stress, uint32_t number) {
	const struct timespec idle = { .tv_nsec = IDLE_NS };
	size_t size = (size_t)STRESS_WINDOWS * STRESS_WINDOW_SIZE;
	Owner *owner = calloc(1, sizeof(*owner));
	int r;

	if (!owner)
		stress_fail("memory", -1);
	owner->stress = stress;
	owner->shared = stress->shared;
	owner->names = &owner->shared->names[number * STRESS_NAMES];
	owner->random = number + 1;
	owner->fd = memfd_create("stress", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (owner->fd < 0 || ftruncate(owner->fd, (off_t)size) < 0 ||
	    fcntl(owner->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		stress_fail("memory", -1);
	owner->memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, owner->fd, 0);
	if (owner->memory == MAP_FAILED)
		stress_fail("memory", -1);
	for (uint32_t i = 0; i < STRESS_WINDOWS; ++i) {
		fill(owner, i, STRESS_POISON);
		owner->windows[owner->tail++] = i;
	}
	for (uint32_t i = 0; i < STRESS_NAMES; ++i)
		stress_name(owner->held[i].name, number * STRESS_NAMES + i);
	r = shmb_client_new(&owner->client, stress->socket, SHMB_ROLE_OWNER, 0);
	if (r)
		stress_fail("connect", r);

	while (!atomic_load(&owner->shared->stop_owners))
		if (!owner_turn(owner, number))
			(void)nanosleep(&idle, NULL);
	for (uint32_t i = 0; i < STRESS_NAMES; ++i)
		if (owner->held[i].region)
			owner_retire(owner, &owner->held[i]);
	shmb_client_free(owner->client);
	exit(0);
}
