/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl.h"
#include "format.h"

#define NS_PER_US UINT64_C(1000)
#define NS_PER_MS UINT64_C(1000000)
#define NS_PER_S UINT64_C(1000000000)
#define REPLACEMENT "\xef\xbf\xbd"

/* the length of the well-formed character at @text, 0 when it is none; @ret_code is its number */
static size_t utf8_next(const unsigned char *text, uint32_t *ret_code) {
	static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
	size_t n = *text < 0x80 ? 1 : *text >> 5 == 6 ? 2 : *text >> 4 == 14 ? 3 : *text >> 3 == 30 ? 4 : 0;
	uint32_t code = n == 1 ? *text : *text & (0xffu >> (n + 1));

	for (size_t i = 1; i < n; ++i) {
		if (text[i] >> 6 != 2)
			return 0;
		code = code << 6 | (text[i] & 0x3f);
	}
	if (code < least[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
		return 0;
	*ret_code = code;
	return n;
}

static bool is_control(uint32_t code) {
	return code < 0x20 || (code >= 0x7f && code < 0xa0);
}

/* marks that change the direction of the text around them, and line separators */
static bool is_deceptive(uint32_t code) {
	return code == 0x200e || code == 0x200f || (code >= 0x2028 && code <= 0x202e) ||
	       (code >= 0x2066 && code <= 0x2069);
}

char *format_clean(const char *text, int mode) {
	char *clean = ctl_must(malloc(4 * strlen(text) + 1));
	const unsigned char *from = (const unsigned char *)text;
	char *to = clean;

	while (*from) {
		uint32_t code = 0;
		size_t n = utf8_next(from, &code);
		bool bad = !n ||
			   (mode == FORMAT_JSON ? code >= 0x7f && code < 0xa0 : is_control(code) || is_deceptive(code));

		n = n ?: 1;
		if (!bad) {
			memcpy(to, from, n);
			to += n;
		} else if (mode == FORMAT_JSON) {
			to = stpcpy(to, REPLACEMENT);
		} else {
			for (size_t i = 0; i < n; ++i)
				to += sprintf(to, "\\x%02x", from[i]);
		}
		from += n;
	}
	*to = 0;
	return clean;
}

/* one decimal where it says something, cut rather than rounded */
static const char *scaled(uint64_t value, uint64_t unit, const char *name, char *buffer) {
	uint64_t tenths = (uint64_t)((unsigned __int128)(value % unit) * 10 / unit);

	if (tenths && value / unit < 1000)
		snprintf(buffer, FORMAT_MAX, "%" PRIu64 ".%" PRIu64 "%s", value / unit, tenths, name);
	else
		snprintf(buffer, FORMAT_MAX, "%" PRIu64 "%s", value / unit, name);
	return buffer;
}

const char *format_bytes(uint64_t bytes, char *buffer) {
	static const char *const units[] = { "B", "K", "M", "G", "T", "P", "E" };
	size_t i = 0;

	while (i < 6 && bytes >> 10 * (i + 1))
		++i;
	return scaled(bytes, UINT64_C(1) << 10 * i, units[i], buffer);
}

const char *format_duration(uint64_t ns, char *buffer) {
	uint64_t s = ns / NS_PER_S;

	if (ns < NS_PER_US)
		return scaled(ns, 1, "ns", buffer);
	if (ns < NS_PER_MS)
		return scaled(ns, NS_PER_US, "us", buffer);
	if (ns < NS_PER_S)
		return scaled(ns, NS_PER_MS, "ms", buffer);
	if (s < 60)
		return scaled(ns, NS_PER_S, "s", buffer);
	if (s < 3600)
		snprintf(buffer, FORMAT_MAX, "%" PRIu64 "min %" PRIu64 "s", s / 60, s % 60);
	else if (s < 86400)
		snprintf(buffer, FORMAT_MAX, "%" PRIu64 "h %" PRIu64 "min", s / 3600, s / 60 % 60);
	else
		snprintf(buffer, FORMAT_MAX, "%" PRIu64 "d %" PRIu64 "h", s / 86400, s / 3600 % 24);
	return buffer;
}

const char *format_device(char buffer[FORMAT_DEVICE_SIZE], const uint8_t uuid[16]) {
	char *at = buffer + snprintf(buffer, FORMAT_DEVICE_SIZE, "GPU");

	for (int i = 0; i < 16; ++i)
		at += snprintf(at, (size_t)(buffer + FORMAT_DEVICE_SIZE - at), "%s%02x",
			       i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
	return buffer;
}

const char *format_time(uint64_t ns, char *buffer) {
	time_t seconds = (time_t)(ns / NS_PER_S);
	struct tm local;
	size_t n;

	if (!localtime_r(&seconds, &local)) {
		snprintf(buffer, FORMAT_MAX, "%" PRIu64, ns);
		return buffer;
	}
	n = strftime(buffer, FORMAT_MAX, "%Y-%m-%dT%H:%M:%S", &local);
	snprintf(buffer + n, FORMAT_MAX - n, ".%03" PRIu64, ns % NS_PER_S / NS_PER_MS);
	return buffer;
}

static int parse_digits(const char *text, uint64_t *ret, const char **ret_rest) {
	const char *at = text;
	uint64_t value = 0;

	for (; *at >= '0' && *at <= '9'; ++at)
		if (__builtin_mul_overflow(value, 10, &value) ||
		    __builtin_add_overflow(value, (uint64_t)(*at - '0'), &value))
			return -ERANGE;
	if (at == text)
		return -EINVAL;
	*ret = value;
	*ret_rest = at;
	return 0;
}

typedef struct Unit {
	const char *name;
	uint64_t factor;
} Unit;

static int parse_with_unit(const char *text, const Unit *units, size_t n, uint64_t *ret) {
	const char *rest;
	uint64_t value;
	int r;

	r = parse_digits(text, &value, &rest);
	if (r)
		return r;
	if (!*rest && !value) {
		*ret = 0;
		return 0;
	}
	for (size_t i = 0; i < n; ++i)
		if (!strcmp(rest, units[i].name))
			return __builtin_mul_overflow(value, units[i].factor, ret) ? -ERANGE : 0;
	return -EINVAL;
}

int format_parse_size(const char *text, uint64_t *ret) {
	static const Unit units[] = { { "B", 1 }, { "K", 1 << 10 }, { "M", 1 << 20 }, { "G", 1 << 30 } };

	return parse_with_unit(text, units, sizeof(units) / sizeof(*units), ret);
}

int format_parse_duration(const char *text, uint64_t *ret_ns) {
	static const Unit units[] = { { "ms", NS_PER_MS }, { "s", NS_PER_S }, { "min", 60 * NS_PER_S } };

	return parse_with_unit(text, units, sizeof(units) / sizeof(*units), ret_ns);
}

int format_parse_number(const char *text, uint64_t max, uint64_t *ret) {
	const char *rest;
	uint64_t value;
	int r;

	r = parse_digits(text, &value, &rest);
	if (r)
		return r;
	if (*rest)
		return -EINVAL;
	if (value > max)
		return -ERANGE;
	*ret = value;
	return 0;
}
