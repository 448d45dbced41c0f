/* SPDX-License-Identifier: Apache-2.0 */

/* Stands in for loop-uring.c where liburing was missing when this was built. */

#include <errno.h>
#include <stdio.h>

#include "loop-engine.h"

static int uring_new(Loop *loop) {
	(void)snprintf(loop->reason, sizeof(loop->reason), "built without liburing");
	return -ENOSYS;
}

const LoopEngine loop_engine_uring = {
	.name = "io_uring",
	.new = uring_new,
};
