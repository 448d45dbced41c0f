/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Notify: what the service manager is told, and the sockets that it hands over. Nothing here blocks, except that
 * notify_ready() waits for up to NOTIFY_READY_MS for a manager that is busy; a message that cannot be sent is
 * dropped. Where there is no service manager every call does nothing.
 */

#include <stddef.h>
#include <stdint.h>

#define NOTIFY_READY_MS 2000

/* READY=1 with a line for `systemctl status`, NULL for none; also ends a reload */
void notify_ready(const char *status);
void notify_status(const char *format, ...) __attribute__((__format__(__printf__, 1, 2)));
void notify_reloading(void);
void notify_stopping(void);
/* Half of the time within which the manager wants a sign of life; 0 when it wants none. */
uint64_t notify_watchdog_interval_ns(void);
void notify_watchdog(void);

/*
 * Takes over the sockets that the service manager listens on for us, each one a listening SOCK_SEQPACKET Unix
 * socket, made non-blocking and close-on-exec. The caller owns the array and the fds; 0 of them is no error. Returns
 * 0, or -EINVAL when one is something else (all are closed then), or -errno. Works once.
 */
int notify_listen_fds(int **ret_fds, size_t *ret_n);
