/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Supervisor: this program is executed as one, and again by that as the broker, which does what the test tells it
 * over a socket that all of them have and answers there.
 */

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fdstore.h"
#include "notify.h"
#include "supervise.h"
#include "wire/fd.h"

#define DEADLINE_MS 60000
#define NO_WATCHDOG "0"
#define LISTED_MAX 8 /* more fds than these are only counted */

/* ---- the broker of the test ---- */

static int control_of_child;

static void answer(const char *format, ...) __attribute__((__format__(__printf__, 1, 2)));
static void answer(const char *format, ...) {
	char text[512];
	va_list arguments;
	int length;

	va_start(arguments, format);
	length = vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	if (send(control_of_child, text, (size_t)length, MSG_NOSIGNAL) < 0)
		_exit(99);
}

static void on_hangup(int number) {
	(void)number;
	if (send(control_of_child, "hup", 3, MSG_NOSIGNAL) < 0)
		_exit(99);
}

static int exit_status_on_term;

static void on_term(int number) {
	(void)number;
	_exit(exit_status_on_term);
}

static ino_t inode_of(const char *path) {
	struct stat status;

	return stat(path, &status) ? 0 : status.st_ino;
}

static int make_memory(const char *content) {
	int fd = memfd_create("test", MFD_CLOEXEC);

	if (fd < 0 || write(fd, content, strlen(content)) < 0)
		_exit(98);
	return fd;
}

/* "has NAME=CONTENT ..." or "has N" */
static void answer_taken(void) {
	char text[256] = "has", content[16];
	size_t length = 3;
	NotifyFds fds;
	int r = notify_take_fds(&fds);

	if (r) {
		answer("cannot take: %s", strerror(-r));
		return;
	}
	if (fds.n > LISTED_MAX)
		length += (size_t)sprintf(text + length, " %zu", fds.n);
	for (size_t i = 0; i < fds.n && fds.n <= LISTED_MAX; ++i) {
		ssize_t n = pread(fds.items[i].fd, content, sizeof(content) - 1, 0);

		content[n < 0 ? 0 : n] = 0;
		length += (size_t)snprintf(text + length, sizeof(text) - length, " %s=%s", fds.items[i].name, content);
		if (!(fcntl(fds.items[i].fd, F_GETFD) & FD_CLOEXEC))
			length += (size_t)snprintf(text + length, sizeof(text) - length, " inheritable");
	}
	answer("%s", text);
	notify_fds_deinit(&fds);
}

static void store_many(unsigned n) {
	int fd = make_memory("x"), barrier, r = 0;
	struct pollfd poll_fd = { .events = POLLHUP };

	for (unsigned i = 0; i < n && !r; ++i) {
		while ((r = notify_store("many", &fd, 1)) == -EAGAIN)
			(void)sched_yield();
	}
	if (!r) {
		/* the supervisor may not have made room yet */
		while ((r = notify_barrier(&barrier)) == -EAGAIN)
			(void)sched_yield();
	}
	(void)close(fd);
	if (!r) {
		poll_fd.fd = barrier;
		r = poll(&poll_fd, 1, DEADLINE_MS) == 1 ? 0 : -ETIME;
		(void)close(barrier);
	}
	answer("%s", r ? strerror(-r) : "ok");
}

static void store_listener(const char *path) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) || listen(fd, 8) ||
	    notify_store(NOTIFY_OWN_LISTENER "0", &fd, 1))
		_exit(97);
	(void)close(fd);
	answer("ok");
}

static void obey(char *command) {
	static int barrier = -EBADF;
	char *word = strtok(command, " "), *first = strtok(NULL, " "), *second = strtok(NULL, " ");

	if (!strcmp(word, "pid")) {
		answer("%d", (int)getpid());
	} else if (!strcmp(word, "take")) {
		answer_taken();
	} else if (!strcmp(word, "store")) {
		int fd = make_memory(second);

		answer("%s", strerror(-notify_store(first, &fd, 1)));
		(void)close(fd);
	} else if (!strcmp(word, "store-and-die")) {
		int fd = make_memory("x");

		for (int i = 0; i < 100; ++i)
			if (notify_store("x", &fd, 1))
				_exit(96);
		(void)kill(getpid(), SIGKILL);
	} else if (!strcmp(word, "many")) {
		store_many((unsigned)atoi(first));
	} else if (!strcmp(word, "remove")) {
		answer("%s", strerror(-notify_unstore(first)));
	} else if (!strcmp(word, "listen")) {
		store_listener(first);
	} else if (!strcmp(word, "barrier")) {
		answer("%s", strerror(-notify_barrier(&barrier)));
	} else if (!strcmp(word, "passed")) {
		struct pollfd poll_fd = { .fd = barrier };

		answer(poll(&poll_fd, 1, atoi(first)) == 1 && poll_fd.revents & POLLHUP ? "yes" : "no");
	} else if (!strcmp(word, "ready")) {
		notify_ready(first);
		answer("ok");
	} else if (!strcmp(word, "ready-silently")) {
		notify_ready(NULL);
	} else if (!strcmp(word, "ready-and-stop")) {
		notify_ready(NULL);
		(void)raise(SIGSTOP);
	} else if (!strcmp(word, "status")) {
		notify_status("%s", first);
		answer("ok");
	} else if (!strcmp(word, "interval")) {
		answer("%llu", (unsigned long long)notify_watchdog_interval_ns() / 1000000);
	} else if (!strcmp(word, "program")) {
		answer("%llu", (unsigned long long)inode_of("/proc/self/exe"));
	} else if (!strcmp(word, "environment")) {
		answer("%s", getenv(first) ?: "unset");
	} else if (!strcmp(word, "on-term")) {
		exit_status_on_term = atoi(first);
		(void)signal(SIGTERM, on_term);
		(void)signal(SIGINT, on_term);
		answer("ok");
	} else if (!strcmp(word, "on-hup")) {
		(void)signal(SIGHUP, on_hangup);
		answer("ok");
	} else if (!strcmp(word, "exit")) {
		_exit(atoi(first));
	} else {
		_exit(95);
	}
}

static int broker_main(int control) {
	char text[256];
	ssize_t n;

	control_of_child = control;
	answer("started");
	do {
		n = recv(control, text, sizeof(text) - 1, 0);
		if (n > 0) {
			text[n] = 0;
			obey(text);
		}
	} while (n > 0 || (n < 0 && errno == EINTR));
	return 0;
}

/* ---- what the tests have ---- */

typedef struct Run {
	pid_t pid; /* of the supervisor */
	int control;
	int in_child; /* its number there */
	char directory[64];
	char program[96]; /* a copy of this one */
	char log[96];
	char socket[96];
} Run;

static void expect(Run *run, const char *text) {
	struct pollfd poll_fd = { .fd = run->control, .events = POLLIN };
	char got[512] = "";

	assert_int_equal(poll(&poll_fd, 1, DEADLINE_MS), 1);
	assert_true(recv(run->control, got, sizeof(got) - 1, MSG_DONTWAIT) >= 0);
	assert_string_equal(got, text);
}

static void tell(Run *run, const char *command) {
	assert_true(send(run->control, command, strlen(command), MSG_NOSIGNAL) > 0);
}

static void ask(Run *run, const char *command, const char *text) {
	tell(run, command);
	expect(run, text);
}

static unsigned long long ask_number(Run *run, const char *command) {
	struct pollfd poll_fd = { .fd = run->control, .events = POLLIN };
	char got[64] = "";

	tell(run, command);
	assert_int_equal(poll(&poll_fd, 1, DEADLINE_MS), 1);
	assert_true(recv(run->control, got, sizeof(got) - 1, MSG_DONTWAIT) > 0);
	return strtoull(got, NULL, 10);
}

static bool log_has(Run *run, const char *text) {
	static char got[65536];
	int fd = open(run->log, O_RDONLY | O_CLOEXEC);
	ssize_t n = read(fd, got, sizeof(got) - 1);

	(void)close(fd);
	got[n < 0 ? 0 : n] = 0;
	return strstr(got, text);
}

static uint64_t now_ms(void) {
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void expect_log(Run *run, const char *text) {
	uint64_t end = now_ms() + DEADLINE_MS;

	while (!log_has(run, text)) {
		assert_true(now_ms() < end);
		(void)poll(NULL, 0, 5);
	}
}

static void copy_program(const char *path) {
	int from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC), to;
	char buffer[65536];
	ssize_t n;

	to = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
	assert_true(from >= 0 && to >= 0);
	while ((n = read(from, buffer, sizeof(buffer))) > 0)
		assert_int_equal(write(to, buffer, (size_t)n), n);
	assert_int_equal(n, 0);
	(void)close(from);
	(void)close(to);
}

/* what stands between fork and exec, or NULL */
static void run_start(Run *run, const char *watchdog_ms, void (*prepare)(void)) {
	int ends[2];
	char number[16];

	*run = (Run){ .directory = "/tmp/shmb-supervise-XXXXXX" };
	assert_non_null(mkdtemp(run->directory));
	(void)snprintf(run->program, sizeof(run->program), "%s/program", run->directory);
	(void)snprintf(run->log, sizeof(run->log), "%s/log", run->directory);
	(void)snprintf(run->socket, sizeof(run->socket), "%s/socket", run->directory);
	copy_program(run->program);
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
	assert_int_equal(fcntl(ends[0], F_SETFD, FD_CLOEXEC), 0);
	run->control = ends[0];
	(void)snprintf(number, sizeof(number), "%d", ends[1]);
	run->pid = fork();
	assert_true(run->pid >= 0);
	if (!run->pid) {
		int log = open(run->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (log < 0 || dup2(log, STDERR_FILENO) < 0)
			_exit(94);
		if (prepare)
			prepare();
		(void)execl(run->program, run->program, "--supervise", watchdog_ms, number, NULL);
		_exit(93);
	}
	(void)close(ends[1]);
}

static int run_wait(Run *run) {
	uint64_t end = now_ms() + DEADLINE_MS;
	int status;
	pid_t pid;

	while (!(pid = waitpid(run->pid, &status, WNOHANG))) {
		assert_true(now_ms() < end);
		(void)poll(NULL, 0, 5);
	}
	assert_int_equal(pid, run->pid);
	run->pid = 0;
	return status;
}

/* nobody has the other end of the control socket: none of the processes is left */
static void expect_nobody(Run *run) {
	struct pollfd poll_fd = { .fd = run->control, .events = POLLIN };
	uint64_t end = now_ms() + DEADLINE_MS;
	char text[64];

	while (!(poll(&poll_fd, 1, DEADLINE_MS) == 1 && recv(run->control, text, sizeof(text), MSG_DONTWAIT) == 0))
		assert_true(now_ms() < end);
}

static void run_clean(Run *run) {
	(void)close(run->control);
	(void)unlink(run->program);
	(void)unlink(run->log);
	assert_int_equal(rmdir(run->directory), 0);
}

/* SIGTERM, and @status */
static void run_end(Run *run, int status) {
	int got;

	assert_int_equal(kill(run->pid, SIGTERM), 0);
	got = run_wait(run);
	assert_true(WIFEXITED(got));
	assert_int_equal(WEXITSTATUS(got), status);
	expect_nobody(run);
	run_clean(run);
}

static void kill_broker(Run *run) {
	pid_t pid = (pid_t)ask_number(run, "pid");

	assert_true(pid > 1 && pid != run->pid);
	assert_int_equal(kill(pid, SIGKILL), 0);
	expect(run, "started");
}

/* ---- tests ---- */

static void test_what_is_stored_comes_back(void **state) {
	Run run;

	(void)state;
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	ask(&run, "take", "has");
	ask(&run, "store a 1", "Success");
	ask(&run, "store b 2", "Success");
	ask(&run, "store a 3", "Success");
	kill_broker(&run);
	ask(&run, "take", "has a=1 b=2 a=3");
	/* what was handed over is kept on */
	kill_broker(&run);
	ask(&run, "take", "has a=1 b=2 a=3");
	ask(&run, "remove a", "Success");
	ask(&run, "remove unknown", "Success");
	ask(&run, "store c 4", "Success");
	kill_broker(&run);
	/* one that dies before it took them loses none */
	kill_broker(&run);
	ask(&run, "take", "has b=2 c=4");
	expect_log(&run, "signal 9");
	run_end(&run, 0);
}

static void test_nothing_that_was_sent_is_lost(void **state) {
	Run run;

	(void)state;
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	ask(&run, "take", "has");
	tell(&run, "store-and-die");
	expect(&run, "started");
	ask(&run, "take", "has 100");
	run_end(&run, 0);
}

static void test_barrier(void **state) {
	Run run;
	int status;

	(void)state;
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	ask(&run, "take", "has");
	assert_int_equal(kill(run.pid, SIGSTOP), 0);
	assert_int_equal(waitpid(run.pid, &status, WUNTRACED), run.pid);
	ask(&run, "store a 1", "Success");
	ask(&run, "barrier", "Success");
	ask(&run, "passed 0", "no");
	assert_int_equal(kill(run.pid, SIGCONT), 0);
	ask(&run, "passed 20000", "yes");
	run_end(&run, 0);
}

/* also more than the socketpair has room for at once */
static void test_limit(void **state) {
	struct rlimit limit;
	char text[32];
	Run run;

	(void)state;
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
	if (limit.rlim_max < FDSTORE_MAX + 64)
		skip();
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	ask(&run, "take", "has");
	ask(&run, "store first 1", "Success");
	(void)snprintf(text, sizeof(text), "many %d", FDSTORE_MAX + 10);
	ask(&run, text, "ok");
	expect_log(&run, "was not kept");
	kill_broker(&run);
	(void)snprintf(text, sizeof(text), "has %d", FDSTORE_MAX);
	ask(&run, "take", text);
	/* there is room again */
	ask(&run, "remove many", "Success");
	ask(&run, "store last 2", "Success");
	kill_broker(&run);
	ask(&run, "take", "has first=1 last=2");
	run_end(&run, 0);
}

static void test_no_fd_leaks(void **state) {
	size_t n[2] = {};
	char path[64];
	Run run;

	(void)state;
	/* the supervisor is not dumpable */
	if (geteuid())
		skip();
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	(void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)run.pid);
	for (int i = 0; i < 2; ++i) {
		for (int k = 0; k < 3; ++k) {
			ask(&run, "take", k ? "has a=1" : "has");
			if (!k)
				ask(&run, "store a 1", "Success");
			kill_broker(&run);
		}
		ask(&run, "take", "has a=1");
		ask(&run, "remove a", "Success");
		ask(&run, "barrier", "Success");
		ask(&run, "passed 20000", "yes");
		for (int fd = 0; fd < 256; ++fd) {
			char link[96], target[256];

			(void)snprintf(link, sizeof(link), "%s/%d", path, fd);
			n[i] += readlink(link, target, sizeof(target)) > 0;
		}
		kill_broker(&run);
	}
	assert_true(n[0] > 0);
	assert_int_equal(n[0], n[1]);
	run_end(&run, 0);
}

static void test_reexec(void **state) {
	unsigned long long old, fresh;
	char path[128];
	Run run;

	(void)state;
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	ask(&run, "take", "has");
	ask(&run, "store a 1", "Success");
	ask(&run, "store b 2", "Success");
	old = ask_number(&run, "program");
	assert_int_equal(old, inode_of(run.program));

	(void)snprintf(path, sizeof(path), "%s.new", run.program);
	copy_program(path);
	assert_int_equal(rename(path, run.program), 0);
	fresh = inode_of(run.program);
	assert_int_not_equal(fresh, old);
	/* nobody asked for the new one */
	kill_broker(&run);
	assert_int_equal(ask_number(&run, "program"), old);
	ask(&run, "take", "has a=1 b=2");

	assert_int_equal(kill(run.pid, SIGUSR2), 0);
	expect(&run, "started");
	assert_int_equal(ask_number(&run, "program"), fresh);
	ask(&run, "environment SHMBROKER_SUPERVISOR_STORE", "unset");
	ask(&run, "take", "has a=1 b=2");
	ask(&run, "store c 3", "Success");
	kill_broker(&run);
	ask(&run, "take", "has a=1 b=2 c=3");
	/* and once more */
	assert_int_equal(kill(run.pid, SIGUSR2), 0);
	expect(&run, "started");
	ask(&run, "take", "has a=1 b=2 c=3");
	/* of a later one status 78 does not end it */
	tell(&run, "exit 78");
	expect(&run, "started");
	run_end(&run, 0);
}

static void test_reexec_of_nonsense(void **state) {
	unsigned long long pid;
	char path[128];
	int fd;
	Run run;

	(void)state;
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	ask(&run, "take", "has");
	ask(&run, "store a 1", "Success");
	pid = ask_number(&run, "pid");
	(void)snprintf(path, sizeof(path), "%s.new", run.program);
	fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0700);
	assert_int_equal(write(fd, "nonsense", 8), 8);
	(void)close(fd);
	assert_int_equal(rename(path, run.program), 0);
	assert_int_equal(kill(run.pid, SIGUSR2), 0);
	expect_log(&run, "is not executed");
	assert_int_equal(ask_number(&run, "pid"), pid);
	/* nor is one that is not there */
	assert_int_equal(unlink(run.program), 0);
	assert_int_equal(kill(run.pid, SIGUSR2), 0);
	expect_log(&run, "No such file");
	assert_int_equal(ask_number(&run, "pid"), pid);
	kill_broker(&run);
	ask(&run, "take", "has a=1");
	run_end(&run, 0);
}

/* the first one's error is the supervisor's end: nothing is kept yet, and whoever started both learns of it */
static void expect_first_error(int error) {
	char command[16];
	int status;
	Run run;

	(void)snprintf(command, sizeof(command), "exit %d", error);
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	tell(&run, command);
	status = run_wait(&run);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), error);
	expect_nobody(&run);
	run_clean(&run);
}

static void test_first_start(void **state) {
	Run run;

	(void)state;
	expect_first_error(78);
	expect_first_error(1);

	/* once one was ready, another that is not is no reason to lose everything */
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	ask(&run, "take", "has");
	ask(&run, "ready yes", "ok");
	tell(&run, "exit 78");
	expect(&run, "started");
	run_end(&run, 0);
	/* any other end is none for a first one either */
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	tell(&run, "exit 0");
	expect(&run, "started");
	kill_broker(&run);
	run_end(&run, 0);
}

static void test_exit_status(void **state) {
	Run run;

	(void)state;
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	ask(&run, "on-term 7", "ok");
	run_end(&run, 7);
}

static void test_hangup(void **state) {
	Run run;

	(void)state;
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	/* one that is not ready would die of it */
	assert_int_equal(kill(run.pid, SIGHUP), 0);
	ask(&run, "take", "has");
	ask(&run, "on-hup", "ok");
	tell(&run, "ready-silently");
	expect(&run, "hup");
	assert_int_equal(kill(run.pid, SIGHUP), 0);
	expect(&run, "hup");
	run_end(&run, 0);
}

static void test_watchdog(void **state) {
	Run run;

	(void)state;
	run_start(&run, "200", NULL);
	expect(&run, "started");
	assert_int_equal(ask_number(&run, "interval"), 100);
	ask(&run, "take", "has");
	ask(&run, "store a 1", "Success");
	/* from then on it may be killed at any moment, an answer would not be sure to come */
	tell(&run, "ready-silently");
	expect(&run, "started");
	expect_log(&run, "no sign of life");
	expect_log(&run, "signal 6");
	ask(&run, "take", "has a=1");
	/* one that does not take the hint */
	tell(&run, "ready-and-stop");
	expect(&run, "started");
	expect_log(&run, "SIGKILL");
	ask(&run, "take", "has a=1");
	run_end(&run, 0);
}

static void test_death_of_the_supervisor(void **state) {
	Run run;
	int status;

	(void)state;
	run_start(&run, NO_WATCHDOG, NULL);
	expect(&run, "started");
	ask(&run, "take", "has");
	assert_int_equal(kill(run.pid, SIGKILL), 0);
	status = run_wait(&run);
	assert_true(WIFSIGNALED(status));
	expect_nobody(&run);
	run_clean(&run);
}

/* a socket that the broker made is not left behind, one of somebody else is */
static void test_sockets_are_removed(void **state) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char command[128];
	Run run;
	int fd;

	(void)state;
	for (int taken = 0; taken < 2; ++taken) {
		run_start(&run, NO_WATCHDOG, NULL);
		expect(&run, "started");
		ask(&run, "take", "has");
		(void)snprintf(command, sizeof(command), "listen %s", run.socket);
		ask(&run, command, "ok");
		assert_true(inode_of(run.socket));
		fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
		if (taken) {
			assert_int_equal(unlink(run.socket), 0);
			(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", run.socket);
			assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
			assert_int_equal(listen(fd, 8), 0);
		}
		assert_int_equal(kill(run.pid, SIGTERM), 0);
		assert_int_equal(run_wait(&run), 0);
		assert_int_equal(!!inode_of(run.socket), taken);
		(void)unlink(run.socket);
		(void)close(fd);
		run_clean(&run);
	}
}

/* ---- under a service manager ---- */

static int manager = -EBADF;
static char manager_path[64];

static void under_manager(void) {
	if (setenv("NOTIFY_SOCKET", manager_path, 1))
		_exit(92);
}

static void expect_told(const char *text) {
	struct pollfd poll_fd = { .fd = manager, .events = POLLIN };
	char got[256] = "";

	assert_int_equal(poll(&poll_fd, 1, DEADLINE_MS), 1);
	assert_true(recv(manager, got, sizeof(got) - 1, MSG_DONTWAIT) > 0);
	assert_string_equal(got, text);
}

static void test_under_a_service_manager(void **state) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	socklen_t size;
	Run run;

	(void)state;
	manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)snprintf(manager_path, sizeof(manager_path),
										     "@shmbroker-test-supervise-%d",
										     (int)getpid()));
	memcpy(address.sun_path + 1, manager_path + 1, strlen(manager_path) - 1);
	assert_int_equal(bind(manager, (struct sockaddr *)&address, size), 0);
	run_start(&run, NO_WATCHDOG, under_manager);
	expect(&run, "started");
	ask(&run, "environment NOTIFY_SOCKET", "unset");
	ask(&run, "take", "has");
	ask(&run, "ready yes", "ok");
	expect_told("READY=1\nSTATUS=yes");
	ask(&run, "status well", "ok");
	expect_told("STATUS=well");
	run_end(&run, 0);
	expect_told("STOPPING=1");
	(void)close(manager);
}

#if WITH_MANAGER

/* as fd 3: something with a name */
static void with_listen_fds(void) {
	char number[16];
	int fd = make_memory("1");

	/* the number of the control socket is in the arguments, and must not be this one */
	if (fcntl(3, F_GETFD) >= 0 && fcntl(3, F_GETFD) != FD_CLOEXEC)
		_exit(91);
	if (dup2(fd, 3) < 0)
		_exit(92);
	(void)snprintf(number, sizeof(number), "%d", (int)getpid());
	(void)setenv("LISTEN_PID", number, 1);
	(void)setenv("LISTEN_FDS", "1", 1);
	(void)setenv("LISTEN_FDNAMES", "control", 1);
}

static void test_sockets_of_a_service_manager(void **state) {
	int three = open("/dev/null", O_RDONLY | O_CLOEXEC);
	Run run;

	(void)state;
	while (three >= 0 && three < 3)
		three = fcntl(three, F_DUPFD_CLOEXEC, 3);
	run_start(&run, NO_WATCHDOG, with_listen_fds);
	expect(&run, "started");
	ask(&run, "take", "has control=1");
	kill_broker(&run);
	ask(&run, "take", "has control=1");
	assert_int_equal(kill(run.pid, SIGUSR2), 0);
	expect(&run, "started");
	ask(&run, "take", "has control=1");
	run_end(&run, 0);
	(void)close(three);
}

#endif

int main(int argc, char **argv) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_what_is_stored_comes_back),
		cmocka_unit_test(test_nothing_that_was_sent_is_lost),
		cmocka_unit_test(test_barrier),
		cmocka_unit_test(test_limit),
		cmocka_unit_test(test_no_fd_leaks),
		cmocka_unit_test(test_reexec),
		cmocka_unit_test(test_reexec_of_nonsense),
		cmocka_unit_test(test_first_start),
		cmocka_unit_test(test_exit_status),
		cmocka_unit_test(test_hangup),
		cmocka_unit_test(test_watchdog),
		cmocka_unit_test(test_death_of_the_supervisor),
		cmocka_unit_test(test_sockets_are_removed),
		cmocka_unit_test(test_under_a_service_manager),
#if WITH_MANAGER
		cmocka_unit_test(test_sockets_of_a_service_manager),
#endif
	};

	if (argc > 3 && !strcmp(argv[1], "--supervise")) {
		Options options = { .supervise = argv[1], .watchdog_ns = strtoull(argv[2], NULL, 10) * 1000000 };

		return supervisor_run(&options, argc, argv);
	}
	if (argc > 1 && !strcmp(argv[1], "--check-config"))
		return 0;
	if (argc > 2)
		return broker_main(atoi(argv[2]));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
