/* SPDX-License-Identifier: Apache-2.0 */

#include "notify.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

#include "wire/fd.h"

#define STATUS_MAX 512

/*
 * sd_notify() waits while the manager's queue is full, and PID 1 can be busy for seconds; the same datagram is sent
 * here without waiting.
 */
static int notify_connect(void) {
	_cleanup_(closep) int fd = -EBADF;
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const char *path = getenv("NOTIFY_SOCKET");
	size_t length = path ? strlen(path) : 0;

	if (length < 2 || length >= sizeof(address.sun_path) || (path[0] != '/' && path[0] != '@'))
		return -ENOENT;
	memcpy(address.sun_path, path, length);
	if (path[0] == '@')
		address.sun_path[0] = 0;
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 ||
	    connect(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length)))
		return -errno;
	return steal_fd(&fd);
}

static void notify_send(const char *text, int timeout_ms) {
	_cleanup_(closep) int fd = notify_connect();
	struct pollfd poll_fd = { .fd = fd, .events = POLLOUT };

	if (fd < 0)
		return;
	if (timeout_ms)
		(void)poll(&poll_fd, 1, timeout_ms);
	(void)send(fd, text, strlen(text), MSG_NOSIGNAL);
}

/* a newline would begin another assignment */
static void copy_status(char *buffer, size_t size, const char *text) {
	(void)snprintf(buffer, size, "%s", text);
	for (char *p = buffer; *p; ++p)
		*p = *p == '\n' ? ' ' : *p;
}

void notify_ready(const char *status) {
	char line[STATUS_MAX] = "", text[STATUS_MAX + 32];

	if (status)
		copy_status(line, sizeof(line), status);
	(void)snprintf(text, sizeof(text), "READY=1%s%s", status ? "\nSTATUS=" : "", line);
	notify_send(text, NOTIFY_READY_MS);
}

void notify_status(const char *format, ...) {
	char formatted[STATUS_MAX], line[STATUS_MAX], text[STATUS_MAX + 32];
	va_list arguments;

	va_start(arguments, format);
	(void)vsnprintf(formatted, sizeof(formatted), format, arguments);
	va_end(arguments);
	copy_status(line, sizeof(line), formatted);
	(void)snprintf(text, sizeof(text), "STATUS=%s", line);
	notify_send(text, 0);
}

void notify_reloading(void) {
	struct timespec now;
	char text[96];

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	(void)snprintf(text, sizeof(text), "RELOADING=1\nMONOTONIC_USEC=%llu",
		       (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000);
	notify_send(text, 0);
}

void notify_stopping(void) {
	notify_send("STOPPING=1", 0);
}

uint64_t notify_watchdog_interval_ns(void) {
	uint64_t microseconds;

	return sd_watchdog_enabled(0, &microseconds) > 0 ? microseconds * 1000 / 2 : 0;
}

void notify_watchdog(void) {
	notify_send("WATCHDOG=1", 0);
}

static bool is_listening_seqpacket(int fd) {
	return sd_is_socket_unix(fd, SOCK_SEQPACKET, 1, NULL, 0) > 0;
}

int notify_listen_fds(int **ret_fds, size_t *ret_n) {
	_cleanup_(freep) int *fds = NULL;
	char **names = NULL;
	int n, r = 0;

	n = sd_listen_fds_with_names(1, &names);
	for (int i = 0; i < n && names; ++i)
		free(names[i]);
	free(names);
	if (n < 0)
		return n;
	if (n > 0) {
		fds = malloc(sizeof(*fds) * (size_t)n);
		if (!fds)
			r = -ENOMEM;
	}
	for (int i = 0; i < n; ++i) {
		int fd = SD_LISTEN_FDS_START + i, flags = fcntl(fd, F_GETFL);

		if (!r && !is_listening_seqpacket(fd))
			r = -EINVAL;
		if (!r && (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK)))
			r = -errno;
		if (!r)
			fds[i] = fd;
	}
	if (r) {
		for (int i = 0; i < n; ++i)
			(void)close_fd(SD_LISTEN_FDS_START + i);
		return r;
	}
	*ret_fds = steal_ptr(fds);
	*ret_n = (size_t)n;
	return 0;
}
