/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda/nvml.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "wire/uuid.h"

#define NVML_INSUFFICIENT_SIZE 7

typedef struct Nvml {
	int (*init)(void);
	int (*shutdown)(void);
	int (*driver_version)(char *version, unsigned int size);
	int (*device_by_uuid)(const char *uuid, void **device);
	int (*processes)(void *device, unsigned int *count, void *infos);
} Nvml;

static void find(void *library, const char *name, void *ret_function) {
	void *symbol = dlsym(library, name);

	memcpy(ret_function, &symbol, sizeof(symbol));
}

/* asks with no room for an answer: the count is told all the same */
static void count_processes(const Nvml *nvml, const uint8_t uuid[16], char *ret, size_t size) {
	char text[WIRE_UUID_TEXT_SIZE];
	unsigned int count = 0;
	void *device;
	int r;

	if (!nvml->device_by_uuid || !nvml->processes)
		return;
	wire_uuid_format(uuid, text);
	if (nvml->device_by_uuid(text, &device))
		return;
	r = nvml->processes(device, &count, NULL);
	if (!r || r == NVML_INSUFFICIENT_SIZE)
		(void)snprintf(ret, size, ", %u processes compute on the GPU", count);
}

void nvml_describe(const char *library, const uint8_t uuid[16], char *ret, size_t size) {
	void *handle = dlopen(library ? library : NVML_LIBRARY, RTLD_NOW | RTLD_LOCAL);
	char version[80] = "";
	Nvml nvml;
	int n;

	ret[0] = 0;
	if (!handle)
		return;
	find(handle, "nvmlInit_v2", &nvml.init);
	find(handle, "nvmlShutdown", &nvml.shutdown);
	find(handle, "nvmlSystemGetDriverVersion", &nvml.driver_version);
	find(handle, "nvmlDeviceGetHandleByUUID", &nvml.device_by_uuid);
	find(handle, "nvmlDeviceGetComputeRunningProcesses_v3", &nvml.processes);
	if (!nvml.init || !nvml.shutdown || !nvml.driver_version || nvml.init()) {
		(void)dlclose(handle);
		return;
	}
	if (!nvml.driver_version(version, sizeof(version))) {
		version[sizeof(version) - 1] = 0;
		n = snprintf(ret, size, "driver %s", version);
		if (n > 0 && (size_t)n < size)
			count_processes(&nvml, uuid, ret + n, size - (size_t)n);
	}
	(void)nvml.shutdown();
	(void)dlclose(handle);
}
