/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * RestartConsumer: a process that does nothing but acquire and release, by name and by handle in turn, region after
 * region, and that a seccomp filter keeps from all system calls. It also holds a lease on each region all the time.
 *
 * Time is divided into windows; the consumer tells of each when it has ended. A system call that it makes is not made,
 * but counted. The filter was tried when restart_consumer_start() returns.
 */

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "bench.h"

typedef struct RestartShared RestartShared;

typedef struct RestartWindow {
	uint64_t slowest_ns; /* acquire and release together */
	uint64_t n;	     /* how often both were done */
	uint64_t n_failed;
	uint64_t n_system_calls;
	int result;	 /* of the last one that failed */
	int system_call; /* the last one */
} RestartWindow;

typedef struct RestartConsumer {
	pid_t pid;
	RestartShared *shared;
	uint32_t window;
} RestartConsumer;

/* of the regions 0 to @n - 1 of @broker, on CPU @cpu (-1: any) */
void restart_consumer_start(RestartConsumer *ret, const Broker *broker, uint32_t n, int cpu);
/* ends the window that began with the last call and begins the next one; @ret may be NULL */
void restart_consumer_turn(RestartConsumer *consumer, RestartWindow *ret);
/* from here on it only holds its leases */
void restart_consumer_rest(RestartConsumer *consumer);
void restart_consumer_stop(RestartConsumer *consumer);
