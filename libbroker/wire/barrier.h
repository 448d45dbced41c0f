/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Barrier: the asymmetric form of the ordering in layout.h. A consumer registers its process once; the broker
 * then makes every running thread of all registered processes execute a full memory barrier (Linux 4.16), but for
 * those that the kernel forgets, as layout.h says: nothing that must not be missed may rest on it.
 * A sandbox may deny membarrier: the registering side then attaches in RMW mode, and a broker to which it is
 * denied finds releases of asymmetric pages later.
 */

/* Returns the supported commands, a bit mask of BARRIER_*, or -errno (-ENOSYS, -EPERM). */
int barrier_query(void);
/* Registers this process, all its threads and later ones, as one that barrier_global() reaches. Returns 0 or -errno. */
int barrier_register_global(void);
/*
 * A full memory barrier on every thread of every registered process, or nearly. The caller's own accesses before it are
 * ordered before those after it. Returns 0 or -errno; never waits for longer than an inter-processor interrupt.
 */
int barrier_global(void);

/* commands of membarrier(2), defined here because <linux/membarrier.h> may be older than the kernel */
enum {
	BARRIER_QUERY = 0,
	BARRIER_GLOBAL_EXPEDITED = 1 << 1,
	BARRIER_REGISTER_GLOBAL_EXPEDITED = 1 << 2,
};
