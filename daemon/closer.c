/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "closer.h"
#include "list.h"

#define CLOSER_STACK_SIZE (256 * 1024)
#define MS_NS UINT64_C(1000000)

typedef struct CloserItem CloserItem;
typedef struct CloserQueue CloserQueue;
typedef struct CloserThread CloserThread;

struct CloserItem {
	ListLink link;
	int fd;
};

/* one uid that has something to close; gone when it has not */
struct CloserQueue {
	ListLink link;	     /* in Closer.queues */
	ListLink ready_link; /* in Closer.ready while no thread works for it */
	uint32_t uid;
	List items;
	size_t n_pending; /* the one being closed included */
	bool reported;	  /* on_stuck was called for the close that goes on */
};

struct CloserThread {
	Closer *closer;
	pthread_t thread;
	CloserQueue *queue; /* whose fd it closes, or NULL */
	int fd;
	uint64_t since_ns;
};

struct Closer {
	pthread_mutex_t lock;
	pthread_cond_t work;
	pthread_cond_t progress;
	unsigned long n_refs; /* the loop's and one per thread */
	bool stop;	      /* what has not begun is dropped, nobody joins a thread that is stuck */
	List queues;
	List ready;
	_Atomic size_t n_total; /* changed under the lock; read by the loop in every turn without it */
	size_t n_threads;
	size_t n_idle;
	CloserThread threads[CLOSER_THREADS_MAX];
};

static uint64_t now_ns(void) {
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

int (*closer_close_fn)(int fd) = close;
uint64_t (*closer_now_fn)(void) = now_ns;

static CloserQueue *closer_find(Closer *closer, uint32_t uid) {
	list_for_each (link, &closer->queues) {
		CloserQueue *queue = container_of(link, CloserQueue, link);

		if (queue->uid == uid)
			return queue;
	}
	return NULL;
}

static CloserQueue *queue_free(CloserQueue *queue) {
	if (!queue)
		return NULL;
	for (ListLink *link; (link = list_first(&queue->items));) {
		list_remove(link);
		free(container_of(link, CloserItem, link));
	}
	list_remove(&queue->ready_link);
	list_remove(&queue->link);
	free(queue);
	return NULL;
}

/* drops one reference; the lock is held and is released */
static void closer_unref_unlock(Closer *closer) {
	bool last = !--closer->n_refs;

	(void)pthread_mutex_unlock(&closer->lock);
	if (!last)
		return;
	for (ListLink *link; (link = list_first(&closer->queues));)
		queue_free(container_of(link, CloserQueue, link));
	(void)pthread_cond_destroy(&closer->progress);
	(void)pthread_cond_destroy(&closer->work);
	(void)pthread_mutex_destroy(&closer->lock);
	free(closer);
}

/* closes the oldest fd of @queue; the lock is held, and not while the close lasts */
static void thread_close(CloserThread *thread, CloserQueue *queue) {
	Closer *closer = thread->closer;
	CloserItem *item = container_of(list_first(&queue->items), CloserItem, link);

	list_remove(&queue->ready_link);
	list_remove(&item->link);
	thread->queue = queue;
	thread->fd = item->fd;
	thread->since_ns = closer_now_fn();
	free(item);
	(void)pthread_mutex_unlock(&closer->lock);
	(void)closer_close_fn(thread->fd);
	(void)pthread_mutex_lock(&closer->lock);
	thread->queue = NULL;
	queue->reported = false;
	queue->n_pending--;
	closer->n_total--;
	if (!queue->n_pending)
		queue_free(queue);
	else
		list_append(&closer->ready, &queue->ready_link);
	(void)pthread_cond_signal(&closer->progress);
}

static void *thread_run(void *userdata) {
	CloserThread *thread = userdata;
	Closer *closer = thread->closer;

	(void)pthread_mutex_lock(&closer->lock);
	while (!closer->stop) {
		ListLink *link = list_first(&closer->ready);

		if (link) {
			thread_close(thread, container_of(link, CloserQueue, ready_link));
			continue;
		}
		closer->n_idle++;
		(void)pthread_cond_wait(&closer->work, &closer->lock);
		closer->n_idle--;
	}
	closer_unref_unlock(closer);
	return NULL;
}

/* one more thread, without any signal; the lock is held */
static int closer_start(Closer *closer) {
	CloserThread *thread;
	pthread_attr_t attr;
	sigset_t all, saved;
	int r;

	if (closer->n_threads == CLOSER_THREADS_MAX)
		return -EAGAIN;
	thread = &closer->threads[closer->n_threads];
	thread->closer = closer;
	r = pthread_attr_init(&attr);
	if (r)
		return -r;
	(void)pthread_attr_setstacksize(&attr, CLOSER_STACK_SIZE);
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &saved);
	r = pthread_create(&thread->thread, &attr, thread_run, thread);
	(void)pthread_sigmask(SIG_SETMASK, &saved, NULL);
	(void)pthread_attr_destroy(&attr);
	if (r)
		return -r;
	(void)pthread_setname_np(thread->thread, "closer");
	closer->n_threads++;
	closer->n_refs++;
	return 0;
}

int closer_new(Closer **ret) {
	Closer *closer = calloc(1, sizeof(*closer));
	pthread_condattr_t attr;
	int r;

	if (!closer)
		return -ENOMEM;
	closer->n_refs = 1;
	list_init(&closer->queues);
	list_init(&closer->ready);
	(void)pthread_condattr_init(&attr);
	(void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	(void)pthread_mutex_init(&closer->lock, NULL);
	(void)pthread_cond_init(&closer->work, &attr);
	(void)pthread_cond_init(&closer->progress, &attr);
	(void)pthread_condattr_destroy(&attr);
	(void)pthread_mutex_lock(&closer->lock);
	r = closer_start(closer);
	if (r) {
		closer_unref_unlock(closer);
		return r;
	}
	(void)pthread_mutex_unlock(&closer->lock);
	*ret = closer;
	return 0;
}

static bool thread_is_stuck(const CloserThread *thread, uint64_t now) {
	return thread->queue && now - thread->since_ns >= CLOSER_STUCK_MS * MS_NS;
}

/* when every thread is stuck while another uid waits, one more; the lock is held. False when there is none to be had. */
static bool closer_relieve(Closer *closer, uint64_t now) {
	if (list_is_empty(&closer->ready) || closer->n_idle)
		return true;
	for (size_t i = 0; i < closer->n_threads; i++) {
		if (!thread_is_stuck(&closer->threads[i], now))
			return true;
	}
	return closer_start(closer) == 0;
}

/* does anything go on that will end by itself? The lock is held. */
static bool closer_progresses(Closer *closer) {
	uint64_t now = closer_now_fn();

	if (!closer->n_total)
		return false;
	if (!list_is_empty(&closer->ready))
		return closer_relieve(closer, now);
	for (size_t i = 0; i < closer->n_threads; i++) {
		if (closer->threads[i].queue && !thread_is_stuck(&closer->threads[i], now))
			return true;
	}
	return false;
}

static void closer_wait(Closer *closer) {
	struct timespec until;
	uint64_t ns = now_ns() + CLOSER_STUCK_MS / 4 * MS_NS;

	until.tv_sec = (time_t)(ns / UINT64_C(1000000000));
	until.tv_nsec = (long)(ns % UINT64_C(1000000000));
	(void)pthread_cond_timedwait(&closer->progress, &closer->lock, &until);
}

Closer *closer_free(Closer *closer) {
	pthread_t join[CLOSER_THREADS_MAX];
	size_t n_join = 0;

	if (!closer)
		return NULL;
	(void)pthread_mutex_lock(&closer->lock);
	while (closer_progresses(closer))
		closer_wait(closer);
	closer->stop = true;
	(void)pthread_cond_broadcast(&closer->work);
	for (size_t i = 0; i < closer->n_threads; i++) {
		if (closer->threads[i].queue)
			(void)pthread_detach(closer->threads[i].thread);
		else
			join[n_join++] = closer->threads[i].thread;
	}
	/* the reference of the loop is kept until the others have gone */
	(void)pthread_mutex_unlock(&closer->lock);
	for (size_t i = 0; i < n_join; i++)
		(void)pthread_join(join[i], NULL);
	(void)pthread_mutex_lock(&closer->lock);
	closer_unref_unlock(closer);
	return NULL;
}

/* the lock is held */
static int closer_queue(Closer *closer, uint32_t uid, int fd) {
	CloserQueue *queue = closer_find(closer, uid);
	CloserItem *item = malloc(sizeof(*item));

	if (!item)
		return -ENOMEM;
	if (!queue) {
		queue = calloc(1, sizeof(*queue));
		if (!queue) {
			free(item);
			return -ENOMEM;
		}
		queue->uid = uid;
		list_init(&queue->items);
		list_append(&closer->queues, &queue->link);
		list_append(&closer->ready, &queue->ready_link);
	}
	*item = (CloserItem){ .fd = fd };
	list_append(&queue->items, &item->link);
	queue->n_pending++;
	closer->n_total++;
	if (list_is_linked(&queue->ready_link))
		(void)pthread_cond_signal(&closer->work);
	return 0;
}

void closer_close(Closer *closer, uint32_t uid, int fd) {
	int r;

	if (fd < 0)
		return;
	(void)pthread_mutex_lock(&closer->lock);
	r = closer_queue(closer, uid, fd);
	(void)pthread_mutex_unlock(&closer->lock);
	if (r)
		(void)closer_close_fn(fd);
}

size_t closer_pending(Closer *closer, uint32_t uid) {
	CloserQueue *queue;
	size_t n;

	(void)pthread_mutex_lock(&closer->lock);
	queue = closer_find(closer, uid);
	n = queue ? queue->n_pending : 0;
	(void)pthread_mutex_unlock(&closer->lock);
	return n;
}

size_t closer_total(Closer *closer) {
	return atomic_load_explicit(&closer->n_total, memory_order_relaxed);
}

void closer_check(Closer *closer, void (*on_stuck)(void *userdata, uint32_t uid, int fd, uint64_t ms), void *userdata) {
	struct {
		uint32_t uid;
		int fd;
		uint64_t ms;
	} stuck[CLOSER_THREADS_MAX];
	size_t n_stuck = 0;
	uint64_t now;

	(void)pthread_mutex_lock(&closer->lock);
	now = closer_now_fn();
	(void)closer_relieve(closer, now);
	for (size_t i = 0; i < closer->n_threads; i++) {
		CloserThread *thread = &closer->threads[i];

		if (!thread_is_stuck(thread, now) || thread->queue->reported)
			continue;
		thread->queue->reported = true;
		stuck[n_stuck].uid = thread->queue->uid;
		stuck[n_stuck].fd = thread->fd;
		stuck[n_stuck++].ms = (now - thread->since_ns) / MS_NS;
	}
	(void)pthread_mutex_unlock(&closer->lock);
	for (size_t i = 0; on_stuck && i < n_stuck; i++)
		on_stuck(userdata, stuck[i].uid, stuck[i].fd, stuck[i].ms);
}
