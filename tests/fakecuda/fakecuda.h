/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The part of the CUDA driver's ABI that the fake driver has, in declarations of our own, so that it builds where no
 * toolkit is. check-toolkit.c compares all of it with the toolkit's cuda.h where there is one: the numbers by
 * constants.def, the structs by their sizes and offsets, the prototypes by functions.def.
 */

#include <stddef.h>
#include <stdint.h>

typedef unsigned int CUresult;
typedef unsigned int CUdevice_attribute;
typedef unsigned int CUpointer_attribute;
typedef unsigned int CUmemAllocationHandleType;
typedef unsigned int CUmemAllocationGranularity_flags;
typedef unsigned int CUdriverProcAddressQueryResult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef uint64_t cuuint64_t;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef void (*CUhostFn)(void *userdata);
typedef void (*CUstreamCallback)(CUstream stream, CUresult status, void *userdata);

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
	struct {
		unsigned char compressionType;
		unsigned char gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc {
	CUmemLocation location;
	unsigned int flags;
} CUmemAccessDesc;

enum {
#define CONSTANT(_name, _value) _name = (_value),
#include "constants.def"
#undef CONSTANT
};

#define FUNCTION(_name, _base, _since, _parameters) CUresult _name _parameters;
#include "functions.def"
#undef FUNCTION
