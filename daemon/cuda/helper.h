/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What shmbrokerd and shmbroker-cuda-helper say to each other, over a socketpair of SOCK_SEQPACKET. Both are of the same
 * build: there is no negotiation, and a message of another size is a failure.
 *
 * The helper begins with one READY, good or bad; after a bad one it ends. Then each request but DROP has one ANSWER, in
 * order. The broker sends one request at a time and kills a helper that takes too long; hanging up ends it in order.
 */

#include <stdint.h>

#include "wire/protocol.h"

#define HELPER_FD 3
#define HELPER_DEVICES_MAX 32
#define HELPER_MAGIC UINT32_C(0x31435348)

enum {
	HELPER_CHECK_IPC = 1,
	HELPER_CHECK_VMM, /* with the fd */
	HELPER_DROP,	  /* a hold */
};

enum {
	HELPER_READY = 1,
	HELPER_ANSWER,
};

typedef struct HelperRequest {
	uint32_t magic;
	uint32_t operation;
	uint64_t serial; /* not 0; with keep, the number of the hold */
	uint8_t handle[WIRE_HANDLE_SIZE];
	uint64_t object_size; /* 0 for unknown */
	uint64_t offset;
	uint64_t size;
	uint32_t owner_pid;
	uint32_t owner_uid;
	uint32_t keep; /* CHECK_IPC: leave it open as a hold */
	uint32_t padding;
} HelperRequest;

typedef struct HelperReply {
	uint32_t magic;
	uint32_t kind;
	uint64_t serial;
	uint32_t cause;	  /* CudaCause, 0 when all is well */
	uint32_t is_last; /* the helper ends after this one */
	uint64_t object_size;
	uint32_t is_held;
	uint32_t driver_version;
	uint32_t n_devices; /* READY: UUIDs that are visible */
	uint32_t padding;
	uint8_t devices[HELPER_DEVICES_MAX][16];
	char text[WIRE_TEXT_MAX]; /* why not; of a good READY: the driver in words */
} HelperReply;
