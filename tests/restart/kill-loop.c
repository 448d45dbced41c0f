/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The main program of the kill loop: starts a broker under its supervisor and the load, kills the broker again and
 * again, and some clients, has everything compared, and says what came of it. See usage(). Clients are this program
 * executed anew, so that they share nothing with it but Shared.
 */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "checker.h"
#include "engine.h"

#define KILLS 500
#define MEAN_MS 60
#define COMPARED 10	  /* one of so many kills is followed by a comparison in full */
#define CLIENT_KILLED 3	  /* one of so many by the death of a client */
#define KILLED_AGAIN 3	  /* one of so many by the death of the broker that recovers */
#define RECOVERY_US 25000 /* that death comes within */
#define STORE_FDS 16	  /* that the supervisor may have more of while there is load */
#define ANSWERS_MAX 100000

typedef struct Loop {
	Shared *shared;
	Checker checker;
	int shared_fd;
	const char *broker;
	const char *engine;
	uint32_t kills;
	uint64_t seed;
	uint64_t random;
	char directory[64];
	char socket[96];
	char log[96];
	pid_t supervisor;
	pid_t pids[LOAD_PROCESSES];
	uint32_t n_started;
	uint32_t client_kills;
	uint32_t n_compared;
	int store_fds; /* of the supervisor, at first and at most */
	int store_fds_most;
	int broker_fds;
	uint32_t n_answers;
	double answers_ms[ANSWERS_MAX];
} Loop;

static void usage(void) {
	puts("usage: kill-loop [--loop io_uring|epoll] [--kills N] [--seed N] BROKER\n"
	     "\n"
	     "Prints one line: what was done, and how long a broker takes from its death until the next one answers.\n"
	     "Exits with 0 if nothing was lost, doubled or left over, with 77 where there is no such loop.");
}

static _Noreturn void fail(const char *what) {
	fprintf(stderr, "kill-loop: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void wait_us(uint64_t us) {
	const struct timespec time = { .tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000 };

	(void)nanosleep(&time, NULL);
}

static double now_ms(void) {
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static uint32_t any(Loop *loop, uint32_t n) {
	return (uint32_t)(load_random(&loop->random) % n);
}

static uint64_t exponential_us(Loop *loop) {
	double uniform = ((double)any(loop, 1u << 30) + 1) / (1u << 30);

	return (uint64_t)(-log(uniform) * MEAN_MS * 1000);
}

/* -1 when it is not to be seen */
static int count_fds(pid_t pid) {
	char path[64];
	int n = 0;
	DIR *directory;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	directory = opendir(path);
	if (!directory)
		return -1;
	while (readdir(directory))
		n++;
	closedir(directory);
	return n;
}

/* ---- the broker ---- */

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

static void supervisor_start(Loop *loop) {
	char config[128], config_option[160], socket_option[160], loop_option[32];
	FILE *file;

	snprintf(config, sizeof(config), "%s/conf", loop->directory);
	file = fopen(config, "we");
	/* few slots, so that they are used again soon; all have one uid */
	if (!file ||
	    fprintf(file,
		    "[broker]\nshared_uid = yes\nfair_share = no\ncapacity = 512\nlanes = 3\n[access]\n"
		    "keep = %u\n",
		    (unsigned)geteuid()) < 0 ||
	    fclose(file))
		fail(config);
	snprintf(config_option, sizeof(config_option), "--config=%s", config);
	snprintf(socket_option, sizeof(socket_option), "--socket=%s", loop->socket);
	snprintf(loop_option, sizeof(loop_option), "--loop=%s", loop->engine);
	loop->supervisor = fork_child();
	if (loop->supervisor)
		return;
	if (!freopen(loop->log, "we", stderr))
		_exit(1);
	execl(loop->broker, loop->broker, "--supervise", config_option, socket_option, loop_option, NULL);
	fail(loop->broker);
}

/* the supervisor's only child; 0 while there is none */
static pid_t broker_pid(const Loop *loop) {
	char path[64], text[64] = "";
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)loop->supervisor, (int)loop->supervisor);
	file = fopen(path, "re");
	if (!file)
		return 0;
	if (!fgets(text, sizeof(text), file))
		text[0] = 0;
	(void)fclose(file);
	return (pid_t)strtol(text, NULL, 10);
}

static void check_supervisor(const Loop *loop) {
	if (!waitpid(loop->supervisor, NULL, WNOHANG))
		return;
	errno = 0;
	fail("the supervisor has ended");
}

static void broker_kill(Loop *loop, pid_t pid) {
	atomic_fetch_add(&loop->shared->kills, 1);
	if (kill(pid, SIGKILL) < 0)
		fail("kill");
}

/* kills the next one, too, in the midst of its recovery or before */
static void kill_again(Loop *loop, pid_t last) {
	uint64_t end = load_now_ms() + LOAD_STUCK_MS;
	pid_t pid;

	while ((pid = broker_pid(loop)) == last || !pid) {
		check_supervisor(loop);
		if (load_now_ms() > end) {
			load_wrong(loop->shared, "no broker is started again");
			return;
		}
		wait_us(200);
	}
	wait_us(any(loop, RECOVERY_US));
	if (broker_pid(loop) == pid)
		broker_kill(loop, pid);
}

static void await_answer(Loop *loop, double killed_ms) {
	int r = shmb_client_ping(loop->checker.client, NULL);

	check_supervisor(loop);
	if (r)
		load_wrong(loop->shared, "the broker does not answer: %s", shmb_last_error());
	else if (killed_ms > 0 && loop->n_answers < ANSWERS_MAX)
		loop->answers_ms[loop->n_answers++] = now_ms() - killed_ms;
}

/* ---- clients ---- */

static void client_start(Loop *loop, uint32_t i) {
	char number[16], shared_fd[16], random[24];

	snprintf(number, sizeof(number), "%u", i);
	snprintf(shared_fd, sizeof(shared_fd), "%d", loop->shared_fd);
	snprintf(random, sizeof(random), "%" PRIu64, loop->seed * 1000003 + ++loop->n_started * 101 + 1);
	loop->pids[i] = fork_child();
	if (loop->pids[i])
		return;
	(void)fcntl(loop->shared_fd, F_SETFD, 0);
	execl("/proc/self/exe", "kill-loop", "--client", number, shared_fd, random, loop->socket, NULL);
	fail("exec");
}

_Noreturn static void client_main(char **argv) {
	Load load = {
		.process = (uint32_t)atoi(argv[2]),
		.shared = load_map(atoi(argv[3])),
		.random = strtoull(argv[4], NULL, 10),
		.socket = argv[5],
	};

	if (!load.shared)
		fail("mmap");
	if (load.process < LOAD_OWNERS)
		owner_main(&load);
	consumer_main(&load);
}

/* what the dead one wrote last may be half of it, and what it asked for last may have been done */
static void forget(Loop *loop, uint32_t i) {
	Process *process = &loop->shared->processes[i];

	for (uint32_t j = 0; i < LOAD_OWNERS && j < LOAD_OWNER_THREADS * LOAD_NAMES; ++j) {
		Name *name = &loop->shared->names[i * LOAD_OWNER_THREADS * LOAD_NAMES + j];
		bool is_whole = !(atomic_load(&name->version) & 1);

		if (is_whole && atomic_load(&name->kept) && atomic_load(&name->state) == NAME_REGISTERED)
			continue;
		if (is_whole)
			name_begin(name);
		atomic_store(&name->state, NAME_UNKNOWN);
		name_end(name);
	}
	for (uint32_t j = 0; j < LOAD_THREADS; ++j) {
		atomic_store(&process->seats[j].parked, 0);
		for (uint32_t k = 0; k < LOAD_HELD; ++k)
			atomic_store(&process->seats[j].holds[k].kind, HOLD_NONE);
	}
	atomic_store(&process->threads, 0);
	atomic_store(&process->orphans, 0);
}

static void check_ended(const Loop *loop, uint32_t i, int status) {
	if (WIFSIGNALED(status))
		load_wrong(loop->shared, "process %u died of signal %d", i, WTERMSIG(status));
	else if (WEXITSTATUS(status))
		load_wrong(loop->shared, "process %u failed", i);
}

/* stopped first, so that it is forgotten before the broker can know that it is dead */
static void client_kill(Loop *loop) {
	uint32_t i = any(loop, LOAD_PROCESSES - 2) + 1;
	int status;

	i += i >= LOAD_OWNERS;
	if (kill(loop->pids[i], SIGSTOP) < 0 || waitpid(loop->pids[i], &status, WUNTRACED) != loop->pids[i])
		fail("stop");
	if (!WIFSTOPPED(status)) {
		check_ended(loop, i, status);
	} else {
		forget(loop, i);
		kill(loop->pids[i], SIGKILL);
		(void)waitpid(loop->pids[i], &status, 0);
		loop->client_kills++;
	}
	client_start(loop, i);
}

static void check_clients(Loop *loop) {
	int status;

	for (uint32_t i = 0; i < LOAD_PROCESSES; ++i) {
		if (!loop->pids[i] || waitpid(loop->pids[i], &status, WNOHANG) != loop->pids[i])
			continue;
		loop->pids[i] = 0;
		if (!WIFEXITED(status) || WEXITSTATUS(status))
			check_ended(loop, i, status);
		else
			load_wrong(loop->shared, "process %u has ended", i);
	}
}

static void clients_end(Loop *loop, uint32_t begin, uint32_t end) {
	uint64_t until = load_now_ms() + LOAD_STUCK_MS;
	uint32_t left;
	int status;

	do {
		left = 0;
		for (uint32_t i = begin; i < end; ++i) {
			if (loop->pids[i] && waitpid(loop->pids[i], &status, WNOHANG) == loop->pids[i]) {
				loop->pids[i] = 0;
				check_ended(loop, i, status);
			}
			left += !!loop->pids[i];
		}
		if (left)
			wait_us(1000);
	} while (left && load_now_ms() < until);
	for (uint32_t i = begin; i < end; ++i) {
		if (!loop->pids[i])
			continue;
		load_wrong(loop->shared, "process %u does not end: lines %u %u %u", i,
			   loop->shared->processes[i].seats[0].doing, loop->shared->processes[i].seats[1].doing,
			   loop->shared->processes[i].seats[2].doing);
		kill(loop->pids[i], SIGKILL);
		(void)waitpid(loop->pids[i], &status, 0);
		loop->pids[i] = 0;
		forget(loop, i);
	}
}

/* ---- the comparison ---- */

static bool all_stand(const Loop *loop, uint32_t barrier, uint32_t *ret_process, uint32_t *ret_seat) {
	for (uint32_t i = 0; i < LOAD_PROCESSES; ++i) {
		const Process *process = &loop->shared->processes[i];
		uint32_t n = atomic_load(&process->threads);

		*ret_process = i;
		*ret_seat = 0;
		if (loop->pids[i] && !n)
			return false;
		for (uint32_t j = 0; j < n; ++j) {
			uint32_t parked = atomic_load(&process->seats[j].parked);

			*ret_seat = j;
			if (loop->pids[i] && parked != barrier && parked != UINT32_MAX)
				return false;
		}
	}
	return true;
}

static void compare(Loop *loop) {
	uint32_t barrier = atomic_fetch_add(&loop->shared->barrier, 1) + 1, process, seat;
	uint64_t end = load_now_ms() + LOAD_STUCK_MS;
	int n;

	while (!all_stand(loop, barrier, &process, &seat)) {
		check_clients(loop);
		if (load_now_ms() > end) {
			load_wrong(loop->shared, "process %u thread %u does not come: line %u", process, seat,
				   atomic_load(&loop->shared->processes[process].seats[seat].doing));
			break;
		}
		wait_us(500);
	}
	checker_compare(&loop->checker);
	n = count_fds(loop->supervisor);
	if (n > loop->store_fds_most)
		loop->store_fds_most = n;
	if (n > loop->store_fds + STORE_FDS)
		load_wrong(loop->shared, "the supervisor has %d fds, and had %d at first", n, loop->store_fds);
	loop->n_compared++;
	atomic_fetch_add(&loop->shared->barrier, 1);
	(void)syscall(SYS_futex, &loop->shared->barrier, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static bool is_settled(const Loop *loop, pid_t broker) {
	return count_fds(loop->supervisor) <= loop->store_fds && count_fds(broker) <= loop->broker_fds;
}

/* the same who are connected, and nothing left: then there are as many fds as at first */
static void check_fds(Loop *loop) {
	uint64_t end = load_now_ms() + LOAD_STUCK_MS;
	pid_t broker = broker_pid(loop);

	while (!is_settled(loop, broker) && load_now_ms() < end)
		wait_us(5000);
	if (!is_settled(loop, broker))
		load_wrong(loop->shared, "fds in the end: the supervisor has %d, and had %d; the broker %d, and had %d",
			   count_fds(loop->supervisor), loop->store_fds, count_fds(broker), loop->broker_fds);
}

/* ---- the whole ---- */

static void run(Loop *loop) {
	double killed_ms = 0;

	for (uint32_t i = 0; i < LOAD_PROCESSES; ++i)
		client_start(loop, i);
	for (uint32_t i = 1; atomic_load(&loop->shared->kills) < loop->kills && !loop->shared->n_reports; ++i) {
		pid_t pid;

		await_answer(loop, killed_ms);
		check_clients(loop);
		checker_look(&loop->checker);
		if (i % COMPARED == 0)
			compare(loop);
		if (!any(loop, CLIENT_KILLED))
			client_kill(loop);
		wait_us(exponential_us(loop));
		pid = broker_pid(loop);
		check_supervisor(loop);
		if (!pid) {
			load_wrong(loop->shared, "the broker has ended by itself");
			continue;
		}
		killed_ms = now_ms();
		broker_kill(loop, pid);
		if (!any(loop, KILLED_AGAIN)) {
			kill_again(loop, pid);
			/* it is no measurement any more */
			killed_ms = 0;
		}
	}
	await_answer(loop, killed_ms);
	compare(loop);
	atomic_store(&loop->shared->stop_owners, 1);
	clients_end(loop, 0, LOAD_OWNERS);
	atomic_store(&loop->shared->stop_consumers, 1);
	clients_end(loop, LOAD_OWNERS, LOAD_PROCESSES);
	checker_finish(&loop->checker);
	check_fds(loop);
}

static void supervisor_end(Loop *loop) {
	uint64_t end = load_now_ms() + LOAD_STUCK_MS;
	int status = 0;

	shmb_client_free(loop->checker.client);
	kill(loop->supervisor, SIGTERM);
	while (!waitpid(loop->supervisor, &status, WNOHANG)) {
		if (load_now_ms() > end) {
			load_wrong(loop->shared, "the supervisor does not end");
			kill(loop->supervisor, SIGKILL);
			(void)waitpid(loop->supervisor, &status, 0);
			return;
		}
		wait_us(1000);
	}
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		load_wrong(loop->shared, "the supervisor did not end in order: %#x", status);
}

/* what the broker says in its log that it must not have to say */
static void check_log(const Loop *loop) {
	static const char *const bad[] = { " is lost: ", "STARTING EMPTY", "was not recovered", "AddressSanitizer",
					   "runtime error" };
	FILE *file = fopen(loop->log, "re");
	char line[1024];

	while (file && fgets(line, sizeof(line), file))
		for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); ++i)
			if (strstr(line, bad[i]))
				load_wrong(loop->shared, "log: %.200s", line);
	if (file)
		(void)fclose(file);
}

static int compare_doubles(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static bool report(Loop *loop, double ms) {
	const Shared *shared = loop->shared;
	uint32_t n = loop->n_answers, n_reports = atomic_load(&shared->n_reports);

	qsort(loop->answers_ms, n, sizeof(loop->answers_ms[0]), compare_doubles);
	printf("%5.1f s  kills %u (compared %u, clients %u)  registered %" PRIu64 " (refused %" PRIu64
	       ", replaced %" PRIu64 ")  retired %" PRIu64 "  leases %" PRIu64 ", by message %" PRIu64
	       ", over a kill %" PRIu64 "  fds kept at most %+d  answered after %.0f ms, at most %.0f  wrong %u\n",
	       ms / 1000, atomic_load(&shared->kills), loop->n_compared, loop->client_kills,
	       atomic_load(&shared->registered), atomic_load(&shared->refused), atomic_load(&shared->replaced),
	       atomic_load(&shared->retired), atomic_load(&shared->leases_by_page),
	       atomic_load(&shared->leases_by_message), atomic_load(&shared->held_over),
	       loop->store_fds_most - loop->store_fds, n ? loop->answers_ms[n / 2] : 0, n ? loop->answers_ms[n - 1] : 0,
	       n_reports);
	if (!n_reports)
		return true;
	fprintf(stderr, "kill-loop: seed %" PRIu64 "; the log is %s\n", loop->seed, loop->log);
	for (uint32_t i = 0; i < n_reports && i < LOAD_REPORTS; ++i)
		fprintf(stderr, "kill-loop: %s\n", shared->reports[i]);
	return false;
}

static void prepare(Loop *loop) {
	const char *base = getenv("TMPDIR");

	snprintf(loop->directory, sizeof(loop->directory), "%s/kill-loop-XXXXXX", base && *base ? base : "/tmp");
	if (!mkdtemp(loop->directory))
		fail("mkdtemp");
	snprintf(loop->socket, sizeof(loop->socket), "%s/socket", loop->directory);
	snprintf(loop->log, sizeof(loop->log), "%s/log", loop->directory);
	loop->shared_fd = memfd_create("kill-loop-shared", MFD_CLOEXEC);
	if (loop->shared_fd < 0 || ftruncate(loop->shared_fd, sizeof(Shared)) < 0)
		fail("memfd");
	loop->shared = load_map(loop->shared_fd);
	if (!loop->shared)
		fail("mmap");
	atomic_store(&loop->shared->serial, 1);
}

/* it waits for something, and has dealt with all that was sent to it before */
static bool sleeps(pid_t pid) {
	char path[64], text[256] = "";
	const char *end;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	file = fopen(path, "re");
	if (!file)
		return false;
	if (!fgets(text, sizeof(text), file))
		text[0] = 0;
	(void)fclose(file);
	/* the name before it may have anything in it */
	end = strrchr(text, ')');
	return end && !strncmp(end, ") S", 3);
}

/* what there is while the checker alone is connected; what the broker sent with its answer may be on its way yet */
static void count_first_fds(Loop *loop) {
	uint64_t end = load_now_ms() + LOAD_STUCK_MS;
	pid_t broker = broker_pid(loop);

	while (!(sleeps(broker) && sleeps(loop->supervisor)) && load_now_ms() < end)
		wait_us(1000);
	loop->store_fds = loop->store_fds_most = count_fds(loop->supervisor);
	loop->broker_fds = count_fds(broker);
}

static void connect_checker(Loop *loop) {
	uint64_t end = load_now_ms() + LOAD_STUCK_MS;

	loop->checker.shared = loop->shared;
	loop->checker.pids = loop->pids;
	while (shmb_client_new(&loop->checker.client, loop->socket, SHMB_ROLE_ADMIN | SHMB_ROLE_OWNER, 0)) {
		check_supervisor(loop);
		if (load_now_ms() > end)
			fail("the broker does not answer");
		wait_us(2000);
	}
	(void)shmb_client_set_resume_timeout(loop->checker.client, LOAD_STUCK_MS);
	count_first_fds(loop);
}

static void clean(const Loop *loop) {
	static const char *const names[] = { "conf", "log", "socket" };
	char path[128];

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); ++i) {
		snprintf(path, sizeof(path), "%s/%s", loop->directory, names[i]);
		(void)unlink(path);
	}
	(void)rmdir(loop->directory);
}

static bool parse(Loop *loop, int argc, char **argv) {
	static const struct option options[] = {
		{ "loop", required_argument, NULL, 'l' },
		{ "kills", required_argument, NULL, 'k' },
		{ "seed", required_argument, NULL, 's' },
		{},
	};
	int c;

	loop->engine = "auto";
	loop->kills = KILLS;
	loop->seed = (uint64_t)getpid();
	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case 'l':
			loop->engine = optarg;
			break;
		case 'k':
			loop->kills = (uint32_t)atoi(optarg);
			break;
		case 's':
			loop->seed = strtoull(optarg, NULL, 10);
			break;
		default:
			return false;
		}
	}
	loop->broker = argv[optind];
	loop->random = loop->seed * 7919 + 1;
	return optind == argc - 1 && loop->kills;
}

int main(int argc, char **argv) {
	static Loop loop;
	double begin = now_ms();
	bool good;

	if (argc == 6 && !strcmp(argv[1], "--client"))
		client_main(argv);
	if (!parse(&loop, argc, argv)) {
		usage();
		return 2;
	}
	if (!engine_is_there(loop.engine)) {
		puts("skipped: io_uring is refused here");
		return SKIPPED;
	}
	prepare(&loop);
	supervisor_start(&loop);
	connect_checker(&loop);
	run(&loop);
	supervisor_end(&loop);
	check_log(&loop);
	good = report(&loop, now_ms() - begin);
	if (good)
		clean(&loop);
	return good ? 0 : 1;
}
