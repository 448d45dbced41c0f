/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Listen: sockets of our own, where no service manager hands any over.
 */

#include <stdint.h>

/*
 * Binds and listens at @path, close-on-exec and non-blocking, with @mode, and with the group @gid unless that is
 * CONFIG_NO_ID. A socket file that nobody answers at is replaced. Returns an fd, -EADDRINUSE when somebody does,
 * or -errno.
 */
int listen_at(const char *path, uint32_t mode, uint32_t gid);
/* Consumes @fd, a listening socket, and removes its file unless somebody answers there. */
void listen_unlink(int fd);
