/* SPDX-License-Identifier: Apache-2.0 */

/* What an owner offers: memory that it has allocated itself, memory that the library allocates, handles of others. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda-context.h"
#include "map.h"
#include "wire/range.h"

struct CudaOwned {
	CudaOffer offer;
	CUdeviceptr pointer; /* to the region's first byte */
	CUdeviceptr base;    /* of the allocation */
	CUdevice device;
	uint32_t fork_epoch;
	const CudaDriver *driver; /* of memory that the library has allocated, else NULL */
	CudaOwned *next;	  /* of those of a handle that this process has made */
	bool is_listed;
};

/* ---- handles that this process has made ---- */

static pthread_mutex_t exports_lock = PTHREAD_MUTEX_INITIALIZER;
static CudaOwned *exports;

static void exports_add(CudaOwned *owned) {
	pthread_mutex_lock(&exports_lock);
	owned->next = exports;
	owned->is_listed = true;
	exports = owned;
	pthread_mutex_unlock(&exports_lock);
}

static void exports_remove(CudaOwned *owned) {
	if (!owned->is_listed)
		return;
	pthread_mutex_lock(&exports_lock);
	for (CudaOwned **at = &exports; *at; at = &(*at)->next) {
		if (*at == owned) {
			*at = owned->next;
			break;
		}
	}
	pthread_mutex_unlock(&exports_lock);
}

bool cuda_find_exported(const uint8_t handle[WIRE_HANDLE_SIZE], CUdeviceptr *ret_base, uint64_t *ret_size,
			CUdevice *ret_device) {
	const CudaOwned *owned;

	pthread_mutex_lock(&exports_lock);
	for (owned = exports; owned; owned = owned->next)
		if (owned->fork_epoch == client_fork_epoch && !memcmp(owned->offer.handle, handle, WIRE_HANDLE_SIZE))
			break;
	if (owned) {
		*ret_base = owned->base;
		*ret_size = owned->offer.object_size;
		*ret_device = owned->device;
	}
	pthread_mutex_unlock(&exports_lock);
	return owned;
}

/* ---- what is offered ---- */

static CudaOwned *owned_new(void) {
	CudaOwned *owned = calloc(1, sizeof(*owned));

	if (!owned)
		return NULL;
	owned->fork_epoch = client_fork_epoch;
	cuda_identity(&owned->offer.owner_pid, &owned->offer.owner_pid_namespace);
	return owned;
}

CudaOwned *cuda_owned_free(CudaOwned *owned) {
	CudaContext context = {};

	if (!owned)
		return NULL;
	/* in a child the lock may be held by a thread that is not there, and the memory is its parent's */
	if (owned->fork_epoch == client_fork_epoch) {
		exports_remove(owned);
		if (owned->driver) {
			(void)cuda_enter(owned->driver, owned->device, false, &context);
			(void)owned->driver->cuMemUnmap(owned->base, owned->offer.object_size);
			(void)owned->driver->cuMemAddressFree(owned->base, owned->offer.object_size);
			cuda_leave(&context, false);
		}
	}
	free(owned);
	return NULL;
}

void cuda_owned_offer(const CudaOwned *owned, CudaOffer *ret) {
	*ret = owned->offer;
}

void *cuda_owned_pointer(const CudaOwned *owned) {
	return (void *)(uintptr_t)owned->pointer;
}

/* ---- export ---- */

static uint64_t attribute(const CudaDriver *driver, CUpointer_attribute which, size_t size, CUdeviceptr pointer) {
	uint64_t value = 0;

	/* what a driver does not know is not the case */
	return driver->cuPointerGetAttribute(&value, which, pointer) ? 0 : value & (UINT64_MAX >> (64 - 8 * size));
}

static int refuse_kind(const char *what, const char *remedy) {
	char text[WIRE_TEXT_MAX];

	(void)snprintf(text, sizeof(text), "memory from %s cannot be exported: %s", what, remedy);
	return error_set(SHMB_E_UNSUPPORTED, text);
}

/* which device @pointer is of; refuses what is no memory of one */
static int find_pointer(const CudaDriver *driver, CUdeviceptr pointer, CUdevice *ret) {
	CUresult result;
	unsigned type = 0;
	int ordinal = -1;

	result = driver->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer);
	if (result)
		return cuda_failed(driver, result, "cuPointerGetAttribute",
				   result == CUDA_ERROR_INVALID_VALUE
					   ? "the pointer is not into GPU memory of this process"
					   : NULL);
	if (attribute(driver, CU_POINTER_ATTRIBUTE_IS_MANAGED, 1, pointer))
		return refuse_kind("cudaMallocManaged", "use cudaMalloc, or shmb_cuda_alloc()");
	if (type != CU_MEMORYTYPE_DEVICE)
		return refuse_kind("the host", "offer it as system memory: shmb_region_adopt()");
	result = driver->cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
	if (result)
		return cuda_failed(driver, result, "cuPointerGetAttribute", NULL);
	*ret = ordinal;
	return 0;
}

static int export_vmm(const CudaDriver *driver, CudaOwned *owned, CUmemGenericAllocationHandle handle, int *ret_fd) {
	CUresult result;
	int fd = -EBADF;

	if (!(attribute(driver, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, 8, owned->pointer) &
	      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
		return refuse_kind("cuMemCreate without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
				   "ask for that handle type, or use shmb_cuda_alloc()");
	result = driver->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	if (result)
		return cuda_failed(driver, result, "cuMemExportToShareableHandle",
				   result == CUDA_ERROR_INVALID_VALUE
					   ? "it may be of another process, which alone can offer it"
					   : NULL);
	owned->offer.kind = WIRE_KIND_CUDA_VMM;
	*ret_fd = fd;
	return 0;
}

static int export_ipc(const CudaDriver *driver, CudaOwned *owned) {
	CUipcMemHandle handle;
	CUresult result;
	int integrated = 0;

	(void)driver->cuDeviceGetAttribute(&integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED, owned->device);
	if (integrated)
		return cuda_failed(driver, CUDA_ERROR_NOT_SUPPORTED, "cuIpcGetMemHandle", NULL);
	if (attribute(driver, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, 8, owned->pointer))
		return refuse_kind("cuMemAllocAsync and other pools", "use cudaMalloc, or shmb_cuda_alloc()");
	if (!attribute(driver, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, 4, owned->pointer))
		return refuse_kind("another process, or an allocator without CUDA IPC",
				   "its owner must offer it; else use cudaMalloc or shmb_cuda_alloc()");
	result = driver->cuIpcGetMemHandle(&handle, owned->base);
	if (result)
		return cuda_failed(driver, result, "cuIpcGetMemHandle",
				   cuda_host_is_wsl() ? "under WSL CUDA IPC handles do not work: use system memory"
						      : NULL);
	owned->offer.kind = WIRE_KIND_CUDA_IPC;
	memcpy(owned->offer.handle, handle.reserved, sizeof(owned->offer.handle));
	exports_add(owned);
	return 0;
}

static int export_range(const CudaDriver *driver, CudaOwned *owned, uint64_t size, uint64_t *ret_offset, int *ret_fd) {
	CUmemGenericAllocationHandle handle;
	char text[WIRE_TEXT_MAX];
	size_t range = 0;
	CUresult result;
	int r;

	result = driver->cuMemGetAddressRange_v2(&owned->base, &range, owned->pointer);
	if (result)
		return cuda_failed(driver, result, "cuMemGetAddressRange", NULL);
	owned->offer.object_size = range;
	*ret_offset = owned->pointer - owned->base;
	if (!range_within(*ret_offset, size, range)) {
		(void)snprintf(text, sizeof(text),
			       "offset %llu + size %llu exceeds the allocation (%zu bytes): does it span allocations "
			       "(expandable segments)? Offer each of them",
			       (unsigned long long)*ret_offset, (unsigned long long)size, range);
		return error_set(SHMB_E_OUT_OF_BOUNDS, text);
	}
	if (!driver->cuMemRetainAllocationHandle ||
	    driver->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)owned->pointer))
		return export_ipc(driver, owned);
	r = export_vmm(driver, owned, handle, ret_fd);
	(void)driver->cuMemRelease(handle);
	return r;
}

/* what comes by file descriptor could be offered again, but neither its owner's access list nor its end would hold then */
static int refuse_others(struct shmb_client *client, CUdeviceptr pointer) {
	return maps_have_cuda(client, pointer) ? refuse_kind("another process", "its owner must offer it") : 0;
}

/* enters the context of a device whose memory is to be offered, and notes its UUID */
static int owned_enter(struct shmb_client *client, const CudaDriver *driver, CudaOwned *owned, CudaContext *ret) {
	return cuda_device_uuid(driver, owned->device, owned->offer.device)
		       ?: cuda_enter(driver, owned->device, cuda_may_make(client), ret);
}

int shmb_cuda_export(struct shmb_client *client, const char *name, const void *device_pointer, uint64_t size,
		     const struct shmb_region_options *options, struct shmb_region **ret) {
	const CudaDriver *driver;
	CudaContext context = {};
	CudaOwned *owned;
	uint64_t offset;
	int fd = -EBADF, r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	r = cuda_driver_get(&driver);
	if (r)
		return r;
	owned = owned_new();
	if (!owned)
		return error_plain(-ENOMEM);
	owned->pointer = (uintptr_t)device_pointer;
	r = find_pointer(driver, owned->pointer, &owned->device) ?: refuse_others(client, owned->pointer);
	if (!r)
		r = owned_enter(client, driver, owned, &context);
	if (!r)
		r = export_range(driver, owned, size, &offset, &fd);
	cuda_leave(&context, false);
	if (r) {
		cuda_owned_free(owned);
		return r;
	}
	return region_adopt_cuda(client, name, offset, size, options, owned, fd, ret);
}

/* ---- allocation ---- */

static int owned_map(const CudaDriver *driver, CudaOwned *owned, CUmemGenericAllocationHandle handle, uint64_t size) {
	CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = owned->device },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUresult result;

	result = driver->cuMemAddressReserve(&owned->base, size, 0, 0, 0);
	if (result)
		return cuda_failed(driver, result, "cuMemAddressReserve", NULL);
	result = driver->cuMemMap(owned->base, size, 0, handle, 0);
	if (!result) {
		result = driver->cuMemSetAccess(owned->base, size, &access, 1);
		if (result)
			(void)driver->cuMemUnmap(owned->base, size);
	}
	if (result) {
		(void)driver->cuMemAddressFree(owned->base, size);
		return cuda_failed(driver, result, "cuMemMap", NULL);
	}
	owned->pointer = owned->base;
	owned->offer.object_size = size;
	owned->driver = driver;
	return 0;
}

static int owned_allocate(const CudaDriver *driver, CudaOwned *owned, uint64_t size, int *ret_fd) {
	CUmemAllocationProp properties = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = owned->device },
	};
	CUmemGenericAllocationHandle handle;
	size_t granularity = 0;
	uint64_t padded;
	CUresult result;
	int fd = -EBADF, r;

	result = driver->cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
	if (result || !granularity)
		return cuda_failed(driver, result, "cuMemGetAllocationGranularity", NULL);
	if (__builtin_add_overflow(size, granularity - 1, &padded))
		return error_plain(-ENOMEM);
	padded = padded / granularity * granularity;
	result = driver->cuMemCreate(&handle, padded, &properties, 0);
	if (result)
		return cuda_failed(driver, result, "cuMemCreate", NULL);
	result = driver->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	r = result ? cuda_failed(driver, result, "cuMemExportToShareableHandle", NULL)
		   : owned_map(driver, owned, handle, padded);
	/* mapping and fd keep the memory */
	(void)driver->cuMemRelease(handle);
	if (r) {
		(void)close_fd(fd);
		return r;
	}
	owned->offer.kind = WIRE_KIND_CUDA_VMM;
	*ret_fd = fd;
	return 0;
}

static int check_vmm(const CudaDriver *driver, CUdevice device) {
	int supported = 0;

	if (driver->cuMemCreate && driver->cuMemExportToShareableHandle)
		(void)driver->cuDeviceGetAttribute(
			&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
	return supported ? 0
			 : error_set(SHMB_E_UNSUPPORTED, "this GPU or its driver has no memory that is shared by file "
							 "descriptors: use cudaMalloc and shmb_cuda_export()");
}

int shmb_cuda_alloc(struct shmb_client *client, const char *name, uint64_t size, int32_t ordinal,
		    const struct shmb_region_options *options, struct shmb_region **ret) {
	const CudaDriver *driver;
	CudaContext context = {};
	CudaOwned *owned;
	CUresult result;
	int fd = -EBADF, r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (!size)
		return error_set(SHMB_E_OUT_OF_BOUNDS, "the size is 0");
	r = cuda_driver_get(&driver);
	if (r)
		return r;
	owned = owned_new();
	if (!owned)
		return error_plain(-ENOMEM);
	result = driver->cuDeviceGet(&owned->device, ordinal);
	r = result ? cuda_failed(driver, result, "cuDeviceGet", NULL) : check_vmm(driver, owned->device);
	if (!r)
		r = owned_enter(client, driver, owned, &context);
	if (!r)
		r = owned_allocate(driver, owned, size, &fd);
	cuda_leave(&context, false);
	if (r) {
		cuda_owned_free(owned);
		return r;
	}
	return region_adopt_cuda(client, name, 0, size, options, owned, fd, ret);
}

/* ---- memory of others ---- */

/* @ret_asked is what the caller knows of the struct */
static int owned_of_handle(const struct shmb_client *client, const struct shmb_cuda_handle *handle, uint8_t kind,
			   struct shmb_cuda_handle *ret_asked, CudaOwned **ret) {
	struct shmb_cuda_handle asked = {};
	CudaOwned *owned;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (!handle->struct_size)
		return error_set(SHMB_E_INVALID, "struct_size of the handle is not set");
	memcpy(&asked, handle, handle->struct_size < sizeof(asked) ? handle->struct_size : sizeof(asked));
	owned = owned_new();
	if (!owned)
		return error_plain(-ENOMEM);
	owned->offer = (CudaOffer){ .kind = kind, .object_size = asked.allocation_size };
	memcpy(owned->offer.device, asked.device_uuid, sizeof(owned->offer.device));
	*ret_asked = asked;
	*ret = owned;
	return 0;
}

int shmb_cuda_adopt(struct shmb_client *client, const char *name, const struct shmb_cuda_handle *handle,
		    const struct shmb_region_options *options, struct shmb_region **ret) {
	struct shmb_cuda_handle asked;
	CudaOwned *owned;
	int r = owned_of_handle(client, handle, WIRE_KIND_CUDA_IPC, &asked, &owned);

	if (r)
		return r;
	owned->offer.owner_pid = asked.owner_pid;
	owned->offer.owner_pid_namespace = asked.owner_pid_namespace;
	memcpy(owned->offer.handle, asked.handle, sizeof(owned->offer.handle));
	return region_adopt_cuda(client, name, asked.offset, asked.size, options, owned, -EBADF, ret);
}

int shmb_cuda_adopt_fd(struct shmb_client *client, const char *name, int fd, const struct shmb_cuda_handle *handle,
		       const struct shmb_region_options *options, struct shmb_region **ret) {
	struct shmb_cuda_handle asked;
	CudaOwned *owned;
	int r = owned_of_handle(client, handle, WIRE_KIND_CUDA_VMM, &asked, &owned), own;

	if (r)
		return r;
	own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (own < 0) {
		r = error_plain(errno == EBADF ? SHMB_E_BAD_FD : -errno);
		cuda_owned_free(owned);
		return r;
	}
	return region_adopt_cuda(client, name, asked.offset, asked.size, options, owned, own, ret);
}

/* ---- publish ---- */

int shmb_cuda_publish(struct shmb_region *region, void *stream) {
	struct shmb_client *client = region_get_client(region);
	const CudaOwned *owned = region_get_owned(region);
	const CudaDriver *driver;
	CudaContext context = {};
	CUresult result;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (!owned || !owned->pointer)
		return error_set(SHMB_E_INVALID, "the region is not of GPU memory that this process has");
	r = cuda_driver_get(&driver) ?: cuda_enter(driver, owned->device, cuda_may_make(client), &context);
	if (r)
		return r;
	result = driver->cuStreamSynchronize(stream);
	cuda_leave(&context, false);
	return result ? cuda_failed(driver, result, "cuStreamSynchronize", NULL) : region_publish(region);
}
