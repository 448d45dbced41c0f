/* SPDX-License-Identifier: Apache-2.0 */

/*
 * cuda: what GPU memory costs a consumer and an owner.
 *
 * A process of its own is the owner, because CUDA opens no memory of the same process; it does what the measuring process
 * asks of it over a socket. Each sample of an open has a new region, each of the helper a new broker.
 */

#include <dlfcn.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "shmbroker.h"
#include "wire/cuda-driver.h"
#include "wire/fd.h"

#define ROUNDS 100
#define ROUNDS_QUICK 3
#define HELPER_ROUNDS 10
#define HELPER_ROUNDS_QUICK 2
#define SAMPLES_MAX 100
#define SIZE (UINT64_C(2) << 20)
#define NAME "bench.cuda"
#define CPU_NAME "bench.cpu"
#define CONFIG_MAX 1024

typedef enum Wish {
	WISH_CONNECT, /* to the broker at .socket */
	WISH_IPC,     /* a region of cuMemAlloc() */
	WISH_VMM,     /* one of shmb_cuda_alloc() */
	WISH_HIDDEN,  /* the same, not published */
	WISH_PUBLISH,
	WISH_CPU,    /* a region of system memory */
	WISH_RETIRE, /* what there is of these, and disconnect */
	WISH_FREE_BYTES,
} Wish;

typedef struct Question {
	Wish wish;
	char socket[96];
} Question;

typedef struct Answer {
	int result;
	uint64_t began_ns; /* CLOCK_MONOTONIC */
	uint64_t took_ns;
	uint64_t value;
	char why[256];
} Answer;

typedef struct Owner {
	CudaDriver driver;
	CUresult (*alloc)(CUdeviceptr *pointer, size_t size);
	CUresult (*free_memory)(CUdeviceptr pointer);
	struct shmb_client *client;
	struct shmb_region *region, *cpu;
	CUdeviceptr pointer;
} Owner;

typedef struct CudaBench {
	Bench *options;
	CudaDriver driver;
	Broker broker;
	pid_t owner;
	int channel;
	struct shmb_client *client;
	uint32_t rounds;
	BenchCase cases[2];
} CudaBench;

/* the names of the cases' regions are their data */
static struct shmb_client *lease_client;

/* ---- the owner ---- */

static void *symbol(const CudaDriver *driver, const char *name) {
	void *found = dlsym(driver->library, name);

	if (!found)
		bench_die("%s has no %s", CUDA_LIBRARY, name);
	return found;
}

/* makes the first device's primary context current; false, and why, where there is none */
static bool enter(CudaDriver *driver, char *why, size_t size) {
	CUcontext context;
	CUresult result;
	CUdevice device;

	if (cuda_driver_load(driver, NULL, why, size))
		return false;
	result = driver->cuInit(0);
	if (!result)
		result = driver->cuDeviceGet(&device, 0);
	if (!result)
		result = driver->cuDevicePrimaryCtxRetain(&context, device);
	if (!result)
		result = driver->cuCtxPushCurrent_v2(context);
	if (result)
		(void)snprintf(why, size, "%s", cuda_driver_error(driver, result));
	return !result;
}

static int owner_retire(Owner *owner) {
	int r = owner->region ? shmb_region_retire(owner->region, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, -1) : 0;

	owner->region = shmb_region_free(owner->region);
	if (owner->pointer)
		(void)owner->free_memory(owner->pointer);
	owner->pointer = 0;
	return r;
}

static int owner_do(Owner *owner, const Question *question, Answer *answer) {
	struct shmb_region_options hidden = {
		.struct_size = sizeof(hidden),
		.flags = SHMB_REGION_OPT_UNPUBLISHED,
	};
	size_t free_bytes, total;

	switch (question->wish) {
	case WISH_CONNECT:
		owner->cpu = shmb_region_free(owner->cpu);
		owner->client = shmb_client_free(owner->client);
		return shmb_client_new(&owner->client, question->socket, SHMB_ROLE_OWNER, 0);
	case WISH_IPC:
		if (owner->alloc(&owner->pointer, SIZE))
			return -ENOMEM;
		answer->began_ns = bench_now_ns();
		return shmb_cuda_export(owner->client, NAME, (void *)(uintptr_t)owner->pointer, SIZE, NULL,
					&owner->region);
	case WISH_VMM:
	case WISH_HIDDEN:
		return shmb_cuda_alloc(owner->client, NAME, SIZE, 0, question->wish == WISH_HIDDEN ? &hidden : NULL,
				       &owner->region);
	case WISH_PUBLISH:
		return shmb_cuda_publish(owner->region, NULL);
	case WISH_CPU:
		return shmb_region_create(owner->client, CPU_NAME, SIZE, NULL, &owner->cpu);
	case WISH_RETIRE:
		return owner_retire(owner);
	case WISH_FREE_BYTES:
		if (owner->driver.cuMemGetInfo_v2(&free_bytes, &total))
			return -EIO;
		answer->value = free_bytes;
		return 0;
	}
	return -EINVAL;
}

_Noreturn static void owner_run(int channel, pid_t parent) {
	Owner owner = {};
	Question question;
	Answer answer = {};

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	if (enter(&owner.driver, answer.why, sizeof(answer.why))) {
		*(void **)&owner.alloc = symbol(&owner.driver, "cuMemAlloc_v2");
		*(void **)&owner.free_memory = symbol(&owner.driver, "cuMemFree_v2");
	} else {
		answer.result = SHMB_E_UNSUPPORTED;
	}
	/* the first answer is to no question */
	(void)send(channel, &answer, sizeof(answer), MSG_NOSIGNAL);
	while (!answer.result && recv(channel, &question, sizeof(question), 0) == sizeof(question)) {
		answer = (Answer){ .began_ns = bench_now_ns() };
		answer.result = owner_do(&owner, &question, &answer);
		answer.took_ns = bench_now_ns() - answer.began_ns;
		if (answer.result)
			(void)snprintf(answer.why, sizeof(answer.why), "%s", shmb_last_error());
		(void)send(channel, &answer, sizeof(answer), MSG_NOSIGNAL);
	}
	_exit(0);
}

static Answer answer_of(const CudaBench *bench) {
	Answer answer;

	if (recv(bench->channel, &answer, sizeof(answer), 0) != sizeof(answer))
		bench_die("the process that owns GPU memory has ended");
	return answer;
}

static void ask(const CudaBench *bench, Wish wish) {
	Question question = { .wish = wish };

	(void)snprintf(question.socket, sizeof(question.socket), "%s", bench->broker.socket);
	if (send(bench->channel, &question, sizeof(question), MSG_NOSIGNAL) != sizeof(question))
		bench_die("the process that owns GPU memory has ended");
}

static Answer wish(const CudaBench *bench, Wish what) {
	Answer answer;

	ask(bench, what);
	answer = answer_of(bench);
	if (answer.result)
		bench_die("GPU memory cannot be offered: %s", answer.why);
	return answer;
}

/* ---- the consumer ---- */

static void must(int result) {
	if (result)
		bench_die("%s", shmb_last_error());
}

static void take(struct shmb_client *client, const char *name, struct shmb_lease *ret) {
	must(shmb_client_get_memory_info(client, name, 0, SHMB_REST, SHMB_READ, ret));
}

static void row(CudaBench *bench, const char *name, uint64_t n, const char *unit, const char *detail, double *samples,
		size_t n_samples) {
	BenchRow shape = { .n = n, .threads = 1, .unit = unit };

	if (bench->options->only && !strstr(name, bench->options->only))
		return;
	(void)snprintf(shape.name, sizeof(shape.name), "%s", name);
	(void)snprintf(shape.detail, sizeof(shape.detail), "%s", detail);
	bench_row(bench->options, shape, samples, n_samples);
}

/* the first use of a region */
static void measure_open(CudaBench *bench, Wish what, const char *name) {
	double samples[SAMPLES_MAX];
	struct shmb_lease lease;
	uint64_t began;

	for (uint32_t i = 0; i < bench->rounds; ++i) {
		(void)wish(bench, what);
		began = bench_now_ns();
		take(bench->client, NAME, &lease);
		samples[i] = (double)(bench_now_ns() - began) / 1e3;
		must(shmb_lease_release(&lease));
		(void)wish(bench, WISH_RETIRE);
		must(shmb_client_process(bench->client));
	}
	row(bench, name, SIZE, "us", "the first lease in a process", samples, bench->rounds);
}

/* from the owner's call until a consumer that asks again and again has the memory */
static void measure_publish(CudaBench *bench) {
	double samples[SAMPLES_MAX];
	struct shmb_lease lease;
	uint64_t now;
	Answer answer;
	int r;

	for (uint32_t i = 0; i < bench->rounds; ++i) {
		(void)wish(bench, WISH_HIDDEN);
		ask(bench, WISH_PUBLISH);
		do
			r = shmb_client_get_memory_info(bench->client, NAME, 0, SHMB_REST, SHMB_READ, &lease);
		while (r == SHMB_E_NOT_FOUND);
		must(r);
		now = bench_now_ns();
		answer = answer_of(bench);
		if (answer.result)
			bench_die("%s", answer.why);
		samples[i] = (double)(now - answer.began_ns) / 1e3;
		must(shmb_lease_release(&lease));
		(void)wish(bench, WISH_RETIRE);
		must(shmb_client_process(bench->client));
	}
	row(bench, "publish", SIZE, "us", "until it is open elsewhere", samples, bench->rounds);
}

static uint64_t run_lease(void *data, uint64_t count) {
	uint64_t began = bench_now_ns();
	struct shmb_lease lease;

	for (uint64_t i = 0; i < count; ++i) {
		if (shmb_client_get_memory_info(lease_client, data, 0, SHMB_REST, SHMB_READ, &lease) ||
		    shmb_lease_release(&lease))
			bench_die("%s", shmb_last_error());
	}
	return bench_now_ns() - began;
}

/* memory that is open, as against system memory */
static void measure_lease(CudaBench *bench) {
	struct shmb_lease gpu, cpu;

	(void)wish(bench, WISH_VMM);
	(void)wish(bench, WISH_CPU);
	take(bench->client, NAME, &gpu);
	take(bench->client, CPU_NAME, &cpu);
	lease_client = bench->client;
	bench->cases[0] = (BenchCase){
		.row = { .name = "lease-memory", .n = 1, .threads = 1, .unit = "ns" },
		.run = run_lease,
		.data = CPU_NAME,
		.baseline = -1,
	};
	bench->cases[1] = (BenchCase){
		.row = { .name = "lease", .n = 1, .threads = 1, .unit = "ns" },
		.run = run_lease,
		.data = NAME,
		.baseline = 0,
	};
	bench_measure(bench->options, bench->cases, 2, bench->rounds);
	must(shmb_lease_release(&gpu));
	must(shmb_lease_release(&cpu));
	(void)wish(bench, WISH_RETIRE);
	must(shmb_client_process(bench->client));
}

/* ---- the helper ---- */

static void start(CudaBench *bench, const char *mode) {
	char config[CONFIG_MAX], *copy = strdup(bench->options->broker_path);

	if (!copy)
		bench_die("out of memory");
	(void)snprintf(config, sizeof(config), "shared_uid = yes\n[cuda]\nmode = %s\ncheck_fd = no\nhelper = %s/%s\n",
		       mode, dirname(copy), "shmbroker-cuda-helper");
	free(copy);
	if (!broker_start(bench->options, &bench->broker, config, "auto", -1))
		bench_die("no broker");
	(void)wish(bench, WISH_CONNECT);
}

static bool has_helper(const CudaBench *bench) {
	char *copy = strdup(bench->options->broker_path), *path = NULL;
	bool found;

	if (!copy || asprintf(&path, "%s/shmbroker-cuda-helper", dirname(copy)) < 0)
		bench_die("out of memory");
	found = !access(path, X_OK);
	free(copy);
	free(path);
	return found;
}

static void measure_helper(CudaBench *bench) {
	uint32_t rounds = bench->options->quick ? HELPER_ROUNDS_QUICK : HELPER_ROUNDS;
	double cold[HELPER_ROUNDS], warm[HELPER_ROUNDS];

	for (uint32_t i = 0; i < rounds; ++i) {
		start(bench, "validate");
		cold[i] = (double)wish(bench, WISH_IPC).took_ns / 1e6;
		(void)wish(bench, WISH_RETIRE);
		warm[i] = (double)wish(bench, WISH_IPC).took_ns / 1e6;
		(void)wish(bench, WISH_RETIRE);
		broker_stop(&bench->broker);
	}
	row(bench, "register-first", SIZE, "ms", "a helper is started", cold, rounds);
	row(bench, "register", SIZE, "ms", "the helper runs", warm, rounds);
}

/* ---- all of it ---- */

static bool owner_start(CudaBench *bench, char *why, size_t size) {
	int pair[2];
	pid_t parent = getpid();
	Answer answer;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		bench_die("socketpair: %m");
	bench->owner = fork();
	if (bench->owner < 0)
		bench_die("fork: %m");
	if (!bench->owner) {
		(void)close(pair[0]);
		owner_run(pair[1], parent);
	}
	(void)close(pair[1]);
	bench->channel = pair[0];
	answer = answer_of(bench);
	(void)snprintf(why, size, "%s", answer.why);
	return !answer.result;
}

static void owner_stop(CudaBench *bench) {
	(void)close(bench->channel);
	(void)waitpid(bench->owner, NULL, 0);
}

static void measure_context(CudaBench *bench) {
	double before = (double)wish(bench, WISH_FREE_BYTES).value, bytes;
	char why[256];

	if (!enter(&bench->driver, why, sizeof(why)))
		bench_die("this process has no context: %s", why);
	bytes = before - (double)wish(bench, WISH_FREE_BYTES).value;
	/* a driver may say nothing of it */
	if (bytes > 0)
		row(bench, "context", 1, "bytes", "of a GPU's memory, in a process", &bytes, 1);
}

static int run(Bench *options) {
	CudaBench bench = { .options = options, .rounds = options->quick ? ROUNDS_QUICK : ROUNDS };
	char why[256];

	/* this process is the one that must not have used CUDA before */
	if (!owner_start(&bench, why, sizeof(why))) {
		fprintf(stderr, "shmbroker-bench: cuda: nothing is measured: %s\n", why);
		owner_stop(&bench);
		return 0;
	}
	measure_context(&bench);
	start(&bench, "relay");
	must(shmb_client_new(&bench.client, bench.broker.socket, SHMB_ROLE_CONSUMER, 0));
	measure_open(&bench, WISH_IPC, "open-ipc");
	measure_open(&bench, WISH_VMM, "open-vmm");
	measure_publish(&bench);
	measure_lease(&bench);
	bench.client = shmb_client_free(bench.client);
	broker_stop(&bench.broker);
	if (has_helper(&bench))
		measure_helper(&bench);
	owner_stop(&bench);
	return 0;
}

const BenchCommand bench_cuda = {
	.name = "cuda",
	.help = "GPU memory: the first lease, cached leases, publishing, the helper",
	.run = run,
};
