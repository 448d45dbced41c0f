/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Loop: the one thread that does everything, on io_uring or on epoll.
 *
 * Callers embed a source (LoopListener, LoopConn, LoopPoll, LoopTimer) in their own object, fill in its callback
 * and link it; callbacks find their object with container_of(). A source may be unlinked, and its object freed,
 * in any callback, also in its own. The engines are loop-uring.c and loop-epoll.c, behind LoopEngine; they
 * differ in nothing that a caller can see. Work per connection and turn is bounded by LOOP_MESSAGES_PER_TURN.
 *
 * Invariant: after loop_conn_unlink() no callback of that source runs any more, and every byte and fd of
 * messages still queued is released (fds through the Closer).
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "closer.h"
#include "list.h"

#define LOOP_MESSAGES_PER_TURN 16

typedef struct Loop Loop;
typedef struct LoopEngine LoopEngine;
typedef struct LoopListener LoopListener;
typedef struct LoopConn LoopConn;
typedef struct LoopPoll LoopPoll;
typedef struct LoopTimer LoopTimer;
typedef struct LoopOut LoopOut;

enum {
	LOOP_AUTO,
	LOOP_IO_URING,
	LOOP_EPOLL,
};

/* why a connection ended */
enum {
	LOOP_END_HANGUP, /* the peer closed it, or an empty message */
	LOOP_END_ERROR,	 /* the socket failed, errno in @error */
};

typedef struct LoopMessage {
	const uint8_t *data; /* 8-byte aligned, valid during the callback */
	size_t size;	     /* > 0 */
	int *fds;	     /* the callback owns them: it takes an fd and puts -EBADF in its place; */
	size_t n_fds;	     /* what is left after the callback goes to the Closer for conn->owner_uid */
	bool truncated;	     /* longer than WIRE_MESSAGE_MAX */
	bool fds_lost;	     /* MSG_CTRUNC: we ran out of fds */
} LoopMessage;

struct LoopListener {
	int fd; /* borrowed, a listening SOCK_SEQPACKET socket */
	/* @fd is non-blocking and close-on-exec and the callback's own; -EMFILE and -ENFILE come as @fd < 0 */
	void (*on_accept)(LoopListener *listener, int fd);
	Loop *loop;
	ListLink link;
	void *engine; /* of the engine's own use */
};

struct LoopConn {
	int fd;		    /* owned from loop_conn_link() on; closed by the Closer on unlink */
	uint32_t owner_uid; /* whose closes these are */
	void (*on_message)(LoopConn *conn, LoopMessage *message);
	void (*on_end)(LoopConn *conn, int reason, int error); /* once; the callee unlinks the source */
	Loop *loop;
	ListLink link;
	List out;	     /* LoopOut, oldest first */
	size_t out_messages; /* messages queued and not yet handed to the kernel */
	size_t out_bytes;
	ListLink dirty;	  /* while it has something that may be sent */
	bool sending;	  /* the engine works on the oldest, or waits for room */
	bool ended;	  /* on_end was called */
	uint8_t patience; /* see loop_conn_tries_more() */
	uint8_t skips;
	void *engine;
};

/* readiness of any fd: pidfd, signalfd, eventfd; level-triggered, POLLIN */
struct LoopPoll {
	int fd; /* borrowed; unlink before closing it */
	void (*on_ready)(LoopPoll *poll, uint32_t events);
	Loop *loop;
	ListLink link;
	void *engine;
};

struct LoopTimer {
	uint64_t at_ns; /* CLOCK_MONOTONIC; 0 while not armed */
	void (*on_time)(LoopTimer *timer);
	Loop *loop;
	ListLink link;	  /* while it has expired and on_time is about to be called */
	LoopTimer *child; /* a pairing heap, earliest first */
	LoopTimer *next;
	LoopTimer *prev; /* the elder sibling, or the parent */
};

/*
 * Makes a loop. @kind LOOP_AUTO tries io_uring and falls back to epoll; LOOP_IO_URING and LOOP_EPOLL insist.
 * Borrows @closer. Returns 0 or -errno (io_uring refused while insisted on). A ring belongs to the thread that made
 * it: loop_new() and loop_run() are called by the same one, with no fork in between.
 */
int loop_new(Loop **ret, int kind, Closer *closer);
/* unlinks what is still linked */
Loop *loop_free(Loop *loop);
/* "io_uring" or "epoll", and in a sentence why that one runs (with the flags of the ring, or why there is none) */
const char *loop_name(const Loop *loop);
const char *loop_reason(const Loop *loop);

/* Runs until loop_quit(), then sends what is queued without waiting. Returns 0 or -errno when the engine broke. */
int loop_run(Loop *loop);
void loop_quit(Loop *loop);
/* called at the end of every turn, before what is queued is sent */
void loop_set_turn(Loop *loop, void (*on_turn)(void *userdata), void *userdata);
/* CLOCK_MONOTONIC in nanoseconds, once for all of a turn */
uint64_t loop_now(Loop *loop);

/* Linking returns 0 or -errno; unlinking what is not linked does nothing. */
int loop_listener_link(Loop *loop, LoopListener *listener);
void loop_listener_unlink(LoopListener *listener);
/* consumes @conn->fd, a non-blocking socket, also when it fails */
int loop_conn_link(Loop *loop, LoopConn *conn);
void loop_conn_unlink(LoopConn *conn);
/*
 * @to, which is not linked, takes the place of @from with all that is queued: its callbacks are called from here on.
 * Within a callback of @from's too.
 */
void loop_conn_move(LoopConn *to, LoopConn *from);
int loop_poll_link(Loop *loop, LoopPoll *poll);
void loop_poll_unlink(LoopPoll *poll);
/* arms or re-arms; links the timer when it is not; CLOCK_MONOTONIC; at_ns in the past fires in the next turn */
void loop_timer_set(Loop *loop, LoopTimer *timer, uint64_t at_ns);
void loop_timer_unlink(LoopTimer *timer);

/*
 * Sends a message of 1 to WIRE_MESSAGE_MAX bytes and at most WIRE_FDS_ROOM fds: at once when nothing is queued before
 * it and the peer has room, else with the end of a turn, from a copy of @data. With @owned the fds are consumed, also
 * on failure: they are closed (Closer) after the send; else they are borrowed, and duplicated if they must wait. A
 * send that fails ends the connection in the next turn. On a connection that has ended the message is dropped.
 * Returns 0 or -ENOMEM or -EMFILE, or -EINVAL for what is no message.
 */
int loop_conn_send(LoopConn *conn, const void *data, size_t size, int *fds, size_t n_fds, bool owned);
