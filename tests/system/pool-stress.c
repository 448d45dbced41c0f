/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A member of a pool for test_pool.py.
 *
 * pool-stress SOCKET: reads commands by lines, and answers each with a line that begins with the call's result:
 * create N SIZE, open, acquire TIMEOUT, release BLOCK, give BLOCK, take OFFSET GENERATION, find OFFSET SIZE, count, close,
 * stop. A BLOCK is "INDEX OFFSET GENERATION INTERNAL", as acquire, take and find print it. create also makes the region
 * "mail", for workers.
 *
 * pool-stress SOCKET worker SEED: threads that acquire, give, take and release blocks at random, until "stop" was said
 * to the owner. A line is printed now and then. Each block has a canary, which says who believes to have it: a process
 * that finds another one's there waits until the kernel says that this is dead, and who finds its own overwritten fails.
 */

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "shmbroker.h"

#define THREADS 2
#define LETTERS 4
#define SAY_EVERY 100
#define SUICIDE_ONE_IN 3000
#define DEAD_WITHIN_S 60

/* what workers share beside the pool */
typedef struct Mail {
	_Atomic uint32_t stop;
	_Atomic uint64_t letters[LETTERS]; /* index << 32 | generation of a block that was given, plus one */
} Mail;

typedef struct Worker {
	struct shmb_pool *pool;
	Mail *mail;
	unsigned seed;
	uint64_t canary; /* pid << 8 | number of the thread, plus one */
	pthread_t thread;
} Worker;

static void fail(const char *what) {
	printf("failed: %s: %s\n", what, shmb_last_error());
	fflush(stdout);
	_exit(1);
}

/* ---- worker ---- */

/* a zombie has no memory any more */
static bool is_dead(uint64_t pid) {
	char path[64], text[512], *end;
	FILE *file;
	size_t n;

	snprintf(path, sizeof(path), "/proc/%" PRIu64 "/stat", pid);
	file = fopen(path, "re");
	if (!file)
		return true;
	n = fread(text, 1, sizeof(text) - 1, file);
	(void)fclose(file);
	text[n] = 0;
	end = strrchr(text, ')');
	return !n || !end || end[2] == 'Z' || end[2] == 'X';
}

/* the process may be on its way out, and have let go of its memory, before that is to be seen */
static void await_death(uint64_t canary) {
	time_t deadline = time(NULL) + DEAD_WITHIN_S;

	while (!is_dead(canary >> 8)) {
		if (time(NULL) > deadline)
			fail("a block is held by two");
		(void)usleep(1000);
	}
}

static void mark(const Worker *worker, const struct shmb_block *block) {
	uint64_t before = atomic_exchange((_Atomic uint64_t *)block->address, worker->canary);

	if (!before)
		return;
	if (before >> 8 == worker->canary >> 8)
		fail("a block is held by two threads");
	await_death(before);
}

static void unmark(const Worker *worker, const struct shmb_block *block) {
	uint64_t expected = worker->canary;

	if (!atomic_compare_exchange_strong((_Atomic uint64_t *)block->address, &expected, 0))
		fail("a block that is held was given to another");
}

static void give(Worker *worker, struct shmb_block *block) {
	uint64_t letter = ((uint64_t)block->index << 32 | block->generation) + 1, none = 0;
	int r;

	unmark(worker, block);
	if (shmb_block_give(worker->pool, block))
		fail("give");
	if (atomic_compare_exchange_strong(&worker->mail->letters[rand_r(&worker->seed) % LETTERS], &none, letter))
		return;
	/* no letter was sent */
	r = shmb_block_release(worker->pool, block);
	if (r)
		fail("release of a given block");
}

/* false when there is no letter, or who gave the block has died since and it has gone elsewhere */
static bool take(Worker *worker, uint64_t blocks_offset, uint64_t stride, struct shmb_block *ret) {
	uint64_t letter = atomic_exchange(&worker->mail->letters[rand_r(&worker->seed) % LETTERS], 0);
	int r;

	if (!letter--)
		return false;
	r = shmb_block_take(worker->pool, blocks_offset + (letter >> 32) * stride, (uint32_t)letter, ret);
	if (r && r != SHMB_E_STALE && r != SHMB_E_PERMISSION)
		fail("take");
	return !r;
}

static void *work(void *data) {
	Worker *worker = data;
	struct shmb_block block;
	uint64_t size = shmb_pool_get_block_size(worker->pool), stride = (size + 63) / 64 * 64, offset = 0;
	bool known = false;

	for (unsigned i = 0; !atomic_load(&worker->mail->stop); ++i) {
		bool taken = known && !(rand_r(&worker->seed) & 3) && take(worker, offset, stride, &block);

		if (!taken) {
			int r = shmb_pool_acquire(worker->pool, rand_r(&worker->seed) % 300, &block);

			if (r == SHMB_E_TIMED_OUT)
				continue;
			if (r)
				fail("acquire");
		}
		offset = block.offset - block.index * stride;
		known = true;
		mark(worker, &block);
		if (!(rand_r(&worker->seed) % SUICIDE_ONE_IN))
			(void)kill(getpid(), SIGKILL);
		if (!(rand_r(&worker->seed) & 7)) {
			give(worker, &block);
		} else {
			struct shmb_block copy = block;

			unmark(worker, &block);
			if (shmb_block_release(worker->pool, &block))
				fail("release");
			if (shmb_block_release(worker->pool, &copy) != SHMB_E_STALE)
				fail("a second release");
		}
		if (!(i % SAY_EVERY)) {
			printf(".\n");
			fflush(stdout);
		}
	}
	return NULL;
}

static int worker_main(struct shmb_client *client, unsigned seed) {
	Worker workers[THREADS];
	struct shmb_pool *pool;
	struct shmb_lease mail;

	if (shmb_pool_open(client, "p", &pool) ||
	    shmb_client_get_memory_info(client, "mail", 0, SHMB_REST, SHMB_READ | SHMB_WRITE, &mail))
		fail("open");
	for (uint64_t i = 0; i < THREADS; ++i) {
		workers[i] = (Worker){
			.pool = pool,
			.mail = mail.address,
			.seed = seed * THREADS + (unsigned)i,
			.canary = (uint64_t)getpid() << 8 | (i + 1),
		};
		if (pthread_create(&workers[i].thread, NULL, work, &workers[i]))
			fail("pthread_create");
	}
	for (int i = 0; i < THREADS; ++i)
		pthread_join(workers[i].thread, NULL);
	(void)shmb_lease_release(&mail);
	shmb_pool_free(pool);
	shmb_client_free(client);
	printf("done\n");
	return 0;
}

/* ---- commands ---- */

static struct shmb_region *mail_region;

static int create(struct shmb_client *client, uint32_t n, uint64_t size, struct shmb_pool **ret) {
	int r = shmb_region_create(client, "mail", sizeof(Mail), NULL, &mail_region);

	return r ? r : shmb_pool_create(client, "p", n, size, NULL, ret);
}

static void print_block(int result, const struct shmb_block *block) {
	if (result)
		printf("%d\n", result);
	else
		printf("0 %" PRIu32 " %" PRIu64 " %" PRIu32 " %" PRIu64 "\n", block->index, block->offset,
		       block->generation, block->internal);
}

/* false for a line that is no command */
static bool run(struct shmb_client *client, const char *line) {
	static struct shmb_pool *pool;
	struct shmb_block block = {};
	uint64_t a, b, size;
	uint32_t n = 0;
	int r, timeout;

	if (sscanf(line, "create %" SCNu32 " %" SCNu64, &n, &size) == 2) {
		printf("%d\n", create(client, n, size, &pool));
	} else if (!strcmp(line, "open\n")) {
		printf("%d\n", shmb_pool_open(client, "p", &pool));
	} else if (sscanf(line, "acquire %d", &timeout) == 1) {
		r = shmb_pool_acquire(pool, timeout, &block);
		print_block(r, &block);
	} else if (sscanf(line, "release %" SCNu32 " %" SCNu64 " %" SCNu32 " %" SCNu64, &block.index, &block.offset,
			  &block.generation, &block.internal) == 4) {
		printf("%d\n", shmb_block_release(pool, &block));
	} else if (sscanf(line, "give %" SCNu32 " %" SCNu64 " %" SCNu32 " %" SCNu64, &block.index, &block.offset,
			  &block.generation, &block.internal) == 4) {
		printf("%d\n", shmb_block_give(pool, &block));
	} else if (sscanf(line, "take %" SCNu64 " %" SCNu32, &a, &n) == 2) {
		r = shmb_block_take(pool, a, n, &block);
		print_block(r, &block);
	} else if (sscanf(line, "find %" SCNu64 " %" SCNu64, &a, &b) == 2) {
		r = shmb_pool_find(pool, a, b, &block);
		print_block(r, &block);
	} else if (!strcmp(line, "count\n")) {
		r = shmb_pool_count_free(pool, &n);
		printf("%d %" PRIu32 "\n", r, n);
	} else if (!strcmp(line, "close\n")) {
		pool = shmb_pool_free(pool);
		printf("0\n");
	} else if (!strcmp(line, "stop\n")) {
		atomic_store(&((Mail *)shmb_region_get_data(mail_region))->stop, 1);
		printf("0\n");
	} else {
		return false;
	}
	fflush(stdout);
	return true;
}

/* a broker that is killed before it has made the session leaves nothing that could be resumed */
static struct shmb_client *connect_to(const char *path) {
	time_t deadline = time(NULL) + DEAD_WITHIN_S;
	struct shmb_client *client;
	int r;

	do {
		r = shmb_client_new(&client, path, 0, 0);
	} while ((r == -ECONNRESET || r == -EPIPE || r == -ECONNREFUSED) && time(NULL) < deadline);
	if (r)
		fail("connect");
	return client;
}

int main(int argc, char **argv) {
	struct shmb_client *client;
	char line[256];

	if (argc < 2)
		return 2;
	client = connect_to(argv[1]);
	if (argc > 3)
		return worker_main(client, (unsigned)atoi(argv[3]));
	while (fgets(line, sizeof(line), stdin))
		if (!run(client, line))
			return 2;
	return 0;
}
