/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Cuda: GPU memory in this process, by the driver that is found at run time.
 *
 * The driver is loaded by the first call that needs it, once, and never unloaded. Every call runs in the primary context
 * of its device, which is the only one that may open a CUDA IPC handle and the one that frameworks use. A context that
 * the process does not have is not made, unless the client was made with SHMB_CUDA_CONTEXT: it takes hundreds of MiB.
 * Nothing here is usable in the child of a fork after the driver was initialised.
 *
 * A CudaMapping is one allocation that this process has open; a CudaOwned is GPU memory that it offers. cuda-fallback.c
 * is for a library without CUDA: nothing of it is ever made.
 */

#include "client.h"

typedef struct CudaMapping CudaMapping;
typedef struct CudaOwned CudaOwned;
typedef struct CudaContext CudaContext;

/* what a lease on a mapping says */
typedef struct CudaPlace {
	uint64_t base; /* device pointer to the allocation's first byte */
	int32_t device;
	uint8_t uuid[16];
} CudaPlace;

/* what REGISTER says of GPU memory */
typedef struct CudaOffer {
	uint8_t kind; /* WIRE_KIND_CUDA_IPC or WIRE_KIND_CUDA_VMM */
	uint8_t device[16];
	uint8_t handle[WIRE_HANDLE_SIZE]; /* of CUDA_IPC */
	uint64_t object_size;
	uint32_t owner_pid; /* as its process sees itself, 0 for unknown */
	uint64_t owner_pid_namespace;
} CudaOffer;

/* ---- cuda-map.c ---- */

/*
 * Opens the allocation of a MAP reply with what came with it: @handle of WIRE_HANDLE_SIZE bytes or @fd, both borrowed.
 * Is slow, and called without locks. Returns 0, or a code or -errno with its sentence as the last error.
 */
int cuda_mapping_open(struct shmb_client *client, const WireMapReply *reply, const uint8_t *handle, int fd,
		      uint32_t access, CudaMapping **ret);
/*
 * Is the region of @reply within the allocation, which may have been opened for another one? Returns 0, or
 * SHMB_E_OUT_OF_BOUNDS with its sentence as the last error.
 */
int cuda_mapping_check(const CudaMapping *mapping, const WireMapReply *reply);
/* NULL is fine; always NULL. Not in the driver's own callbacks: cuda_may_call(). */
CudaMapping *cuda_mapping_close(CudaMapping *mapping);
void cuda_mapping_place(const CudaMapping *mapping, CudaPlace *ret);
/* is @pointer into memory of others that is open here? */
bool cuda_mapping_has(const CudaMapping *mapping, uint64_t pointer);
/* ends the page-locking of memory that shmb_lease_pin() has locked for @device */
void cuda_unpin(void *base, int32_t device);
/* false in a function that a stream calls: there the driver must not be called */
bool cuda_may_call(void);

/* ---- cuda-region.c ---- */

void cuda_owned_offer(const CudaOwned *owned, CudaOffer *ret);
/* device pointer to the region's first byte */
void *cuda_owned_pointer(const CudaOwned *owned);
/* frees what shmb_cuda_alloc() has made; NULL is fine */
CudaOwned *cuda_owned_free(CudaOwned *owned);

/* ---- region.c ---- */

/*
 * A region of GPU memory, registered unless the options say that it is not yet published. Takes @owned and @fd (-EBADF
 * for none) over, also when it fails. Returns as shmb_region_adopt() does.
 */
int region_adopt_cuda(struct shmb_client *client, const char *name, uint64_t offset, uint64_t size,
		      const struct shmb_region_options *options, CudaOwned *owned, int fd, struct shmb_region **ret);
/* registers one that was not published; 0 when it was */
int region_publish(struct shmb_region *region);
struct shmb_client *region_get_client(const struct shmb_region *region);
/* NULL for system memory */
const CudaOwned *region_get_owned(const struct shmb_region *region);
