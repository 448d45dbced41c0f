/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * TensorMemory: where the bytes of a tensor are, private or in a region of the broker.
 *
 * Private bytes are borrowed from the request or allocated here. In a region they are reached under a lease, which is
 * held from tensor_memory_lease() to tensor_memory_deinit(): the region cannot go away meanwhile, whoever unregisters
 * it. Where the owner cannot truncate the memory the lease has a pointer; where he can it has none, and every access is
 * a guarded copy, which fails where a pointer would be a SIGBUS. Users need not know which: they read and write.
 */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core.h"
#include "shmbroker.h"

typedef struct TensorMemory TensorMemory;

/* A copy with a NUL behind it, to be freed; NULL without memory. Empty bytes of a message have no address. */
static inline char *bytes_copy(Bytes bytes) {
	return strndup(bytes.data ?: "", bytes.size);
}

struct TensorMemory {
	const void *data;	 /* private bytes, of the request or of .allocated; NULL in a region */
	void *allocated;	 /* to be freed */
	uint64_t size;		 /* bytes */
	char *region;		 /* the region's name, NULL where the bytes are private */
	struct shmb_lease lease; /* .client is NULL where none is held */
};

/* borrows @data for as long as @memory is used */
void tensor_memory_borrow(TensorMemory *memory, const void *data, uint64_t size);
/* consumes @data, which is from malloc() */
void tensor_memory_take(TensorMemory *memory, void *data, uint64_t size);
/*
 * @size bytes at @offset of the region @name, for writing too where @write says so. Triton's texts where there is no such
 * region or the range is not within it; else what the broker says. The broker's
 * absence is told to the link of @core.
 */
AnswerCode tensor_memory_lease(TensorMemory *memory, Core *core, struct shmb_client *client, Bytes name,
			       uint64_t offset, uint64_t size, bool write, Answer *answer);
/* copies from and to the tensor; the range must be within .size */
AnswerCode tensor_memory_read(TensorMemory *memory, Core *core, uint64_t offset, void *ret_data, uint64_t size,
			      Answer *answer);
AnswerCode tensor_memory_write(TensorMemory *memory, Core *core, uint64_t offset, const void *data, uint64_t size,
			       Answer *answer);
/* gives the lease back, frees; @memory is as if zeroed afterwards */
void tensor_memory_deinit(TensorMemory *memory);
