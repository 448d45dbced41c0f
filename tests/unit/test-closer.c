/* SPDX-License-Identifier: Apache-2.0 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "closer.h"
#include "count-fds.h"

#define DEADLINE_S 60
#define LOG_MAX 256

/* what the stand-in for close() does: fds of @stuck wait until they are let go; the order of the others is kept */
static struct {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	bool stuck[1024];
	int closed[LOG_MAX];
	size_t n_closed;
	size_t n_inside;
} closes = { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER };

/* the clock of the Closer: it stands still, so that nothing is stuck that was only slow, unless a test moves it */
static _Atomic uint64_t clock_ns = 1;

static uint64_t test_clock(void) {
	return clock_ns;
}

/* what is being closed has taken long from here on */
static void let_time_pass(void) {
	clock_ns += CLOSER_STUCK_MS * UINT64_C(1000000);
}

/* threads of this process before there was a Closer; one that was joined may be listed a moment longer */
static size_t n_threads_before;

static size_t count_threads(void) {
	return count_entries("/proc/self/task");
}

static int slow_close(int fd) {
	(void)pthread_mutex_lock(&closes.lock);
	closes.n_inside++;
	while (closes.stuck[fd])
		(void)pthread_cond_wait(&closes.changed, &closes.lock);
	if (closes.n_closed < LOG_MAX)
		closes.closed[closes.n_closed++] = fd;
	(void)close(fd);
	closes.n_inside--;
	(void)pthread_mutex_unlock(&closes.lock);
	return 0;
}

static void set_stuck(int fd, bool stuck) {
	(void)pthread_mutex_lock(&closes.lock);
	closes.stuck[fd] = stuck;
	(void)pthread_cond_broadcast(&closes.changed);
	(void)pthread_mutex_unlock(&closes.lock);
}

static size_t n_inside(void) {
	size_t n;

	(void)pthread_mutex_lock(&closes.lock);
	n = closes.n_inside;
	(void)pthread_mutex_unlock(&closes.lock);
	return n;
}

static int check_fds_before(void **state) {
	static size_t before;

	before = count_fds();
	*state = &before;
	closer_close_fn = slow_close;
	closer_now_fn = test_clock;
	closes.n_closed = 0;
	return 0;
}

static int check_fds_after(void **state) {
	return count_fds() == *(size_t *)*state ? 0 : -1;
}

static uint64_t now_s(void) {
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec;
}

#define WAIT_FOR(_condition)                                     \
	do {                                                     \
		uint64_t _end = now_s() + DEADLINE_S;            \
		while (!(_condition)) {                          \
			if (now_s() > _end)                      \
				fail_msg("never: " #_condition); \
			(void)sched_yield();                     \
		}                                                \
	} while (0)

static int some_fd(void) {
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

	assert_true(fd >= 0 && fd < 1024);
	return fd;
}

static bool is_open(int fd) {
	return fcntl(fd, F_GETFD) >= 0;
}

static void test_fds_are_closed(void **state) {
	Closer *closer;

	(void)state;
	assert_int_equal(closer_new(&closer), 0);
	closer_close(closer, 1, -EBADF);
	assert_int_equal(closer_total(closer), 0);
	for (int i = 0; i < 100; i++)
		closer_close(closer, (uint32_t)i % 7, some_fd());
	WAIT_FOR(closer_total(closer) == 0);
	assert_int_equal(closes.n_closed, 100);
	assert_int_equal(closer_pending(closer, 3), 0);
	assert_null(closer_free(closer));
}

static void test_free_closes_what_waits(void **state) {
	Closer *closer;

	(void)state;
	assert_int_equal(closer_new(&closer), 0);
	for (int i = 0; i < 100; i++)
		closer_close(closer, (uint32_t)i % 7, some_fd());
	assert_null(closer_free(closer));
	assert_int_equal(closes.n_closed, 100);
	assert_null(closer_free(NULL));
}

static void test_one_uid_is_closed_in_order(void **state) {
	int fds[20];
	Closer *closer;

	(void)state;
	assert_int_equal(closer_new(&closer), 0);
	for (int i = 0; i < 20; i++)
		fds[i] = some_fd();
	set_stuck(fds[0], true);
	for (int i = 0; i < 20; i++)
		closer_close(closer, 5, fds[i]);
	WAIT_FOR(n_inside() == 1);
	assert_int_equal(closer_pending(closer, 5), 20);
	set_stuck(fds[0], false);
	WAIT_FOR(closer_total(closer) == 0);
	assert_null(closer_free(closer));
	assert_memory_equal(closes.closed, fds, sizeof(fds));
}

typedef struct Stuck {
	Closer *closer;
	size_t n;
	uint32_t uid;
	int fd;
	uint64_t ms;
} Stuck;

static void on_stuck(void *userdata, uint32_t uid, int fd, uint64_t ms) {
	Stuck *stuck = userdata;

	/* the callback may ask */
	assert_true(closer_pending(stuck->closer, uid) > 0);
	stuck->n++;
	stuck->uid = uid;
	stuck->fd = fd;
	stuck->ms = ms;
}

static bool check(Closer *closer, Stuck *stuck) {
	closer_check(closer, on_stuck, stuck);
	return true;
}

static void test_one_that_is_stuck_holds_up_nobody_else(void **state) {
	int bad, behind;
	Closer *closer;
	Stuck stuck = { 0 };

	(void)state;
	assert_int_equal(closer_new(&closer), 0);
	stuck.closer = closer;
	bad = some_fd();
	behind = some_fd();
	set_stuck(bad, true);
	closer_close(closer, 7, bad);
	closer_close(closer, 7, behind);
	WAIT_FOR(n_inside() == 1);
	let_time_pass();
	for (int i = 0; i < 10; i++)
		closer_close(closer, 8, some_fd());
	WAIT_FOR(check(closer, &stuck) && closer_pending(closer, 8) == 0);
	assert_int_equal(closer_pending(closer, 7), 2);
	assert_int_equal(closer_total(closer), 2);
	assert_true(is_open(behind));
	/* it is told once */
	assert_true(check(closer, &stuck));
	assert_int_equal(stuck.n, 1);
	assert_int_equal(stuck.uid, 7);
	assert_int_equal(stuck.fd, bad);
	assert_true(stuck.ms >= CLOSER_STUCK_MS);
	set_stuck(bad, false);
	WAIT_FOR(closer_total(closer) == 0);
	/* and again when it is stuck again */
	bad = some_fd();
	set_stuck(bad, true);
	closer_close(closer, 7, bad);
	WAIT_FOR(n_inside() == 1);
	assert_true(check(closer, &stuck));
	assert_int_equal(stuck.n, 1);
	let_time_pass();
	assert_true(check(closer, &stuck));
	assert_int_equal(stuck.n, 2);
	set_stuck(bad, false);
	WAIT_FOR(closer_total(closer) == 0);
	assert_null(closer_free(closer));
}

static void test_threads_are_bounded(void **state) {
	int fds[CLOSER_THREADS_MAX + 4];
	Closer *closer;
	Stuck stuck = { 0 };

	(void)state;
	assert_int_equal(closer_new(&closer), 0);
	stuck.closer = closer;
	for (size_t i = 0; i < CLOSER_THREADS_MAX + 4; i++) {
		fds[i] = some_fd();
		set_stuck(fds[i], true);
		closer_close(closer, (uint32_t)i, fds[i]);
	}
	for (size_t i = 1; i <= CLOSER_THREADS_MAX; i++) {
		WAIT_FOR(n_inside() == i);
		let_time_pass();
		assert_true(check(closer, &stuck));
		assert_int_equal(stuck.n, i);
	}
	let_time_pass();
	assert_true(check(closer, &stuck));
	assert_int_equal(stuck.n, CLOSER_THREADS_MAX);
	WAIT_FOR(count_threads() == n_threads_before + CLOSER_THREADS_MAX);
	for (size_t i = 0; i < CLOSER_THREADS_MAX + 4; i++)
		set_stuck(fds[i], false);
	WAIT_FOR(closer_total(closer) == 0);
	assert_null(closer_free(closer));
	assert_int_equal(closes.n_closed, CLOSER_THREADS_MAX + 4);
}

static void test_free_abandons_what_is_stuck(void **state) {
	int bad, behind;
	Closer *closer;

	(void)state;
	assert_int_equal(closer_new(&closer), 0);
	bad = some_fd();
	behind = some_fd();
	set_stuck(bad, true);
	closer_close(closer, 7, bad);
	closer_close(closer, 7, behind);
	WAIT_FOR(n_inside() == 1);
	let_time_pass();
	for (int i = 0; i < 10; i++)
		closer_close(closer, 8, some_fd());
	assert_null(closer_free(closer));
	/* the others were closed, by a thread that took over */
	assert_int_equal(closes.n_closed, 10);
	assert_true(is_open(bad));
	assert_true(is_open(behind));
	set_stuck(bad, false);
	WAIT_FOR(!is_open(bad));
	WAIT_FOR(count_threads() == n_threads_before);
	(void)close(behind);
}

#define TEST(_function) cmocka_unit_test_setup_teardown(_function, check_fds_before, check_fds_after)

int main(void) {
	const struct CMUnitTest tests[] = {
		TEST(test_fds_are_closed),
		TEST(test_free_closes_what_waits),
		TEST(test_one_uid_is_closed_in_order),
		TEST(test_one_that_is_stuck_holds_up_nobody_else),
		TEST(test_threads_are_bounded),
		TEST(test_free_abandons_what_is_stuck),
	};

	n_threads_before = count_threads();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
