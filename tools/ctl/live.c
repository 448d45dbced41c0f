/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "live.h"

static int stop_fd = -1;
static volatile sig_atomic_t n_signals;

static void on_signal(int number) {
	uint64_t one = 1;
	int saved = errno;

	if (n_signals++)
		_exit(128 + number);
	if (write(stop_fd, &one, sizeof(one)) < 0)
		_exit(128 + number);
	errno = saved;
}

int live_init(void) {
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };

	stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (stop_fd < 0)
		return -errno;
	if (sigaction(SIGINT, &action, NULL) < 0 || sigaction(SIGTERM, &action, NULL) < 0)
		return -errno;
	return 0;
}

uint64_t live_now_ns(void) {
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

bool live_stopped(void) {
	return n_signals > 0;
}

int live_wait(int fd, int timeout) {
	struct pollfd fds[] = { { .fd = stop_fd, .events = POLLIN }, { .fd = fd, .events = POLLIN } };
	uint64_t end = live_now_ns() + (uint64_t)(timeout > 0 ? timeout : 0) * 1000000;

	for (;;) {
		int r = poll(fds, 2, timeout);

		if (r < 0 && errno != EINTR)
			return -errno;
		if (live_stopped())
			return LIVE_STOP;
		if (r > 0)
			return LIVE_READABLE;
		if (r == 0)
			return LIVE_TIME;
		if (timeout > 0) {
			uint64_t now = live_now_ns();

			timeout = now < end ? (int)((end - now + 999999) / 1000000) : 0;
		}
	}
}
