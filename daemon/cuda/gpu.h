/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Gpu: the checks that wait for one GPU, and the helper that does them, one after the other.
 *
 * A helper is started when a check wants one, is told to leave when it had nothing to do for a while and has no holds,
 * and is killed when it does not answer in time. One whose pid is that of the owner of what it is to open is replaced
 * first, because the driver takes both for the same process; if it has holds, it stays beside the new one until they are
 * gone.
 *
 * Users take turns, and whoever offers memory over which helpers fail GPU_FAILURES_MAX times within a minute is refused
 * for the rest of it, so that nobody's memory keeps others waiting for long; so is everybody when helpers fail that often
 * before they have looked at anything, or GPU_FAILURES_ALL times in all. Of GPUs that no helper has seen yet, one at a
 * time gets a helper, and what that sees is the answer for the others: until then their checks are in Cuda.waiting, where
 * they cost nothing but themselves. So nobody uses up helpers, or what is remembered of GPUs, by UUIDs that are none.
 */

#include "cuda/cause.h"
#include "cuda/cuda.h"
#include "cuda/process.h"

#define GPU_FAILURES_MAX 5
#define GPU_FAILURES_ALL 32
#define GPU_FAILURES_NS UINT64_C(60000000000)
#define GPU_PROBE_NS UINT64_C(5000000000) /* for how long what a helper saw of the machine is believed */
#define GPU_MAX 64			  /* GPUs that are remembered; those without a helper are forgotten first */
#define GPU_UNSEEN_MAX 32		  /* beyond so many, none that no helper has seen is added */
#define GPU_PROCESSES_MAX 16
#define GPU_NUMBER_SHIFT 40 /* a hold is the number of its helper, and the serial of its check */

typedef struct Gpu Gpu;

/* a helper that was lost */
typedef struct GpuFailure {
	uint64_t ns;  /* when; 0 for never */
	uint32_t uid; /* over whose memory; LOG_NO_UID for nobody's */
} GpuFailure;

struct Gpu {
	ListLink link;
	Cuda *cuda;
	uint8_t uuid[16];
	List queue;	      /* CudaCheck.link, oldest first */
	CudaProcess *process; /* that works, or starts */
	List others;	      /* CudaProcess.link: had to make room, or end */
	CudaCheck *current;   /* what it works on; NULL too when that was cancelled */
	uint64_t serial;      /* of what it works on, 0 for nothing */
	LoopTimer deadline;   /* of the start or of that */
	LoopTimer idle;
	bool in_start;
	uint32_t n_users;		       /* callbacks that go on with it */
	uint32_t current_uid;		       /* whose it is or was */
	GpuFailure failures[GPU_FAILURES_ALL]; /* a ring */
	uint32_t next_failure;
	char last_failure[64];
};

struct Cuda {
	Loop *loop;
	const Config *config;
	List gpus;
	uint32_t n_gpus;
	uint32_t n_processes;
	uint32_t last_process;
	uint64_t last_serial;
	/* what a helper saw last of the driver, and when; 0 for nothing yet */
	uint64_t probe_ns;
	uint32_t probe_cause; /* of what concerns the whole machine */
	char probe_text[WIRE_TEXT_MAX];
	uint32_t n_devices;
	uint8_t devices[HELPER_DEVICES_MAX][16];
	Gpu *finder;  /* whose helper starts although nobody has seen that GPU yet; NULL for none */
	List waiting; /* CudaCheck.link, of other such GPUs, oldest first */
};

/* Is @uuid one of the GPUs that a helper has seen last, however long ago? */
bool cuda_has_seen(const Cuda *cuda, const uint8_t uuid[16]);
/* What a helper has seen a moment ago: 0 where that says nothing against @check, else as cuda_check_start() answers. */
int cuda_check_probe(const Cuda *cuda, CudaCheck *check);

/* The Gpu with a UUID, NULL where there is none. */
Gpu *gpu_find(const Cuda *cuda, const uint8_t uuid[16]);
/* The same, made where there is none. Returns NULL without memory or when there are too many. */
Gpu *gpu_get(Cuda *cuda, const uint8_t uuid[16]);
Gpu *gpu_free(Gpu *gpu);
/* Takes a check; it is answered by on_done, from the loop and not before this returns. */
void gpu_queue(Gpu *gpu, CudaCheck *check);
/* The same for a GPU that no helper has seen and that there is no Gpu of. */
void gpu_wait(Cuda *cuda, CudaCheck *check);
void gpu_cancel(CudaCheck *check);
/* The helper with that number, of any GPU, or NULL. */
CudaProcess *gpu_find_process(Cuda *cuda, uint32_t number);
/* a hold of one of its helpers was given back */
void gpu_hold_gone(Gpu *gpu, CudaProcess *process);
