/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Raw: the protocol without the client library, as messages that are made once and sent many times.
 *
 * Every message has the size of its reply for a serial: the broker repeats serials and does not care, and a bare
 * server that is to answer the very same message with as many bytes finds the number there.
 * Whatever goes wrong here ends the process: a benchmark that is answered with an error measures nothing.
 */

#include <stdint.h>

#include "wire/codec.h"

#define RAW_MESSAGE_MAX 8192
#define RAW_NAME_LENGTH 20

typedef struct RawMessage {
	size_t size;
	size_t reply_size; /* of a reply without any refusal */
	uint8_t bytes[RAW_MESSAGE_MAX] __attribute__((aligned(8)));
} RawMessage;

/* what REGISTER says of one region; its name is that of an index */
typedef struct RawRegion {
	uint64_t offset;
	uint64_t size;
	uint8_t access;
	uint16_t fd_index;
	uint16_t read_only_fd_index;
} RawRegion;

/* a forked server and our ends of its connections */
typedef struct RawServer {
	pid_t pid;
	int *fds;
	size_t n;
} RawServer;

/* opens a session with these roles; a blocking socket */
int raw_connect(const char *socket_path, uint32_t roles);
/* one request and its reply, of which up to @capacity bytes are stored; returns its size */
size_t raw_call(int socket, const RawMessage *request, const int *fds, size_t n_fds, void *reply, size_t capacity);
/* @reply is a list of @n results, of @result_size bytes each, that begin with a code: all are 0. Returns the first. */
const void *raw_check_results(const void *reply, size_t size, size_t result_size, uint32_t n);

void raw_ping(RawMessage *ret);
/* looks the regions 0 to @n - 1 up, for reading */
void raw_lookup(RawMessage *ret, uint32_t n, uint16_t flags);
void raw_release(RawMessage *ret, const uint64_t *leases, uint32_t n);
/* registers @n regions under the names of @first, @first + 1, ... */
void raw_register(RawMessage *ret, const RawRegion *regions, uint32_t first, uint32_t n);
/* retires all regions of the session */
void raw_unregister_all(RawMessage *ret);
/* waits until the broker has closed the fds of what was retired */
void raw_wait_closed(int socket);

/* sealed memory of @size bytes without a page, and the same opened read-only */
int raw_memory(uint64_t size);
int raw_reopen(int fd);

/*
 * Forks a server with @n connections, which inherits nothing else from us and ends with us. @serve gets its ends
 * and returns when all of them are closed.
 */
void raw_server_start(RawServer *ret, size_t n, void (*serve)(const int *fds, size_t n));
void raw_server_stop(RawServer *server);
/* raises RLIMIT_NOFILE as far as it goes; dies if that is less than @n */
void raw_need_fds(uint64_t n);
