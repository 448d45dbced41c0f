/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Values as text, and back. Sizes are bytes with K, M, G of 1024, durations nanoseconds with ms, s, min; when
 * read, a number without a unit is refused unless it is 0. Texts of other processes (names of programs, of
 * containers, of regions) are cleaned before they are printed.
 */

#include <stdint.h>

enum {
	FORMAT_TERMINAL, /* what could control a terminal becomes \xNN */
	FORMAT_JSON,	 /* what is not UTF-8, and DEL and C1, become U+FFFD; json-c escapes the rest */
};

#define FORMAT_MAX 32

/* new, the caller frees it; @mode FORMAT_* */
char *format_clean(const char *text, int mode);

/* "94.9M"; writes at most FORMAT_MAX */
const char *format_bytes(uint64_t bytes, char *buffer);
/* "1.2ms", "3min 20s", "4d 3h" */
const char *format_duration(uint64_t ns, char *buffer);
/* local time to the millisecond, of nanoseconds since 1970 */
const char *format_time(uint64_t ns, char *buffer);

/* "GPU-01234567-89ab-...", as the driver's own tools write it */
#define FORMAT_DEVICE_SIZE 41
const char *format_device(char buffer[FORMAT_DEVICE_SIZE], const uint8_t uuid[16]);

/* 0, or -EINVAL and -ERANGE; "B", "K", "M", "G" are units of sizes */
int format_parse_size(const char *text, uint64_t *ret);
int format_parse_duration(const char *text, uint64_t *ret_ns);
int format_parse_number(const char *text, uint64_t max, uint64_t *ret);
