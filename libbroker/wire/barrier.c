/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "barrier.h"

#ifndef SYS_membarrier
#if defined(__x86_64__)
#define SYS_membarrier 324
#else
#define SYS_membarrier 283 /* the common table: arm64, riscv */
#endif
#endif

static int barrier_call(int command) {
	long r = syscall(SYS_membarrier, command, 0, 0);

	return r < 0 ? -errno : (int)r;
}

int barrier_query(void) {
	return barrier_call(BARRIER_QUERY);
}

int barrier_register_global(void) {
	return barrier_call(BARRIER_REGISTER_GLOBAL_EXPEDITED);
}

int barrier_global(void) {
	return barrier_call(BARRIER_GLOBAL_EXPEDITED);
}
