/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Registry: the memfd that consumers map, and the broker's own books beside it.
 *
 * The broker is its single writer; layout.h says what a reader may see at any instant. No decision is taken from
 * the shared memory: names are found in a private table, slots lead to Regions through a private array.
 * Invariant: a slot's word is 0 whenever its other fields are written; a generation is never used again.
 */

#include "table.h"
#include "wire/layout.h"

typedef struct Region Region;
typedef struct Registry Registry;

enum {
	_REGISTRY_E_SUCCESS,
	REGISTRY_E_FULL,
};

struct Registry {
	bool frozen;	  /* the broker stops and leaves everything as it is */
	int fd;		  /* read-write, the broker's */
	int read_only_fd; /* what consumers get */
	RegistryHeader *header;
	RegistryHeader shape; /* the private copy of what does not change */
	Region **regions;     /* by slot */
	uint32_t *free_slots; /* stack of slots that were used before */
	uint32_t n_free;
	uint32_t n_used; /* slots from here on were never used */
	uint32_t n_regions;
	uint32_t n_unindexed;
	uint64_t counter; /* of generations, 40 bits */
	Table names;	  /* Region.name_link, only regions that hold their name */
	uint32_t *free_sessions;
	uint32_t n_free_sessions;
	uint32_t n_used_sessions;
};

/* Creates the memfd. @uid's mode 0400 inode and the O_RDONLY fd keep consumers from writing. 0 or -errno. */
int registry_init(Registry *registry, uint32_t capacity, uint32_t session_capacity);
/*
 * Takes over one that another process made, whose header is checked against the file. Borrows @fd and duplicates it.
 * Its generations go on from @generation. Returns 0, -EINVAL with a sentence in @ret_why (static) when it is none of
 * ours, or -errno.
 */
int registry_open(Registry *registry, int fd, uint64_t generation, const char **ret_why);
/*
 * Puts a region back into its slot, and under its name if it still has one, and mends what the slot says otherwise.
 * Returns true if something had to be mended.
 */
bool registry_restore(Registry *registry, Region *region, bool has_name);
/* what the session table is to be: its words, and which entries belong to a session, be it a detached one */
typedef struct RegistrySessions {
	uint64_t *words;
	bool *used;
} RegistrySessions;
/*
 * When all have been put back: clears those of the first @n_slots slots of which nothing is known, and makes the index
 * again unless it is right. Returns how many slots had to be cleared, the index counted as one.
 */
uint32_t registry_settle(Registry *registry, uint32_t n_slots, const RegistrySessions *sessions);
void registry_deinit(Registry *registry);

/* Finds the region that holds @name now, or NULL. */
Region *registry_find(Registry *registry, const char *name, size_t size);
/* The region in @slot if it has that generation, or NULL. */
Region *registry_at(Registry *registry, uint32_t slot, uint64_t generation);

/*
 * Gives @region a slot and a generation. It is not visible yet. Returns 0, REGISTRY_E_FULL or -ENOMEM.
 */
int registry_reserve(Registry *registry, Region *region);
/* Publishes @region: slot, then index. With @replaces its name moves over from that region in one store. */
void registry_publish(Registry *registry, Region *region, Region *replaces);
/* Takes @region's name away, from the index and from the table. */
void registry_unname(Registry *registry, Region *region);
void registry_set_flags(Registry *registry, const Region *region);
void registry_set_state(Registry *registry, Region *region, uint32_t state);
/* Frees the slot; tells caching readers that something is gone. */
void registry_release(Registry *registry, Region *region);
/* Starts a scan: readers ring again from here on. */
void registry_begin_scan(Registry *registry, Region *region);
void registry_gone(Registry *registry);

/* An entry of the session table: UINT32_MAX when all are taken. */
uint32_t registry_session_reserve(Registry *registry);
void registry_session_set(Registry *registry, uint32_t index, uint64_t session);
void registry_session_release(Registry *registry, uint32_t index);
