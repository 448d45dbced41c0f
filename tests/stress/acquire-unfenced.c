/* SPDX-License-Identifier: Apache-2.0 */

/* Acquires as they must not be: counted like releases. For the consumers that the stress has to find wrong. */

#include "lane.h"

#define lane_count_acquire(_slot) lane_count(&lane_cache.counters[_slot].acquired)
#include "client/acquire.c"
