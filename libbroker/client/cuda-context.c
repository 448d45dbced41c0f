/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda-context.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "wire/uuid.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static CudaDriver the_driver;
static _Atomic bool is_ready; /* loaded and initialised */
static uint32_t ready_epoch;  /* client_fork_epoch then */

static int refuse(int code, const char *format, ...) __attribute__((__format__(__printf__, 2, 3)));

static int refuse(int code, const char *format, ...) {
	char text[WIRE_TEXT_MAX];
	va_list arguments;

	va_start(arguments, format);
	(void)vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	return error_set(code, text);
}

static int forked(void) {
	return error_set(SHMB_E_FORKED, "CUDA was initialised before this process was forked, and does not work in it: "
					"start the process anew (spawn) before it uses a GPU");
}

/* another thread may have been loading the driver when the process was forked */
static void fork_in_child(void) {
	pthread_mutex_init(&lock, NULL);
}

static void watch_forks(void) {
	(void)pthread_atfork(NULL, NULL, fork_in_child);
}

/* the lock is held */
static int driver_load(void) {
	char why[WIRE_TEXT_MAX / 2];
	CUresult result;

	if (!the_driver.library && cuda_driver_load(&the_driver, NULL, why, sizeof(why)))
		return refuse(SHMB_E_UNSUPPORTED,
			      "GPU memory cannot be used: %s. It needs NVIDIA's driver for CUDA 11.0 or newer, which a "
			      "container has to be given. System memory still works",
			      why);
	result = the_driver.cuInit(0);
	if (result == CUDA_ERROR_NOT_INITIALIZED)
		return forked();
	if (result)
		return refuse(SHMB_E_UNSUPPORTED,
			      "GPU memory cannot be used: cuInit: %s (%u): %s. System memory still works",
			      cuda_driver_error(&the_driver, result), result, cuda_driver_hint(result));
	ready_epoch = client_fork_epoch;
	atomic_store(&is_ready, true);
	return 0;
}

int cuda_driver_get(const CudaDriver **ret) {
	int r = 0;

	if (!atomic_load(&is_ready)) {
		pthread_once(&once, watch_forks);
		pthread_mutex_lock(&lock);
		if (!atomic_load(&is_ready))
			r = driver_load();
		pthread_mutex_unlock(&lock);
		if (r)
			return r;
	}
	if (ready_epoch != client_fork_epoch)
		return forked();
	*ret = &the_driver;
	return 0;
}

int cuda_failed(const CudaDriver *driver, CUresult result, const char *what, const char *hint) {
	int code;

	if (!hint && result == CUDA_ERROR_INVALID_CONTEXT)
		hint = "this driver needs a context for it: use the GPU first, or make the client with SHMB_CUDA_CONTEXT";
	if (!hint)
		hint = cuda_driver_hint(result);
	if (cuda_driver_is_sticky(result))
		hint = "the GPU does not work in this process any more, which has to be started anew";
	switch (result) {
	case CUDA_ERROR_OUT_OF_MEMORY:
		code = -ENOMEM;
		break;
	case CUDA_ERROR_NOT_INITIALIZED:
		return forked();
	case CUDA_ERROR_NO_DEVICE:
	case CUDA_ERROR_INVALID_DEVICE:
		code = SHMB_E_NO_DEVICE;
		break;
	case CUDA_ERROR_INVALID_VALUE:
	case CUDA_ERROR_INVALID_HANDLE:
	case CUDA_ERROR_INVALID_CONTEXT:
	case CUDA_ERROR_NOT_SUPPORTED:
	case CUDA_ERROR_STUB_LIBRARY:
	case CUDA_ERROR_DEVICE_UNAVAILABLE:
	case CUDA_ERROR_MAP_FAILED:
	case CUDA_ERROR_ALREADY_MAPPED:
	case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
	case CUDA_ERROR_TOO_MANY_PEERS:
		code = SHMB_E_UNSUPPORTED;
		break;
	default:
		code = -EIO;
		break;
	}
	return refuse(code, "%s: %s (%u)%s%s", what, cuda_driver_error(driver, result), result, *hint ? ": " : "",
		      hint);
}

int cuda_device_find(const CudaDriver *driver, const uint8_t uuid[16], CUdevice *ret) {
	CUresult result = cuda_driver_find_device(driver, uuid, ret);
	const char *visible = secure_getenv("CUDA_VISIBLE_DEVICES");
	char text[WIRE_UUID_TEXT_SIZE], seen[WIRE_UUID_TEXT_SIZE * 4];

	if (result != CUDA_ERROR_INVALID_DEVICE)
		return result ? cuda_failed(driver, result, "cuDeviceGetUuid", NULL) : 0;
	wire_uuid_format(uuid, text);
	cuda_driver_list_devices(driver, seen, sizeof(seen));
	return refuse(SHMB_E_NO_DEVICE,
		      "device %s is not visible to this process (CUDA_VISIBLE_DEVICES=%.64s; it sees: %s): with MIG, "
		      "memory is not shared across GPU instances",
		      text, visible ?: "", *seen ? seen : "none");
}

int cuda_device_uuid(const CudaDriver *driver, CUdevice device, uint8_t ret[16]) {
	CUuuid uuid;
	CUresult result = driver->cuDeviceGetUuid_v2(&uuid, device);

	if (result)
		return cuda_failed(driver, result, "cuDeviceGetUuid", NULL);
	memcpy(ret, uuid.bytes, sizeof(uuid.bytes));
	return 0;
}

int cuda_enter(const CudaDriver *driver, CUdevice device, bool may_make, CudaContext *ret) {
	unsigned flags;
	CUcontext context;
	CUresult result;
	int active = 0;

	result = driver->cuDevicePrimaryCtxGetState(device, &flags, &active);
	if (result)
		return cuda_failed(driver, result, "cuDevicePrimaryCtxGetState", NULL);
	if (!active && !may_make)
		return refuse(
			SHMB_E_STATE,
			"this process has no CUDA context on device %d and none is made for it: use the GPU first "
			"(cudaSetDevice, then cudaFree(0)), or make the client with SHMB_CUDA_CONTEXT",
			device);
	result = driver->cuDevicePrimaryCtxRetain(&context, device);
	if (result)
		return cuda_failed(driver, result, "cuDevicePrimaryCtxRetain", NULL);
	result = driver->cuCtxPushCurrent_v2(context);
	if (result) {
		cuda_release(driver, device);
		return cuda_failed(driver, result, "cuCtxPushCurrent", NULL);
	}
	*ret = (CudaContext){ .driver = driver, .device = device, .entered = true };
	return 0;
}

void cuda_leave(CudaContext *context, bool keep) {
	CUcontext popped;

	if (!context->entered)
		return;
	(void)context->driver->cuCtxPopCurrent_v2(&popped);
	if (!keep)
		cuda_release(context->driver, context->device);
	context->entered = false;
}

void cuda_release(const CudaDriver *driver, CUdevice device) {
	if (driver->cuDevicePrimaryCtxRelease_v2)
		(void)driver->cuDevicePrimaryCtxRelease_v2(device);
}

void cuda_identity(uint32_t *ret_pid, uint64_t *ret_namespace) {
	struct stat st;

	*ret_pid = (uint32_t)getpid();
	*ret_namespace = stat("/proc/self/ns/pid", &st) ? 0 : (uint64_t)st.st_ino;
}
