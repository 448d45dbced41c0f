/* SPDX-License-Identifier: Apache-2.0 */

/* Barrier as it must not be: claims to have made one. For the broker that the stress has to find wrong. */

#include "wire/barrier.h"

int barrier_query(void) {
	return BARRIER_GLOBAL_EXPEDITED | BARRIER_REGISTER_GLOBAL_EXPEDITED;
}

int barrier_register_global(void) {
	return 0;
}

int barrier_global(void) {
	return 0;
}
