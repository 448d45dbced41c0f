/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kills the broker at every write to its ledger, its registry and its holder in turn: each time in the same scenario,
 * whose outcome must be that of a run without a kill. Then some of them again with the broker that recovers killed,
 * too, and brokers that are killed before they are ready for the first time. With --gpu the scenario is about memory of
 * a GPU of the fake driver, which the broker's helper tries. See usage().
 */

#include <errno.h>
#include <dirent.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"
#include "kill-count.h"
#include "scenario.h"
#include "shmbroker.h"

#define BUDGET 250     /* runs of the first kind, unless all are wanted */
#define SECOND 60      /* runs with a second kill */
#define GPU_BUDGET 150 /* the same where each run has processes that start a driver */
#define GPU_SECOND 30
#define SECOND_MAX 60 /* points after the first one that the second comes within */
#define FIRST_MAX 64  /* points that a first start passes at most */
#define RUN_MS 60000
#define TEXT_MAX 16384
#define FAKE_DRIVER "tests/fakecuda/.libs/libcuda.so.1"
#define REPORTS 8

typedef struct Loop {
	const char *broker;
	const char *engine;
	char directory[64];
	char socket[96];
	char log[96];
	char count_path[96];
	char driver[96];   /* the fake driver's directory */
	const char *build; /* for GPU memory: where its helper and the fake driver were built; else NULL */
	KillCount *count;
	pid_t supervisor;
	struct shmb_client *checker;
	uint64_t orphans; /* sessions of ours that may have been opened without our knowing */
	char expected[TEXT_MAX];
	char got[TEXT_MAX];
	uint64_t n_runs;
	uint64_t n_wrong;
	uint64_t random;
	bool all;
} Loop;

static void usage(void) {
	puts("usage: kill-points [--loop io_uring|epoll] [--all] [--seed N] [--at N[,N]] [--gpu BUILD-DIRECTORY] BROKER\n"
	     "\n"
	     "BROKER is shmbrokerd-kill-points. Without --all it is killed at every k-th point, beginning with any of the\n"
	     "first k. With --gpu it is about GPU memory, with the helper and the fake driver of that build. Exits with 0 if\n"
	     "the outcome was always the same, with 77 where there is no such loop, or a build without GPU memory.");
}

static _Noreturn void fail(const char *what) {
	fprintf(stderr, "kill-points: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t now_ms(void) {
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void pause_ms(long ms) {
	const struct timespec time = { .tv_nsec = ms * 1000000 };

	(void)nanosleep(&time, NULL);
}

/* xorshift64 */
static uint64_t any(Loop *loop, uint64_t n) {
	loop->random ^= loop->random << 13;
	loop->random ^= loop->random >> 7;
	loop->random ^= loop->random << 17;
	return (loop->random >> 8) % n;
}

static pid_t fork_child(void) {
	pid_t parent = getpid(), pid = fork();

	if (pid < 0)
		fail("fork");
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	return 0;
}

static void wrong(Loop *loop, const char *what, uint64_t at, uint64_t then) {
	if (++loop->n_wrong > REPORTS)
		return;
	fprintf(stderr, "kill-points: killed at point %" PRIu64 " and %" PRIu64 ": %s\n", at, then, what);
}

/* ---- the broker ---- */

static void write_config(const Loop *loop, const char *path) {
	FILE *file = fopen(path, "we");

	if (!file ||
	    fprintf(file, "[broker]\nshared_uid = yes\ncapacity = 64\n[access]\nkeep = %u\n", (unsigned)geteuid()) < 0)
		fail(path);
	if (loop->build && fprintf(file,
				   "[cuda]\nmode = validate\nhelper = %s/shmbroker-cuda-helper\n"
				   "library = %s/" FAKE_DRIVER "\ncheck_fd = no\nstart_timeout = 60s\n"
				   "operation_timeout = 60s\n",
				   loop->build, loop->build) < 0)
		fail(path);
	if (fclose(file))
		fail(path);
}

static void supervisor_start(Loop *loop) {
	char config[128], config_option[160], socket_option[160], loop_option[32];

	snprintf(config, sizeof(config), "%s/conf", loop->directory);
	write_config(loop, config);
	snprintf(config_option, sizeof(config_option), "--config=%s", config);
	snprintf(socket_option, sizeof(socket_option), "--socket=%s", loop->socket);
	snprintf(loop_option, sizeof(loop_option), "--loop=%s", loop->engine);
	loop->supervisor = fork_child();
	if (loop->supervisor)
		return;
	if (!freopen(loop->log, "ae", stderr) || setenv("SHMBROKER_KILL_POINTS", loop->count_path, 1))
		_exit(1);
	execl(loop->broker, loop->broker, "--supervise", config_option, socket_option, loop_option, NULL);
	fail(loop->broker);
}

static bool connect_checker(Loop *loop) {
	uint64_t end = now_ms() + RUN_MS;

	loop->orphans = 0;
	while (shmb_client_new(&loop->checker, loop->socket, SHMB_ROLE_ADMIN, SHMB_NO_LEASE_PAGE)) {
		loop->orphans++;
		if (waitpid(loop->supervisor, NULL, WNOHANG))
			fail("the supervisor has ended");
		if (now_ms() > end)
			return false;
		pause_ms(2);
	}
	(void)shmb_client_set_resume_timeout(loop->checker, RUN_MS);
	return true;
}

static void supervisor_end(Loop *loop) {
	uint64_t end = now_ms() + RUN_MS;
	int status = 0;

	loop->checker = shmb_client_free(loop->checker);
	kill(loop->supervisor, SIGTERM);
	while (!waitpid(loop->supervisor, &status, WNOHANG)) {
		if (now_ms() > end) {
			kill(loop->supervisor, SIGKILL);
			(void)waitpid(loop->supervisor, &status, 0);
			break;
		}
		pause_ms(1);
	}
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		wrong(loop, "the supervisor did not end in order", 0, 0);
}

/* ---- one run ---- */

static int add_left(void *userdata, const struct shmb_stat *stat) {
	uint64_t *left = userdata;

	if (!strcmp(stat->name, "sessions"))
		left[1] = stat->value - 1;
	else if (!strcmp(stat->name, "regions") || !strcmp(stat->name, "objects") || !strcmp(stat->name, "held_maps") ||
		 !strcmp(stat->name, "held_leases") || !strcmp(stat->name, "held_bytes") ||
		 !strcmp(stat->name, "held_gpu_bytes") || !strcmp(stat->name, "held_revoked"))
		*left += stat->value;
	return 0;
}

/* nobody is there but us, and nothing is left */
static bool is_empty(Loop *loop) {
	uint64_t end = now_ms() + RUN_MS, left[2]; /* sessions are counted apart */

	do {
		left[0] = left[1] = 0;
		if (shmb_client_each_stat(loop->checker, 0, add_left, left))
			return false;
		if (!left[0] && left[1] <= loop->orphans)
			return true;
		pause_ms(1);
	} while (now_ms() < end);
	return false;
}

/* executed anew, so that it has nothing of ours; its outcome in loop->got */
static bool run_scenario(Loop *loop) {
	int fd = memfd_create("kill-points-out", MFD_CLOEXEC), status;
	uint64_t end = now_ms() + RUN_MS;
	pid_t pid = fork_child();
	ssize_t n;
	char number[16];

	if (!pid) {
		snprintf(number, sizeof(number), "%d", fd);
		(void)fcntl(fd, F_SETFD, 0);
		execl("/proc/self/exe", "kill-points", loop->build ? "--gpu-scenario" : "--scenario", number,
		      loop->socket, NULL);
		_exit(1);
	}
	while (!waitpid(pid, &status, WNOHANG)) {
		if (now_ms() > end) {
			kill(pid, SIGKILL);
			(void)waitpid(pid, &status, 0);
			break;
		}
		pause_ms(1);
	}
	n = pread(fd, loop->got, sizeof(loop->got) - 1, 0);
	loop->got[n > 0 ? n : 0] = 0;
	(void)close(fd);
	loop->n_runs++;
	return WIFEXITED(status) && !WEXITSTATUS(status);
}

static int scenario_main(char **argv) {
	FILE *out = fdopen(atoi(argv[2]), "w");
	bool good;

	/* also of one that is killed because it hangs */
	if (!out || setvbuf(out, NULL, _IOLBF, BUFSIZ))
		return 1;
	good = scenario_run(argv[3], out, !strcmp(argv[1], "--gpu-scenario"));
	return fclose(out) || !good;
}

/* the first line that differs */
static void show_difference(const Loop *loop) {
	const char *expected = loop->expected, *got = loop->got;

	while (*expected && *got) {
		size_t n = strcspn(expected, "\n"), m = strcspn(got, "\n");

		if (n != m || strncmp(expected, got, n) != 0)
			break;
		expected += n + !!expected[n];
		got += m + !!got[m];
	}
	fprintf(stderr, "kill-points: expected: %.*s\nkill-points: got:      %.*s\n", (int)strcspn(expected, "\n"),
		expected, (int)strcspn(got, "\n"), got);
}

/* @at and @then are counted from the beginning of the run; 0 for none */
static void run(Loop *loop, uint64_t at, uint64_t then) {
	uint64_t passed = atomic_load(&loop->count->passed), kills = atomic_load(&loop->count->kills);
	bool good;

	atomic_store(&loop->count->kill_at[0], at ? passed + at : 0);
	atomic_store(&loop->count->kill_at[1], then ? passed + then : 0);
	good = run_scenario(loop);
	/* also a point that comes after the scenario's end */
	if (!is_empty(loop))
		wrong(loop, "something is left", at, then);
	atomic_store(&loop->count->kill_at[0], 0);
	atomic_store(&loop->count->kill_at[1], 0);
	/* the last of those who were to die may just do so */
	if (shmb_client_ping(loop->checker, NULL))
		wrong(loop, "the broker does not answer", at, then);
	if (good && !strcmp(loop->got, loop->expected))
		return;
	wrong(loop, good ? "the outcome is another one" : "the scenario does not come to its end", at, then);
	if (loop->n_wrong <= REPORTS) {
		show_difference(loop);
		fprintf(stderr, "kill-points: it was killed %" PRIu64 " times\n",
			atomic_load(&loop->count->kills) - kills);
	}
}

/* ---- the whole ---- */

/* how many points one run passes */
static uint64_t count_points(Loop *loop) {
	uint64_t before;

	if (!is_empty(loop))
		wrong(loop, "something is there at first", 0, 0);
	before = atomic_load(&loop->count->passed);
	if (!run_scenario(loop)) {
		fprintf(stderr, "%s", loop->got);
		fail("the scenario without a kill");
	}
	memcpy(loop->expected, loop->got, sizeof(loop->expected));
	if (!is_empty(loop))
		wrong(loop, "something is left without a kill", 0, 0);
	return atomic_load(&loop->count->passed) - before;
}

static void run_each(Loop *loop, uint64_t n_points) {
	uint64_t budget = loop->build ? GPU_BUDGET : BUDGET, n_second = loop->build ? GPU_SECOND : SECOND;
	uint64_t step = loop->all ? 1 : (n_points + budget - 1) / budget, first = 1 + any(loop, step);

	if (loop->all)
		n_second *= 8;

	printf("every %" PRIu64 " from %" PRIu64 " on: ", step, first);
	(void)fflush(stdout);
	for (uint64_t at = first; at <= n_points && loop->n_wrong < REPORTS; at += step)
		run(loop, at, 0);
	for (uint64_t i = 0; i < n_second && loop->n_wrong < REPORTS; ++i) {
		uint64_t at = 1 + any(loop, n_points);

		run(loop, at, at + 1 + any(loop, SECOND_MAX));
	}
}

/* a broker that dies before it was ready once; each in a supervisor of its own */
static void run_first_starts(Loop *loop) {
	uint64_t at, passed;

	for (at = 1; at < FIRST_MAX && loop->n_wrong < REPORTS; ++at) {
		passed = atomic_load(&loop->count->passed);
		atomic_store(&loop->count->kill_at[0], passed + at);
		supervisor_start(loop);
		if (!connect_checker(loop)) {
			wrong(loop, "a first start comes to nothing", at, 0);
			kill(loop->supervisor, SIGKILL);
			(void)waitpid(loop->supervisor, NULL, 0);
			return;
		}
		loop->n_runs++;
		if (!is_empty(loop))
			wrong(loop, "something is there after a first start", at, 0);
		if (!run_scenario(loop) || strcmp(loop->got, loop->expected) != 0) {
			wrong(loop, "the outcome after a first start is another one", at, 0);
			show_difference(loop);
		}
		supervisor_end(loop);
		if (atomic_load(&loop->count->passed) < passed + at)
			return;
	}
}

/* what the scenario and, through the supervisor, the helper find in their environment */
static void prepare_driver(Loop *loop) {
	const char *others = getenv("LD_LIBRARY_PATH");
	char path[4096];
	int n;

	snprintf(loop->driver, sizeof(loop->driver), "%s/gpu", loop->directory);
	n = snprintf(path, sizeof(path), "%s/tests/fakecuda/.libs%s%s", loop->build, others ? ":" : "", others ?: "");
	if (n < 0 || (size_t)n >= sizeof(path) || mkdir(loop->driver, 0700) < 0 ||
	    setenv("FAKECUDA_DIR", loop->driver, 1) || setenv("LD_LIBRARY_PATH", path, 1))
		fail("the fake driver");
}

static void prepare(Loop *loop) {
	const char *base = getenv("TMPDIR");
	int fd;

	snprintf(loop->directory, sizeof(loop->directory), "%s/kill-points-XXXXXX", base && *base ? base : "/tmp");
	if (!mkdtemp(loop->directory))
		fail("mkdtemp");
	snprintf(loop->socket, sizeof(loop->socket), "%s/socket", loop->directory);
	snprintf(loop->log, sizeof(loop->log), "%s/log", loop->directory);
	snprintf(loop->count_path, sizeof(loop->count_path), "%s/count", loop->directory);
	fd = open(loop->count_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, sizeof(KillCount)) < 0)
		fail(loop->count_path);
	loop->count = mmap(NULL, sizeof(KillCount), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (loop->count == MAP_FAILED)
		fail("mmap");
	(void)close(fd);
	if (loop->build)
		prepare_driver(loop);
}

static void clean_driver(const Loop *loop) {
	DIR *directory = opendir(loop->driver);

	for (struct dirent *entry; directory && (entry = readdir(directory));)
		(void)unlinkat(dirfd(directory), entry->d_name, 0);
	if (directory)
		(void)closedir(directory);
	(void)rmdir(loop->driver);
}

static void clean(const Loop *loop) {
	static const char *const names[] = { "conf", "count", "log", "socket" };
	char path[128];

	if (loop->build)
		clean_driver(loop);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); ++i) {
		snprintf(path, sizeof(path), "%s/%s", loop->directory, names[i]);
		(void)unlink(path);
	}
	(void)rmdir(loop->directory);
}

static bool parse(Loop *loop, int argc, char **argv, uint64_t only[2]) {
	static const struct option options[] = {
		{ "all", no_argument, NULL, 'a' },	  { "at", required_argument, NULL, 't' },
		{ "gpu", required_argument, NULL, 'g' },  { "loop", required_argument, NULL, 'l' },
		{ "seed", required_argument, NULL, 's' }, {},
	};
	char *end;
	int c;

	loop->engine = "auto";
	loop->random = (uint64_t)getpid();
	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case 'a':
			loop->all = true;
			break;
		case 't':
			only[0] = strtoull(optarg, &end, 10);
			only[1] = *end ? strtoull(end + 1, NULL, 10) : 0;
			break;
		case 'g':
			loop->build = optarg;
			break;
		case 'l':
			loop->engine = optarg;
			break;
		case 's':
			loop->random = strtoull(optarg, NULL, 10);
			break;
		default:
			return false;
		}
	}
	loop->random = loop->random * 7919 + 1;
	loop->broker = argv[optind];
	return optind == argc - 1;
}

static bool has_gpu(const char *build) {
	char path[4096];
	int n = snprintf(path, sizeof(path), "%s/shmbroker-cuda-helper", build);

	return n > 0 && (size_t)n < sizeof(path) && !access(path, X_OK);
}

int main(int argc, char **argv) {
	static Loop loop;
	uint64_t begin = now_ms(), n_points, only[2] = {};

	if (argc == 4 && strstr(argv[1], "-scenario"))
		return scenario_main(argv);
	if (!parse(&loop, argc, argv, only)) {
		usage();
		return 2;
	}
	if (!engine_is_there(loop.engine)) {
		puts("skipped: io_uring is refused here");
		return SKIPPED;
	}
	if (loop.build && !has_gpu(loop.build)) {
		puts("skipped: built without GPU memory");
		return SKIPPED;
	}
	prepare(&loop);
	supervisor_start(&loop);
	if (!connect_checker(&loop))
		fail("the broker does not answer");
	n_points = count_points(&loop);
	if (!n_points) {
		errno = 0;
		fail("this broker has no kill points");
	}
	if (only[0])
		run(&loop, only[0], only[1]);
	else
		run_each(&loop, n_points);
	supervisor_end(&loop);
	if (!only[0] && !loop.build)
		run_first_starts(&loop);
	printf("%5.1f s  points %" PRIu64 "  runs %" PRIu64 "  kills %" PRIu64 "  wrong %" PRIu64 "\n",
	       (double)(now_ms() - begin) / 1000, n_points, loop.n_runs, atomic_load(&loop.count->kills), loop.n_wrong);
	if (loop.n_wrong)
		fprintf(stderr, "kill-points: the log is %s\n", loop.log);
	else
		clean(&loop);
	return loop.n_wrong ? 1 : 0;
}
