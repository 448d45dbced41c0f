/* SPDX-License-Identifier: Apache-2.0 */

/*
 * scale: what regions and connections cost when there are many.
 *
 * Three parts, each with a broker of its own that shares a CPU with this process. One broker gets more and more
 * regions, 64 in each piece of memory, so that half a million need no more than 8,000 pieces; windows of one overlap,
 * which makes no difference to the broker and saves 2 GiB. One gets more and more connections. One has consumers with
 * lease pages, of which some have the region mapped that is retired.
 * Sizes grow, so samples of different sizes cannot be interleaved; the rows called growth tell how a cost follows the
 * size: 0 is not at all, 1 is in proportion.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "raw.h"
#include "regions.h"
#include "wire/fd.h"

#define STEPS_MAX 8
#define WINDOW_SIZE 4096
#define WINDOW_STRIDE 64
#define LOOKUPS 4096
#define LOOKUPS_QUICK 64
#define MAPPED_MAX 10000
#define ACQUIRES 200 /* a sample */
#define ACQUIRE_SAMPLES 500
#define WALKS 20
#define WALK_ENTRIES_MAX 400000
#define PINGS 2000
#define PINGS_QUICK 20
#define RETIRE_ROUNDS 50
#define RETIRE_ROUNDS_QUICK 3
#define RETIRE_TIMEOUT_MS 30000
#define CLIENT_FDS 20

#define QUOTAS \
	"[quota]\nsessions = unlimited\nregions = unlimited\nmaps = unlimited\nleases = unlimited\nfds = unlimited\n"
#define REGIONS_CONFIG "shared_uid = yes\nfair_share = no\ncapacity = 524288\n" QUOTAS
#define CONFIG "shared_uid = yes\nfair_share = no\n" QUOTAS

typedef struct Curve Curve;
typedef struct Scale Scale;

/* the medians of one row over the sizes */
struct Curve {
	double x[STEPS_MAX];
	double y[STEPS_MAX];
	size_t n;
};

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

static const uint32_t region_steps[] = { 1000, 4000, 16000, 64000, 250000, 500000 };
static const uint32_t region_steps_quick[] = { 100, 200 };
static const uint32_t connection_steps[] = { 10, 100, 1000, 8000 };
static const uint32_t connection_steps_quick[] = { 10, 20 };
static const uint32_t consumer_steps[] = { 10, 100, 1000 };
static const uint32_t consumer_steps_quick[] = { 4, 8 };

#define STEPS(_name, _bench, _ret_n)                                                                   \
	((_bench)->quick ? (*(_ret_n) = sizeof(_name##_quick) / sizeof(*_name##_quick), _name##_quick) \
			 : (*(_ret_n) = sizeof(_name) / sizeof(*_name), _name))

/* ---- samples and rows ---- */

static uint64_t random_next(uint64_t *state) {
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static int compare_doubles(const void *a, const void *b) {
	double left = *(const double *)a, right = *(const double *)b;

	return (left > right) - (left < right);
}

static double median(double *samples, size_t n) {
	qsort(samples, n, sizeof(*samples), compare_doubles);
	return n ? samples[n / 2] : 0;
}

static void curve_add(Curve *curve, double x, double y) {
	if (curve->n == STEPS_MAX)
		return;
	curve->x[curve->n] = x;
	curve->y[curve->n++] = y;
}

static void curve_row(Bench *bench, const char *name, const Curve *curve) {
	if (!bench->only || strstr(name, bench->only))
		bench_growth(bench, name, curve->x, curve->y, curve->n);
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

/* one number that does not vary */
static void add_number(Bench *bench, const char *name, uint64_t n, const char *unit, const char *detail, double value) {
	add_row(bench, name, n, unit, detail, &value, 1);
}

/* a part whose rows --only leaves out altogether is not run */
static bool is_wanted(const Bench *bench, const char *names) {
	char copy[256], *rest = copy;

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
	curve_add(&scale->registers, n, median(scale->samples, n_samples));
	(void)snprintf(detail, sizeof(detail), "capacity %u, each in messages of %d windows of one memfd",
		       scale->capacity, REGIONS_AT_ONCE);
	add_row(scale->bench, "register", n, "ns", detail, scale->samples, n_samples);
}

static void scale_memory(Scale *scale, uint32_t before) {
	uint64_t rss = broker_rss(&scale->broker), unindexed = client_stat(scale->reader, "regions_unindexed");
	uint32_t n = scale->regions.n;
	char detail[96];

	(void)snprintf(detail, sizeof(detail), "capacity %u, since the step before; %.0f since there was none",
		       scale->capacity, (double)(rss - scale->rss_empty) / n);
	add_number(scale->bench, "rss-per-region", n, "bytes", detail, (double)(rss - scale->rss) / (n - before));
	(void)snprintf(detail, sizeof(detail), "capacity %u, %llu objects, %llu regions not in the index",
		       scale->capacity, (unsigned long long)client_stat(scale->reader, "objects"),
		       (unsigned long long)unindexed);
	add_number(scale->bench, "fds", n, "fds", detail, (double)broker_fds(&scale->broker));
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

		region_name((uint32_t)(random_next(&scale->random) % n), name);
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
	curve_add(&scale->lookups, n, median(scale->samples, n_lookups));
	(void)snprintf(detail, sizeof(detail), "capacity %u, one random name a message", scale->capacity);
	add_row(scale->bench, "lookup", n, "us", detail, scale->samples, n_lookups);
}

static void acquire(struct shmb_client *client, const char *name) {
	struct shmb_lease lease;

	check(shmb_client_get_memory_info(client, name, 0, SHMB_REST, SHMB_READ, &lease), name);
	check(shmb_lease_release(&lease), name);
}

static void scale_acquire(Scale *scale) {
	uint32_t n = scale->regions.n, n_mapped = n < MAPPED_MAX ? n : MAPPED_MAX;
	uint32_t n_samples = scale->bench->quick ? 5 : ACQUIRE_SAMPLES;
	struct shmb_client *client = client_new(&scale->broker, SHMB_ROLE_CONSUMER, 0);
	char(*names)[REGION_NAME_SIZE] = calloc(n_mapped, sizeof(*names));
	char detail[96];

	if (!names)
		bench_die("out of memory");
	for (uint32_t i = 0; i < n_mapped; ++i) {
		region_name((uint32_t)((uint64_t)i * n / n_mapped), names[i]);
		acquire(client, names[i]);
	}
	for (uint32_t i = 0; i < n_samples; ++i) {
		uint64_t begin = bench_now_ns();

		for (uint32_t j = 0; j < ACQUIRES; ++j)
			acquire(client, names[random_next(&scale->random) % n_mapped]);
		scale->samples[i] = (double)(bench_now_ns() - begin) / ACQUIRES;
	}
	curve_add(&scale->acquires, n, median(scale->samples, n_samples));
	(void)snprintf(detail, sizeof(detail), "capacity %u, by name, with release, of %u that are mapped",
		       scale->capacity, n_mapped);
	add_row(scale->bench, "acquire", n, "ns", detail, scale->samples, n_samples);
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
	curve_add(&scale->pages, n, median(scale->samples, n_walks));
	(void)snprintf(detail, sizeof(detail), "capacity %u, a walk of %llu pages", scale->capacity,
		       (unsigned long long)n_pages);
	add_row(scale->bench, "status-page", n, "us", detail, scale->samples, n_walks);
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
	add_number(scale->bench, "retire-all", scale->regions.n, "ns", detail, (double)ns / scale->regions.n);
}

static void measure_regions(Bench *bench) {
	Scale scale = { .bench = bench, .random = 88172645463325252 };
	const uint32_t *steps;
	size_t n_steps;

	steps = STEPS(region_steps, bench, &n_steps);
	raw_need_fds(steps[n_steps - 1] / REGIONS_AT_ONCE + CLIENT_FDS);
	scale.samples = calloc(LOOKUPS, sizeof(*scale.samples));
	if (!scale.samples)
		bench_die("out of memory");
	(void)broker_start(bench, &scale.broker, REGIONS_CONFIG, "auto", 0);
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
	curve_row(bench, "register-growth", &scale.registers);
	curve_row(bench, "lookup-growth", &scale.lookups);
	curve_row(bench, "acquire-growth", &scale.acquires);
	curve_row(bench, "status-page-growth", &scale.pages);
	broker_stop(&scale.broker);
	shmb_client_free(scale.reader);
	regions_deinit(&scale.regions);
	free(scale.samples);
}

/* ---- connections ---- */

typedef struct Connections {
	Broker broker;
	struct shmb_client *admin;
	int *fds;
	uint32_t n;
	uint64_t rss;
	double *samples;
	uint64_t random;
	Curve connects, pings, pages;
} Connections;

static void connections_add(Connections *connections, Bench *bench, uint32_t n) {
	uint32_t before = connections->n;
	uint64_t rss;
	char detail[96];

	while (connections->n < n) {
		uint64_t begin = bench_now_ns();

		connections->fds[connections->n] = raw_connect(connections->broker.socket, SHMB_ROLE_CONSUMER);
		connections->samples[connections->n - before] = (double)(bench_now_ns() - begin) / 1000;
		connections->n++;
	}
	rss = broker_rss(&connections->broker);
	curve_add(&connections->connects, n, median(connections->samples, n - before));
	add_row(bench, "connect", n, "us", "socket, connect and HELLO", connections->samples, n - before);
	(void)snprintf(detail, sizeof(detail), "since there were %u", before);
	add_number(bench, "rss-per-connection", n, "bytes", detail, (double)(rss - connections->rss) / (n - before));
	add_number(bench, "connection-fds", n, "fds", "all of the broker", (double)broker_fds(&connections->broker));
	connections->rss = rss;
}

static void connections_ping(Connections *connections, Bench *bench) {
	uint8_t reply[256] __attribute__((aligned(8)));
	uint32_t n_pings = bench->quick ? PINGS_QUICK : PINGS;
	RawMessage ping;

	raw_ping(&ping);
	for (uint32_t i = 0; i < n_pings; ++i) {
		int fd = connections->fds[random_next(&connections->random) % connections->n];
		uint64_t begin = bench_now_ns();

		(void)raw_call(fd, &ping, NULL, 0, reply, sizeof(reply));
		connections->samples[i] = (double)(bench_now_ns() - begin) / 1000;
	}
	curve_add(&connections->pings, connections->n, median(connections->samples, n_pings));
	add_row(bench, "ping-among", connections->n, "us", "one PING of a random connection, the others are idle",
		connections->samples, n_pings);
}

static int count_client(void *userdata, const struct shmb_client_status *status) {
	(void)status;
	++*(uint32_t *)userdata;
	return 0;
}

static uint32_t clients_walk(struct shmb_client *client) {
	uint32_t n = 0;

	check(shmb_client_each_client(client, count_client, &n), "listing clients");
	return n;
}

/* the list of clients, page by page; the last ones are the farthest from the list's beginning */
static void connections_list(Connections *connections, Bench *bench) {
	uint64_t first = client_stat(connections->admin, "messages"),
		 second = client_stat(connections->admin, "messages");
	uint64_t n_pages, begin;
	char detail[96];

	if (clients_walk(connections->admin) != connections->n + 1)
		bench_die("not all connections are listed");
	n_pages = client_stat(connections->admin, "messages") - second - (second - first);
	for (uint32_t i = 0; i < WALKS; ++i) {
		begin = bench_now_ns();
		(void)clients_walk(connections->admin);
		connections->samples[i] = (double)(bench_now_ns() - begin) / 1000 / (double)n_pages;
	}
	curve_add(&connections->pages, connections->n, median(connections->samples, WALKS));
	(void)snprintf(detail, sizeof(detail), "a walk of %llu pages", (unsigned long long)n_pages);
	add_row(bench, "clients-page", connections->n, "us", detail, connections->samples, WALKS);
}

static void connections_close(Connections *connections, Bench *bench) {
	uint64_t begin = bench_now_ns();

	for (uint32_t i = 0; i < connections->n; ++i)
		(void)close(connections->fds[i]);
	while (client_stat(connections->admin, "sessions") > 1)
		;
	add_number(bench, "disconnect", connections->n, "us", "all at once, until the broker has no session of them",
		   (double)(bench_now_ns() - begin) / 1000 / connections->n);
}

static void measure_connections(Bench *bench) {
	Connections connections = { .random = 88172645463325252 };
	const uint32_t *steps;
	size_t n_steps;
	uint32_t max;

	steps = STEPS(connection_steps, bench, &n_steps);
	max = steps[n_steps - 1];
	raw_need_fds(max + CLIENT_FDS);
	connections.fds = calloc(max, sizeof(*connections.fds));
	connections.samples = calloc(max > PINGS ? max : PINGS, sizeof(*connections.samples));
	if (!connections.fds || !connections.samples)
		bench_die("out of memory");
	(void)broker_start(bench, &connections.broker, CONFIG, "auto", 0);
	connections.admin = client_new(&connections.broker, SHMB_ROLE_CONSUMER, SHMB_NO_LEASE_PAGE);
	connections.rss = broker_rss(&connections.broker);
	for (size_t i = 0; i < n_steps; ++i) {
		connections_add(&connections, bench, steps[i]);
		connections_ping(&connections, bench);
		connections_list(&connections, bench);
	}
	connections_close(&connections, bench);
	curve_row(bench, "connect-growth", &connections.connects);
	curve_row(bench, "ping-among-growth", &connections.pings);
	curve_row(bench, "clients-page-growth", &connections.pages);
	shmb_client_free(connections.admin);
	broker_stop(&connections.broker);
	free(connections.samples);
	free(connections.fds);
}

/* ---- retire among consumers ---- */

typedef struct Consumers {
	Broker broker;
	struct shmb_client *owner;
	struct shmb_client **attached;
	uint32_t n;
	uint32_t n_regions; /* made so far: names are not used again */
	double samples[2][RETIRE_ROUNDS];
	uint64_t pages[2]; /* read by the broker, of all rounds */
	Curve curves[2];
} Consumers;

/* retires a new region that the first @n_mappers consumers have mapped; @ret_pages are those that the broker read */
static double retire_among(Consumers *consumers, uint32_t n_mappers, uint64_t *ret_pages) {
	struct shmb_region *region;
	char name[REGION_NAME_SIZE];
	uint64_t begin, ns, pages;

	region_name(consumers->n_regions++, name);
	check(shmb_region_create(consumers->owner, name, WINDOW_SIZE, NULL, &region), name);
	for (uint32_t i = 0; i < n_mappers; ++i)
		acquire(consumers->attached[(uint64_t)i * consumers->n / n_mappers], name);
	pages = client_stat(consumers->owner, "pages_scanned");
	begin = bench_now_ns();
	check(shmb_region_retire(region, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, RETIRE_TIMEOUT_MS), name);
	ns = bench_now_ns() - begin;
	*ret_pages = client_stat(consumers->owner, "pages_scanned") - pages;
	shmb_region_free(region);
	return (double)ns / 1000;
}

static void consumers_retire(Consumers *consumers, Bench *bench) {
	static const char *const names[] = { "retire-among-one-mapper", "retire-among-half-mappers" };
	uint32_t n_mappers[] = { 1, consumers->n / 2 };
	uint32_t rounds = bench->quick ? RETIRE_ROUNDS_QUICK : RETIRE_ROUNDS;
	char detail[96];

	for (uint32_t round = 0; round < rounds; ++round) {
		for (size_t i = 0; i < 2; ++i) {
			uint64_t pages;

			consumers->samples[i][round] = retire_among(consumers, n_mappers[i], &pages);
			consumers->pages[i] += pages;
		}
	}
	for (size_t i = 0; i < 2; ++i) {
		curve_add(&consumers->curves[i], consumers->n, median(consumers->samples[i], rounds));
		(void)snprintf(detail, sizeof(detail), "strict, waited for; %u have it mapped, %.1f pages read",
			       n_mappers[i], (double)consumers->pages[i] / rounds);
		add_row(bench, names[i], consumers->n, "us", detail, consumers->samples[i], rounds);
		consumers->pages[i] = 0;
	}
}

static void measure_consumers(Bench *bench) {
	Consumers consumers = {};
	const uint32_t *steps;
	size_t n_steps;
	uint32_t max;

	steps = STEPS(consumer_steps, bench, &n_steps);
	max = steps[n_steps - 1];
	raw_need_fds(3 * max + CLIENT_FDS);
	consumers.attached = calloc(max, sizeof(struct shmb_client *));
	if (!consumers.attached)
		bench_die("out of memory");
	(void)broker_start(bench, &consumers.broker, CONFIG, "auto", 0);
	consumers.owner = client_new(&consumers.broker, SHMB_ROLE_OWNER, 0);
	for (size_t i = 0; i < n_steps; ++i) {
		while (consumers.n < steps[i])
			consumers.attached[consumers.n++] =
				client_new(&consumers.broker, SHMB_ROLE_CONSUMER, SHMB_NO_POPULATE);
		consumers_retire(&consumers, bench);
	}
	curve_row(bench, "retire-among-one-mapper-growth", &consumers.curves[0]);
	curve_row(bench, "retire-among-half-mappers-growth", &consumers.curves[1]);
	for (uint32_t i = 0; i < consumers.n; ++i)
		shmb_client_free(consumers.attached[i]);
	shmb_client_free(consumers.owner);
	broker_stop(&consumers.broker);
	free(consumers.attached);
}

/* ---- the whole ---- */

static int scale_run(Bench *bench) {
	if (!bench_pin(0))
		bench_die("this thread cannot be bound to a CPU");
	if (is_wanted(bench, "register rss-per-region fds lookup acquire status-page retire-all register-growth "
			     "lookup-growth acquire-growth status-page-growth"))
		measure_regions(bench);
	if (is_wanted(bench, "connect rss-per-connection connection-fds ping-among clients-page disconnect "
			     "connect-growth ping-among-growth clients-page-growth"))
		measure_connections(bench);
	if (is_wanted(bench, "retire-among-one-mapper retire-among-half-mappers retire-among-one-mapper-growth "
			     "retire-among-half-mappers-growth"))
		measure_consumers(bench);
	return 0;
}

const BenchCommand bench_scale = {
	.name = "scale",
	.help = "half a million regions, 8,000 connections, 1,000 lease pages: what grows, and how",
	.run = scale_run,
};
