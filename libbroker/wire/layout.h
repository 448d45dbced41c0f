/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Layout: the two shared memories that a consumer maps, the registry (read-only) and its lease page.
 *
 * Registry: one writer, the broker. Every field that a reader looks at while it may change is accessed by the
 * layout_load/store helpers. A slot is rewritten only while its word is 0 (FREE); it is published by a release
 * store of the word. A racing reader may see torn names: the re-check of the whole word rejects any such match,
 * and a miss is never authoritative (ask by LOOKUP).
 *
 *	page 0     RegistryHeader
 *	index      u64[index_size]: tag << 32 | slot + 1; 0 empty; LAYOUT_TOMBSTONE
 *	sessions   u64[session_capacity]: session id while attached, 0 when free or detached
 *	slots      RegistrySlot[capacity]: all that an acquire looks at, one cache line each
 *	details    RegistryDetail[capacity]
 *
 * Lease page: one writer, the consumer's process; the broker maps it read-only and trusts it with nothing but
 * that consumer's own leases.
 *
 *	page 0     LeasePageHeader
 *	rung       u32[capacity]: last scan number for which this consumer sent NOTIFY, plus one
 *	lanes      LaneCounter[lanes][capacity]; lane lanes - 1 is shared and always read-modify-write
 *
 * Ordering (Dekker): the consumer counts, then re-reads the word; the broker changes the word, then reads the
 * counts. An acquire is counted by a locked read-modify-write, and both sides are sequentially consistent: so much
 * keeps the memory of whoever holds a lease. Releases first, then acquires are read, so that every counted release
 * has its acquire counted; a page is idle for a slot when the two sums are equal, each page by itself, never summed
 * over pages.
 *
 * A release that the broker does not see only keeps a region too long, until somebody makes it look again: whoever
 * has counted one and then finds the word over sends NOTIFY. It is counted like an acquire in RMW mode. In ASYMMETRIC
 * mode it is a plain store and a compiler barrier, and the broker calls membarrier(GLOBAL_EXPEDITED) between its two
 * steps (Linux 4.16). That call is not enough to keep memory by: Linux since 5.10 forgets that a processor runs a
 * registered process when one of its threads ends there and another one of it runs next (exit_mm() clears the run
 * queue's membarrier state, a switch within one mm does not set it), and leaves that processor out. So a region that
 * a scan finds busy is looked at a second time, a while after it was retired. Whoever sees that the word is over has
 * its count out before it reads `scan`, by a full fence.
 *
 * NOTIFY is coalesced without the broker writing to a lease page: each scan first increments the slot's `scan`;
 * a consumer rings only when its rung word is not yet scan + 1.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

#define LAYOUT_REGISTRY_MAGIC UINT64_C(0x67657262706d6873) /* "shmpbreg" */
#define LAYOUT_LEASE_MAGIC UINT64_C(0x65736c62706d6873)	   /* "shmpblse" */
#define LAYOUT_VERSION 2
#define LAYOUT_PAGE 4096
#define LAYOUT_PROBE_MAX 64
#define LAYOUT_TOMBSTONE UINT64_C(0xffffffff) /* tag 0, slot that cannot be */
#define LAYOUT_CAPACITY_MAX (UINT32_C(1) << 20)
#define LAYOUT_LANES_MAX 64
#define LAYOUT_NAME_HEAD 32
#define LAYOUT_NAME_REST 224
#define LAYOUT_GENERATION_BITS 62 /* 22-bit boot epoch above a 40-bit counter */
#define LAYOUT_COUNTER_BITS 40

enum {
	LAYOUT_OPEN = 1,   /* RegistryHeader.state */
	LAYOUT_CLOSED = 2, /* no acquire succeeds any more */
};

typedef struct RegistryHeader {
	uint64_t magic;
	uint32_t version;
	uint32_t header_size;
	uint64_t total_size;
	uint64_t epoch;
	uint64_t hash_seed[2];
	uint32_t capacity;
	uint32_t index_size; /* a power of two, at least twice the capacity */
	uint32_t session_capacity;
	uint32_t slot_size;
	uint64_t index_offset;
	uint64_t sessions_offset;
	uint64_t slots_offset;
	uint64_t details_offset;
	uint32_t detail_size;
	uint8_t reserved[28];
	/* a line of its own: these change */
	_Atomic uint32_t state;
	_Atomic uint32_t broker_cpu;	/* where the loop last ran, for spinning clients */
	_Atomic uint64_t gone_sequence; /* incremented whenever a generation is gone or revoked */
	_Atomic uint32_t spin_us;	/* how long the broker looks for work before it sleeps: clients may too */
	uint8_t reserved2[44];
} RegistryHeader;

typedef struct RegistrySlot {
	_Atomic uint64_t word; /* generation << 2 | WIRE_STATE_*, 0 when free */
	uint64_t size;
	uint64_t offset;
	uint16_t name_length;
	uint8_t kind;
	uint8_t access;
	_Atomic uint32_t flags;
	char name[LAYOUT_NAME_HEAD]; /* its first bytes; the rest is in the detail */
} RegistrySlot;

typedef struct RegistryDetail {
	char name_rest[LAYOUT_NAME_REST];
	uint64_t object;
	uint64_t object_size;
	uint32_t owner; /* opaque number of the owner */
	_Atomic uint32_t scan;
	uint64_t reserved[9]; /* room, not only for a ready sequence in a page that the owner writes */
} RegistryDetail;

/* bytes of a name of @length that are in the slot */
static inline size_t layout_name_head(size_t length) {
	return length < LAYOUT_NAME_HEAD ? length : LAYOUT_NAME_HEAD;
}

typedef struct LaneCounter {
	_Atomic uint32_t acquired;
	_Atomic uint32_t released;
} LaneCounter;

typedef struct LeasePageHeader {
	uint64_t magic;
	uint32_t version;
	uint32_t header_size;
	uint64_t total_size;
	uint64_t session;
	uint32_t capacity;
	uint32_t lanes;
	uint32_t mode; /* WIRE_ATTACH_ASYMMETRIC or WIRE_ATTACH_RMW */
	uint32_t reserved;
	uint64_t rung_offset;
	uint64_t lanes_offset;
	_Atomic uint64_t lanes_used; /* bit per lane, set before the lane's first use */
} LeasePageHeader;

_Static_assert(sizeof(RegistryHeader) == 192, "the header's changing part has a cache line of its own");
_Static_assert(offsetof(RegistryHeader, state) == 128, "the header's changing part has a cache line of its own");
_Static_assert(sizeof(RegistrySlot) == 64 && sizeof(RegistryDetail) == 320, "whole cache lines");
_Static_assert(sizeof(LaneCounter) == 8, "a lane is 8 bytes a slot");

static inline uint64_t layout_word(uint64_t generation, uint32_t state) {
	return generation << 2 | state;
}

static inline uint64_t layout_word_generation(uint64_t word) {
	return word >> 2;
}

static inline uint32_t layout_word_state(uint64_t word) {
	return word & 3;
}

/* true when a lease may be acquired under this word */
static inline bool layout_word_grants(uint64_t word) {
	uint32_t state = layout_word_state(word);

	return state == WIRE_STATE_ACTIVE || state == WIRE_STATE_LAZY;
}

static inline uint64_t layout_generation(uint64_t epoch, uint64_t counter) {
	return epoch << LAYOUT_COUNTER_BITS | counter;
}

/*
 * Fill in a header, all zero where it is not said otherwise, and return the bytes that a registry or lease page of
 * this shape has, whole pages; 0 when a number is out of range. Capacities are 1 to LAYOUT_CAPACITY_MAX, the epoch
 * has 22 bits, lanes are 1 to LAYOUT_LANES_MAX, @mode is WIRE_ATTACH_ASYMMETRIC or WIRE_ATTACH_RMW.
 */
uint64_t layout_registry_init(RegistryHeader *ret, uint32_t capacity, uint32_t session_capacity, uint64_t epoch,
			      const uint64_t hash_seed[2]);
uint64_t layout_lease_page_init(LeasePageHeader *ret, uint32_t capacity, uint32_t lanes, uint32_t mode,
				uint64_t session);
/* Check a header, of which a whole page can be read, against the size of its file. Return 0 or -EINVAL. */
int layout_registry_check(const RegistryHeader *header, uint64_t file_size);
int layout_lease_page_check(const LeasePageHeader *header, uint64_t file_size);

static inline _Atomic uint64_t *layout_index(const RegistryHeader *registry) {
	return (_Atomic uint64_t *)((uintptr_t)registry + registry->index_offset);
}

static inline _Atomic uint64_t *layout_sessions(const RegistryHeader *registry) {
	return (_Atomic uint64_t *)((uintptr_t)registry + registry->sessions_offset);
}

static inline RegistrySlot *layout_slots(const RegistryHeader *registry) {
	return (RegistrySlot *)((uintptr_t)registry + registry->slots_offset);
}

static inline RegistryDetail *layout_details(const RegistryHeader *registry) {
	return (RegistryDetail *)((uintptr_t)registry + registry->details_offset);
}

static inline _Atomic uint32_t *layout_rung(const LeasePageHeader *page) {
	return (_Atomic uint32_t *)((uintptr_t)page + page->rung_offset);
}

static inline LaneCounter *layout_lane(const LeasePageHeader *page, uint32_t lane) {
	return (LaneCounter *)((uintptr_t)page + page->lanes_offset) + (size_t)lane * page->capacity;
}

/*
 * Reads the counters of @slot in the lanes that are flagged as used: releases, then acquires. Returns acquired
 * minus released modulo 2^32; 0 means that this page holds no lease on the slot. @page's shape is given by the
 * broker's own copy of the header, @shape, and @slot is within it; only lanes_used and the counters are read from
 * @page.
 */
uint32_t layout_lease_page_count(const LeasePageHeader *page, const LeasePageHeader *shape, uint32_t slot);
