/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An owner and consumer of GPU memory: client-cuda SOCKET. It reads commands, a line each, and answers each with a line:
 * "ok" and values, or "no CODE SENTENCE" for what the library or the driver refuses. It loads the driver itself for what
 * an application does: contexts, allocations, copies.
 */

#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shmbroker.h"
#include "wire/cuda-driver.h"

#define WORDS_MAX 12
#define LEASES_MAX 256
#define REGIONS_MAX 64
#define EVENTS_MAX 64
#define BYTES_MAX 4096

static const char *socket_path;
static struct shmb_client *client;
static struct shmb_lease leases[LEASES_MAX];
static struct shmb_region *regions[REGIONS_MAX];
static struct shmb_event events[EVENTS_MAX];
static struct {
	CUdeviceptr pointer;
	size_t size;
	size_t piece;	 /* bytes of each allocation */
} mappings[REGIONS_MAX]; /* of do_vmm() */
static CUstream streams[REGIONS_MAX];
static uint32_t n_leases, n_regions, n_events, n_mappings, n_streams;
static char *words[WORDS_MAX];
static uint32_t n_words;

static uint64_t number(uint32_t i) {
	return i < n_words ? strtoull(words[i], NULL, 0) : 0;
}

static const char *word(uint32_t i) {
	return i < n_words ? words[i] : "";
}

static void say(int result) {
	if (result)
		printf("no %s %s\n", shmb_error_name(result) ?: strerror(-result), shmb_last_error());
	else
		printf("ok\n");
}

static void on_event(void *userdata, const struct shmb_event *event) {
	(void)userdata;
	if (n_events < EVENTS_MAX)
		events[n_events++] = *event;
}

/* a function of the driver, which the program loads as an application would */
static void *driver(const char *name) {
	static void *library;
	void *symbol;

	if (!library)
		library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	symbol = library ? dlsym(library, name) : NULL;
	if (!symbol) {
		fprintf(stderr, "no %s\n", name);
		exit(2);
	}
	return symbol;
}

#define DRIVER(_name, ...) (((CUresult(*) __VA_ARGS__)driver(_name)))

static void say_driver(CUresult result) {
	if (result)
		printf("no %u the driver\n", result);
	else
		printf("ok\n");
}

static void do_context(void) {
	CUcontext context;
	CUresult result;

	result = DRIVER("cuInit", (unsigned))(0);
	if (!result)
		result = DRIVER("cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice))(&context, (CUdevice)number(1));
	if (!result)
		result = DRIVER("cuCtxSetCurrent", (CUcontext))(context);
	say_driver(result);
}

static void do_leave(void) {
	say_driver(DRIVER("cuDevicePrimaryCtxRelease_v2", (CUdevice))((CUdevice)number(1)));
}

static void do_alloc(void) {
	CUdeviceptr pointer = 0;
	CUresult result;

	if (!strcmp(word(2), "managed"))
		result = DRIVER("cuMemAllocManaged", (CUdeviceptr *, size_t, unsigned))(&pointer, number(1), 1);
	else if (!strcmp(word(2), "async"))
		result = DRIVER("cuMemAllocAsync", (CUdeviceptr *, size_t, CUstream))(&pointer, number(1), NULL);
	else
		result = DRIVER("cuMemAlloc_v2", (CUdeviceptr *, size_t))(&pointer, number(1));
	if (result)
		say_driver(result);
	else
		printf("ok %llu\n", pointer);
}

/* SIZE TYPES COUNT: memory by cuMemCreate(); that many allocations at addresses in a row, one unless said otherwise */
static void do_vmm(void) {
	CUmemAllocationProp properties = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = (unsigned)number(2),
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE },
	};
	CUmemAccessDesc access = {
		.location = properties.location,
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUmemGenericAllocationHandle handle;
	CUdeviceptr pointer = 0;
	size_t piece = number(1), size = piece * (n_words > 3 ? number(3) : 1);
	CUresult result;

	result = DRIVER("cuMemAddressReserve",
			(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))(&pointer, size, 0, 0, 0);
	for (size_t at = 0; at < size && !result; at += piece) {
		result = DRIVER("cuMemCreate", (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
						unsigned long long))(&handle, piece, &properties, 0);
		if (!result)
			result = DRIVER("cuMemMap", (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
						     unsigned long long))(pointer + at, piece, 0, handle, 0);
		if (!result)
			result = DRIVER("cuMemRelease", (CUmemGenericAllocationHandle))(handle);
	}
	if (!result)
		result = DRIVER("cuMemSetAccess", (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))(pointer, size,
													  &access, 1);
	if (result || n_mappings == REGIONS_MAX) {
		say_driver(result);
		return;
	}
	mappings[n_mappings].pointer = pointer;
	mappings[n_mappings].piece = piece;
	mappings[n_mappings++].size = size;
	printf("ok %llu\n", pointer);
}

static void do_free(void) {
	say_driver(DRIVER("cuMemFree_v2", (CUdeviceptr))(number(1)));
}

/* POINTER BYTE SIZE STREAM */
static void do_fill(void) {
	if (n_words > 4)
		say_driver(DRIVER("cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, CUstream))(
			number(1), (unsigned char)number(2), number(3), (CUstream)(uintptr_t)number(4)));
	else
		say_driver(DRIVER("cuMemsetD8_v2", (CUdeviceptr, unsigned char, size_t))(
			number(1), (unsigned char)number(2), number(3)));
}

/* POINTER SIZE */
static void do_read(void) {
	uint8_t bytes[BYTES_MAX];
	size_t size = number(2) < sizeof(bytes) ? number(2) : sizeof(bytes);
	CUresult result = DRIVER("cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t))(bytes, number(1), size);

	if (result) {
		say_driver(result);
		return;
	}
	printf("ok ");
	for (size_t i = 0; i < size; ++i)
		printf("%02x", bytes[i]);
	printf("\n");
}

static void do_stream(void) {
	CUstream stream;
	CUresult result = DRIVER("cuStreamCreate", (CUstream *, unsigned))(&stream, 0);

	if (result || n_streams == REGIONS_MAX) {
		say_driver(result);
		return;
	}
	streams[n_streams++] = stream;
	printf("ok %" PRIuPTR "\n", (uintptr_t)stream);
}

/* FLAGS */
static void do_client(void) {
	int r = shmb_client_new(&client, socket_path, SHMB_ROLE_OWNER | SHMB_ROLE_CONSUMER, (uint32_t)number(1));

	if (!r)
		shmb_client_set_event_callback(client, on_event, NULL);
	say(r);
}

static void say_region(int result, struct shmb_region **made) {
	struct shmb_region *region = *made;

	if (result || n_regions == REGIONS_MAX) {
		say(result);
		return;
	}
	regions[n_regions] = region;
	printf("ok %u %" PRIuPTR " %u %d\n", n_regions++, (uintptr_t)shmb_region_get_data(region),
	       shmb_region_get_flags(region), shmb_region_get_fd(region));
}

/* NAME POINTER SIZE FLAGS */
static void do_export(void) {
	struct shmb_region_options options = { .struct_size = sizeof(options), .flags = (uint32_t)number(4) };
	struct shmb_region *region = NULL;

	say_region(shmb_cuda_export(client, word(1), (void *)(uintptr_t)number(2), number(3), &options, &region),
		   &region);
}

/* NAME SIZE DEVICE FLAGS */
static void do_cuda_alloc(void) {
	struct shmb_region_options options = { .struct_size = sizeof(options), .flags = (uint32_t)number(4) };
	struct shmb_region *region = NULL;

	say_region(shmb_cuda_alloc(client, word(1), number(2), (int32_t)number(3), &options, &region), &region);
}

static void from_hex(uint8_t *ret, size_t size, const char *text) {
	for (size_t i = 0; i < size && strlen(text) >= 2 * i + 2; ++i) {
		unsigned byte = 0;

		(void)sscanf(text + 2 * i, "%2x", &byte);
		ret[i] = (uint8_t)byte;
	}
}

/* NAME UUID FD ALLOCATION OFFSET SIZE FLAGS */
static void do_adopt_fd(void) {
	struct shmb_region_options options = { .struct_size = sizeof(options), .flags = (uint32_t)number(7) };
	struct shmb_cuda_handle handle = {
		.struct_size = sizeof(handle),
		.allocation_size = number(4),
		.offset = number(5),
		.size = number(6),
	};
	struct shmb_region *region = NULL;

	from_hex(handle.device_uuid, sizeof(handle.device_uuid), word(2));
	say_region(shmb_cuda_adopt_fd(client, word(1), atoi(word(3)), &handle, &options, &region), &region);
}

/* NAME UUID HANDLE ALLOCATION OFFSET SIZE PID NAMESPACE */
static void do_adopt(void) {
	struct shmb_cuda_handle handle = {
		.struct_size = sizeof(handle),
		.allocation_size = number(4),
		.offset = number(5),
		.size = number(6),
		.owner_pid = (uint32_t)number(7),
		.owner_pid_namespace = number(8),
	};
	struct shmb_region *region = NULL;

	from_hex(handle.device_uuid, sizeof(handle.device_uuid), word(2));
	from_hex(handle.handle, sizeof(handle.handle), word(3));
	say_region(shmb_cuda_adopt(client, word(1), &handle, NULL, &region), &region);
}

/* NAME SIZE */
static void do_create(void) {
	struct shmb_region_options options = { .struct_size = sizeof(options), .flags = (uint32_t)number(3) };
	struct shmb_region *region = NULL;

	say_region(shmb_region_create(client, word(1), number(2), &options, &region), &region);
}

/* REGION STREAM */
static void do_publish(void) {
	say(shmb_cuda_publish(regions[number(1)], (void *)(uintptr_t)number(2)));
}

/* REGION MODE TIMEOUT */
static void do_retire(void) {
	say(shmb_region_retire(regions[number(1)], (uint32_t)number(2), (int)number(3)));
}

static void do_region_free(void) {
	regions[number(1)] = shmb_region_free(regions[number(1)]);
	say(0);
}

/* NAME OFFSET SIZE ACCESS */
static void do_get(void) {
	struct shmb_lease *lease = &leases[n_leases];
	int r;

	r = shmb_client_get_memory_info(client, word(1), number(2), n_words > 3 ? number(3) : SHMB_REST,
					n_words > 4 ? (uint32_t)number(4) : SHMB_READ, lease);
	if (r || n_leases == LEASES_MAX - 1) {
		say(r);
		return;
	}
	printf("ok %u %" PRIuPTR " %" PRIu64 " %u %d %u ", n_leases++, (uintptr_t)lease->address, lease->size,
	       lease->memory_type, lease->device, lease->flags);
	for (size_t i = 0; i < sizeof(lease->device_uuid); ++i)
		printf("%02x", lease->device_uuid[i]);
	printf("\n");
}

static void do_release(void) {
	say(shmb_lease_release(&leases[number(1)]));
}

/* LEASE STREAM */
static void do_release_after(void) {
	say(shmb_lease_release_after(&leases[number(1)], (void *)(uintptr_t)number(2)));
}

/* LEASE DEVICE */
static void do_pin(void) {
	void *pointer = NULL;
	int r = shmb_lease_pin(&leases[number(1)], (int32_t)number(2), &pointer);

	if (r)
		say(r);
	else
		printf("ok %" PRIuPTR "\n", (uintptr_t)pointer);
}

static void do_copy(void) {
	char byte = 0;
	int r = shmb_lease_copy_out(&leases[number(1)], 0, &byte, 1);

	say(r);
}

static void do_pool(void) {
	struct shmb_pool *pool;

	say(shmb_pool_open(client, word(1), &pool));
}

static void do_process(void) {
	say(shmb_client_process(client));
}

/* the events so far: type and name of each */
static void do_events(void) {
	int r = shmb_client_process(client);

	if (r) {
		say(r);
		return;
	}
	printf("ok");
	for (uint32_t i = 0; i < n_events; ++i)
		printf(" %u:%s", events[i].type, events[i].name);
	printf("\n");
}

static void do_pid(void) {
	printf("ok %d\n", (int)getpid());
}

typedef struct Many {
	const char *name;
	uint32_t n;
	int result;
} Many;

static void *take_many(void *data) {
	Many *many = data;

	for (uint32_t i = 0; i < many->n && !many->result; ++i) {
		struct shmb_lease lease;

		many->result = shmb_client_get_memory_info(client, many->name, 0, SHMB_REST, SHMB_READ, &lease);
		if (!many->result)
			many->result = shmb_lease_release(&lease);
	}
	return NULL;
}

/* NAME THREADS TIMES: leases of many threads at once */
static void do_threads(void) {
	pthread_t threads[16];
	Many many[16];
	size_t n = number(2) < 16 ? number(2) : 16;
	int result = 0;

	for (size_t i = 0; i < n; ++i) {
		many[i] = (Many){ .name = word(1), .n = (uint32_t)number(3) };
		if (pthread_create(&threads[i], NULL, take_many, &many[i]))
			exit(2);
	}
	for (size_t i = 0; i < n; ++i) {
		pthread_join(threads[i], NULL);
		result = result ? result : many[i].result;
	}
	say(result);
}

static const struct {
	const char *name;
	void (*function)(void);
} commands[] = {
	{ "adopt", do_adopt },
	{ "adopt_fd", do_adopt_fd },
	{ "alloc", do_alloc },
	{ "client", do_client },
	{ "context", do_context },
	{ "copy", do_copy },
	{ "create", do_create },
	{ "cuda_alloc", do_cuda_alloc },
	{ "events", do_events },
	{ "export", do_export },
	{ "fill", do_fill },
	{ "free", do_free },
	{ "get", do_get },
	{ "leave", do_leave },
	{ "pid", do_pid },
	{ "pin", do_pin },
	{ "pool", do_pool },
	{ "process", do_process },
	{ "publish", do_publish },
	{ "read", do_read },
	{ "region_free", do_region_free },
	{ "release", do_release },
	{ "release_after", do_release_after },
	{ "retire", do_retire },
	{ "stream", do_stream },
	{ "threads", do_threads },
	{ "vmm", do_vmm },
};

static void run(void) {
	/* the answer of a child is the answer */
	if (n_words && !strcmp(words[0], "fork")) {
		pid_t pid = fork();

		if (pid) {
			(void)waitpid(pid, NULL, 0);
			return;
		}
		memmove(words, words + 1, --n_words * sizeof(words[0]));
		run();
		(void)fflush(stdout);
		_exit(0);
	}
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); ++i) {
		if (n_words && !strcmp(words[0], commands[i].name)) {
			commands[i].function();
			return;
		}
	}
	printf("no COMMAND %s\n", word(0));
}

int main(int argc, char **argv) {
	char line[8192];

	if (argc != 2)
		return 2;
	socket_path = argv[1];
	while (fgets(line, sizeof(line), stdin)) {
		n_words = 0;
		for (char *at = strtok(line, " \n"); at && n_words < WORDS_MAX; at = strtok(NULL, " \n"))
			words[n_words++] = at;
		run();
		(void)fflush(stdout);
	}
	for (uint32_t i = 0; i < n_streams; ++i)
		(void)DRIVER("cuStreamDestroy_v2", (CUstream))(streams[i]);
	for (uint32_t i = 0; i < n_regions; ++i)
		shmb_region_free(regions[i]);
	shmb_client_free(client);
	for (uint32_t i = 0; i < n_mappings; ++i) {
		for (size_t at = 0; at < mappings[i].size; at += mappings[i].piece)
			(void)DRIVER("cuMemUnmap", (CUdeviceptr, size_t))(mappings[i].pointer + at, mappings[i].piece);
		(void)DRIVER("cuMemAddressFree", (CUdeviceptr, size_t))(mappings[i].pointer, mappings[i].size);
	}
	return 0;
}
