/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda/cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "cuda/gpu.h"
#include "wire/fd.h"
#include "wire/uuid.h"

/* the node that the driver's shareable handles are files of */
#define NVIDIA_MAJOR 195
#define NVIDIA_CONTROL_MINOR 255

int cuda_new(Cuda **ret, Loop *loop, const Config *config) {
	Cuda *cuda = calloc(1, sizeof(*cuda));

	if (!cuda)
		return -ENOMEM;
	cuda->loop = loop;
	cuda->config = config;
	list_init(&cuda->gpus);
	list_init(&cuda->waiting);
	*ret = cuda;
	return 0;
}

Cuda *cuda_free(Cuda *cuda) {
	if (!cuda)
		return NULL;
	for (ListLink *link; (link = list_first(&cuda->waiting));)
		gpu_cancel(container_of(link, CudaCheck, link));
	for (ListLink *link; (link = list_first(&cuda->gpus));)
		gpu_free(container_of(link, Gpu, link));
	free(cuda);
	return NULL;
}

void cuda_configure(Cuda *cuda, const Config *config) {
	cuda->config = config;
}

int cuda_fd_check(const Cuda *cuda, int fd, char *why) {
	struct statx stx;

	if (!cuda->config->cuda_check_fd)
		return 0;
	if (fd_seals(fd) >= 0)
		return cuda_cause_write(why, CUDA_CAUSE_SYSTEM_FD, NULL);
	/* a file system that is asked may never answer */
	if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_TYPE, &stx) < 0 ||
	    !S_ISCHR(stx.stx_mode) || stx.stx_rdev_major != NVIDIA_MAJOR || stx.stx_rdev_minor != NVIDIA_CONTROL_MINOR)
		return cuda_cause_write(why, CUDA_CAUSE_BAD_FD, NULL);
	return 0;
}

static bool is_zero(const uint8_t *bytes, size_t size) {
	for (size_t i = 0; i < size; ++i)
		if (bytes[i])
			return false;
	return true;
}

/* what needs no driver */
static int check_question(const Cuda *cuda, CudaCheck *check) {
	uint64_t end;

	if (is_zero(check->device, sizeof(check->device)))
		return cuda_cause_write(check->why, CUDA_CAUSE_NO_UUID, NULL);
	if (check->kind == WIRE_KIND_CUDA_IPC && is_zero(check->handle, sizeof(check->handle)))
		return cuda_cause_write(check->why, CUDA_CAUSE_EMPTY_HANDLE, NULL);
	if (check->kind == WIRE_KIND_CUDA_VMM && !check->object_size)
		return cuda_cause_write(check->why, CUDA_CAUSE_NO_SIZE, NULL);
	if (__builtin_add_overflow(check->offset, check->size, &end) ||
	    (check->object_size && end > check->object_size))
		return cuda_cause_write(check->why, CUDA_CAUSE_TOO_BIG, NULL, (unsigned long long)check->offset,
					(unsigned long long)check->size, (unsigned long long)check->object_size);
	return check->kind == WIRE_KIND_CUDA_VMM ? cuda_fd_check(cuda, check->fd, check->why) : 0;
}

bool cuda_has_seen(const Cuda *cuda, const uint8_t uuid[16]) {
	for (uint32_t i = 0; i < cuda->n_devices; ++i)
		if (!memcmp(cuda->devices[i], uuid, sizeof(cuda->devices[i])))
			return true;
	return false;
}

int cuda_check_probe(const Cuda *cuda, CudaCheck *check) {
	char uuid[WIRE_UUID_TEXT_SIZE], seen[5 * WIRE_UUID_TEXT_SIZE] = "";

	if (!cuda->probe_ns || loop_now(cuda->loop) - cuda->probe_ns > GPU_PROBE_NS)
		return 0;
	if (cuda->probe_cause) {
		(void)snprintf(check->why, WIRE_TEXT_MAX, "%s", cuda->probe_text);
		return cuda_cause_code(cuda->probe_cause);
	}
	if (cuda_has_seen(cuda, check->device))
		return 0;
	for (uint32_t i = 0; i < cuda->n_devices && i < 5; ++i) {
		size_t length = strlen(seen);

		if (i)
			seen[length++] = ' ';
		wire_uuid_format(cuda->devices[i], seen + length);
	}
	wire_uuid_format(check->device, uuid);
	return cuda_cause_write(check->why, CUDA_CAUSE_NOT_VISIBLE, NULL, uuid, seen);
}

static int start_check(Cuda *cuda, CudaCheck *check) {
	Gpu *gpu;
	int r;

	r = check_question(cuda, check);
	if (!r)
		r = cuda_check_probe(cuda, check);
	if (r)
		return r;
	if (!cuda_has_seen(cuda, check->device) && !gpu_find(cuda, check->device)) {
		gpu_wait(cuda, check);
		return CUDA_PENDING;
	}
	gpu = gpu_get(cuda, check->device);
	if (!gpu)
		return -ENOMEM;
	gpu_queue(gpu, check);
	return CUDA_PENDING;
}

int cuda_check_start(Cuda *cuda, CudaCheck *check) {
	int r;

	check->cuda = NULL;
	check->is_validated = false;
	check->hold = 0;
	check->why[0] = 0;
	if (cuda->config->cuda_mode == CUDA_OFF)
		return cuda_cause_write(check->why, CUDA_CAUSE_OFF, NULL);
	if (cuda->config->cuda_mode != CUDA_RELAY)
		return start_check(cuda, check);
	r = check_question(cuda, check);
	if (!r && !check->object_size)
		check->object_size = check->offset + check->size;
	return r;
}

void cuda_check_cancel(CudaCheck *check) {
	if (check->cuda)
		gpu_cancel(check);
}

void cuda_hold_drop(Cuda *cuda, uint64_t hold) {
	HelperRequest request = {
		.magic = HELPER_MAGIC,
		.operation = HELPER_DROP,
		.serial = hold & ((UINT64_C(1) << GPU_NUMBER_SHIFT) - 1),
	};
	CudaProcess *process = hold ? gpu_find_process(cuda, (uint32_t)(hold >> GPU_NUMBER_SHIFT)) : NULL;

	if (!process)
		return;
	(void)cuda_process_send(process, &request, -EBADF);
	gpu_hold_gone(process->userdata, process);
}

void cuda_describe(const Cuda *cuda, char *ret, size_t size) {
	static const char *const modes[] = { [CUDA_AUTO] = "validate",
					     [CUDA_OFF] = "off",
					     [CUDA_RELAY] = "relay: consumers validate",
					     [CUDA_VALIDATE] = "validate",
					     [CUDA_HOLD] = "hold" };
	const char *mode = modes[cuda->config->cuda_mode], *path = cuda_process_path(cuda->config);

	if (cuda->config->cuda_mode == CUDA_OFF || cuda->config->cuda_mode == CUDA_RELAY)
		(void)snprintf(ret, size, "%s", mode);
	else if (access(path, X_OK) < 0)
		(void)snprintf(ret, size, "off: no %s", path);
	else if (!cuda->probe_ns)
		(void)snprintf(ret, size, "%s: no helper was needed yet", mode);
	else if (cuda->probe_cause)
		(void)snprintf(ret, size, "off: %s", cuda->probe_text);
	else
		(void)snprintf(ret, size, "%s: %u GPUs, %u helpers", mode, cuda->n_devices, cuda->n_processes);
}

bool cuda_is_on(const Cuda *cuda) {
	switch (cuda->config->cuda_mode) {
	case CUDA_OFF:
		return false;
	case CUDA_RELAY:
		return true;
	default:
		return access(cuda_process_path(cuda->config), X_OK) == 0;
	}
}
