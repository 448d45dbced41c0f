/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Copies, streams and events. What is put into a stream is done by a thread, in order, but not while the file `hold` is
 * in the directory: so a test decides when the work of a GPU is over.
 */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

typedef struct Work Work;

/* events record how far a stream was; all streams of a process are one queue, which orders more than a GPU would */
struct CUevent_st {
	uint64_t after;
};

struct CUstream_st {
	CUcontext context;
	uint64_t last; /* of its work */
};

struct Work {
	Work *next;
	CUhostFn function;
	CUstreamCallback callback;
	CUstream stream;
	void *userdata; /* of these; else a copy */
	void *to;
	const void *from;
	size_t size;
	int value;
};

static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queue_changed = PTHREAD_COND_INITIALIZER;
static Work *first, **last = &first;
static uint64_t n_queued, n_done, default_last;
static bool has_thread;

static bool is_held(void) {
	const char *directory = getenv("FAKECUDA_DIR");
	char path[4096];

	(void)snprintf(path, sizeof(path), "%s/hold", directory ? directory : "/nonexistent");
	return access(path, F_OK) == 0;
}

static void work_do(Work *work) {
	if (work->function)
		work->function(work->userdata);
	else if (work->callback)
		work->callback(work->stream, CUDA_SUCCESS, work->userdata);
	else if (work->from)
		memmove(work->to, work->from, work->size);
	else
		memset(work->to, work->value, work->size);
}

static void *thread_run(void *userdata) {
	(void)userdata;
	(void)pthread_mutex_lock(&queue_lock);
	for (;;) {
		struct timespec ts = { 0, 1000000 };
		Work *work = first;

		if (!work) {
			(void)pthread_cond_wait(&queue_changed, &queue_lock);
			continue;
		}
		(void)pthread_mutex_unlock(&queue_lock);
		if (is_held()) {
			(void)nanosleep(&ts, NULL);
			(void)pthread_mutex_lock(&queue_lock);
			continue;
		}
		work_do(work);
		(void)pthread_mutex_lock(&queue_lock);
		first = work->next;
		if (!first)
			last = &first;
		n_done++;
		(void)pthread_cond_broadcast(&queue_changed);
		free(work);
	}
	return NULL;
}

static uint64_t *last_of(CUstream stream) {
	/* NULL, and the numbers of the two default streams */
	return (uintptr_t)stream <= 2 ? &default_last : &stream->last;
}

static CUresult queue(CUstream stream, Work work) {
	Work *copy = malloc(sizeof(*copy));
	pthread_t thread;

	if (!copy)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*copy = work;
	copy->stream = stream;
	copy->next = NULL;
	(void)pthread_mutex_lock(&queue_lock);
	if (!has_thread) {
		if (pthread_create(&thread, NULL, thread_run, NULL)) {
			(void)pthread_mutex_unlock(&queue_lock);
			free(copy);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		(void)pthread_detach(thread);
		has_thread = true;
	}
	*last = copy;
	last = &copy->next;
	*last_of(stream) = ++n_queued;
	(void)pthread_cond_broadcast(&queue_changed);
	(void)pthread_mutex_unlock(&queue_lock);
	return CUDA_SUCCESS;
}

static void wait_for(uint64_t number) {
	(void)pthread_mutex_lock(&queue_lock);
	while (n_done < number)
		(void)pthread_cond_wait(&queue_changed, &queue_lock);
	(void)pthread_mutex_unlock(&queue_lock);
}

static bool is_done(uint64_t number) {
	bool is;

	(void)pthread_mutex_lock(&queue_lock);
	is = n_done >= number;
	(void)pthread_mutex_unlock(&queue_lock);
	return is;
}

void fake_streams_wait_all(void) {
	wait_for(n_queued);
}

/* memory of the device is known; the other side may be any */
static CUresult copy(CUstream stream, bool is_async, CUdeviceptr device, void *to, const void *from, size_t size) {
	if (!size)
		return CUDA_SUCCESS;
	if (!fake_range_covers(device, size))
		return CUDA_ERROR_INVALID_VALUE;
	if (is_async)
		return queue(stream, (Work){ .to = to, .from = from, .size = size });
	/* the default stream is waited for by a synchronous copy */
	wait_for(default_last);
	memmove(to, from, size);
	return CUDA_SUCCESS;
}

static CUresult fill(CUstream stream, bool is_async, CUdeviceptr to, int value, size_t size) {
	if (!size)
		return CUDA_SUCCESS;
	if (!fake_range_covers(to, size))
		return CUDA_ERROR_INVALID_VALUE;
	if (is_async)
		return queue(stream, (Work){ .to = (void *)(uintptr_t)to, .value = value, .size = size });
	wait_for(default_last);
	memset((void *)(uintptr_t)to, value, size);
	return CUDA_SUCCESS;
}

static void *host(CUdeviceptr pointer) {
	return (void *)(uintptr_t)pointer;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
	FAKE_ENTRY(FAKE_CONTEXT, copy(NULL, false, fake_range_find(to) ? to : from, host(to), host(from), size), "%zu",
		   size);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
	FAKE_ENTRY(FAKE_CONTEXT, copy(NULL, false, to, host(to), from, size), "%zu", size);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
	FAKE_ENTRY(FAKE_CONTEXT, copy(NULL, false, from, to, host(from), size), "%zu", size);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
	FAKE_ENTRY(FAKE_CONTEXT,
		   fake_range_covers(from, size) ? copy(NULL, false, to, host(to), host(from), size)
						 : (CUresult)CUDA_ERROR_INVALID_VALUE,
		   "%zu", size);
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size) {
	FAKE_ENTRY(FAKE_CONTEXT, fill(NULL, false, to, value, size), "%zu", size);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
	FAKE_ENTRY(FAKE_CONTEXT, copy(stream, true, fake_range_find(to) ? to : from, host(to), host(from), size), "%zu",
		   size);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
	FAKE_ENTRY(FAKE_CONTEXT, copy(stream, true, to, host(to), from, size), "%zu", size);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
	FAKE_ENTRY(FAKE_CONTEXT, copy(stream, true, from, to, host(from), size), "%zu", size);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
	FAKE_ENTRY(FAKE_CONTEXT, fill(stream, true, to, value, size), "%zu", size);
}

static CUresult do_create(CUstream *ret) {
	CUstream stream = calloc(1, sizeof(*stream));

	if (!stream)
		return CUDA_ERROR_OUT_OF_MEMORY;
	stream->context = fake_current();
	*ret = stream;
	return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
	FAKE_ENTRY(FAKE_CONTEXT, do_create(stream), "%u", flags);
}

/* what waits for the GPU does not keep others of its process from the driver */
static CUresult wait_unlocked(FakeCall *call, uint64_t number) {
	CUresult result = fake_end(call, "-");

	if (!result)
		wait_for(number);
	return result;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
	FakeCall call;
	CUresult result;

	fake_begin(&call, __func__, FAKE_CONTEXT);
	result = wait_unlocked(&call, call.result ? 0 : stream->last);
	if (!result)
		free(stream);
	return result;
}

CUresult cuStreamSynchronize(CUstream stream) {
	FakeCall call;

	fake_begin(&call, __func__, FAKE_CONTEXT);
	return wait_unlocked(&call, call.result ? 0 : *last_of(stream));
}

CUresult cuStreamQuery(CUstream stream) {
	FAKE_ENTRY(FAKE_CONTEXT, is_done(*last_of(stream)) ? CUDA_SUCCESS : (CUresult)CUDA_ERROR_NOT_READY, "-");
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
	FAKE_ENTRY(FAKE_CONTEXT, (*context = (uintptr_t)stream <= 2 ? fake_current() : stream->context, CUDA_SUCCESS),
		   "-");
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
	/* one queue orders everything */
	FAKE_ENTRY(FAKE_CONTEXT,
		   (*last_of(stream) = *last_of(stream) > event->after ? *last_of(stream) : event->after, CUDA_SUCCESS),
		   "%u", flags);
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback function, void *userdata, unsigned int flags) {
	FAKE_ENTRY(FAKE_CONTEXT, queue(stream, (Work){ .callback = function, .userdata = userdata }), "%u", flags);
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *userdata) {
	FAKE_ENTRY(FAKE_CONTEXT, queue(stream, (Work){ .function = function, .userdata = userdata }), "-");
}

static CUresult do_event(CUevent *ret) {
	CUevent event = calloc(1, sizeof(*event));

	if (!event)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*ret = event;
	return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
	FAKE_ENTRY(FAKE_CONTEXT, do_event(event), "%u", flags);
}

CUresult cuEventDestroy_v2(CUevent event) {
	FAKE_ENTRY(FAKE_CONTEXT, (free(event), CUDA_SUCCESS), "-");
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
	FAKE_ENTRY(FAKE_CONTEXT, (event->after = *last_of(stream), CUDA_SUCCESS), "-");
}

CUresult cuEventSynchronize(CUevent event) {
	FakeCall call;

	fake_begin(&call, __func__, FAKE_CONTEXT);
	return wait_unlocked(&call, call.result ? 0 : event->after);
}

CUresult cuEventQuery(CUevent event) {
	FAKE_ENTRY(FAKE_CONTEXT, is_done(event->after) ? CUDA_SUCCESS : (CUresult)CUDA_ERROR_NOT_READY, "-");
}
