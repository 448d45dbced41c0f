/* SPDX-License-Identifier: Apache-2.0 */

/* The methods of the shared-memory extension: messages to the core's operations, and back. */

#include <errno.h>
#include <stdlib.h>

#include "grpc.h"
#include "inference.pb-c.h"

/* ---- status ---- */

typedef struct SystemEntry {
	Inference__SystemSharedMemoryStatusResponse__RegionsEntry entry;
	Inference__SystemSharedMemoryStatusResponse__RegionStatus status;
} SystemEntry;

typedef struct CudaEntry {
	Inference__CudaSharedMemoryStatusResponse__RegionsEntry entry;
	Inference__CudaSharedMemoryStatusResponse__RegionStatus status;
} CudaEntry;

/* the map of a response: one block of entries, and pointers to them; false when there is no memory */
static bool map_new(size_t n, size_t size, void **ret_entries, void ***ret_pointers) {
	char *entries = calloc(n + 1, size);
	void **pointers = calloc(n + 1, sizeof(*pointers));

	if (!entries || !pointers) {
		free(entries);
		free(pointers);
		return false;
	}
	/* the entry is the first in each */
	for (size_t i = 0; i < n; i++)
		pointers[i] = entries + i * size;
	*ret_entries = entries;
	*ret_pointers = pointers;
	return true;
}

static void reply_no_memory(GrpcRequest *request) {
	Answer answer = {};

	(void)answer_set(&answer, ANSWER_RESOURCE_EXHAUSTED, "the gateway is out of memory");
	grpc_reply_answer(request, &answer);
}

static void reply_system(GrpcRequest *request, const CoreRegionList *list) {
	Inference__SystemSharedMemoryStatusResponse response = INFERENCE__SYSTEM_SHARED_MEMORY_STATUS_RESPONSE__INIT;
	SystemEntry *entries;

	if (!map_new(list->n, sizeof(*entries), (void **)&entries, (void ***)&response.regions)) {
		reply_no_memory(request);
		return;
	}
	for (size_t i = 0; i < list->n; i++) {
		const CoreRegion *region = &list->regions[i];
		SystemEntry *entry = &entries[i];

		inference__system_shared_memory_status_response__region_status__init(&entry->status);
		inference__system_shared_memory_status_response__regions_entry__init(&entry->entry);
		entry->status.name = grpc_binary(region->name);
		entry->status.key = grpc_binary(region->key);
		entry->status.offset = region->offset;
		entry->status.byte_size = region->byte_size;
		entry->entry.key = entry->status.name;
		entry->entry.value = &entry->status;
	}
	response.n_regions = list->n;
	grpc_reply(request, &response.base);
	free(entries);
	free(response.regions);
}

static void reply_cuda(GrpcRequest *request, const CoreRegionList *list) {
	Inference__CudaSharedMemoryStatusResponse response = INFERENCE__CUDA_SHARED_MEMORY_STATUS_RESPONSE__INIT;
	CudaEntry *entries;

	if (!map_new(list->n, sizeof(*entries), (void **)&entries, (void ***)&response.regions)) {
		reply_no_memory(request);
		return;
	}
	for (size_t i = 0; i < list->n; i++) {
		const CoreRegion *region = &list->regions[i];
		CudaEntry *entry = &entries[i];

		inference__cuda_shared_memory_status_response__region_status__init(&entry->status);
		inference__cuda_shared_memory_status_response__regions_entry__init(&entry->entry);
		entry->status.name = grpc_binary(region->name);
		entry->status.device_id = region->device_id;
		entry->status.byte_size = region->byte_size;
		entry->entry.key = entry->status.name;
		entry->entry.value = &entry->status;
	}
	response.n_regions = list->n;
	grpc_reply(request, &response.base);
	free(entries);
	free(response.regions);
}

static void status(GrpcRequest *request, CoreKind kind, ProtobufCBinaryData name) {
	CoreRegionList list = {};
	Answer answer = {};

	if (core_status(request->core, &request->caller, kind, grpc_bytes(name), &list, &answer) != ANSWER_OK) {
		grpc_reply_answer(request, &answer);
		return;
	}
	if (kind == CORE_SYSTEM)
		reply_system(request, &list);
	else
		reply_cuda(request, &list);
	core_region_list_deinit(&list);
}

static void system_status(GrpcRequest *request) {
	status(request, CORE_SYSTEM, ((const Inference__SystemSharedMemoryStatusRequest *)request->message)->name);
}

static void cuda_status(GrpcRequest *request) {
	status(request, CORE_CUDA, ((const Inference__CudaSharedMemoryStatusRequest *)request->message)->name);
}

/* ---- register ---- */

static void system_register(GrpcRequest *request) {
	const Inference__SystemSharedMemoryRegisterRequest *message =
		(const Inference__SystemSharedMemoryRegisterRequest *)request->message;
	Answer answer = {};

	(void)core_system_register(request->core, &request->caller, grpc_bytes(message->name), grpc_bytes(message->key),
				   message->offset, message->byte_size, &answer);
	grpc_reply_answer(request, &answer);
}

static void cuda_register(GrpcRequest *request) {
	const Inference__CudaSharedMemoryRegisterRequest *message =
		(const Inference__CudaSharedMemoryRegisterRequest *)request->message;
	Answer answer = {};

	(void)core_cuda_register(request->core, &request->caller, grpc_bytes(message->name),
				 grpc_bytes(message->raw_handle), message->device_id, message->byte_size, &answer);
	grpc_reply_answer(request, &answer);
}

/* ---- unregister ---- */

static void unregister(GrpcRequest *request, CoreKind kind, ProtobufCBinaryData name) {
	Answer answer = {};

	if (name.len == 0)
		(void)core_unregister_all(request->core, &request->caller, kind, &answer);
	else
		(void)core_unregister(request->core, &request->caller, kind, grpc_bytes(name), &answer);
	grpc_reply_answer(request, &answer);
}

static void system_unregister(GrpcRequest *request) {
	unregister(request, CORE_SYSTEM,
		   ((const Inference__SystemSharedMemoryUnregisterRequest *)request->message)->name);
}

static void cuda_unregister(GrpcRequest *request) {
	unregister(request, CORE_CUDA, ((const Inference__CudaSharedMemoryUnregisterRequest *)request->message)->name);
}

const GrpcMethod grpc_shm_methods[] = {
	{ GRPC_SERVICE "SystemSharedMemoryStatus", &inference__system_shared_memory_status_request__descriptor,
	  system_status, 0 },
	{ GRPC_SERVICE "SystemSharedMemoryRegister", &inference__system_shared_memory_register_request__descriptor,
	  system_register, 0 },
	{ GRPC_SERVICE "SystemSharedMemoryUnregister", &inference__system_shared_memory_unregister_request__descriptor,
	  system_unregister, 0 },
	{ GRPC_SERVICE "CudaSharedMemoryStatus", &inference__cuda_shared_memory_status_request__descriptor, cuda_status,
	  0 },
	{ GRPC_SERVICE "CudaSharedMemoryRegister", &inference__cuda_shared_memory_register_request__descriptor,
	  cuda_register, 0 },
	{ GRPC_SERVICE "CudaSharedMemoryUnregister", &inference__cuda_shared_memory_unregister_request__descriptor,
	  cuda_unregister, 0 },
	{},
};
