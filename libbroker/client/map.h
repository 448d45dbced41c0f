/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Map: what this process has mapped. An object is mapped once per access mode, whatever number of regions are
 * windows of it; a MapEntry per slot leads from a generation to its window.
 *
 * Entries are read by acquires without a lock, and changed under map_lock only. An entry's generation is 0 whenever
 * its other fields change. An object is unmapped only when the registry shows that the generation is over, which it
 * does not before the broker has seen that this process holds no lease on it.
 *
 * GPU memory is opened once per object and access mode likewise. Its entries have no base, so that the fast path finds
 * nothing and the slow one looks at the detail. Drivers are called without map_lock: what is over waits in
 * client->closing until somebody may.
 */

#include <stdatomic.h>
#include <stdint.h>

#include "cuda-client.h"

struct MappedObject {
	MappedObject *next;
	uint64_t id;
	uint64_t size;		   /* bytes that are mapped */
	uint32_t writable;	   /* the access mode: one object for reading, one for writing */
	uint32_t n_refs;	   /* windows */
	uint8_t *base;		   /* NULL until a pointer is wanted, and of GPU memory */
	int fd;			   /* kept for guarded copies, else -EBADF */
	_Atomic int32_t pinned_on; /* device + 1 for which the driver has locked its pages, 0 for none */
	CudaMapping *cuda;	   /* NULL of system memory */
};

/* all that an acquire looks at; many regions are used at random, and each line and page of these is a miss */
struct MapEntry {
	_Atomic uint64_t generation; /* 0 while the entry is empty or changes */
	_Atomic uint64_t extent;     /* size of the region, as MAP said, and above it WIRE_REGION_* flags */
	_Atomic(uint8_t *) base[2];  /* the window, for reading and for writing; NULL when not mapped so, and of GPUs */
};

struct MapDetail {
	_Atomic uint64_t offset; /* of the region in the object */
	_Atomic uint64_t kind;	 /* WIRE_KIND_* */
	MappedObject *object[2]; /* under map_lock */
};

#define MAP_SIZE_BITS 56 /* of an extent; no address space is as large */
#define MAP_SIZE_MAX ((UINT64_C(1) << MAP_SIZE_BITS) - 1)

static inline uint64_t map_extent(uint64_t size, uint32_t flags) {
	return (uint64_t)flags << MAP_SIZE_BITS | size;
}

static inline uint64_t map_extent_size(uint64_t extent) {
	return extent & MAP_SIZE_MAX;
}

static inline uint32_t map_extent_flags(uint64_t extent) {
	return (uint32_t)(extent >> MAP_SIZE_BITS);
}

_Static_assert(sizeof(MapEntry) == 32, "two of them in a cache line");

/*
 * Makes @slot's entry serve @generation with @access (SHMB_READ, SHMB_WRITE, SHMB_COPY) and populates
 * [@offset, @offset + @size) of the region at its first use. Returns 0, a wire code or -errno.
 */
int map_ensure(struct shmb_client *client, uint32_t slot, uint64_t generation, uint32_t access, uint64_t offset,
	       uint64_t size);
/* the fd for guarded copies on a window that is mapped with SHMB_COPY, or -EBADF; valid as long as the lease */
int map_copy_fd(struct shmb_client *client, uint32_t slot, uint64_t generation, uint32_t access);
/*
 * Where the GPU memory of @generation is for @access, and the region's extent. The caller has counted in the slot, so
 * that it stays. false when it is not open so.
 */
bool map_cuda_place(struct shmb_client *client, uint32_t slot, uint64_t generation, uint32_t access, CudaPlace *ret,
		    uint64_t *ret_offset, uint64_t *ret_extent);
/* is the device pointer @pointer into what this client has open of others? */
bool maps_have_cuda(struct shmb_client *client, uint64_t pointer);
/* the mapping behind a lease that has an address in system memory */
MappedObject *map_lease_object(const struct shmb_lease *lease);
/* unmaps what is over */
void maps_reap(struct shmb_client *client);
void maps_free(struct shmb_client *client);

/* bytes of both arrays */
static inline size_t maps_size(uint32_t capacity) {
	return (size_t)capacity * (sizeof(MapEntry) + sizeof(MapDetail));
}

static inline uint32_t map_mode(uint32_t access) {
	return access & SHMB_WRITE ? 1 : 0;
}

/* nothing is over since maps were last looked through */
static inline bool maps_are_settled(const struct shmb_client *client) {
	return __builtin_expect(atomic_load_explicit(&client->registry->gone_sequence, memory_order_acquire) ==
					atomic_load_explicit(&client->gone_seen, memory_order_relaxed),
				1);
}

/* unmaps what is over, if anything is since the last time */
static inline void maps_settle(struct shmb_client *client) {
	if (client->registry && !maps_are_settled(client))
		maps_reap(client);
}
