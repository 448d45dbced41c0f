/* SPDX-License-Identifier: Apache-2.0 */

/* The loop's connections: receiving, sending, ends; every test on both engines. */

#include "loop-fixture.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

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
	Fixture *f = fixture(state);

	for (size_t way = 0; way < 2; way++) {
		Peer *peer = peer_new(f, echo);
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

static void big_messages(Fixture *f) {
	Peer *peer = peer_new(f, expect_big);
	uint8_t *big = malloc(WIRE_MESSAGE_MAX + 1);

	for (size_t i = 0; i < WIRE_MESSAGE_MAX + 1; i++)
		big[i] = (uint8_t)(i * 7);
	assert_int_equal(fd_send(peer->other, big, WIRE_MESSAGE_MAX, NULL, 0, 0), 0);
	assert_int_equal(fd_send(peer->other, big, WIRE_MESSAGE_MAX + 1, NULL, 0, 0), 0);
	free(big);
	run_until(f, first_has_two);
}

static void test_a_message_of_full_size_fits_and_one_byte_more_is_truncated(void **state) {
	big_messages(fixture(state));
}

static void take_first_fd(Peer *peer, LoopMessage *message) {
	assert_int_equal(message->n_fds, 3);
	assert_false(message->fds_lost);
	for (size_t i = 0; i < 3; i++)
		assert_true(fcntl(message->fds[i], F_GETFD) & FD_CLOEXEC);
	peer->f->fd = steal_fd(&message->fds[0]);
}

static void receive_fds(Fixture *f) {
	Peer *peer = peer_new(f, take_first_fd);
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
	receive_fds(fixture(state));
}

static void hang_up(Fixture *f) {
	Peer *peer = peer_new(f, expect_next);

	for (uint32_t i = 0; i < 100; i++)
		peer_say(peer, i);
	peer->other = close_fd(peer->other);
	run_until(f, first_ended);
	assert_int_equal(peer->n_received, 100);
	assert_int_equal(peer->n_ended, 1);
	assert_int_equal(peer->reason, LOOP_END_HANGUP);
}

static void test_a_hang_up_comes_after_the_messages(void **state) {
	hang_up(fixture(state));
}

static void idle_hang_up(Fixture *f, bool half) {
	Peer *peer = peer_new(f, expect_next);

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
	idle_hang_up(fixture(state), false);
}

static void test_a_peer_shuts_down_its_half(void **state) {
	idle_hang_up(fixture(state), true);
}

static void empty_message(Fixture *f) {
	Peer *peer = peer_new(f, expect_next);

	peer_say(peer, 0);
	assert_int_equal(fd_send(peer->other, NULL, 0, &peer->other, 1, 0), 0);
	peer_say(peer, 77);
	run_until(f, first_ended);
	assert_int_equal(peer->n_received, 1);
	assert_int_equal(peer->reason, LOOP_END_HANGUP);
}

static void test_an_empty_message_is_a_hang_up(void **state) {
	empty_message(fixture(state));
}

/* the peer goes with our reply unread: the kernel says ECONNRESET before what the peer sent */
static void reset(Fixture *f) {
	Peer *peer = peer_new(f, expect_next);

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
	reset(fixture(state));
}

static bool second_has_one(Fixture *f) {
	return f->peers[1]->n_received == 1;
}

static bool first_has_all(Fixture *f) {
	return f->peers[0]->n_received == 200;
}

static void fairness(Fixture *f) {
	Peer *noisy = peer_new(f, expect_next);
	Peer *quiet = peer_new(f, expect_next);

	for (uint32_t i = 0; i < 200; i++)
		peer_say(noisy, i);
	peer_say(quiet, 0);
	run_until(f, second_has_one);
	assert_true(noisy->n_received <= 2 * LOOP_MESSAGES_PER_TURN);
	/* on_message checks the bound of each turn; nothing is forgotten */
	run_until(f, first_has_all);
}

static void test_work_per_turn_is_bounded(void **state) {
	fairness(fixture(state));
}

static bool all_ended(Fixture *f) {
	size_t n = 0;

	for (size_t i = 0; i < f->n_peers; i++)
		n += f->peers[i]->n_ended;
	return n == f->n_peers;
}

static void test_many_messages_of_many_peers(void **state) {
	Fixture *f = fixture(state);
	Peer *peers[8];

	for (size_t i = 0; i < 8; i++) {
		peers[i] = peer_new(f, expect_next);
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
	Fixture *f = fixture(state);

	for (size_t way = 0; way < 2; way++) {
		for (int i = 0; i < 8; i++) {
			Peer *peer = peer_new(f, unlink_others);

			for (uint32_t j = 0; j < 20; j++)
				assert_int_equal(fd_send(peer->other, &j, sizeof(j), &peer->other, 1, MSG_DONTWAIT), 0);
			assert_int_equal(loop_conn_send(&peer->conn, "x", 1, &peer->other, 1, false), 0);
		}
		run_until(f, no_peers);
	}
}

static void test_the_other_end_sees_an_unlink_at_once(void **state) {
	Fixture *f = fixture(state);
	Peer *peer = peer_new(f, expect_next);
	char byte;

	peer_say(peer, 0);
	run_until(f, first_has_one);
	loop_conn_unlink(&peer->conn);
	assert_int_equal(recv(peer->other, &byte, 1, MSG_DONTWAIT), 0);
}

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
	Peer *peer = peer_new(f, expect_next);
	uint8_t bytes[4096] = { 0 };
	Polled other = { { .fd = peer->other, .on_ready = on_other_ready }, f };

	last_heard = 0;
	for (uint32_t i = 1; i <= 300; i++) {
		memcpy(bytes, &i, sizeof(i));
		assert_int_equal(loop_conn_send(&peer->conn, bytes, sizeof(bytes), NULL, 0, false), 0);
	}
	/* what does not fit is queued */
	assert_true(peer->conn.out_messages > 0 && peer->conn.out_messages < 300);
	assert_int_equal(peer->conn.out_bytes, peer->conn.out_messages * sizeof(bytes));
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
	Peer *peer = peer_new(f, expect_next);
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
	Peer *peer = peer_new(f, NULL);
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
	assert_int_equal(peer->conn.out_messages, 0);
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
	Peer *peer = peer_new(f, NULL);
	size_t before = count_fds();
	int owned[1];

	/* the peer has room for some */
	while (!peer->conn.out_messages)
		assert_int_equal(loop_conn_send(&peer->conn, "x", 1, &peer->other, 1, false), 0);
	for (int i = 0; i < 10; i++) {
		owned[0] = dup(peer->other);
		assert_int_equal(loop_conn_send(&peer->conn, "x", 1, owned, 1, true), 0);
		assert_int_equal(loop_conn_send(&peer->conn, "x", 1, &peer->other, 1, false), 0);
	}
	assert_int_equal(count_fds(), before + 21);
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
	Peer *peer = peer_new(f, NULL);

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
	Peer *peer = peer_new(f, NULL);

	loop_quit(f->loop);
	assert_int_equal(loop_conn_send(&peer->conn, "x", 1, NULL, 0, false), 0);
	f->done = always;
	assert_int_equal(loop_run(f->loop), 0);
	assert_int_equal(f->n_turns, 0);
	assert_true(first_can_hear(f));
}

int main(void) {
	const struct CMUnitTest tests[] = {
		TEST(test_name_and_reason),
		TEST(test_messages_are_answered),
		TEST(test_a_message_of_full_size_fits_and_one_byte_more_is_truncated),
		TEST(test_fds_are_taken_or_closed),
		TEST(test_a_hang_up_comes_after_the_messages),
		TEST(test_an_idle_peer_hangs_up),
		TEST(test_a_peer_shuts_down_its_half),
		TEST(test_an_empty_message_is_a_hang_up),
		TEST(test_a_reset_loses_no_message),
		TEST(test_work_per_turn_is_bounded),
		TEST(test_many_messages_of_many_peers),
		TEST(test_any_callback_may_free_any_source),
		TEST(test_the_other_end_sees_an_unlink_at_once),
		TEST(test_a_peer_that_reads_late_gets_all_in_order),
		TEST(test_a_blocked_peer_hangs_up),
		TEST(test_fds_are_sent),
		TEST(test_a_queue_that_is_dropped_closes_its_fds),
		TEST(test_a_send_that_fails_ends_the_connection_from_the_loop),
		TEST(test_quit_sends_what_is_queued),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
