/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The curves of what was measured, drawn by gnuplot. A curve is rows that differ in n alone; there is a picture for
 * each subcommand that has some.
 */

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "bench.h"

#define GNUPLOT "gnuplot"
#define FROM_PACKAGE "gnuplot-nox"

typedef struct Picture Picture;

struct Picture {
	const char *command;
	const char *title;
	const char *x;
	const char *placement; /* only rows with this one; NULL for those without any */
};

static const Picture pictures[] = {
	{ "lease", "acquire and release, regions in random order", "regions", "uniform" },
	{ "scale", "what grows with regions, connections or consumers", "regions, connections or consumers", NULL },
};

#define N_PICTURES (sizeof(pictures) / sizeof(pictures[0]))

bool plot_draws(const char *command) {
	for (size_t i = 0; i < N_PICTURES; ++i)
		if (!strcmp(pictures[i].command, command))
			return true;
	return false;
}

void plot_check(const Bench *bench) {
	char *program = bench_find_program(GNUPLOT);

	if (!program)
		bench_die("--plot needs " GNUPLOT ", of the package " FROM_PACKAGE);
	free(program);
	if (strchr(bench->plot, '\n'))
		bench_die("--plot: a file name with a line break");
}

/* ---- curves ---- */

/* nanoseconds, 0 for what is no time */
static double time_of(const BenchRow *row) {
	return !strcmp(row->unit, "ns")	  ? row->median
	       : !strcmp(row->unit, "us") ? row->median * 1e3
	       : !strcmp(row->unit, "ms") ? row->median * 1e6
					  : 0;
}

static bool is_in(const Picture *picture, const BenchRow *row) {
	if (strcmp(row->command, picture->command) || !(time_of(row) > 0) || !row->n)
		return false;
	return picture->placement ? row->placement && !strcmp(row->placement, picture->placement) : !row->placement;
}

static bool is_same_curve(const BenchRow *a, const BenchRow *b) {
	return !strcmp(a->name, b->name) && a->threads == b->threads;
}

/* whether the @i-th row begins a curve, which has several points */
static bool is_first(const Bench *bench, const Picture *picture, size_t i) {
	const BenchRow *row = &bench->rows[i];
	bool more = false;

	if (!is_in(picture, row))
		return false;
	for (size_t j = 0; j < bench->n_rows; ++j) {
		if (j == i || !is_in(picture, &bench->rows[j]) || !is_same_curve(row, &bench->rows[j]))
			continue;
		if (j < i)
			return false;
		more |= bench->rows[j].n != row->n;
	}
	return more;
}

static size_t count_curves(const Bench *bench, const Picture *picture) {
	size_t n = 0;

	for (size_t i = 0; i < bench->n_rows; ++i)
		n += is_first(bench, picture, i);
	return n;
}

/* ---- gnuplot ---- */

static void write_data(FILE *out, const Bench *bench, const Picture *picture, size_t first) {
	fprintf(out, "$curve%zu << END\n", first);
	for (size_t i = first; i < bench->n_rows; ++i) {
		const BenchRow *row = &bench->rows[i];

		if (is_in(picture, row) && is_same_curve(row, &bench->rows[first]))
			fprintf(out, "%" PRIu64 " %.3f\n", row->n, time_of(row));
	}
	fputs("END\n", out);
}

/* curves of one name have one colour; those of more threads are dashed */
static void write_curve(FILE *out, const Bench *bench, const Picture *picture, size_t first) {
	const BenchRow *row = &bench->rows[first];
	unsigned int colour = 1;

	for (size_t i = 0; i < first; ++i) {
		if (!is_first(bench, picture, i) || bench->rows[i].threads != 1)
			continue;
		if (!strcmp(bench->rows[i].name, row->name))
			break;
		colour++;
	}
	/* gnuplot has eight colours, then other points must do */
	fprintf(out, "$curve%zu using 1:2 with linespoints lc %u dt %" PRIu32 " lw 2 pt %u ps 0.7 title '%s", first,
		colour, row->threads, colour > 8 ? 4 : 7, row->name);
	if (picture->placement)
		fprintf(out, ", %" PRIu32 " thread%s", row->threads, row->threads > 1 ? "s" : "");
	fputs("', \\\n", out);
}

static void write_picture(FILE *out, const Bench *bench, const Picture *picture) {
	fprintf(out, "set title '%s'\nset xlabel '%s'\n", picture->title, picture->x);
	for (size_t i = 0; i < bench->n_rows; ++i)
		if (is_first(bench, picture, i))
			write_data(out, bench, picture, i);
	fputs("plot \\\n", out);
	for (size_t i = 0; i < bench->n_rows; ++i)
		if (is_first(bench, picture, i))
			write_curve(out, bench, picture, i);
	fputs("\n", out);
}

static void write_head(FILE *out, const char *path, size_t n) {
	fprintf(out,
		"set terminal svg size 860,%zu background '#ffffff' font 'sans-serif,13'\n"
		"set output '",
		n * 480);
	for (; *path; ++path)
		fprintf(out, *path == '\'' ? "''" : "%c", *path);
	fprintf(out,
		"'\n"
		"set multiplot layout %zu,1\n"
		"set logscale xy\n"
		"set format '10^{%%L}'\n"
		"set ylabel 'ns, median'\n"
		"set grid\n"
		"set key outside right top noenhanced\n",
		n);
}

void plot_write(const Bench *bench) {
	size_t n = 0;
	FILE *out;
	int r;

	for (size_t i = 0; i < N_PICTURES; ++i)
		n += count_curves(bench, &pictures[i]) > 0;
	if (!n)
		bench_die("--plot: no curve has two points");
	/* without the settings of the user */
	out = popen(GNUPLOT " -d", "we");
	if (!out)
		bench_die(GNUPLOT ": %s", strerror(errno));
	write_head(out, bench->plot, n);
	for (size_t i = 0; i < N_PICTURES; ++i)
		if (count_curves(bench, &pictures[i]))
			write_picture(out, bench, &pictures[i]);
	fputs("unset multiplot\nunset output\n", out);
	r = pclose(out);
	if (r)
		bench_die("--plot: " GNUPLOT " ended with status %d", WIFEXITED(r) ? WEXITSTATUS(r) : r);
}
