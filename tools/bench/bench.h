/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Bench: what the subcommands of shmbroker-bench share.
 *
 * A subcommand makes cases, each with the shape of its row; bench_measure() runs them in turn, one sample of each a
 * round, so that a case and its baseline see the same machine, and adds a row for each. A ratio is the median over
 * the rounds of the case's sample over that of its baseline in the same round.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct Bench Bench;
typedef struct BenchCase BenchCase;
typedef struct BenchCommand BenchCommand;
typedef struct BenchRow BenchRow;
typedef struct Broker Broker;

/* one line of the table, one object of --json; keys are the members' names, if not said otherwise */
struct BenchRow {
	char name[48];
	uint64_t n;	       /* regions, connections, entries of a message, ...: the curve's x */
	const char *placement; /* "hot", "uniform"; NULL where it means nothing */
	uint32_t threads;
	const char *unit; /* of median, p99 and min: "ns", "us", "ms", "bytes", "fds", "" */
	double median;
	double p99;
	double min;
	uint32_t runs;	     /* samples */
	double ratio;	     /* 0: there is no baseline; null in JSON */
	const char *command; /* the subcommand, filled in; no key */
	char detail[96];     /* what else belongs to the shape, "" for nothing: "1 GiB", "io_uring", "8 connections" */
};

struct Bench {
	const char *program;	 /* argv[0] */
	const char *broker_path; /* the shmbrokerd to measure */
	const char *only;	 /* --only TEXT: only cases whose row's name contains it; NULL for all */
	bool json;
	bool quick;	     /* a few rounds, small sizes: tests that everything works, measures nothing */
	bool no_ratios;	     /* a baseline was not what it says it is */
	const char *plot;    /* an SVG file, or NULL */
	const char *command; /* the subcommand that runs */
	BenchRow *rows;
	size_t n_rows;
};

struct BenchCommand {
	const char *name;
	const char *help; /* one line */
	int (*run)(Bench *bench);
};

extern const BenchCommand bench_lease, bench_rtt, bench_register, bench_scale, bench_death, bench_restart, bench_frame,
	bench_gateway, bench_cuda;

/* says it on stderr and exits with 1: a benchmark that cannot measure has nothing to print */
_Noreturn void bench_die(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* the path of a program that is in $PATH, which the caller frees; NULL when it is not */
char *bench_find_program(const char *name);
/* CLOCK_MONOTONIC */
uint64_t bench_now_ns(void);

/*
 * A case. @run does @count operations and returns the nanoseconds that they took, all together; @count is chosen so
 * that one sample takes about @sample_ns (0: 100 us; UINT64_MAX: always one operation). Samples are nanoseconds an
 * operation and a thread; rows have them in the row's unit ("ns", "us" or "ms").
 */
struct BenchCase {
	BenchRow row; /* the shape; results are filled in */
	uint64_t (*run)(void *data, uint64_t count);
	void *data;
	int baseline; /* index among the cases, -1 for none */
	uint64_t sample_ns;
	uint64_t count;	 /* filled in */
	double *samples; /* filled in, freed by bench_measure() */
};

/* @rounds samples of each case, interleaved, and a row for each. Cases that --only leaves out, and whose baseline
 * roles nobody needs, are not run. */
void bench_measure(Bench *bench, BenchCase *cases, size_t n_cases, uint32_t rounds);
/* a row whose samples were taken elsewhere: fills in median, p99, min and runs from @samples, which it sorts */
void bench_row(Bench *bench, BenchRow row, double *samples, size_t n);
/* ln(y2/y1) / ln(x2/x1) fitted over all points: 0 is constant, 1 is linear. A row with unit "". */
void bench_growth(Bench *bench, const char *name, const double *x, const double *y, size_t n);

/* the CPU that this thread may run on alone from here on; the first allowed one is 0. Returns false if there is none. */
bool bench_pin(unsigned int nth_cpu);
unsigned int bench_n_cpus(void);
/* this thread may run on all CPUs again that the program was started with */
void bench_unpin(void);

/* ---- rows.c: the table, or the array of JSON ---- */

void rows_print(const Bench *bench);

/* ---- plot.c: curves over n ---- */

/* whether there are curves of this subcommand */
bool plot_draws(const char *command);
/* dies when bench->plot cannot be drawn here; before anything is measured */
void plot_check(const Bench *bench);
void plot_write(const Bench *bench);

/* ---- broker.c: a private broker in a temporary directory ---- */

struct Broker {
	pid_t pid; /* of the supervisor, where there is one */
	bool supervised;
	char directory[64];
	char socket[96];
};

/*
 * Starts shmbrokerd with @config (lines of shmbroker.conf's [broker] section, may be NULL, and further sections behind
 * them) and the engine "io_uring", "epoll" or "auto", on CPU @cpu (-1: any), and waits until it answers. False with
 * a message on stderr when the engine is refused here. Dies on any other failure. What ends the program stops all brokers.
 */
bool broker_start(Bench *bench, Broker *ret, const char *config, const char *engine, int cpu);
/* the same under `shmbrokerd --supervise`, which keeps the broker's state and starts it again when it is killed */
bool broker_start_supervised(Bench *bench, Broker *ret, const char *config, const char *engine, int cpu);
/* the broker of a supervisor; it has to run */
pid_t broker_child(const Broker *broker);
void broker_stop(Broker *broker);
/* of the broker's process, not supervised: resident bytes (RssAnon + RssShmem), open fds */
uint64_t broker_rss(const Broker *broker);
uint64_t broker_fds(const Broker *broker);
