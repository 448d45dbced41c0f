/* SPDX-License-Identifier: Apache-2.0 */

/* Notify: what a service manager or a supervisor gets, and the fds that are taken over from it. */

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fd-limit.h"
#include "notify.h"
#include "wire/fd.h"

/* the manager's socket; an abstract one leaves nothing behind */
static int manager_new(void) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), n;
	char path[64];

	assert_true(fd >= 0);
	n = snprintf(path, sizeof(path), "@shmbroker-test-notify-%d", (int)getpid());
	memcpy(address.sun_path + 1, path + 1, (size_t)n - 1);
	assert_int_equal(
		bind(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)n)),
		0);
	assert_int_equal(setenv("NOTIFY_SOCKET", path, 1), 0);
	return fd;
}

static void expect(int fd, const char *text) {
	char got[1024] = "";
	ssize_t r = recv(fd, got, sizeof(got) - 1, 0);

	assert_true(r > 0);
	assert_string_equal(got, text);
}

static void test_messages(void **state) {
	int fd = manager_new();
	char text[1024] = "";

	(void)state;
	notify_ready("serves");
	expect(fd, "READY=1\nSTATUS=serves");
	notify_ready(NULL);
	expect(fd, "READY=1");
	notify_status("%d regions\nFDSTORE=1", 3);
	expect(fd, "STATUS=3 regions FDSTORE=1");
	notify_stopping();
	expect(fd, "STOPPING=1");
	notify_watchdog();
	expect(fd, "WATCHDOG=1");
	notify_reloading();
	assert_true(recv(fd, text, sizeof(text) - 1, 0) > 0);
	assert_int_equal(strncmp(text, "RELOADING=1\nMONOTONIC_USEC=", 27), 0);
	assert_true(strtoull(text + 27, NULL, 10) > 0);
	(void)close(fd);
}

/* a manager that does not read: this would hang if sending waited */
static void test_busy_manager(void **state) {
	int fd = manager_new();
	char text[64];
	size_t n = 0;

	(void)state;
	for (int i = 0; i < 100000; ++i)
		notify_status("%d", i);
	while (recv(fd, text, sizeof(text), 0) > 0)
		n++;
	assert_in_range(n, 1, 99999);
	(void)close(fd);
	/* one that is gone, none, and nonsense */
	notify_ready("x");
	(void)unsetenv("NOTIFY_SOCKET");
	notify_ready("x");
	(void)setenv("NOTIFY_SOCKET", "nonsense", 1);
	notify_ready("x");
	(void)unsetenv("NOTIFY_SOCKET");
}

static void test_watchdog(void **state) {
	char pid[32];

	(void)state;
	(void)unsetenv("WATCHDOG_USEC");
	(void)unsetenv("WATCHDOG_PID");
	assert_int_equal(notify_watchdog_interval_ns(), 0);
	(void)setenv("WATCHDOG_USEC", "10000000", 1);
	assert_int_equal(notify_watchdog_interval_ns(), UINT64_C(5000000000));
	/* meant for another process */
	(void)snprintf(pid, sizeof(pid), "%d", (int)getppid());
	(void)setenv("WATCHDOG_PID", pid, 1);
	assert_int_equal(notify_watchdog_interval_ns(), 0);
	(void)unsetenv("WATCHDOG_USEC");
	(void)unsetenv("WATCHDOG_PID");
}

#if WITH_MANAGER

/* in a child, because the fds are numbers 3 and 4: what notify_take_fds() makes of two sockets of these types */
static void take_over(int first_type, int second_type, int backlog) {
	int status;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (!pid) {
		struct sockaddr_un address = { .sun_family = AF_UNIX };
		int types[] = { first_type, second_type };
		NotifyFds fds = {};
		char text[32];

		for (int i = 0; i < 2; ++i) {
			int fd = socket(AF_UNIX, types[i], 0);

			if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(sa_family_t)) ||
			    (types[i] != SOCK_DGRAM && backlog && listen(fd, backlog)) || fcntl(fd, F_DUPFD, 100) < 0)
				_exit(100);
			(void)close(fd);
		}
		if (dup2(100, 3) < 0 || dup2(101, 4) < 0)
			_exit(101);
		(void)snprintf(text, sizeof(text), "%d", (int)getpid());
		(void)setenv("LISTEN_PID", text, 1);
		(void)setenv("LISTEN_FDS", "2", 1);
		(void)setenv("LISTEN_FDNAMES", "control:shmb-registry", 1);
		if (notify_take_fds(&fds) || fds.n != 2 || getenv("LISTEN_FDS"))
			_exit(102);
		for (int i = 0; i < 2; ++i) {
			bool listens = types[i] == SOCK_SEQPACKET && backlog;

			if (fds.items[i].fd != 3 + i || !(fcntl(3 + i, F_GETFD) & FD_CLOEXEC) ||
			    notify_is_listener(3 + i) != listens || !!(fcntl(3 + i, F_GETFL) & O_NONBLOCK) != listens)
				_exit(103 + i);
		}
		if (strcmp(fds.items[0].name, "control") || strcmp(fds.items[1].name, "shmb-registry"))
			_exit(105);
		notify_fds_deinit(&fds);
		if (fcntl(3, F_GETFD) >= 0 || fcntl(4, F_GETFD) >= 0)
			_exit(106);
		/* once */
		_exit(notify_take_fds(&fds) || fds.n ? 107 : 0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_fds_of_a_manager(void **state) {
	NotifyFds fds = { .n = 1 };

	(void)state;
	take_over(SOCK_SEQPACKET, SOCK_SEQPACKET, 8);
	take_over(SOCK_SEQPACKET, SOCK_STREAM, 8);
	take_over(SOCK_DGRAM, SOCK_SEQPACKET, 8);
	/* bound, but nobody listens */
	take_over(SOCK_SEQPACKET, SOCK_SEQPACKET, 0);

	(void)unsetenv("LISTEN_FDS");
	assert_int_equal(notify_take_fds(&fds), 0);
	assert_int_equal(fds.n, 0);
}

#endif

/* one message and how many fds came with it; closes all but one */
static size_t receive(int socket, char *text, size_t size, int *ret_fd) {
	int fds[WIRE_FDS_ROOM];
	FdMessage message;

	assert_int_equal(fd_receive(socket, text, size - 1, MSG_DONTWAIT, fds, &message), 0);
	text[message.size] = 0;
	*ret_fd = message.n_fds ? fds[0] : -EBADF;
	for (size_t i = 1; i < message.n_fds; ++i)
		(void)close(fds[i]);
	return message.n_fds;
}

static ino_t inode(int fd) {
	struct stat status;

	assert_int_equal(fstat(fd, &status), 0);
	return status.st_ino;
}

static bool has_hung_up(int fd) {
	struct pollfd poll_fd = { .fd = fd };

	return poll(&poll_fd, 1, 0) == 1 && poll_fd.revents & POLLHUP;
}

/* what both kinds of holder get to see */
static void check_store(int holder) {
	int fds[2] = { memfd_create("a", MFD_CLOEXEC), memfd_create("b", MFD_CLOEXEC) }, got, barrier;
	char text[256], name[NOTIFY_NAME_MAX + 2];

	assert_true(notify_has_store());
	assert_int_equal(notify_store("shmb-registry", fds, 2), 0);
	assert_int_equal(receive(holder, text, sizeof(text), &got), 2);
	assert_string_equal(text, "FDSTORE=1\nFDPOLL=0\nFDNAME=shmb-registry");
	assert_int_equal(inode(got), inode(fds[0]));
	(void)close(got);
	assert_int_equal(notify_unstore("shmb-registry"), 0);
	assert_int_equal(receive(holder, text, sizeof(text), &got), 0);
	assert_string_equal(text, "FDSTOREREMOVE=1\nFDNAME=shmb-registry");

	assert_int_equal(notify_barrier(&barrier), 0);
	assert_false(has_hung_up(barrier));
	assert_int_equal(receive(holder, text, sizeof(text), &got), 1);
	assert_string_equal(text, "BARRIER=1");
	assert_false(has_hung_up(barrier));
	(void)close(got);
	assert_true(has_hung_up(barrier));
	(void)close(barrier);

	memset(name, 'n', sizeof(name));
	name[NOTIFY_NAME_MAX + 1] = 0;
	assert_int_equal(notify_store(name, fds, 1), -EINVAL);
	assert_int_equal(notify_store("", fds, 1), -EINVAL);
	assert_int_equal(notify_store("a:b", fds, 1), -EINVAL);
	assert_int_equal(notify_store("a\nb", fds, 1), -EINVAL);
	assert_int_equal(notify_unstore("a\nb"), -EINVAL);
	assert_int_equal(notify_store("a", fds, 0), -EINVAL);
	assert_int_equal(notify_store("a", fds, WIRE_FDS_ROOM + 1), -EINVAL);
	name[NOTIFY_NAME_MAX] = 0;
	assert_int_equal(notify_store(name, fds, 1), 0);

	/* a holder that does not read makes nobody wait */
	for (int i = 0; i < 100000 && !notify_store(name, fds, 1); ++i)
		;
	assert_int_equal(notify_store(name, fds, 1), -EAGAIN);
	assert_int_equal(notify_unstore(name), -EAGAIN);
	assert_int_equal(notify_barrier(&barrier), -EAGAIN);
	(void)close(fds[0]);
	(void)close(fds[1]);
}

static void test_store_of_a_manager(void **state) {
	int fd = manager_new();

	(void)state;
	/* one that is older than 254 does not say whether it keeps fds */
	assert_false(notify_has_store());
	(void)setenv("FDSTORE", "0", 1);
	assert_false(notify_has_store());
	(void)unsetenv("FDSTORE");
	(void)setenv("SHMBROKER_FDSTORE", "1", 1);
	assert_true(notify_has_store());
	(void)setenv("FDSTORE", "0", 1);
	assert_false(notify_has_store());
	(void)setenv("FDSTORE", "4096", 1);
	check_store(fd);
	(void)unsetenv("FDSTORE");
	(void)unsetenv("SHMBROKER_FDSTORE");
	(void)unsetenv("NOTIFY_SOCKET");
	(void)close(fd);
	assert_false(notify_has_store());
	assert_int_equal(notify_store("a", &fd, 1), -ENOENT);
	assert_int_equal(notify_unstore("a"), -ENOENT);
	assert_int_equal(notify_barrier(&fd), -ENOENT);
}

/*
 * Runs @function in a child that is told of @pid (0: this process) as its supervisor, with both ends of the
 * socketpair. Returns what the child exits with; a failed assertion is none of the values that tests return.
 */
static int supervised(int pid, int (*function)(int holder, int own)) {
	int ends[2], status;
	char text[32];
	pid_t child;

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
	(void)snprintf(text, sizeof(text), "%d", pid ?: (int)getpid());
	(void)setenv("SHMBROKER_SUPERVISOR_PID", text, 1);
	(void)snprintf(text, sizeof(text), "%d", ends[1]);
	(void)setenv("SHMBROKER_SUPERVISOR_FD", text, 1);
	child = fork();
	assert_true(child >= 0);
	if (!child)
		_exit(function(ends[0], ends[1]));
	(void)unsetenv("SHMBROKER_SUPERVISOR_PID");
	(void)unsetenv("SHMBROKER_SUPERVISOR_FD");
	(void)close(ends[0]);
	(void)close(ends[1]);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static int store_supervised(int holder, int own) {
	(void)setenv("NOTIFY_SOCKET", "@nobody", 1);
	check_store(holder);
	return fcntl(own, F_GETFD) == FD_CLOEXEC && !getenv("SHMBROKER_SUPERVISOR_FD") &&
			       !getenv("SHMBROKER_SUPERVISOR_PID")
		       ? 42
		       : 1;
}

static int say_supervised(int holder, int own) {
	(void)own;
	notify_ready("serves");
	expect(holder, "READY=1\nSTATUS=serves");
	notify_watchdog();
	expect(holder, "WATCHDOG=1");
	return 42;
}

static int is_not_supervised(int holder, int own) {
	NotifyFds fds;

	(void)holder;
	(void)own;
	return !notify_has_store() && notify_store("a", &own, 1) == -ENOENT && !notify_take_fds(&fds) && !fds.n ? 42
														: 1;
}

static int take_supervised(int holder, int own) {
	int sent[] = { memfd_create("a", 0), memfd_create("b", 0) };
	NotifyFds fds;

	(void)own;
	assert_int_equal(fd_send(holder, "FDNAME=shmb-registry\n", 21, &sent[0], 1, 0), 0);
	assert_int_equal(fd_send(holder, "FDNAME=\n", 8, &sent[1], 1, 0), 0);
	assert_int_equal(fd_send(holder, NOTIFY_END, sizeof(NOTIFY_END) - 1, NULL, 0, 0), 0);
	assert_int_equal(notify_take_fds(&fds), 0);
	assert_int_equal(fds.n, 2);
	assert_string_equal(fds.items[0].name, "shmb-registry");
	assert_string_equal(fds.items[1].name, "");
	for (int i = 0; i < 2; ++i) {
		assert_int_equal(inode(fds.items[i].fd), inode(sent[i]));
		assert_int_equal(fcntl(fds.items[i].fd, F_GETFD), FD_CLOEXEC);
	}
	notify_fds_deinit(&fds);
	/* once, and without waiting */
	assert_int_equal(notify_take_fds(&fds), 0);
	assert_int_equal(fds.n, 0);
	return 42;
}

static int take_from_the_dead(int holder, int own) {
	NotifyFds fds;
	int fd = memfd_create("a", 0);

	(void)own;
	assert_int_equal(fd_send(holder, "FDNAME=shmb-registry\n", 21, &fd, 1, 0), 0);
	(void)close(holder);
	return notify_take_fds(&fds) == -ECONNRESET ? 42 : 1;
}

/* an fd that cannot be received must not be missed in silence */
static int take_with_no_room(int holder, int own) {
	int fd = memfd_create("a", 0), r;
	FdLimit limit;
	NotifyFds fds;

	(void)own;
	assert_int_equal(fd_send(holder, "FDNAME=shmb-registry\n", 21, &fd, 1, 0), 0);
	assert_int_equal(fd_send(holder, NOTIFY_END, sizeof(NOTIFY_END) - 1, NULL, 0, 0), 0);
	fd_limit_begin(&limit, 0);
	r = notify_take_fds(&fds);
	fd_limit_end(&limit);
	return r == -EMFILE ? 42 : 1;
}

static void test_supervisor(void **state) {
	(void)state;
	assert_int_equal(supervised(0, store_supervised), 42);
	assert_int_equal(supervised(0, say_supervised), 42);
	assert_int_equal(supervised(0, take_supervised), 42);
	assert_int_equal(supervised(0, take_from_the_dead), 42);
	assert_int_equal(supervised(0, take_with_no_room), 42);
	/* the environment of another process, for instance of the child's child */
	assert_int_equal(supervised(1, is_not_supervised), 42);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_messages),
		cmocka_unit_test(test_busy_manager),
		cmocka_unit_test(test_watchdog),
#if WITH_MANAGER
		cmocka_unit_test(test_fds_of_a_manager),
#endif
		cmocka_unit_test(test_store_of_a_manager),
		cmocka_unit_test(test_supervisor),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
