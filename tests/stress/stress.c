/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The supervisor: starts a broker, owners and consumers, kills consumers at random and starts others, and says what
 * came of it. See usage(). The broker and the owners run on one processor, the consumers on another.
 */

#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shmbroker.h"
#include "stress.h"
#include "wire/barrier.h"

#define TURN_MS 20
#define KILL_TURNS 2
#define END_MS 30000
#define ENOUGH 10	 /* violations, for a control */
#define CONTROL_MORE 120 /* seconds that one goes on when it has seen none: they are few on a slow machine */
#define SKIPPED 77
#define CHILDREN (STRESS_OWNERS + STRESS_CONSUMERS)

typedef struct Child {
	pid_t pid;
	bool killed; /* by us */
} Child;

typedef struct Supervisor {
	Stress stress;
	pid_t broker;
	struct shmb_client *client; /* asks the broker; never used by the children */
	Child children[CHILDREN];   /* owners, then consumers */
	uint32_t n_started;
	uint32_t n_failed;
	uint64_t kills;
	uint64_t missed; /* what the broker says of releases that only its second look found */
	uint64_t random;
	int fds_at_start; /* of the broker, -1 when that is not to be seen */
} Supervisor;

static const char *const mode_names[] = { "asymmetric", "rmw" };
static const char *const control_names[] = { "none", "violations", "missed" };
static const char *const wrong_names[_WRONG_N] = { "poison",  "canary", "changed", "granted-after-gone",
						   "revoked", "crashed" };

static void usage(void) {
	puts("usage: stress [--mode asymmetric|rmw] [--seconds N] [--control violations|missed] BROKER\n"
	     "\n"
	     "Prints one line: the generations retired, leases, kills, releases that only a second look of the broker\n"
	     "found, violations and whether it ended in order.\n"
	     "Exits with 0 if there was no violation, and all ended in order; with --control, if what it wants was seen,\n"
	     "violations or missed releases; with 77 where it can show nothing: on one processor, or without membarrier.");
}

void stress_wrong(Shared *shared, uint32_t kind, uint32_t region, uint64_t generation, uint64_t seen,
		  uint64_t expected) {
	uint32_t i;

	atomic_fetch_add(&shared->wrong[kind], 1);
	i = atomic_fetch_add(&shared->n_reports, 1);
	if (i < STRESS_REPORTS)
		shared->reports[i] = (Report){ kind, region, generation, seen, expected };
}

void stress_fail(const char *what, int result) {
	fprintf(stderr, "stress: %s: %d: %s\n", what, result, result > 0 ? shmb_last_error() : strerror(errno));
	exit(1);
}

static uint64_t now_ms(void) {
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* waits for the end of a child, or for the time to pass */
static void wait_ms(long ms) {
	const struct timespec time = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 };
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	(void)sigtimedwait(&set, NULL, &time);
}

static void pin(int cpu) {
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set) < 0)
		stress_fail("sched_setaffinity", -1);
}

/* two processors that we may use, or false */
static bool find_cpus(int cpus[2]) {
	cpu_set_t set;
	int n = 0;

	if (sched_getaffinity(0, sizeof(set), &set) < 0)
		return false;
	for (int cpu = 0; cpu < CPU_SETSIZE && n < 2; ++cpu)
		if (CPU_ISSET(cpu, &set))
			cpus[n++] = cpu;
	return n == 2;
}

/* ---- the broker ---- */

static void write_file(const char *path, const char *text) {
	FILE *file = fopen(path, "we");

	if (!file || fputs(text, file) < 0 || fclose(file))
		stress_fail(path, -1);
}

static void path_in(const Supervisor *supervisor, char *ret, size_t size, const char *name) {
	snprintf(ret, size, "%s/%s", supervisor->stress.directory, name);
}

static pid_t fork_child(int cpu) {
	pid_t parent = getpid(), pid = fork();

	if (pid < 0)
		stress_fail("fork", -1);
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	pin(cpu);
	return 0;
}

static void broker_start(Supervisor *supervisor) {
	char config[128], log[128], config_option[160], socket_option[160];
	sigset_t none;

	path_in(supervisor, config, sizeof(config), "conf");
	path_in(supervisor, log, sizeof(log), "log");
	/* few slots, so that they are used again soon; a lane that is shared; all have one uid */
	write_file(config, "[broker]\nshared_uid = yes\nfair_share = no\ncapacity = 128\nlanes = 3\n");
	snprintf(config_option, sizeof(config_option), "--config=%s", config);
	snprintf(socket_option, sizeof(socket_option), "--socket=%s", supervisor->stress.socket);
	supervisor->broker = fork_child(supervisor->stress.cpus[0]);
	if (supervisor->broker)
		return;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (!freopen(log, "we", stderr))
		_exit(1);
	execl(supervisor->stress.broker, supervisor->stress.broker, config_option, socket_option, NULL);
	stress_fail(supervisor->stress.broker, -1);
}

/* its fds, while one client is served; -1 when we may not see them */
static int broker_fds(const Supervisor *supervisor) {
	char path[64];
	int n = 0;
	DIR *directory;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)supervisor->broker);
	directory = opendir(path);
	if (!directory)
		return -1;
	while (readdir(directory))
		n++;
	closedir(directory);
	return n;
}

static struct shmb_client *connect_to(const Supervisor *supervisor) {
	struct shmb_client *client;
	uint64_t end = now_ms() + END_MS;
	int r;

	while ((r = shmb_client_new(&client, supervisor->stress.socket, 0, SHMB_NO_LEASE_PAGE))) {
		if (now_ms() > end || waitpid(supervisor->broker, NULL, WNOHANG))
			stress_fail("the broker does not answer", r);
		wait_ms(TURN_MS);
	}
	return client;
}

typedef struct Stat {
	const char *name;
	uint64_t value;
} Stat;

static int find_stat(void *userdata, const struct shmb_stat *stat) {
	Stat *wanted = userdata;

	if (!strcmp(stat->name, wanted->name))
		wanted->value = stat->value;
	return 0;
}

/* what the broker counts, 0 when it does not answer */
static uint64_t broker_stat(const Supervisor *supervisor, const char *name) {
	Stat wanted = { .name = name };

	return shmb_client_each_stat(supervisor->client, 0, find_stat, &wanted) ? 0 : wanted.value;
}

/* what it opened only to serve us is closed by a thread of its own, a moment later */
static int broker_fds_at_start(const Supervisor *supervisor) {
	uint64_t end = now_ms() + END_MS;

	while (broker_stat(supervisor, "fds_closing") && now_ms() < end)
		wait_ms(TURN_MS);
	return broker_fds(supervisor);
}

/* what the broker still has although nobody is there but us */
static int add_held(void *userdata, const struct shmb_stat *stat) {
	uint64_t *sum = userdata;

	if (!strcmp(stat->name, "regions") || !strcmp(stat->name, "objects") || !strcmp(stat->name, "fds_closing") ||
	    !strcmp(stat->name, "sessions_detached") || !strcmp(stat->name, "held_maps") ||
	    !strcmp(stat->name, "held_leases") || !strcmp(stat->name, "held_revoked"))
		*sum += stat->value;
	else if (!strcmp(stat->name, "sessions"))
		*sum += stat->value - 1;
	return 0;
}

static bool broker_is_empty(const Supervisor *supervisor) {
	struct shmb_status_iter *iter;
	const struct shmb_status *status;
	uint64_t held = 0;

	if (shmb_client_each_stat(supervisor->client, 0, add_held, &held) ||
	    shmb_status_iter_new(supervisor->client, NULL, &iter))
		return false;
	if (shmb_status_iter_next(iter, &status) || status)
		held++;
	shmb_status_iter_free(iter);
	return !held && broker_fds(supervisor) == supervisor->fds_at_start;
}

/* what a failure says: what the broker has left, and its log */
static int print_stat(void *userdata, const struct shmb_stat *stat) {
	(void)userdata;
	if (stat->value)
		fprintf(stderr, "  %s %" PRIu64 "\n", stat->name, stat->value);
	return 0;
}

static void print_log(const Supervisor *supervisor) {
	char path[128], line[512];
	FILE *log;

	path_in(supervisor, path, sizeof(path), "log");
	log = fopen(path, "re");
	for (int i = 0; log && i < 40 && fgets(line, sizeof(line), log); ++i)
		fputs(line, stderr);
	if (log)
		fclose(log);
}

/* whether it ends in order, with nothing left */
static bool broker_end(Supervisor *supervisor) {
	uint64_t end = now_ms() + END_MS;
	bool empty;
	int status;

	while (!(empty = broker_is_empty(supervisor)) && now_ms() < end)
		wait_ms(TURN_MS);
	if (!empty) {
		fprintf(stderr, "stress: the broker has something left, %d fds instead of %d, and:\n",
			broker_fds(supervisor), supervisor->fds_at_start);
		(void)shmb_client_each_stat(supervisor->client, 0, print_stat, NULL);
	}
	supervisor->missed = broker_stat(supervisor, "releases_missed");
	supervisor->client = shmb_client_free(supervisor->client);
	kill(supervisor->broker, SIGTERM);
	while (now_ms() < end) {
		if (waitpid(supervisor->broker, &status, WNOHANG) == supervisor->broker)
			return empty && WIFEXITED(status) && !WEXITSTATUS(status);
		wait_ms(TURN_MS);
	}
	kill(supervisor->broker, SIGKILL);
	(void)waitpid(supervisor->broker, NULL, 0);
	return false;
}

/* ---- owners and consumers ---- */

static void child_start(Supervisor *supervisor, uint32_t i) {
	bool is_owner = i < STRESS_OWNERS;
	uint32_t number = supervisor->n_started++;
	pid_t pid = fork_child(supervisor->stress.cpus[is_owner ? 0 : 1]);

	if (pid)
		supervisor->children[i] = (Child){ .pid = pid };
	else if (is_owner)
		owner_run(&supervisor->stress, i);
	else
		consumer_run(&supervisor->stress, i, number);
}

/* looks who has ended, and starts consumers anew that were killed or crashed */
static void children_reap(Supervisor *supervisor, bool restart) {
	for (uint32_t i = 0; i < CHILDREN; ++i) {
		Child *child = &supervisor->children[i];
		int status;

		if (!child->pid || waitpid(child->pid, &status, WNOHANG) != child->pid)
			continue;
		child->pid = 0;
		if (WIFSIGNALED(status) && !child->killed)
			stress_wrong(supervisor->stress.shared, WRONG_CRASHED, i, 0, (uint64_t)WTERMSIG(status), 0);
		if (WIFEXITED(status) && (WEXITSTATUS(status) || restart))
			supervisor->n_failed++;
		else if (restart && i >= STRESS_OWNERS)
			child_start(supervisor, i);
	}
}

static void child_kill(Supervisor *supervisor) {
	uint32_t which = STRESS_OWNERS + (uint32_t)(stress_random(&supervisor->random) % STRESS_CONSUMERS);
	Child *child = &supervisor->children[which];

	if (!child->pid || child->killed)
		return;
	child->killed = true;
	kill(child->pid, SIGKILL);
	supervisor->kills++;
}

static bool children_are_left(const Supervisor *supervisor, uint32_t begin, uint32_t end) {
	for (uint32_t i = begin; i < end; ++i)
		if (supervisor->children[i].pid)
			return true;
	return false;
}

/* consumers first go on, so that what is retired last drains */
static bool children_stop(Supervisor *supervisor) {
	Shared *shared = supervisor->stress.shared;
	uint64_t end = now_ms() + END_MS;

	atomic_store(&shared->stop_owners, 1);
	while (children_are_left(supervisor, 0, CHILDREN) && now_ms() < end) {
		children_reap(supervisor, false);
		if (!children_are_left(supervisor, 0, STRESS_OWNERS))
			atomic_store(&shared->stop_consumers, 1);
		if (children_are_left(supervisor, 0, CHILDREN))
			wait_ms(TURN_MS);
	}
	if (!children_are_left(supervisor, 0, CHILDREN))
		return true;
	fprintf(stderr, "stress: some do not end\n");
	for (uint32_t i = 0; i < CHILDREN; ++i) {
		if (supervisor->children[i].pid) {
			kill(supervisor->children[i].pid, SIGKILL);
			(void)waitpid(supervisor->children[i].pid, NULL, 0);
		}
	}
	return false;
}

/* ---- the whole ---- */

static uint64_t violations(const Shared *shared) {
	uint64_t n = 0;

	for (int i = 0; i < _WRONG_N; ++i)
		n += atomic_load(&shared->wrong[i]);
	return n;
}

/* those that say what was in the memory: a crash may have another reason */
static uint64_t violations_seen(const Shared *shared) {
	return violations(shared) - atomic_load(&shared->wrong[WRONG_CRASHED]);
}

/* what a control wants to see */
static uint64_t wanted_seen(const Supervisor *supervisor) {
	return supervisor->stress.control == STRESS_MISSED ? supervisor->missed
							   : violations_seen(supervisor->stress.shared);
}

static bool is_to_go_on(Supervisor *supervisor, uint64_t end) {
	uint64_t seen;

	if (!supervisor->stress.control)
		return now_ms() < end;
	supervisor->missed = broker_stat(supervisor, "releases_missed");
	seen = wanted_seen(supervisor);
	return seen < ENOUGH && now_ms() < end + (seen ? 0 : CONTROL_MORE * UINT64_C(1000));
}

static void run(Supervisor *supervisor) {
	const Stress *stress = &supervisor->stress;
	uint64_t end = now_ms() + stress->seconds * UINT64_C(1000);

	for (uint32_t i = 0; i < CHILDREN; ++i)
		child_start(supervisor, i);
	for (uint32_t turn = 1; is_to_go_on(supervisor, end) && !supervisor->n_failed; ++turn) {
		wait_ms(TURN_MS);
		children_reap(supervisor, true);
		if (!stress->control && turn % KILL_TURNS == 0)
			child_kill(supervisor);
	}
}

static void print_reports(const Shared *shared) {
	for (uint32_t i = 0; i < STRESS_REPORTS && i < atomic_load(&shared->n_reports); ++i) {
		const Report *report = &shared->reports[i];

		fprintf(stderr, "stress: %s: region %u generation %" PRIx64 " seen %" PRIx64 " expected %" PRIx64 "\n",
			wrong_names[report->kind], report->region, report->generation, report->seen, report->expected);
	}
}

static bool report(const Supervisor *supervisor, bool in_order, uint64_t ms) {
	const Shared *shared = supervisor->stress.shared;
	uint64_t strict = atomic_load(&shared->strict), lazy = atomic_load(&shared->lazy);
	uint64_t forced = atomic_load(&shared->forced), generations = strict + lazy + forced;
	uint64_t wrong = violations(shared), stuck = atomic_load(&shared->stuck);
	bool good = !supervisor->n_failed;

	if (supervisor->stress.control)
		good &= wanted_seen(supervisor) > 0;
	else
		good &= !wrong && !stuck && in_order && generations > 0;

	printf("%5.1f s  generations %" PRIu64 " (lazy %" PRIu64 ", forced %" PRIu64 ")  leases %" PRIu64
	       " (handle %" PRIu64 ", other thread %" PRIu64 ", late %" PRIu64 ")  threads ended %" PRIu64
	       "  kills %" PRIu64 "  missed %" PRIu64 "  stuck %" PRIu64 "  violations %" PRIu64
	       " (%.3f per 1000 generations",
	       (double)ms / 1000, generations, lazy, forced, atomic_load(&shared->leases),
	       atomic_load(&shared->by_handle), atomic_load(&shared->handed_over), atomic_load(&shared->late),
	       atomic_load(&shared->threads), supervisor->kills, supervisor->missed, stuck, wrong,
	       generations ? 1000.0 * (double)wrong / (double)generations : 0);
	for (int i = 0; i < _WRONG_N; ++i)
		if (atomic_load(&shared->wrong[i]))
			printf(", %s %" PRIu64, wrong_names[i], atomic_load(&shared->wrong[i]));
	puts(in_order ? ")" : ")  not in order");
	if (wrong && !supervisor->stress.control)
		print_reports(shared);
	if (!good)
		print_log(supervisor);
	return good;
}

static void prepare(Supervisor *supervisor) {
	Stress *stress = &supervisor->stress;
	const char *base = getenv("TMPDIR");
	sigset_t set;

	snprintf(stress->directory, sizeof(stress->directory), "%s/stress-XXXXXX", base && *base ? base : "/tmp");
	if (!mkdtemp(stress->directory))
		stress_fail("mkdtemp", -1);
	path_in(supervisor, stress->socket, sizeof(stress->socket), "socket");
	stress->shared =
		mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	stress->cold =
		mmap(NULL, STRESS_COLD_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (stress->shared == MAP_FAILED || stress->cold == MAP_FAILED)
		stress_fail("mmap", -1);
	supervisor->random = (uint64_t)getpid();
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
}

static void clean(const Supervisor *supervisor) {
	static const char *const names[] = { "conf", "log", "socket" };
	char path[128];

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); ++i) {
		path_in(supervisor, path, sizeof(path), names[i]);
		(void)unlink(path);
	}
	(void)rmdir(supervisor->stress.directory);
}

/* the place of @name in @names, or -1 */
static int find_name(const char *name, const char *const *names, int n) {
	while (n-- > 0 && strcmp(name, names[n]) != 0)
		;
	return n;
}

static bool parse(Stress *stress, int argc, char **argv) {
	static const struct option options[] = {
		{ "mode", required_argument, NULL, 'm' },
		{ "seconds", required_argument, NULL, 's' },
		{ "control", required_argument, NULL, 'c' },
		{},
	};
	int c, i;

	stress->seconds = 10;
	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case 'm':
			i = find_name(optarg, mode_names, STRESS_RMW + 1);
			if (i < 0)
				return false;
			stress->mode = (StressMode)i;
			break;
		case 's':
			stress->seconds = (uint32_t)atoi(optarg);
			break;
		case 'c':
			i = find_name(optarg, control_names, STRESS_MISSED + 1);
			if (i < 0)
				return false;
			stress->control = (StressControl)i;
			break;
		default:
			return false;
		}
	}
	stress->broker = argv[optind];
	return optind == argc - 1 && stress->seconds;
}

int main(int argc, char **argv) {
	Supervisor supervisor = {};
	uint64_t begin = now_ms();
	bool in_order, good;

	if (!parse(&supervisor.stress, argc, argv)) {
		usage();
		return 2;
	}
	if (!find_cpus(supervisor.stress.cpus)) {
		puts("skipped: on one processor every switch of threads is a barrier");
		return SKIPPED;
	}
	if (supervisor.stress.mode == STRESS_ASYMMETRIC &&
	    (barrier_query() < 0 || !(barrier_query() & BARRIER_GLOBAL_EXPEDITED))) {
		puts("skipped: without membarrier there is no asymmetric mode");
		return SKIPPED;
	}
	prepare(&supervisor);
	broker_start(&supervisor);
	supervisor.client = connect_to(&supervisor);
	supervisor.fds_at_start = broker_fds_at_start(&supervisor);

	run(&supervisor);
	in_order = children_stop(&supervisor);
	in_order &= broker_end(&supervisor);
	good = report(&supervisor, in_order, now_ms() - begin);
	clean(&supervisor);
	return good ? 0 : 1;
}
