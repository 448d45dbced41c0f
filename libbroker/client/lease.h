/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Lease: what a struct shmb_lease keeps for the library, and how a count is taken back. An acquire counts and then
 * looks at the slot's word; a release counts and then looks whether somebody waits for it, as layout.h demands.
 */

#include "lane.h"

/* internal[] of a lease; the word under which it was granted follows from its generation unless it was LAZY */
enum {
	LEASE_SLOT,
	LEASE_OFFSET, /* in the region */
	LEASE_FD,     /* for guarded copies, plus one; 0 for none */
};

/* Counts a release on @slot in lane_cache's lane, which must be @client's, and rings the broker if it waits for it. */
void lease_count_release(struct shmb_client *client, uint32_t slot);
