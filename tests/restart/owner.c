/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An owner: one client, whose threads register and retire their own names in every way that there is. What a thread
 * has is in its Owned; what it was told is in the names' Name.
 *
 * Memory is either a region's own or a window of the thread's pool. A window serves another region once its last one
 * is known to be gone, and is poisoned in between.
 */

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "load.h"

#define WINDOWS 24
#define WINDOW_SIZE 4096
#define NO_WINDOW UINT32_MAX
#define WAIT_MS 200
#define POISON canary(0xfffd, 0)
#define KEPT_NAME 0 /* of each thread's names, the one that outlives its session */

typedef struct Owned {
	struct shmb_region *region; /* NULL while the name is free */
	uint32_t window;	    /* of the pool, or NO_WINDOW */
	bool lazy;		    /* its lazy retirement was acknowledged */
} Owned;

typedef struct Owner {
	const Load *load;
	Shared *shared;
	struct shmb_client *client;
	Seat *seat;
	pthread_t thread;
	uint64_t random;
	uint64_t born_ms;
	uint32_t first; /* of its names */
	Owned owned[LOAD_NAMES];
	int pool_fd;
	uint64_t *pool;
	bool in_use[WINDOWS]; /* or given up, because nobody tells when it is gone */
} Owner;

/* what a batch is made of */
typedef struct Batch {
	struct shmb_region_spec specs[LOAD_NAMES];
	char names[LOAD_NAMES][LOAD_NAME_SIZE];
	uint32_t at[LOAD_NAMES]; /* in owned */
	uint32_t windows[LOAD_NAMES];
	struct shmb_region_options options[LOAD_NAMES];
	int results[LOAD_NAMES];
	uint32_t n;
} Batch;

static Name *owner_name(const Owner *owner, uint32_t i) {
	return &owner->shared->names[owner->first + i];
}

static bool chance(Owner *owner, uint32_t one_in) {
	return load_random(&owner->random) % one_in == 0;
}

/* ---- memory ---- */

static int make_memory(size_t size) {
	int fd = memfd_create("kill-loop", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, (off_t)size) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
		perror("kill-loop: memfd");
		exit(1);
	}
	return fd;
}

static void fill(uint64_t *memory, size_t size, uint64_t value) {
	for (size_t i = 0; i < size / sizeof(*memory); ++i)
		__atomic_store_n(&memory[i], value, __ATOMIC_RELAXED);
}

static void pool_new(Owner *owner) {
	if (owner->pool) {
		munmap(owner->pool, WINDOWS * WINDOW_SIZE);
		close(owner->pool_fd);
	}
	owner->pool_fd = make_memory(WINDOWS * WINDOW_SIZE);
	owner->pool = mmap(NULL, WINDOWS * WINDOW_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, owner->pool_fd, 0);
	if (owner->pool == MAP_FAILED) {
		perror("kill-loop: mmap");
		exit(1);
	}
	memset(owner->in_use, 0, sizeof(owner->in_use));
	/* what is in the old pool is never used again */
	for (uint32_t i = 0; i < LOAD_NAMES; ++i)
		owner->owned[i].window = NO_WINDOW;
}

static uint64_t *window_at(const Owner *owner, uint32_t window) {
	return owner->pool + (size_t)window * WINDOW_SIZE / sizeof(*owner->pool);
}

/* a window that nobody has, or NO_WINDOW */
static uint32_t window_take(Owner *owner) {
	for (uint32_t i = 0; i < WINDOWS; ++i) {
		if (!owner->in_use[i]) {
			owner->in_use[i] = true;
			return i;
		}
	}
	return NO_WINDOW;
}

static void window_gone(Owner *owner, uint32_t window) {
	if (window == NO_WINDOW)
		return;
	fill(window_at(owner, window), WINDOW_SIZE, POISON);
	owner->in_use[window] = false;
}

/* ---- registration ---- */

/* nothing that the broker acknowledges is older than what it acknowledged before it was asked */
static void check_generation(Owner *owner, uint32_t i, uint64_t generation, uint64_t before) {
	Record *record = load_record(owner->shared, generation);
	uint64_t newest = atomic_load(&owner->shared->newest);

	if (generation <= before)
		load_wrong(owner->shared, "name %u: generation %#lx is not after %#lx", owner->first + i,
			   (unsigned long)generation, (unsigned long)before);
	atomic_store(&record->forced, 0);
	if (atomic_exchange(&record->generation, generation) == generation)
		load_wrong(owner->shared, "name %u: generation %#lx is used twice", owner->first + i,
			   (unsigned long)generation);
	while (newest < generation && !atomic_compare_exchange_weak(&owner->shared->newest, &newest, generation))
		;
}

/* a call is under way */
static void name_open(Name *name) {
	name_begin(name);
	atomic_store(&name->state, NAME_UNKNOWN);
	name_end(name);
}

static void name_restore(Name *name, const NameView *view) {
	name_set(name, (NameState)view->state, view->kept, view->generation, view->size);
}

/* the region is the owner's */
static void registered(Owner *owner, uint32_t i, struct shmb_region *region, uint32_t window, bool kept,
		       uint64_t before) {
	Owned *owned = &owner->owned[i];
	uint64_t generation = shmb_region_get_generation(region);

	check_generation(owner, i, generation, before);
	if (owned->region) {
		atomic_fetch_add(&owner->shared->replaced, 1);
		shmb_region_free(owned->region);
	}
	*owned = (Owned){ .region = region, .window = window };
	name_set(owner_name(owner, i), NAME_REGISTERED, kept, generation, shmb_region_get_size(region));
	atomic_fetch_add(&owner->shared->registered, 1);
}

/* a refusal must have a reason that we know */
static void refused(Owner *owner, uint32_t i, const NameView *was, uint32_t window, int result) {
	bool was_killed = was->state == NAME_UNKNOWN || was->state == NAME_LAZY;

	atomic_fetch_add(&owner->shared->refused, 1);
	name_restore(owner_name(owner, i), was);
	if (window != NO_WINDOW)
		owner->in_use[window] = false;
	if (result == SHMB_E_AGAIN)
		return;
	/* the one before us may still be there, for a moment */
	if (result == SHMB_E_EXISTS && was_killed && load_now_ms() < owner->born_ms + LOAD_STUCK_MS)
		return;
	load_wrong(owner->shared, "name %u: cannot be registered: %s: %s", owner->first + i,
		   shmb_error_name(result) ?: shmb_error_text(result), shmb_last_error());
}

static uint32_t options_for(const Owner *owner, uint32_t i, bool replace) {
	return (i == KEPT_NAME ? SHMB_REGION_OPT_KEEP : 0) |
	       (replace || (i == KEPT_NAME && !owner->owned[i].region) ? SHMB_REGION_OPT_REPLACE : 0);
}

static void register_created(Owner *owner, uint32_t i) {
	struct shmb_region_options options = { .struct_size = sizeof(options) };
	uint64_t before = atomic_load(&owner->shared->newest), serial = atomic_fetch_add(&owner->shared->serial, 1);
	char name[LOAD_NAME_SIZE];
	struct shmb_region *region;
	NameView was;
	int r;

	(void)name_view(owner_name(owner, i), &was);
	options.flags = options_for(owner, i, owner->owned[i].region);
	load_name(name, owner->first + i);
	name_open(owner_name(owner, i));
	r = shmb_region_create(owner->client, name, WINDOW_SIZE + i * 1000, &options, &region);
	if (r) {
		refused(owner, i, &was, NO_WINDOW, r);
		return;
	}
	fill(shmb_region_get_data(region), shmb_region_get_size(region), canary(owner->first + i, serial));
	registered(owner, i, region, NO_WINDOW, options.flags & SHMB_REGION_OPT_KEEP, before);
}

static void batch_add(Owner *owner, Batch *batch, uint32_t i, int fd, uint64_t *memory, uint32_t window) {
	uint64_t serial = atomic_fetch_add(&owner->shared->serial, 1);
	uint32_t n = batch->n++;

	fill(memory + (size_t)window * WINDOW_SIZE / sizeof(*memory), WINDOW_SIZE, canary(owner->first + i, serial));
	load_name(batch->names[n], owner->first + i);
	batch->at[n] = i;
	batch->options[n] = (struct shmb_region_options){
		.struct_size = sizeof(batch->options[n]),
		.flags = options_for(owner, i, owner->owned[i].region),
	};
	batch->specs[n] = (struct shmb_region_spec){
		.struct_size = sizeof(batch->specs[n]),
		.name = batch->names[n],
		.fd = fd,
		.offset = (uint64_t)window * WINDOW_SIZE,
		.size = WINDOW_SIZE - i * 8,
		.options = &batch->options[n],
	};
}

static void batch_register(Owner *owner, Batch *batch) {
	uint64_t before = atomic_load(&owner->shared->newest);
	NameView was[LOAD_NAMES];

	for (uint32_t n = 0; n < batch->n; ++n) {
		(void)name_view(owner_name(owner, batch->at[n]), &was[n]);
		name_open(owner_name(owner, batch->at[n]));
	}
	(void)shmb_region_adopt_many(owner->client, batch->specs, batch->n, batch->results);
	for (uint32_t n = 0; n < batch->n; ++n) {
		uint32_t i = batch->at[n];

		if (batch->results[n])
			refused(owner, i, &was[n], batch->windows[n], batch->results[n]);
		else
			registered(owner, i, batch->specs[n].region, batch->windows[n],
				   batch->options[n].flags & SHMB_REGION_OPT_KEEP, before);
	}
}

/* some of the free names, or one that is replaced; windows of the pool, or of memory that is made for them */
static void register_adopted(Owner *owner, uint32_t first, uint32_t most) {
	int fd = chance(owner, 2) ? make_memory(LOAD_NAMES * WINDOW_SIZE) : -1;
	uint64_t *memory = NULL;
	Batch batch = {};

	if (fd >= 0)
		memory = mmap(NULL, LOAD_NAMES * WINDOW_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	for (uint32_t k = 0; k < LOAD_NAMES && batch.n < most; ++k) {
		uint32_t i = (first + k) % LOAD_NAMES, window;

		if (owner->owned[i].region && k)
			continue;
		window = fd < 0 ? window_take(owner) : NO_WINDOW;
		if (fd < 0 && window == NO_WINDOW)
			break;
		batch.windows[batch.n] = window;
		batch_add(owner, &batch, i, fd < 0 ? owner->pool_fd : fd, memory ?: owner->pool, fd < 0 ? window : k);
	}
	if (batch.n)
		batch_register(owner, &batch);
	else
		pool_new(owner);
	if (fd >= 0) {
		munmap(memory, LOAD_NAMES * WINDOW_SIZE);
		close(fd);
	}
}

/* ---- retirement ---- */

static void retired(Owner *owner, uint32_t i, bool gone) {
	Owned *owned = &owner->owned[i];

	if (gone)
		window_gone(owner, owned->window);
	name_set(owner_name(owner, i), NAME_FREE, false, 0, 0);
	atomic_fetch_add(&owner->shared->retired, 1);
	shmb_region_free(owned->region);
	*owned = (Owned){ .window = NO_WINDOW };
}

static void retire(Owner *owner, uint32_t i, uint32_t mode) {
	Owned *owned = &owner->owned[i];
	uint64_t generation = shmb_region_get_generation(owned->region);
	Name *name = owner_name(owner, i);
	bool is_lazy = (mode & 3) == SHMB_RETIRE_LAZY;
	NameView was;
	int r;

	(void)name_view(name, &was);
	/* before anybody can find the memory changed */
	if ((mode & 3) == SHMB_RETIRE_FORCE)
		atomic_store(&load_record(owner->shared, generation)->forced, 1);
	name_open(name);
	r = shmb_region_retire(owned->region, mode, WAIT_MS);
	if (owned->lazy && (r == SHMB_E_NOT_FOUND || r == SHMB_E_STALE)) {
		retired(owner, i, false);
	} else if (r && r != SHMB_E_TIMED_OUT) {
		load_wrong(owner->shared, "name %u generation %#lx: cannot be retired with mode %#x: %s: %s",
			   owner->first + i, (unsigned long)generation, mode, shmb_error_name(r) ?: shmb_error_text(r),
			   shmb_last_error());
		retired(owner, i, false);
	} else if (is_lazy && (r || !(mode & SHMB_RETIRE_WAIT))) {
		owned->lazy = true;
		name_set(name, NAME_LAZY, was.kept, was.generation, was.size);
	} else {
		retired(owner, i, !r && mode & SHMB_RETIRE_WAIT && (mode & 3) != SHMB_RETIRE_FORCE);
	}
}

static uint32_t any_mode(Owner *owner) {
	static const uint32_t modes[] = { SHMB_RETIRE_STRICT, SHMB_RETIRE_STRICT, SHMB_RETIRE_LAZY, SHMB_RETIRE_FORCE };

	return modes[load_random(&owner->random) % 4] | (chance(owner, 2) ? SHMB_RETIRE_WAIT : 0);
}

/* ---- the whole ---- */

static void act(Owner *owner) {
	uint32_t i = (uint32_t)load_random(&owner->random) % LOAD_NAMES;
	const Owned *owned = &owner->owned[i];

	if (owned->region && owned->lazy && !chance(owner, 4)) {
		DOING(owner->seat);
		retire(owner, i, SHMB_RETIRE_STRICT);
	} else if (owned->region && !owned->lazy && chance(owner, 8)) {
		DOING(owner->seat);
		if (chance(owner, 2))
			register_created(owner, i);
		else
			register_adopted(owner, i, 1);
	} else if (owned->region && !owned->lazy) {
		/* regions are there for a while, so that consumers find something */
		if (!chance(owner, 3))
			return;
		DOING(owner->seat);
		retire(owner, i, any_mode(owner));
	} else if (!owned->region && chance(owner, 3)) {
		DOING(owner->seat);
		register_created(owner, i);
	} else if (!owned->region) {
		DOING(owner->seat);
		register_adopted(owner, i, chance(owner, 2) ? 1 : LOAD_NAMES);
	}
}

/* what is kept stays */
static void finish(Owner *owner) {
	for (uint32_t i = 0; i < LOAD_NAMES; ++i) {
		Owned *owned = &owner->owned[i];

		DOING(owner->seat);
		if (owned->region && (i != KEPT_NAME || owned->lazy))
			retire(owner, i, SHMB_RETIRE_STRICT);
		else
			shmb_region_free(owned->region);
	}
	munmap(owner->pool, WINDOWS * WINDOW_SIZE);
	close(owner->pool_fd);
}

static void *work(void *data) {
	Owner *owner = data;

	pool_new(owner);
	while (!atomic_load(&owner->shared->stop_owners)) {
		load_barrier(owner->load, owner->seat);
		act(owner);
	}
	finish(owner);
	/* whoever waits for all to stand still does not wait for one that has ended */
	atomic_store(&owner->seat->parked, UINT32_MAX);
	return NULL;
}

void owner_main(const Load *load) {
	int n_fds = load_count_fds();
	Process *process = &load->shared->processes[load->process];
	struct shmb_client *client = load_connect(load, SHMB_ROLE_OWNER, 0);
	Owner *owners = calloc(LOAD_OWNER_THREADS, sizeof(*owners));

	if (!owners)
		exit(1);
	atomic_store(&process->threads, LOAD_OWNER_THREADS);
	for (uint32_t i = 0; i < LOAD_OWNER_THREADS; ++i) {
		Owner *owner = &owners[i];

		*owner = (Owner){
			.load = load,
			.shared = load->shared,
			.client = client,
			.seat = &process->seats[i],
			.random = load->random + i * 7919,
			.born_ms = load_now_ms(),
			.first = (load->process * LOAD_OWNER_THREADS + i) * LOAD_NAMES,
		};
		if (pthread_create(&owner->thread, NULL, work, owner))
			exit(1);
	}
	for (uint32_t i = 0; i < LOAD_OWNER_THREADS; ++i)
		pthread_join(owners[i].thread, NULL);
	shmb_client_free(client);
	free(owners);
	if (load_count_fds() != n_fds)
		load_wrong(load->shared, "owner %u has %d fds in the end, and had %d", load->process, load_count_fds(),
			   n_fds);
	exit(0);
}
