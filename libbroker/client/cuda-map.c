/* SPDX-License-Identifier: Apache-2.0 */

/* What a consumer opens: allocations of other processes, and page-locked system memory. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda-context.h"
#include "lease.h"
#include "map.h"
#include "wire/range.h"

#define OPEN_TRIES 2

struct CudaMapping {
	const CudaDriver *driver;
	CUdevice device;
	CUdeviceptr base;
	uint64_t size;
	uint8_t kind;	    /* how it is closed; WIRE_KIND_MEMORY for memory that is this process' own */
	bool keeps_context; /* it was opened in the primary context, which lives as long */
	uint32_t fork_epoch;
	uint8_t uuid[16];
};

static __thread bool in_callback;

bool cuda_may_call(void) {
	return !in_callback;
}

static int refuse(int code, const char *text) {
	return error_set(code, text);
}

/* ---- CUDA IPC ---- */

/* before the driver is asked: it says the same of all of these */
static int check_owner(const WireMapReply *reply, bool *ret_own) {
	uint64_t namespace;
	char text[WIRE_TEXT_MAX];
	uint32_t pid;

	cuda_identity(&pid, &namespace);
	*ret_own = false;
	if (!reply->owner_pid || reply->owner_pid != pid)
		return 0;
	if (!namespace || !reply->owner_pid_namespace || namespace == reply->owner_pid_namespace) {
		*ret_own = true;
		return 0;
	}
	(void)snprintf(text, sizeof(text),
		       "the exporting process and this one both have PID %u in different PID namespaces; CUDA refuses "
		       "such handles. Share the PID namespace (hostPID, shareProcessNamespace), or offer the memory as "
		       "a VMM allocation: shmb_cuda_alloc()",
		       pid);
	return error_set(SHMB_E_UNSUPPORTED, text);
}

static const char *open_hint(CUresult result) {
	if ((result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_VALUE) && cuda_host_is_wsl())
		return "under WSL CUDA IPC handles do not work: use system memory";
	switch (result) {
	case CUDA_ERROR_INVALID_VALUE:
	case CUDA_ERROR_INVALID_HANDLE:
		return "the handle names nothing here: its owner has freed the memory or has exited, or this process "
		       "cannot see the owner's GPU, or MIG instances or users differ";
	case CUDA_ERROR_INVALID_CONTEXT:
		return "CUDA refuses handles of the same process, and of one with an equal PID in another PID namespace";
	case CUDA_ERROR_ALREADY_MAPPED:
		return "an older mapping of this process is in its way: release the leases on regions that are over";
	default:
		return NULL;
	}
}

/* the cheap part of a validation, which is all there is where the broker does none */
static int check_opened(const CudaDriver *driver, CUdevice device, CUdeviceptr pointer, uint64_t *ret_size) {
	CUdeviceptr base = pointer;
	size_t size = 0;
	CUresult result;
	int ordinal = device;

	result = driver->cuMemGetAddressRange_v2(&base, &size, pointer);
	if (result)
		return cuda_failed(driver, result, "cuMemGetAddressRange", NULL);
	if (base != pointer)
		return refuse(SHMB_E_OUT_OF_BOUNDS, "the handle is not of the allocation's first byte");
	result = driver->cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
	if (!result && ordinal != device)
		return refuse(SHMB_E_NO_DEVICE, "the memory is of another device than its owner says");
	*ret_size = size;
	return 0;
}

int cuda_mapping_check(const CudaMapping *mapping, const WireMapReply *reply) {
	char text[WIRE_TEXT_MAX];

	if (range_within(reply->offset, reply->size, mapping->size))
		return 0;
	(void)snprintf(text, sizeof(text), "offset %llu + size %llu exceeds the allocation (%llu bytes)",
		       (unsigned long long)reply->offset, (unsigned long long)reply->size,
		       (unsigned long long)mapping->size);
	return error_set(SHMB_E_OUT_OF_BOUNDS, text);
}

static CUresult open_handle(struct shmb_client *client, const CudaDriver *driver, const uint8_t *bytes,
			    CUdeviceptr *ret) {
	CUipcMemHandle handle;
	CUresult result = CUDA_ERROR_UNKNOWN;

	memcpy(handle.reserved, bytes, sizeof(handle.reserved));
	for (int i = 0; i < OPEN_TRIES; ++i) {
		result = driver->cuIpcOpenMemHandle_v2(ret, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
		if (result != CUDA_ERROR_ALREADY_MAPPED)
			break;
		/* what is in the way may be a mapping of a generation that is over */
		maps_reap(client);
	}
	return result;
}

static int open_ipc(struct shmb_client *client, CudaMapping *mapping, const WireMapReply *reply,
		    const uint8_t *handle) {
	const CudaDriver *driver = mapping->driver;
	CudaContext context = {};
	CUdeviceptr pointer = 0;
	CUresult result;
	bool own;
	int r;

	r = check_owner(reply, &own);
	if (r)
		return r;
	if (own) {
		mapping->kind = WIRE_KIND_MEMORY;
		if (cuda_find_exported(handle, &mapping->base, &mapping->size, &mapping->device))
			return cuda_mapping_check(mapping, reply);
		return refuse(SHMB_E_UNSUPPORTED,
			      "the memory is this process' own, which CUDA cannot open by a handle: use the pointer");
	}
	if (!driver->cuIpcOpenMemHandle_v2 || !driver->cuMemGetAddressRange_v2)
		return refuse(SHMB_E_UNSUPPORTED, "the driver is too old for CUDA IPC handles: 11.0 is needed");
	r = cuda_enter(driver, mapping->device, cuda_may_make(client), &context);
	if (r)
		return r;
	result = open_handle(client, driver, handle, &pointer);
	r = result ? cuda_failed(driver, result, "cuIpcOpenMemHandle", open_hint(result))
		   : check_opened(driver, mapping->device, pointer, &mapping->size);
	if (!r)
		r = cuda_mapping_check(mapping, reply);
	if (r && !result)
		(void)driver->cuIpcCloseMemHandle(pointer);
	cuda_leave(&context, !r);
	mapping->keeps_context = !r;
	mapping->base = pointer;
	return r;
}

/* ---- VMM ---- */

static int check_imported(const CudaDriver *driver, CUdevice device, CUmemGenericAllocationHandle handle) {
	CUmemAllocationProp properties = {};
	CUresult result = driver->cuMemGetAllocationPropertiesFromHandle(&properties, handle);

	if (result)
		return cuda_failed(driver, result, "cuMemGetAllocationPropertiesFromHandle", NULL);
	if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties.location.id != device)
		return refuse(SHMB_E_NO_DEVICE, "the memory is of another device than its owner says");
	return 0;
}

static int map_imported(CudaMapping *mapping, CUmemGenericAllocationHandle handle, const WireMapReply *reply,
			bool writable) {
	const CudaDriver *driver = mapping->driver;
	CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = mapping->device },
		.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ,
	};
	const char *what = "cuMemAddressReserve";
	CUresult result;

	result = driver->cuMemAddressReserve(&mapping->base, reply->object_size, 0, 0, 0);
	if (result)
		return cuda_failed(driver, result, what, NULL);
	what = "cuMemMap";
	result = driver->cuMemMap(mapping->base, reply->object_size, 0, handle, 0);
	if (!result) {
		what = "cuMemSetAccess";
		result = driver->cuMemSetAccess(mapping->base, reply->object_size, &access, 1);
		if (result)
			(void)driver->cuMemUnmap(mapping->base, reply->object_size);
	}
	if (result) {
		(void)driver->cuMemAddressFree(mapping->base, reply->object_size);
		if (result == CUDA_ERROR_INVALID_VALUE)
			return cuda_failed(
				driver, result, what,
				"the allocation is smaller than its owner says, or its size is no multiple of "
				"the granularity");
		return cuda_failed(driver, result, what, NULL);
	}
	mapping->size = reply->object_size;
	return 0;
}

static int import_vmm(CudaMapping *mapping, const WireMapReply *reply, int fd, uint32_t access) {
	const CudaDriver *driver = mapping->driver;
	CUmemGenericAllocationHandle handle;
	CUresult result;
	int r;

	if (!driver->cuMemImportFromShareableHandle || !driver->cuMemGetAllocationPropertiesFromHandle ||
	    !driver->cuMemAddressReserve || !driver->cuMemMap || !driver->cuMemSetAccess)
		return refuse(SHMB_E_UNSUPPORTED, "the driver is too old for VMM allocations: 10.2 is needed");
	result = driver->cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
							CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	if (result)
		return cuda_failed(driver, result, "cuMemImportFromShareableHandle",
				   result == CUDA_ERROR_INVALID_VALUE
					   ? "the fd is no CUDA allocation, or MIG instances differ"
					   : NULL);
	r = check_imported(driver, mapping->device, handle)
		    ?: map_imported(mapping, handle, reply, access & SHMB_WRITE);
	/* the mapping keeps the memory */
	(void)driver->cuMemRelease(handle);
	return r;
}

/* no function of these is said to need a context: one is not made for them, but used where it is */
static int open_vmm(struct shmb_client *client, CudaMapping *mapping, const WireMapReply *reply, int fd,
		    uint32_t access) {
	CudaContext context = {};
	int r;

	r = cuda_enter(mapping->driver, mapping->device, cuda_may_make(client), &context);
	if (r && r != SHMB_E_STATE)
		return r;
	mapping->keeps_context = !r;
	r = import_vmm(mapping, reply, fd, access);
	mapping->keeps_context &= !r;
	cuda_leave(&context, mapping->keeps_context);
	return r;
}

/* ---- both ---- */

int cuda_mapping_open(struct shmb_client *client, const WireMapReply *reply, const uint8_t *handle, int fd,
		      uint32_t access, CudaMapping **ret) {
	CudaMapping *mapping;
	int r;

	mapping = calloc(1, sizeof(*mapping));
	if (!mapping)
		return error_plain(-ENOMEM);
	mapping->kind = reply->kind;
	mapping->fork_epoch = client_fork_epoch;
	memcpy(mapping->uuid, reply->device.bytes, sizeof(mapping->uuid));
	r = cuda_driver_get(&mapping->driver);
	if (!r)
		r = cuda_device_find(mapping->driver, mapping->uuid, &mapping->device);
	if (!r)
		r = reply->kind == WIRE_KIND_CUDA_IPC ? open_ipc(client, mapping, reply, handle)
						      : open_vmm(client, mapping, reply, fd, access);
	if (r) {
		free(mapping);
		return r;
	}
	*ret = mapping;
	return 0;
}

CudaMapping *cuda_mapping_close(CudaMapping *mapping) {
	const CudaDriver *driver;
	CudaContext context = {};

	if (!mapping)
		return NULL;
	driver = mapping->driver;
	/* in a child the driver's objects are those of its parent */
	if (mapping->fork_epoch != client_fork_epoch || mapping->kind == WIRE_KIND_MEMORY) {
		free(mapping);
		return NULL;
	}
	if (mapping->keeps_context)
		(void)cuda_enter(driver, mapping->device, false, &context);
	if (mapping->kind == WIRE_KIND_CUDA_IPC) {
		(void)driver->cuIpcCloseMemHandle(mapping->base);
	} else {
		(void)driver->cuMemUnmap(mapping->base, mapping->size);
		(void)driver->cuMemAddressFree(mapping->base, mapping->size);
	}
	cuda_leave(&context, false);
	if (mapping->keeps_context)
		cuda_release(driver, mapping->device);
	free(mapping);
	return NULL;
}

void cuda_mapping_place(const CudaMapping *mapping, CudaPlace *ret) {
	ret->base = mapping->base;
	ret->device = mapping->device;
	memcpy(ret->uuid, mapping->uuid, sizeof(ret->uuid));
}

bool cuda_mapping_has(const CudaMapping *mapping, uint64_t pointer) {
	return mapping->kind != WIRE_KIND_MEMORY && pointer >= mapping->base && pointer - mapping->base < mapping->size;
}

/* ---- leases that wait for a stream ---- */

static void on_stream_done(void *data) {
	struct shmb_lease *lease = data;
	struct shmb_client *client = lease->client;

	in_callback = true;
	(void)shmb_lease_release(lease);
	in_callback = false;
	free(lease);
	/* from here on it may be freed */
	atomic_fetch_sub(&client->n_later, 1);
}

static int check_lease(const struct shmb_lease *lease) {
	if (!lease->client)
		return error_set(SHMB_E_STALE, "the lease was released before");
	if (client_is_foreign(lease->client))
		return error_plain(SHMB_E_FORKED);
	return 0;
}

int shmb_lease_release_after(struct shmb_lease *lease, void *stream) {
	const CudaDriver *driver;
	CudaContext context = {};
	struct shmb_lease *later;
	CUresult result;
	int r;

	r = check_lease(lease) ?: cuda_driver_get(&driver);
	if (r)
		return r;
	if (!driver->cuLaunchHostFunc)
		return refuse(SHMB_E_UNSUPPORTED, "the driver is too old: cuLaunchHostFunc() is of 10.0");
	/* the legacy stream is that of the current context */
	if (lease->memory_type == SHMB_MEMORY_CUDA) {
		r = cuda_enter(driver, lease->device, false, &context);
		if (r)
			return r;
	}
	later = malloc(sizeof(*later));
	if (!later) {
		cuda_leave(&context, false);
		return error_plain(-ENOMEM);
	}
	*later = *lease;
	lease->client = NULL;
	lease->address = NULL;
	atomic_fetch_add(&later->client->n_later, 1);
	result = driver->cuLaunchHostFunc(stream, on_stream_done, later);
	cuda_leave(&context, false);
	if (result) {
		*lease = *later;
		atomic_fetch_sub(&lease->client->n_later, 1);
		free(later);
		return cuda_failed(driver, result, "cuLaunchHostFunc", NULL);
	}
	return 0;
}

/* ---- page-locked system memory ---- */

static pthread_mutex_t pin_lock = PTHREAD_MUTEX_INITIALIZER;

static int pin(const CudaDriver *driver, CUdevice device, MappedObject *object) {
	unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
	CUresult result;
	int can = 0;

	if (!driver->cuMemHostRegister_v2 || !driver->cuMemHostUnregister || !driver->cuMemHostGetDevicePointer_v2)
		return refuse(SHMB_E_UNSUPPORTED, "the driver cannot page-lock memory");
	if (!object->writable) {
		(void)driver->cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, device);
		if (!can)
			return refuse(SHMB_E_UNSUPPORTED, "this GPU cannot page-lock memory that is mapped for reading "
							  "only: take the lease with SHMB_WRITE");
		flags |= CU_MEMHOSTREGISTER_READ_ONLY;
	}
	result = driver->cuMemHostRegister_v2(object->base, object->size, flags);
	if (result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
		return refuse(SHMB_E_IN_USE,
			      "this process has page-locked a part of the memory by itself: undo that with "
			      "cuMemHostUnregister()");
	return result ? cuda_failed(driver, result, "cuMemHostRegister", NULL) : 0;
}

int shmb_lease_pin(struct shmb_lease *lease, int32_t device, void **ret_device_pointer) {
	const CudaDriver *driver;
	CudaContext context = {};
	MappedObject *object;
	CUdeviceptr pointer;
	bool is_new = false;
	CUresult result;
	int r;

	r = check_lease(lease);
	if (r)
		return r;
	if (lease->memory_type != SHMB_MEMORY_CPU || !lease->address)
		return error_set(SHMB_E_INVALID, "only a lease with a pointer to system memory can be page-locked");
	if (lease->flags & SHMB_REGION_SPARSE)
		return error_set(SHMB_E_SPARSE,
				 "the memory is not fully allocated: page-locking would allocate all of it");
	r = cuda_driver_get(&driver) ?: cuda_enter(driver, device, cuda_may_make(lease->client), &context);
	if (r)
		return r;
	object = map_lease_object(lease);
	pthread_mutex_lock(&pin_lock);
	if (!object->pinned_on) {
		r = pin(driver, device, object);
		is_new = !r;
	}
	if (is_new)
		object->pinned_on = device + 1;
	pthread_mutex_unlock(&pin_lock);
	if (!r) {
		result = driver->cuMemHostGetDevicePointer_v2(&pointer, object->base, 0);
		r = result ? cuda_failed(driver, result, "cuMemHostGetDevicePointer", NULL) : 0;
	}
	/* it lives as long as the memory is locked in it */
	cuda_leave(&context, is_new);
	if (!r && ret_device_pointer)
		*ret_device_pointer =
			(void *)(uintptr_t)(pointer + (uint64_t)((uint8_t *)lease->address - object->base));
	return r;
}

void cuda_unpin(void *base, int32_t device) {
	const CudaDriver *driver;
	CudaContext context = {};

	if (cuda_driver_get(&driver))
		return;
	if (!cuda_enter(driver, device, false, &context))
		(void)driver->cuMemHostUnregister(base);
	cuda_leave(&context, false);
	cuda_release(driver, device);
}
