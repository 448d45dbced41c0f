/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The driver and its contexts, for the parts of the library that call it. Every function that fails has set the last
 * error, with the driver's code and name and what can be done.
 */

#include "cuda-client.h"
#include "wire/cuda-driver.h"

/* a primary context that is current until cuda_leave() */
struct CudaContext {
	const CudaDriver *driver;
	CUdevice device;
	bool entered;
};

/* The driver, initialised. Returns 0, SHMB_E_UNSUPPORTED (there is none that works), SHMB_E_FORKED. */
int cuda_driver_get(const CudaDriver **ret);
/*
 * The code for @result of the driver's function @what: -ENOMEM, SHMB_E_NO_DEVICE, SHMB_E_UNSUPPORTED, SHMB_E_FORKED, or -EIO
 * for what nothing is known of. @hint is a sentence, or NULL for what is known of the code itself.
 */
int cuda_failed(const CudaDriver *driver, CUresult result, const char *what, const char *hint);
/* Returns 0 or SHMB_E_NO_DEVICE, with what this process sees in the sentence. */
int cuda_device_find(const CudaDriver *driver, const uint8_t uuid[16], CUdevice *ret);
int cuda_device_uuid(const CudaDriver *driver, CUdevice device, uint8_t ret[16]);
/*
 * Makes the device's primary context current, and keeps it alive. Returns 0, or SHMB_E_STATE when this process has none and
 * @may_make is false. cuda_leave() with @keep leaves the context alive, to be let go by cuda_release().
 */
int cuda_enter(const CudaDriver *driver, CUdevice device, bool may_make, CudaContext *ret);
void cuda_leave(CudaContext *context, bool keep);
void cuda_release(const CudaDriver *driver, CUdevice device);
/* whether @client's calls may make one */
static inline bool cuda_may_make(const struct shmb_client *client) {
	return client->flags & SHMB_CUDA_CONTEXT;
}

/* this process as it says who it is, and its pid namespace's inode, 0 when /proc does not tell */
void cuda_identity(uint32_t *ret_pid, uint64_t *ret_namespace);
/* memory that this process has exported by that handle; false when it has not */
bool cuda_find_exported(const uint8_t handle[WIRE_HANDLE_SIZE], CUdeviceptr *ret_base, uint64_t *ret_size,
			CUdevice *ret_device);
