/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * shmb_region: what an owner has of a region that it offers. It is one thread's at a time, except for its mapping, which
 * is made when it is first asked for. It borrows its client.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuda-client.h"

#define REGION_NODES_MAX 1024

/* the fd of memory, shared by the windows that one call has adopted */
typedef struct MemoryFile {
	_Atomic uint32_t n_refs;
	int fd;
} MemoryFile;

struct shmb_region {
	struct shmb_client *client;
	char *name;
	MemoryFile *file;
	uint64_t offset; /* of the region in the memory */
	uint64_t size;
	uint64_t generation;
	uint32_t slot;
	uint32_t flags; /* WIRE_REGION_* */
	bool kept;
	bool retired;
	_Atomic(uint8_t *) mapped; /* whole pages */
	uint64_t mapped_size;
	CudaOwned *cuda;			 /* NULL of system memory */
	struct shmb_region_options *unpublished; /* what it is to be registered with; NULL once it is */
};

/* ---- region-memory.c ---- */

/*
 * Makes the memory of a new region, by its name and size: file->fd, mapped and mapped_size. Returns 0 or -errno, of
 * which -ENOMEM: there is not as much; what was made until then goes with the region.
 */
int region_make_memory(struct shmb_region *region, const struct shmb_region_options *options);

/* ---- unregister.c ---- */

/*
 * Unregisters up to WIRE_BATCH_MAX names that are known to be good ones, of the user @principal - 1 (0: of any); with
 * @generations only what has them. Returns 0 with a code for each name in @ret_results, or why nothing was asked.
 */
int unregister_named(struct shmb_client *client, uint32_t principal, const char *const *names,
		     const uint64_t *generations, uint32_t n, uint32_t mode, int timeout, int *ret_results);
