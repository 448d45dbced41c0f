/* SPDX-License-Identifier: Apache-2.0 */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checker.h"

#define REGIONS_MAX 4096
#define SETTLE_MS 30000
#define PROBLEMS 4

typedef struct Seen {
	uint32_t name; /* UINT32_MAX for one that is not ours */
	uint32_t state;
	uint32_t leases;
	uint64_t generation;
	uint64_t size;
} Seen;

typedef struct Picture {
	Seen regions[REGIONS_MAX];
	uint32_t n;
	uint32_t sessions_of[LOAD_PROCESSES];
	uint32_t other_sessions;
	char problems[PROBLEMS][LOAD_TEXT - 32];
	uint32_t n_problems;
} Picture;

static void pause_ms(long ms) {
	const struct timespec time = { .tv_nsec = ms * 1000000 };

	(void)nanosleep(&time, NULL);
}

static void problem(Picture *picture, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void problem(Picture *picture, const char *format, ...) {
	uint32_t i = picture->n_problems++;
	va_list args;

	if (i >= PROBLEMS)
		return;
	va_start(args, format);
	vsnprintf(picture->problems[i], sizeof(picture->problems[i]), format, args);
	va_end(args);
}

static uint32_t name_number(const char *name) {
	uint32_t group, i;
	int end = 0;

	if (sscanf(name, LOAD_PREFIX "%2u.%1u%n", &group, &i, &end) != 2 || name[end])
		return UINT32_MAX;
	return group * LOAD_NAMES + i;
}

static void see_regions(Checker *checker, Picture *picture) {
	const struct shmb_status *status;
	struct shmb_status_iter *iter;
	int r;

	picture->n = 0;
	r = shmb_status_iter_new(checker->client, NULL, &iter);
	while (!r && !(r = shmb_status_iter_next(iter, &status)) && status && picture->n < REGIONS_MAX)
		picture->regions[picture->n++] = (Seen){
			.name = name_number(status->name),
			.state = status->state,
			.leases = status->leases,
			.generation = status->generation,
			.size = status->size,
		};
	if (r)
		load_wrong(checker->shared, "status: %s", shmb_last_error());
	else
		shmb_status_iter_free(iter);
}

static const Seen *find_generation(const Picture *picture, uint64_t generation) {
	for (uint32_t i = 0; i < picture->n; ++i)
		if (picture->regions[i].generation == generation)
			return &picture->regions[i];
	return NULL;
}

/* the region that has the name */
static const Seen *find_name(const Picture *picture, uint32_t name) {
	for (uint32_t i = 0; i < picture->n; ++i)
		if (picture->regions[i].name == name &&
		    (picture->regions[i].state == SHMB_STATE_ACTIVE || picture->regions[i].state == SHMB_STATE_LAZY))
			return &picture->regions[i];
	return NULL;
}

static void check_name(Picture *picture, uint32_t name, const NameView *view) {
	const Seen *seen = find_name(picture, name);

	switch (view->state) {
	case NAME_REGISTERED:
		if (!seen)
			problem(picture, "name %u is lost: generation %#lx", name, (unsigned long)view->generation);
		else if (seen->generation != view->generation || seen->size != view->size ||
			 seen->state != SHMB_STATE_ACTIVE)
			problem(picture, "name %u is generation %#lx of %lu bytes, state %u, not %#lx of %lu bytes",
				name, (unsigned long)seen->generation, (unsigned long)seen->size, seen->state,
				(unsigned long)view->generation, (unsigned long)view->size);
		break;
	case NAME_FREE:
		if (seen)
			problem(picture, "name %u is free, but generation %#lx has it, in state %u", name,
				(unsigned long)seen->generation, seen->state);
		break;
	case NAME_LAZY:
		if (seen && (seen->generation != view->generation || seen->state != SHMB_STATE_LAZY))
			problem(picture, "name %u was retired lazily, but is generation %#lx in state %u, not %#lx",
				name, (unsigned long)seen->generation, seen->state, (unsigned long)view->generation);
		break;
	default:
		break;
	}
}

void checker_look(Checker *checker) {
	static Picture picture;
	NameView before[LOAD_ALL_NAMES], after;
	bool whole[LOAD_ALL_NAMES];

	picture.n_problems = 0;
	for (uint32_t i = 0; i < LOAD_ALL_NAMES; ++i)
		whole[i] = name_view(&checker->shared->names[i], &before[i]);
	see_regions(checker, &picture);
	for (uint32_t i = 0; i < LOAD_ALL_NAMES; ++i)
		if (whole[i] && name_view(&checker->shared->names[i], &after) && after.version == before[i].version)
			check_name(&picture, i, &before[i]);
	for (uint32_t i = 0; i < picture.n_problems && i < PROBLEMS; ++i)
		load_wrong(checker->shared, "under load: %s", picture.problems[i]);
}

/* ---- in full ---- */

static int count_session(void *userdata, const struct shmb_client_status *status) {
	const Checker *checker = ((void **)userdata)[0];
	Picture *picture = ((void **)userdata)[1];

	for (uint32_t i = 0; i < LOAD_PROCESSES; ++i) {
		if ((pid_t)status->pid == checker->pids[i]) {
			picture->sessions_of[i]++;
			return 0;
		}
	}
	picture->other_sessions++;
	return 0;
}

/* of one generation, by all that are alive */
static uint32_t count_holds(const Checker *checker, uint64_t generation, bool only_pages) {
	uint32_t n = 0;

	for (uint32_t i = 0; i < LOAD_PROCESSES; ++i)
		for (uint32_t j = 0; j < LOAD_THREADS; ++j)
			for (uint32_t k = 0; k < LOAD_HELD; ++k) {
				Hold *hold = &checker->shared->processes[i].seats[j].holds[k];
				uint32_t kind = atomic_load(&hold->kind);

				n += (kind == HOLD_PAGE || (kind && !only_pages)) &&
				     atomic_load(&hold->generation) == generation;
			}
	return n;
}

static void check_region(const Checker *checker, Picture *picture, const Seen *seen) {
	/* leases by message on what was revoked are not counted by the region any more */
	uint32_t n_holds = count_holds(checker, seen->generation, seen->state == SHMB_STATE_REVOKED);

	if (seen->name >= LOAD_ALL_NAMES)
		problem(picture, "a region that nobody registered");
	else if (seen->leases != n_holds)
		problem(picture, "name %u generation %#lx in state %u has %u leases, and its holders have %u",
			seen->name, (unsigned long)seen->generation, seen->state, seen->leases, n_holds);
	else if (seen->state != SHMB_STATE_ACTIVE && !n_holds)
		problem(picture, "name %u generation %#lx in state %u is held by nobody and does not go", seen->name,
			(unsigned long)seen->generation, seen->state);
}

static void check_hold(const Checker *checker, Picture *picture, const Hold *hold) {
	uint32_t kind = atomic_load(&hold->kind);
	uint64_t generation = atomic_load(&hold->generation);

	if (!kind || find_generation(picture, generation))
		return;
	if (kind == HOLD_MESSAGE && load_is_forced(checker->shared, generation))
		return;
	problem(picture, "name %u generation %#lx is held %s and gone", atomic_load(&hold->name),
		(unsigned long)generation, kind == HOLD_PAGE ? "through a lease page" : "by message");
}

static void check_sessions(Checker *checker, Picture *picture) {
	void *both[] = { checker, picture };

	memset(picture->sessions_of, 0, sizeof(picture->sessions_of));
	picture->other_sessions = 0;
	if (shmb_client_each_client(checker->client, count_session, both))
		problem(picture, "clients: %s", shmb_last_error());
	for (uint32_t i = 0; i < LOAD_PROCESSES; ++i) {
		uint32_t most = 1 + atomic_load(&checker->shared->processes[i].orphans);

		if (checker->pids[i] && (!picture->sessions_of[i] || picture->sessions_of[i] > most))
			problem(picture, "process %u has %u sessions, not 1 to %u", i, picture->sessions_of[i], most);
	}
	if (picture->other_sessions != 1)
		problem(picture, "%u sessions are of nobody", picture->other_sessions - 1);
}

static void compare(Checker *checker, Picture *picture) {
	NameView view;

	picture->n_problems = 0;
	see_regions(checker, picture);
	for (uint32_t i = 0; i < LOAD_ALL_NAMES; ++i)
		if (name_view(&checker->shared->names[i], &view))
			check_name(picture, i, &view);
	for (uint32_t i = 0; i < picture->n; ++i)
		check_region(checker, picture, &picture->regions[i]);
	for (uint32_t i = 0; i < LOAD_PROCESSES; ++i)
		for (uint32_t j = 0; j < LOAD_THREADS; ++j)
			for (uint32_t k = 0; k < LOAD_HELD; ++k)
				check_hold(checker, picture, &checker->shared->processes[i].seats[j].holds[k]);
	check_sessions(checker, picture);
}

void checker_compare(Checker *checker) {
	uint64_t end = load_now_ms() + SETTLE_MS;
	static Picture picture;

	/* who was killed is buried a moment later, and what it held goes then */
	for (;;) {
		compare(checker, &picture);
		if (!picture.n_problems || load_now_ms() > end)
			break;
		pause_ms(2);
	}
	for (uint32_t i = 0; i < picture.n_problems && i < PROBLEMS; ++i)
		load_wrong(checker->shared, "standing still: %s", picture.problems[i]);
}

/* ---- the end ---- */

typedef struct Left {
	uint64_t n;
	char text[LOAD_TEXT];
} Left;

static int add_left(void *userdata, const struct shmb_stat *stat) {
	static const char *const names[] = { "regions",	   "objects",	   "fds_closing",  "sessions_detached",
					     "held_maps",  "held_leases",  "held_revoked", "held_regions",
					     "held_bytes", "held_messages" };
	Left *left = userdata;
	uint64_t allowed = !strcmp(stat->name, "held_messages");

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); ++i) {
		if (strcmp(stat->name, names[i]) || stat->value <= allowed)
			continue;
		left->n++;
		snprintf(left->text + strlen(left->text), sizeof(left->text) - strlen(left->text), " %s=%lu",
			 stat->name, (unsigned long)stat->value);
	}
	return 0;
}

void checker_finish(Checker *checker) {
	uint64_t end = load_now_ms() + SETTLE_MS;
	char name[LOAD_NAME_SIZE];
	const char *names[] = { name };
	Left left;
	int r;

	checker_compare(checker);
	for (uint32_t i = 0; i < LOAD_ALL_NAMES; ++i) {
		if (atomic_load(&checker->shared->names[i].state) != NAME_REGISTERED)
			continue;
		load_name(name, i);
		r = shmb_client_unregister(checker->client, names, 1, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, SETTLE_MS,
					   NULL);
		if (r)
			load_wrong(checker->shared, "name %u, which was kept, cannot be retired: %s", i,
				   shmb_last_error());
	}
	do {
		left = (Left){};
		if (shmb_client_each_stat(checker->client, 0, add_left, &left))
			load_wrong(checker->shared, "stats: %s", shmb_last_error());
		if (!left.n)
			return;
		pause_ms(2);
	} while (load_now_ms() < end);
	load_wrong(checker->shared, "the broker has something left:%s", left.text);
}

typedef struct Wanted {
	const char *key;
	long value;
} Wanted;

static int take_value(void *userdata, const char *key, const char *value) {
	Wanted *wanted = userdata;

	if (!strcmp(key, wanted->key))
		wanted->value = strtol(value, NULL, 10);
	return 0;
}

long checker_info(Checker *checker, const char *key) {
	Wanted wanted = { .key = key, .value = -1 };

	if (shmb_client_each_info(checker->client, take_value, &wanted))
		load_wrong(checker->shared, "info: %s", shmb_last_error());
	return wanted.value;
}
