/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory of cuMemAlloc() and its kin, what pointers say about themselves, handles of CUDA IPC, and page-locked memory.
 *
 * Allocations of less than 2 MiB lie in a block with others, at multiples of 512 bytes.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state.h"

#define SUB_ALIGNMENT 512

typedef struct Block Block;
struct Block {
	Block *next;
	uint8_t *map;
	uint64_t file;
	uint32_t device;
	size_t used; /* up to here; it is not given out again before the block is empty */
	unsigned int n_live;
};

typedef struct Pinned Pinned;
struct Pinned {
	Pinned *next;
	uint8_t *start;
	size_t size;
};

/* the 64 bytes that cuIpcGetMemHandle() gives */
typedef struct Handle {
	char magic[8];
	uint64_t owner;	     /* record of the exporter */
	uint64_t allocation; /* of its */
	uint64_t file;
	uint64_t size; /* bytes of the allocation */
	uint64_t map_size;
	uint32_t offset; /* of the allocation in the file */
	int32_t pid;
	uint32_t euid;
	uint32_t device;
} Handle;

_Static_assert(sizeof(Handle) == sizeof(CUipcMemHandle), "a handle has 64 bytes");

static const char magic[8] = "fakeIPC";
static FakeRange *ranges;
static Block *blocks;
static Pinned *pinned;
static uint64_t pinned_bytes;

FakeRange *fake_range_find(CUdeviceptr pointer) {
	uint8_t *at = (uint8_t *)(uintptr_t)pointer;

	for (FakeRange *range = ranges; range; range = range->next)
		if (at >= range->start && at < range->start + range->size)
			return range;
	return NULL;
}

FakeRange *fake_range_new(int kind) {
	FakeRange *range = calloc(1, sizeof(*range));

	if (!range)
		return NULL;
	range->kind = kind;
	range->context = fake_current();
	range->next = ranges;
	ranges = range;
	return range;
}

void fake_range_free(FakeRange *range) {
	for (FakeRange **at = &ranges; *at; at = &(*at)->next)
		if (*at == range) {
			*at = range->next;
			break;
		}
	free(range);
}

bool fake_range_covers(CUdeviceptr pointer, size_t size) {
	FakeRange *range = fake_range_find(pointer);
	uint8_t *at = (uint8_t *)(uintptr_t)pointer;

	return range && size <= (size_t)(range->start + range->size - at);
}

/* makes the file of an allocation and maps it; NULL when it cannot */
static uint8_t *file_new(uint64_t id, size_t size) {
	char path[4096];
	void *map = MAP_FAILED;
	int fd;

	fake_path(path, "m", id);
	fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd < 0)
		return NULL;
	(void)fchmod(fd, 0666);
	if (ftruncate(fd, (off_t)size) == 0)
		map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	(void)close(fd);
	if (map == MAP_FAILED) {
		(void)unlink(path);
		return NULL;
	}
	return map;
}

/* the exporter frees: what importers still read is the driver's business, and not documented */
static void file_free(uint64_t id, uint8_t *map, size_t size) {
	char path[4096];

	fake_path(path, "m", id);
	if (fake_setting_is("FREE", "poison"))
		memset(map, 0xdd, size);
	else if (fake_setting_is("FREE", "unmap"))
		(void)!truncate(path, 0);
	(void)munmap(map, size);
	(void)unlink(path);
}

static Block *block_for(size_t size, uint32_t device) {
	Block *block;

	for (block = blocks; block; block = block->next)
		if (block->device == device && FAKE_BLOCK_SIZE - block->used >= size)
			return block;
	block = calloc(1, sizeof(*block));
	if (!block)
		return NULL;
	block->file = fake_random();
	block->device = device;
	block->map = file_new(block->file, FAKE_BLOCK_SIZE);
	if (!block->map)
		return free(block), NULL;
	block->next = blocks;
	blocks = block;
	return block;
}

static Block *block_of(uint64_t file) {
	for (Block *block = blocks; block; block = block->next)
		if (block->file == file)
			return block;
	return NULL;
}

static void block_unref(Block *block) {
	if (--block->n_live)
		return;
	for (Block **at = &blocks; *at; at = &(*at)->next)
		if (*at == block) {
			*at = block->next;
			break;
		}
	file_free(block->file, block->map, FAKE_BLOCK_SIZE);
	free(block);
}

static bool has_room(size_t size) {
	uint64_t total = fake_setting_number("TOTAL_BYTES", UINT64_C(8) << 30);

	return size <= total && fake_used(fake_current_index()) + size <= total;
}

static CUresult allocate(CUdeviceptr *pointer, size_t size, int kind) {
	size_t rounded = (size + SUB_ALIGNMENT - 1) / SUB_ALIGNMENT * SUB_ALIGNMENT;
	uint32_t device = fake_current_index();
	FakeRange *range;
	Block *block = NULL;

	if (!size || !pointer)
		return CUDA_ERROR_INVALID_VALUE;
	if (!has_room(size))
		return CUDA_ERROR_OUT_OF_MEMORY;
	range = fake_range_new(kind);
	if (!range)
		return CUDA_ERROR_OUT_OF_MEMORY;
	range->id = fake_random();
	range->device = device;
	range->asked = range->size = size;
	if (rounded < FAKE_BLOCK_SIZE && kind == FAKE_LEGACY) {
		block = block_for(rounded, device);
		if (!block)
			goto bad;
		range->map = block->map;
		range->map_size = FAKE_BLOCK_SIZE;
		range->file = block->file;
		range->start = block->map + block->used;
		block->used += rounded;
		block->n_live++;
	} else {
		range->file = fake_random();
		range->map_size = (size + FAKE_BLOCK_SIZE - 1) / FAKE_BLOCK_SIZE * FAKE_BLOCK_SIZE;
		range->map = range->start = file_new(range->file, range->map_size);
		if (!range->map)
			goto bad;
	}
	if (!fake_entry_add(range->id, range->file, range->map_size, device, true)) {
		if (block)
			block_unref(block);
		else
			file_free(range->file, range->map, range->map_size);
		goto bad;
	}
	*pointer = (CUdeviceptr)(uintptr_t)range->start;
	return CUDA_SUCCESS;
bad:
	fake_range_free(range);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult release(CUdeviceptr pointer) {
	FakeRange *range = fake_range_find(pointer);
	Block *block;

	if (!pointer)
		return CUDA_SUCCESS;
	if (!range || range->kind == FAKE_IMPORTED || range->kind == FAKE_VMM ||
	    (CUdeviceptr)(uintptr_t)range->start != pointer)
		return CUDA_ERROR_INVALID_VALUE;
	fake_entry_remove(range->id);
	block = block_of(range->file);
	if (block)
		block_unref(block);
	else
		file_free(range->file, range->map, range->map_size);
	fake_range_free(range);
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
	FAKE_ENTRY(FAKE_CONTEXT, allocate(pointer, size, FAKE_LEGACY), "size=%zu", size);
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
	FAKE_ENTRY(FAKE_CONTEXT, release(pointer), "%#llx", pointer);
}

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size, unsigned int flags) {
	FAKE_ENTRY(FAKE_CONTEXT,
		   flags == CU_MEM_ATTACH_GLOBAL ? allocate(pointer, size, FAKE_MANAGED)
						 : (CUresult)CUDA_ERROR_INVALID_VALUE,
		   "size=%zu", size);
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream) {
	(void)stream;
	FAKE_ENTRY(FAKE_CONTEXT, allocate(pointer, size, FAKE_POOL), "size=%zu", size);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
	(void)stream;
	FAKE_ENTRY(FAKE_CONTEXT, release(pointer), "%#llx", pointer);
}

/* is an allocation what shares a handle and a range, or the block that it lies in? */
static bool unit_is_block(const FakeRange *range) {
	return range->kind == FAKE_LEGACY && range->map_size != range->size && block_of(range->file) &&
	       fake_setting_is("U3", "block");
}

static void unit_of(const FakeRange *range, uint8_t **base, size_t *size) {
	*base = unit_is_block(range) ? range->map : range->start;
	*size = unit_is_block(range) ? range->map_size : range->size;
}

static CUresult do_range(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
	FakeRange *range = fake_range_find(pointer);
	uint8_t *start;
	size_t length;

	if (!range)
		return CUDA_ERROR_INVALID_VALUE;
	unit_of(range, &start, &length);
	if (base)
		*base = (CUdeviceptr)(uintptr_t)start;
	if (size)
		*size = length;
	return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_range(base, size, pointer), "%#llx", pointer);
}

static bool is_legacy_capable(const FakeRange *range) {
	return range->kind == FAKE_LEGACY || (range->kind == FAKE_IMPORTED && fake_setting_is("U2", "allow"));
}

static CUresult do_pointer(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
	FakeRange *range = fake_range_find(pointer);
	uint8_t *base;
	size_t size;
	int ordinal;

	if (!range)
		return CUDA_ERROR_INVALID_VALUE;
	unit_of(range, &base, &size);
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		/* mappings of handles have none */
		*(CUcontext *)data = range->kind == FAKE_VMM ? NULL : range->context;
		break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)data = CU_MEMORYTYPE_DEVICE;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)data = pointer;
		break;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long long *)data = range->id;
		break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(unsigned char *)data = range->kind == FAKE_MANAGED;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		ordinal = fake_ordinal(range->device);
		*(int *)data = ordinal;
		break;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		*(unsigned char *)data = is_legacy_capable(range) && !fake_setting_is("TEGRA", "1");
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)data = (CUdeviceptr)(uintptr_t)base;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = size;
		break;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(unsigned char *)data = 1;
		break;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		*(uint64_t *)data = range->kind == FAKE_VMM ? fake_vmm_handle_types(range) : 0;
		break;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
		*(unsigned int *)data = range->kind == FAKE_VMM ? range->access : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
		break;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		*(void **)data = range->kind == FAKE_POOL ? range : NULL;
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_pointer(data, attribute, pointer), "%u %#llx", attribute, pointer);
}

static CUresult do_pointers(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
	for (unsigned int i = 0; i < count; ++i)
		/* what does not apply to a pointer is left as zero */
		(void)do_pointer(data[i], attributes[i], pointer);
	return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_pointers(count, attributes, data, pointer), "%u %#llx", count, pointer);
}

static CUresult do_export(CUipcMemHandle *ret, CUdeviceptr pointer) {
	FakeRange *range = fake_range_find(pointer);
	Handle handle = { .pid = getpid(), .euid = geteuid(), .owner = fake.record->id };
	uint8_t *base;
	size_t size;

	if (fake_setting_is("TEGRA", "1"))
		return CUDA_ERROR_NOT_SUPPORTED;
	if (!range || !is_legacy_capable(range))
		return CUDA_ERROR_INVALID_VALUE;
	unit_of(range, &base, &size);
	if (fake_setting_is("WSL", "1") && size >= UINT64_C(18) << 30)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(handle.magic, magic, sizeof(magic));
	handle.allocation = range->id;
	handle.file = range->file;
	handle.size = size;
	handle.map_size = range->map_size;
	handle.offset = (uint32_t)(base - range->map);
	handle.device = range->device;
	memcpy(ret, &handle, sizeof(handle));
	return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
	FAKE_ENTRY(FAKE_CONTEXT, do_export(handle, pointer), "%#llx", pointer);
}

/* what the exporter and its death say about an open */
static CUresult may_open(const Handle *handle) {
	FakeRecord owner;
	bool has, is_alive;

	if (memcmp(handle->magic, magic, sizeof(magic)))
		return fake_refusal();
	/* the value alone counts: processes of two pid namespaces may have the same */
	if (handle->pid == getpid())
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!fake_is_present(handle->device))
		return CUDA_ERROR_INVALID_VALUE;
	if (fake_is_other_instance(handle->device))
		return fake_refusal();
	if (!fake_record_find(handle->owner, handle->allocation, &owner, &has, &is_alive))
		return fake_refusal();
	if (!is_alive && !fake_setting_is("U1", "allow"))
		return fake_refusal();
	if (!has)
		return fake_refusal();
	if (owner.is_mps != fake.record->is_mps && fake_setting_is("U5", "refuse"))
		return fake_refusal();
	if (handle->euid != geteuid() && fake_setting_is("U7", "refuse"))
		return fake_refusal();
	if (handle->device != fake_current_index() && fake_setting_is("PEER", "0"))
		return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	return CUDA_SUCCESS;
}

static FakeRange *imported(const Handle *handle) {
	for (FakeRange *range = ranges; range; range = range->next)
		if (range->kind == FAKE_IMPORTED && range->id == handle->allocation)
			return range;
	return NULL;
}

static CUresult do_open(CUdeviceptr *pointer, const CUipcMemHandle *bytes, unsigned int flags) {
	Handle handle;
	FakeRange *range;
	char path[4096];
	void *map;
	CUresult result;
	int fd;

	memcpy(&handle, bytes, sizeof(handle));
	if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
		return CUDA_ERROR_INVALID_VALUE;
	if (fake_setting_is("TEGRA", "1"))
		return CUDA_ERROR_NOT_SUPPORTED;
	if (fake_setting_is("WSL", "1"))
		return CUDA_ERROR_INVALID_HANDLE;
	result = may_open(&handle);
	if (result)
		return result;
	range = imported(&handle);
	if (range) {
		/* a handle may be open in one context of a device only */
		if (range->context != fake_current())
			return CUDA_ERROR_INVALID_CONTEXT;
		range->refs++;
		*pointer = (CUdeviceptr)(uintptr_t)range->start;
		return CUDA_SUCCESS;
	}
	fake_path(path, "m", handle.file);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return fake_refusal();
	map = mmap(NULL, handle.map_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	(void)close(fd);
	range = map == MAP_FAILED ? NULL : fake_range_new(FAKE_IMPORTED);
	if (!range || !fake_entry_add(handle.allocation, handle.file, handle.map_size, handle.device, false)) {
		if (map != MAP_FAILED)
			(void)munmap(map, handle.map_size);
		if (range)
			fake_range_free(range);
		return CUDA_ERROR_MAP_FAILED;
	}
	range->map = map;
	range->map_size = handle.map_size;
	range->start = range->map + handle.offset;
	range->size = range->asked = handle.size;
	range->device = handle.device;
	range->id = handle.allocation;
	range->file = handle.file;
	range->owner = handle.owner;
	range->refs = 1;
	*pointer = (CUdeviceptr)(uintptr_t)range->start;
	return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) {
	FAKE_ENTRY(FAKE_CONTEXT, do_open(pointer, &handle, flags), "%#llx", fake_call.result ? 0 : *pointer);
}

static CUresult do_close(CUdeviceptr pointer) {
	FakeRange *range = fake_range_find(pointer);

	if (!range || range->kind != FAKE_IMPORTED || (CUdeviceptr)(uintptr_t)range->start != pointer)
		return CUDA_ERROR_INVALID_VALUE;
	if (--range->refs)
		return CUDA_SUCCESS;
	fake_entry_remove(range->id);
	(void)munmap(range->map, range->map_size);
	fake_range_free(range);
	return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
	FAKE_ENTRY(FAKE_CONTEXT, do_close(pointer), "%#llx", pointer);
}

static CUresult do_pin(void *pointer, size_t size, unsigned int flags) {
	Pinned *pin;

	if (!pointer || !size ||
	    flags & ~(unsigned int)(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
				    CU_MEMHOSTREGISTER_READ_ONLY))
		return CUDA_ERROR_INVALID_VALUE;
	for (pin = pinned; pin; pin = pin->next)
		if (pin->start < (uint8_t *)pointer + size && (uint8_t *)pointer < pin->start + pin->size)
			return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	if (pinned_bytes + size > fake_setting_number("PINNED_MAX", UINT64_MAX))
		return CUDA_ERROR_OUT_OF_MEMORY;
	pin = malloc(sizeof(*pin));
	if (!pin)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*pin = (Pinned){ .next = pinned, .start = pointer, .size = size };
	pinned = pin;
	pinned_bytes += size;
	return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *pointer, size_t size, unsigned int flags) {
	FAKE_ENTRY(FAKE_CONTEXT, do_pin(pointer, size, flags), "%p size=%zu flags=%u", pointer, size, flags);
}

static CUresult do_unpin(void *pointer) {
	for (Pinned **at = &pinned; *at; at = &(*at)->next) {
		Pinned *pin = *at;

		if (pin->start != pointer)
			continue;
		*at = pin->next;
		pinned_bytes -= pin->size;
		free(pin);
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostUnregister(void *pointer) {
	FAKE_ENTRY(FAKE_CONTEXT, do_unpin(pointer), "%p", pointer);
}

static CUresult do_pinned_pointer(CUdeviceptr *device, void *pointer, unsigned int flags) {
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	for (Pinned *pin = pinned; pin; pin = pin->next)
		if ((uint8_t *)pointer >= pin->start && (uint8_t *)pointer < pin->start + pin->size) {
			*device = (CUdeviceptr)(uintptr_t)pointer;
			return CUDA_SUCCESS;
		}
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *pointer, unsigned int flags) {
	FAKE_ENTRY(FAKE_CONTEXT, do_pinned_pointer(device, pointer, flags), "%p", pointer);
}
