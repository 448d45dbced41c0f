/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda/cuda.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "config.h"
#include "wire/fd.h"
#include "wire/range.h"

/* the node that the driver's shareable handles are files of */
#define NVIDIA_MAJOR 195
#define NVIDIA_CONTROL_MINOR 255

#define WHY(_why, ...) ((void)snprintf((_why), WIRE_TEXT_MAX, __VA_ARGS__))

struct Cuda {
	Loop *loop;
	const Config *config;
};

int cuda_new(Cuda **ret, Loop *loop, const Config *config) {
	Cuda *cuda = calloc(1, sizeof(*cuda));

	if (!cuda)
		return -ENOMEM;
	cuda->loop = loop;
	cuda->config = config;
	*ret = cuda;
	return 0;
}

Cuda *cuda_free(Cuda *cuda) {
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
	if (fd_seals(fd) >= 0) {
		WHY(why, "the fd is system memory, not a CUDA allocation: register it as that");
		return SHMB_E_BAD_FD;
	}
	/* a file system that is asked may never answer */
	if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_TYPE, &stx) < 0 ||
	    !S_ISCHR(stx.stx_mode) || stx.stx_rdev_major != NVIDIA_MAJOR ||
	    stx.stx_rdev_minor != NVIDIA_CONTROL_MINOR) {
		WHY(why,
		    "the fd is not a CUDA allocation (expected char device %d:%d): export it with "
		    "cuMemExportToShareableHandle()",
		    NVIDIA_MAJOR, NVIDIA_CONTROL_MINOR);
		return SHMB_E_BAD_FD;
	}
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

	if (is_zero(check->device, sizeof(check->device))) {
		WHY(check->why, "the UUID of the GPU is missing");
		return SHMB_E_NO_DEVICE;
	}
	if (check->kind == WIRE_KIND_CUDA_IPC && is_zero(check->handle, sizeof(check->handle))) {
		WHY(check->why, "the CUDA IPC handle is empty: take it with cuIpcGetMemHandle()");
		return SHMB_E_INVALID;
	}
	if (check->kind == WIRE_KIND_CUDA_VMM && !check->object_size) {
		WHY(check->why, "the size of the allocation is missing");
		return SHMB_E_OUT_OF_BOUNDS;
	}
	if (__builtin_add_overflow(check->offset, check->size, &end) ||
	    (check->object_size && end > check->object_size)) {
		WHY(check->why, "offset %" PRIu64 " + size %" PRIu64 " exceeds the allocation (%" PRIu64 " bytes)",
		    check->offset, check->size, check->object_size);
		return SHMB_E_OUT_OF_BOUNDS;
	}
	return check->kind == WIRE_KIND_CUDA_VMM ? cuda_fd_check(cuda, check->fd, check->why) : 0;
}

int cuda_check_start(Cuda *cuda, CudaCheck *check) {
	int r;

	check->cuda = NULL;
	check->is_validated = false;
	check->hold = 0;
	check->why[0] = 0;
	switch (cuda->config->cuda_mode) {
	case CUDA_OFF:
		WHY(check->why, "GPU memory is disabled in this broker ([cuda] mode = off)");
		return SHMB_E_UNSUPPORTED;
	case CUDA_RELAY:
		r = check_question(cuda, check);
		if (!r && !check->object_size)
			check->object_size = check->offset + check->size;
		return r;
	default:
		WHY(check->why, "GPU memory is refused: this broker has no shmbroker-cuda-helper that could validate "
				"it ([cuda] mode = relay does without). System memory still works");
		return SHMB_E_UNSUPPORTED;
	}
}

void cuda_check_cancel(CudaCheck *check) {
	check->cuda = NULL;
}

void cuda_hold_drop(Cuda *cuda, uint64_t hold) {
	(void)cuda;
	(void)hold;
}

void cuda_describe(const Cuda *cuda, char *ret, size_t size) {
	const char *text;

	switch (cuda->config->cuda_mode) {
	case CUDA_OFF:
		text = "off";
		break;
	case CUDA_RELAY:
		text = "relay: consumers validate";
		break;
	default:
		text = "off: no shmbroker-cuda-helper";
		break;
	}
	(void)snprintf(ret, size, "%s", text);
}

bool cuda_is_on(const Cuda *cuda) {
	return cuda->config->cuda_mode == CUDA_RELAY;
}
