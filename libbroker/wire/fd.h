/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * File descriptors: ownership helpers and SCM_RIGHTS. `_cleanup_(closep) int fd = -EBADF;` closes by itself,
 * steal_fd() and steal_ptr() make a hand-over visible.
 */

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "protocol.h"

#define _cleanup_(_function) __attribute__((__cleanup__(_function)))

static inline int close_fd(int fd) {
	int saved = errno;

	if (fd >= 0)
		(void)close(fd);
	errno = saved;
	return -EBADF;
}

static inline void closep(int *fd) {
	*fd = close_fd(*fd);
}

static inline void freep(void *p) {
	free(*(void **)p);
}

static inline int steal_fd(int *fd) {
	int taken = *fd;

	*fd = -EBADF;
	return taken;
}

#define steal_ptr(_pointer)                               \
	({                                                \
		__typeof__(_pointer) _taken = (_pointer); \
		(_pointer) = NULL;                        \
		_taken;                                   \
	})

/* room for as many fds as the kernel can deliver, so that it never has to drop one */
typedef union FdControl {
	struct cmsghdr align;
	uint8_t bytes[CMSG_SPACE(sizeof(int) * WIRE_FDS_ROOM) + CMSG_SPACE(64) * 4];
} FdControl;

typedef struct FdMessage {
	size_t size; /* bytes of payload, 0 at the end of the connection */
	size_t n_fds;
	bool truncated; /* payload was longer than the buffer */
	bool fds_lost;	/* MSG_CTRUNC: the process ran out of fds */
} FdMessage;

/*
 * Takes the fds out of a received control buffer; closes kernel-made pidfds it did not ask for.
 * @fds has room for WIRE_FDS_ROOM. The caller owns the fds.
 */
void fd_message_parse(struct msghdr *header, ssize_t received, int *fds, FdMessage *ret);
/*
 * Receives one message with recvmsg(@flags | MSG_CMSG_CLOEXEC). Returns 0 or -errno (-EAGAIN when there is
 * none). The caller owns the fds, whatever else is wrong with the message.
 */
int fd_receive(int socket, void *buffer, size_t capacity, int flags, int *fds, FdMessage *ret);
/* Sends one message with MSG_NOSIGNAL | @flags and borrows @fds (at most WIRE_FDS_ROOM). Returns 0 or -errno. */
int fd_send(int socket, const void *buffer, size_t size, const int *fds, size_t n_fds, int flags);

/* F_GET_SEALS: the first call on a received fd. Returns the seals, or -errno when it is not shmem or hugetlbfs. */
int fd_seals(int fd);
/* Opens the inode behind @fd again, O_CLOEXEC | @flags. Returns an fd or -errno. */
int fd_reopen(int fd, int flags);
