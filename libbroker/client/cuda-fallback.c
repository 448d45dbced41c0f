/* SPDX-License-Identifier: Apache-2.0 */

/* The library without CUDA: GPU memory is refused, and what cannot exist is never asked for. */

#include "cuda-client.h"
#include "map.h"

static int refuse(void) {
	return error_set(SHMB_E_UNSUPPORTED, "this library was built without CUDA");
}

int cuda_mapping_open(struct shmb_client *client, const WireMapReply *reply, const uint8_t *handle, int fd,
		      uint32_t access, CudaMapping **ret) {
	(void)client;
	(void)reply;
	(void)handle;
	(void)fd;
	(void)access;
	(void)ret;
	return refuse();
}

int cuda_mapping_check(const CudaMapping *mapping, const WireMapReply *reply) {
	(void)mapping;
	(void)reply;
	return refuse();
}

CudaMapping *cuda_mapping_close(CudaMapping *mapping) {
	(void)mapping;
	return NULL;
}

void cuda_mapping_place(const CudaMapping *mapping, CudaPlace *ret) {
	(void)mapping;
	*ret = (CudaPlace){ .device = -1 };
}

bool cuda_mapping_has(const CudaMapping *mapping, uint64_t pointer) {
	(void)mapping;
	(void)pointer;
	return false;
}

void cuda_unpin(void *base, int32_t device) {
	(void)base;
	(void)device;
}

bool cuda_may_call(void) {
	return true;
}

void cuda_owned_offer(const CudaOwned *owned, CudaOffer *ret) {
	(void)owned;
	*ret = (CudaOffer){};
}

void *cuda_owned_pointer(const CudaOwned *owned) {
	(void)owned;
	return NULL;
}

CudaOwned *cuda_owned_free(CudaOwned *owned) {
	(void)owned;
	return NULL;
}

int shmb_cuda_export(struct shmb_client *client, const char *name, const void *device_pointer, uint64_t size,
		     const struct shmb_region_options *options, struct shmb_region **ret) {
	(void)client;
	(void)name;
	(void)device_pointer;
	(void)size;
	(void)options;
	(void)ret;
	return refuse();
}

int shmb_cuda_alloc(struct shmb_client *client, const char *name, uint64_t size, int32_t device,
		    const struct shmb_region_options *options, struct shmb_region **ret) {
	(void)client;
	(void)name;
	(void)size;
	(void)device;
	(void)options;
	(void)ret;
	return refuse();
}

int shmb_cuda_adopt(struct shmb_client *client, const char *name, const struct shmb_cuda_handle *handle,
		    const struct shmb_region_options *options, struct shmb_region **ret) {
	(void)client;
	(void)name;
	(void)handle;
	(void)options;
	(void)ret;
	return refuse();
}

int shmb_cuda_adopt_fd(struct shmb_client *client, const char *name, int fd, const struct shmb_cuda_handle *handle,
		       const struct shmb_region_options *options, struct shmb_region **ret) {
	(void)client;
	(void)name;
	(void)fd;
	(void)handle;
	(void)options;
	(void)ret;
	return refuse();
}

int shmb_cuda_publish(struct shmb_region *region, void *stream) {
	(void)region;
	(void)stream;
	return refuse();
}

int shmb_lease_release_after(struct shmb_lease *lease, void *stream) {
	(void)lease;
	(void)stream;
	return refuse();
}

int shmb_lease_pin(struct shmb_lease *lease, int32_t device, void **ret_device_pointer) {
	(void)lease;
	(void)device;
	(void)ret_device_pointer;
	return refuse();
}
