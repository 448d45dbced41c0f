/* SPDX-License-Identifier: Apache-2.0 */

/*
 * scale: what regions and connections cost when there are many.
 *
 * Three parts, each with a broker of its own that shares a CPU with this process. Here, one broker gets more and more
 * regions, 64 in each piece of memory, so that half a million need no more than 8,000 pieces; windows of one overlap,
 * which makes no difference to the broker and saves 2 GiB. The others are in scale-clients.c.
 * Sizes grow, so samples of different sizes cannot be interleaved; the rows called growth tell how a cost follows the
 * size: 0 is not at all, 1 is in proportion.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "raw.h"
#include "regions.h"
#include "scale.h"

#define WINDOW_SIZE 4096
#define WINDOW_STRIDE 64
#define LOOKUPS 4096
#define LOOKUPS_QUICK 64
#define MAPPED_MAX 10000
#define ACQUIRES 200 /* a sample */
#define ACQUIRE_SAMPLES 500
#define ACQUIRE_SAMPLES_QUICK 5
#define WALKS 20
#define WALK_ENTRIES_MAX 400000
#define CAPACITY "capacity = 524288\n"

typedef struct Scale Scale;

struct Scale {
	Bench *bench;
	Broker broker;
	Regions regions;
	struct shmb_client *reader; /* without a lease page */
	uint64_t random;
	uint32_t capacity;
	uint64_t rss; /* at the step before */
	uint64_t rss_empty;
	double *samples;
	Curve registers, lookups, acquires, pages;
};

static const uint32_t steps_all[] = { 1000, 4000, 16000, 64000, 250000, 500000 };
static const uint32_t steps_all_quick[] = { 100, 200 };

/* ---- samples and rows ---- */

uint64_t scale_random(uint64_t *state) {
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static int compare_doubles(const void *a, const void *b) {
	double left = *(const double *)a, right = *(const double *)b;

	return (left > right) - (left < right);
}

static void add_row(Bench *bench, const char *name, uint64_t n, const char *unit, const char *detail, double *samples,
		    size_t n_samples) {
	BenchRow row = { .n = n, .threads = 1, .unit = unit };

	if (bench->only && !strstr(name, bench->only))
		return;
	(void)snprintf(row.name, sizeof(row.name), "%s", name);
	(void)snprintf(row.detail, sizeof(row.detail), "%s", detail);
	bench_row(bench, row, samples, n_samples);
}

void scale_number(Bench *bench, const char *name, uint64_t n, const char *unit, const char *detail, double value) {
	add_row(bench, name, n, unit, detail, &value, 1);
}

void curve_sample(Curve *curve, Bench *bench, const char *name, uint64_t n, const char *unit, const char *detail,
		  double *samples, size_t n_samples) {
	qsort(samples, n_samples, sizeof(*samples), compare_doubles);
	curve->x[curve->n] = (double)n;
	curve->y[curve->n++] = samples[n_samples / 2];
	add_row(bench, name, n, unit, detail, samples, n_samples);
}

void curve_growth(const Curve *curve, Bench *bench, const char *name) {
	if (!bench->only || strstr(name, bench->only))
		bench_growth(bench, name, curve->x, curve->y, curve->n);
}

bool scale_wants(const Bench *bench, const char *names) {
	char copy[512], *rest = copy;

	if (!bench->only)
		return true;
	(void)snprintf(copy, sizeof(copy), "%s", names);
	for (char *name; (name = strsep(&rest, " "));)
		if (strstr(name, bench->only))
			return true;
	return false;
}

/* ---- regions ---- */

static void scale_register(Scale *scale, uint32_t n) {
	size_t n_samples = 0;
	char detail[96];

	while (scale->regions.n < n) {
		uint32_t left = n - scale->regions.n, part = left < REGIONS_AT_ONCE ? left : REGIONS_AT_ONCE;
		uint64_t ns = regions_add(&scale->regions, part);

		/* what the last messages cost is the cost at this size */
		if (part == REGIONS_AT_ONCE || !n_samples)
			scale->samples[n_samples++ % LOOKUPS] = (double)ns / part;
	}
	if (n_samples > LOOKUPS)
		n_samples = LOOKUPS;
	(void)snprintf(detail, sizeof(detail), "capacity %u, each in messages of %d windows of one memfd",
		       scale->capacity, REGIONS_AT_ONCE);
	curve_sample(&scale->registers, scale->bench, "register", n, "ns", detail, scale->samples, n_samples);
}

static void scale_memory(Scale *scale, uint32_t before) {
	uint64_t rss = broker_rss(&scale->broker), unindexed = client_stat(scale->reader, "regions_unindexed");
	uint32_t n = scale->regions.n;
	char detail[96];

	(void)snprintf(detail, sizeof(detail), "capacity %u, since the step before; %.0f since there was none",
		       scale->capacity, (double)(rss - scale->rss_empty) / n);
	scale_number(scale->bench, "rss-per-region", n, "bytes", detail, (double)(rss - scale->rss) / (n - before));
	(void)snprintf(detail, sizeof(detail), "capacity %u, %llu objects, %llu regions not in the index",
		       scale->capacity, (unsigned long long)client_stat(scale->reader, "objects"),
		       (unsigned long long)unindexed);
	scale_number(scale->bench, "fds", n, "fds", detail, (double)broker_fds(&scale->broker));
	scale->rss = rss;
}

static void scale_lookup(Scale *scale) {
	uint32_t n = scale->regions.n, n_lookups = scale->bench->quick ? LOOKUPS_QUICK : LOOKUPS, held = 0;
	uint64_t leases[SHMB_BATCH_MAX], begin;
	int results[SHMB_BATCH_MAX];
	char detail[96], name[REGION_NAME_SIZE];

	for (uint32_t i = 0; i < n_lookups; ++i) {
		struct shmb_lookup_spec spec = {
			.struct_size = sizeof(spec),
			.name = name,
			.size = SHMB_REST,
			.access = SHMB_READ,
		};
		struct shmb_message_lease lease;

		region_name((uint32_t)(scale_random(&scale->random) % n), name);
		begin = bench_now_ns();
		check(shmb_client_lookup(scale->reader, &spec, 1, &lease, results), name);
		scale->samples[i] = (double)(bench_now_ns() - begin) / 1000;
		check(results[0], name);
		leases[held++] = lease.lease;
		if (held == SHMB_BATCH_MAX || i + 1 == n_lookups) {
			check(shmb_client_release(scale->reader, leases, held, results), "releasing");
			held = 0;
		}
	}
	(void)snprintf(detail, sizeof(detail), "capacity %u, one random name a message", scale->capacity);
	curve_sample(&scale->lookups, scale->bench, "lookup", n, "us", detail, scale->samples, n_lookups);
}

static void scale_acquire(Scale *scale) {
	uint32_t n = scale->regions.n, n_mapped = n < MAPPED_MAX ? n : MAPPED_MAX;
	uint32_t n_samples = scale->bench->quick ? ACQUIRE_SAMPLES_QUICK : ACQUIRE_SAMPLES;
	struct shmb_client *client = client_new(&scale->broker, SHMB_ROLE_CONSUMER, 0);
	char(*names)[REGION_NAME_SIZE] = calloc(n_mapped, sizeof(*names));
	char detail[96];

	if (!names)
		bench_die("out of memory");
	for (uint32_t i = 0; i < n_mapped; ++i) {
		region_name((uint32_t)((uint64_t)i * n / n_mapped), names[i]);
		region_acquire(client, names[i]);
	}
	for (uint32_t i = 0; i < n_samples; ++i) {
		uint64_t begin = bench_now_ns();

		for (uint32_t j = 0; j < ACQUIRES; ++j)
			region_acquire(client, names[scale_random(&scale->random) % n_mapped]);
		scale->samples[i] = (double)(bench_now_ns() - begin) / ACQUIRES;
	}
	(void)snprintf(detail, sizeof(detail), "capacity %u, by name, with release, of %u that are mapped",
		       scale->capacity, n_mapped);
	curve_sample(&scale->acquires, scale->bench, "acquire", n, "ns", detail, scale->samples, n_samples);
	shmb_client_free(client);
	free(names);
}

/* walks over all regions and returns how many there are */
static uint64_t status_walk(struct shmb_client *client) {
	const struct shmb_status *status;
	struct shmb_status_iter *iter;
	uint64_t n = 0;

	check(shmb_status_iter_new(client, NULL, &iter), "reading the status");
	for (;;) {
		check(shmb_status_iter_next(iter, &status), "reading the status");
		if (!status)
			break;
		n++;
	}
	shmb_status_iter_free(iter);
	return n;
}

/* messages of one walk, which the broker counts together with those that ask for its numbers */
static uint64_t status_pages(struct shmb_client *client) {
	uint64_t first = client_stat(client, "messages"), second = client_stat(client, "messages");

	(void)status_walk(client);
	return client_stat(client, "messages") - second - (second - first);
}

static void scale_status(Scale *scale) {
	uint32_t n = scale->regions.n, n_walks = WALK_ENTRIES_MAX / n < WALKS ? WALK_ENTRIES_MAX / n + 2 : WALKS;
	uint64_t n_pages = status_pages(scale->reader), begin;
	char detail[96];

	for (uint32_t i = 0; i < n_walks; ++i) {
		uint64_t seen;

		begin = bench_now_ns();
		seen = status_walk(scale->reader);
		scale->samples[i] = (double)(bench_now_ns() - begin) / 1000 / (double)n_pages;
		if (seen != n)
			bench_die("status lists %llu of %u regions", (unsigned long long)seen, n);
	}
	(void)snprintf(detail, sizeof(detail), "capacity %u, a walk of %llu pages", scale->capacity,
		       (unsigned long long)n_pages);
	curve_sample(&scale->pages, scale->bench, "status-page", n, "us", detail, scale->samples, n_walks);
}

static void scale_retire_all(Scale *scale) {
	struct shmb_retired retired = { .struct_size = sizeof(retired) };
	uint64_t begin = bench_now_ns(), ns;
	char detail[96];

	check(shmb_client_unregister_all(scale->regions.owner, SHMB_ALL_SESSION, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT,
					 -1, &retired),
	      "retiring everything");
	ns = bench_now_ns() - begin;
	if (retired.gone != scale->regions.n)
		bench_die("%u of %u regions are gone", retired.gone, scale->regions.n);
	(void)snprintf(detail, sizeof(detail), "capacity %u, all of a session in one message", scale->capacity);
	scale_number(scale->bench, "retire-all", scale->regions.n, "ns", detail, (double)ns / scale->regions.n);
}

static void measure_regions(Bench *bench) {
	Scale scale = { .bench = bench, .random = SCALE_SEED };
	const uint32_t *steps;
	size_t n_steps;

	steps = SCALE_STEPS(steps_all, bench, &n_steps);
	raw_need_fds(steps[n_steps - 1] / REGIONS_AT_ONCE + SCALE_CLIENT_FDS);
	scale.samples = calloc(LOOKUPS, sizeof(*scale.samples));
	if (!scale.samples)
		bench_die("out of memory");
	(void)broker_start(bench, &scale.broker, CAPACITY SCALE_CONFIG, "auto", 0);
	regions_init(&scale.regions, client_new(&scale.broker, SHMB_ROLE_OWNER, 0), WINDOW_SIZE, WINDOW_STRIDE);
	scale.reader = client_new(&scale.broker, SHMB_ROLE_CONSUMER, SHMB_NO_LEASE_PAGE);
	scale.capacity = (uint32_t)client_stat(scale.reader, "capacity");
	scale.rss = scale.rss_empty = broker_rss(&scale.broker);
	for (size_t i = 0; i < n_steps; ++i) {
		uint32_t before = scale.regions.n;

		scale_register(&scale, steps[i]);
		scale_memory(&scale, before);
		scale_lookup(&scale);
		scale_acquire(&scale);
		scale_status(&scale);
	}
	scale_retire_all(&scale);
	curve_growth(&scale.registers, bench, "register-growth");
	curve_growth(&scale.lookups, bench, "lookup-growth");
	curve_growth(&scale.acquires, bench, "acquire-growth");
	curve_growth(&scale.pages, bench, "status-page-growth");
	broker_stop(&scale.broker);
	shmb_client_free(scale.reader);
	regions_deinit(&scale.regions);
	free(scale.samples);
}

/* ---- the whole ---- */

static int scale_run(Bench *bench) {
	if (!bench_pin(0))
		bench_die("this thread cannot be bound to a CPU");
	if (scale_wants(bench, "register rss-per-region fds lookup acquire status-page retire-all register-growth "
			       "lookup-growth acquire-growth status-page-growth"))
		measure_regions(bench);
	if (scale_wants(bench,
			"connect rss-per-connection connection-fds ping-among register-among clients-page disconnect "
			"connect-growth ping-among-growth register-among-growth clients-page-growth"))
		scale_connections(bench);
	if (scale_wants(bench, "retire-among-one-mapper retire-among-half-mappers retire-among-one-mapper-growth "
			       "retire-among-half-mappers-growth"))
		scale_consumers(bench);
	return 0;
}

const BenchCommand bench_scale = {
	.name = "scale",
	.help = "half a million regions, 8,000 connections, 1,000 lease pages: what grows, and how",
	.run = scale_run,
};
