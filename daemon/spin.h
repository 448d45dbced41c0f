/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Spin: looks for work for a short while after there was some, before the loop sleeps. A wake-up across CPUs costs
 * more than the request itself; but whoever spins on the CPU that the peer needs makes it wait. So it pays only where
 * there are CPUs to spare, the client spins only on another CPU than the broker's (it reads broker_cpu in the
 * registry), and who has spun in vain several times in a row pauses. A loop that has nothing to do for longer sleeps
 * without an end: spinning wakes nobody.
 */

#include <stdbool.h>
#include <stdint.h>

#define SPIN_NS UINT64_C(50000)
#define SPIN_CPUS_AUTO 4 /* with `spin = auto` that many are to spare */

typedef struct Spin {
	uint64_t ns;	  /* 0: never */
	uint32_t in_vain; /* in a row */
	uint32_t skips;
} Spin;

enum {
	SPIN_AUTO,
	SPIN_NO,
	SPIN_YES,
};

/* CPUs that this process may use: its affinity, and the bandwidth of its control group (cpu.max) where there is one */
uint32_t spin_cpus(void);
/* @mode SPIN_*, with so many CPUs: on one it never spins */
void spin_init(Spin *spin, int mode, uint32_t n_cpus);

/* is it worth it this time? */
static inline bool spin_begins(Spin *spin) {
	if (!spin->ns)
		return false;
	if (!spin->skips)
		return true;
	spin->skips--;
	return false;
}

static inline void spin_ends(Spin *spin, bool found) {
	spin->in_vain = found ? 0 : spin->in_vain + 1;
	if (spin->in_vain < 8)
		return;
	spin->in_vain = 0;
	spin->skips = 64;
}
