/* SPDX-License-Identifier: Apache-2.0 */

/* Notify: what the service manager gets, and the sockets that are taken over from it. */

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "notify.h"

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

/* in a child, because the sockets are numbers 3 and 4: what notify_listen_fds() says for two of these */
static int take_over(int first_type, int second_type, int backlog) {
	int status;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (!pid) {
		struct sockaddr_un address = { .sun_family = AF_UNIX };
		int types[] = { first_type, second_type }, *fds = NULL, r;
		char text[32];
		size_t n = 0;

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
		(void)setenv("LISTEN_FDNAMES", "control:control", 1);
		r = notify_listen_fds(&fds, &n);
		if (r) {
			/* then none is left open */
			_exit(r == -EINVAL && fcntl(3, F_GETFD) < 0 && fcntl(4, F_GETFD) < 0 ? 1 : 102);
		}
		if (n != 2 || fds[0] != 3 || fds[1] != 4 || !(fcntl(3, F_GETFD) & FD_CLOEXEC) ||
		    !(fcntl(4, F_GETFL) & O_NONBLOCK) || getenv("LISTEN_FDS"))
			_exit(103);
		free(fds);
		/* once */
		_exit(notify_listen_fds(&fds, &n) || n ? 104 : 0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static void test_listen_fds(void **state) {
	int *fds;
	size_t n = 1;

	(void)state;
	assert_int_equal(take_over(SOCK_SEQPACKET, SOCK_SEQPACKET, 8), 0);
	assert_int_equal(take_over(SOCK_SEQPACKET, SOCK_STREAM, 8), 1);
	assert_int_equal(take_over(SOCK_DGRAM, SOCK_SEQPACKET, 8), 1);
	/* bound, but nobody listens */
	assert_int_equal(take_over(SOCK_SEQPACKET, SOCK_SEQPACKET, 0), 1);

	(void)unsetenv("LISTEN_FDS");
	assert_int_equal(notify_listen_fds(&fds, &n), 0);
	assert_int_equal(n, 0);
	free(fds);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_messages),
		cmocka_unit_test(test_busy_manager),
		cmocka_unit_test(test_watchdog),
		cmocka_unit_test(test_listen_fds),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
