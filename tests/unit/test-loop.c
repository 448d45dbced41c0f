/* SPDX-License-Identifier: Apache-2.0 */

/* The loop: every test on both engines; each ends with the fds that it began with. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "loop.h"
#include "wire/fd.h"

#define DEADLINE_NS UINT64_C(10000000000)
#define MS_NS UINT64_C(1000000)

typedef struct Fixture Fixture;
typedef struct Peer Peer;

struct Fixture {
	Closer *closer;
	Loop *loop;
	size_t n_fds; /* before anything was made */
	unsigned n_turns;
	bool (*done)(Fixture *f);
	LoopTimer deadline;
	Peer *peers[8];
	size_t n_peers;
	unsigned n_accepted;
	unsigned n_refused;
	unsigned n_ready;
	unsigned n_fired;
	int accepted[64];
	int fd;
};

/* our end is a source of the loop, the other is written and read by the test */
struct Peer {
	Fixture *f;
	LoopConn conn;
	int other;
	uint32_t n_received;
	uint32_t n_this_turn;
	uint32_t turn;
	unsigned n_ended;
	int reason;
	int error;
	bool inside; /* a call of the test that may not run callbacks */
	void (*on_message)(Peer *peer, LoopMessage *message);
};

static size_t count_fds(void) {
	DIR *directory = opendir("/proc/self/fd");
	size_t n = 0;

	assert_non_null(directory);
	while (readdir(directory))
		n++;
	(void)closedir(directory);
	return n;
}

static void on_deadline(LoopTimer *timer) {
	(void)timer;
	fail_msg("what the test waits for does not happen");
}

static void on_turn(void *userdata) {
	Fixture *f = userdata;

	f->n_turns++;
	if (f->done(f))
		loop_quit(f->loop);
}

static void run_until(Fixture *f, bool (*done)(Fixture *f)) {
	f->done = done;
	f->deadline.on_time = on_deadline;
	loop_timer_set(f->loop, &f->deadline, loop_now(f->loop) + DEADLINE_NS);
	assert_int_equal(loop_run(f->loop), 0);
	loop_timer_unlink(&f->deadline);
}

static bool always(Fixture *f) {
	(void)f;
	return true;
}

static void on_nothing(LoopTimer *timer) {
	(void)timer;
}

/* one turn, which does not wait */
static void run_once(Fixture *f) {
	LoopTimer now = { .on_time = on_nothing };

	loop_timer_set(f->loop, &now, 1);
	run_until(f, always);
}

static int setup(void **state, int kind) {
	Fixture *f = calloc(1, sizeof(*f));

	f->n_fds = count_fds();
	f->fd = -EBADF;
	assert_int_equal(closer_new(&f->closer), 0);
	if (loop_new(&f->loop, kind, f->closer) == 0)
		loop_set_turn(f->loop, on_turn, f);
	*state = f;
	return 0;
}

static int setup_uring(void **state) {
	return setup(state, LOOP_IO_URING);
}

static int setup_epoll(void **state) {
	return setup(state, LOOP_EPOLL);
}

static Fixture *fixture(void **state) {
	Fixture *f = *state;

	if (!f->loop)
		skip();
	return f;
}

static int teardown(void **state) {
	Fixture *f = *state;
	size_t n_fds = f->n_fds;

	for (size_t i = 0; i < f->n_peers; i++) {
		loop_conn_unlink(&f->peers[i]->conn);
		assert_int_equal(f->peers[i]->conn.fd, -EBADF);
		close_fd(f->peers[i]->other);
		free(f->peers[i]);
	}
	close_fd(f->fd);
	loop_free(f->loop);
	closer_free(f->closer);
	free(f);
	return count_fds() == n_fds ? 0 : -1;
}

static void on_message(LoopConn *conn, LoopMessage *message) {
	Peer *peer = container_of(conn, Peer, conn);

	assert_false(peer->inside);
	assert_int_equal(peer->n_ended, 0);
	assert_int_equal((uintptr_t)message->data % 8, 0);
	if (peer->turn != peer->f->n_turns)
		peer->n_this_turn = 0;
	peer->turn = peer->f->n_turns;
	assert_true(++peer->n_this_turn <= LOOP_MESSAGES_PER_TURN);
	peer->n_received++;
	if (peer->on_message)
		peer->on_message(peer, message);
}

static void on_end(LoopConn *conn, int reason, int error) {
	Peer *peer = container_of(conn, Peer, conn);

	assert_false(peer->inside);
	peer->n_ended++;
	peer->reason = reason;
	peer->error = error;
	loop_conn_unlink(conn);
}

static Peer *peer_new(Fixture *f, bool may_pass_fds, void (*message)(Peer *peer, LoopMessage *message)) {
	Peer *peer = calloc(1, sizeof(*peer));
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
	peer->f = f;
	peer->other = pair[1];
	peer->on_message = message;
	peer->conn = (LoopConn){
		.fd = pair[0],
		.owner_uid = 1000,
		.may_pass_fds = may_pass_fds,
		.on_message = on_message,
		.on_end = on_end,
	};
	assert_int_equal(loop_conn_link(f->loop, &peer->conn), 0);
	f->peers[f->n_peers++] = peer;
	return peer;
}

static void peer_say(Peer *peer, uint32_t number) {
	assert_int_equal(fd_send(peer->other, &number, sizeof(number), NULL, 0, MSG_DONTWAIT), 0);
}

static bool peer_hears(Peer *peer, uint32_t *ret) {
	return recv(peer->other, ret, sizeof(*ret), MSG_DONTWAIT) == (ssize_t)sizeof(*ret);
}

static uint32_t number_of(const LoopMessage *message) {
	uint32_t number;

	assert_int_equal(message->size, sizeof(number));
	memcpy(&number, message->data, sizeof(number));
	return number;
}

/* numbers count up from 0 */
static void expect_next(Peer *peer, LoopMessage *message) {
	assert_int_equal(number_of(message), peer->n_received - 1);
}

static void echo(Peer *peer, LoopMessage *message) {
	assert_int_equal(loop_conn_send(&peer->conn, message->data, message->size, NULL, 0, false), 0);
}

static bool first_ended(Fixture *f) {
	return f->peers[0]->n_ended > 0;
}

static bool first_has_one(Fixture *f) {
	return f->peers[0]->n_received == 1;
}

static bool first_can_hear(Fixture *f) {
	char byte;

	return recv(f->peers[0]->other, &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0;
}

/* what the loop sends is seen outside of it, so it looks again now and then */
static void run_until_heard(Fixture *f) {
	uint64_t end = loop_now(f->loop) + DEADLINE_NS;

	do {
		run_once(f);
		assert_true(loop_now(f->loop) < end);
	} while (!first_can_hear(f));
}

static bool closer_is_idle(Fixture *f) {
	return closer_total(f->closer) == 0;
}

static void test_name_and_reason(void **state) {
	Fixture *f = fixture(state);
	bool ring = false;
	char path[64], target[64];

	for (int fd = 0; fd < 256; fd++) {
		ssize_t size;

		(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		size = readlink(path, target, sizeof(target) - 1);
		if (size > 0) {
			target[size] = 0;
			ring = ring || !strcmp(target, "anon_inode:[io_uring]");
		}
	}
	assert_string_equal(loop_name(f->loop), ring ? "io_uring" : "epoll");
	assert_true(strlen(loop_reason(f->loop)) > 0);
}

static void test_messages_are_answered(void **state) {
	static const bool ways[] = { true, false };
	Fixture *f = fixture(state);

	for (size_t way = 0; way < 2; way++) {
		Peer *peer = peer_new(f, ways[way], echo);
		uint32_t number;

		f->peers[0] = peer;
		for (uint32_t i = 0; i < 10; i++) {
			peer_say(peer, i);
			run_until_heard(f);
			assert_true(peer_hears(peer, &number));
			assert_int_equal(number, i);
		}
		run_once(f);
		assert_int_equal(peer->conn.out_messages, 0);
		assert_int_equal(peer->conn.out_bytes, 0);
		close_fd(peer->other);
		loop_conn_unlink(&peer->conn);
		free(peer);
		f->n_peers = 0;
	}
}

static void expect_big(Peer *peer, LoopMessage *message) {
	assert_int_equal(message->size, WIRE_MESSAGE_MAX);
	assert_int_equal(message->truncated, peer->n_received == 2);
	for (size_t i = 0; i < message->size; i++)
		assert_int_equal(message->data[i], (uint8_t)(i * 7));
}

static bool first_has_two(Fixture *f) {
	return f->peers[0]->n_received == 2;
}

static void big_messages(Fixture *f, bool may_pass_fds) {
	Peer *peer = peer_new(f, may_pass_fds, expect_big);
	uint8_t *big = malloc(WIRE_MESSAGE_MAX + 1);

	for (size_t i = 0; i < WIRE_MESSAGE_MAX + 1; i++)
		big[i] = (uint8_t)(i * 7);
	assert_int_equal(fd_send(peer->other, big, WIRE_MESSAGE_MAX, NULL, 0, 0), 0);
	assert_int_equal(fd_send(peer->other, big, WIRE_MESSAGE_MAX + 1, NULL, 0, 0), 0);
	free(big);
	run_until(f, first_has_two);
}

static void test_a_message_of_full_size_fits_and_one_byte_more_is_truncated(void **state) {
	big_messages(fixture(state), true);
}

static void test_the_same_in_a_buffer_of_the_ring(void **state) {
	big_messages(fixture(state), false);
}

static void take_first_fd(Peer *peer, LoopMessage *message) {
	assert_int_equal(message->n_fds, 3);
	assert_false(message->fds_lost);
	for (size_t i = 0; i < 3; i++)
		assert_true(fcntl(message->fds[i], F_GETFD) & FD_CLOEXEC);
	peer->f->fd = steal_fd(&message->fds[0]);
}

static void receive_fds(Fixture *f, bool may_pass_fds) {
	Peer *peer = peer_new(f, may_pass_fds, take_first_fd);
	_cleanup_(closep) int memory = memfd_create("test", MFD_CLOEXEC);
	int fds[3] = { memory, memory, memory };
	struct stat a, b;
	size_t before = count_fds();

	assert_int_equal(fd_send(peer->other, "x", 1, fds, 3, 0), 0);
	run_until(f, first_has_one);
	assert_int_equal(fstat(memory, &a), 0);
	assert_int_equal(fstat(f->fd, &b), 0);
	assert_int_equal(a.st_ino, b.st_ino);
	/* the others went to the Closer */
	while (!closer_is_idle(f))
		(void)sched_yield();
	assert_int_equal(count_fds(), before + 1);
}

static void test_fds_are_taken_or_closed(void **state) {
	receive_fds(fixture(state), true);
}

static void test_fds_that_were_under_way_before_they_were_forbidden(void **state) {
	receive_fds(fixture(state), false);
}

static void hang_up(Fixture *f, bool may_pass_fds) {
	Peer *peer = peer_new(f, may_pass_fds, expect_next);

	for (uint32_t i = 0; i < 100; i++)
		peer_say(peer, i);
	peer->other = close_fd(peer->other);
	run_until(f, first_ended);
	assert_int_equal(peer->n_received, 100);
	assert_int_equal(peer->n_ended, 1);
	assert_int_equal(peer->reason, LOOP_END_HANGUP);
}

static void test_a_hang_up_comes_after_the_messages(void **state) {
	hang_up(fixture(state), true);
}

static void test_a_hang_up_comes_after_the_messages_of_a_multishot(void **state) {
	hang_up(fixture(state), false);
}

static void idle_hang_up(Fixture *f, bool may_pass_fds, bool half) {
	Peer *peer = peer_new(f, may_pass_fds, expect_next);

	peer_say(peer, 0);
	run_until(f, first_has_one);
	if (half)
		assert_int_equal(shutdown(peer->other, SHUT_WR), 0);
	else
		peer->other = close_fd(peer->other);
	run_until(f, first_ended);
	assert_int_equal(peer->reason, LOOP_END_HANGUP);
	assert_int_equal(peer->n_received, 1);
}

static void test_an_idle_peer_hangs_up(void **state) {
	idle_hang_up(fixture(state), true, false);
}

static void test_an_idle_peer_of_a_multishot_hangs_up(void **state) {
	idle_hang_up(fixture(state), false, false);
}

static void test_a_peer_shuts_down_its_half(void **state) {
	idle_hang_up(fixture(state), true, true);
}

static void test_a_peer_of_a_multishot_shuts_down_its_half(void **state) {
	idle_hang_up(fixture(state), false, true);
}

static void empty_message(Fixture *f, bool may_pass_fds) {
	Peer *peer = peer_new(f, may_pass_fds, expect_next);

	peer_say(peer, 0);
	assert_int_equal(fd_send(peer->other, NULL, 0, &peer->other, 1, 0), 0);
	peer_say(peer, 77);
	run_until(f, first_ended);
	assert_int_equal(peer->n_received, 1);
	assert_int_equal(peer->reason, LOOP_END_HANGUP);
}

static void test_an_empty_message_is_a_hang_up(void **state) {
	empty_message(fixture(state), true);
}

static void test_an_empty_message_in_a_multishot_is_a_hang_up(void **state) {
	empty_message(fixture(state), false);
}

/* the peer goes with our reply unread: the kernel says ECONNRESET before what the peer sent */
static void reset(Fixture *f, bool may_pass_fds) {
	Peer *peer = peer_new(f, may_pass_fds, expect_next);

	assert_int_equal(loop_conn_send(&peer->conn, "reply", 5, NULL, 0, false), 0);
	run_until_heard(f);
	for (uint32_t i = 0; i < 40; i++)
		peer_say(peer, i);
	peer->other = close_fd(peer->other);
	run_until(f, first_ended);
	assert_int_equal(peer->n_received, 40);
	assert_int_equal(peer->reason, LOOP_END_HANGUP);
}

static void test_a_reset_loses_no_message(void **state) {
	reset(fixture(state), true);
}

static void test_a_reset_loses_no_message_of_a_multishot(void **state) {
	reset(fixture(state), false);
}

static bool second_has_one(Fixture *f) {
	return f->peers[1]->n_received == 1;
}

static bool first_has_all(Fixture *f) {
	return f->peers[0]->n_received == 200;
}

static void fairness(Fixture *f, bool may_pass_fds) {
	Peer *noisy = peer_new(f, may_pass_fds, expect_next);
	Peer *quiet = peer_new(f, may_pass_fds, expect_next);

	for (uint32_t i = 0; i < 200; i++)
		peer_say(noisy, i);
	peer_say(quiet, 0);
	run_until(f, second_has_one);
	assert_true(noisy->n_received <= 2 * LOOP_MESSAGES_PER_TURN);
	/* on_message checks the bound of each turn; nothing is forgotten */
	run_until(f, first_has_all);
}

static void test_work_per_turn_is_bounded(void **state) {
	fairness(fixture(state), true);
}

static void test_work_per_turn_of_a_multishot_is_bounded(void **state) {
	fairness(fixture(state), false);
}

static void switch_now_and_then(Peer *peer, LoopMessage *message) {
	expect_next(peer, message);
	if (peer->n_received % 5 == 0)
		loop_conn_set_may_pass_fds(&peer->conn, !peer->conn.may_pass_fds);
	if (peer->n_received % 20 == 0) {
		loop_conn_set_may_pass_fds(&peer->conn, !peer->conn.may_pass_fds);
		loop_conn_set_may_pass_fds(&peer->conn, !peer->conn.may_pass_fds);
	}
}

static bool first_has_ten_more(Fixture *f) {
	return f->peers[0]->n_received % 10 == 0;
}

static void test_switching_loses_and_reorders_nothing(void **state) {
	Fixture *f = fixture(state);
	Peer *peer = peer_new(f, true, switch_now_and_then);
	uint32_t number = 0;

	for (int round = 0; round < 20; round++) {
		for (int i = 0; i < 10; i++)
			peer_say(peer, number++);
		/* from outside, with messages queued */
		loop_conn_set_may_pass_fds(&peer->conn, round % 2);
		run_until(f, first_has_ten_more);
		assert_int_equal(peer->n_received, number);
	}
	for (int i = 0; i < 50; i++)
		peer_say(peer, number++);
	peer->other = close_fd(peer->other);
	loop_conn_set_may_pass_fds(&peer->conn, false);
	run_until(f, first_ended);
	assert_int_equal(peer->n_received, number);
	assert_int_equal(peer->reason, LOOP_END_HANGUP);
}

static bool all_ended(Fixture *f) {
	size_t n = 0;

	for (size_t i = 0; i < f->n_peers; i++)
		n += f->peers[i]->n_ended;
	return n == f->n_peers;
}

static void test_more_messages_than_the_ring_has_buffers(void **state) {
	Fixture *f = fixture(state);
	Peer *peers[8];

	for (size_t i = 0; i < 8; i++) {
		peers[i] = peer_new(f, false, expect_next);
		for (uint32_t j = 0; j < 200; j++)
			peer_say(peers[i], j);
		peers[i]->other = close_fd(peers[i]->other);
	}
	run_until(f, all_ended);
	for (size_t i = 0; i < 8; i++)
		assert_int_equal(peers[i]->n_received, 200);
}

static void unlink_others(Peer *peer, LoopMessage *message) {
	Fixture *f = peer->f;

	(void)message;
	/* the first that is called frees all, itself included */
	for (size_t i = 0; i < f->n_peers; i++) {
		loop_conn_unlink(&f->peers[i]->conn);
		loop_conn_unlink(&f->peers[i]->conn);
		close_fd(f->peers[i]->other);
		memset(f->peers[i], 0x5a, sizeof(*f->peers[i]));
		free(f->peers[i]);
	}
	f->n_peers = 0;
}

static bool no_peers(Fixture *f) {
	return f->n_peers == 0;
}

static void test_any_callback_may_free_any_source(void **state) {
	static const bool ways[] = { true, false };
	Fixture *f = fixture(state);

	for (size_t way = 0; way < 2; way++) {
		for (int i = 0; i < 8; i++) {
			Peer *peer = peer_new(f, ways[way], unlink_others);

			for (uint32_t j = 0; j < 20; j++)
				assert_int_equal(fd_send(peer->other, &j, sizeof(j), &peer->other, 1, MSG_DONTWAIT), 0);
			assert_int_equal(loop_conn_send(&peer->conn, "x", 1, &peer->other, 1, false), 0);
		}
		run_until(f, no_peers);
	}
}

static void test_the_other_end_sees_an_unlink_at_once(void **state) {
	Fixture *f = fixture(state);
	Peer *peer = peer_new(f, true, expect_next);
	char byte;

	peer_say(peer, 0);
	run_until(f, first_has_one);
	loop_conn_unlink(&peer->conn);
	assert_int_equal(recv(peer->other, &byte, 1, MSG_DONTWAIT), 0);
}

typedef struct Polled {
	LoopPoll poll;
	Fixture *f;
} Polled;

static uint32_t last_heard;

static void on_other_ready(LoopPoll *poll, uint32_t events) {
	Fixture *f = container_of(poll, Polled, poll)->f;
	uint8_t bytes[4096];
	uint32_t number;

	(void)events;
	if (recv(f->peers[0]->other, bytes, sizeof(bytes), MSG_DONTWAIT) != (ssize_t)sizeof(bytes))
		return;
	memcpy(&number, bytes, sizeof(number));
	assert_int_equal(number, last_heard + 1);
	last_heard = number;
}

static bool heard_all(Fixture *f) {
	(void)f;
	return last_heard == 300;
}

static void test_a_peer_that_reads_late_gets_all_in_order(void **state) {
	Fixture *f = fixture(state);
	Peer *peer = peer_new(f, true, expect_next);
	uint8_t bytes[4096] = { 0 };
	Polled other = { { .fd = peer->other, .on_ready = on_other_ready }, f };

	last_heard = 0;
	for (uint32_t i = 1; i <= 300; i++) {
		memcpy(bytes, &i, sizeof(i));
		assert_int_equal(loop_conn_send(&peer->conn, bytes, sizeof(bytes), NULL, 0, false), 0);
	}
	assert_int_equal(peer->conn.out_messages, 300);
	assert_int_equal(peer->conn.out_bytes, 300 * sizeof(bytes));
	/* what does not fit stays queued */
	for (int i = 0; i < 100 && !peer->conn.sending; i++)
		run_once(f);
	assert_true(peer->conn.out_messages > 0);
	assert_int_equal(loop_poll_link(f->loop, &other.poll), 0);
	run_until(f, heard_all);
	loop_poll_unlink(&other.poll);
	assert_int_equal(peer->conn.out_messages, 0);
}

static bool first_has_three(Fixture *f) {
	return f->peers[0]->n_received == 3;
}

static void test_a_blocked_peer_hangs_up(void **state) {
	Fixture *f = fixture(state);
	Peer *peer = peer_new(f, true, expect_next);
	uint8_t bytes[4096] = { 0 };

	for (uint32_t i = 0; i < 300; i++)
		assert_int_equal(loop_conn_send(&peer->conn, bytes, sizeof(bytes), &peer->other, 1, false), 0);
	for (uint32_t i = 0; i < 3; i++)
		peer_say(peer, i);
	run_until(f, first_has_three);
	peer->other = close_fd(peer->other);
	/* fds that are queued keep the other end open: they go with the unlink */
	loop_conn_unlink(&peer->conn);
	assert_int_equal(peer->conn.out_messages, 0);
}

static void test_fds_are_sent(void **state) {
	Fixture *f = fixture(state);
	Peer *peer = peer_new(f, true, NULL);
	_cleanup_(closep) int memory = memfd_create("test", MFD_CLOEXEC);
	int owned[2] = { dup(memory), dup(memory) }, borrowed[1] = { memory }, fds[WIRE_FDS_ROOM];
	int bad[2] = { dup(memory), -EBADF };
	FdMessage message;
	char bytes[8];

	assert_int_equal(loop_conn_send(&peer->conn, "one", 3, owned, 2, true), 0);
	assert_int_equal(owned[0], -EBADF);
	assert_int_equal(loop_conn_send(&peer->conn, "three", 5, borrowed, 1, false), 0);
	assert_int_equal(loop_conn_send(&peer->conn, "", 0, NULL, 0, false), -EINVAL);
	assert_int_equal(loop_conn_send(&peer->conn, "no", 2, bad, 2, true), -EBADF);
	assert_int_equal(bad[0], -EBADF);
	assert_int_equal(peer->conn.out_messages, 2);
	run_until_heard(f);
	assert_int_equal(fd_receive(peer->other, bytes, sizeof(bytes), MSG_DONTWAIT, fds, &message), 0);
	assert_int_equal(message.size, 3);
	assert_int_equal(message.n_fds, 2);
	close_fd(fds[0]);
	close_fd(fds[1]);
	run_until_heard(f);
	assert_int_equal(fd_receive(peer->other, bytes, sizeof(bytes), MSG_DONTWAIT, fds, &message), 0);
	assert_int_equal(message.size, 5);
	assert_int_equal(message.n_fds, 1);
	close_fd(fds[0]);
	assert_true(fcntl(memory, F_GETFD) >= 0);
}

static void test_a_queue_that_is_dropped_closes_its_fds(void **state) {
	Fixture *f = fixture(state);
	Peer *peer = peer_new(f, true, NULL);
	size_t before = count_fds();
	int owned[1];

	for (int i = 0; i < 10; i++) {
		owned[0] = dup(peer->other);
		assert_int_equal(loop_conn_send(&peer->conn, "x", 1, owned, 1, true), 0);
		assert_int_equal(loop_conn_send(&peer->conn, "x", 1, &peer->other, 1, false), 0);
	}
	assert_int_equal(count_fds(), before + 20);
	loop_conn_unlink(&peer->conn);
	/* after an unlink messages are dropped, and their fds */
	owned[0] = dup(peer->other);
	assert_int_equal(loop_conn_send(&peer->conn, "x", 1, owned, 1, true), 0);
	run_once(f);
	while (!closer_is_idle(f))
		(void)sched_yield();
	assert_int_equal(count_fds(), before - 1);
}

static void test_a_send_that_fails_ends_the_connection_from_the_loop(void **state) {
	Fixture *f = fixture(state);
	Peer *peer = peer_new(f, true, NULL);

	/* nobody reads there any more, which is no hang-up */
	assert_int_equal(shutdown(peer->other, SHUT_RD), 0);
	peer->inside = true;
	for (int i = 0; i < 3; i++)
		assert_int_equal(loop_conn_send(&peer->conn, "x", 1, NULL, 0, false), 0);
	peer->inside = false;
	run_until(f, first_ended);
	assert_int_equal(peer->n_ended, 1);
	assert_int_equal(peer->reason, LOOP_END_ERROR);
	assert_int_equal(peer->error, EPIPE);
}

static void test_quit_sends_what_is_queued(void **state) {
	Fixture *f = fixture(state);
	Peer *peer = peer_new(f, true, NULL);

	loop_quit(f->loop);
	assert_int_equal(loop_conn_send(&peer->conn, "x", 1, NULL, 0, false), 0);
	f->done = always;
	assert_int_equal(loop_run(f->loop), 0);
	assert_int_equal(f->n_turns, 0);
	assert_true(first_can_hear(f));
}

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

	(void)peer_new(f, true, NULL);
	(void)peer_new(f, false, NULL);
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
	struct rlimit saved, limit;
	int clients[40];

	listening.listener.fd = f->fd = listen_somewhere(&address);
	for (size_t i = 0; i < 40; i++)
		clients[i] = connect_to(&address);
	assert_int_equal(loop_listener_link(f->loop, &listening.listener), 0);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &saved), 0);
	limit = saved;
	limit.rlim_cur = (rlim_t)clients[39] + 11;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
	run_until(f, refused_three_times);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &saved), 0);
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
	(void)peer_new(f, true, NULL);
	(void)peer_new(f, false, NULL);
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

	(void)fixture(state);
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

#define ON(_engine, _function) \
	{ #_function " on " #_engine, _function, setup_##_engine, teardown, NULL }
#define TEST(_function) ON(uring, _function), ON(epoll, _function)

int main(void) {
	const struct CMUnitTest tests[] = {
		TEST(test_name_and_reason),
		TEST(test_messages_are_answered),
		TEST(test_a_message_of_full_size_fits_and_one_byte_more_is_truncated),
		TEST(test_the_same_in_a_buffer_of_the_ring),
		TEST(test_fds_are_taken_or_closed),
		TEST(test_fds_that_were_under_way_before_they_were_forbidden),
		TEST(test_a_hang_up_comes_after_the_messages),
		TEST(test_a_hang_up_comes_after_the_messages_of_a_multishot),
		TEST(test_an_idle_peer_hangs_up),
		TEST(test_an_idle_peer_of_a_multishot_hangs_up),
		TEST(test_a_peer_shuts_down_its_half),
		TEST(test_a_peer_of_a_multishot_shuts_down_its_half),
		TEST(test_an_empty_message_is_a_hang_up),
		TEST(test_an_empty_message_in_a_multishot_is_a_hang_up),
		TEST(test_a_reset_loses_no_message),
		TEST(test_a_reset_loses_no_message_of_a_multishot),
		TEST(test_work_per_turn_is_bounded),
		TEST(test_work_per_turn_of_a_multishot_is_bounded),
		TEST(test_switching_loses_and_reorders_nothing),
		TEST(test_more_messages_than_the_ring_has_buffers),
		TEST(test_any_callback_may_free_any_source),
		TEST(test_the_other_end_sees_an_unlink_at_once),
		TEST(test_a_peer_that_reads_late_gets_all_in_order),
		TEST(test_a_blocked_peer_hangs_up),
		TEST(test_fds_are_sent),
		TEST(test_a_queue_that_is_dropped_closes_its_fds),
		TEST(test_a_send_that_fails_ends_the_connection_from_the_loop),
		TEST(test_quit_sends_what_is_queued),
		TEST(test_timers_fire_in_order),
		TEST(test_a_timer_in_the_past_fires_in_the_next_turn),
		TEST(test_a_timer_may_unlink_one_that_expired_with_it),
		TEST(test_an_idle_loop_sleeps),
		TEST(test_readiness_is_level_triggered),
		TEST(test_connections_are_accepted),
		TEST(test_out_of_fds_is_told_and_does_not_spin),
		TEST(test_free_unlinks_what_is_linked),
		TEST(test_where_io_uring_is_refused_epoll_runs),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
