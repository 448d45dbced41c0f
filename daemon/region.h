/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Region: one registered window of a memory object.
 *
 * A region is made by region_prepare() when an owner's request has been validated, and published by region_commit()
 * when its object is kept (object.h). From then on it is ACTIVE until it is
 * retired, and is gone once no lease counts on it; then it is freed. LAZY keeps the name and grants leases until
 * nobody holds one. REVOKED regions have lost their object at once, and keep their slot until every mapper's
 * page balances. The region owns a reference to its object and the charges that its owner's account pays.
 * Invariant: offset + size <= object->size at registration; generation and slot are never used as a pair again.
 */

#include "account.h"
#include "list.h"
#include "loop.h"
#include "object.h"
#include "peer.h"
#include "table.h"
#include "wire/codec.h"

typedef struct Broker Broker;
typedef struct Region Region;
typedef struct Session Session;
typedef struct Identity Identity;

/* at a region whose first scan found it busy, once a release that membarrier missed must be visible */
typedef enum SecondLook {
	SECOND_LOOK_NEEDED,
	SECOND_LOOK_LATER, /* in Broker.second_looks */
	SECOND_LOOK_NOW,
	SECOND_LOOK_DONE,
} SecondLook;

struct Region {
	Broker *broker;
	uint32_t slot;
	uint32_t state; /* WIRE_STATE_* */
	uint64_t generation;
	uint64_t offset; /* bytes into the object, any alignment */
	uint64_t size;	 /* bytes */
	uint64_t born_ns;
	Object *object;	 /* NULL once revoked */
	uint64_t pinned; /* bytes of GPU memory that holders of a revoked region keep, which cannot be taken back */
	uint8_t pinned_device[16]; /* the UUID of that GPU */
	ListLink object_link;
	Session *owner;	     /* NULL when kept, and once its session is over */
	ListLink owner_link; /* in Session.regions; not linked when kept */
	uint64_t owner_session;
	Identity *identity; /* who registered it, for status */
	uint32_t owner_uid;
	uint32_t owner_number;
	uint32_t flags;
	uint8_t kind;
	uint8_t access;
	uint8_t key_length; /* bytes of its key, which the ledger has, 0 for none */
	bool named;
	bool scanning; /* in Broker.scan */
	uint8_t second_look;
	TableLink name_link;
	ListLink scan_link;
	ListLink second_look_link;
	uint64_t second_look_ns;
	List maps;   /* Map.region_link */
	List leases; /* Lease.region_link */
	List waits;  /* WaitEntry.region_link */
	LoopTimer retire_timer;
	AccountCharge charge;
	size_t name_length;
	char name[];
};

/* the fds of one REGISTER message: several entries may name the same one */
typedef struct RegisterFds {
	const int *fds;
	uint64_t taken; /* bit per fd that an object has taken over */
} RegisterFds;

/*
 * Validates one entry of a REGISTER message for @session and makes the region with its object and charges; nobody
 * sees it yet. @check is over and has accepted the entry's GPU memory; NULL for system memory. On success returns 0 and @ret; else a wire code with a sentence in @why (WIRE_TEXT_MAX), or -errno.
 */
int region_prepare(Session *session, const WireRegister *request, RegisterFds *fds, CudaCheck *check, Region **ret,
		   char *why);
/* what can be refused without looking at the memory; the same results */
int region_check(Session *session, const WireRegister *request, char *why);
/*
 * Commits and publishes it: entry @index of the message with @serial. The name may have been taken meanwhile by an
 * earlier entry. Returns 0, or a wire code with a sentence in @why, and then the region is freed.
 */
int region_commit(Region *region, Session *session, const WireRegister *request, uint64_t serial, uint32_t index,
		  char *why);
/* A region of the ledger's record @slot: linked to its object and its owner, without maps and leases. NULL without memory. */
Region *region_restore(Broker *broker, uint32_t slot, Object *object, Session *owner, Account *account);
/* what the session asked for in an earlier REGISTER with @serial, by entry; NULL where there is nothing */
void regions_find_asked(const Session *session, uint64_t serial, Region *ret_regions[WIRE_BATCH_MAX]);

/* May @session use the region (access list)? May it retire it? */
bool region_admits(const Region *region, const Session *session);
bool region_is_mine(const Region *region, const Session *session);

/*
 * Retires and puts the region on the broker's scan list; broker_scan() decides what is gone. FORCE and DISCARD
 * revoke at once. Returns the bytes given back by DISCARD, and why not all, in @why (may be NULL otherwise).
 */
uint64_t region_retire(Region *region, uint32_t mode, char *why);
/* puts it on the scan list: something that it waited for may have happened */
void region_rescan(Region *region);
/* Looks at every region on the scan list: one barrier for all of them, then each mapper's page by itself. */
void regions_scan(Broker *broker);
/* frees a region that nobody counts on any more */
Region *region_free(Region *region);
/* Takes over what has changed about its memory since it was registered: it may be allocated now. */
void region_refresh(Region *region);
