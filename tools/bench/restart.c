/* SPDX-License-Identifier: Apache-2.0 */

/*
 * restart: what a broker that is killed costs those who use it.
 *
 * The broker runs under `shmbrokerd --supervise`, which keeps its state. kill-to-answer: from SIGKILL until the owner
 * of all regions has the answer to a request, for which the library connects again and shows its session's token; the
 * time for which the supervisor always waits is taken off. A consumer in another process, which holds a lease on each
 * region, acquires and releases all the time meanwhile, without any system call: outage-slowest is the slowest of
 * them from the kill to the answer, calm-slowest that of a window as long, right after it. One that fails, a system
 * call, a region or a lease that is lost ends the benchmark.
 */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "raw.h"
#include "regions.h"
#include "restart.h"

#define ROUNDS 20
#define ROUNDS_QUICK 3
#define REGIONS_MAX 10000
#define OBJECT_REGIONS 4 /* windows of a memfd: it is the fds that have to be handed over */
#define WINDOW_SIZE 4096
#define CLIENT_FDS 64
#define SUPERVISOR_DELAY_NS 100000000 /* RESTART_NS of daemon/supervise.c */
#define NS_PER_S 1000000000
#define NS_PER_MS 1e6
#define CONFIG "shared_uid = yes\nfair_share = no\n[quota]\nregions = unlimited\nmaps = unlimited\nfds = unlimited\n"

typedef struct Restart {
	Bench *bench;
	Broker broker;
	struct shmb_client *owner;
	Regions regions;
	RestartConsumer consumer;
	uint32_t n;
	uint32_t rounds;
	uint64_t n_acquired; /* in outages */
	double answer_ms[ROUNDS];
	double outage_ns[ROUNDS];
	double calm_ns[ROUNDS];
	double failures[ROUNDS];
} Restart;

/* returns when it is over */
static void kill_broker(const Restart *restart) {
	pid_t pid = broker_child(&restart->broker);
	struct pollfd end = { .fd = (int)syscall(SYS_pidfd_open, pid, 0), .events = POLLIN };

	if (end.fd < 0 || kill(pid, SIGKILL) < 0 || poll(&end, 1, -1) != 1)
		bench_die("killing the broker: %s", strerror(errno));
	(void)close(end.fd);
}

/* leases are too good to fail, so that there is nothing to go on with */
static void check_window(const RestartWindow *window, const char *when) {
	if (window->n_system_calls)
		bench_die("%s, an acquire or a release made %llu system calls, the last one number %d", when,
			  (unsigned long long)window->n_system_calls, window->system_call);
	if (window->n_failed)
		bench_die("%s, %llu of %llu acquires and releases failed, the last one with: %s", when,
			  (unsigned long long)window->n_failed, (unsigned long long)window->n,
			  shmb_error_text(window->result));
	if (!window->n)
		bench_die("%s, the consumer did nothing", when);
}

static void restart_round(Restart *restart, uint32_t round) {
	RestartWindow outage, calm;
	struct timespec pause;
	uint64_t begin, ns;

	restart_consumer_turn(&restart->consumer, NULL);
	begin = bench_now_ns();
	kill_broker(restart);
	check(shmb_client_ping(restart->owner, NULL), "a request to the next broker");
	ns = bench_now_ns() - begin;
	restart_consumer_turn(&restart->consumer, &outage);
	check_window(&outage, "while there was no broker");
	if (client_stat(restart->owner, "regions") != restart->n)
		bench_die("the next broker has not all regions");

	pause = (struct timespec){ .tv_sec = (time_t)(ns / NS_PER_S), .tv_nsec = (long)(ns % NS_PER_S) };
	restart_consumer_turn(&restart->consumer, NULL);
	(void)nanosleep(&pause, NULL);
	restart_consumer_turn(&restart->consumer, &calm);
	check_window(&calm, "while all was calm");

	if (ns <= SUPERVISOR_DELAY_NS)
		bench_die("the supervisor has not waited");
	restart->answer_ms[round] = (double)(ns - SUPERVISOR_DELAY_NS) / NS_PER_MS;
	restart->outage_ns[round] = (double)outage.slowest_ns;
	restart->calm_ns[round] = (double)calm.slowest_ns;
	restart->failures[round] = (double)(outage.n_failed + outage.n_system_calls);
	restart->n_acquired += outage.n;
}

/* every region has a lease, if none was lost */
static void check_leases(const Restart *restart) {
	struct shmb_retired retired = { .struct_size = sizeof(retired) };

	check(shmb_client_unregister_all(restart->owner, SHMB_ALL_SESSION, SHMB_RETIRE_STRICT, 0, &retired),
	      "retiring all regions");
	if (retired.draining != restart->n)
		bench_die("%u of %u regions are still under lease", retired.draining, restart->n);
}

/* ---- rows ---- */

static int compare_doubles(const void *a, const void *b) {
	double left = *(const double *)a, right = *(const double *)b;

	return (left > right) - (left < right);
}

static double median_ratio(const Restart *restart) {
	double ratios[ROUNDS];

	for (uint32_t i = 0; i < restart->rounds; ++i)
		ratios[i] = restart->outage_ns[i] / restart->calm_ns[i];
	qsort(ratios, restart->rounds, sizeof(*ratios), compare_doubles);
	return ratios[restart->rounds / 2];
}

static void add_row(const Restart *restart, const char *name, const char *unit, double ratio, const char *detail,
		    double *samples) {
	BenchRow row = { .n = restart->n, .threads = 1, .unit = unit, .ratio = ratio };

	if (restart->bench->only && !strstr(name, restart->bench->only))
		return;
	(void)snprintf(row.name, sizeof(row.name), "%s", name);
	(void)snprintf(row.detail, sizeof(row.detail), "%s", detail);
	bench_row(restart->bench, row, samples, restart->rounds);
}

static void add_rows(Restart *restart) {
	double ratio = median_ratio(restart);
	char detail[96];

	(void)snprintf(detail, sizeof(detail), "of %u fds, less the supervisor's own %d ms",
		       (restart->n + OBJECT_REGIONS - 1) / OBJECT_REGIONS * 2, (int)(SUPERVISOR_DELAY_NS / NS_PER_MS));
	add_row(restart, "kill-to-answer", "ms", 0, detail, restart->answer_ms);
	add_row(restart, "outage-slowest", "ns", ratio, "acquire and release, from the kill to the answer",
		restart->outage_ns);
	add_row(restart, "calm-slowest", "ns", 0, "the same in a window as long, afterwards", restart->calm_ns);
	(void)snprintf(detail, sizeof(detail), "failures and system calls of %llu acquires and releases",
		       (unsigned long long)restart->n_acquired);
	add_row(restart, "outage-failures", "", 0, detail, restart->failures);
}

static void restart_measure(Bench *bench, uint32_t n) {
	Restart restart = { .bench = bench, .n = n, .rounds = bench->quick ? ROUNDS_QUICK : ROUNDS };
	/* the consumer is to be slowed down by the outage, not by what the next broker computes */
	bool apart = bench_n_cpus() > 1;

	(void)broker_start_supervised(bench, &restart.broker, CONFIG, "auto", apart ? 0 : -1);
	restart.owner = client_new(&restart.broker, SHMB_ROLE_OWNER, 0);
	regions_init(&restart.regions, restart.owner, WINDOW_SIZE, WINDOW_SIZE);
	while (restart.regions.n < n)
		(void)regions_add(&restart.regions, OBJECT_REGIONS);
	restart_consumer_start(&restart.consumer, &restart.broker, n, apart ? 1 : -1);
	if (apart)
		(void)bench_pin(0);
	for (uint32_t round = 0; round < restart.rounds; ++round)
		restart_round(&restart, round);
	bench_unpin();
	restart_consumer_rest(&restart.consumer);
	check_leases(&restart);
	restart_consumer_stop(&restart.consumer);
	regions_deinit(&restart.regions);
	shmb_client_free(restart.owner);
	broker_stop(&restart.broker);
	add_rows(&restart);
}

static int restart_run(Bench *bench) {
	static const uint32_t sizes[] = { 100, 1000, REGIONS_MAX };

	raw_need_fds(REGIONS_MAX / OBJECT_REGIONS * 2 + CLIENT_FDS);
	for (size_t i = 0; i < (bench->quick ? 1 : sizeof(sizes) / sizeof(sizes[0])); ++i)
		restart_measure(bench, sizes[i]);
	return 0;
}

const BenchCommand bench_restart = {
	.name = "restart",
	.help = "SIGKILL of the broker until the next one answers, and leases meanwhile",
	.run = restart_run,
};
