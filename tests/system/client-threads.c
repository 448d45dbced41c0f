/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A consumer in C for test_client.py: client-threads SOCKET CASE [rmw]. It gets memory of the region "r" and speaks
 * with the test by lines: it says what it has come to, and goes on when it is told to. It ends with 0 when all that
 * its case expects of the library came true, else it says what did not.
 */

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shmbroker.h"

#define THREADS 40 /* more than a page has lanes */
#define ROUNDS 1000
#define CONTENDED_ROUNDS 400000 /* until threads really meet in the lane that they share */
#define LOOPERS 2

#define check(is_true) check_that(is_true, #is_true, __LINE__)
#define check_result(call, expected) check_code(call, expected, #call, __LINE__)

typedef struct Case Case;

struct Case {
	const char *name;
	void (*run)(struct shmb_client *client);
};

static const char *socket_path;
static pthread_barrier_t all_ready;
static atomic_bool let_go;

static void check_that(int is_true, const char *what, int line) {
	if (is_true)
		return;
	printf("line %d: not %s\n", line, what);
	exit(1);
}

static void check_code(int result, int expected, const char *what, int line) {
	if (result == expected)
		return;
	printf("line %d: %s is %d (%s), not %d\n", line, what, result, result ? shmb_last_error() : "", expected);
	exit(1);
}

/* says @what and waits to be told to go on */
static void say(const char *what) {
	char told[64];

	printf("%s\n", what);
	fflush(stdout);
	if (!fgets(told, sizeof(told), stdin))
		exit(2);
}

static struct shmb_lease get(struct shmb_client *client) {
	struct shmb_lease lease;

	check_result(shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &lease), 0);
	check(!memcmp(lease.address, "content", 7));
	return lease;
}

static void *release_thread(void *data) {
	check_result(shmb_lease_release(data), 0);
	return NULL;
}

static void start(pthread_t *thread, void *(*run)(void *), void *data) {
	check(!pthread_create(thread, NULL, run, data));
}

static void run_hold(struct shmb_client *client) {
	struct shmb_client_info info = { .struct_size = sizeof(info) };
	struct shmb_lease lease = get(client);
	char line[32];

	check_result(shmb_client_get_info(client, &info), 0);
	snprintf(line, sizeof(line), "held %u", info.lease_mode);
	say(line);
	check_result(shmb_lease_release(&lease), 0);
	say("released");
}

static void run_other_thread(struct shmb_client *client) {
	struct shmb_lease lease = get(client);
	pthread_t thread;

	say("held");
	start(&thread, release_thread, &lease);
	check(!pthread_join(thread, NULL));
	say("released");
}

typedef struct Holder {
	struct shmb_client *client;
	struct shmb_lease lease;
	pthread_t thread;
} Holder;

static void *get_and_end(void *data) {
	Holder *holder = data;

	holder->lease = get(holder->client);
	return NULL;
}

/* each ends while it holds, and the next one goes on in its lane */
static void run_ending_threads(struct shmb_client *client) {
	Holder holders[THREADS];

	for (int i = 0; i < THREADS; ++i) {
		holders[i].client = client;
		start(&holders[i].thread, get_and_end, &holders[i]);
		check(!pthread_join(holders[i].thread, NULL));
	}
	say("held");
	for (int i = 0; i < THREADS; ++i)
		check_result(shmb_lease_release(&holders[i].lease), 0);
	say("released");
}

static void *count_and_hold(void *data) {
	Holder *holder = data;
	struct shmb_lease lease;

	pthread_barrier_wait(&all_ready);
	for (int i = 0; i < CONTENDED_ROUNDS; ++i) {
		lease = get(holder->client);
		check_result(shmb_lease_release(&lease), 0);
	}
	holder->lease = get(holder->client);
	pthread_barrier_wait(&all_ready);
	pthread_barrier_wait(&all_ready);
	check_result(shmb_lease_release(&holder->lease), 0);
	return NULL;
}

static void run_many_threads(struct shmb_client *client) {
	Holder holders[THREADS];

	check(!pthread_barrier_init(&all_ready, NULL, THREADS + 1));
	for (int i = 0; i < THREADS; ++i) {
		holders[i].client = client;
		start(&holders[i].thread, count_and_hold, &holders[i]);
	}
	pthread_barrier_wait(&all_ready);
	pthread_barrier_wait(&all_ready);
	say("held");
	pthread_barrier_wait(&all_ready);
	for (int i = 0; i < THREADS; ++i)
		check(!pthread_join(holders[i].thread, NULL));
	say("released");
}

static void run_fork(struct shmb_client *client) {
	struct shmb_lease lease = get(client), other;
	struct shmb_client *own;
	int status;
	pid_t pid = fork();

	check(pid >= 0);
	if (!pid) {
		check_result(shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &other), SHMB_E_FORKED);
		check_result(shmb_client_ping(client, NULL), SHMB_E_FORKED);
		check_result(shmb_lease_release(&lease), SHMB_E_FORKED);
		shmb_client_free(client);
		check_result(shmb_client_new(&own, socket_path, SHMB_ROLE_CONSUMER, 0), 0);
		other = get(own);
		check_result(shmb_lease_release(&other), 0);
		shmb_client_free(own);
		fflush(stdout);
		_exit(0);
	}
	check(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
	say("held");
	check(!memcmp(lease.address, "content", 7));
	check_result(shmb_client_ping(client, NULL), 0);
	check_result(shmb_lease_release(&lease), 0);
	say("released");
}

static void run_double_release(struct shmb_client *client) {
	struct shmb_lease kept = get(client), lease = get(client);

	check_result(shmb_lease_release(&lease), 0);
	check_result(shmb_lease_release(&lease), SHMB_E_STALE);
	say("held");
	check_result(shmb_lease_release(&kept), 0);
	say("released");
}

static void *get_until_gone(void *data) {
	struct shmb_client *client = data;
	struct shmb_lease lease;
	int r;

	for (;;) {
		r = shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &lease);
		if (r) {
			check_result(r, SHMB_E_NOT_FOUND);
			check(atomic_load(&let_go));
			return NULL;
		}
		check(!memcmp(lease.address, "content", 7));
		check_result(shmb_lease_release(&lease), 0);
	}
}

/* as long as one lease is held, more are granted; without it the loops come to an end */
static void run_lazy(struct shmb_client *client) {
	struct shmb_lease lease = get(client), more;
	pthread_t threads[LOOPERS];

	for (int i = 0; i < LOOPERS; ++i)
		start(&threads[i], get_until_gone, client);
	say("held");
	for (int i = 0; i < ROUNDS; ++i) {
		more = get(client);
		check_result(shmb_lease_release(&more), 0);
	}
	say("granted");
	atomic_store(&let_go, true);
	check_result(shmb_lease_release(&lease), 0);
	for (int i = 0; i < LOOPERS; ++i)
		check(!pthread_join(threads[i], NULL));
	say("released");
}

static void run_replace(struct shmb_client *client) {
	struct shmb_handle handle;
	struct shmb_lease old, new;

	check_result(shmb_handle_open(client, "r", &handle), 0);
	check_result(shmb_handle_get_memory_info(client, &handle, 0, SHMB_REST, SHMB_READ, &old), 0);
	say("held");
	check_result(shmb_handle_get_memory_info(client, &handle, 0, SHMB_REST, SHMB_READ, &new), SHMB_E_RETIRING);
	check_result(shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &new), 0);
	check(new.generation != old.generation && !memcmp(new.address, "another", 7));
	check(!memcmp(old.address, "content", 7));
	check_result(shmb_lease_release(&old), 0);
	check_result(shmb_lease_release(&new), 0);
	say("released");
	check_result(shmb_handle_get_memory_info(client, &handle, 0, SHMB_REST, SHMB_READ, &new), SHMB_E_STALE);
	check_result(shmb_handle_open(client, "r", &handle), 0);
	check_result(shmb_handle_get_memory_info(client, &handle, 0, SHMB_REST, SHMB_READ, &new), 0);
	check_result(shmb_lease_release(&new), 0);
}

static void run_truncated(struct shmb_client *client) {
	struct shmb_lease lease;
	char seen[7];

	check_result(shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &lease), SHMB_E_UNSEALED);
	check_result(shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ | SHMB_COPY, &lease), 0);
	check(!lease.address && lease.flags & SHMB_REGION_UNSEALED);
	check_result(shmb_lease_copy_out(&lease, 0, seen, sizeof(seen)), 0);
	check(!memcmp(seen, "content", 7));
	say("held");
	check_result(shmb_lease_copy_out(&lease, 0, seen, sizeof(seen)), 0);
	check_result(shmb_lease_copy_out(&lease, 4096, seen, sizeof(seen)), SHMB_E_TRUNCATED);
	check_result(shmb_lease_copy_in(&lease, 0, seen, sizeof(seen)), SHMB_E_ACCESS);
	check_result(shmb_lease_release(&lease), 0);
	say("released");
}

static void run_revoked(struct shmb_client *client) {
	struct shmb_lease lease = get(client), other;

	say("held");
	check_result(shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &other), SHMB_E_NOT_FOUND);
	check(!memcmp(lease.address, "content", 7));
	check_result(shmb_lease_release(&lease), SHMB_E_REVOKED);
	say("released");
}

/* the broker is killed while a lease is held */
static void run_without_broker(struct shmb_client *client) {
	struct shmb_lease lease = get(client), other;

	say("held");
	check(!memcmp(lease.address, "content", 7));
	/* calls that find the broker gone leave what is held alone */
	check_result(shmb_client_ping(client, NULL), -ECONNRESET);
	check_result(shmb_client_process(client), -ECONNRESET);
	check(!memcmp(lease.address, "content", 7));
	check_result(shmb_lease_release(&lease), 0);
	check_result(shmb_client_get_memory_info(client, "x", 0, SHMB_REST, SHMB_READ, &other), -ECONNRESET);
	say("released");
}

static const Case cases[] = {
	{ .name = "hold", .run = run_hold },
	{ .name = "other-thread", .run = run_other_thread },
	{ .name = "ending-threads", .run = run_ending_threads },
	{ .name = "many-threads", .run = run_many_threads },
	{ .name = "fork", .run = run_fork },
	{ .name = "double-release", .run = run_double_release },
	{ .name = "lazy", .run = run_lazy },
	{ .name = "replace", .run = run_replace },
	{ .name = "truncated", .run = run_truncated },
	{ .name = "revoked", .run = run_revoked },
	{ .name = "without-broker", .run = run_without_broker },
};

int main(int argc, char **argv) {
	struct shmb_client *client;

	if (argc < 3)
		return 2;
	socket_path = argv[1];
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); ++i) {
		if (strcmp(cases[i].name, argv[2]))
			continue;
		check_result(shmb_client_new(&client, socket_path, SHMB_ROLE_CONSUMER, argc > 3 ? SHMB_FORCE_RMW : 0),
			     0);
		cases[i].run(client);
		shmb_client_free(client);
		return 0;
	}
	return 2;
}
