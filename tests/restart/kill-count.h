/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the brokers that are killed systematically share with the program that has them killed. */

#include <stdatomic.h>
#include <stdint.h>

#define KILL_COUNT_MAX 2

typedef struct KillCount {
	_Atomic uint64_t passed;		  /* kill points, by all brokers */
	_Atomic uint64_t kill_at[KILL_COUNT_MAX]; /* whoever passes as the so many-th dies; 0 for nobody */
	_Atomic uint64_t kills;
} KillCount;
