/* SPDX-License-Identifier: Apache-2.0 */

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "scenario.h"
#include "shmbroker.h"
#include "wire/cuda-driver.h"

#define PREFIX "kill-points."
#define PAGE 4096
#define BIG (UINT64_C(80) << 20) /* dead, it is compacted away at once */
#define DEADLINE_MS 40000
#define REGIONS_MAX 64
#define GPU_SIZE (UINT64_C(2) << 20)
#define ALLOCATION_SIZE (3 * GPU_SIZE) /* by cuMemAlloc(), with two windows */

typedef struct Scenario {
	const char *socket;
	FILE *out;
	struct shmb_client *owner;
	struct shmb_client *consumer;
	uint32_t flags; /* of each client */
	struct shmb_region *a, *b, *big, *kept, *c[5];
	uint64_t newest;
	bool failed;
} Scenario;

static uint64_t now_ms(void) {
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void pause_ms(long ms) {
	const struct timespec time = { .tv_nsec = ms * 1000000 };

	(void)nanosleep(&time, NULL);
}

static void tell(Scenario *scenario, const char *what, int r) {
	const char *name = r > 0 ? shmb_error_name(r) : NULL;

	fprintf(scenario->out, "%s: %s\n", what, name ?: r ? shmb_error_text(r) : "ok");
}

/* a client that the broker may have died under is asked for again */
static struct shmb_client *connect_as(Scenario *scenario, uint32_t roles) {
	uint64_t end = now_ms() + DEADLINE_MS;
	struct shmb_client *client;
	int r;

	while ((r = shmb_client_new(&client, scenario->socket, roles, scenario->flags)) && now_ms() < end)
		pause_ms(2);
	if (r) {
		tell(scenario, "connect", r);
		scenario->failed = true;
		return NULL;
	}
	(void)shmb_client_set_resume_timeout(client, DEADLINE_MS);
	return client;
}

static int make_memory(uint64_t size) {
	int fd = memfd_create("kill-points", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, (off_t)size) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		abort();
	return fd;
}

/* generations only grow */
static void registered(Scenario *scenario, const char *what, int r, struct shmb_region *region) {
	uint64_t generation;

	tell(scenario, what, r);
	if (r) {
		scenario->failed = true;
		return;
	}
	generation = shmb_region_get_generation(region);
	if (generation <= scenario->newest)
		fprintf(scenario->out, "its generation goes back\n");
	scenario->newest = generation;
}

static void create(Scenario *scenario, const char *what, const char *name, uint64_t size, uint32_t flags,
		   struct shmb_region **ret) {
	struct shmb_region_options options = { .struct_size = sizeof(options), .flags = flags };
	int r = shmb_region_create(scenario->owner, name, size, &options, ret);

	registered(scenario, what, r, *ret);
}

static void adopt(Scenario *scenario, const char *what, const char *name, struct shmb_region **ret) {
	int fd = make_memory(3 * PAGE), r;

	r = shmb_region_adopt(scenario->owner, name, fd, PAGE, PAGE + 24, NULL, ret);
	registered(scenario, what, r, *ret);
	(void)close(fd);
}

/* five windows of two pieces of memory, in one message */
static void adopt_many(Scenario *scenario) {
	static const char *const names[] = { PREFIX "c0", PREFIX "c1", PREFIX "c2", PREFIX "c3", PREFIX "c4" };
	struct shmb_region_spec specs[5] = {};
	int fds[2] = { make_memory(8 * PAGE), make_memory(8 * PAGE) }, results[5];

	for (uint32_t i = 0; i < 5; ++i)
		specs[i] = (struct shmb_region_spec){
			.struct_size = sizeof(specs[i]),
			.name = names[i],
			.fd = fds[i & 1],
			.offset = i * PAGE,
			.size = PAGE,
		};
	(void)shmb_region_adopt_many(scenario->owner, specs, 5, results);
	for (uint32_t i = 0; i < 5; ++i) {
		registered(scenario, names[i], results[i], specs[i].region);
		scenario->c[i] = specs[i].region;
	}
	(void)close(fds[0]);
	(void)close(fds[1]);
}

static void retire(Scenario *scenario, const char *what, struct shmb_region **region, uint32_t mode, int timeout) {
	tell(scenario, what, shmb_region_retire(*region, mode, timeout));
	if ((mode & 3) != SHMB_RETIRE_LAZY)
		*region = shmb_region_free(*region);
}

static void get(Scenario *scenario, struct shmb_client *client, const char *name, struct shmb_lease *ret) {
	int r = shmb_client_get_memory_info(client, name, 0, SHMB_REST, SHMB_READ, ret);

	fprintf(scenario->out, "lease on ");
	tell(scenario, name, r);
	if (r)
		*ret = (struct shmb_lease){};
}

static void release(Scenario *scenario, const char *what, struct shmb_lease *lease) {
	if (lease->client)
		tell(scenario, what, shmb_lease_release(lease));
}

static void release_message(Scenario *scenario, const char *what, const struct shmb_message_lease *lease) {
	int result = 0, r = shmb_client_release(scenario->consumer, &lease->lease, 1, &result);

	tell(scenario, what, r ?: result);
}

/* ---- what there is ---- */

static int compare_lines(const void *a, const void *b) {
	return strcmp(a, b);
}

/*
 * One line for each region, in the order of names. False when one is about to go, as the revoked ones may be, and the
 * one whose owner ends.
 */
static bool list(Scenario *scenario, bool none_is_revoked, char lines[REGIONS_MAX][128], uint32_t *ret_n) {
	struct shmb_status_iter *iter = NULL;
	const struct shmb_status *status;
	bool settled = true;
	int r;

	*ret_n = 0;
	r = shmb_status_iter_new(scenario->owner, NULL, &iter);
	while (!r && !(r = shmb_status_iter_next(iter, &status)) && status && *ret_n < REGIONS_MAX) {
		snprintf(lines[(*ret_n)++], 128,
			 "  %-20.20s state %u size %lu of %lu offset %lu flags %#x leases %u holders %u\n",
			 status->name, status->state, (unsigned long)status->size, (unsigned long)status->object_size,
			 (unsigned long)status->offset, status->flags, status->leases, status->holders_total);
		settled = settled && (status->state == SHMB_STATE_ACTIVE || status->leases) &&
			  (status->state != SHMB_STATE_REVOKED || !none_is_revoked) &&
			  strcmp(status->name, PREFIX "d") != 0;
	}
	shmb_status_iter_free(iter);
	if (r)
		tell(scenario, "status", r);
	qsort(lines, *ret_n, sizeof(lines[0]), compare_lines);
	return settled;
}

static int tell_stat(void *userdata, const struct shmb_stat *stat) {
	Scenario *scenario = userdata;

	/*
	 * Fds are also those of replies that are not read. A session whose opening was not answered stays until its
	 * process ends, which does not know of it.
	 */
	if (!strncmp(stat->name, "held_", 5) && strcmp(stat->name, "held_fds") && strcmp(stat->name, "held_sessions") &&
	    stat->value)
		fprintf(scenario->out, "  %s %lu\n", stat->name, (unsigned long)stat->value);
	return 0;
}

static void look(Scenario *scenario, const char *when, bool with_accounts) {
	uint64_t end = now_ms() + DEADLINE_MS;
	char lines[REGIONS_MAX][128];
	uint32_t n;

	/* where the accounts are of no interest the holder of what was revoked is about to end */
	while (!list(scenario, !with_accounts, lines, &n) && now_ms() < end)
		pause_ms(1);
	fprintf(scenario->out, "%s:\n", when);
	for (uint32_t i = 0; i < n; ++i)
		fputs(lines[i], scenario->out);
	if (with_accounts)
		(void)shmb_client_each_stat(scenario->owner, 0, tell_stat, scenario);
}

/* ---- the acts ---- */

static void act_register(Scenario *scenario) {
	struct shmb_region *old;

	create(scenario, "create", PREFIX "a", 3 * PAGE, 0, &scenario->a);
	adopt(scenario, "adopt", PREFIX "b", &scenario->b);
	adopt_many(scenario);
	create(scenario, "keep", PREFIX "k", PAGE, SHMB_REGION_OPT_KEEP, &scenario->kept);
	old = scenario->a;
	create(scenario, "replace", PREFIX "a", PAGE, SHMB_REGION_OPT_REPLACE, &scenario->a);
	shmb_region_free(old);
	old = scenario->kept;
	create(scenario, "replace what is kept", PREFIX "k", 2 * PAGE, SHMB_REGION_OPT_KEEP | SHMB_REGION_OPT_REPLACE,
	       &scenario->kept);
	shmb_region_free(old);
}

/* leases through the page and by message, and what becomes of them when their regions are retired */
static void act_hold(Scenario *scenario) {
	struct shmb_lookup_spec specs[3] = {};
	struct shmb_message_lease leases[3];
	struct shmb_lease a, c0;
	int results[3] = {}, r;

	get(scenario, scenario->consumer, PREFIX "a", &a);
	get(scenario, scenario->consumer, PREFIX "c0", &c0);
	for (uint32_t i = 0; i < 3; ++i)
		specs[i] = (struct shmb_lookup_spec){
			.struct_size = sizeof(specs[i]),
			.name = (const char *const[]){ PREFIX "b", PREFIX "c1", PREFIX "c2" }[i],
			.size = SHMB_REST,
			.access = SHMB_READ,
		};
	r = shmb_client_lookup(scenario->consumer, specs, 3, leases, results);
	for (uint32_t i = 0; i < 3; ++i)
		tell(scenario, "by message", r ?: results[i]);
	look(scenario, "held", true);

	retire(scenario, "retire strictly", &scenario->a, SHMB_RETIRE_STRICT, 0);
	retire(scenario, "retire lazily", &scenario->c[0], SHMB_RETIRE_LAZY, 0);
	retire(scenario, "retire by force", &scenario->c[1], SHMB_RETIRE_FORCE, 0);
	retire(scenario, "retire and wait", &scenario->b, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, 20);
	look(scenario, "retired", true);

	release(scenario, "release", &a);
	release(scenario, "release of the lazy one", &c0);
	release_message(scenario, "release by message", &leases[0]);
	release_message(scenario, "release of the revoked one", &leases[1]);
	release_message(scenario, "release twice", &leases[1]);
	release_message(scenario, "release by message", &leases[2]);
	retire(scenario, "retire lazily and wait", &scenario->c[2], SHMB_RETIRE_LAZY | SHMB_RETIRE_WAIT, -1);
	look(scenario, "released", true);
	scenario->c[0] = shmb_region_free(scenario->c[0]);
	scenario->c[2] = shmb_region_free(scenario->c[2]);
}

/* a name again, a region that is revoked while its holder has it, and the holder's end */
static void act_revoke(Scenario *scenario) {
	struct shmb_client *other = connect_as(scenario, SHMB_ROLE_CONSUMER);
	struct shmb_lease a, c3;

	if (!other)
		return;
	create(scenario, "create again", PREFIX "a", PAGE, 0, &scenario->a);
	get(scenario, scenario->consumer, PREFIX "a", &a);
	get(scenario, other, PREFIX "c3", &c3);
	retire(scenario, "retire by force", &scenario->c[3], SHMB_RETIRE_FORCE | SHMB_RETIRE_WAIT, -1);
	look(scenario, "revoked", true);
	release(scenario, "release", &a);
	shmb_client_free(other);
	look(scenario, "its holder has gone", false);
}

/* @create_region in a process that ends and has the region */
static void create_elsewhere(Scenario *scenario, void (*create_region)(Scenario *scenario)) {
	int status = 0;
	pid_t pid;

	fflush(scenario->out);
	pid = fork();
	if (!pid) {
		scenario->owner = connect_as(scenario, SHMB_ROLE_OWNER);
		if (scenario->owner)
			create_region(scenario);
		fflush(scenario->out);
		_exit(scenario->failed);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
		scenario->failed = true;
}

static void create_d(Scenario *scenario) {
	struct shmb_region *d = NULL;

	create(scenario, "create in another session", PREFIX "d", PAGE, 0, &d);
}

/* and memory that is compacted away */
static void act_end(Scenario *scenario) {
	create_elsewhere(scenario, create_d);
	create(scenario, "create a big one", PREFIX "big", BIG, 0, &scenario->big);
	if (scenario->big)
		retire(scenario, "retire the big one", &scenario->big, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, -1);
}

static void act_unregister(Scenario *scenario) {
	static const char *const names[] = { PREFIX "c4", PREFIX "none", PREFIX "k" };
	int results[3] = {}, r;

	r = shmb_client_unregister(scenario->owner, names, 2, SHMB_RETIRE_STRICT, 0, results);
	tell(scenario, "unregister", r ?: results[0]);
	tell(scenario, "unregister what is not there", r ?: results[1]);
	tell(scenario, "unregister all",
	     shmb_client_unregister_all(scenario->owner, SHMB_ALL_SESSION, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, -1,
					NULL));
	look(scenario, "what is kept", false);
	r = shmb_client_unregister(scenario->owner, names + 2, 1, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, -1, results);
	tell(scenario, "unregister what is kept", r ?: results[0]);
	look(scenario, "nothing", false);
}

/* ---- the acts with GPU memory ---- */

/* a function of the driver, which an application loads by itself */
static void *driver(const char *name) {
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *symbol = library ? dlsym(library, name) : NULL;

	if (!symbol)
		abort();
	return symbol;
}

#define DRIVER(_name, ...) ((CUresult(*) __VA_ARGS__)driver(_name))

static CUdeviceptr gpu_allocate(void) {
	CUdeviceptr pointer = 0;
	CUcontext context;

	if (DRIVER("cuInit", (unsigned))(0) ||
	    DRIVER("cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice))(&context, 0) ||
	    DRIVER("cuCtxSetCurrent", (CUcontext))(context) ||
	    DRIVER("cuMemAlloc_v2", (CUdeviceptr *, size_t))(&pointer, ALLOCATION_SIZE))
		abort();
	return pointer;
}

/* the fake driver's pointers are the processor's too */
static uint64_t *gpu_word(const void *device_pointer) {
	return (uint64_t *)(uintptr_t)device_pointer;
}

static void gpu_create(Scenario *scenario, const char *what, const char *name, uint32_t flags,
		       struct shmb_region **ret) {
	struct shmb_region_options options = { .struct_size = sizeof(options), .flags = flags };
	int r = shmb_cuda_alloc(scenario->owner, name, GPU_SIZE, 0, &options, ret);

	if (flags & SHMB_REGION_OPT_UNPUBLISHED && !r)
		r = shmb_cuda_publish(*ret, NULL);
	registered(scenario, what, r, *ret);
	if (!r)
		*gpu_word(shmb_region_get_data(*ret)) = shmb_region_get_generation(*ret);
}

static void gpu_export(Scenario *scenario, const char *what, const char *name, CUdeviceptr pointer,
		       struct shmb_region **ret) {
	int r = shmb_cuda_export(scenario->owner, name, gpu_word((void *)(uintptr_t)pointer), GPU_SIZE, NULL, ret);

	registered(scenario, what, r, *ret);
	if (!r)
		*gpu_word((void *)(uintptr_t)pointer) = shmb_region_get_generation(*ret);
}

/* a lease, whose memory is that of its generation */
static void gpu_get(Scenario *scenario, struct shmb_client *client, const char *name, struct shmb_lease *ret) {
	get(scenario, client, name, ret);
	if (ret->client)
		fprintf(scenario->out, "its memory is of kind %u and %s\n", ret->memory_type,
			*gpu_word(ret->address) == ret->generation ? "its own" : "another's");
}

static void gpu_create_d(Scenario *scenario) {
	struct shmb_region *d = NULL;

	gpu_create(scenario, "create in another session", PREFIX "d", 0, &d);
}

/* before this process has the driver: that cannot be forked with */
static void act_gpu_end(Scenario *scenario) {
	create_elsewhere(scenario, gpu_create_d);
}

/* by fd: an allocation for each; by handle: two windows of one allocation */
static void act_gpu_register(Scenario *scenario) {
	CUdeviceptr pointer = gpu_allocate();
	struct shmb_region *old;

	gpu_create(scenario, "create", PREFIX "a", 0, &scenario->a);
	gpu_export(scenario, "export", PREFIX "b", pointer + PAGE, &scenario->b);
	gpu_export(scenario, "export of the same", PREFIX "c0", pointer + GPU_SIZE + PAGE, &scenario->c[0]);
	gpu_create(scenario, "publish", PREFIX "c1", SHMB_REGION_OPT_UNPUBLISHED, &scenario->c[1]);
	gpu_create(scenario, "keep", PREFIX "k", SHMB_REGION_OPT_KEEP, &scenario->kept);
	old = scenario->a;
	gpu_create(scenario, "replace", PREFIX "a", SHMB_REGION_OPT_REPLACE, &scenario->a);
	shmb_region_free(old);
}

static void act_gpu_hold(Scenario *scenario) {
	struct shmb_lookup_spec specs[2] = {};
	struct shmb_message_lease leases[2];
	struct shmb_lease a, b, c0;
	int results[2] = {}, r;

	gpu_get(scenario, scenario->consumer, PREFIX "a", &a);
	gpu_get(scenario, scenario->consumer, PREFIX "b", &b);
	gpu_get(scenario, scenario->consumer, PREFIX "c0", &c0);
	for (uint32_t i = 0; i < 2; ++i)
		specs[i] = (struct shmb_lookup_spec){
			.struct_size = sizeof(specs[i]),
			.name = (const char *const[]){ PREFIX "c1", PREFIX "k" }[i],
			.size = SHMB_REST,
			.access = SHMB_READ,
		};
	r = shmb_client_lookup(scenario->consumer, specs, 2, leases, results);
	for (uint32_t i = 0; i < 2; ++i)
		tell(scenario, "by message", r ?: results[i]);
	look(scenario, "held", true);

	retire(scenario, "retire strictly", &scenario->a, SHMB_RETIRE_STRICT, 0);
	retire(scenario, "retire lazily", &scenario->b, SHMB_RETIRE_LAZY, 0);
	retire(scenario, "retire by force", &scenario->c[0], SHMB_RETIRE_FORCE, 0);
	retire(scenario, "retire and wait", &scenario->c[1], SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, 20);
	look(scenario, "retired", true);

	release(scenario, "release", &a);
	release(scenario, "release of the lazy one", &b);
	release(scenario, "release of the revoked one", &c0);
	release_message(scenario, "release by message", &leases[0]);
	release_message(scenario, "release of what is kept", &leases[1]);
	look(scenario, "released", true);
	scenario->b = shmb_region_free(scenario->b);
}

static void act_gpu_unregister(Scenario *scenario) {
	static const char *const names[] = { PREFIX "k" };
	int results[1] = {}, r;

	gpu_create(scenario, "create again", PREFIX "a", 0, &scenario->a);
	tell(scenario, "unregister all",
	     shmb_client_unregister_all(scenario->owner, SHMB_ALL_SESSION, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, -1,
					NULL));
	look(scenario, "what is kept", false);
	r = shmb_client_unregister(scenario->owner, names, 1, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, -1, results);
	tell(scenario, "unregister what is kept", r ?: results[0]);
	look(scenario, "nothing", false);
}

bool scenario_run(const char *socket, FILE *out, bool gpu) {
	void (*const system_acts[])(Scenario *) = { act_register, act_hold, act_revoke, act_end, act_unregister };
	void (*const gpu_acts[])(Scenario *) = { act_gpu_end, act_gpu_register, act_gpu_hold, act_gpu_unregister };
	Scenario scenario = { .socket = socket, .out = out, .flags = gpu ? SHMB_CUDA_CONTEXT : 0 };
	void (*const *acts)(Scenario *) = gpu ? gpu_acts : system_acts;
	size_t n_acts = gpu ? sizeof(gpu_acts) / sizeof(gpu_acts[0]) : sizeof(system_acts) / sizeof(system_acts[0]);

	scenario.owner = connect_as(&scenario, SHMB_ROLE_OWNER);
	scenario.consumer = scenario.owner ? connect_as(&scenario, SHMB_ROLE_CONSUMER) : NULL;
	if (scenario.consumer)
		tell(&scenario, "subscribe", shmb_client_subscribe(scenario.consumer, SHMB_EVENT_MASK_ALL));
	for (size_t i = 0; i < n_acts && !scenario.failed; ++i)
		acts[i](&scenario);
	shmb_client_free(scenario.owner);
	shmb_client_free(scenario.consumer);
	return !scenario.failed;
}
