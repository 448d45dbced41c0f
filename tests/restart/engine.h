/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SKIPPED 77

/* whether a broker can be told to run on @engine here */
static inline bool engine_is_there(const char *engine) {
	if (strcmp(engine, "io_uring") != 0)
		return true;
	/* never succeeds, and says why */
	return syscall(SYS_io_uring_setup, 0, NULL) < 0 && errno != ENOSYS && errno != EPERM;
}
