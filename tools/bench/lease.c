/* SPDX-License-Identifier: Apache-2.0 */

/*
 * lease: an acquire and a release, by name, by handle and by message, against the table that a server has in its own
 * process.
 *
 * A sample is nanoseconds of a pair, a thread. hot: one region again and again. uniform: regions in a random order
 * that is made before. Names and handles come as requests bring them, one after the other in memory, and are the very
 * same strings for the library and for the baseline: what is measured is the table, not where its callers keep names.
 * What ran in between has left nothing of a case in the caches: each sample begins with as many operations, which do
 * not count, as there are regions.
 */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "baseline.h"
#include "bench.h"
#include "raw.h"
#include "regions.h"
#include "team.h"

#define ROUNDS 300
#define ROUNDS_LARGE 30
#define ROUNDS_QUICK 3
/* of regions that fit into no small cache */
#define LARGE 10000
#define SAMPLE_LARGE_NS 10000000
#define WINDOW 4096
#define WINDOWS_AN_OBJECT 1000
#define ORDER_MAX 131072
#define FLOOR_MAX 2
#define N_PLACEMENTS 2
#define ARRAY_N(_array) (sizeof(_array) / sizeof((_array)[0]))

static const uint32_t sizes[] = { 10, 1000, 100000 };
static const uint32_t sizes_quick[] = { 10, 1000 };

typedef struct Pair Pair;
typedef struct Kind Kind;
typedef struct Table Table;

/* what is measured; the data of a case */
struct Pair {
	Table *table;
	const Kind *kind;
	uint32_t threads;
	uint32_t mask;					    /* of positions in the requests; 0: hot */
	uint32_t at[TEAM_MAX] __attribute__((aligned(64))); /* where each thread is in it; not moved while it counts */
};

struct Kind {
	const char *name;
	TeamWork work;
	bool in_process; /* no system call */
};

/* n regions, in a broker and in the baseline */
struct Table {
	uint32_t n;
	Team *team;
	Broker broker;
	struct shmb_client *owner;
	struct shmb_client *consumer;
	struct shmb_region **regions;
	const char **names;
	const BaselineName **baseline_names;
	struct shmb_handle *handles;
	Baseline *baseline;
	/* what callers come with, in their order */
	const char **requests;
	const BaselineName **baseline_requests;
	struct shmb_handle *handle_requests;
	Baseline *request_names;
	void *base; /* of the baseline's regions, which nobody reads */
	uint32_t order_mask;
	bool asymmetric;
	pthread_mutex_t floor_mutex;
	_Atomic uint64_t floor_count;
	char floor_names[2][REGION_NAME_SIZE];
};

/* ---- pairs ---- */

static void name_work(void *data, uint32_t member, uint64_t count) {
	Pair *pair = data;
	const char *const *names = pair->table->requests;
	struct shmb_client *client = pair->table->consumer;
	uint32_t at = pair->at[member];
	struct shmb_lease lease;

	for (uint64_t i = 0; i < count; ++i) {
		const char *name = names[at++ & pair->mask];

		if (shmb_client_get_memory_info(client, name, 0, WINDOW, SHMB_READ, &lease) ||
		    shmb_lease_release(&lease))
			bench_die("%s: %s", name, shmb_last_error());
	}
	pair->at[member] = at;
}

static void handle_work(void *data, uint32_t member, uint64_t count) {
	Pair *pair = data;
	const struct shmb_handle *handles = pair->table->handle_requests;
	struct shmb_client *client = pair->table->consumer;
	uint32_t at = pair->at[member];
	struct shmb_lease lease;

	for (uint64_t i = 0; i < count; ++i) {
		const struct shmb_handle *handle = &handles[at++ & pair->mask];

		if (shmb_handle_get_memory_info(client, handle, 0, WINDOW, SHMB_READ, &lease) ||
		    shmb_lease_release(&lease))
			bench_die("a handle: %s", shmb_last_error());
	}
	pair->at[member] = at;
}

static void message_work(void *data, uint32_t member, uint64_t count) {
	Pair *pair = data;
	const char *const *names = pair->table->requests;
	struct shmb_client *client = pair->table->consumer;
	uint32_t at = pair->at[member];
	struct shmb_message_lease lease;
	int result = 0;

	for (uint64_t i = 0; i < count; ++i) {
		struct shmb_lookup_spec spec = {
			.struct_size = sizeof(spec),
			.name = names[at++ & pair->mask],
			.size = WINDOW,
			.access = SHMB_READ,
		};

		check(shmb_client_lookup(client, &spec, 1, &lease, &result) ?: result, spec.name);
		check(shmb_client_release(client, &lease.lease, 1, &result) ?: result, spec.name);
	}
	pair->at[member] = at;
}

static void baseline_work(void *data, uint32_t member, uint64_t count) {
	Pair *pair = data;
	const BaselineName *const *names = pair->table->baseline_requests;
	Baseline *baseline = pair->table->baseline;
	uint32_t at = pair->at[member];
	BaselineLease lease;

	for (uint64_t i = 0; i < count; ++i) {
		if (!baseline_get_memory_info(baseline, names[at++ & pair->mask], 0, WINDOW, &lease))
			bench_die("the baseline has lost a region");
		baseline_release(&lease);
	}
	pair->at[member] = at;
}

/* what any table with one lock and counted references costs at least */
static void floor_work(void *data, uint32_t member, uint64_t count) {
	Table *table = ((Pair *)data)->table;

	(void)member;
	for (uint64_t i = 0; i < count; ++i) {
		bool same;

		(void)pthread_mutex_lock(&table->floor_mutex);
		same = !memcmp(table->floor_names[0], table->floor_names[1], 20);
		(void)atomic_fetch_add(&table->floor_count, 1);
		(void)pthread_mutex_unlock(&table->floor_mutex);
		(void)atomic_fetch_sub(&table->floor_count, 1);
		if (!same)
			bench_die("the floor has moved");
	}
}

static const Kind kind_floor = { "floor", floor_work, true };
static const Kind kind_baseline = { "baseline", baseline_work, true };
static const Kind kinds[] = { { "name", name_work, true },
			      { "handle", handle_work, true },
			      { "message", message_work, false } };

#define N_KINDS ARRAY_N(kinds)
#define CASES_MAX (1 + N_PLACEMENTS * TEAM_MAX * (1 + N_KINDS))

static uint64_t pair_run(void *data, uint64_t count) {
	Pair *pair = data;

	uint64_t warm_up = count / 2 + 1;

	if (pair->mask && pair->kind->in_process && warm_up < pair->table->n)
		warm_up = pair->table->n;
	return team_run(pair->table->team, pair->threads, pair->kind->work, pair, warm_up, count);
}

/* ---- the table ---- */

static void *allocate(size_t n, size_t size) {
	void *memory = calloc(n, size);

	if (!memory)
		bench_die("out of memory");
	return memory;
}

static void table_name(uint32_t i, char name[REGION_NAME_SIZE]) {
	(void)snprintf(name, REGION_NAME_SIZE, "client_%04u_input_%06u", i / 100 % 10000, i % 1000000);
}

static void table_fill_baseline(Table *table) {
	table->baseline = baseline_new(table->n);
	table->base =
		mmap(NULL, (size_t)table->n * WINDOW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (!table->baseline || table->base == MAP_FAILED)
		bench_die("out of memory");
	for (uint32_t i = 0; i < table->n; ++i) {
		char name[REGION_NAME_SIZE];

		table_name(i, name);
		if (!baseline_add_name(table->baseline, name))
			bench_die("out of memory");
		table->baseline_names[i] = baseline_name(table->baseline, i);
		table->names[i] = baseline_name_text(table->baseline_names[i]);
	}
	for (uint32_t i = 0; i < table->n; ++i)
		if (!baseline_register(table->baseline, table->baseline_names[i],
				       (char *)table->base + (size_t)i * WINDOW, WINDOW))
			bench_die("the baseline does not take %s", table->names[i]);
}

/* @n windows of @fd from the @first region on, in one message */
static void table_register(Table *table, int fd, uint32_t first, uint32_t n) {
	struct shmb_region_spec specs[REGIONS_AT_ONCE];
	int results[REGIONS_AT_ONCE];

	for (uint32_t i = 0; i < n; ++i)
		specs[i] = (struct shmb_region_spec){
			.struct_size = sizeof(specs[i]),
			.name = table->names[first + i],
			.fd = fd,
			.offset = (uint64_t)((first + i) % WINDOWS_AN_OBJECT) * WINDOW,
			.size = WINDOW,
		};
	check(shmb_region_adopt_many(table->owner, specs, n, results), "registering");
	for (uint32_t i = 0; i < n; ++i) {
		check(results[i], table->names[first + i]);
		table->regions[first + i] = specs[i].region;
	}
}

static uint32_t min(uint32_t a, uint32_t b) {
	return a < b ? a : b;
}

static void table_fill_broker(Table *table) {
	uint32_t end;

	for (uint32_t first = 0; first < table->n; first = end) {
		int fd = raw_memory((uint64_t)WINDOWS_AN_OBJECT * WINDOW);

		end = min(first + WINDOWS_AN_OBJECT, table->n);
		for (uint32_t i = first; i < end; i += REGIONS_AT_ONCE)
			table_register(table, fd, i, min(REGIONS_AT_ONCE, end - i));
		(void)close(fd);
	}
}

/* from here on no generation is new to the consumer */
static void table_use_once(Table *table) {
	struct shmb_client_info info = { .struct_size = sizeof(info) };

	for (uint32_t i = 0; i < table->n; ++i) {
		struct shmb_lease lease;

		check(shmb_client_get_memory_info(table->consumer, table->names[i], 0, WINDOW, SHMB_READ, &lease),
		      table->names[i]);
		check(shmb_lease_release(&lease), table->names[i]);
		check(shmb_handle_open(table->consumer, table->names[i], &table->handles[i]), table->names[i]);
	}
	check(shmb_client_get_info(table->consumer, &info), "the client");
	table->asymmetric = info.lease_mode == 1;
}

static void table_add_request(Table *table, uint32_t i, uint32_t region) {
	if (!baseline_add_name(table->request_names, table->names[region]))
		bench_die("out of memory");
	table->baseline_requests[i] = baseline_name(table->request_names, i);
	table->requests[i] = baseline_name_text(table->baseline_requests[i]);
	table->handle_requests[i] = table->handles[region];
}

/* the same one for everyone; a fixed seed, so that runs are alike */
static void table_make_order(Table *table) {
	uint64_t state = 88172645463325252;
	uint32_t n = 4096;

	while (n < table->n && n < ORDER_MAX)
		n *= 2;
	table->order_mask = n - 1;
	table->requests = allocate(n, sizeof(*table->requests));
	table->baseline_requests = allocate(n, sizeof(*table->baseline_requests));
	table->handle_requests = allocate(n, sizeof(*table->handle_requests));
	table->request_names = baseline_new(n);
	if (!table->request_names)
		bench_die("out of memory");
	for (uint32_t i = 0; i < n; ++i) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		table_add_request(table, i, (uint32_t)(state % table->n));
	}
}

static Table *table_new(Bench *bench, Team *team, uint32_t n) {
	static const char config[] =
		"capacity = 131072\nfair_share = no\n[quota]\nregions = unlimited\nmaps = unlimited\n";
	Table *table = allocate(1, sizeof(*table));

	table->n = n;
	table->team = team;
	table->regions = allocate(n, sizeof(*table->regions));
	table->names = allocate(n, sizeof(*table->names));
	table->baseline_names = allocate(n, sizeof(*table->baseline_names));
	table->handles = allocate(n, sizeof(*table->handles));
	(void)pthread_mutex_init(&table->floor_mutex, NULL);
	table_name(0, table->floor_names[0]);
	table_name(0, table->floor_names[1]);
	table_fill_baseline(table);
	(void)broker_start(bench, &table->broker, config, NULL, 0);
	table->owner = client_new(&table->broker, SHMB_ROLE_OWNER, 0);
	table->consumer = client_new(&table->broker, SHMB_ROLE_CONSUMER, 0);
	table_fill_broker(table);
	table_use_once(table);
	table_make_order(table);
	return table;
}

static void table_free(Table *table) {
	(void)shmb_client_free(table->consumer);
	check(shmb_client_unregister_all(table->owner, SHMB_ALL_SESSION, SHMB_RETIRE_STRICT, -1, NULL), "retiring");
	for (uint32_t i = 0; i < table->n; ++i)
		(void)shmb_region_free(table->regions[i]);
	(void)shmb_client_free(table->owner);
	broker_stop(&table->broker);
	(void)baseline_free(table->baseline);
	(void)munmap(table->base, (size_t)table->n * WINDOW);
	(void)pthread_mutex_destroy(&table->floor_mutex);
	(void)baseline_free(table->request_names);
	free(table->handle_requests);
	free(table->baseline_requests);
	free(table->requests);
	free(table->handles);
	free(table->baseline_names);
	free(table->names);
	free(table->regions);
	free(table);
}

/* ---- cases ---- */

static void add_case(Table *table, BenchCase *cases, Pair *pairs, size_t at, const Kind *kind, bool uniform,
		     uint32_t threads, int baseline) {
	Pair *pair = &pairs[at];

	*pair = (Pair){
		.table = table,
		.kind = kind,
		.threads = threads,
		.mask = uniform ? table->order_mask : 0,
	};
	for (uint32_t i = 0; i < TEAM_MAX; ++i)
		pair->at[i] = i * (table->order_mask / TEAM_MAX);
	cases[at] = (BenchCase){
		.row = {
			.n = table->n,
			.placement = uniform ? "uniform" : "hot",
			.threads = threads,
			.unit = "ns",
		},
		.run = pair_run,
		.data = pair,
		.baseline = baseline,
		.sample_ns = uniform && kind->in_process && table->n > LARGE ? SAMPLE_LARGE_NS : 0,
	};
	(void)snprintf(cases[at].row.name, sizeof(cases[at].row.name), "%s", kind->name);
}

/* the floor is the first case; it is the baseline of the baseline that can be as low */
static size_t add_cases(Table *table, BenchCase *cases, Pair *pairs) {
	uint32_t threads_max = bench_n_cpus() < TEAM_MAX ? bench_n_cpus() : TEAM_MAX;
	size_t n = 0;

	add_case(table, cases, pairs, n++, &kind_floor, false, 1, -1);
	for (uint32_t threads = 1; threads <= threads_max; ++threads) {
		for (int uniform = 0; uniform < N_PLACEMENTS; ++uniform) {
			int baseline = (int)n;

			add_case(table, cases, pairs, n++, &kind_baseline, uniform, threads,
				 threads == 1 && !uniform ? 0 : -1);
			for (size_t i = 0; i < N_KINDS; ++i)
				add_case(table, cases, pairs, n++, &kinds[i], uniform, threads, baseline);
		}
	}
	return n;
}

/* ---- results ---- */

static BenchRow *find_row(Bench *bench, size_t begin, const char *name, const BenchRow *like, uint64_t n) {
	for (size_t i = begin; i < bench->n_rows; ++i) {
		BenchRow *row = &bench->rows[i];

		if (!strcmp(row->name, name) && row->n == n && row->threads == like->threads &&
		    !strcmp(row->placement, like->placement))
			return row;
	}
	return NULL;
}

static bool is_first(const BenchRow *row) {
	return row->threads == 1 && !strcmp(row->placement, "hot") && row->n == sizes[0];
}

/* what the row is compared with beside its baseline, "" for nothing */
static void describe(Bench *bench, size_t begin, BenchRow *row, bool asymmetric) {
	const char *counters = asymmetric ? "" : ", locked releases", *of;
	const BenchRow *other = NULL;

	if (!strcmp(row->name, "message")) {
		(void)snprintf(row->detail, sizeof(row->detail), "LOOKUP and RELEASE");
		return;
	}
	if (!strcmp(row->name, "handle")) {
		of = "of name";
		other = find_row(bench, begin, "name", row, row->n);
	} else if (!strcmp(row->name, "name")) {
		of = "of n = 1000";
		other = row->n > 1000 ? find_row(bench, begin, "name", row, 1000) : NULL;
	} else {
		return;
	}
	if (other && !bench->no_ratios)
		(void)snprintf(row->detail, sizeof(row->detail), "%.2f %s%s", row->median / other->median, of,
			       counters);
	else if (*counters)
		(void)snprintf(row->detail, sizeof(row->detail), "%s", counters + 2);
}

static void refuse_ratios(Bench *bench, size_t begin, const char *why) {
	fprintf(stderr, "shmbroker-bench: lease: no ratios: %s\n", why);
	bench->no_ratios = true;
	for (size_t i = begin; i < bench->n_rows; ++i)
		bench->rows[i].ratio = 0;
}

/* a baseline that is slower than it has to be would make everything look good; its rows have no ratio in the end */
static void check_baseline(Bench *bench, size_t begin) {
	for (size_t i = begin; i < bench->n_rows; ++i) {
		BenchRow *row = &bench->rows[i];
		double ratio = row->ratio;
		char why[80];

		if (strcmp(row->name, kind_baseline.name) || !(ratio > 0))
			continue;
		row->ratio = 0;
		(void)snprintf(row->detail, sizeof(row->detail), "%.2f of floor", ratio);
		(void)snprintf(why, sizeof(why), "the baseline costs %.1f times its floor, more than %d", ratio,
			       FLOOR_MAX);
		if (is_first(row) && ratio > FLOOR_MAX && !bench->quick)
			refuse_ratios(bench, begin, why);
	}
}

/* ---- the whole ---- */

static void measure(Bench *bench, Team *team, uint32_t n, size_t begin) {
	BenchCase cases[CASES_MAX] = {};
	Pair pairs[CASES_MAX];
	Table *table = table_new(bench, team, n);
	size_t n_cases = add_cases(table, cases, pairs), rows = bench->n_rows;

	bench_measure(bench, cases, n_cases, bench->quick ? ROUNDS_QUICK : n > LARGE ? ROUNDS_LARGE : ROUNDS);
	check_baseline(bench, rows);
	for (size_t i = rows; i < bench->n_rows; ++i)
		describe(bench, begin, &bench->rows[i], table->asymmetric);
	table_free(table);
}

static int lease_run(Bench *bench) {
	const uint32_t *all = bench->quick ? sizes_quick : sizes;
	size_t n = bench->quick ? ARRAY_N(sizes_quick) : ARRAY_N(sizes), begin = bench->n_rows;
	Team team;

	if (!baseline_is_optimized())
		refuse_ratios(bench, begin, "the baseline was compiled without optimisation");
	if (bench_n_cpus() < TEAM_MAX)
		fprintf(stderr, "shmbroker-bench: lease: one CPU, no rows of %d threads\n", TEAM_MAX);
	team_init(&team);
	for (size_t i = 0; i < n; ++i)
		measure(bench, &team, all[i], begin);
	team_deinit(&team);
	return 0;
}

const BenchCommand bench_lease = {
	.name = "lease",
	.help = "acquire and release by name, handle and message against a table in the same process",
	.run = lease_run,
};
