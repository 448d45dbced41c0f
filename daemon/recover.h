/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Recover: makes the broker's objects again from what an earlier process has left with the holder: the ledger, the
 * registry, and the fds that are parked in segments. Nothing of it is believed: headers are checked against their
 * files, records against each other, every fd by device and inode against the record that it is for. Decisions are
 * taken from the ledger alone; the registry is made to say the same.
 *
 * What is half written is dropped, an fd of which nothing is known is closed, a region without its fd is removed and
 * reported. A state of another version, or one with which RECOVER_TRIES brokers in a row did not get to the end of
 * their first turn, is put aside: its registry is closed, so that consumers acquire no more, and the broker starts
 * empty.
 */

#include "notify.h"

typedef struct Broker Broker;

#define RECOVER_TRIES 5

enum {
	_RECOVER_E_SUCCESS,
	RECOVER_E_NOTHING, /* nothing was left, or it was put aside: start empty */
};

/* Takes the fds that it needs out of @fds. Returns 0, RECOVER_E_NOTHING or -errno, after which the state is as it was. */
int recover(Broker *broker, NotifyFds *fds);
