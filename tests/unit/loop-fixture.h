/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the tests of the loop share: a loop with its Closer on either engine, connections with an end of the test's own,
 * and running until something has come about. Every test ends with the fds that it began with.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "count-fds.h"
#include "loop.h"
#include "wire/fd.h"

#define DEADLINE_NS UINT64_C(60000000000)
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

static inline void on_deadline(LoopTimer *timer) {
	(void)timer;
	fail_msg("what the test waits for does not happen");
}

static inline void on_turn(void *userdata) {
	Fixture *f = userdata;

	f->n_turns++;
	if (f->done(f))
		loop_quit(f->loop);
}

static inline void run_until(Fixture *f, bool (*done)(Fixture *f)) {
	f->done = done;
	f->deadline.on_time = on_deadline;
	loop_timer_set(f->loop, &f->deadline, loop_now(f->loop) + DEADLINE_NS);
	assert_int_equal(loop_run(f->loop), 0);
	loop_timer_unlink(&f->deadline);
}

static inline bool always(Fixture *f) {
	(void)f;
	return true;
}

static inline void on_nothing(LoopTimer *timer) {
	(void)timer;
}

/* one turn, which does not wait */
static inline void run_once(Fixture *f) {
	LoopTimer now = { .on_time = on_nothing };

	loop_timer_set(f->loop, &now, 1);
	run_until(f, always);
}

static inline int setup(void **state, int kind) {
	Fixture *f = calloc(1, sizeof(*f));

	f->n_fds = count_fds();
	f->fd = -EBADF;
	assert_int_equal(closer_new(&f->closer), 0);
	if (loop_new(&f->loop, kind, f->closer) == 0)
		loop_set_turn(f->loop, on_turn, f);
	*state = f;
	return 0;
}

static inline int setup_uring(void **state) {
	return setup(state, LOOP_IO_URING);
}

static inline int setup_epoll(void **state) {
	return setup(state, LOOP_EPOLL);
}

static inline Fixture *fixture(void **state) {
	Fixture *f = *state;

	if (!f->loop)
		skip();
	return f;
}

static inline int teardown(void **state) {
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

static inline void on_message(LoopConn *conn, LoopMessage *message) {
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

static inline void on_end(LoopConn *conn, int reason, int error) {
	Peer *peer = container_of(conn, Peer, conn);

	assert_false(peer->inside);
	peer->n_ended++;
	peer->reason = reason;
	peer->error = error;
	loop_conn_unlink(conn);
}

static inline Peer *peer_new(Fixture *f, void (*message)(Peer *peer, LoopMessage *message)) {
	Peer *peer = calloc(1, sizeof(*peer));
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
	peer->f = f;
	peer->other = pair[1];
	peer->on_message = message;
	peer->conn = (LoopConn){
		.fd = pair[0],
		.owner_uid = 1000,
		.on_message = on_message,
		.on_end = on_end,
	};
	assert_int_equal(loop_conn_link(f->loop, &peer->conn), 0);
	f->peers[f->n_peers++] = peer;
	return peer;
}

static inline void peer_say(Peer *peer, uint32_t number) {
	assert_int_equal(fd_send(peer->other, &number, sizeof(number), NULL, 0, MSG_DONTWAIT), 0);
}

static inline bool peer_hears(Peer *peer, uint32_t *ret) {
	return recv(peer->other, ret, sizeof(*ret), MSG_DONTWAIT) == (ssize_t)sizeof(*ret);
}

static uint32_t number_of(const LoopMessage *message) {
	uint32_t number;

	assert_int_equal(message->size, sizeof(number));
	memcpy(&number, message->data, sizeof(number));
	return number;
}

/* numbers count up from 0 */
static inline void expect_next(Peer *peer, LoopMessage *message) {
	assert_int_equal(number_of(message), peer->n_received - 1);
}

static inline void echo(Peer *peer, LoopMessage *message) {
	assert_int_equal(loop_conn_send(&peer->conn, message->data, message->size, NULL, 0, false), 0);
}

static inline bool first_ended(Fixture *f) {
	return f->peers[0]->n_ended > 0;
}

static inline bool first_has_one(Fixture *f) {
	return f->peers[0]->n_received == 1;
}

static inline bool first_can_hear(Fixture *f) {
	char byte;

	return recv(f->peers[0]->other, &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0;
}

/* what the loop sends is seen outside of it, so it looks again now and then */
static inline void run_until_heard(Fixture *f) {
	uint64_t end = loop_now(f->loop) + DEADLINE_NS;

	do {
		run_once(f);
		assert_true(loop_now(f->loop) < end);
	} while (!first_can_hear(f));
}

static inline bool closer_is_idle(Fixture *f) {
	return closer_total(f->closer) == 0;
}

typedef struct Polled {
	LoopPoll poll;
	Fixture *f;
} Polled;

#define ON(_engine, _function) \
	{ #_function " on " #_engine, _function, setup_##_engine, teardown, NULL }
#define TEST(_function) ON(uring, _function), ON(epoll, _function)
