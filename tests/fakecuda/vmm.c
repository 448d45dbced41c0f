/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory of cuMemCreate(): shareable handles are memfds with the memory and, behind it, a page that says what it is. As
 * with the driver an fd alone keeps the memory, and no process has to live for it to be imported; what only an fd keeps
 * is not in cuMemGetInfo(), unlike with the driver.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state.h"

#define TRAILER_SIZE 4096

typedef struct Trailer {
	char magic[8];
	uint64_t id;
	uint64_t size;
	uint32_t device;
	uint32_t handle_types;
} Trailer;

/* what a CUmemGenericAllocationHandle points to */
typedef struct Memory Memory;
struct Memory {
	Memory *next;
	Trailer trailer;
	int fd;
	unsigned int refs; /* handles and mappings */
	unsigned int handles;
};

typedef struct Reservation Reservation;
struct Reservation {
	Reservation *next;
	uint8_t *start;
	size_t size;
};

static const char magic[8] = "fakeVMM";
static Memory *memories;
static Reservation *reservations;

static Memory *memory_of(CUmemGenericAllocationHandle handle) {
	for (Memory *memory = memories; memory; memory = memory->next)
		if ((CUmemGenericAllocationHandle)(uintptr_t)memory == handle)
			return memory;
	return NULL;
}

static CUmemGenericAllocationHandle handle_of(Memory *memory) {
	return (CUmemGenericAllocationHandle)(uintptr_t)memory;
}

/* consumes @fd */
static Memory *memory_new(int fd, const Trailer *trailer, bool is_own) {
	Memory *memory = calloc(1, sizeof(*memory));

	/* each import is an object of its own to the process, and all of them the same memory */
	if (!memory ||
	    !fake_entry_add((uint64_t)(uintptr_t)memory, trailer->id, trailer->size, trailer->device, is_own)) {
		free(memory);
		(void)close(fd);
		return NULL;
	}
	memory->fd = fd;
	memory->trailer = *trailer;
	memory->refs = memory->handles = 1;
	memory->next = memories;
	memories = memory;
	return memory;
}

static void memory_unref(Memory *memory) {
	if (--memory->refs)
		return;
	for (Memory **at = &memories; *at; at = &(*at)->next)
		if (*at == memory) {
			*at = memory->next;
			break;
		}
	fake_entry_remove((uint64_t)(uintptr_t)memory);
	(void)close(memory->fd);
	free(memory);
}

/* how much of it the driver does without a context is not known: U8 = all, import or none */
static bool needs_context(bool is_import) {
	if (is_import)
		return fake_setting_is("U8", "none");
	return fake_setting_is("U8", "import") || fake_setting_is("U8", "none");
}

static CUresult is_possible(bool is_import) {
	return needs_context(is_import) && !fake_current() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

static CUresult check_properties(const CUmemAllocationProp *properties) {
	if (fake_setting_is("TEGRA", "1") && properties->requestedHandleTypes)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
	    properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
	    properties->requestedHandleTypes & ~(unsigned int)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	if (properties->location.id < 0 || properties->location.id >= fake.n_devices)
		return CUDA_ERROR_INVALID_DEVICE;
	return CUDA_SUCCESS;
}

static CUresult do_granularity(size_t *granularity, const CUmemAllocationProp *properties) {
	CUresult result = check_properties(properties);

	if (!result)
		*granularity = FAKE_BLOCK_SIZE;
	return result;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
				       CUmemAllocationGranularity_flags option) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_granularity(granularity, properties), "%u", option);
}

static CUresult do_create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties) {
	Trailer trailer = { .size = size, .id = fake_random() };
	CUresult result = check_properties(properties);
	Memory *memory;
	int fd;

	if (!result)
		result = is_possible(false);
	if (result)
		return result;
	if (!size || size % FAKE_BLOCK_SIZE)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(trailer.magic, magic, sizeof(magic));
	trailer.device = fake.devices[properties->location.id].index;
	trailer.handle_types = properties->requestedHandleTypes;
	if (fake_used(trailer.device) + size > fake_setting_number("TOTAL_BYTES", UINT64_C(8) << 30))
		return CUDA_ERROR_OUT_OF_MEMORY;
	fd = memfd_create("fakecuda", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (ftruncate(fd, (off_t)(size + TRAILER_SIZE)) < 0 ||
	    pwrite(fd, &trailer, sizeof(trailer), (off_t)size) != sizeof(trailer) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0) {
		(void)close(fd);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	memory = memory_new(fd, &trailer, true);
	if (!memory)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*handle = handle_of(memory);
	return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
		     unsigned long long flags) {
	FAKE_ENTRY(FAKE_INITIALIZED, flags ? (CUresult)CUDA_ERROR_INVALID_VALUE : do_create(handle, size, properties),
		   "%#llx size=%zu", fake_call.result ? 0 : *handle, size);
}

static CUresult do_release(CUmemGenericAllocationHandle handle) {
	Memory *memory = memory_of(handle);

	if (!memory || !memory->handles)
		return CUDA_ERROR_INVALID_VALUE;
	memory->handles--;
	memory_unref(memory);
	return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_release(handle), "%#llx", handle);
}

static CUresult do_export(int *ret, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type) {
	Memory *memory = memory_of(handle);
	int fd;

	if (!memory || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(memory->trailer.handle_types & type))
		return CUDA_ERROR_INVALID_VALUE;
	fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 3);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	*ret = fd;
	return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
				      CUmemAllocationHandleType type, unsigned long long flags) {
	FAKE_ENTRY(FAKE_INITIALIZED, flags ? (CUresult)CUDA_ERROR_INVALID_VALUE : do_export(shareable, handle, type),
		   "%#llx", handle);
}

static bool read_trailer(int fd, Trailer *ret) {
	struct stat st;

	return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > TRAILER_SIZE && fcntl(fd, F_GET_SEALS) >= 0 &&
	       pread(fd, ret, sizeof(*ret), st.st_size - TRAILER_SIZE) == sizeof(*ret) &&
	       !memcmp(ret->magic, magic, sizeof(magic)) && ret->size == (uint64_t)st.st_size - TRAILER_SIZE;
}

static CUresult do_import(CUmemGenericAllocationHandle *handle, int fd, CUmemAllocationHandleType type) {
	CUresult result = is_possible(true);
	Trailer trailer;
	Memory *memory;

	if (result)
		return result;
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !read_trailer(fd, &trailer))
		return CUDA_ERROR_INVALID_VALUE;
	if (fake_is_other_instance(trailer.device))
		return fake_refusal();
	if (!fake_is_present(trailer.device) || fake_ordinal(trailer.device) < 0)
		return CUDA_ERROR_INVALID_DEVICE;
	fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	memory = memory_new(fd, &trailer, false);
	if (!memory)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*handle = handle_of(memory);
	return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
					CUmemAllocationHandleType type) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_import(handle, (int)(intptr_t)shareable, type), "%#llx",
		   fake_call.result ? 0 : *handle);
}

static CUresult do_properties(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
	Memory *memory = memory_of(handle);

	if (!memory)
		return CUDA_ERROR_INVALID_VALUE;
	*properties = (CUmemAllocationProp){
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = memory->trailer.handle_types,
		.location = { CU_MEM_LOCATION_TYPE_DEVICE, fake_ordinal(memory->trailer.device) },
	};
	/* memory of a processor's node is made and exported by the same functions */
	if (fake_setting_is("LOCATION", "host"))
		properties->location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
	return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_properties(properties, handle), "%#llx", handle);
}

static CUresult do_retain(CUmemGenericAllocationHandle *handle, void *address) {
	FakeRange *range = fake_range_find((CUdeviceptr)(uintptr_t)address);
	Memory *memory;

	if (!range || range->kind != FAKE_VMM)
		return CUDA_ERROR_INVALID_VALUE;
	memory = memory_of(range->handle);
	memory->refs++;
	memory->handles++;
	*handle = range->handle;
	return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_retain(handle, address), "%p", address);
}

static CUresult do_reserve(CUdeviceptr *pointer, size_t size, size_t alignment) {
	size_t extra = alignment > FAKE_BLOCK_SIZE ? alignment : FAKE_BLOCK_SIZE;
	Reservation *reservation;
	uint8_t *map, *start;

	if (!size || size % FAKE_BLOCK_SIZE || alignment & (alignment - 1))
		return CUDA_ERROR_INVALID_VALUE;
	reservation = malloc(sizeof(*reservation));
	map = mmap(NULL, size + extra, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (!reservation || map == MAP_FAILED) {
		free(reservation);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	start = (uint8_t *)(((uintptr_t)map + extra - 1) / extra * extra);
	if (start > map)
		(void)munmap(map, (size_t)(start - map));
	if (map + extra > start)
		(void)munmap(start + size, (size_t)(map + extra - start));
	*reservation = (Reservation){ .next = reservations, .start = start, .size = size };
	reservations = reservation;
	*pointer = (CUdeviceptr)(uintptr_t)start;
	return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr hint,
			     unsigned long long flags) {
	FAKE_ENTRY(FAKE_INITIALIZED, flags ? (CUresult)CUDA_ERROR_INVALID_VALUE : do_reserve(pointer, size, alignment),
		   "%#llx size=%zu hint=%#llx", fake_call.result ? 0 : *pointer, size, hint);
}

/* is anything mapped within? */
static bool is_used(CUdeviceptr pointer, size_t size) {
	for (size_t at = 0; at < size; at += FAKE_BLOCK_SIZE)
		if (fake_range_find(pointer + at))
			return true;
	return false;
}

static Reservation *reservation_of(CUdeviceptr pointer, size_t size) {
	uint8_t *start = (uint8_t *)(uintptr_t)pointer;

	for (Reservation *at = reservations; at; at = at->next)
		if (start >= at->start && start < at->start + at->size &&
		    size <= (size_t)(at->start + at->size - start))
			return at;
	return NULL;
}

static CUresult do_free(CUdeviceptr pointer, size_t size) {
	Reservation *reservation = reservation_of(pointer, size);

	if (!reservation || (CUdeviceptr)(uintptr_t)reservation->start != pointer || reservation->size != size ||
	    is_used(pointer, size))
		return CUDA_ERROR_INVALID_VALUE;
	for (Reservation **at = &reservations; *at; at = &(*at)->next)
		if (*at == reservation) {
			*at = reservation->next;
			break;
		}
	(void)munmap(reservation->start, reservation->size);
	free(reservation);
	return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_free(pointer, size), "%#llx size=%zu", pointer, size);
}

static CUresult do_map(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle) {
	CUresult result = is_possible(false);
	Memory *memory = memory_of(handle);
	FakeRange *range;

	if (result)
		return result;
	if (!memory || offset || !size || size % FAKE_BLOCK_SIZE || pointer % FAKE_BLOCK_SIZE ||
	    size > memory->trailer.size || !reservation_of(pointer, size) || is_used(pointer, size))
		return CUDA_ERROR_INVALID_VALUE;
	range = fake_range_new(FAKE_VMM);
	if (!range ||
	    mmap((void *)(uintptr_t)pointer, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED) {
		if (range)
			fake_range_free(range);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	range->map = range->start = (uint8_t *)(uintptr_t)pointer;
	range->map_size = range->size = range->asked = size;
	range->device = memory->trailer.device;
	range->id = fake_random();
	range->handle = handle;
	memory->refs++;
	return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
		  unsigned long long flags) {
	FAKE_ENTRY(FAKE_INITIALIZED, flags ? (CUresult)CUDA_ERROR_INVALID_VALUE : do_map(pointer, size, offset, handle),
		   "%#llx size=%zu", pointer, size);
}

/* calls are for whole mappings, one or several in a row; 0 when they are not */
static size_t mapped_in_a_row(CUdeviceptr pointer, size_t size) {
	size_t n = 0, at = 0;

	while (at < size) {
		FakeRange *range = fake_range_find(pointer + at);

		if (!range || range->kind != FAKE_VMM || (CUdeviceptr)(uintptr_t)range->start != pointer + at ||
		    range->size > size - at)
			return 0;
		at += range->size;
		n++;
	}
	return n;
}

static CUresult do_unmap(CUdeviceptr pointer, size_t size) {
	if (!mapped_in_a_row(pointer, size))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t at = 0; at < size;) {
		FakeRange *range = fake_range_find(pointer + at);

		at += range->size;
		(void)mmap(range->start, range->size, PROT_NONE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
		memory_unref(memory_of(range->handle));
		fake_range_free(range);
	}
	return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_unmap(pointer, size), "%#llx size=%zu", pointer, size);
}

static CUresult do_access(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *descriptions, size_t count) {
	CUresult result = is_possible(false);

	if (result)
		return result;
	if (!mapped_in_a_row(pointer, size) || !count)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; ++i) {
		const CUmemAccessDesc *desc = &descriptions[i];

		if (desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc->location.id < 0 ||
		    desc->location.id >= fake.n_devices)
			return CUDA_ERROR_INVALID_DEVICE;
		if (desc->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
		    desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			return CUDA_ERROR_INVALID_VALUE;
	}
	for (size_t at = 0; at < size;) {
		FakeRange *range = fake_range_find(pointer + at);
		int protection = PROT_NONE;

		range->access = descriptions[count - 1].flags;
		if (range->access & CU_MEM_ACCESS_FLAGS_PROT_READ)
			protection = PROT_READ;
		if (range->access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			protection |= PROT_WRITE;
		if (mprotect(range->start, range->size, protection) < 0)
			return CUDA_ERROR_OUT_OF_MEMORY;
		at += range->size;
	}
	return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *descriptions, size_t count) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_access(pointer, size, descriptions, count), "%#llx size=%zu flags=%u", pointer,
		   size, count ? descriptions[0].flags : 0);
}

static CUresult do_get_access(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer) {
	FakeRange *range = fake_range_find(pointer);

	if (!range || range->kind != FAKE_VMM || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_INVALID_VALUE;
	*flags = range->access;
	return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_get_access(flags, location, pointer), "%#llx", pointer);
}

uint64_t fake_vmm_handle_types(const FakeRange *range) {
	return memory_of(range->handle)->trailer.handle_types;
}
