/* SPDX-License-Identifier: Apache-2.0 */

#include "log.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <systemd/sd-journal.h>
#include <unistd.h>

#include "wire/fd.h"

#define JOURNAL_SOCKET "/run/systemd/journal/socket"

/*
 * sd_journal_sendv() waits while the journal's queue is full. A connected socket of our own, on which nothing is
 * ever sent, tells beforehand.
 */
static int probe_fd = -EBADF;

int journal_open(void) {
	_cleanup_(closep) int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = JOURNAL_SOCKET };

	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)))
		return -errno;
	closep(&probe_fd);
	probe_fd = steal_fd(&fd);
	return 0;
}

static int journal_is_ready(void) {
	struct pollfd poll_fd = { .fd = probe_fd, .events = POLLOUT };

	if (probe_fd < 0)
		return -ENOTCONN;
	if (poll(&poll_fd, 1, 0) <= 0)
		return -EAGAIN;
	return poll_fd.revents & (POLLERR | POLLHUP) ? -ECONNREFUSED : 0;
}

int journal_send(const struct iovec *fields, int n_fields) {
	int r = journal_is_ready();

	/* the journal's socket was made again */
	if (r == -ECONNREFUSED)
		r = journal_open();
	return r ?: sd_journal_sendv(fields, n_fields);
}
