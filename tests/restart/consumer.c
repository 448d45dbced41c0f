/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A consumer: one client, whose threads take leases on whatever there is, through the lease page and by message, hold
 * some of them until the broker was killed once or more, and look at the memory at the begin and the end of each.
 * Whoever asks for a name that stays as it is meanwhile must get what is written down for it.
 */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "load.h"

#define BURST 6
#define HELD_OVER 24 /* one of so many leases is held until the broker has died */
#define SOON 16	     /* turns that the others are held at most */

typedef struct Held {
	HoldKind kind;
	struct shmb_lease lease;
	uint64_t id; /* by message */
	uint64_t generation;
	uint32_t name;
	uint64_t word;	     /* of the memory */
	uint32_t kills;	     /* until there were so many */
	uint64_t turns;	     /* and so many turns */
	uint32_t kills_then; /* when it was taken */
} Held;

typedef struct Consumer {
	const Load *load;
	Shared *shared;
	struct shmb_client *client;
	Seat *seat;
	pthread_t thread;
	uint64_t random;
	uint64_t turn;
	Held held[LOAD_HELD];
} Consumer;

static uint32_t any(Consumer *consumer, uint32_t n) {
	return (uint32_t)(load_random(&consumer->random) % n);
}

/* what was answered about a name that did not change meanwhile */
static void check_answer(Consumer *consumer, uint32_t name, const NameView *before, int result, uint64_t generation) {
	NameView after;

	if (before->version & 1 || !name_view(&consumer->shared->names[name], &after) ||
	    after.version != before->version)
		return;
	if (before->state == NAME_REGISTERED && (result || generation != before->generation)) {
		/* many changes of other names may come between a look at the index and its answer */
		if (result == SHMB_E_AGAIN)
			return;
		load_wrong(consumer->shared, "name %u is registered as generation %#lx, but a lease on it is %s, %#lx",
			   name, (unsigned long)before->generation,
			   result ? shmb_error_name(result) ?: shmb_error_text(result) : "another one",
			   (unsigned long)generation);
	} else if (before->state == NAME_FREE && !result) {
		load_wrong(consumer->shared, "name %u is free, but there is a lease on it, of generation %#lx", name,
			   (unsigned long)generation);
	}
}

static bool is_refusal(int r) {
	return r == SHMB_E_NOT_FOUND || r == SHMB_E_STALE || r == SHMB_E_REVOKED || r == SHMB_E_RETIRING ||
	       r == SHMB_E_AGAIN;
}

static void failed(Consumer *consumer, uint32_t name, const char *what, int r) {
	load_wrong(consumer->shared, "name %u: %s: %s: %s", name, what, shmb_error_name(r) ?: shmb_error_text(r),
		   shmb_last_error());
}

/* ---- the memory ---- */

static uint64_t word_at(const Held *held, uint32_t part) {
	uint64_t at = held->lease.size / 2 / sizeof(uint64_t) * part;

	return __atomic_load_n((const uint64_t *)held->lease.address + at, __ATOMIC_RELAXED);
}

/* fresh memory is empty until its owner has written the name, which may die before */
static void check_memory(Consumer *consumer, Held *held, bool at_end) {
	for (uint32_t part = 0; part < 2; ++part) {
		uint64_t word = word_at(held, part);

		if (!word || (canary_name(word) == held->name && (!held->word || word == held->word))) {
			held->word = held->word ?: word;
			continue;
		}
		if (load_is_forced(consumer->shared, held->generation))
			return;
		load_wrong(consumer->shared, "name %u generation %#lx: %#lx in the memory at the %s, %#lx expected",
			   held->name, (unsigned long)held->generation, (unsigned long)word, at_end ? "end" : "begin",
			   (unsigned long)held->word);
		return;
	}
}

/* ---- leases ---- */

static Held *held_free(Consumer *consumer) {
	for (uint32_t i = 0; i < LOAD_HELD; ++i)
		if (!consumer->held[i].kind)
			return &consumer->held[i];
	return NULL;
}

static void held_begin(Consumer *consumer, Held *held, HoldKind kind, uint32_t name, uint64_t generation) {
	Hold *hold = &consumer->seat->holds[held - consumer->held];
	uint32_t kills = atomic_load(&consumer->shared->kills);

	held->kind = kind;
	held->name = name;
	held->generation = generation;
	held->word = 0;
	held->kills_then = kills;
	held->kills = any(consumer, HELD_OVER) ? 0 : kills + 1 + any(consumer, 3);
	held->turns = consumer->turn + (any(consumer, 4) ? 0 : any(consumer, SOON));
	atomic_store(&hold->name, name);
	atomic_store(&hold->generation, generation);
	atomic_store(&hold->id, held->id);
	atomic_store(&hold->kind, kind);
}

static void held_end(Consumer *consumer, Held *held) {
	atomic_store(&consumer->seat->holds[held - consumer->held].kind, HOLD_NONE);
	atomic_fetch_add(&consumer->shared->held_over, atomic_load(&consumer->shared->kills) != held->kills_then);
	held->kind = HOLD_NONE;
}

static void release_message(Consumer *consumer, Held *held) {
	int result = 0, r = shmb_client_release(consumer->client, &held->id, 1, &result);
	bool forced = load_is_forced(consumer->shared, held->generation);

	if (r || (result && !(result == SHMB_E_REVOKED && forced)))
		failed(consumer, held->name, "a lease by message is not released", r ?: result);
	held_end(consumer, held);
	if (any(consumer, 4))
		return;
	result = 0;
	r = shmb_client_release(consumer->client, &held->id, 1, &result);
	if (r || result != SHMB_E_STALE)
		failed(consumer, held->name, "a lease by message is released twice", r ?: result);
}

static void release(Consumer *consumer, Held *held) {
	uint64_t generation = held->generation;
	int r;

	if (held->kind == HOLD_MESSAGE) {
		DOING(consumer->seat);
		release_message(consumer, held);
		return;
	}
	DOING(consumer->seat);
	check_memory(consumer, held, true);
	r = shmb_lease_release(&held->lease);
	if (r && !(r == SHMB_E_REVOKED && load_is_forced(consumer->shared, generation)))
		failed(consumer, held->name, "a lease is not released", r);
	held_end(consumer, held);
}

static void take(Consumer *consumer, uint32_t name) {
	Held *held = held_free(consumer);
	struct shmb_handle handle;
	char text[LOAD_NAME_SIZE];
	NameView before;
	int r = 0;

	if (!held)
		return;
	load_name(text, name);
	(void)name_view(&consumer->shared->names[name], &before);
	DOING(consumer->seat);
	if (any(consumer, 4)) {
		r = shmb_client_get_memory_info(consumer->client, text, 0, SHMB_REST, SHMB_READ, &held->lease);
	} else {
		r = shmb_handle_open(consumer->client, text, &handle);
		if (!r)
			r = shmb_handle_get_memory_info(consumer->client, &handle, 0, SHMB_REST, SHMB_READ,
							&held->lease);
	}
	if (r && !is_refusal(r))
		failed(consumer, name, "no lease", r);
	check_answer(consumer, name, &before, r, r ? 0 : held->lease.generation);
	if (r)
		return;
	atomic_fetch_add(&consumer->shared->leases_by_page, 1);
	held->id = 0;
	held_begin(consumer, held, HOLD_PAGE, name, held->lease.generation);
	check_memory(consumer, held, false);
}

static void ask(Consumer *consumer, uint32_t n) {
	struct shmb_lookup_spec specs[LOAD_HELD] = {};
	struct shmb_message_lease leases[LOAD_HELD];
	char names[LOAD_HELD][LOAD_NAME_SIZE];
	NameView before[LOAD_HELD];
	uint32_t at[LOAD_HELD];
	int results[LOAD_HELD], r;
	Held *held;

	for (uint32_t i = 0; i < LOAD_HELD; ++i)
		n -= n > 1 && consumer->held[i].kind;
	if (!held_free(consumer))
		return;
	for (uint32_t i = 0; i < n; ++i) {
		at[i] = any(consumer, LOAD_ALL_NAMES);
		load_name(names[i], at[i]);
		specs[i] = (struct shmb_lookup_spec){
			.struct_size = sizeof(specs[i]),
			.name = names[i],
			.size = SHMB_REST,
			.access = SHMB_READ,
		};
		(void)name_view(&consumer->shared->names[at[i]], &before[i]);
	}
	DOING(consumer->seat);
	r = shmb_client_lookup(consumer->client, specs, n, leases, results);
	if (r) {
		failed(consumer, at[0], "LOOKUP", r);
		return;
	}
	for (uint32_t i = 0; i < n; ++i) {
		if (results[i] && !is_refusal(results[i]))
			failed(consumer, at[i], "no lease by message", results[i]);
		check_answer(consumer, at[i], &before[i], results[i], results[i] ? 0 : leases[i].generation);
		held = results[i] ? NULL : held_free(consumer);
		if (!held)
			continue;
		atomic_fetch_add(&consumer->shared->leases_by_message, 1);
		held->id = leases[i].lease;
		held_begin(consumer, held, HOLD_MESSAGE, at[i], leases[i].generation);
	}
}

static void release_due(Consumer *consumer, bool all) {
	uint32_t kills = atomic_load(&consumer->shared->kills);

	for (uint32_t i = 0; i < LOAD_HELD; ++i) {
		Held *held = &consumer->held[i];

		if (held->kind && (all || (held->kills <= kills && held->turns <= consumer->turn)))
			release(consumer, held);
	}
}

/* ---- the whole ---- */

static void turn(Consumer *consumer) {
	struct shmb_event event;
	int r;

	consumer->turn++;
	if (!any(consumer, 4))
		ask(consumer, 1 + any(consumer, 4));
	for (uint32_t i = 0; i < BURST; ++i)
		take(consumer, any(consumer, LOAD_ALL_NAMES));
	release_due(consumer, false);
	if (any(consumer, 8))
		return;
	DOING(consumer->seat);
	r = shmb_client_process(consumer->client);
	if (r)
		failed(consumer, 0, "process", r);
	while (!shmb_client_next_event(consumer->client, &event, 0))
		;
}

static void *work(void *data) {
	Consumer *consumer = data;

	while (!atomic_load(&consumer->shared->stop_consumers)) {
		load_barrier(consumer->load, consumer->seat);
		turn(consumer);
	}
	release_due(consumer, true);
	atomic_store(&consumer->seat->parked, UINT32_MAX);
	return NULL;
}

void consumer_main(const Load *load) {
	int n_fds = load_count_fds(), r;
	uint32_t flags = load->process == LOAD_OWNERS + 1 ? SHMB_FORCE_RMW : 0;
	Process *process = &load->shared->processes[load->process];
	struct shmb_client *client = load_connect(load, SHMB_ROLE_CONSUMER, flags);
	Consumer *consumers = calloc(LOAD_CONSUMER_THREADS, sizeof(*consumers));

	if (!consumers)
		exit(1);
	r = load->process == LOAD_OWNERS ? shmb_client_subscribe(client, SHMB_EVENT_MASK_ALL) : 0;
	if (r)
		load_wrong(load->shared, "subscribe: %s", shmb_last_error());
	atomic_store(&process->threads, LOAD_CONSUMER_THREADS);
	for (uint32_t i = 0; i < LOAD_CONSUMER_THREADS; ++i) {
		Consumer *consumer = &consumers[i];

		*consumer = (Consumer){
			.load = load,
			.shared = load->shared,
			.client = client,
			.seat = &process->seats[i],
			.random = load->random + i * 7919,
		};
		if (pthread_create(&consumer->thread, NULL, work, consumer))
			exit(1);
	}
	for (uint32_t i = 0; i < LOAD_CONSUMER_THREADS; ++i)
		pthread_join(consumers[i].thread, NULL);
	shmb_client_free(client);
	free(consumers);
	if (load_count_fds() != n_fds)
		load_wrong(load->shared, "consumer %u has %d fds in the end, and had %d", load->process,
			   load_count_fds(), n_fds);
	exit(0);
}
