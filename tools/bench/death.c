/* SPDX-License-Identifier: Apache-2.0 */

/*
 * death: how soon what a killed process had is free again.
 *
 * owner-death: from SIGKILL until the broker has no region left of the owner; owner-death-memory: until nine tenths of
 * the memory behind them are back, as the system counts it (Shmem of /proc/meminfo). Its baseline is a process without
 * a broker, whose memory is of the same size and in as many pieces: the kernel's own share.
 * consumer-death: from SIGKILL of a process that holds a lease on each of the regions until their owner, which waits
 * for them to be gone, has its answer. Its baseline is the death of a process until its pidfd is readable.
 * In each round a broker's victim and its baseline's are killed one after the other.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "raw.h"
#include "regions.h"

#define ROUNDS 25
#define ROUNDS_QUICK 2
#define MIB (UINT64_C(1024) * 1024)
#define OWNED_BYTES (256 * MIB)
#define OWNED_BYTES_QUICK (64 * MIB)
#define OWNED_REGIONS 10000
#define OWNED_REGIONS_QUICK 100
#define OWNED_AT_ONCE 4 /* windows of a memfd: two fds of the broker, and 10,000 regions have to fit */
#define HELD_REGIONS 1000
#define HELD_REGIONS_QUICK 10
#define WINDOW_SIZE 4096
#define DEADLINE_NS UINT64_C(60000000000)
#define RETIRE_TIMEOUT_MS 10000
#define CLIENT_FDS 64
#define CONFIG "shared_uid = yes\nfair_share = no\n[quota]\nregions = unlimited\nmaps = unlimited\nfds = unlimited\n"

typedef struct Death Death;
typedef struct Victim Victim;
typedef struct Wait Wait;

/* a process that has something and waits to be killed */
struct Victim {
	pid_t pid;
	int pidfd;
};

struct Death {
	Bench *bench;
	Broker broker;
	struct shmb_client *watcher;
	int meminfo;
	uint32_t n; /* regions of a victim */
	uint64_t bytes;
	double samples[2][ROUNDS];
	double bare[ROUNDS];
};

/* an owner that waits until its regions are gone */
struct Wait {
	struct shmb_client *owner;
	uint64_t end_ns;
	pthread_t thread;
};

static uint64_t deadline_get(void) {
	return bench_now_ns() + DEADLINE_NS;
}

static void deadline_check(uint64_t deadline, const char *what) {
	if (bench_now_ns() > deadline)
		bench_die("%s does not happen", what);
}

static uint32_t death_rounds(const Death *death) {
	return death->bench->quick ? ROUNDS_QUICK : ROUNDS;
}

/* ---- victims ---- */

/* forks a process that inherits nothing, runs @have and then waits; returns when it has what it is to have */
static void victim_start(Victim *ret, const Death *death, void (*have)(const Death *death)) {
	pid_t parent = getpid();
	int ready[2];
	char byte;

	if (pipe2(ready, O_CLOEXEC) < 0)
		bench_die("pipe: %s", strerror(errno));
	ret->pid = fork();
	if (ret->pid < 0)
		bench_die("fork: %s", strerror(errno));
	if (!ret->pid) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent || dup2(ready[1], STDERR_FILENO + 1) < 0)
			_exit(1);
		(void)close_range(STDERR_FILENO + 2, UINT32_MAX, 0);
		have(death);
		if (write(STDERR_FILENO + 1, "", 1) != 1)
			_exit(1);
		for (;;)
			(void)pause();
	}
	(void)close(ready[1]);
	if (read(ready[0], &byte, 1) != 1)
		bench_die("a process that was to be killed has failed before");
	(void)close(ready[0]);
	ret->pidfd = (int)syscall(SYS_pidfd_open, ret->pid, 0);
	if (ret->pidfd < 0)
		bench_die("pidfd_open: %s", strerror(errno));
}

/* returns the time at which it was done */
static uint64_t victim_kill(const Victim *victim) {
	uint64_t now = bench_now_ns();

	if (kill(victim->pid, SIGKILL) < 0)
		bench_die("kill: %s", strerror(errno));
	return now;
}

static void victim_reap(Victim *victim) {
	(void)waitpid(victim->pid, NULL, 0);
	(void)close(victim->pidfd);
}

/* ---- owners ---- */

static void have_one_region(const Death *death) {
	struct shmb_region_options options = {
		.struct_size = sizeof(options),
		.flags = SHMB_REGION_OPT_POPULATE,
	};
	struct shmb_client *client = client_new(&death->broker, SHMB_ROLE_OWNER, 0);
	struct shmb_region *region;

	check(shmb_region_create(client, "bench.death", death->bytes, &options, &region), "bench.death");
}

static void have_many_regions(const Death *death) {
	uint64_t size = death->bytes / death->n;
	Regions regions;

	regions_init(&regions, client_new(&death->broker, SHMB_ROLE_OWNER, 0), size, size);
	while (regions.n < death->n)
		(void)regions_add(&regions, OWNED_AT_ONCE);
}

static void have_one_memfd(const Death *death) {
	int fd = raw_memory(death->bytes);
	void *memory = mmap(NULL, death->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);

	if (memory == MAP_FAILED)
		bench_die("mmap: %s", strerror(errno));
}

static void have_many_memfds(const Death *death) {
	uint64_t size = death->bytes / death->n * OWNED_AT_ONCE;

	for (uint32_t i = 0; i < death->n; i += OWNED_AT_ONCE) {
		int fd = raw_memory(size);

		if (fallocate(fd, 0, 0, (off_t)size) < 0)
			bench_die("fallocate: %s", strerror(errno));
	}
}

static uint64_t death_shmem(const Death *death) {
	char text[4096];
	ssize_t n = pread(death->meminfo, text, sizeof(text) - 1, 0);
	unsigned long long kib;
	const char *line;

	text[n > 0 ? n : 0] = 0;
	line = strstr(text, "\nShmem:");
	if (!line || sscanf(line + 7, "%llu", &kib) != 1)
		bench_die("/proc/meminfo does not tell Shmem");
	return kib * 1024;
}

/* the time at which most of what there was is free; @before was counted when all was there */
static uint64_t wait_for_memory(const Death *death, uint64_t before) {
	/* others may take memory meanwhile: where that is likely and nothing is measured, half of it will do */
	uint64_t enough = death->bench->quick ? death->bytes / 2 : death->bytes / 10 * 9;
	uint64_t deadline = deadline_get();

	while (death_shmem(death) + enough > before)
		deadline_check(deadline, "that memory of a killed process is free");
	return bench_now_ns();
}

static uint64_t wait_for_regions(const Death *death) {
	uint64_t deadline = deadline_get();

	while (client_stat(death->watcher, "regions"))
		deadline_check(deadline, "that regions of a killed process are gone");
	return bench_now_ns();
}

static void check_not_found(const Death *death, const char *name) {
	struct shmb_lookup_spec spec = {
		.struct_size = sizeof(spec),
		.name = name,
		.size = SHMB_REST,
		.access = SHMB_READ,
	};
	struct shmb_message_lease lease;
	int result;

	check(shmb_client_lookup(death->watcher, &spec, 1, &lease, &result), name);
	if (result != SHMB_E_NOT_FOUND)
		bench_die("%s is found after its owner was killed", name);
}

static void owner_round(Death *death, uint32_t round) {
	uint64_t before, begin;
	Victim victim;

	victim_start(&victim, death, death->n == 1 ? have_one_memfd : have_many_memfds);
	before = death_shmem(death);
	begin = victim_kill(&victim);
	death->bare[round] = (double)(wait_for_memory(death, before) - begin) / 1e6;
	victim_reap(&victim);

	victim_start(&victim, death, death->n == 1 ? have_one_region : have_many_regions);
	before = death_shmem(death);
	if (client_stat(death->watcher, "regions") != death->n)
		bench_die("the owner has not the regions that it is to have");
	begin = victim_kill(&victim);
	death->samples[0][round] = (double)(wait_for_regions(death) - begin) / 1e6;
	death->samples[1][round] = (double)(wait_for_memory(death, before) - begin) / 1e6;
	victim_reap(&victim);
	check_not_found(death, "bench.death");
	check_not_found(death, "bench.region-0000000");
}

/* ---- consumers ---- */

static void have_leases(const Death *death) {
	struct shmb_client *client = client_new(&death->broker, SHMB_ROLE_CONSUMER, 0);
	struct shmb_lease lease;
	char name[REGION_NAME_SIZE];

	for (uint32_t i = 0; i < death->n; ++i) {
		region_name(i, name);
		check(shmb_client_get_memory_info(client, name, 0, SHMB_REST, SHMB_READ, &lease), name);
	}
}

static void have_nothing(const Death *death) {
	(void)death;
}

static void *wait_run(void *userdata) {
	struct shmb_retired retired = { .struct_size = sizeof(retired) };
	Wait *wait = userdata;

	check(shmb_client_unregister_all(wait->owner, SHMB_ALL_SESSION, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT,
					 RETIRE_TIMEOUT_MS, &retired),
	      "waiting for regions of a killed consumer");
	wait->end_ns = bench_now_ns();
	if (retired.draining)
		bench_die("%u regions are not gone after the consumer was killed", retired.draining);
	return NULL;
}

/* begins to wait in another thread; returns when the broker has retired what is waited for */
static void wait_start(Wait *wait, const Death *death) {
	uint64_t retired = client_stat(death->watcher, "retired"), deadline = deadline_get();
	int r = pthread_create(&wait->thread, NULL, wait_run, wait);

	if (r)
		bench_die("pthread_create: %s", strerror(r));
	while (client_stat(death->watcher, "retired") < retired + death->n)
		deadline_check(deadline, "that regions are retired");
	if (client_stat(death->watcher, "regions") != death->n)
		bench_die("regions under lease are gone before their consumer");
}

static void consumer_round(Death *death, uint32_t round) {
	struct pollfd readable = { .events = POLLIN };
	Regions regions;
	Wait wait = {};
	Victim victim;
	uint64_t begin;

	victim_start(&victim, death, have_nothing);
	readable.fd = victim.pidfd;
	begin = victim_kill(&victim);
	if (poll(&readable, 1, -1) != 1)
		bench_die("poll: %s", strerror(errno));
	death->bare[round] = (double)(bench_now_ns() - begin) / 1e6;
	victim_reap(&victim);

	wait.owner = client_new(&death->broker, SHMB_ROLE_OWNER, 0);
	regions_init(&regions, wait.owner, WINDOW_SIZE, WINDOW_SIZE);
	while (regions.n < death->n)
		(void)regions_add(&regions,
				  death->n - regions.n < REGIONS_AT_ONCE ? death->n - regions.n : REGIONS_AT_ONCE);
	victim_start(&victim, death, have_leases);
	wait_start(&wait, death);
	begin = victim_kill(&victim);
	(void)pthread_join(wait.thread, NULL);
	death->samples[0][round] = (double)(wait.end_ns - begin) / 1e6;
	victim_reap(&victim);
	regions_deinit(&regions);
	shmb_client_free(wait.owner);
}

/* ---- rows ---- */

static int compare_doubles(const void *a, const void *b) {
	double left = *(const double *)a, right = *(const double *)b;

	return (left > right) - (left < right);
}

static double median_ratio(const double *samples, const double *baseline, uint32_t n) {
	double ratios[ROUNDS];

	for (uint32_t i = 0; i < n; ++i)
		ratios[i] = samples[i] / baseline[i];
	qsort(ratios, n, sizeof(*ratios), compare_doubles);
	return ratios[n / 2];
}

/* takes no samples away from @baseline, which has a row of its own later: a row sorts its samples */
static void add_row(const Death *death, const char *name, const char *detail, double *samples, const double *baseline) {
	const char *only = death->bench->only;
	BenchRow row = { .n = death->n, .threads = 1, .unit = "ms" };

	if (only && !strstr(name, only))
		return;
	(void)snprintf(row.name, sizeof(row.name), "%s", name);
	(void)snprintf(row.detail, sizeof(row.detail), "%s", detail);
	if (baseline)
		row.ratio = median_ratio(samples, baseline, death_rounds(death));
	bench_row(death->bench, row, samples, death_rounds(death));
}

static void measure_owner(Death *death, uint32_t n) {
	char detail[96];

	death->n = n;
	death->bytes = death->bench->quick ? OWNED_BYTES_QUICK : OWNED_BYTES;
	/* whole pages for each */
	death->bytes = n == 1 ? death->bytes : death->bytes / n / WINDOW_SIZE * WINDOW_SIZE * n;
	for (uint32_t round = 0; round < death_rounds(death); ++round)
		owner_round(death, round);
	(void)snprintf(detail, sizeof(detail), "%llu MiB, until the broker has no region of it",
		       (unsigned long long)(death->bytes / MIB));
	add_row(death, "owner-death", detail, death->samples[0], death->bare);
	(void)snprintf(detail, sizeof(detail), "%llu MiB, until they are free",
		       (unsigned long long)(death->bytes / MIB));
	add_row(death, "owner-death-memory", detail, death->samples[1], death->bare);
	(void)snprintf(detail, sizeof(detail), "%llu MiB of a process without a broker, until they are free",
		       (unsigned long long)(death->bytes / MIB));
	add_row(death, "bare-owner-death", detail, death->bare, NULL);
}

static void measure_consumer(Death *death, uint32_t n) {
	death->n = n;
	for (uint32_t round = 0; round < death_rounds(death); ++round)
		consumer_round(death, round);
	add_row(death, "consumer-death", "until the owner, which waits, knows that all of its regions are gone",
		death->samples[0], death->bare);
	add_row(death, "bare-consumer-death", "of a process that has nothing, until its pidfd is readable", death->bare,
		NULL);
}

static bool is_wanted(const Bench *bench, const char *name, const char *other) {
	return !bench->only || strstr(name, bench->only) || strstr(other, bench->only);
}

static int death_run(Bench *bench) {
	Death death = { .bench = bench, .meminfo = open("/proc/meminfo", O_RDONLY | O_CLOEXEC) };

	if (death.meminfo < 0)
		bench_die("/proc/meminfo: %s", strerror(errno));
	raw_need_fds(OWNED_REGIONS / OWNED_AT_ONCE * 2 + CLIENT_FDS);
	(void)broker_start(bench, &death.broker, CONFIG, "auto", -1);
	death.watcher = client_new(&death.broker, SHMB_ROLE_CONSUMER, SHMB_NO_LEASE_PAGE);
	if (is_wanted(bench, "owner-death-memory", "bare-owner-death")) {
		measure_owner(&death, 1);
		measure_owner(&death, bench->quick ? OWNED_REGIONS_QUICK : OWNED_REGIONS);
	}
	if (is_wanted(bench, "consumer-death", "bare-consumer-death")) {
		measure_consumer(&death, 1);
		measure_consumer(&death, bench->quick ? HELD_REGIONS_QUICK : HELD_REGIONS);
	}
	shmb_client_free(death.watcher);
	broker_stop(&death.broker);
	(void)close(death.meminfo);
	return 0;
}

const BenchCommand bench_death = {
	.name = "death",
	.help = "SIGKILL of an owner until its memory is back, of a consumer until its leases are",
	.run = death_run,
};
