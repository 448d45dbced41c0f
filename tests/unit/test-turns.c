/* SPDX-License-Identifier: Apache-2.0 */

/* Turns of the gateway: who comes first, and what a turn may do when it is taken. */

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#include "tools/gateway/clock.h"
#include "tools/gateway/turns.h"

enum {
	TAKEN_MAX = 64,
	LONG_NS = 5000000,
};

#define HOUR_NS (3600 * UINT64_C(1000000000))

typedef struct Worker Worker;

typedef struct Fixture {
	struct event_base *base;
	Turns turns;
	char taken[TAKEN_MAX + 1]; /* the names, in order */
	size_t n_taken;
} Fixture;

struct Worker {
	Fixture *fixture;
	Turn turn;
	char name;
	uint64_t work_ns;
	unsigned more;	 /* how often it asks anew */
	Worker *removes; /* whose turn it withdraws */
	bool is_on_heap; /* it frees itself */
	int writes_to;	 /* a byte, to the fd that is not 0 */
};

static void take(void *userdata) {
	Worker *worker = userdata;
	Fixture *f = worker->fixture;
	uint64_t begun = clock_ns();

	assert_true(f->n_taken < TAKEN_MAX);
	f->taken[f->n_taken++] = worker->name;
	while (clock_ns() - begun < worker->work_ns)
		;
	if (worker->writes_to)
		assert_int_equal(write(worker->writes_to, "", 1), 1);
	if (worker->removes)
		turn_withdraw(&f->turns, &worker->removes->turn);
	if (worker->is_on_heap) {
		turn_withdraw(&f->turns, &worker->turn);
		free(worker);
	} else if (worker->more > 0) {
		worker->more--;
		turn_ask(&f->turns, &worker->turn);
	}
}

static Worker worker_of(Fixture *f, char name, uint64_t work_ns, unsigned more) {
	return (Worker){ .fixture = f, .turn = { .take = take }, .name = name, .work_ns = work_ns, .more = more };
}

static void ask(Worker *worker) {
	worker->turn.userdata = worker;
	turn_ask(&worker->fixture->turns, &worker->turn);
}

/* until nobody waits */
static void run(Fixture *f) {
	while (!TAILQ_EMPTY(&f->turns.waiting))
		assert_true(event_base_loop(f->base, EVLOOP_ONCE) >= 0);
	(void)event_base_loop(f->base, EVLOOP_NONBLOCK);
}

/* those that take equally long come in the order in which they asked, and asking twice is once */
static void test_order(void **state) {
	Fixture *f = *state;
	Worker a = worker_of(f, 'a', 0, 0), b = worker_of(f, 'b', 0, 0);

	ask(&b);
	ask(&a);
	ask(&b);
	assert_int_equal(f->n_taken, 0);
	run(f);
	assert_string_equal(f->taken, "ba");
}

/* whoever took little the last time comes before those that took long */
static void test_little_comes_first(void **state) {
	Fixture *f = *state;
	Worker a = worker_of(f, 'a', 0, 0), b = worker_of(f, 'b', 0, 0), little = worker_of(f, 'x', 0, 0);

	a.turn.last = b.turn.last = HOUR_NS;
	little.turn.last = 1;
	ask(&a);
	ask(&b);
	ask(&little);
	run(f);
	assert_string_equal(f->taken, "xab");
}

/* whoever has used less comes first, however long it will take, up to the difference */
static void test_who_has_used_less(void **state) {
	Fixture *f = *state;
	Worker a = worker_of(f, 'a', 0, 0), b = worker_of(f, 'b', 0, 0), c = worker_of(f, 'c', 0, 0);

	a.turn.used = 2 * HOUR_NS;
	a.turn.last = b.turn.last = c.turn.last = HOUR_NS;
	c.turn.used = 4 * HOUR_NS;
	c.turn.last = 1;
	ask(&c);
	ask(&a);
	ask(&b);
	run(f);
	assert_string_equal(f->taken, "bac");
}

/* whoever was not there for long does not keep the others from their turns */
static void test_no_credit(void **state) {
	Fixture *f = *state;
	Worker a = worker_of(f, 'a', 0, 0), late = worker_of(f, 'l', 0, 0);

	a.turn.used = HOUR_NS;
	ask(&a);
	run(f);
	ask(&late);
	assert_true(late.turn.used == HOUR_NS);
	assert_true(a.turn.used > HOUR_NS);
	run(f);
	assert_string_equal(f->taken, "al");
}

static void on_readable(evutil_socket_t fd, short what, void *userdata) {
	Fixture *f = userdata;
	char byte;

	(void)what;
	assert_int_equal(read(fd, &byte, 1), 1);
	assert_true(f->n_taken < TAKEN_MAX);
	f->taken[f->n_taken++] = 's';
}

/* after a turn that took long, the loop looks at the sockets before the next */
static void test_sockets_between_long_turns(void **state) {
	Fixture *f = *state;
	Worker a = worker_of(f, 'a', LONG_NS, 1), b = worker_of(f, 'b', LONG_NS, 0);
	struct event *readable;
	int fds[2];

	assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
	readable = event_new(f->base, fds[0], EV_READ | EV_PERSIST, on_readable, f);
	assert_non_null(readable);
	assert_int_equal(event_add(readable, NULL), 0);
	a.writes_to = b.writes_to = fds[1];
	ask(&a);
	ask(&b);
	run(f);
	assert_string_equal(f->taken, "asbsas");
	assert_true(a.turn.used >= 2 * (uint64_t)LONG_NS && b.turn.used >= LONG_NS);
	event_free(readable);
	(void)close(fds[0]);
	(void)close(fds[1]);
}

/* a turn may end others, and itself */
static void test_withdraw(void **state) {
	Fixture *f = *state;
	Worker a = worker_of(f, 'a', 0, 0), b = worker_of(f, 'b', 0, 0), *c = malloc(sizeof(*c));

	assert_non_null(c);
	*c = worker_of(f, 'c', 0, 0);
	c->is_on_heap = true;
	a.removes = &b;
	ask(&a);
	ask(&b);
	ask(c);
	run(f);
	assert_string_equal(f->taken, "ac");
	ask(&b);
	run(f);
	assert_string_equal(f->taken, "acb");
}

static int setup(void **state) {
	Fixture *f = calloc(1, sizeof(*f));

	assert_non_null(f);
	f->base = event_base_new();
	assert_non_null(f->base);
	assert_int_equal(turns_init(&f->turns, f->base), 0);
	*state = f;
	return 0;
}

static int teardown(void **state) {
	Fixture *f = *state;

	turns_deinit(&f->turns);
	event_base_free(f->base);
	free(f);
	return 0;
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_order, setup, teardown),
		cmocka_unit_test_setup_teardown(test_little_comes_first, setup, teardown),
		cmocka_unit_test_setup_teardown(test_who_has_used_less, setup, teardown),
		cmocka_unit_test_setup_teardown(test_no_credit, setup, teardown),
		cmocka_unit_test_setup_teardown(test_sockets_between_long_turns, setup, teardown),
		cmocka_unit_test_setup_teardown(test_withdraw, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
