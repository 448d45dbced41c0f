/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Devices: which GPU a client means by an ordinal. The broker knows GPUs by UUID and the gateway uses none, so that whoever
 * runs it says which ones there are, in the order in which the clients count them.
 */

#include <stdbool.h>
#include <stdint.h>

#define DEVICES_MAX 64
/* the ordinal of a GPU that is not among them */
#define DEVICES_UNKNOWN UINT32_MAX

typedef struct Devices {
	uint32_t n;
	uint8_t uuids[DEVICES_MAX][16];
} Devices;

/* @text: UUIDs as nvidia-smi -L prints them, separated by commas; "" for none. Returns 0 or -EINVAL, logged. */
int devices_parse(Devices *ret, const char *text);
/* DEVICES_UNKNOWN when it is none of them */
uint32_t devices_find(const Devices *devices, const uint8_t uuid[16]);
