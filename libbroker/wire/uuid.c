/* SPDX-License-Identifier: Apache-2.0 */

#include "uuid.h"

#include <string.h>

static const char digits[] = "0123456789abcdef";

void wire_uuid_format(const uint8_t uuid[16], char ret[WIRE_UUID_TEXT_SIZE]) {
	char *at = ret;

	memcpy(at, "GPU-", 4);
	at += 4;
	for (unsigned int i = 0; i < 16; ++i) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			*at++ = '-';
		*at++ = digits[uuid[i] >> 4];
		*at++ = digits[uuid[i] & 15];
	}
	*at = 0;
}

bool wire_uuid_parse(const char *text, uint8_t ret[16]) {
	unsigned int n = 0;

	if (strncmp(text, "GPU-", 4) && strncmp(text, "MIG-", 4))
		return false;
	for (text += 4; *text; ++text) {
		const char *digit = strchr(digits, *text >= 'A' && *text <= 'F' ? *text - 'A' + 'a' : *text);

		if (*text == '-')
			continue;
		if (!digit || n == 32)
			return false;
		ret[n / 2] = (uint8_t)(n % 2 ? ret[n / 2] | (digit - digits) : (digit - digits) << 4);
		n++;
	}
	return n == 32;
}
