/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * GrpcClient: unary gRPC calls one after the other over one connection, as little as that takes: headers are sent as
 * literals, and those of replies are not read. A reply without a message, which is how a call is refused, ends the process,
 * as whatever else goes wrong.
 */

#include <stddef.h>
#include <stdint.h>

#define GRPC_MESSAGE_MAX 65536

typedef struct GrpcClient {
	int fd;
	uint32_t stream;   /* of the last call */
	uint32_t received; /* bytes of DATA that the server was not told of */
	size_t size;	   /* what is in buffer, from @at on */
	size_t at;
	uint8_t buffer[4 * GRPC_MESSAGE_MAX];
} GrpcClient;

/* Begins on @fd, a connected socket, which stays the caller's. */
void grpc_client_init(GrpcClient *client, int fd);
/* Calls @path with @message. Returns the size of the reply's message. */
size_t grpc_client_call(GrpcClient *client, const char *path, const void *message, size_t size);

/* protobuf fields, appended at @at; each returns where the next one goes */
uint8_t *grpc_put_text(uint8_t *at, uint32_t field, const char *text);
uint8_t *grpc_put_number(uint8_t *at, uint32_t field, uint64_t number);
