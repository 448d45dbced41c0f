/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compiles when our declarations of the CUDA driver are those of the toolkit's cuda.h, which it is built with where
 * configure finds one. It makes no code.
 */

/* with it the header declares every ABI under the name that is exported */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define CUDA_FUNCTION(_name, _older, _parameters) \
	_Static_assert(__builtin_types_compatible_p(__typeof__(&_name), CUresult(*) _parameters), #_name);
#include "../../libbroker/wire/cuda-driver.def"
#undef CUDA_FUNCTION

#define CUDA_NUMBER(_name, _value) _Static_assert((_name) == (_value), #_name);
#include "../../libbroker/wire/cuda-driver.def"
#undef CUDA_NUMBER

_Static_assert(sizeof(CUresult) == 4 && sizeof(CUdevice_attribute) == 4 && sizeof(CUpointer_attribute) == 4, "enums");
_Static_assert(sizeof(CUmemAllocationHandleType) == 4 && sizeof(CUmemAllocationGranularity_flags) == 4, "enums");
_Static_assert(sizeof(CUdevice) == 4 && sizeof(CUdeviceptr) == 8 && sizeof(CUmemGenericAllocationHandle) == 8,
	       "numbers");
_Static_assert(sizeof(CUuuid) == 16 && sizeof(CUipcMemHandle) == 64, "bytes");
_Static_assert(sizeof(CUmemLocation) == 8 && __builtin_offsetof(CUmemLocation, id) == 4, "CUmemLocation");
_Static_assert(sizeof(CUmemAllocationProp) == 32 &&
		       __builtin_offsetof(CUmemAllocationProp, requestedHandleTypes) == 4 &&
		       __builtin_offsetof(CUmemAllocationProp, location) == 8 &&
		       __builtin_offsetof(CUmemAllocationProp, win32HandleMetaData) == 16 &&
		       __builtin_offsetof(CUmemAllocationProp, allocFlags) == 24,
	       "CUmemAllocationProp");
_Static_assert(sizeof(CUmemAccessDesc) == 12 && __builtin_offsetof(CUmemAccessDesc, flags) == 8, "CUmemAccessDesc");
