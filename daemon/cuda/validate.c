/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda/validate.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/nvml.h"
#include "wire/uuid.h"

/* where the MPS server has its pipes unless the environment says otherwise */
#define MPS_DIRECTORY "/tmp/nvidia-mps"
#define MPS_VARIABLE "CUDA_MPS_PIPE_DIRECTORY"

struct ValidatorHold {
	ValidatorHold *next;
	uint64_t number;
	CUdeviceptr pointer;
};

/* what the driver said, as the texts have it */
typedef struct Said {
	CUresult result;
	char text[128];
} Said;

/* notes what a function has returned; true when that was bad */
static bool failed(Validator *validator, Said *said, CUresult result, const char *function) {
	said->result = result;
	if (!result)
		return false;
	if (cuda_driver_is_sticky(result))
		validator->is_broken = true;
	(void)snprintf(said->text, sizeof(said->text), "%s: %s (%u)", function,
		       cuda_driver_error(&validator->driver, result), result);
	return true;
}

#define CALL(_validator, _said, _function, ...) \
	failed(_validator, _said, (_validator)->driver._function(__VA_ARGS__), #_function)

/* ---- the start ---- */

static CudaCause init_cause(CUresult result) {
	switch (result) {
	case CUDA_ERROR_STUB_LIBRARY:
		return CUDA_CAUSE_STUB;
	case CUDA_ERROR_NO_DEVICE:
		return CUDA_CAUSE_NO_GPU;
	case CUDA_ERROR_OPERATING_SYSTEM:
		return CUDA_CAUSE_SANDBOX;
	case CUDA_ERROR_DEVICE_UNAVAILABLE:
		return CUDA_CAUSE_EXCLUSIVE;
	case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
	case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
		return CUDA_CAUSE_MISMATCH;
	default:
		if (result >= CUDA_ERROR_MPS_CONNECTION_FAILED && result <= CUDA_ERROR_MPS_CLIENT_TERMINATED)
			return CUDA_CAUSE_MPS_START;
		return CUDA_CAUSE_INIT;
	}
}

/* a name of the driver's that both kinds of memory need and it has not, or NULL */
static const char *lacks(const CudaDriver *driver) {
#define NEED(_function)         \
	if (!driver->_function) \
		return #_function;
	NEED(cuDeviceGetAttribute)
	NEED(cuDevicePrimaryCtxRetain)
	NEED(cuDevicePrimaryCtxRelease_v2)
	NEED(cuCtxPushCurrent_v2)
	NEED(cuCtxPopCurrent_v2)
	NEED(cuIpcOpenMemHandle_v2)
	NEED(cuIpcCloseMemHandle)
	NEED(cuMemGetAddressRange_v2)
	NEED(cuPointerGetAttribute)
	NEED(cuMemImportFromShareableHandle)
	NEED(cuMemGetAllocationPropertiesFromHandle)
	NEED(cuMemGetAllocationGranularity)
	NEED(cuMemAddressReserve)
	NEED(cuMemAddressFree)
	NEED(cuMemMap)
	NEED(cuMemUnmap)
	NEED(cuMemRelease)
#undef NEED
	return NULL;
}

/* in MIG mode the older function tells the whole GPU, the newer one the instance */
static bool is_mig(const Validator *validator) {
	CUresult (*older)(CUuuid * uuid, CUdevice device);
	void *symbol = dlsym(validator->driver.library, "cuDeviceGetUuid");
	CUuuid whole;

	if (!symbol)
		return false;
	memcpy(&older, &symbol, sizeof(older));
	return !older(&whole, validator->device) && memcmp(whole.bytes, validator->uuid, sizeof(whole.bytes));
}

static void list_devices(const Validator *validator, HelperReply *reply) {
	const CudaDriver *driver = &validator->driver;
	CUdevice device;
	CUuuid uuid;
	int n = 0;

	if (driver->cuDeviceGetCount(&n))
		return;
	for (int i = 0; i < n && reply->n_devices < HELPER_DEVICES_MAX; ++i)
		if (!driver->cuDeviceGet(&device, i) && !driver->cuDeviceGetUuid_v2(&uuid, device))
			memcpy(reply->devices[reply->n_devices++], uuid.bytes, sizeof(uuid.bytes));
}

static CudaCause start(Validator *validator, const char *library, const char *nvml, HelperReply *reply) {
	char why[256], uuid[WIRE_UUID_TEXT_SIZE], seen[200], more[160];
	Said said = {};
	int version = 0, is_integrated = 0;
	CUresult result;

	if (cuda_driver_load(&validator->driver, library, why, sizeof(why))) {
		(void)cuda_cause_write(reply->text, CUDA_CAUSE_NO_DRIVER, NULL, why);
		return CUDA_CAUSE_NO_DRIVER;
	}
	if (CALL(validator, &said, cuInit, 0)) {
		CudaCause cause = init_cause(said.result);

		(void)cuda_cause_write(reply->text, cause, said.text);
		return cause;
	}
	if (lacks(&validator->driver)) {
		(void)cuda_cause_write(reply->text, CUDA_CAUSE_OLD_DRIVER, NULL, lacks(&validator->driver));
		return CUDA_CAUSE_OLD_DRIVER;
	}
	list_devices(validator, reply);
	wire_uuid_format(validator->uuid, uuid);
	result = cuda_driver_find_device(&validator->driver, validator->uuid, &validator->device);
	if (result) {
		cuda_driver_list_devices(&validator->driver, seen, sizeof(seen));
		/* a driver that could not tell is another matter than one that has no such GPU */
		if (result != CUDA_ERROR_INVALID_DEVICE)
			(void)failed(validator, &said, result, "cuDeviceGetUuid");
		(void)cuda_cause_write(reply->text, CUDA_CAUSE_NOT_VISIBLE, said.result ? said.text : NULL, uuid, seen);
		return CUDA_CAUSE_NOT_VISIBLE;
	}
	validator->is_mig = is_mig(validator);
	if (!validator->driver.cuDeviceGetAttribute(&is_integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED,
						    validator->device) &&
	    is_integrated) {
		(void)cuda_cause_write(reply->text, CUDA_CAUSE_INTEGRATED, NULL);
		return CUDA_CAUSE_INTEGRATED;
	}
	if (validator->driver.cuDriverGetVersion)
		(void)validator->driver.cuDriverGetVersion(&version);
	reply->driver_version = (uint32_t)version;
	nvml_describe(nvml, validator->uuid, more, sizeof(more));
	(void)snprintf(reply->text, sizeof(reply->text), "CUDA %d.%d%s%s", version / 1000, version % 1000 / 10,
		       *more ? ", " : "", more);
	return CUDA_CAUSE_NONE;
}

CudaCause validator_init(Validator *validator, const char *library, const char *nvml, const uint8_t uuid[16],
			 bool bypass_mps, HelperReply *reply) {
	const char *pipes = getenv(MPS_VARIABLE);

	*validator = (Validator){};
	memcpy(validator->uuid, uuid, sizeof(validator->uuid));
	*reply = (HelperReply){ .magic = HELPER_MAGIC, .kind = HELPER_READY };
	if (bypass_mps) {
		validator->has_mps = !access(pipes ?: MPS_DIRECTORY, X_OK);
		/* a directory that is none keeps the driver from the server, which may be another user's and make wait */
		(void)setenv(MPS_VARIABLE, "/nonexistent", 1);
	}
	reply->cause = start(validator, library, nvml, reply);
	reply->is_last = reply->cause != CUDA_CAUSE_NONE;
	return reply->cause;
}

/* ---- contexts ---- */

/* makes the GPU's primary context current, in front of which nothing is */
static CudaCause enter(Validator *validator, Said *said) {
	if (!validator->context) {
		/* nobody here waits for the GPU; whoever does should not spin */
		if (validator->driver.cuDevicePrimaryCtxSetFlags_v2)
			(void)validator->driver.cuDevicePrimaryCtxSetFlags_v2(validator->device,
									      CU_CTX_SCHED_BLOCKING_SYNC);
		if (CALL(validator, said, cuDevicePrimaryCtxRetain, &validator->context, validator->device)) {
			validator->context = NULL;
			if (said->result == CUDA_ERROR_DEVICE_UNAVAILABLE)
				return CUDA_CAUSE_EXCLUSIVE;
			return said->result == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_CAUSE_NO_MEMORY : CUDA_CAUSE_DRIVER;
		}
	}
	return CALL(validator, said, cuCtxPushCurrent_v2, validator->context) ? CUDA_CAUSE_DRIVER : CUDA_CAUSE_NONE;
}

static void leave(Validator *validator) {
	CUcontext context;

	(void)validator->driver.cuCtxPopCurrent_v2(&context);
}

void validator_deinit(Validator *validator) {
	const CudaDriver *driver = &validator->driver;

	if (!validator->context)
		return;
	if (!validator->is_broken && !driver->cuCtxPushCurrent_v2(validator->context)) {
		for (ValidatorHold *hold = validator->holds; hold; hold = hold->next)
			(void)driver->cuIpcCloseMemHandle(hold->pointer);
		leave(validator);
		(void)driver->cuDevicePrimaryCtxRelease_v2(validator->device);
	}
	for (ValidatorHold *hold; (hold = validator->holds);) {
		validator->holds = hold->next;
		free(hold);
	}
	validator->context = NULL;
}

/* ---- CUDA IPC ---- */

/* why an open was refused, by what else is known */
static void refuse_open(Validator *validator, const HelperRequest *request, const Said *said, HelperReply *reply) {
	char uuid[WIRE_UUID_TEXT_SIZE];

	wire_uuid_format(validator->uuid, uuid);
	if (validator->is_broken)
		reply->cause = CUDA_CAUSE_STICKY;
	else if (said->result == CUDA_ERROR_NOT_SUPPORTED)
		reply->cause = CUDA_CAUSE_INTEGRATED;
	else if (said->result == CUDA_ERROR_OUT_OF_MEMORY)
		reply->cause = CUDA_CAUSE_NO_MEMORY;
	else if (request->owner_pid && request->owner_pid == (uint32_t)getpid())
		reply->cause = CUDA_CAUSE_PID_CLASH;
	else if (validator->is_mig)
		reply->cause = CUDA_CAUSE_MIG;
	else if (validator->has_mps)
		reply->cause = CUDA_CAUSE_MPS;
	else if (said->result == CUDA_ERROR_INVALID_HANDLE)
		reply->cause = CUDA_CAUSE_WSL;
	else if (request->owner_uid != geteuid() && !validator->has_opened_foreign)
		reply->cause = CUDA_CAUSE_UID;
	else
		reply->cause = CUDA_CAUSE_HANDLE;
	switch (reply->cause) {
	case CUDA_CAUSE_PID_CLASH:
		(void)cuda_cause_write(reply->text, reply->cause, said->text, request->owner_pid);
		break;
	case CUDA_CAUSE_MIG:
		(void)cuda_cause_write(reply->text, reply->cause, said->text, uuid);
		break;
	case CUDA_CAUSE_UID:
		(void)cuda_cause_write(reply->text, reply->cause, said->text, request->owner_uid,
				       (unsigned int)geteuid());
		break;
	default:
		(void)cuda_cause_write(reply->text, reply->cause, said->text);
	}
}

static CudaCause refuse(Validator *validator, CudaCause cause, const Said *said, HelperReply *reply) {
	reply->cause = validator->is_broken ? CUDA_CAUSE_STICKY : cause;
	(void)cuda_cause_write(reply->text, reply->cause, said->text);
	return reply->cause;
}

/* is a device of this process the GPU that was claimed? */
static CudaCause check_device(Validator *validator, CUdevice device, HelperReply *reply) {
	char claimed[WIRE_UUID_TEXT_SIZE], real[WIRE_UUID_TEXT_SIZE] = "a GPU that the broker does not see";
	CUuuid uuid;

	if (device >= 0 && device == validator->device)
		return CUDA_CAUSE_NONE;
	wire_uuid_format(validator->uuid, claimed);
	if (device >= 0 && !validator->driver.cuDeviceGetUuid_v2(&uuid, device))
		wire_uuid_format((const uint8_t *)uuid.bytes, real);
	reply->cause = CUDA_CAUSE_OTHER_GPU;
	(void)cuda_cause_write(reply->text, reply->cause, NULL, real, claimed);
	return reply->cause;
}

static CudaCause check_bounds(const HelperRequest *request, uint64_t real, HelperReply *reply) {
	uint64_t end;

	reply->object_size = real;
	if (request->object_size > real || __builtin_add_overflow(request->offset, request->size, &end) || end > real) {
		uint64_t offset = request->object_size > real ? 0 : request->offset;
		uint64_t size = request->object_size > real ? request->object_size : request->size;

		reply->cause = CUDA_CAUSE_TOO_BIG;
		(void)cuda_cause_write(reply->text, reply->cause, NULL, (unsigned long long)offset,
				       (unsigned long long)size, (unsigned long long)real);
	}
	return reply->cause;
}

/* what is open at @pointer: on the right GPU, and big enough? */
static CudaCause look_at(Validator *validator, const HelperRequest *request, CUdeviceptr pointer, HelperReply *reply) {
	CUdeviceptr base = 0;
	int ordinal = -1;
	size_t size = 0;
	Said said;

	if (CALL(validator, &said, cuMemGetAddressRange_v2, &base, &size, pointer) ||
	    CALL(validator, &said, cuPointerGetAttribute, &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer))
		return refuse(validator, CUDA_CAUSE_DRIVER, &said, reply);
	if (check_device(validator, ordinal, reply))
		return reply->cause;
	/* a handle may lead into its allocation: what is before it is not the owner's to give */
	return check_bounds(request, base <= pointer && pointer - base <= size ? size - (pointer - base) : 0, reply);
}

static void keep(Validator *validator, const HelperRequest *request, CUdeviceptr pointer, HelperReply *reply) {
	ValidatorHold *hold = malloc(sizeof(*hold));

	if (!hold) {
		(void)validator->driver.cuIpcCloseMemHandle(pointer);
		return;
	}
	*hold = (ValidatorHold){ .next = validator->holds, .number = request->serial, .pointer = pointer };
	validator->holds = hold;
	reply->is_held = 1;
}

static void check_ipc(Validator *validator, const HelperRequest *request, HelperReply *reply) {
	CUipcMemHandle handle;
	CUdeviceptr pointer = 0;
	Said said;

	reply->cause = enter(validator, &said);
	if (reply->cause) {
		(void)refuse(validator, reply->cause, &said, reply);
		return;
	}
	memcpy(handle.reserved, request->handle, sizeof(handle.reserved));
	if (CALL(validator, &said, cuIpcOpenMemHandle_v2, &pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)) {
		refuse_open(validator, request, &said, reply);
	} else {
		validator->has_opened_foreign |= request->owner_uid != geteuid();
		if (!look_at(validator, request, pointer, reply) && request->keep)
			keep(validator, request, pointer, reply);
		else if (CALL(validator, &said, cuIpcCloseMemHandle, pointer) && !reply->cause)
			(void)refuse(validator, CUDA_CAUSE_DRIVER, &said, reply);
	}
	leave(validator);
}

static void drop(Validator *validator, uint64_t number) {
	for (ValidatorHold **at = &validator->holds; *at; at = &(*at)->next) {
		ValidatorHold *hold = *at;
		Said said;

		if (hold->number != number)
			continue;
		if (!enter(validator, &said)) {
			(void)CALL(validator, &said, cuIpcCloseMemHandle, hold->pointer);
			leave(validator);
		}
		*at = hold->next;
		free(hold);
		return;
	}
}

/* ---- VMM ---- */

static CudaCause refuse_import(Validator *validator, const Said *said, HelperReply *reply) {
	char uuid[WIRE_UUID_TEXT_SIZE];

	if (validator->is_broken || said->result != CUDA_ERROR_INVALID_DEVICE) {
		bool is_instance = validator->is_mig && !validator->is_broken;

		if (!is_instance)
			return refuse(validator,
				      said->result == CUDA_ERROR_NOT_SUPPORTED ? CUDA_CAUSE_INTEGRATED
									       : CUDA_CAUSE_BAD_FD,
				      said, reply);
		wire_uuid_format(validator->uuid, uuid);
		reply->cause = CUDA_CAUSE_MIG;
		(void)cuda_cause_write(reply->text, reply->cause, said->text, uuid);
		return reply->cause;
	}
	wire_uuid_format(validator->uuid, uuid);
	reply->cause = CUDA_CAUSE_OTHER_GPU;
	(void)cuda_cause_write(reply->text, reply->cause, said->text, "a GPU that the broker does not see", uuid);
	return reply->cause;
}

/* an attempt to map what is claimed is the only proof of its size */
static CudaCause try_map(Validator *validator, const HelperRequest *request, CUmemGenericAllocationHandle handle,
			 HelperReply *reply, Said *said) {
	CUdeviceptr pointer = 0;
	Said after;

	if (CALL(validator, said, cuMemAddressReserve, &pointer, request->object_size, 0, 0, 0))
		return refuse(validator,
			      said->result == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_CAUSE_NO_MEMORY : CUDA_CAUSE_DRIVER, said,
			      reply);
	if (CALL(validator, said, cuMemMap, pointer, request->object_size, 0, handle, 0)) {
		if (said->result == CUDA_ERROR_INVALID_VALUE && !validator->is_broken) {
			reply->cause = CUDA_CAUSE_SIZE;
			(void)cuda_cause_write(reply->text, reply->cause, said->text,
					       (unsigned long long)request->object_size);
		} else {
			(void)refuse(validator, CUDA_CAUSE_DRIVER, said, reply);
		}
	} else if (CALL(validator, &after, cuMemUnmap, pointer, request->object_size)) {
		(void)refuse(validator, CUDA_CAUSE_DRIVER, &after, reply);
	}
	(void)CALL(validator, &after, cuMemAddressFree, pointer, request->object_size);
	return reply->cause;
}

static CudaCause check_memory(Validator *validator, const HelperRequest *request, CUmemGenericAllocationHandle handle,
			      HelperReply *reply, Said *said) {
	CUmemAllocationProp properties = {};
	size_t granularity = 0;

	if (CALL(validator, said, cuMemGetAllocationPropertiesFromHandle, &properties, handle))
		return refuse(validator, CUDA_CAUSE_DRIVER, said, reply);
	if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
	    !(properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
		reply->cause = CUDA_CAUSE_NOT_SHAREABLE;
		(void)cuda_cause_write(reply->text, reply->cause, NULL);
		return reply->cause;
	}
	if (check_device(validator, properties.location.id, reply))
		return reply->cause;
	if (CALL(validator, said, cuMemGetAllocationGranularity, &granularity, &properties,
		 CU_MEM_ALLOC_GRANULARITY_MINIMUM))
		return refuse(validator, CUDA_CAUSE_DRIVER, said, reply);
	if (!granularity || request->object_size % granularity) {
		reply->cause = CUDA_CAUSE_SIZE;
		(void)cuda_cause_write(reply->text, reply->cause, NULL, (unsigned long long)request->object_size);
		return reply->cause;
	}
	return try_map(validator, request, handle, reply, said);
}

static void try_vmm(Validator *validator, const HelperRequest *request, int fd, HelperReply *reply, Said *said) {
	CUmemGenericAllocationHandle handle = 0;
	Said after;

	if (CALL(validator, said, cuMemImportFromShareableHandle, &handle, (void *)(intptr_t)fd,
		 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
		(void)refuse_import(validator, said, reply);
		return;
	}
	if (!check_memory(validator, request, handle, reply, said))
		(void)check_bounds(request, request->object_size, reply);
	if (CALL(validator, &after, cuMemRelease, handle) && !reply->cause)
		(void)refuse(validator, CUDA_CAUSE_DRIVER, &after, reply);
}

/* whether a driver does this without a context is not documented: it gets one when it asks for one */
static void check_vmm(Validator *validator, const HelperRequest *request, int fd, HelperReply *reply) {
	Said said = {};

	if (!validator->context)
		try_vmm(validator, request, fd, reply, &said);
	if (validator->is_broken || (!validator->context && said.result != CUDA_ERROR_INVALID_CONTEXT))
		return;
	reply->cause = enter(validator, &said);
	if (reply->cause) {
		(void)refuse(validator, reply->cause, &said, reply);
		return;
	}
	try_vmm(validator, request, fd, reply, &said);
	leave(validator);
}

void validator_handle(Validator *validator, const HelperRequest *request, int fd, HelperReply *reply) {
	*reply = (HelperReply){ .magic = HELPER_MAGIC, .kind = HELPER_ANSWER, .serial = request->serial };
	switch (request->operation) {
	case HELPER_CHECK_IPC:
		check_ipc(validator, request, reply);
		break;
	case HELPER_CHECK_VMM:
		check_vmm(validator, request, fd, reply);
		break;
	case HELPER_DROP:
		drop(validator, request->serial);
		break;
	}
	if (!reply->cause)
		reply->text[0] = 0;
	reply->is_last = validator->is_broken;
}
