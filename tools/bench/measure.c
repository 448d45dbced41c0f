/* SPDX-License-Identifier: Apache-2.0 */

#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"

#define SAMPLE_NS 100000
/* how much longer the next attempt to find a count may be than the last one */
#define COUNT_GROWTH 16

uint64_t bench_now_ns(void) {
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* ---- CPUs ---- */

/* what this process was allowed before it pinned anything */
static const cpu_set_t *allowed_cpus(void) {
	static cpu_set_t allowed;
	static bool is_known;

	if (!is_known && sched_getaffinity(0, sizeof(allowed), &allowed) < 0)
		bench_die("the CPUs of this process cannot be told");
	is_known = true;
	return &allowed;
}

unsigned int bench_n_cpus(void) {
	return (unsigned int)CPU_COUNT(allowed_cpus());
}

bool bench_pin(unsigned int nth_cpu) {
	const cpu_set_t *allowed = allowed_cpus();
	cpu_set_t one;

	for (unsigned int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
		if (!CPU_ISSET(cpu, allowed) || nth_cpu--)
			continue;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		return !sched_setaffinity(0, sizeof(one), &one);
	}
	return false;
}

void bench_unpin(void) {
	(void)sched_setaffinity(0, sizeof(cpu_set_t), allowed_cpus());
}

/* ---- rows ---- */

static int compare(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* of sorted samples: the smallest that at least this share of them does not exceed */
static double quantile(const double *samples, size_t n, double share) {
	size_t rank = (size_t)ceil(share * (double)n);

	return samples[rank ? rank - 1 : 0];
}

static double median_of(const double *samples, size_t n) {
	return n % 2 ? samples[n / 2] : (samples[n / 2 - 1] + samples[n / 2]) / 2;
}

static void add_row(Bench *bench, const BenchRow *row) {
	BenchRow *grown = reallocarray(bench->rows, bench->n_rows + 1, sizeof(*grown));

	if (!grown)
		bench_die("out of memory");
	bench->rows = grown;
	grown[bench->n_rows] = *row;
	grown[bench->n_rows++].command = bench->command;
}

void bench_row(Bench *bench, BenchRow row, double *samples, size_t n) {
	if (!n)
		bench_die("%s: no samples", row.name);
	qsort(samples, n, sizeof(*samples), compare);
	row.median = median_of(samples, n);
	row.p99 = quantile(samples, n, 0.99);
	row.min = samples[0];
	row.runs = (uint32_t)n;
	if (bench->no_ratios)
		row.ratio = 0;
	add_row(bench, &row);
}

void bench_growth(Bench *bench, const char *name, const double *x, const double *y, size_t n) {
	double sum_x = 0, sum_y = 0, sum_xx = 0, sum_xy = 0, spread;
	BenchRow row = { .threads = 1, .unit = "", .detail = "exponent of growth: 0 constant, 1 linear" };

	if (n < 2)
		return;
	for (size_t i = 0; i < n; ++i) {
		double a, b;

		if (!(x[i] > 0 && y[i] > 0))
			bench_die("%s: nothing grows from or to 0", name);
		a = log(x[i]);
		b = log(y[i]);
		sum_x += a;
		sum_y += b;
		sum_xx += a * a;
		sum_xy += a * b;
	}
	spread = (double)n * sum_xx - sum_x * sum_x;
	if (!(spread > 0))
		return;
	strncat(row.name, name, sizeof(row.name) - 1);
	row.n = (uint64_t)x[n - 1];
	row.runs = (uint32_t)n;
	row.median = row.p99 = row.min = ((double)n * sum_xy - sum_x * sum_y) / spread;
	add_row(bench, &row);
}

/* ---- measuring ---- */

static bool is_wanted(const Bench *bench, const BenchCase *one) {
	return !bench->only || strstr(one->row.name, bench->only);
}

static bool *choose(const Bench *bench, const BenchCase *cases, size_t n) {
	bool *chosen = calloc(n ?: 1, sizeof(*chosen));

	if (!chosen)
		bench_die("out of memory");
	for (size_t i = 0; i < n; ++i) {
		if (!is_wanted(bench, &cases[i]))
			continue;
		for (int j = (int)i; j >= 0 && !chosen[j]; j = cases[j].baseline)
			chosen[j] = true;
	}
	return chosen;
}

static void find_count(BenchCase *one) {
	uint64_t wanted = one->sample_ns ?: SAMPLE_NS;

	one->count = 1;
	if (one->sample_ns == UINT64_MAX)
		return;
	for (;;) {
		uint64_t ns = one->run(one->data, one->count) ?: 1;
		double factor = (double)wanted / (double)ns;

		if (factor < 2) {
			one->count = (uint64_t)fmax(1, (double)one->count * factor);
			return;
		}
		one->count = (uint64_t)((double)one->count * fmin(factor, COUNT_GROWTH));
	}
}

static void take_sample(BenchCase *one, uint32_t round) {
	one->samples[round] = (double)one->run(one->data, one->count) / (double)one->count;
}

static double ratio_of(const BenchCase *one, const BenchCase *baseline, uint32_t rounds) {
	double *ratios = malloc(rounds * sizeof(*ratios)), median;

	if (!ratios)
		bench_die("out of memory");
	for (uint32_t i = 0; i < rounds; ++i)
		ratios[i] = baseline->samples[i] > 0 ? one->samples[i] / baseline->samples[i] : 0;
	qsort(ratios, rounds, sizeof(*ratios), compare);
	median = median_of(ratios, rounds);
	free(ratios);
	return median;
}

static double ns_of_unit(const char *unit) {
	return !strcmp(unit, "ms") ? 1e6 : !strcmp(unit, "us") ? 1e3 : 1;
}

void bench_measure(Bench *bench, BenchCase *cases, size_t n_cases, uint32_t rounds) {
	bool *chosen = choose(bench, cases, n_cases);

	for (size_t i = 0; i < n_cases; ++i) {
		if (!chosen[i])
			continue;
		cases[i].samples = malloc(rounds * sizeof(*cases[i].samples));
		if (!cases[i].samples)
			bench_die("out of memory");
		find_count(&cases[i]);
	}
	/* there and back, so that no case always follows the same one */
	for (uint32_t round = 0; round < rounds; ++round)
		for (size_t i = 0; i < n_cases; ++i) {
			size_t at = round % 2 ? n_cases - 1 - i : i;

			if (chosen[at])
				take_sample(&cases[at], round);
		}
	/* ratios go by rounds, hence before any samples are sorted */
	for (size_t i = 0; i < n_cases; ++i)
		if (chosen[i] && cases[i].baseline >= 0)
			cases[i].row.ratio = ratio_of(&cases[i], &cases[cases[i].baseline], rounds);
	for (size_t i = 0; i < n_cases; ++i) {
		if (!chosen[i])
			continue;
		for (uint32_t round = 0; round < rounds; ++round)
			cases[i].samples[round] /= ns_of_unit(cases[i].row.unit);
		bench_row(bench, cases[i].row, cases[i].samples, rounds);
		free(cases[i].samples);
		cases[i].samples = NULL;
	}
	free(chosen);
}
