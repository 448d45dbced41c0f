/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The checker: a client with the role admin that compares what the broker has with what the load wrote down, under
 * load name by name, and in full while all stand still at the barrier.
 */

#include <sys/types.h>

#include "load.h"

typedef struct Checker {
	Shared *shared;
	struct shmb_client *client;
	const pid_t *pids; /* of the processes of the load; 0 where there is none */
} Checker;

/* what does not change meanwhile must be there */
void checker_look(Checker *checker);
/* everything; all stand still, and the broker gets some time for what it does by itself */
void checker_compare(Checker *checker);
/* nobody is there any more: retires what was kept, and waits until the broker has nothing left */
void checker_finish(Checker *checker);
/* a value of the broker's INFO as a number; -1 when there is none */
long checker_info(Checker *checker, const char *key);
