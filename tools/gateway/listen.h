/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Listen: the sockets that the gateway listens at, of each of which the log has a line, and the file that says which they
 * are. A ListenSet owns its sockets, and takes Unix sockets away with itself. Every door asks it for its own, by what the
 * options say.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define LISTEN_MAX 16

typedef struct ListenSocket {
	const char *door; /* "http", "grpc", "metrics"; static */
	int fd;
	bool is_unix;
	char address[128]; /* an address, or a path */
	uint16_t port;	   /* 0 with a path */
} ListenSocket;

typedef struct ListenSet {
	ListenSocket sockets[LISTEN_MAX];
	size_t n;
	bool beyond_loopback; /* allowed, for there is a credential */
	mode_t mode;	      /* of Unix sockets */
} ListenSet;

/*
 * Listens at @address (IPv4 or IPv6, or localhost) and @port, 0 for any. @door is borrowed for ever. Returns 0; -EPERM (it
 * is not loopback, and there is no credential), -EINVAL (no address), another negative errno; all logged.
 */
int listen_tcp(ListenSet *set, const char *door, const char *address, uint16_t port);
/* Listens at @path, which must not be there unless as a socket at which nobody listens. 0 or a negative errno, logged. */
int listen_unix(ListenSet *set, const char *door, const char *path);
/* Both, as the options say: no @path where that is "". */
int listen_door(ListenSet *set, const char *door, const char *address, uint16_t port, const char *path);

/*
 * Writes {"http": {"address": ..., "port": ..., "socket": ...}, ..., "pid": ...} to @path, at once or not at all. 0 or a
 * negative errno, logged.
 */
int listen_write_ports(const ListenSet *set, const char *path);
void listen_set_deinit(ListenSet *set);
