/* SPDX-License-Identifier: Apache-2.0 */

/* The loop's timers, polls and listeners, and which engine runs; every test on both engines. */

#include "loop-fixture.h"
#include "fd-limit.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

typedef struct Timed {
	LoopTimer timer;
	Fixture *f;
} Timed;

static uint64_t last_fired;

static bool all_fired(Fixture *f) {
	return f->n_fired == 500;
}

typedef struct Sorted {
	LoopTimer timer;
	Fixture *f;
	uint64_t armed_ns;
} Sorted;

static void on_in_order(LoopTimer *timer) {
	Sorted *sorted = container_of(timer, Sorted, timer);

	assert_int_equal(timer->at_ns, 0);
	assert_true(sorted->armed_ns >= last_fired);
	assert_true(sorted->armed_ns <= loop_now(sorted->f->loop));
	last_fired = sorted->armed_ns;
	sorted->f->n_fired++;
}

static void test_timers_fire_in_order(void **state) {
	Fixture *f = fixture(state);
	Sorted *timers = calloc(1000, sizeof(*timers));
	uint64_t now = loop_now(f->loop), random = 1;

	last_fired = 0;
	for (int round = 0; round < 2; round++) {
		for (size_t i = 0; i < 1000; i++) {
			random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
			timers[i].f = f;
			timers[i].timer.on_time = on_in_order;
			timers[i].armed_ns = now + 1 + (random >> 33) % (20 * MS_NS);
			/* the second round arms them again */
			loop_timer_set(f->loop, &timers[i].timer, timers[i].armed_ns);
		}
	}
	for (size_t i = 0; i < 1000; i += 2) {
		loop_timer_unlink(&timers[i].timer);
		loop_timer_unlink(&timers[i].timer);
		assert_int_equal(timers[i].timer.at_ns, 0);
	}
	run_until(f, all_fired);
	free(timers);
}

static void on_again(LoopTimer *timer) {
	Timed *timed = container_of(timer, Timed, timer);

	/* once in a turn, although its time has passed */
	assert_int_equal(timed->f->n_fired, timed->f->n_turns);
	timed->f->n_fired++;
	if (timed->f->n_fired < 5)
		loop_timer_set(timed->f->loop, timer, 0);
}

static bool five_fired(Fixture *f) {
	return f->n_fired == 5;
}

static void test_a_timer_in_the_past_fires_in_the_next_turn(void **state) {
	Fixture *f = fixture(state);
	Timed timed = { { .on_time = on_again }, f };

	loop_timer_set(f->loop, &timed.timer, 0);
	run_until(f, five_fired);
	assert_int_equal(f->n_turns, 5);
}

static void on_unlink_next(LoopTimer *timer) {
	Timed *timed = container_of(timer, Timed, timer);

	timed->f->n_fired++;
	loop_timer_unlink(&timed[1].timer);
	loop_timer_set(timed->f->loop, &timed[2].timer, loop_now(timed->f->loop) + MS_NS);
}

static void on_fired(LoopTimer *timer) {
	container_of(timer, Timed, timer)->f->n_fired++;
}

static bool two_fired(Fixture *f) {
	return f->n_fired == 2;
}

static void test_a_timer_may_unlink_one_that_expired_with_it(void **state) {
	Fixture *f = fixture(state);
	Timed timed[3] = { { { .on_time = on_unlink_next }, f },
			   { { .on_time = on_fired }, f },
			   { { .on_time = on_fired }, f } };

	for (size_t i = 0; i < 3; i++)
		loop_timer_set(f->loop, &timed[i].timer, i + 1);
	run_until(f, two_fired);
	/* the third was moved to a later turn */
	assert_true(f->n_turns > 1);
	assert_int_equal(timed[1].timer.at_ns, 0);
}

static bool one_fired(Fixture *f) {
	return f->n_fired == 1;
}

static void test_an_idle_loop_sleeps(void **state) {
	Fixture *f = fixture(state);
	Timed timed = { { .on_time = on_fired }, f };

	(void)peer_new(f, NULL);
	(void)peer_new(f, NULL);
	run_once(f);
	f->n_turns = 0;
	loop_timer_set(f->loop, &timed.timer, loop_now(f->loop) + 50 * MS_NS);
	run_until(f, one_fired);
	assert_true(f->n_turns <= 3);
}

static void on_event(LoopPoll *poll, uint32_t events) {
	Polled *polled = container_of(poll, Polled, poll);
	uint64_t value;

	assert_true(events & 1);
	/* level-triggered: it comes again until it is read */
	if (++polled->f->n_ready >= 4)
		assert_int_equal(read(poll->fd, &value, sizeof(value)), sizeof(value));
}

static bool four_ready(Fixture *f) {
	return f->n_ready == 4;
}

static bool five_ready(Fixture *f) {
	return f->n_ready == 5;
}

static void test_readiness_is_level_triggered(void **state) {
	Fixture *f = fixture(state);
	Polled polled = { { .on_ready = on_event }, f };
	Timed timed = { { .on_time = on_fired }, f };

	polled.poll.fd = f->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	assert_int_equal(loop_poll_link(f->loop, &polled.poll), 0);
	assert_int_equal(eventfd_write(f->fd, 1), 0);
	run_until(f, four_ready);
	loop_timer_set(f->loop, &timed.timer, loop_now(f->loop) + MS_NS);
	run_until(f, one_fired);
	assert_int_equal(f->n_ready, 4);
	assert_int_equal(eventfd_write(f->fd, 1), 0);
	run_until(f, five_ready);
	loop_poll_unlink(&polled.poll);
	loop_poll_unlink(&polled.poll);
	/* it may be closed at once, and its number be another source's */
	assert_int_equal(close(f->fd), 0);
	polled.poll.fd = f->fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
	f->n_ready = 3;
	assert_int_equal(loop_poll_link(f->loop, &polled.poll), 0);
	run_until(f, four_ready);
	loop_poll_unlink(&polled.poll);
}

typedef struct Listening {
	LoopListener listener;
	Fixture *f;
} Listening;

static void on_accept(LoopListener *listener, int fd) {
	Fixture *f = container_of(listener, Listening, listener)->f;

	if (fd < 0) {
		assert_true(fd == -EMFILE || fd == -ENFILE);
		f->n_refused++;
		return;
	}
	assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	assert_true(fcntl(fd, F_GETFL) & O_NONBLOCK);
	f->accepted[f->n_accepted++] = fd;
}

static int listen_somewhere(struct sockaddr_un *ret) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const char *directory = getenv("TMPDIR");
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s/test-loop.%d", directory ?: P_tmpdir, getpid());
	(void)unlink(address.sun_path);
	assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	assert_int_equal(listen(fd, 64), 0);
	*ret = address;
	return fd;
}

static int connect_to(const struct sockaddr_un *address) {
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	assert_int_equal(connect(fd, (const struct sockaddr *)address, sizeof(*address)), 0);
	return fd;
}

static bool forty_accepted(Fixture *f) {
	return f->n_accepted == 40;
}

static bool refused_three_times(Fixture *f) {
	return f->n_refused == 3;
}

static void test_connections_are_accepted(void **state) {
	Fixture *f = fixture(state);
	Listening listening = { { .on_accept = on_accept }, f };
	struct sockaddr_un address;
	int clients[41];

	listening.listener.fd = f->fd = listen_somewhere(&address);
	assert_int_equal(loop_listener_link(f->loop, &listening.listener), 0);
	for (size_t i = 0; i < 40; i++)
		clients[i] = connect_to(&address);
	run_until(f, forty_accepted);
	/* one that nobody takes: it is closed with the listener, or by the loop when it was accepted already */
	clients[40] = connect_to(&address);
	loop_listener_unlink(&listening.listener);
	loop_listener_unlink(&listening.listener);
	run_once(f);
	assert_int_equal(f->n_accepted, 40);
	for (size_t i = 0; i < 41; i++)
		close_fd(clients[i]);
	for (size_t i = 0; i < 40; i++)
		close_fd(f->accepted[i]);
	(void)unlink(address.sun_path);
}

static void test_out_of_fds_is_told_and_does_not_spin(void **state) {
	Fixture *f = fixture(state);
	Listening listening = { { .on_accept = on_accept }, f };
	struct sockaddr_un address;
	FdLimit limit;
	int clients[40];

	listening.listener.fd = f->fd = listen_somewhere(&address);
	for (size_t i = 0; i < 40; i++)
		clients[i] = connect_to(&address);
	assert_int_equal(loop_listener_link(f->loop, &listening.listener), 0);
	fd_limit_begin(&limit, 10);
	run_until(f, refused_three_times);
	fd_limit_end(&limit);
	assert_int_equal(f->n_accepted, 10);
	assert_true(f->n_turns < 20);
	run_until(f, forty_accepted);
	loop_listener_unlink(&listening.listener);
	for (size_t i = 0; i < 40; i++) {
		close_fd(clients[i]);
		close_fd(f->accepted[i]);
	}
	(void)unlink(address.sun_path);
}

static void test_free_unlinks_what_is_linked(void **state) {
	Fixture *f = fixture(state);
	Listening listening = { { .on_accept = on_accept }, f };
	Polled polled = { { .on_ready = on_event }, f };
	Timed timed = { { .on_time = on_fired }, f };
	struct sockaddr_un address;
	_cleanup_(closep) int event = eventfd(0, EFD_CLOEXEC);
	int client;

	polled.poll.fd = event;
	listening.listener.fd = f->fd = listen_somewhere(&address);
	assert_int_equal(loop_listener_link(f->loop, &listening.listener), 0);
	assert_int_equal(loop_poll_link(f->loop, &polled.poll), 0);
	loop_timer_set(f->loop, &timed.timer, UINT64_MAX);
	(void)peer_new(f, NULL);
	(void)peer_new(f, NULL);
	run_once(f);
	client = connect_to(&address);
	peer_say(f->peers[0], 1);
	peer_say(f->peers[1], 1);
	assert_int_equal(loop_conn_send(&f->peers[1]->conn, "x", 1, &client, 1, false), 0);
	f->loop = loop_free(f->loop);
	assert_null(f->peers[0]->conn.loop);
	assert_null(f->peers[1]->conn.loop);
	assert_null(listening.listener.loop);
	assert_null(polled.poll.loop);
	assert_int_equal(timed.timer.at_ns, 0);
	close_fd(client);
	(void)unlink(address.sun_path);
}

static void forbid_io_uring(uint32_t error) {
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(filter) / sizeof(filter[0]), .filter = filter };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
		_exit(2);
}

/* 0 when the loop is on epoll and says why, and when insisting on io_uring fails */
static int without_io_uring(uint32_t error) {
	Closer *closer;
	Loop *loop = NULL;
	int r;

	forbid_io_uring(error);
	if (closer_new(&closer))
		return 3;
	if (loop_new(&loop, LOOP_IO_URING, closer) != -(int)error || loop)
		return 4;
	r = loop_new(&loop, LOOP_AUTO, closer);
	if (r || strcmp(loop_name(loop), "epoll"))
		return 5;
	if (!strstr(loop_reason(loop), "io_uring_setup: ") || !strstr(loop_reason(loop), strerror((int)error)))
		return 6;
	loop_free(loop);
	closer_free(closer);
	return 0;
}

static void test_where_io_uring_is_refused_epoll_runs(void **state) {
	static const uint32_t errors[] = { ENOSYS, EPERM, EACCES, EINVAL, ENOMEM };

	/* without liburing there is nothing that could be refused */
	if (!strcmp(loop_reason(fixture(state)->loop), "built without liburing"))
		return;
	for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
		pid_t pid = fork();
		int status;

		assert_true(pid >= 0);
		if (!pid)
			_exit(without_io_uring(errors[i]));
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_true(WIFEXITED(status));
		assert_int_equal(WEXITSTATUS(status), 0);
	}
}

int main(void) {
	const struct CMUnitTest tests[] = {
		TEST(test_timers_fire_in_order),
		TEST(test_a_timer_in_the_past_fires_in_the_next_turn),
		TEST(test_a_timer_may_unlink_one_that_expired_with_it),
		TEST(test_an_idle_loop_sleeps),
		TEST(test_readiness_is_level_triggered),
		TEST(test_connections_are_accepted),
		TEST(test_out_of_fds_is_told_and_does_not_spin),
		TEST(test_free_unlinks_what_is_linked),
		cmocka_unit_test_setup_teardown(test_where_io_uring_is_refused_epoll_runs, setup_uring, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
