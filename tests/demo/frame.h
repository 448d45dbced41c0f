/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Frame: what owner and consumer of the demonstration share, besides the memory: the name, the size, what stands
 * at each place, and how a step and its time are printed.
 */

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <shmbroker.h>

#define FRAME_NAME "camera/front"
#define FRAME_FLOATS (UINT64_C(1) * 3 * 2160 * 3840)
#define FRAME_SIZE (FRAME_FLOATS * sizeof(float))

/* the value at @index: in [0, 1), different from its neighbours in every byte of the fraction */
static inline float frame_value(uint64_t index) {
	return (float)((uint32_t)(index * UINT32_C(2654435761)) >> 8) * 0x1p-24f;
}

static inline uint64_t frame_now(void) {
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* prints a step that began at @begin and ends now, and returns the time for the next one to begin */
static inline uint64_t frame_step(const char *who, const char *step, uint64_t begin, const char *detail) {
	printf("  %-8s  %-22s  %12.3f ms  %s\n", who, step, (double)(frame_now() - begin) / 1e6, detail);
	fflush(stdout);
	return frame_now();
}

/* ends the program when @result is not 0, with what went wrong */
static inline void frame_check(const char *step, int result) {
	if (result == 0)
		return;
	if (result > 0 && *shmb_last_error())
		fprintf(stderr, "%s: %s (%s)\n", step, shmb_last_error(), shmb_error_name(result));
	else
		fprintf(stderr, "%s: %s\n", step, shmb_error_text(result));
	exit(EXIT_FAILURE);
}

/* says on a line of its own that a point is reached, and goes on after a line on standard input or its end */
static inline void frame_pause(const char *where) {
	char line[64];

	printf("-- %s\n", where);
	fflush(stdout);
	if (!fgets(line, sizeof(line), stdin))
		return;
}
