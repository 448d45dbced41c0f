/* SPDX-License-Identifier: Apache-2.0 */

#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "compat.h"
#include "fd.h"

#define FD_PATH_MAX 40

/* the bytes of @cmsg that lie within the control data, whatever its length field says */
static size_t cmsg_payload(const struct msghdr *header, const struct cmsghdr *cmsg) {
	const uint8_t *end = (const uint8_t *)header->msg_control + header->msg_controllen;
	const uint8_t *data = CMSG_DATA((struct cmsghdr *)cmsg);
	size_t size;

	if (cmsg->cmsg_len < CMSG_LEN(0) || data > end)
		return 0;
	size = cmsg->cmsg_len - CMSG_LEN(0);
	return size < (size_t)(end - data) ? size : (size_t)(end - data);
}

void fd_message_parse(struct msghdr *header, ssize_t received, int *fds, FdMessage *ret) {
	FdMessage message = {
		.size = received > 0 ? (size_t)received : 0,
		.truncated = header->msg_flags & MSG_TRUNC,
		.fds_lost = header->msg_flags & MSG_CTRUNC,
	};

	for (struct cmsghdr *cmsg = CMSG_FIRSTHDR(header); cmsg; cmsg = CMSG_NXTHDR(header, cmsg)) {
		size_t n = cmsg_payload(header, cmsg) / sizeof(int);

		if (cmsg->cmsg_level != SOL_SOCKET)
			continue;
		if (cmsg->cmsg_type != SCM_RIGHTS && cmsg->cmsg_type != SCM_PIDFD)
			continue;
		for (size_t i = 0; i < n; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(cmsg) + i * sizeof(int), sizeof(int));
			if (cmsg->cmsg_type == SCM_RIGHTS && message.n_fds < WIRE_FDS_ROOM) {
				fds[message.n_fds++] = fd;
				continue;
			}
			/* a pidfd is the kernel's own: closing it cannot block; fds over the room do not exist (SCM_MAX_FD) */
			(void)close_fd(fd);
		}
	}
	*ret = message;
}

int fd_receive(int socket, void *buffer, size_t capacity, int flags, int *fds, FdMessage *ret) {
	FdControl control;
	struct iovec iov = { .iov_base = buffer, .iov_len = capacity };
	struct msghdr header = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	ssize_t received;

	do
		received = recvmsg(socket, &header, flags | MSG_CMSG_CLOEXEC);
	while (received < 0 && errno == EINTR);
	if (received < 0)
		return -errno;
	/* with MSG_TRUNC in @flags the kernel reports the length that it had */
	if ((size_t)received > capacity)
		received = (ssize_t)capacity;
	fd_message_parse(&header, received, fds, ret);
	return 0;
}

int fd_send(int socket, const void *buffer, size_t size, const int *fds, size_t n_fds, int flags) {
	FdControl control;
	struct iovec iov = { .iov_base = (void *)(uintptr_t)buffer, .iov_len = size };
	struct msghdr header = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t sent;

	if (n_fds > WIRE_FDS_ROOM)
		return -EINVAL;
	if (n_fds) {
		struct cmsghdr *cmsg;

		memset(&control, 0, CMSG_SPACE(n_fds * sizeof(int)));
		header.msg_control = &control;
		header.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
		cmsg = CMSG_FIRSTHDR(&header);
		cmsg->cmsg_level = SOL_SOCKET;
		cmsg->cmsg_type = SCM_RIGHTS;
		cmsg->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
		memcpy(CMSG_DATA(cmsg), fds, n_fds * sizeof(int));
	}
	do
		sent = sendmsg(socket, &header, flags | MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	return sent < 0 ? -errno : 0;
}

int fd_seals(int fd) {
	int seals = fcntl(fd, F_GET_SEALS);

	return seals < 0 ? -errno : seals;
}

int fd_reopen(int fd, int flags) {
	char path[FD_PATH_MAX];
	int opened;

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	/* whoever has a lease on the file (fcntl(2), F_SETLEASE) would keep us waiting for lease-break-time */
	opened = open(path, O_CLOEXEC | O_NONBLOCK | flags);
	return opened < 0 ? -errno : opened;
}
