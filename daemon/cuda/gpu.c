/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda/gpu.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "log.h"

static void gpu_pump(Gpu *gpu);

static void gpu_arm_idle(Gpu *gpu) {
	Loop *loop = gpu->cuda->loop;

	if (gpu->process && !gpu->process->n_holds)
		loop_timer_set(loop, &gpu->idle, loop_now(loop) + gpu->cuda->config->cuda_helper_idle_ns);
}

/* ---- answers ---- */

static void check_finish(CudaCheck *check, int result) {
	list_remove(&check->link);
	loop_timer_unlink(&check->timer);
	check->cuda = NULL;
	check->helper = NULL;
	check->on_done(check, result);
}

static bool is_busy(const Gpu *gpu) {
	return gpu->serial || gpu->in_start;
}

/* answers all that waits; whoever is asked may ask again, and is not answered here */
static void gpu_refuse_all(Gpu *gpu, int result, const char *why) {
	List queue;

	list_init(&queue);
	for (ListLink *link; (link = list_first(&gpu->queue));) {
		list_remove(link);
		list_append(&queue, link);
	}
	for (ListLink *link; (link = list_first(&queue));) {
		CudaCheck *check = container_of(link, CudaCheck, link);

		(void)snprintf(check->why, WIRE_TEXT_MAX, "%s", why);
		check_finish(check, result);
	}
}

/* what the helper works on gets this answer, unless it was cancelled */
static void gpu_answer(Gpu *gpu, int result, const char *why) {
	CudaCheck *check = gpu->current;

	gpu->current = NULL;
	gpu->serial = 0;
	loop_timer_unlink(&gpu->deadline);
	if (!check)
		return;
	(void)snprintf(check->why, WIRE_TEXT_MAX, "%s", why);
	check_finish(check, result);
}

/* the helper has failed: who waits for the start waits for nothing else, one after the other */
static void gpu_give_up(Gpu *gpu, bool was_starting, int result, const char *why) {
	if (was_starting)
		gpu_refuse_all(gpu, result, why);
	else
		gpu_answer(gpu, result, why);
	gpu_pump(gpu);
}

static void gpu_note_failure(Gpu *gpu, uint32_t uid, const char *what) {
	gpu->failures[gpu->next_failure++ % GPU_FAILURES_ALL] =
		(GpuFailure){ .ns = loop_now(gpu->cuda->loop), .uid = uid };
	(void)snprintf(gpu->last_failure, sizeof(gpu->last_failure), "%s", what);
}

/* nanoseconds until memory of @uid is looked at again, 0 for at once; and how many failures that is for */
static uint64_t gpu_must_rest(const Gpu *gpu, uint32_t uid, uint32_t *ret_failures) {
	uint64_t now = loop_now(gpu->cuda->loop), oldest = now;
	uint32_t n = 0, n_all = 0;

	for (uint32_t i = 0; i < GPU_FAILURES_ALL; ++i) {
		const GpuFailure *failure = &gpu->failures[i];

		if (!failure->ns || now - failure->ns >= GPU_FAILURES_NS)
			continue;
		n_all++;
		n += failure->uid == uid || failure->uid == LOG_NO_UID;
		if (failure->ns < oldest)
			oldest = failure->ns;
	}
	*ret_failures = n >= GPU_FAILURES_MAX ? n : n_all;
	return n >= GPU_FAILURES_MAX || n_all >= GPU_FAILURES_ALL ? GPU_FAILURES_NS - (now - oldest) : 0;
}

/* who was served is behind all others */
static void gpu_next_turn(Gpu *gpu, uint32_t uid) {
	List later;

	list_init(&later);
	list_for_each (link, &gpu->queue) {
		if (container_of(link, CudaCheck, link)->uid != uid)
			continue;
		list_remove(link);
		list_append(&later, link);
	}
	for (ListLink *link; (link = list_first(&later));) {
		list_remove(link);
		list_append(&gpu->queue, link);
	}
}

/* ---- helpers ---- */

/*
 * Of GPUs that no helper has seen one at a time is looked for: names cost nothing, and helpers are few. What is found
 * is the answer for the others, too.
 */
static bool gpu_must_wait(const Gpu *gpu) {
	const Cuda *cuda = gpu->cuda;

	return !gpu->process && cuda->finder && cuda->finder != gpu && !cuda_has_seen(cuda, gpu->uuid);
}

/* a helper has started, or has not; those that waited for that go on by their timers */
static void gpu_end_start(Gpu *gpu) {
	Cuda *cuda = gpu->cuda;

	gpu->in_start = false;
	if (cuda->finder != gpu)
		return;
	cuda->finder = NULL;
	list_for_each (link, &cuda->waiting)
		loop_timer_set(cuda->loop, &container_of(link, CudaCheck, link)->timer, loop_now(cuda->loop));
	list_for_each (link, &cuda->gpus) {
		Gpu *other = container_of(link, Gpu, link);

		if (other != gpu && !list_is_empty(&other->queue))
			loop_timer_set(cuda->loop, &container_of(list_first(&other->queue), CudaCheck, link)->timer,
				       loop_now(cuda->loop));
	}
}

static void gpu_arm(Gpu *gpu, uint64_t ns) {
	Loop *loop = gpu->cuda->loop;

	loop_timer_set(loop, &gpu->deadline, loop_now(loop) + ns);
}

/* the helper works no longer; it goes now, or when its holds have gone */
static void gpu_part(Gpu *gpu) {
	CudaProcess *process = gpu->process;

	gpu->process = NULL;
	gpu_end_start(gpu);
	loop_timer_unlink(&gpu->idle);
	if (!process)
		return;
	list_append(&gpu->others, &process->link);
	if (!process->n_holds)
		cuda_process_hang_up(process, gpu->cuda->config->cuda_operation_timeout_ns);
}

static void on_end(CudaProcess *process) {
	Gpu *gpu = process->userdata;
	bool was_working = process == gpu->process, was_starting = gpu->in_start;
	char how[sizeof(process->how)], why[WIRE_TEXT_MAX];
	int result;

	memcpy(how, process->how, sizeof(how));
	gpu->cuda->n_processes--;
	if (was_working)
		gpu->process = NULL;
	cuda_process_free(process);
	if (!was_working)
		return;
	gpu->n_users++;
	gpu_end_start(gpu);
	loop_timer_unlink(&gpu->idle);
	loop_timer_unlink(&gpu->deadline);
	gpu_note_failure(gpu, was_starting || !gpu->serial ? LOG_NO_UID : gpu->current_uid, how);
	log_write(LOG_CUDA_HELPER_ENDED, LOG_NO_UID, NULL, "shmbroker-cuda-helper %s", how);
	result = cuda_cause_write(why, CUDA_CAUSE_DIED, NULL, how);
	gpu_give_up(gpu, was_starting, result, why);
	gpu->n_users--;
}

/* what a helper found out about the machine spares the next ones the start */
static void cuda_note_probe(Cuda *cuda, const HelperReply *reply) {
	cuda->probe_ns = loop_now(cuda->loop);
	/* of one GPU alone */
	cuda->probe_cause = reply->cause == CUDA_CAUSE_NOT_VISIBLE ? 0 : reply->cause;
	(void)snprintf(cuda->probe_text, sizeof(cuda->probe_text), "%s", reply->text);
	cuda->n_devices = reply->n_devices;
	memcpy(cuda->devices, reply->devices, sizeof(cuda->devices));
}

static void on_ready(Gpu *gpu, const HelperReply *reply) {
	loop_timer_unlink(&gpu->deadline);
	cuda_note_probe(gpu->cuda, reply);
	if (!reply->cause) {
		gpu_end_start(gpu);
		gpu->process->is_ready = true;
		log_write(LOG_CUDA_HELPER, LOG_NO_UID, NULL, "shmbroker-cuda-helper %d works: %s, %u GPUs are visible",
			  (int)gpu->process->pid, reply->text, reply->n_devices);
	} else {
		log_write(LOG_CUDA_REFUSED, LOG_NO_UID, NULL, "GPU memory is refused: %s", reply->text);
		gpu_part(gpu);
		gpu_refuse_all(gpu, cuda_cause_code(reply->cause), reply->text);
	}
	gpu_pump(gpu);
}

static void on_answer(Gpu *gpu, CudaProcess *process, const HelperReply *reply) {
	CudaCheck *check = gpu->current;
	HelperRequest drop = { .magic = HELPER_MAGIC, .operation = HELPER_DROP, .serial = reply->serial };

	if (reply->is_held && check) {
		process->n_holds++;
		check->hold = (uint64_t)process->number << GPU_NUMBER_SHIFT | reply->serial;
	} else if (reply->is_held) {
		(void)cuda_process_send(process, &drop, -EBADF);
	}
	if (check && !reply->cause) {
		check->object_size = reply->object_size;
		check->is_validated = true;
	}
	if (reply->is_last)
		gpu_note_failure(gpu, gpu->current_uid, "its context broke");
	/* before the answer, after which more may be asked */
	if (reply->is_last)
		gpu_part(gpu);
	gpu_answer(gpu, cuda_cause_code(reply->cause), reply->text);
	gpu_pump(gpu);
}

static void on_reply(CudaProcess *process, const HelperReply *reply) {
	Gpu *gpu = process->userdata;

	if (process != gpu->process)
		return;
	gpu->n_users++;
	/* a number of a cause that is none would be a success */
	if (reply->cause && !cuda_cause_code(reply->cause))
		cuda_process_kill(process);
	else if (gpu->in_start && reply->kind == HELPER_READY)
		on_ready(gpu, reply);
	else if (gpu->serial && reply->kind == HELPER_ANSWER && reply->serial == gpu->serial)
		on_answer(gpu, process, reply);
	else
		cuda_process_kill(process);
	gpu->n_users--;
}

static void on_deadline(LoopTimer *timer) {
	Gpu *gpu = container_of(timer, Gpu, deadline);
	const Config *config = gpu->cuda->config;
	bool was_starting = gpu->in_start;
	uint64_t ns = was_starting ? config->cuda_start_timeout_ns : config->cuda_operation_timeout_ns;
	CudaProcess *process = gpu->process;
	char why[WIRE_TEXT_MAX];
	int result;

	gpu->n_users++;
	gpu_note_failure(gpu, was_starting ? LOG_NO_UID : gpu->current_uid, "did not answer");
	log_write(LOG_CUDA_HELPER_ENDED, LOG_NO_UID, NULL,
		  "shmbroker-cuda-helper %d did not answer within %" PRIu64 " ms and is killed", (int)process->pid,
		  ns / 1000000);
	/* its holds go with it */
	process->n_holds = 0;
	gpu_part(gpu);
	cuda_process_kill(process);
	result = cuda_cause_write(why, CUDA_CAUSE_TIMEOUT, NULL, (unsigned long long)(ns / 1000000));
	gpu_give_up(gpu, was_starting, result, why);
	gpu->n_users--;
}

static void on_idle(LoopTimer *timer) {
	Gpu *gpu = container_of(timer, Gpu, idle);

	if (!is_busy(gpu) && list_is_empty(&gpu->queue) && gpu->process && !gpu->process->n_holds)
		gpu_part(gpu);
}

/* Starts a helper; true when there is one, working or on its way. */
static bool gpu_start(Gpu *gpu) {
	Cuda *cuda = gpu->cuda;
	char why[WIRE_TEXT_MAX];
	int r, result;

	if (gpu->process)
		return true;
	r = cuda->n_processes < GPU_PROCESSES_MAX ? cuda_process_new(&gpu->process, cuda->loop, cuda->config, gpu->uuid)
						  : -EAGAIN;
	if (r) {
		char what[256];

		(void)snprintf(what, sizeof(what), "%.180s: %s", cuda_process_path(cuda->config), strerror(-r));
		result = cuda_cause_write(why, CUDA_CAUSE_NO_HELPER, NULL, what);
		gpu_refuse_all(gpu, result, why);
		return false;
	}
	cuda->n_processes++;
	gpu->process->userdata = gpu;
	gpu->process->number = ++cuda->last_process & 0xffffff;
	gpu->process->on_reply = on_reply;
	gpu->process->on_end = on_end;
	gpu->in_start = true;
	if (!cuda->finder && !cuda_has_seen(cuda, gpu->uuid))
		cuda->finder = gpu;
	gpu_arm(gpu, cuda->config->cuda_start_timeout_ns);
	return true;
}

/* Must another process open this, because ours has the owner's pid? The namespace does not matter to the driver. */
static bool is_clash(const Gpu *gpu, const CudaCheck *check) {
	return check->kind == WIRE_KIND_CUDA_IPC && check->owner_pid && gpu->process &&
	       check->owner_pid == (uint32_t)gpu->process->pid;
}

static void gpu_send(Gpu *gpu, CudaCheck *check) {
	Cuda *cuda = gpu->cuda;
	HelperRequest request = {
		.magic = HELPER_MAGIC,
		.operation = check->kind == WIRE_KIND_CUDA_IPC ? HELPER_CHECK_IPC : HELPER_CHECK_VMM,
		.serial = ++cuda->last_serial & ((UINT64_C(1) << GPU_NUMBER_SHIFT) - 1),
		.object_size = check->object_size,
		.offset = check->offset,
		.size = check->size,
		.owner_pid = check->owner_pid,
		.owner_uid = check->uid,
		.keep = check->kind == WIRE_KIND_CUDA_IPC && cuda->config->cuda_mode == CUDA_HOLD,
	};

	memcpy(request.handle, check->handle, sizeof(request.handle));
	list_remove(&check->link);
	gpu->current = check;
	gpu->current_uid = check->uid;
	gpu->serial = request.serial;
	gpu_next_turn(gpu, check->uid);
	gpu_arm(gpu, cuda->config->cuda_operation_timeout_ns);
	/* what cannot be sent is not answered: the deadline, or the end of the helper, tells */
	(void)cuda_process_send(gpu->process, &request, check->kind == WIRE_KIND_CUDA_VMM ? check->fd : -EBADF);
}

/* refuses @check when helpers have failed over its owner's memory too often, or no helper would find the GPU */
static bool gpu_refuse(Gpu *gpu, CudaCheck *check) {
	uint32_t failures;
	uint64_t rest = gpu_must_rest(gpu, check->uid, &failures);
	int r = gpu->process ? 0 : cuda_check_probe(gpu->cuda, check);

	if (r) {
		check_finish(check, r);
		return true;
	}
	if (!rest)
		return false;
	check_finish(check, cuda_cause_write(check->why, CUDA_CAUSE_BUSY, NULL, failures, gpu->last_failure,
					     (unsigned long long)(rest / 1000000000 + 1)));
	return true;
}

/* goes on with what waits */
static void gpu_pump(Gpu *gpu) {
	CudaCheck *check = NULL;

	if (is_busy(gpu))
		return;
	for (ListLink *link; !check && (link = list_first(&gpu->queue));) {
		check = container_of(link, CudaCheck, link);
		if (gpu_refuse(gpu, check))
			check = NULL;
	}
	if (!check) {
		gpu_arm_idle(gpu);
		return;
	}
	loop_timer_unlink(&gpu->idle);
	if (is_clash(gpu, check)) {
		CudaProcess *old = gpu->process;

		/* while it is there, its pid is not given to the new one */
		gpu->process = NULL;
		if (!gpu_start(gpu)) {
			gpu->process = old;
			gpu_arm_idle(gpu);
			return;
		}
		/* a start costs others time, and a pid is only what the owner says */
		gpu_note_failure(gpu, check->uid, "had the owner's pid");
		list_append(&gpu->others, &old->link);
		if (!old->n_holds)
			cuda_process_hang_up(old, gpu->cuda->config->cuda_operation_timeout_ns);
		return;
	}
	if (gpu_must_wait(gpu) || !gpu_start(gpu) || gpu->in_start)
		return;
	gpu_send(gpu, check);
}

/* ---- for cuda.c ---- */

static bool is_unused(const Gpu *gpu) {
	return !gpu->n_users && !is_busy(gpu) && !gpu->process && list_is_empty(&gpu->others) &&
	       list_is_empty(&gpu->queue);
}

Gpu *gpu_find(const Cuda *cuda, const uint8_t uuid[16]) {
	list_for_each (link, &cuda->gpus) {
		Gpu *gpu = container_of(link, Gpu, link);

		if (!memcmp(gpu->uuid, uuid, sizeof(gpu->uuid)))
			return gpu;
	}
	return NULL;
}

Gpu *gpu_get(Cuda *cuda, const uint8_t uuid[16]) {
	Gpu *gpu = gpu_find(cuda, uuid);

	if (gpu)
		return gpu;
	list_for_each (link, &cuda->gpus) {
		gpu = container_of(link, Gpu, link);
		if (cuda->n_gpus >= GPU_UNSEEN_MAX && is_unused(gpu))
			gpu_free(gpu);
	}
	gpu = cuda->n_gpus < (cuda_has_seen(cuda, uuid) ? GPU_MAX : GPU_UNSEEN_MAX) ? calloc(1, sizeof(*gpu)) : NULL;
	if (!gpu)
		return NULL;
	gpu->cuda = cuda;
	memcpy(gpu->uuid, uuid, sizeof(gpu->uuid));
	list_init(&gpu->queue);
	list_init(&gpu->others);
	gpu->deadline.on_time = on_deadline;
	gpu->idle.on_time = on_idle;
	list_append(&cuda->gpus, &gpu->link);
	cuda->n_gpus++;
	return gpu;
}

Gpu *gpu_free(Gpu *gpu) {
	if (!gpu)
		return NULL;
	for (ListLink *link; (link = list_first(&gpu->queue));) {
		CudaCheck *check = container_of(link, CudaCheck, link);

		list_remove(link);
		check->cuda = NULL;
	}
	if (gpu->current)
		gpu->current->cuda = NULL;
	cuda_process_free(gpu->process);
	for (ListLink *link; (link = list_first(&gpu->others));)
		cuda_process_free(container_of(link, CudaProcess, link));
	loop_timer_unlink(&gpu->deadline);
	loop_timer_unlink(&gpu->idle);
	list_remove(&gpu->link);
	if (gpu->cuda->finder == gpu)
		gpu->cuda->finder = NULL;
	gpu->cuda->n_gpus--;
	free(gpu);
	return NULL;
}

/* nothing is answered before cuda_check_start() has returned: a timer that is due begins */
static void on_begin(LoopTimer *timer) {
	Gpu *gpu = container_of(timer, CudaCheck, timer)->helper;

	gpu->n_users++;
	gpu_pump(gpu);
	gpu->n_users--;
}

void gpu_queue(Gpu *gpu, CudaCheck *check) {
	check->cuda = gpu->cuda;
	check->helper = gpu;
	check->timer = (LoopTimer){ .on_time = on_begin };
	list_append(&gpu->queue, &check->link);
	loop_timer_set(gpu->cuda->loop, &check->timer, loop_now(gpu->cuda->loop));
}

/* once nobody looks for another GPU, this one is looked for, unless what was seen meanwhile is the answer */
static void on_wait(LoopTimer *timer) {
	CudaCheck *check = container_of(timer, CudaCheck, timer);
	Cuda *cuda = check->cuda;
	Gpu *gpu;
	int r;

	if (cuda->finder && memcmp(cuda->finder->uuid, check->device, sizeof(check->device)) != 0)
		return;
	r = cuda_check_probe(cuda, check);
	gpu = r ? NULL : gpu_get(cuda, check->device);
	if (!gpu) {
		check_finish(check, r ?: -ENOMEM);
		return;
	}
	list_remove(&check->link);
	check->helper = gpu;
	list_append(&gpu->queue, &check->link);
	on_begin(timer);
}

void gpu_wait(Cuda *cuda, CudaCheck *check) {
	check->cuda = cuda;
	check->helper = NULL;
	check->timer = (LoopTimer){ .on_time = on_wait };
	list_append(&cuda->waiting, &check->link);
	loop_timer_set(cuda->loop, &check->timer, loop_now(cuda->loop));
}

void gpu_cancel(CudaCheck *check) {
	Gpu *gpu = check->helper;

	list_remove(&check->link);
	loop_timer_unlink(&check->timer);
	if (gpu && gpu->current == check)
		gpu->current = NULL;
	check->cuda = NULL;
	check->helper = NULL;
}

CudaProcess *gpu_find_process(Cuda *cuda, uint32_t number) {
	list_for_each (link, &cuda->gpus) {
		Gpu *gpu = container_of(link, Gpu, link);

		if (gpu->process && gpu->process->number == number)
			return gpu->process;
		list_for_each (other, &gpu->others) {
			CudaProcess *process = container_of(other, CudaProcess, link);

			if (process->number == number)
				return process;
		}
	}
	return NULL;
}

void gpu_hold_gone(Gpu *gpu, CudaProcess *process) {
	if (process->n_holds)
		process->n_holds--;
	if (process->n_holds)
		return;
	if (process != gpu->process)
		cuda_process_hang_up(process, gpu->cuda->config->cuda_operation_timeout_ns);
	else if (!is_busy(gpu) && list_is_empty(&gpu->queue))
		gpu_arm_idle(gpu);
}
