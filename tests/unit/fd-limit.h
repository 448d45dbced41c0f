/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * FdLimit: a shortage of fds. A child lowers our soft limit and raises it again, because valgrind only plays it to a
 * process that sets its own.
 */

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct FdLimit {
	pid_t child;
	int pipe;
} FdLimit;

/* from here on only @n_more fds can be opened */
static inline void fd_limit_begin(FdLimit *limit, unsigned n_more) {
	struct rlimit old, low;
	pid_t parent = getpid();
	int pair[2], lowest;
	char byte = 0;

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	lowest = fcntl(pair[0], F_DUPFD_CLOEXEC, 0);
	(void)close(lowest);
	limit->child = fork();
	assert_true(limit->child >= 0);
	if (!limit->child) {
		(void)close(pair[0]);
		if (prlimit(parent, RLIMIT_NOFILE, NULL, &old) < 0)
			_exit(1);
		low = old;
		/* our end of the other side is closed by then */
		low.rlim_cur = (rlim_t)lowest + n_more - 1;
		if (prlimit(parent, RLIMIT_NOFILE, &low, NULL) < 0)
			_exit(1);
		(void)send(pair[1], &byte, 1, MSG_NOSIGNAL);
		(void)recv(pair[1], &byte, 1, 0);
		_exit(prlimit(parent, RLIMIT_NOFILE, &old, NULL) < 0);
	}
	(void)close(pair[1]);
	limit->pipe = pair[0];
	assert_int_equal(recv(limit->pipe, &byte, 1, 0), 1);
}

static inline void fd_limit_end(FdLimit *limit) {
	int status;

	(void)close(limit->pipe);
	assert_int_equal(waitpid(limit->child, &status, 0), limit->child);
	assert_int_equal(status, 0);
}
