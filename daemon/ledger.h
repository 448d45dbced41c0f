/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Ledger: the broker's private books in a memfd, so that they can outlive the process: credentials, sessions,
 * tokens, objects, regions and who has mapped what. Fixed records, one writer; nothing of it is shown to a client.
 *
 * Commit order: the redo record says what is about to change, then the record changes, then the redo record is
 * cleared. A reader that finds a redo record drops or completes that one change. Record kinds are arrays, indexed
 * by what identifies them in the registry (slot, session index) or by a number of their own.
 */

#include <stdbool.h>
#include <stdint.h>

#include "wire/protocol.h"

#define LEDGER_MAGIC UINT64_C(0x6764656c706d6873) /* "shmpledg" */
#define LEDGER_VERSION 1
#define LEDGER_SERIALS 64

typedef struct Ledger Ledger;
typedef struct Map Map;
typedef struct Object Object;
typedef struct Region Region;
typedef struct Session Session;

enum {
	LEDGER_NONE,
	LEDGER_PUT_SESSION,
	LEDGER_DROP_SESSION,
	LEDGER_PUT_REGION,
	LEDGER_DROP_REGION,
	LEDGER_PUT_MAP,
	LEDGER_DROP_MAP,
};

/* the answer to a request, for the day on which a client asks again */
typedef struct LedgerSerial {
	uint64_t serial;
	uint64_t generation;
	uint64_t lease;
	uint32_t code;
	uint32_t slot;
	uint16_t opcode;
	uint16_t state; /* 0 none, 1 pending, 2 done */
	uint32_t reserved;
} LedgerSerial;

typedef struct LedgerSession {
	uint64_t id; /* 0 when the record is free */
	uint8_t token[WIRE_TOKEN_SIZE];
	uint64_t start_time; /* of the process, clock ticks since boot */
	uint32_t pid;
	uint32_t uid;
	uint32_t gid;
	uint32_t listener;
	uint32_t roles;
	uint32_t flags;
	uint32_t page_mode; /* 0 without a lease page */
	uint32_t page_lanes;
	uint32_t event_mask;
	uint32_t serial_head;
	char comm[WIRE_COMM_SIZE];
	uint64_t reserved[4];
	LedgerSerial serials[LEDGER_SERIALS];
} LedgerSession;

typedef struct LedgerRegion {
	uint64_t generation; /* 0 when the record is free */
	uint64_t object;
	uint64_t object_size;
	uint64_t device; /* dev, ino and mode name the fd on recovery */
	uint64_t inode;
	uint64_t offset;
	uint64_t size;
	uint64_t owner_session; /* 0 when kept */
	uint64_t object_session;
	uint64_t born_realtime_ns;
	uint32_t owner_uid;
	uint32_t owner_pid;
	uint32_t owner_number;
	uint32_t state;
	uint32_t flags;
	uint32_t mode;
	uint8_t kind;
	uint8_t access;
	uint16_t name_length;
	uint32_t n_acl; /* the list itself is LedgerAcl of the same slot */
	wire_b16 gpu;	/* room for CUDA: device, hints of where the owner lives, handle */
	uint64_t owner_pid_namespace;
	uint32_t hint_pid;
	uint32_t bundle; /* room for the parking place of the fd */
	uint8_t handle[WIRE_HANDLE_SIZE];
	char name[256];
} LedgerRegion;

/* kept apart, so that regions without an access list do not pay for one */
typedef struct LedgerAcl {
	WireAclEntry entries[WIRE_ACL_MAX];
} LedgerAcl;

typedef struct LedgerMap {
	uint64_t session; /* 0 when the record is free */
	uint64_t generation;
	uint32_t slot;
	uint32_t access;
} LedgerMap;

typedef struct LedgerHeader {
	uint64_t magic;
	uint32_t version;
	uint32_t header_size;
	uint64_t total_size;
	uint64_t epoch;
	uint32_t session_capacity;
	uint32_t region_capacity;
	uint32_t map_capacity;
	uint32_t reserved;
	uint64_t sessions_offset;
	uint64_t regions_offset;
	uint64_t acls_offset;
	uint64_t maps_offset;
	uint64_t generation_counter;
	uint64_t last_session;
	uint64_t last_lease;
	uint64_t last_object;
	_Atomic uint32_t redo_kind; /* LEDGER_*, stored last, cleared when the change is complete */
	uint32_t redo_index;
} LedgerHeader;

struct Ledger {
	int fd;
	LedgerHeader *header;
	uint32_t *free_maps; /* stack of map records that were used before */
	uint32_t n_free_maps;
	uint32_t n_used_maps;
};

int ledger_init(Ledger *ledger, uint32_t session_capacity, uint32_t region_capacity, uint64_t epoch);
void ledger_deinit(Ledger *ledger);

void ledger_put_session(Ledger *ledger, const Session *session);
void ledger_drop_session(Ledger *ledger, const Session *session);
void ledger_put_region(Ledger *ledger, const Region *region);
void ledger_set_region_state(Ledger *ledger, const Region *region);
void ledger_drop_region(Ledger *ledger, const Region *region);
/* Returns false when the ledger has no room for another map. Sets @map's ledger_index. */
bool ledger_put_map(Ledger *ledger, Map *map);
void ledger_drop_map(Ledger *ledger, const Map *map);
