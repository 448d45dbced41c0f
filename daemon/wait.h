/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Wait: an UNREGISTER request that is answered when its regions are gone, or when its time is over.
 *
 * Made by wait_new(); wait_add() for every region before it is retired; wait_start() answers at once when all are
 * gone or nobody waits. It frees itself when it has answered, or with its session.
 */

#include "list.h"
#include "loop.h"
#include "wire/codec.h"

typedef struct Region Region;
typedef struct Session Session;
typedef struct Wait Wait;
typedef struct WaitEntry WaitEntry;

struct WaitEntry {
	Wait *wait;
	uint32_t index; /* of the result, UINT32_MAX when it is only counted */
	ListLink region_link;
	ListLink wait_link;
};

struct Wait {
	Session *session;
	ListLink session_link;
	List entries;
	uint64_t serial;
	LoopTimer timer;
	AccountCharge charge;
	bool by_name;
	bool started;
	WireUnregisterReply reply;
	WireUnregisterResult results[WIRE_BATCH_MAX];
	char texts[WIRE_BATCH_MAX][WIRE_TEXT_MAX];
};

/* Returns 0, SHMB_E_BUSY, SHMB_E_QUOTA or -ENOMEM. */
int wait_new(Wait **ret, Session *session, uint64_t serial);
/* Counts it as draining. Returns 0 or -ENOMEM. */
int wait_add(Wait *wait, Region *region, uint32_t index);
/* @timeout_ms 0 answers at once with what still drains, WIRE_FOREVER waits without end */
void wait_start(Wait *wait, uint32_t timeout_ms);
Wait *wait_free(Wait *wait);
/* what waited for the region has it */
void waits_region_gone(Region *region);
