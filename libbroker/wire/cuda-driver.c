/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda-driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "protocol.h"
#include "uuid.h"

static void *find(void *library, const char *name, const char *older) {
	void *symbol = dlsym(library, name);

	return symbol || !*older ? symbol : dlsym(library, older);
}

int cuda_driver_load(CudaDriver *driver, const char *library, char *why, size_t why_size) {
	CudaDriver loaded = {};

	loaded.library = dlopen(library ? library : CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
	if (!loaded.library) {
		(void)snprintf(why, why_size, "%s", dlerror());
		return SHMB_E_UNSUPPORTED;
	}
#define CUDA_FUNCTION(_name, _older, _parameters)                     \
	{                                                             \
		void *symbol = find(loaded.library, #_name, _older);  \
                                                                      \
		memcpy(&loaded._name, &symbol, sizeof(loaded._name)); \
	}
#include "cuda-driver.def"
#undef CUDA_FUNCTION
	if (!loaded.cuInit || !loaded.cuDeviceGetCount || !loaded.cuDeviceGet || !loaded.cuDeviceGetUuid_v2) {
		(void)snprintf(why, why_size, "%s is no CUDA driver, or one older than 9.2",
			       library ? library : CUDA_LIBRARY);
		(void)dlclose(loaded.library);
		return SHMB_E_UNSUPPORTED;
	}
	*driver = loaded;
	return 0;
}

const char *cuda_driver_error(const CudaDriver *driver, CUresult result) {
	const char *text = NULL;

	if (driver->cuGetErrorName)
		(void)driver->cuGetErrorName(result, &text);
	if (text)
		return text;
	return result == CUDA_ERROR_STUB_LIBRARY ? "CUDA_ERROR_STUB_LIBRARY" : "an unknown code";
}

const char *cuda_driver_hint(CUresult result) {
	switch (result) {
	case CUDA_ERROR_STUB_LIBRARY:
		return "libcuda is the toolkit's stub: the NVIDIA driver is not in this container or on this machine";
	case CUDA_ERROR_NO_DEVICE:
		return "no GPU is visible: are the device nodes here, and what does CUDA_VISIBLE_DEVICES say?";
	case CUDA_ERROR_OPERATING_SYSTEM:
		return "the driver could not bind its socket: a sandbox that forbids AF_UNIX or bind, or a mount of /dev "
		       "without its nodes";
	case CUDA_ERROR_SYSTEM_NOT_READY:
		return "the fabric manager does not run or is not ready";
	case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
	case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
		return "the kernel's driver and libcuda are of different versions: a reboot, or the container's libcuda, "
		       "mends that";
	case CUDA_ERROR_DEVICE_UNAVAILABLE:
		return "the GPU is in exclusive or prohibited compute mode and another process has it: nvidia-smi -c 0";
	case CUDA_ERROR_NOT_SUPPORTED:
		return "an integrated GPU (Jetson) shares no memory between processes: use system memory";
	case CUDA_ERROR_INVALID_DEVICE:
		return "this process does not see the GPU that the memory is of";
	case CUDA_ERROR_MAP_FAILED:
	case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
	case CUDA_ERROR_TOO_MANY_PEERS:
		return "the GPU in use cannot reach the memory of the other one";
	case CUDA_ERROR_OUT_OF_MEMORY:
		return "the GPU has not enough memory left";
	default:
		if (result >= CUDA_ERROR_MPS_CONNECTION_FAILED && result <= CUDA_ERROR_MPS_CLIENT_TERMINATED)
			return "the MPS server refuses: it serves one user at a time, who must be that of this process";
		return "";
	}
}

bool cuda_driver_is_sticky(CUresult result) {
	return result == 226 || result == 700 || result == 702 || (result >= 714 && result <= 719) || result == 721 ||
	       result == 810 || result == 911;
}

CUresult cuda_driver_find_device(const CudaDriver *driver, const uint8_t uuid[16], CUdevice *ret) {
	CUresult result;
	CUdevice device;
	CUuuid found;
	int n = 0;

	result = driver->cuDeviceGetCount(&n);
	for (int i = 0; !result && i < n; ++i) {
		result = driver->cuDeviceGet(&device, i);
		if (!result)
			result = driver->cuDeviceGetUuid_v2(&found, device);
		if (!result && !memcmp(found.bytes, uuid, sizeof(found.bytes))) {
			*ret = device;
			return CUDA_SUCCESS;
		}
	}
	return result ? result : CUDA_ERROR_INVALID_DEVICE;
}

void cuda_driver_list_devices(const CudaDriver *driver, char *ret, size_t size) {
	size_t length = 0;
	CUdevice device;
	CUuuid uuid;
	int n = 0;

	ret[0] = 0;
	if (driver->cuDeviceGetCount(&n))
		return;
	for (int i = 0; i < n && length + WIRE_UUID_TEXT_SIZE < size; ++i) {
		if (driver->cuDeviceGet(&device, i) || driver->cuDeviceGetUuid_v2(&uuid, device))
			continue;
		if (length)
			ret[length++] = ' ';
		wire_uuid_format((const uint8_t *)uuid.bytes, ret + length);
		length += strlen(ret + length);
	}
}

bool cuda_host_is_wsl(void) {
	return !access("/dev/dxg", F_OK);
}
