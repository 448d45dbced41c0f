/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "shmbroker.h"

#define EXIT_USAGE 2
#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static const BenchCommand *const commands[] = {
	&bench_lease,	&bench_rtt,   &bench_register, &bench_scale, &bench_death,
	&bench_restart, &bench_frame, &bench_gateway,  &bench_cuda,
};

void bench_die(const char *format, ...) {
	va_list arguments;

	fputs("shmbroker-bench: ", stderr);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	exit(EXIT_FAILURE);
}

__attribute__((format(printf, 1, 2))) static int usage(const char *format, ...) {
	va_list arguments;

	fputs("shmbroker-bench: ", stderr);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputs("; shmbroker-bench --help says what there is\n", stderr);
	return EXIT_USAGE;
}

/* ---- the broker to measure ---- */

static bool is_program(const char *path) {
	return !access(path, X_OK);
}

/* @suffix below @directory; NULL when there is no such program */
static char *program_at(const char *directory, const char *suffix) {
	char *path;

	if (asprintf(&path, "%s/%s", directory, suffix) < 0)
		bench_die("out of memory");
	if (is_program(path))
		return path;
	free(path);
	return NULL;
}

char *bench_find_program(const char *name) {
	const char *list = getenv("PATH");
	char *directories = strdup(list ?: ""), *rest = directories, *directory, *found = NULL;

	if (!directories)
		bench_die("out of memory");
	while (!found && (directory = strsep(&rest, ":")))
		if (*directory)
			found = program_at(directory, name);
	free(directories);
	return found;
}

/* the one that was built or installed together with this program comes first */
static char *find_broker(void) {
	char directory[PATH_MAX], *found = NULL, *name;
	ssize_t size = readlink("/proc/self/exe", directory, sizeof(directory) - 1);

	if (size > 0) {
		directory[size] = 0;
		*strrchr(directory, '/') = 0;
		name = strrchr(directory, '/');
		/* libtool keeps programs that use a library of the build there */
		if (name && !strcmp(name, "/.libs"))
			*name = 0;
		found = program_at(directory, "shmbrokerd") ?: program_at(directory, "../sbin/shmbrokerd");
	}
	found = found ?: bench_find_program("shmbrokerd");
	if (!found)
		bench_die(
			"there is no shmbrokerd beside this program, in ../sbin or in $PATH; --broker says where it is");
	return found;
}

/* ---- the command line ---- */

static void print_help(void) {
	puts("Usage: shmbroker-bench [OPTION...] SUBCOMMAND...\n"
	     "\n"
	     "Measures the broker and its library against the floor below them, on brokers of its own.\n"
	     "\n"
	     "Subcommands:");
	for (size_t i = 0; i < N_COMMANDS; ++i)
		printf("  %-12s %s\n", commands[i]->name, commands[i]->help);
	puts("  all          all of these\n"
	     "\n"
	     "Options:\n"
	     "      --json           print JSON\n"
	     "      --quick          few rounds of small sizes: shows that it works, measures nothing\n"
	     "      --broker=PATH    the shmbrokerd to measure; else the one built or installed with this program\n"
	     "      --only=TEXT      only rows whose name contains TEXT, and their baselines\n"
	     "      --plot=FILE.svg  draw the curves of lease and scale into this file, by gnuplot\n"
	     "  -h, --help           print this and exit\n"
	     "  -V, --version        print the version and exit\n"
	     "\n"
	     "shmbroker-bench(1)");
}

static const BenchCommand *find_command(const char *name) {
	for (size_t i = 0; i < N_COMMANDS; ++i)
		if (!strcmp(commands[i]->name, name))
			return commands[i];
	return NULL;
}

static int run_command(Bench *bench, const BenchCommand *command) {
	int r;

	bench->command = command->name;
	bench->no_ratios = false;
	r = command->run(bench);
	bench_unpin();
	return r;
}

static int run_commands(Bench *bench, char **names, int n) {
	int r = 0;

	for (int i = 0; i < n && !r; ++i) {
		if (strcmp(names[i], "all")) {
			r = run_command(bench, find_command(names[i]));
			continue;
		}
		for (size_t j = 0; j < N_COMMANDS && !r; ++j)
			r = run_command(bench, commands[j]);
	}
	return r;
}

/* EXIT_SUCCESS, or what to exit with; -1 goes on */
static int parse(Bench *bench, int argc, char **argv) {
	enum {
		OPTION_JSON = 256,
		OPTION_QUICK,
		OPTION_BROKER,
		OPTION_ONLY,
		OPTION_PLOT
	};
	static const struct option options[] = {
		{ "json", no_argument, NULL, OPTION_JSON },
		{ "quick", no_argument, NULL, OPTION_QUICK },
		{ "broker", required_argument, NULL, OPTION_BROKER },
		{ "only", required_argument, NULL, OPTION_ONLY },
		{ "plot", required_argument, NULL, OPTION_PLOT },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'V' },
		{},
	};
	bool drawn = false;
	int c;

	while ((c = getopt_long(argc, argv, "hV", options, NULL)) >= 0) {
		switch (c) {
		case OPTION_JSON:
			bench->json = true;
			break;
		case OPTION_QUICK:
			bench->quick = true;
			break;
		case OPTION_BROKER:
			bench->broker_path = optarg;
			break;
		case OPTION_ONLY:
			bench->only = optarg;
			break;
		case OPTION_PLOT:
			bench->plot = optarg;
			break;
		case 'h':
			print_help();
			return fflush(stdout) ? EXIT_FAILURE : EXIT_SUCCESS;
		case 'V':
			puts("shmbroker-bench " SHMB_VERSION);
			return fflush(stdout) ? EXIT_FAILURE : EXIT_SUCCESS;
		default:
			return EXIT_USAGE;
		}
	}
	if (optind == argc)
		return usage("what shall be measured?");
	for (int i = optind; i < argc; ++i) {
		bool is_all = !strcmp(argv[i], "all");

		if (!is_all && !find_command(argv[i]))
			return usage("no subcommand \"%s\"", argv[i]);
		drawn |= is_all || plot_draws(argv[i]);
	}
	if (bench->plot && !drawn)
		return usage("--plot draws nothing of these subcommands");
	return -1;
}

int main(int argc, char **argv) {
	Bench bench = { .program = argv[0] };
	char *found = NULL;
	int r;

	r = parse(&bench, argc, argv);
	if (r >= 0)
		return r;
	if (!bench.broker_path)
		bench.broker_path = found = find_broker();
	else if (!is_program(bench.broker_path))
		bench_die("%s: %s", bench.broker_path, strerror(errno));
	if (bench.plot)
		plot_check(&bench);
	r = run_commands(&bench, argv + optind, argc - optind);
	if (!r && bench.only && !bench.n_rows)
		bench_die("no row has \"%s\" in its name", bench.only);
	rows_print(&bench);
	if (!r && bench.plot)
		plot_write(&bench);
	free(bench.rows);
	free(found);
	if (fflush(stdout) || ferror(stdout))
		bench_die("standard output: %s", strerror(errno));
	return r;
}
