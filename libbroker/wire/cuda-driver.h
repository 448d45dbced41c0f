/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * CudaDriver: libcuda.so.1 as it is found at run time. It is never linked, and its declarations are our own, so that we
 * build where no toolkit is; cuda-driver-check.c compares them with the toolkit's cuda.h where there is one.
 *
 * A member is NULL where the driver does not have it. A driver that was loaded is never unloaded: it may have threads.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CUDA_LIBRARY "libcuda.so.1"

typedef unsigned int CUresult;
typedef unsigned int CUdevice_attribute;
typedef unsigned int CUpointer_attribute;
typedef unsigned int CUmemAllocationHandleType;
typedef unsigned int CUmemAllocationGranularity_flags;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef void (*CUhostFn)(void *userdata);

typedef struct CUuuid {
	char bytes[16];
} CUuuid;

typedef struct CUipcMemHandle {
	char reserved[64];
} CUipcMemHandle;

typedef struct CUmemLocation {
	unsigned int type;
	int id;
} CUmemLocation;

typedef struct CUmemAllocationProp {
	unsigned int type;
	unsigned int requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	uint64_t allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc {
	CUmemLocation location;
	unsigned int flags;
} CUmemAccessDesc;

enum {
#define CUDA_NUMBER(_name, _value) _name = (_value),
#include "cuda-driver.def"
#undef CUDA_NUMBER
};

typedef struct CudaDriver {
	void *library; /* NULL while none is loaded */
#define CUDA_FUNCTION(_name, _older, _parameters) CUresult(*_name) _parameters;
#include "cuda-driver.def"
#undef CUDA_FUNCTION
} CudaDriver;

/*
 * Loads @library, CUDA_LIBRARY for NULL. Calls nothing of it. Returns 0, or SHMB_E_UNSUPPORTED with the loader's sentence
 * in @why, @why_size bytes, when it cannot be loaded or is no CUDA driver.
 */
int cuda_driver_load(CudaDriver *driver, const char *library, char *why, size_t why_size);

/* a code's name, "CUDA_ERROR_INVALID_VALUE", from the driver; static, never NULL, also of the toolkit's stub */
const char *cuda_driver_error(const CudaDriver *driver, CUresult result);
/* what a code means and what can be done, one sentence without a full stop; "" where the code says it all */
const char *cuda_driver_hint(CUresult result);
/* true of a code after which nothing works in this process any more */
bool cuda_driver_is_sticky(CUresult result);

/* The device with that UUID as this process sees it. Returns 0, CUDA_ERROR_INVALID_DEVICE when there is none, or what failed. */
CUresult cuda_driver_find_device(const CudaDriver *driver, const uint8_t uuid[16], CUdevice *ret);
/* the UUIDs that this process sees, separated by blanks, cut at @size */
void cuda_driver_list_devices(const CudaDriver *driver, char *ret, size_t size);
/* This kernel is one of WSL, where CUDA IPC does not work. */
bool cuda_host_is_wsl(void);
