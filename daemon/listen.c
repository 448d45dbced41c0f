/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "config.h"
#include "listen.h"
#include "wire/fd.h"

#define BACKLOG 4096
#define DYING_TRIES 20
#define DYING_WAIT_MS 1000

/*
 * True when the file at the path is a socket that nobody listens on. The ring of a broker that was killed holds its
 * listening socket for some moments after the process is gone: such a socket takes connections and then hangs up,
 * while one that is alive keeps them until its hello_timeout.
 */
static bool is_left_over(const struct sockaddr_un *address) {
	struct stat st;

	for (int i = 0; i < DYING_TRIES; ++i) {
		_cleanup_(closep) int fd = -EBADF;
		struct pollfd probe = { .events = POLLIN };

		if (lstat(address->sun_path, &st) < 0 || !S_ISSOCK(st.st_mode))
			return false;
		fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		if (fd < 0)
			return false;
		if (connect(fd, (const struct sockaddr *)address, sizeof(*address)) < 0)
			return errno == ECONNREFUSED;
		probe.fd = fd;
		if (poll(&probe, 1, DYING_WAIT_MS) <= 0)
			return false;
	}
	return false;
}

int listen_at(const char *path, uint32_t mode, uint32_t gid) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	_cleanup_(closep) int fd = -EBADF;
	mode_t mask;
	int r;

	if (strlen(path) >= sizeof(address.sun_path))
		return -ENAMETOOLONG;
	strcpy(address.sun_path, path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	/* nobody may connect before the mode and the group are what they should be */
	mask = umask(0177);
	r = bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ? -errno : 0;
	if (r == -EADDRINUSE && is_left_over(&address) && !unlink(path))
		r = bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ? -errno : 0;
	umask(mask);
	if (r)
		return r;
	if ((gid != CONFIG_NO_ID && chown(path, (uid_t)-1, gid) < 0) || chmod(path, mode) < 0 ||
	    listen(fd, BACKLOG) < 0) {
		r = -errno;
		unlink(path);
		return r;
	}
	return steal_fd(&fd);
}

void listen_unlink(int fd) {
	struct sockaddr_un address = {};
	socklen_t size = sizeof(address) - 1;
	int r = getsockname(fd, (struct sockaddr *)&address, &size);

	(void)close_fd(fd);
	if (!r && address.sun_path[0] && is_left_over(&address))
		(void)unlink(address.sun_path);
}
