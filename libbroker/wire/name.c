/* SPDX-License-Identifier: Apache-2.0 */

#include <stdbool.h>
#include <string.h>

#include "name.h"
#include "protocol.h"

/* the length of the UTF-8 character at @at and its code point, or 0 when there is none */
static size_t name_decode(const uint8_t *at, size_t left, uint32_t *ret_point) {
	static const uint32_t smallest[] = { 0, 0, 0x80, 0x800, 0x10000 };
	uint32_t point;
	size_t length;

	if (at[0] < 0x80) {
		*ret_point = at[0];
		return 1;
	} else if ((at[0] & 0xe0) == 0xc0) {
		point = at[0] & 0x1f;
		length = 2;
	} else if ((at[0] & 0xf0) == 0xe0) {
		point = at[0] & 0x0f;
		length = 3;
	} else if ((at[0] & 0xf8) == 0xf0) {
		point = at[0] & 0x07;
		length = 4;
	} else {
		return 0;
	}
	if (length > left)
		return 0;
	for (size_t i = 1; i < length; i++) {
		if ((at[i] & 0xc0) != 0x80)
			return 0;
		point = point << 6 | (at[i] & 0x3f);
	}
	if (point < smallest[length] || point > 0x10ffff || (point >= 0xd800 && point <= 0xdfff))
		return 0;
	*ret_point = point;
	return length;
}

typedef enum TextFault {
	TEXT_FINE,
	TEXT_TOO_LONG,
	TEXT_NOT_UTF8,
	TEXT_CONTROL,
} TextFault;

static TextFault text_check(const char *text, size_t size) {
	const uint8_t *at = (const uint8_t *)text;
	bool control = false;

	if (size > WIRE_NAME_MAX)
		return TEXT_TOO_LONG;
	for (size_t i = 0; i < size;) {
		uint32_t point = 0;
		size_t length;

		if (at[i] >= 0x20 && at[i] < 0x7f) {
			i++;
			continue;
		}
		length = name_decode(at + i, size - i, &point);
		if (length == 0)
			return TEXT_NOT_UTF8;
		control |= point < 0x20 || (point >= 0x7f && point < 0xa0);
		i += length;
	}
	return control ? TEXT_CONTROL : TEXT_FINE;
}

int wire_name_check(const char *name, size_t size, const char **ret_why) {
	static const char *const faults[] = {
		[TEXT_TOO_LONG] = "the name is longer than 255 bytes",
		[TEXT_NOT_UTF8] = "the name is not valid UTF-8",
		[TEXT_CONTROL] = "the name has control characters",
	};
	TextFault fault;

	if (size == 0) {
		*ret_why = "the name is empty";
		return SHMB_E_BAD_NAME;
	}
	fault = text_check(name, size);
	if (fault == TEXT_FINE)
		return 0;
	*ret_why = faults[fault];
	return SHMB_E_BAD_NAME;
}

int wire_key_check(const char *key, size_t size, const char **ret_why) {
	static const char *const faults[] = {
		[TEXT_TOO_LONG] = "the key is longer than 255 bytes",
		[TEXT_NOT_UTF8] = "the key is not valid UTF-8",
		[TEXT_CONTROL] = "the key has control characters",
	};
	TextFault fault = text_check(key, size);

	if (fault == TEXT_FINE)
		return 0;
	*ret_why = faults[fault];
	return SHMB_E_BAD_NAME;
}
