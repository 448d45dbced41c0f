/* SPDX-License-Identifier: Apache-2.0 */

#include "text.h"

static int base64_value(char c) {
	if (c >= 'A' && c <= 'Z')
		return c - 'A';
	if (c >= 'a' && c <= 'z')
		return c - 'a' + 26;
	if (c >= '0' && c <= '9')
		return c - '0' + 52;
	return c == '+' ? 62 : c == '/' ? 63 : -1;
}

size_t text_base64(const char *text, size_t size, uint8_t *ret, size_t max) {
	uint32_t bits = 0, n_bits = 0;
	size_t n = 0;

	for (size_t i = 0; i < size && text[i] != '='; i++) {
		int value = base64_value(text[i]);

		if (value < 0)
			continue;
		bits = bits << 6 | (uint32_t)value;
		n_bits += 6;
		if (n_bits < 8)
			continue;
		n_bits -= 8;
		if (n < max)
			ret[n] = (uint8_t)(bits >> n_bits);
		n++;
	}
	return n;
}

static int hex_value(char c) {
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool text_percent_decode(const char *text, size_t size, char *ret, size_t *ret_size) {
	size_t n = 0;

	for (size_t i = 0; i < size; i++) {
		int high, low;

		if (text[i] != '%') {
			ret[n++] = text[i];
			continue;
		}
		if (size - i < 3)
			return false;
		high = hex_value(text[i + 1]);
		low = hex_value(text[i + 2]);
		if (high < 0 || low < 0 || !(high | low))
			return false;
		ret[n++] = (char)(high << 4 | low);
		i += 2;
	}
	*ret_size = n;
	return true;
}

/* also its code point */
static size_t utf8_decode(const uint8_t *at, size_t left, uint32_t *ret_point) {
	static const uint32_t smallest[] = { 0, 0, 0x80, 0x800, 0x10000 };
	size_t length = at[0] < 0x80		 ? 1
			: (at[0] & 0xe0) == 0xc0 ? 2
			: (at[0] & 0xf0) == 0xe0 ? 3
			: (at[0] & 0xf8) == 0xf0 ? 4
						 : 0;
	uint32_t point;

	if (!length || length > left)
		return 0;
	point = length == 1 ? at[0] : at[0] & (0x7f >> length);
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

size_t text_utf8_length(const char *text, size_t left) {
	uint32_t point;

	return utf8_decode((const uint8_t *)text, left, &point);
}

bool text_is_utf8(const char *text, size_t size, bool *ret_control) {
	*ret_control = false;
	for (size_t i = 0; i < size;) {
		uint32_t point;
		size_t length = utf8_decode((const uint8_t *)text + i, size - i, &point);

		if (!length)
			return false;
		*ret_control |= point < 0x20 || (point >= 0x7f && point < 0xa0);
		i += length;
	}
	return true;
}
