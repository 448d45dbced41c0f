/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An owner and consumer in C for test_restart_client.py: client-restart SOCKET. Threads of one process make calls of
 * all kinds without end, of which none may fail, however often the broker is killed. For each line that it reads it
 * says how many rounds each thread has made; it ends at the end of its input.
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shmbroker.h"

#define SIZE 8192
#define check(call) check_result((call), #call, __LINE__)

typedef struct Worker {
	const char *name;
	void (*round)(struct shmb_client *client, unsigned n);
	pthread_t thread;
	atomic_uint rounds;
} Worker;

static struct shmb_client *the_client;
static atomic_bool enough;

static void check_result(int result, const char *what, int line) {
	if (!result)
		return;
	printf("line %d: %s is %d (%s)\n", line, what, result, shmb_last_error());
	fflush(stdout);
	_Exit(1);
}

static void check_that(bool is_true, const char *what) {
	if (is_true)
		return;
	printf("not %s\n", what);
	fflush(stdout);
	_Exit(1);
}

/* a generation that nobody has mapped yet is mapped, and retired while it is held */
static void own_and_map(struct shmb_client *client, unsigned n) {
	struct shmb_region *region;
	struct shmb_lease lease;

	(void)n;
	check(shmb_region_create(client, "mapped", SIZE, NULL, &region));
	check(shmb_client_get_memory_info(client, "mapped", 0, SHMB_REST, SHMB_READ | SHMB_WRITE, &lease));
	memcpy(lease.address, "written", 8);
	check(shmb_region_retire(region, SHMB_RETIRE_STRICT, 0));
	check_that(!strcmp(lease.address, "written"), "what was written");
	check(shmb_lease_release(&lease));
	shmb_region_free(region);
}

static void own_and_wait(struct shmb_client *client, unsigned n) {
	struct shmb_region *region;

	check(shmb_region_create(client, "waited", SIZE, NULL, &region));
	check(shmb_region_retire(region, (n & 1 ? SHMB_RETIRE_STRICT : SHMB_RETIRE_LAZY) | SHMB_RETIRE_WAIT, -1));
	shmb_region_free(region);
}

/* whether it is repeated or not, the name is taken once and given back once */
static void own_by_name(struct shmb_client *client, unsigned n) {
	const char *name = "named";
	struct shmb_region *region;
	int result;

	(void)n;
	check(shmb_region_create(client, name, SIZE, NULL, &region));
	check(shmb_client_unregister(client, &name, 1, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, -1, &result));
	check(result);
	shmb_region_free(region);
}

static void lease_by_message(struct shmb_client *client, unsigned n) {
	struct shmb_lookup_spec spec = {
		.struct_size = sizeof(spec), .name = "stays", .size = SHMB_REST, .access = SHMB_READ
	};
	struct shmb_message_lease lease;
	int result;

	(void)n;
	check(shmb_client_lookup(client, &spec, 1, &lease, &result));
	check(result);
	check(shmb_client_release(client, &lease.lease, 1, &result));
	check(result);
}

static void lease_by_page(struct shmb_client *client, unsigned n) {
	struct shmb_lease lease;

	(void)n;
	check(shmb_client_get_memory_info(client, "stays", 0, SHMB_REST, SHMB_READ, &lease));
	check_that(!strcmp(lease.address, "content"), "the content");
	check(shmb_lease_release(&lease));
}

static void look_around(struct shmb_client *client, unsigned n) {
	const struct shmb_status *status;
	struct shmb_status_iter *iter;
	bool found = false;

	(void)n;
	check(shmb_status_iter_new(client, NULL, &iter));
	do {
		check(shmb_status_iter_next(iter, &status));
		found |= status && !strcmp(status->name, "stays");
	} while (status);
	shmb_status_iter_free(iter);
	check_that(found, "in the status");
}

static Worker workers[] = {
	{ .name = "map", .round = own_and_map },    { .name = "wait", .round = own_and_wait },
	{ .name = "name", .round = own_by_name },   { .name = "message", .round = lease_by_message },
	{ .name = "page", .round = lease_by_page }, { .name = "status", .round = look_around },
};

#define N_WORKERS (sizeof(workers) / sizeof(workers[0]))

static void *work(void *data) {
	Worker *worker = data;

	while (!atomic_load(&enough))
		worker->round(the_client, atomic_fetch_add(&worker->rounds, 1));
	return NULL;
}

int main(int argc, char **argv) {
	struct shmb_region *stays;
	char line[16];

	if (argc != 2)
		return 2;
	check(shmb_client_new(&the_client, argv[1], SHMB_ROLE_OWNER | SHMB_ROLE_CONSUMER, 0));
	check(shmb_region_create(the_client, "stays", SIZE, NULL, &stays));
	memcpy(shmb_region_get_data(stays), "content", 8);
	for (size_t i = 0; i < N_WORKERS; ++i)
		check(pthread_create(&workers[i].thread, NULL, work, &workers[i]));
	while (fgets(line, sizeof(line), stdin)) {
		for (size_t i = 0; i < N_WORKERS; ++i)
			printf("%s=%u ", workers[i].name, atomic_load(&workers[i].rounds));
		printf("\n");
		fflush(stdout);
	}
	atomic_store(&enough, true);
	for (size_t i = 0; i < N_WORKERS; ++i)
		check(pthread_join(workers[i].thread, NULL));
	shmb_region_free(stays);
	shmb_client_free(the_client);
	return 0;
}
