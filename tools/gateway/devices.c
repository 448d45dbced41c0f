/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <string.h>

#include "devices.h"
#include "log.h"

static int hex_value(char c) {
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* GPU- or MIG- and 32 hexadecimal digits with hyphens among them; moves @text behind it */
static bool parse_uuid(const char **text, uint8_t ret[16]) {
	const char *at = *text;
	unsigned digits = 0;

	if (strncmp(at, "GPU-", 4) == 0 || strncmp(at, "MIG-", 4) == 0)
		at += 4;
	memset(ret, 0, 16);
	for (; *at && *at != ','; at++) {
		int value = hex_value(*at);

		if (*at == '-')
			continue;
		if (value < 0 || digits == 32)
			return false;
		ret[digits / 2] = (uint8_t)(ret[digits / 2] << 4 | value);
		digits++;
	}
	*text = at;
	return digits == 32;
}

int devices_parse(Devices *ret, const char *text) {
	Devices devices = {};

	while (*text) {
		if (devices.n == DEVICES_MAX || !parse_uuid(&text, devices.uuids[devices.n])) {
			log_write("--cuda-devices is a list of at most %d UUIDs, as nvidia-smi -L prints them",
				  DEVICES_MAX);
			return -EINVAL;
		}
		devices.n++;
		text += *text == ',';
	}
	*ret = devices;
	return 0;
}

uint32_t devices_find(const Devices *devices, const uint8_t uuid[16]) {
	for (uint32_t i = 0; i < devices->n; i++) {
		if (memcmp(devices->uuids[i], uuid, 16) == 0)
			return i;
	}
	return DEVICES_UNKNOWN;
}
