/* SPDX-License-Identifier: Apache-2.0 */

/* How a server uses the memory of the broker's regions: resolve, check, lease, copy, give back. */

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tensor-memory.h"

void tensor_memory_borrow(TensorMemory *memory, const void *data, uint64_t size) {
	*memory = (TensorMemory){ .data = data, .size = size };
}

void tensor_memory_take(TensorMemory *memory, void *data, uint64_t size) {
	*memory = (TensorMemory){ .data = data, .allocated = data, .size = size };
}

static AnswerCode not_found(Answer *answer, const char *name) {
	return answer_set(answer, ANSWER_NOT_FOUND, "Unable to find shared memory region: '%s'", name);
}

/* what a call of the library on the region @name returned */
static AnswerCode refused(Answer *answer, Core *core, int r, const char *name) {
	switch (r) {
	case SHMB_E_NOT_FOUND:
	case SHMB_E_BAD_NAME:
	case SHMB_E_RETIRING:
	case SHMB_E_REVOKED:
	case SHMB_E_STALE:
		return not_found(answer, name);
	case SHMB_E_TRUNCATED:
		return answer_set(answer, ANSWER_INVALID_ARG, "shared memory region '%s' was truncated by its owner",
				  name);
	case SHMB_E_OUT_OF_BOUNDS:
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "Invalid offset + byte size for shared memory region: '%s'", name);
	default:
		return core_broker_refused(core, r, BYTES(name), answer);
	}
}

static AnswerCode check_range(Answer *answer, const char *name, uint64_t region_size, uint64_t offset, uint64_t size) {
	if (offset >= region_size)
		return answer_set(answer, ANSWER_INVALID_ARG, "Invalid offset for shared memory region: '%s'", name);
	if (size > UINT64_MAX - offset)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "Integer overflow detected: byte_size (%" PRIu64 ") + offset (%" PRIu64
				  ") exceeds maximum value (%" PRIu64 ") for region '%s'",
				  size, offset, UINT64_MAX, name);
	if (offset + size > region_size)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "Invalid offset + byte size for shared memory region: '%s'", name);
	return ANSWER_OK;
}

/*
 * A pointer where the owner cannot truncate the memory, else guarded copies. A region whose owner gave no fd for reading
 * only can be leased only for both.
 */
static int get_lease(struct shmb_client *client, const struct shmb_handle *handle, uint64_t offset, uint64_t size,
		     bool write, struct shmb_lease *ret) {
	uint32_t access = write ? SHMB_READ | SHMB_WRITE : SHMB_READ;
	int r = shmb_handle_get_memory_info(client, handle, offset, size, access, ret);

	if (r == SHMB_E_NO_READ_ONLY_FD) {
		access |= SHMB_WRITE;
		r = shmb_handle_get_memory_info(client, handle, offset, size, access, ret);
	}
	if (r == SHMB_E_UNSEALED)
		r = shmb_handle_get_memory_info(client, handle, offset, size, access | SHMB_COPY, ret);
	return r;
}

AnswerCode tensor_memory_lease(TensorMemory *memory, Core *core, struct shmb_client *client, Bytes name,
			       uint64_t offset, uint64_t size, bool write, Answer *answer) {
	struct shmb_handle handle;
	char *region = bytes_copy(name);
	int r;

	*memory = (TensorMemory){ .size = size, .region = region };
	if (!region)
		return answer_no_memory(answer);
	if (strlen(region) != name.size)
		return not_found(answer, region);
	/* the first answer decides about the range; should the name pass on to another region meanwhile, it is asked again */
	do {
		r = shmb_handle_open(client, region, &handle);
		if (r)
			return refused(answer, core, r, region);
		if (check_range(answer, region, handle.size, offset, size))
			return answer->code;
		/* a tensor without bytes holds its region all the same */
		r = get_lease(client, &handle, offset, size ? size : SHMB_REST, write, &memory->lease);
	} while (r == SHMB_E_STALE);
	if (r) {
		memory->lease.client = NULL;
		return refused(answer, core, r, region);
	}
	if (memory->lease.memory_type != SHMB_MEMORY_CPU)
		return answer_set(answer, ANSWER_UNSUPPORTED, "shared memory region '%s' is not in system memory",
				  region);
	return ANSWER_OK;
}

AnswerCode tensor_memory_read(TensorMemory *memory, Core *core, uint64_t offset, void *ret_data, uint64_t size,
			      Answer *answer) {
	int r;

	if (!size)
		return ANSWER_OK;
	if (!memory->region)
		memcpy(ret_data, (const uint8_t *)memory->data + offset, size);
	else if (memory->lease.address)
		memcpy(ret_data, (const uint8_t *)memory->lease.address + offset, size);
	else {
		r = shmb_lease_copy_out(&memory->lease, offset, ret_data, size);
		if (r)
			return refused(answer, core, r, memory->region);
	}
	return ANSWER_OK;
}

AnswerCode tensor_memory_write(TensorMemory *memory, Core *core, uint64_t offset, const void *data, uint64_t size,
			       Answer *answer) {
	int r;

	if (!size)
		return ANSWER_OK;
	if (!memory->region)
		memcpy((uint8_t *)memory->allocated + offset, data, size);
	else if (memory->lease.address)
		memcpy((uint8_t *)memory->lease.address + offset, data, size);
	else {
		r = shmb_lease_copy_in(&memory->lease, offset, data, size);
		if (r)
			return refused(answer, core, r, memory->region);
	}
	return ANSWER_OK;
}

void tensor_memory_deinit(TensorMemory *memory) {
	if (memory->lease.client)
		(void)shmb_lease_release(&memory->lease);
	free(memory->region);
	free(memory->allocated);
	*memory = (TensorMemory){ 0 };
}
