/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Live: what stays in the foreground until SIGINT or SIGTERM. The first of them ends live_wait(), the second ends
 * the program, so that a broker that does not answer keeps nobody from leaving.
 */

#include <stdint.h>

#include "ctl.h"

enum {
	LIVE_TIME,     /* the time is over */
	LIVE_READABLE, /* the fd is */
	LIVE_STOP,     /* a signal asks for the end */
};

/* before the first message to the broker; 0 or a negative errno */
int live_init(void);
/* waits for @fd (-1: none) up to @timeout ms (-1: no limit); LIVE_*, or a negative errno */
int live_wait(int fd, int timeout);
/* whether a signal has come */
bool live_stopped(void);
uint64_t live_now_ns(void);
