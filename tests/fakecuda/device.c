/* SPDX-License-Identifier: Apache-2.0 */

/* Initialisation, devices, contexts, names of errors, and how functions are found by name. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

static __thread CUcontext stack[16];
static __thread unsigned int depth;

uint32_t fake_machine_devices(FakeDevice ret[FAKE_DEVICES_MAX]) {
	uint32_t n = (uint32_t)fake_setting_number("DEVICES", 2);
	char uuids[512] = "", *rest = uuids;

	if (n > FAKE_DEVICES_MAX)
		n = FAKE_DEVICES_MAX;
	(void)fake_setting("UUIDS", uuids, sizeof(uuids));
	for (uint32_t i = 0; i < n; ++i) {
		const char *uuid = strsep(&rest, ",");

		ret[i] = (FakeDevice){ .index = i };
		if (uuid && fake_parse_uuid(uuid, ret[i].uuid))
			continue;
		memcpy(ret[i].uuid, "fake GPU number", 15);
		ret[i].uuid[15] = (uint8_t)('0' + i);
	}
	return n;
}

bool fake_is_present(uint32_t index) {
	char text[64] = "", *rest = text;

	(void)fake_setting("ABSENT", text, sizeof(text));
	for (char *word; (word = strsep(&rest, ","));)
		if (*word && strtoul(word, NULL, 10) == index)
			return false;
	return true;
}

/* the index of a GPU of the machine that a word of CUDA_VISIBLE_DEVICES names, or -1 */
static int device_named(const char *word, const FakeDevice *devices, uint32_t n) {
	uint8_t uuid[16];

	if (fake_parse_uuid(word, uuid)) {
		for (uint32_t i = 0; i < n; ++i)
			if (!memcmp(uuid, devices[i].uuid, sizeof(uuid)))
				return (int)i;
		return -1;
	}
	if (*word < '0' || *word > '9' || strtoul(word, NULL, 10) >= n)
		return -1;
	return (int)strtoul(word, NULL, 10);
}

static void find_devices(void) {
	FakeDevice all[FAKE_DEVICES_MAX];
	uint32_t n = fake_machine_devices(all);
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");
	char text[512], *rest = text;

	fake.n_devices = 0;
	if (!visible) {
		for (uint32_t i = 0; i < n; ++i)
			if (fake_is_present(i))
				fake.devices[fake.n_devices++] = all[i];
		return;
	}
	(void)snprintf(text, sizeof(text), "%s", visible);
	for (char *word; (word = strsep(&rest, ",")) && fake.n_devices < FAKE_DEVICES_MAX;) {
		int index = device_named(word, all, n);

		/* what is named after a device that is not there is not seen either */
		if (index < 0 || !fake_is_present((uint32_t)index))
			return;
		fake.devices[fake.n_devices++] = all[index];
	}
}

int fake_ordinal(uint32_t index) {
	for (int i = 0; i < fake.n_devices; ++i)
		if (fake.devices[i].index == index)
			return i;
	return -1;
}

bool fake_is_other_instance(uint32_t index) {
	return fake_setting_is("MIG", "1") && fake_ordinal(index) < 0;
}

/* the socket that the driver listens on; what forbids it makes cuInit() fail */
static bool listen_as_driver(void) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct stat st;
	int n, fd;

	if (stat("/proc/self/ns/pid", &st) < 0)
		st.st_ino = 0;
	n = snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "fakecuda-uvmfd-%lu-%d",
		     (unsigned long)st.st_ino, (int)getpid());
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return false;
	if (bind(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) <
		    0 ||
	    listen(fd, 1) < 0) {
		(void)close(fd);
		return false;
	}
	return true;
}

/* is this process a client of the MPS server, which an unusable pipe directory prevents? */
static bool uses_mps(void) {
	const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY");

	return fake_setting_is("MPS", "1") && (!pipe || access(pipe, X_OK) == 0);
}

static CUresult do_init(unsigned int flags) {
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (fake.initialized)
		return CUDA_SUCCESS;
	find_devices();
	if (!fake.n_devices)
		return CUDA_ERROR_NO_DEVICE;
	if (!listen_as_driver())
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (!fake_record_new())
		return CUDA_ERROR_UNKNOWN;
	fake.record->is_mps = uses_mps();
	fake.pid = getpid();
	fake.initialized = true;
	return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) {
	/* the server of one user keeps those of another one waiting; no lock is held meanwhile */
	while (uses_mps() && fake_setting_number("MPS_UID", geteuid()) != geteuid()) {
		struct timespec ts = { 0, 10000000 };

		(void)nanosleep(&ts, NULL);
	}
	FAKE_ENTRY(FAKE_ALWAYS, do_init(flags), "flags=%u", flags);
}

CUresult cuDriverGetVersion(int *version) {
	FAKE_ENTRY(FAKE_ALWAYS, (*version = (int)fake_setting_number("DRIVER_VERSION", 13000), CUDA_SUCCESS), "%d",
		   fake_call.result ? 0 : *version);
}

static const struct {
	CUresult code;
	const char *name, *text;
} errors[] = {
#define CONSTANT(_name, _value) { _value, #_name, "the fake driver says " #_name },
#include "constants.def"
#undef CONSTANT
};

static CUresult error_text(CUresult error, const char **text, bool is_name) {
	for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); ++i) {
		if (errors[i].code != error || strncmp(errors[i].name, "CUDA_", 5))
			continue;
		*text = is_name ? errors[i].name : errors[i].text;
		return CUDA_SUCCESS;
	}
	*text = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
	if (fake_setting_is("STUB", "1"))
		return CUDA_ERROR_STUB_LIBRARY;
	return error_text(error, text, true);
}

CUresult cuGetErrorString(CUresult error, const char **text) {
	if (fake_setting_is("STUB", "1"))
		return CUDA_ERROR_STUB_LIBRARY;
	return error_text(error, text, false);
}

static CUresult do_find(const char *symbol, void **function, int version, CUdriverProcAddressQueryResult *status) {
	static const struct {
		void *function;
		const char *base;
		int since;
	} functions[] = {
#define FUNCTION(_name, _base, _since, _parameters) { (void *)(uintptr_t)_name, _base, _since },
#include "functions.def"
#undef FUNCTION
	};
	int best = 0;
	bool is_known = false;

	*function = NULL;
	for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); ++i) {
		if (strcmp(functions[i].base, symbol))
			continue;
		is_known = true;
		if (functions[i].since > version || functions[i].since < best)
			continue;
		best = functions[i].since;
		*function = functions[i].function;
	}
	if (status)
		*status = *function  ? CU_GET_PROC_ADDRESS_SUCCESS
			  : is_known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
				     : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
			     CUdriverProcAddressQueryResult *status) {
	(void)flags;
	FAKE_ENTRY(FAKE_ALWAYS, do_find(symbol, function, version, status), "%s %d", symbol, version);
}

static bool is_device(CUdevice device) {
	return device >= 0 && device < fake.n_devices;
}

CUresult cuDeviceGetCount(int *count) {
	FAKE_ENTRY(FAKE_INITIALIZED, (*count = fake.n_devices, CUDA_SUCCESS), "%d", fake.n_devices);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
	FAKE_ENTRY(FAKE_INITIALIZED,
		   is_device(ordinal) ? (*device = ordinal, CUDA_SUCCESS) : (CUresult)CUDA_ERROR_INVALID_DEVICE, "%d",
		   ordinal);
}

static CUresult do_name(char *name, int size, CUdevice device) {
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	(void)snprintf(name, (size_t)size, "Fake GPU %u", fake.devices[device].index);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_name(name, size, device), "%d", device);
}

static CUresult do_uuid(CUuuid *uuid, CUdevice device, bool is_of_gpu) {
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	memcpy(uuid->bytes, fake.devices[device].uuid, 16);
	/* in MIG mode the older function tells the GPU that the instance is part of */
	if (is_of_gpu && fake_setting_is("MIG", "1"))
		memcpy(uuid->bytes, "fake whole GPU 0", 16);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_uuid(uuid, device, true), "%d", device);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_uuid(uuid, device, false), "%d", device);
}

static CUresult do_attribute(int *value, CUdevice_attribute attribute, CUdevice device) {
	bool is_tegra = fake_setting_is("TEGRA", "1");

	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	switch (attribute) {
	case CU_DEVICE_ATTRIBUTE_INTEGRATED:
		*value = is_tegra;
		return CUDA_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
		*value = fake_setting_is("EXCLUSIVE", "1") ? CU_COMPUTEMODE_EXCLUSIVE_PROCESS : CU_COMPUTEMODE_DEFAULT;
		return CUDA_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*value = 9;
		return CUDA_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
		*value = 0;
		return CUDA_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
		*value = !is_tegra;
		return CUDA_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
	/* 1 on Tegra too, where memory handles are refused all the same */
	case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
		*value = 1;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_attribute(value, attribute, device), "%u %d", attribute, device);
}

static CUresult do_bus_id(char *id, int size, CUdevice device) {
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	(void)snprintf(id, (size_t)size, "0000:%02X:00.0", fake.devices[device].index + 1);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int size, CUdevice device) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_bus_id(id, size, device), "%d", device);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
	FAKE_ENTRY(FAKE_INITIALIZED,
		   is_device(device) && is_device(peer)
			   ? (*can = device != peer && !fake_setting_is("PEER", "0"), CUDA_SUCCESS)
			   : (CUresult)CUDA_ERROR_INVALID_DEVICE,
		   "%d %d", device, peer);
}

static uint64_t total_bytes(void) {
	return fake_setting_number("TOTAL_BYTES", UINT64_C(8) << 30);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
	FAKE_ENTRY(FAKE_INITIALIZED,
		   is_device(device) ? (*bytes = total_bytes(), CUDA_SUCCESS) : (CUresult)CUDA_ERROR_INVALID_DEVICE,
		   "%d", device);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
	FAKE_ENTRY(FAKE_CONTEXT,
		   (*total = total_bytes(), *free_bytes = *total - fake_used(fake_current_index()), CUDA_SUCCESS),
		   "device %u", fake_current_index());
}

/* charges the record with one context more of a device, or one fewer */
static void count_context(CUdevice device, int by) {
	uint32_t index = fake.devices[device].index;

	fake.record->contexts[index] += (uint32_t)by;
	fake.record->context_bytes[index] =
		fake.record->contexts[index] * fake_setting_number("CTX_BYTES", UINT64_C(300) << 20);
}

static bool may_have_context(CUdevice device) {
	return !fake_setting_is("EXCLUSIVE", "1") || !fake_others_have_context(fake.devices[device].index);
}

static CUresult do_retain(CUcontext *context, CUdevice device) {
	CUcontext primary = &fake.primary[device < 0 ? 0 : device % FAKE_DEVICES_MAX];

	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	if (!primary->refs) {
		if (!may_have_context(device))
			return CUDA_ERROR_DEVICE_UNAVAILABLE;
		primary->device = device;
		primary->is_primary = primary->is_active = true;
		count_context(device, 1);
	}
	primary->refs++;
	*context = primary;
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_retain(context, device), "%d", device);
}

static CUresult do_release(CUdevice device) {
	CUcontext primary;

	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	primary = &fake.primary[device];
	if (!primary->refs)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!--primary->refs) {
		primary->is_active = false;
		count_context(device, -1);
		fake_current_drop(primary);
	}
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_release(device), "%d", device);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
	FAKE_ENTRY(FAKE_INITIALIZED,
		   is_device(device) ? (fake.primary[device].flags = flags, CUDA_SUCCESS)
				     : (CUresult)CUDA_ERROR_INVALID_DEVICE,
		   "%d %u", device, flags);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
	FAKE_ENTRY(FAKE_INITIALIZED,
		   is_device(device) ? (*flags = fake.primary[device].flags, *active = fake.primary[device].is_active,
					CUDA_SUCCESS)
				     : (CUresult)CUDA_ERROR_INVALID_DEVICE,
		   "%d", device);
}

static CUresult do_create(CUcontext *context, unsigned int flags, CUdevice device) {
	CUcontext created;

	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	if (!may_have_context(device))
		return CUDA_ERROR_DEVICE_UNAVAILABLE;
	created = calloc(1, sizeof(*created));
	if (!created || depth == sizeof(stack) / sizeof(*stack))
		return free(created), CUDA_ERROR_OUT_OF_MEMORY;
	*created = (struct CUctx_st){ .device = device, .is_active = true, .flags = flags, .next = fake.created };
	fake.created = created;
	count_context(device, 1);
	stack[depth++] = created;
	*context = created;
	return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_create(context, flags, device), "%d", device);
}

static CUresult do_destroy(CUcontext context) {
	for (CUcontext *at = &fake.created; *at; at = &(*at)->next) {
		if (*at != context)
			continue;
		*at = context->next;
		count_context(context->device, -1);
		fake_current_drop(context);
		free(context);
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxDestroy_v2(CUcontext context) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_destroy(context), "-");
}

CUcontext fake_current(void) {
	return depth && stack[depth - 1] && stack[depth - 1]->is_active ? stack[depth - 1] : NULL;
}

void fake_current_drop(CUcontext context) {
	for (unsigned int i = 0; i < depth; ++i)
		if (stack[i] == context)
			stack[i] = NULL;
}

uint32_t fake_current_index(void) {
	CUcontext context = fake_current();

	return context ? fake.devices[context->device].index : 0;
}

static CUresult do_push(CUcontext context) {
	if (!context)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth == sizeof(stack) / sizeof(*stack))
		return CUDA_ERROR_OUT_OF_MEMORY;
	stack[depth++] = context;
	return CUDA_SUCCESS;
}

static CUresult do_set(CUcontext context) {
	if (depth)
		depth--;
	return context ? do_push(context) : (CUresult)CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
	FAKE_ENTRY(FAKE_INITIALIZED, (*context = fake_current(), CUDA_SUCCESS), "-");
}

CUresult cuCtxSetCurrent(CUcontext context) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_set(context), "-");
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_push(context), "-");
}

static CUresult do_pop(CUcontext *context) {
	if (!depth)
		return CUDA_ERROR_INVALID_CONTEXT;
	depth--;
	if (context)
		*context = stack[depth];
	return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
	FAKE_ENTRY(FAKE_INITIALIZED, do_pop(context), "-");
}

CUresult cuCtxGetDevice(CUdevice *device) {
	FAKE_ENTRY(FAKE_CONTEXT, (*device = fake_current()->device, CUDA_SUCCESS), "-");
}

CUresult cuCtxSynchronize(void) {
	FakeCall call;
	CUresult result;

	fake_begin(&call, __func__, FAKE_CONTEXT);
	result = fake_end(&call, "-");
	/* what waits for the GPU does not keep others of its process from the driver */
	if (!result)
		fake_streams_wait_all();
	return result;
}
