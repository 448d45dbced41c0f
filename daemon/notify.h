/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Notify: what the holder of this process is told, and the file descriptors that it keeps for us and hands over. The
 * holder is a service manager (NOTIFY_SOCKET, LISTEN_FDS) or the parent of `shmbrokerd --supervise`, which speaks the
 * same messages over a socketpair. Nothing here blocks, except that notify_ready() waits for up to NOTIFY_READY_MS
 * for a holder that is busy, and notify_take_fds() for a supervisor; a message that cannot be sent is dropped unless
 * the function returns that. Where there is no holder the calls that return nothing do nothing. For one thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NOTIFY_READY_MS 2000
#define NOTIFY_NAME_MAX 63 /* characters */

/* the supervisor's end of the contract: see supervise.h */
#define NOTIFY_SUPERVISOR_FD "SHMBROKER_SUPERVISOR_FD"
#define NOTIFY_SUPERVISOR_PID "SHMBROKER_SUPERVISOR_PID"
#define NOTIFY_END "FDEND=1"
/* names of listening sockets that the broker made itself begin so: the supervisor unlinks their paths at its end */
#define NOTIFY_OWN_LISTENER "shmb-listen-"

typedef struct NotifyFd {
	int fd;
	char name[NOTIFY_NAME_MAX + 1]; /* empty when the holder gave none, or one that is longer */
} NotifyFd;

typedef struct NotifyFds {
	NotifyFd *items;
	size_t n;
} NotifyFds;

/* READY=1 with a line for `systemctl status`, NULL for none; also ends a reload */
void notify_ready(const char *status);
void notify_status(const char *format, ...) __attribute__((__format__(__printf__, 1, 2)));
void notify_reloading(void);
void notify_stopping(void);
/* Half of the time within which the holder wants a sign of life; 0 when it wants none. */
uint64_t notify_watchdog_interval_ns(void);
void notify_watchdog(void);

/*
 * Does the holder keep fds? A supervisor does. A service manager says so in FDSTORE (systemd 254), or its unit says
 * it in SHMBROKER_FDSTORE=1 for those that are older.
 */
bool notify_has_store(void);
/*
 * Gives the holder copies of @fds (1 to WIRE_FDS_ROOM) under @name: 1 to NOTIFY_NAME_MAX printable characters, no
 * colon. A name may be used several times. Once this returned 0 the fds survive this process, unless the holder's
 * limit is reached: it says nothing about that. Borrows @fds. Returns 0, or -EAGAIN when the holder's queue is full,
 * -EINVAL for a bad name or number, -ENOENT without a holder, or another -errno (-ETOOMANYREFS: too many fds of this
 * user are in flight).
 */
int notify_store(const char *name, const int *fds, size_t n);
/* The holder closes all fds of this name. Returns as notify_store(). */
int notify_unstore(const char *name);
/*
 * Asks to be told when the holder has dealt with all messages before this one: then *ret_fd, one end of a pipe that
 * the caller owns, is at its end (POLLHUP). Returns as notify_store().
 */
int notify_barrier(int *ret_fd);

/*
 * Takes over the fds that the holder keeps or listens on for us; the order says nothing. All are close-on-exec,
 * listening Unix sockets of type SOCK_SEQPACKET also non-blocking. 0 of them is no error. Works once, and waits for
 * a supervisor to hand over the last one. Returns 0 or -errno, all closed.
 */
int notify_take_fds(NotifyFds *ret);
/* is it a listening Unix socket of type SOCK_SEQPACKET? */
bool notify_is_listener(int fd);
/* closes those whose fd is still >= 0 */
void notify_fds_deinit(NotifyFds *fds);
/* Adds one and takes it over; @name need not end with a zero. Returns 0 or -ENOMEM, the fd closed. */
int notify_fds_add(NotifyFds *fds, int fd, const char *name, size_t length);

/* notify-manager.c, or notify-fallback.c: the fds of LISTEN_FDS, close-on-exec. Returns 0 or -errno, all closed. */
int notify_manager_fds(NotifyFds *ret);
