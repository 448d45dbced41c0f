/* SPDX-License-Identifier: Apache-2.0 */

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

#include "log.h"

#define LOG_LINE_MAX 1024
#define LOG_LINES_PER_SECOND 32

void log_write(const char *format, ...) {
	static uint32_t lines, dropped;
	static time_t second;
	char line[LOG_LINE_MAX];
	struct timespec now;
	va_list list;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	if (now.tv_sec != second) {
		if (dropped)
			fprintf(stderr, "shmbroker-gateway: %u lines left out\n", dropped);
		second = now.tv_sec;
		lines = dropped = 0;
	}
	if (lines++ >= LOG_LINES_PER_SECOND) {
		dropped++;
		return;
	}
	va_start(list, format);
	(void)vsnprintf(line, sizeof(line), format, list);
	va_end(list);
	for (char *c = line; *c; c++) {
		if (*c < 0x20 || *c > 0x7e)
			*c = '?';
	}
	fprintf(stderr, "shmbroker-gateway: %s\n", line);
}
