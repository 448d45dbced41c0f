/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Leases: who holds what.
 *
 * A Map says that a session was given the memory of a generation: only there can a zero-syscall lease exist, and
 * only those lease pages are read when the region retires. A Lease is one taken by message. A Page is the lease
 * page of a session, mapped read-only; it is believed about nothing but that session's own leases.
 */

#include "account.h"
#include "keeper.h"
#include "list.h"
#include "table.h"
#include "wire/layout.h"

typedef struct Broker Broker;
typedef struct Lease Lease;
typedef struct Map Map;
typedef struct Page Page;
typedef struct Region Region;
typedef struct Session Session;

struct Map {
	Session *session;
	Region *region;
	ListLink session_link;
	ListLink region_link;
	TableLink link; /* in Session.map_table, by slot and generation */
	uint32_t ledger_index;
	uint8_t access;
	AccountCharge charge;
	AccountCharge charge_revoked; /* while the region is revoked and this page still counts on it */
};

struct Lease {
	Session *session;
	Region *region; /* NULL once revoked */
	uint64_t id;
	ListLink session_link;
	ListLink region_link;
	TableLink link; /* in Session.lease_table, by id */
	uint32_t ledger_index;
	AccountCharge charge;
};

#define LEASE_FREE_MAX 1024

struct Page {
	int fd; /* read-write: for the seal test, and to be parked */
	KeeperEntry parked;
	LeasePageHeader shape;
	const LeasePageHeader *header; /* mapped through an O_RDONLY fd, so that it does not count as a writer */
	AccountCharge charge;
};

enum {
	_LEASE_E_SUCCESS,
	LEASE_E_QUOTA,
};

/* Returns the session's map of the region, or NULL. */
Map *map_find(Session *session, const Region *region);
/* Finds or makes it. Returns 0, LEASE_E_QUOTA or -ENOMEM. */
int map_new(Session *session, Region *region, uint8_t access, Map **ret);
/* One that the ledger has at @index. Returns 0 or -ENOMEM. */
int map_restore(Session *session, Region *region, uint8_t access, uint32_t index);
/* unlinks and frees; the caller puts the region on the scan list where that matters */
Map *map_free(Map *map);
/* leases that the session's page counts on the region */
uint32_t map_count(const Map *map);

Lease *lease_find(Session *session, uint64_t id);
/* The leases that the session asked for under @serial, by entry; those that are not there stay NULL. */
void leases_find_asked(const Session *session, uint64_t serial, Lease *ret_leases[WIRE_BATCH_MAX]);
/* @serial and @index: which entry of which request asks for it. Returns 0, LEASE_E_QUOTA or -ENOMEM. */
int lease_new(Session *session, Region *region, uint64_t serial, uint32_t index, Lease **ret);
/* One that the ledger has at @index; @region NULL when it was revoked. Returns 0 or -ENOMEM. */
int lease_restore(Session *session, Region *region, uint32_t index);
Lease *lease_free(Lease *lease);
/* those that are kept for later, at most LEASE_FREE_MAX */
void leases_deinit(Broker *broker);
/* the region is gone for this lease; its release answers REVOKED */
void lease_revoke(Lease *lease);

/*
 * Makes the lease page of @session and parks it. @mode WIRE_ATTACH_ASYMMETRIC or _RMW. Returns 0 or -errno.
 */
int page_init(Page *page, Session *session, uint32_t capacity, uint32_t lanes, uint32_t mode);
/*
 * Maps the page of @fd, which another process made for @session. Borrows @fd until it returns 0, then it is the page's.
 * Returns 0, -EINVAL when its shape is not @capacity, @lanes, @mode, or -errno.
 */
int page_open(Page *page, const Session *session, int fd, uint32_t capacity, uint32_t lanes, uint32_t mode);
void page_deinit(Page *page, Broker *broker, uint32_t uid);
/*
 * True when no process maps the page writable any more: then it counts on nothing. (F_SEAL_WRITE succeeds
 * exactly then; memfds, Linux 3.17.) True also when the client has sealed it with F_SEAL_SEAL, so that nobody can tell.
 */
bool page_is_unmapped(const Page *page);
