/* SPDX-License-Identifier: Apache-2.0 */

#include "notify.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "wire/fd.h"

#define STATUS_MAX 512
#define MESSAGE_MAX 1024 /* of what a supervisor sends */

/* ---- the way to the holder ---- */

/* one for the process, as the environment that names it is */
static int the_supervisor = -EBADF;

static bool read_int(const char *variable, int *ret) {
	const char *text = getenv(variable);
	char *end;
	long number;

	if (!text || !*text)
		return false;
	errno = 0;
	number = strtol(text, &end, 10);
	if (errno || *end || number < 0 || number > INT32_MAX)
		return false;
	*ret = (int)number;
	return true;
}

/* The socketpair of the parent that supervises us, or -EBADF. Others that inherited the environment must not use it. */
static int supervisor_fd(void) {
	int fd, pid, type;
	socklen_t size = sizeof(type);

	if (the_supervisor >= 0 || !getenv(NOTIFY_SUPERVISOR_FD))
		return the_supervisor;
	if (read_int(NOTIFY_SUPERVISOR_FD, &fd) && read_int(NOTIFY_SUPERVISOR_PID, &pid) && pid == (int)getppid() &&
	    fd > STDERR_FILENO && !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_SEQPACKET &&
	    !fcntl(fd, F_SETFD, FD_CLOEXEC))
		the_supervisor = fd;
	(void)unsetenv(NOTIFY_SUPERVISOR_FD);
	(void)unsetenv(NOTIFY_SUPERVISOR_PID);
	return the_supervisor;
}

static int manager_connect(void) {
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

/*
 * sd_notify() waits while the manager's queue is full, and PID 1 can be busy for seconds; the same datagram is sent
 * here without waiting.
 */
static int notify_send(const char *text, const int *fds, size_t n, int timeout_ms) {
	_cleanup_(closep) int manager = -EBADF;
	struct pollfd poll_fd = { .fd = supervisor_fd(), .events = POLLOUT };

	if (poll_fd.fd < 0) {
		manager = manager_connect();
		if (manager < 0)
			return manager;
		poll_fd.fd = manager;
	}
	if (timeout_ms)
		(void)poll(&poll_fd, 1, timeout_ms);
	return fd_send(poll_fd.fd, text, strlen(text), fds, n, MSG_DONTWAIT);
}

/* ---- what it is told ---- */

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
	(void)notify_send(text, NULL, 0, NOTIFY_READY_MS);
}

void notify_status(const char *format, ...) {
	char formatted[STATUS_MAX], line[STATUS_MAX], text[STATUS_MAX + 32];
	va_list arguments;

	va_start(arguments, format);
	(void)vsnprintf(formatted, sizeof(formatted), format, arguments);
	va_end(arguments);
	copy_status(line, sizeof(line), formatted);
	(void)snprintf(text, sizeof(text), "STATUS=%s", line);
	(void)notify_send(text, NULL, 0, 0);
}

void notify_reloading(void) {
	struct timespec now;
	char text[96];

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	(void)snprintf(text, sizeof(text), "RELOADING=1\nMONOTONIC_USEC=%llu",
		       (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000);
	(void)notify_send(text, NULL, 0, 0);
}

void notify_stopping(void) {
	(void)notify_send("STOPPING=1", NULL, 0, 0);
}

void notify_watchdog(void) {
	(void)notify_send("WATCHDOG=1", NULL, 0, 0);
}

/* ---- what it keeps ---- */

static bool is_name(const char *name) {
	size_t length = strlen(name);

	if (!length || length > NOTIFY_NAME_MAX)
		return false;
	for (const char *p = name; *p; ++p)
		if (*p < ' ' || *p > '~' || *p == ':')
			return false;
	return true;
}

bool notify_has_store(void) {
	const char *limit = getenv("FDSTORE"), *unit = getenv("SHMBROKER_FDSTORE");

	if (supervisor_fd() >= 0)
		return true;
	if (!getenv("NOTIFY_SOCKET"))
		return false;
	return limit ? strtoul(limit, NULL, 10) > 0 : unit && !strcmp(unit, "1");
}

int notify_store(const char *name, const int *fds, size_t n) {
	char text[NOTIFY_NAME_MAX + 64];

	if (!n || n > WIRE_FDS_ROOM || !is_name(name))
		return -EINVAL;
	/* without FDPOLL=0 a socket would be dropped when this process dies and its other end with it */
	(void)snprintf(text, sizeof(text), "FDSTORE=1\nFDPOLL=0\nFDNAME=%s", name);
	return notify_send(text, fds, n, 0);
}

int notify_unstore(const char *name) {
	char text[NOTIFY_NAME_MAX + 64];

	if (!is_name(name))
		return -EINVAL;
	(void)snprintf(text, sizeof(text), "FDSTOREREMOVE=1\nFDNAME=%s", name);
	return notify_send(text, NULL, 0, 0);
}

int notify_barrier(int *ret_fd) {
	_cleanup_(closep) int reader = -EBADF, writer = -EBADF;
	int ends[2], r;

	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK))
		return -errno;
	reader = ends[0];
	writer = ends[1];
	r = notify_send("BARRIER=1", &writer, 1, 0);
	if (r)
		return r;
	*ret_fd = steal_fd(&reader);
	return 0;
}

/* ---- what it hands over ---- */

void notify_fds_deinit(NotifyFds *fds) {
	for (size_t i = 0; i < fds->n; ++i)
		(void)close_fd(fds->items[i].fd);
	free(fds->items);
	*fds = (NotifyFds){};
}

int notify_fds_add(NotifyFds *fds, int fd, const char *name, size_t length) {
	/* grows at powers of two */
	if (!(fds->n & (fds->n - 1))) {
		NotifyFd *items = realloc(fds->items, sizeof(*items) * (fds->n ? fds->n * 2 : 1));

		if (!items) {
			(void)close_fd(fd);
			return -ENOMEM;
		}
		fds->items = items;
	}
	fds->items[fds->n] = (NotifyFd){ .fd = fd };
	if (length <= NOTIFY_NAME_MAX)
		memcpy(fds->items[fds->n].name, name, length);
	fds->n++;
	return 0;
}

bool notify_is_listener(int fd) {
	int domain, type, listens;
	socklen_t size = sizeof(int);

	return !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) && domain == AF_UNIX &&
	       !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_SEQPACKET &&
	       !getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) && listens;
}

/* "FDNAME=name\n" with one fd each, then FDEND=1 */
static int take_from_supervisor(int socket, NotifyFds *fds) {
	for (;;) {
		struct pollfd poll_fd = { .fd = socket, .events = POLLIN };
		char text[MESSAGE_MAX], *name;
		int received[WIRE_FDS_ROOM], r;
		FdMessage message;

		if (poll(&poll_fd, 1, -1) < 0 && errno != EINTR)
			return -errno;
		r = fd_receive(socket, text, sizeof(text) - 1, MSG_DONTWAIT, received, &message);
		if (r == -EAGAIN)
			continue;
		if (r)
			return r;
		text[message.size] = 0;
		name = text + (sizeof("FDNAME=") - 1);
		for (size_t i = 0; i < message.n_fds; ++i) {
			if (r || message.n_fds != 1 || strncmp(text, "FDNAME=", sizeof("FDNAME=") - 1)) {
				(void)close_fd(received[i]);
				r = r ?: -EPROTO;
				continue;
			}
			r = notify_fds_add(fds, received[i], name, strcspn(name, "\n"));
		}
		/* an fd that did not arrive must not be taken for one that was not there */
		if (!r && message.fds_lost)
			r = -EMFILE;
		if (!r && !message.n_fds)
			return !message.size ? -ECONNRESET : !strcmp(text, NOTIFY_END) ? 0 : -EPROTO;
		if (r)
			return r;
	}
}

int notify_take_fds(NotifyFds *ret) {
	static bool taken;
	NotifyFds fds = {};
	int socket = supervisor_fd(), r;

	if (socket < 0) {
		r = notify_manager_fds(&fds);
	} else {
		r = taken ? 0 : take_from_supervisor(socket, &fds);
		taken = true;
	}
	for (size_t i = 0; !r && i < fds.n; ++i) {
		int flags;

		if (!notify_is_listener(fds.items[i].fd))
			continue;
		flags = fcntl(fds.items[i].fd, F_GETFL);
		if (flags < 0 || fcntl(fds.items[i].fd, F_SETFL, flags | O_NONBLOCK))
			r = -errno;
	}
	if (r) {
		notify_fds_deinit(&fds);
		return r;
	}
	*ret = fds;
	return 0;
}
