/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <dirent.h>

#include "bench.h"
#include "shmbroker.h"

#define BROKERS_MAX 32
#define START_DEADLINE_NS UINT64_C(60000000000)
#define LOG_MAX 4096
#define NAME_SOCKET "shmbroker.sock"
#define NAME_CONFIG "shmbroker.conf"
#define NAME_LOG "log"
#define PATH_MAX_HERE 96

/* those that run; also read by a signal's handler, which may come at any time */
static struct {
	Broker brokers[BROKERS_MAX];
	volatile pid_t process; /* that started them: children that were forked inherit handlers, but no brokers */
} running;

static void path_in(const Broker *broker, const char *name, char path[PATH_MAX_HERE]) {
	/* no snprintf(), this runs in a signal's handler, too */
	(void)stpcpy(stpcpy(stpcpy(path, broker->directory), "/"), name);
}

/* ---- the end ---- */

static void remove_directory(const Broker *broker) {
	static const char *const names[] = { NAME_SOCKET, NAME_CONFIG, NAME_LOG };

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); ++i) {
		char path[PATH_MAX_HERE];

		path_in(broker, names[i], path);
		(void)unlink(path);
	}
	(void)rmdir(broker->directory);
}

static int end_process(pid_t pid) {
	int status = 0;

	(void)kill(pid, SIGTERM);
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return status;
}

/* calls only what a signal's handler may call */
static void stop_all(void) {
	if (running.process != getpid())
		return;
	for (size_t i = 0; i < BROKERS_MAX; ++i) {
		if (running.brokers[i].pid <= 0)
			continue;
		(void)end_process(running.brokers[i].pid);
		remove_directory(&running.brokers[i]);
		running.brokers[i].pid = 0;
	}
}

static void on_signal(int number) {
	stop_all();
	(void)signal(number, SIG_DFL);
	(void)raise(number);
}

static void remember(const Broker *broker) {
	static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
	size_t i = 0;

	if (running.process != getpid()) {
		running.process = getpid();
		memset(running.brokers, 0, sizeof(running.brokers));
		(void)atexit(stop_all);
		for (size_t j = 0; j < sizeof(signals) / sizeof(signals[0]); ++j)
			(void)signal(signals[j], on_signal);
	}
	while (i < BROKERS_MAX && running.brokers[i].pid)
		i++;
	if (i == BROKERS_MAX)
		bench_die("more than %d brokers", BROKERS_MAX);
	running.brokers[i] = *broker;
}

static void forget(const Broker *broker) {
	for (size_t i = 0; i < BROKERS_MAX; ++i)
		if (running.brokers[i].pid == broker->pid)
			running.brokers[i].pid = 0;
}

void broker_stop(Broker *broker) {
	int status;

	if (broker->pid <= 0)
		return;
	forget(broker);
	status = end_process(broker->pid);
	remove_directory(broker);
	*broker = (Broker){};
	/* a sanitizer says in this way what it found */
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		bench_die("the broker ended with %s %d", WIFEXITED(status) ? "exit status" : "signal",
			  WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
}

/* ---- the beginning ---- */

static void make_directory(Broker *broker) {
	const char *base = getenv("TMPDIR");
	static const char name[] = "/shmbroker-bench.XXXXXX";

	if (!base || !*base || strlen(base) + sizeof(name) > sizeof(broker->directory))
		base = "/tmp";
	(void)snprintf(broker->directory, sizeof(broker->directory), "%s%s", base, name);
	if (!mkdtemp(broker->directory))
		bench_die("%s: %s", broker->directory, strerror(errno));
	path_in(broker, NAME_SOCKET, broker->socket);
}

static void write_config(const Broker *broker, const char *config) {
	char path[PATH_MAX_HERE];
	FILE *file;

	path_in(broker, NAME_CONFIG, path);
	file = fopen(path, "we");
	if (!file)
		bench_die("%s: %s", path, strerror(errno));
	fputs("[broker]\n", file);
	/* its clients are this very process */
	if (!config || !strstr(config, "shared_uid"))
		fputs("shared_uid = yes\n", file);
	fputs(config ?: "", file);
	if (ferror(file) | fclose(file))
		bench_die("%s: %s", path, strerror(errno));
}

_Noreturn static void become_broker(const Bench *bench, const Broker *broker, const char *engine, int cpu,
				    pid_t parent) {
	char config[PATH_MAX_HERE], log[PATH_MAX_HERE], *loop;
	const char *supervise = broker->supervised ? "--supervise" : NULL;
	int fd;

	/* a benchmark that is killed leaves no broker */
	(void)prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (getppid() != parent)
		_exit(1);
	path_in(broker, NAME_CONFIG, config);
	path_in(broker, NAME_LOG, log);
	fd = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0 || dup2(fd, STDOUT_FILENO) < 0 || dup2(fd, STDERR_FILENO) < 0 ||
	    asprintf(&loop, "--loop=%s", engine ?: "auto") < 0)
		_exit(1);
	/* it is no service */
	(void)unsetenv("NOTIFY_SOCKET");
	(void)unsetenv("WATCHDOG_USEC");
	(void)unsetenv("LISTEN_FDS");
	(void)unsetenv("LISTEN_PID");
	bench_unpin();
	if (cpu >= 0 && !bench_pin((unsigned int)cpu)) {
		fprintf(stderr, "there is no CPU %d\n", cpu);
		_exit(1);
	}
	(void)execl(bench->broker_path, "shmbrokerd", "--config", config, "--socket", broker->socket, loop, supervise,
		    (char *)NULL);
	fprintf(stderr, "%s: %s\n", bench->broker_path, strerror(errno));
	_exit(1);
}

static bool answers(const Broker *broker) {
	struct shmb_client *client;
	int r;

	if (shmb_client_new(&client, broker->socket, SHMB_ROLE_OWNER, 0))
		return false;
	r = shmb_client_ping(client, NULL);
	(void)shmb_client_free(client);
	return !r;
}

/* false when it has ended */
static bool wait_for(const Broker *broker) {
	uint64_t deadline = bench_now_ns() + START_DEADLINE_NS;
	int process = (int)syscall(SYS_pidfd_open, broker->pid, 0);
	struct pollfd end = { .fd = process, .events = POLLIN };
	bool up = false;

	if (process < 0)
		bench_die("pidfd_open: %s", strerror(errno));
	while (!(up = answers(broker))) {
		if (poll(&end, 1, 1) > 0)
			break;
		if (bench_now_ns() > deadline)
			bench_die("the broker does not answer at %s", broker->socket);
	}
	(void)close(process);
	return up;
}

/* what the broker said, without the last line's end */
static void read_log(const Broker *broker, char text[LOG_MAX]) {
	char path[PATH_MAX_HERE];
	ssize_t size = 0;
	int fd;

	path_in(broker, NAME_LOG, path);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		size = read(fd, text, LOG_MAX - 1);
		(void)close(fd);
	}
	while (size > 0 && text[size - 1] == '\n')
		size--;
	text[size > 0 ? size : 0] = 0;
}

static bool start(Bench *bench, Broker *ret, const char *config, const char *engine, int cpu, bool supervised) {
	char log[LOG_MAX];
	pid_t parent = getpid();

	*ret = (Broker){ .supervised = supervised };
	make_directory(ret);
	write_config(ret, config);
	fflush(NULL);
	ret->pid = fork();
	if (ret->pid < 0)
		bench_die("fork: %s", strerror(errno));
	if (!ret->pid)
		become_broker(bench, ret, engine, cpu, parent);
	remember(ret);
	if (wait_for(ret))
		return true;

	read_log(ret, log);
	forget(ret);
	(void)waitpid(ret->pid, NULL, 0);
	remove_directory(ret);
	*ret = (Broker){};
	if (!engine || strcmp(engine, "io_uring") || !strstr(log, "insisted on"))
		bench_die("the broker does not start: %s", log);
	fprintf(stderr, "shmbroker-bench: without io_uring: %s\n", log);
	return false;
}

bool broker_start(Bench *bench, Broker *ret, const char *config, const char *engine, int cpu) {
	return start(bench, ret, config, engine, cpu, false);
}

bool broker_start_supervised(Bench *bench, Broker *ret, const char *config, const char *engine, int cpu) {
	return start(bench, ret, config, engine, cpu, true);
}

pid_t broker_child(const Broker *broker) {
	char path[64];
	FILE *file;
	int pid;

	(void)snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)broker->pid, (int)broker->pid);
	file = fopen(path, "re");
	if (!file)
		bench_die("%s: %s", path, strerror(errno));
	if (fscanf(file, "%d", &pid) != 1)
		bench_die("the supervisor has no broker");
	(void)fclose(file);
	return (pid_t)pid;
}

/* ---- what it costs ---- */

uint64_t broker_rss(const Broker *broker) {
	char path[64], line[256];
	unsigned long long kib, sum = 0;
	FILE *file;

	(void)snprintf(path, sizeof(path), "/proc/%d/status", (int)broker->pid);
	file = fopen(path, "re");
	if (!file)
		bench_die("%s: %s", path, strerror(errno));
	while (fgets(line, sizeof(line), file))
		if (sscanf(line, "RssAnon: %llu", &kib) == 1 || sscanf(line, "RssShmem: %llu", &kib) == 1)
			sum += kib;
	(void)fclose(file);
	return sum * 1024;
}

uint64_t broker_fds(const Broker *broker) {
	char path[64];
	uint64_t n = 0;
	struct dirent *entry;
	DIR *directory;

	(void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)broker->pid);
	directory = opendir(path);
	if (!directory)
		bench_die("%s: %s", path, strerror(errno));
	while ((entry = readdir(directory)))
		n += entry->d_name[0] != '.';
	(void)closedir(directory);
	return n;
}
