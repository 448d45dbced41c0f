/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Ledger: the broker's private books in a memfd, so that they can outlive the process: credentials, sessions,
 * tokens, objects, regions, who has mapped what and who holds what by message. Fixed records, one writer; nothing of
 * it is shown to a client. recover.c makes the broker's objects from it again.
 *
 * A record is free while its first field, an id, is 0; the id is stored last and cleared first, so that at any
 * instant a record is there or is not. What changes in a record that is there is a single field. The redo record
 * names the record that is being written, for the count of what a killed broker left half done. An order of commits
 * keeps records that refer to each other whole: an object before its regions, a session before what it has, and the
 * other way round at the end. Arrays are indexed by what identifies a record in the registry (slot, session index) or
 * by a number of their own.
 */

#include <stdbool.h>
#include <stdint.h>

#include "wire/protocol.h"

#define LEDGER_MAGIC UINT64_C(0x6764656c706d6873) /* "shmpledg" */
#define LEDGER_VERSION 7
#define LEDGER_SERIALS 64
#define LEDGER_CONTAINER_SIZE 64
#define LEDGER_NONE UINT32_MAX /* an index of no record */

typedef struct Ledger Ledger;
typedef struct Lease Lease;
typedef struct Map Map;
typedef struct Object Object;
typedef struct Region Region;
typedef struct Session Session;

enum {
	LEDGER_IDLE,
	LEDGER_SESSION,
	LEDGER_OBJECT,
	LEDGER_REGION,
	LEDGER_MAP,
	LEDGER_LEASE,
};

enum {
	LEDGER_SESSION_ACCEPTS_UNSEALED = 1,
	LEDGER_SESSION_ATTACHED = 2,
	LEDGER_SESSION_DETACHED = 4,
	LEDGER_SESSION_ENDING = 8, /* its connection, which was up, is over */
	LEDGER_SESSION_OVERFLOW_UID = 16,
};

/*
 * An UNREGISTER or RELEASE that was begun, for the case that its client must ask again. What an UNREGISTER named and
 * had then, up to generation @counter, is retired by it or is gone. @done has a bit for each entry that it began to
 * retire, or that it released, @revoked for those of a RELEASE that had been revoked.
 */
typedef struct LedgerSerial {
	uint64_t serial; /* 0 for none */
	uint64_t counter;
	uint64_t done;
	uint64_t revoked;
} LedgerSerial;

typedef struct LedgerSession {
	uint64_t id;
	uint8_t token[WIRE_TOKEN_SIZE];
	uint64_t start_time; /* of the process, clock ticks since boot */
	uint64_t pidfd_inode;
	uint64_t page_inode; /* of the lease page that counts: another one may have been parked in vain */
	uint64_t born_ns;    /* CLOCK_MONOTONIC */
	uint32_t pid;
	uint32_t uid;
	uint32_t gid;
	uint32_t listener;
	uint32_t roles;
	uint32_t rights;
	uint32_t flags;
	uint32_t page_mode;
	uint32_t page_lanes;
	uint32_t event_mask;
	uint32_t serial_next; /* of serials, a ring */
	uint32_t reserved;
	char comm[WIRE_COMM_SIZE];
	char container[LEDGER_CONTAINER_SIZE];
	LedgerSerial serials[LEDGER_SERIALS];
} LedgerSession;

typedef struct LedgerObject {
	uint64_t id;
	uint64_t session; /* the key: 0 for KEEP; device, inode and mode also name the fd on recovery */
	uint64_t device;
	uint64_t inode;
	uint64_t size;
	uint32_t uid;
	uint32_t mode;
	uint32_t flags;
	uint32_t n_acl; /* the list itself is LedgerAcl of the same index */
	uint32_t read_only_enforced;
	uint32_t kind; /* WIRE_KIND_*; of GPU memory LedgerCuda has the rest */
} LedgerObject;

/* kept apart, so that objects without an access list do not pay for one */
typedef struct LedgerAcl {
	WireAclEntry entries[WIRE_ACL_MAX];
} LedgerAcl;

/* GPU memory, kept apart likewise; @device is the record's too and @inode of LedgerObject tells nothing */
typedef struct LedgerCuda {
	uint8_t device[16];
	uint8_t handle[WIRE_HANDLE_SIZE];
	uint64_t owner_pid_namespace;
	uint32_t owner_pid;
	uint32_t reserved;
} LedgerCuda;

typedef struct LedgerRegion {
	uint64_t generation;
	uint64_t offset;
	uint64_t size;
	uint64_t owner_session; /* 0 when kept */
	uint64_t asked_session; /* who asked for it, under which serial, as which entry: asked again it is this one */
	uint64_t asked_serial;
	uint64_t retired_session; /* the same of who retired it */
	uint64_t retired_serial;
	uint64_t born_ns; /* CLOCK_MONOTONIC */
	uint64_t pinned;  /* bytes of GPU memory that its holders keep, once revoked */
	uint8_t pinned_device[16];
	uint16_t asked_index;
	uint16_t retired_index;
	uint32_t object; /* index, LEDGER_NONE once revoked */
	uint32_t owner_uid;
	uint32_t owner_pid;
	uint32_t owner_number;
	uint32_t state;
	uint32_t flags;
	uint8_t kind;
	uint8_t access;
	uint16_t name_length;
	char comm[WIRE_COMM_SIZE];
	char name[255];
	uint8_t key_length; /* the key itself is LedgerKey of the same slot */
} LedgerRegion;

/* kept apart, so that regions without a key do not pay for one */
typedef struct LedgerKey {
	char text[256];
} LedgerKey;

typedef struct LedgerMap {
	uint64_t session;
	uint64_t generation;
	uint32_t slot;
	uint32_t access;
} LedgerMap;

typedef struct LedgerLease {
	uint64_t id;
	uint64_t session;
	uint64_t generation;
	uint64_t asked_serial;
	uint32_t slot; /* LEDGER_NONE once revoked */
	uint32_t asked_index;
} LedgerLease;

typedef struct LedgerHeader {
	uint64_t magic;
	uint32_t version;
	uint32_t header_size;
	uint64_t total_size;
	uint64_t epoch;
	uint32_t session_capacity;
	uint32_t region_capacity; /* of objects too */
	uint32_t map_capacity;
	uint32_t lease_capacity;
	uint64_t sessions_offset;
	uint64_t objects_offset;
	uint64_t acls_offset;
	uint64_t cuda_offset;
	uint64_t regions_offset;
	uint64_t keys_offset;
	uint64_t maps_offset;
	uint64_t leases_offset;
	/* from here on it changes */
	uint64_t generation; /* the last of each that was used */
	uint64_t last_session;
	uint64_t last_lease;
	uint64_t last_object;
	uint64_t last_segment; /* of keeper.h */
	uint32_t n_recoveries; /* since one lasted */
	_Atomic uint32_t redo; /* what is being written */
	uint32_t redo_index;
	uint32_t n_used_sessions; /* records from here on were never used */
	uint32_t n_used_regions;
	uint32_t n_used_objects;
	uint32_t n_used_maps;
	uint32_t n_used_leases;
} LedgerHeader;

/* records of one kind that were used before, a stack */
typedef struct LedgerFree {
	uint32_t *at;
	uint32_t n;
} LedgerFree;

struct Ledger {
	int fd;
	bool frozen; /* the broker stops and leaves everything as it is */
	LedgerHeader *header;
	LedgerFree free_objects;
	LedgerFree free_maps;
	LedgerFree free_leases;
};

/* Makes a new one. Returns 0 or -errno. */
int ledger_init(Ledger *ledger, uint32_t session_capacity, uint32_t region_capacity, uint64_t epoch);
/*
 * Takes over one that another process made, whose header is checked against the file. Borrows @fd and duplicates it.
 * Records may be taken only after ledger_find_free(). Returns 0, -EINVAL with a sentence in @ret_why (static) when it is none of ours, or
 * -errno.
 */
int ledger_open(Ledger *ledger, int fd, const char **ret_why);
/* which records are free; once, when those that are void have been dropped without it */
void ledger_find_free(Ledger *ledger);
void ledger_deinit(Ledger *ledger);

LedgerSession *ledger_session(const Ledger *ledger, uint32_t index);
LedgerObject *ledger_object(const Ledger *ledger, uint32_t index);
const WireAclEntry *ledger_acl(const Ledger *ledger, uint32_t index);
const LedgerCuda *ledger_cuda(const Ledger *ledger, uint32_t index);
LedgerRegion *ledger_region(const Ledger *ledger, uint32_t slot);
/* the key of the region in @slot, which has key_length bytes; borrowed, as long as the record is there */
const char *ledger_key(const Ledger *ledger, uint32_t slot);
LedgerMap *ledger_map(const Ledger *ledger, uint32_t index);
LedgerLease *ledger_lease(const Ledger *ledger, uint32_t index);

/* ids are used from here on, before an fd is parked under one */
void ledger_set_last_session(Ledger *ledger, uint64_t id);
void ledger_put_session(Ledger *ledger, const Session *session);
/* which file its lease page will be, before it is parked */
void ledger_set_page(Ledger *ledger, const Session *session, uint64_t inode);
/* roles, page, subscription and state of a session that is there may have changed */
void ledger_update_session(Ledger *ledger, const Session *session);
/* its connection is over: it ends, also when the broker does not get to it */
void ledger_end_session(Ledger *ledger, const Session *session);
void ledger_drop_session(Ledger *ledger, const Session *session);
/* the UNREGISTER or RELEASE that the session began under @serial; NULL for none */
LedgerSerial *ledger_find_serial(const Ledger *ledger, const Session *session, uint64_t serial);
/* notes that it begins one; the oldest is forgotten */
LedgerSerial *ledger_put_serial(Ledger *ledger, const Session *session, uint64_t serial);
/* its entry @index is about to be released */
void ledger_set_serial_released(LedgerSerial *serial, uint32_t index, bool is_revoked);

/* Sets @object's ledger_index; cannot fail, since there are no more objects than slots. */
void ledger_put_object(Ledger *ledger, Object *object);
void ledger_update_object(Ledger *ledger, const Object *object);
void ledger_drop_object(Ledger *ledger, const Object *object);

/* @session asked for it under @serial as entry @index. Borrows @key, region->key_length bytes. */
void ledger_put_region(Ledger *ledger, const Region *region, const char *key, uint64_t session, uint64_t serial,
		       uint32_t index);
/* its state, and that it has no object any more when it is revoked */
void ledger_set_region_state(Ledger *ledger, const Region *region);
void ledger_set_region_retired(Ledger *ledger, const Region *region, uint64_t session, uint64_t serial, uint32_t index);
void ledger_drop_region(Ledger *ledger, const Region *region);

/* Returns false when the ledger has no room for another map. Sets @map's ledger_index. */
bool ledger_put_map(Ledger *ledger, Map *map);
void ledger_update_map(Ledger *ledger, const Map *map);
void ledger_drop_map(Ledger *ledger, const Map *map);
/* The same for leases by message. */
bool ledger_put_lease(Ledger *ledger, Lease *lease, uint64_t serial, uint32_t index);
void ledger_revoke_lease(Ledger *ledger, const Lease *lease);
void ledger_drop_lease(Ledger *ledger, const Lease *lease);
