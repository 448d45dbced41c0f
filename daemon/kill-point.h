/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Kill points: the places between two writes to what outlives the process. A build with SHMBROKER_KILL_POINTS, which
 * only the tests make, kills itself at the n-th of them; in every other build they are nothing.
 */

#ifdef SHMBROKER_KILL_POINTS
void kill_point(void);
#else
#define kill_point() ((void)0)
#endif
