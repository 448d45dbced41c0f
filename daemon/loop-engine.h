/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * LoopEngine: what differs between io_uring and epoll, behind loop.h; private to loop*.c.
 *
 * loop.c keeps the lists of sources, the timers, the queues of messages and the receive buffer; an engine waits,
 * moves messages and tells. A turn is: flush (begin to send what is queued), wait, callbacks of the engine, timers,
 * on_turn. An engine never calls a callback from flush(): a send that fails there ends its connection next turn, so
 * that on_turn sees the end in the same turn.
 *
 * Each linked source has an object of the engine's own on the heap (source->engine), because the kernel may still
 * name it after the source is gone.
 */

#include <sys/socket.h>
#include <sys/uio.h>

#include "loop.h"
#include "wire/fd.h"

#define LOOP_REASON_SIZE 192
/* after EMFILE on accept, and after a shortage of the kernel's on send */
#define LOOP_RETRY_NS UINT64_C(50000000)
/* of whom nothing is known: closes that no uid pays for */
#define LOOP_NO_UID UINT32_MAX

struct LoopEngine {
	const char *name;
	/* Sets @loop->state and the reason. Returns 0 or -errno, with the reason set to why there is none. */
	int (*new)(Loop *loop);
	void (*free)(Loop *loop);
	int (*listener_link)(LoopListener *listener);
	void (*listener_unlink)(LoopListener *listener);
	int (*conn_link)(LoopConn *conn);
	/* consumes @conn->fd, which was shut down; the message that the kernel still works on stays with the engine */
	void (*conn_unlink)(LoopConn *conn);
	/* the object is another one now, @conn->engine is the same */
	void (*conn_moved)(LoopConn *conn);
	int (*poll_link)(LoopPoll *poll);
	void (*poll_unlink)(LoopPoll *poll);
	/* begins to send what the connections of @loop->dirty have; what cannot be begun stays there */
	void (*flush)(Loop *loop);
	/* hands to the kernel what flush() has prepared, without waiting */
	void (*submit)(Loop *loop);
	/* Submits and waits, at most for @timeout_ns (< 0: for ever). Returns 0, also when interrupted, or -errno. */
	int (*wait)(Loop *loop, int64_t timeout_ns);
	/* submits, and tells whether wait() would find something at once; without a system call where that can be */
	bool (*look)(Loop *loop, bool first);
	/* runs the callbacks of what wait() found */
	void (*dispatch)(Loop *loop);
};

extern const LoopEngine loop_engine_uring;
extern const LoopEngine loop_engine_epoll;

struct LoopOut {
	ListLink link;
	Loop *loop;
	uint32_t uid; /* whose closes the fds are */
	struct msghdr header;
	struct iovec iov;
	size_t size;
	size_t n_fds;
	int *fds;	/* these follow in the same allocation: fds, */
	uint8_t data[]; /* after the control data and the payload */
};

struct Loop {
	const LoopEngine *engine;
	void *state; /* of the engine */
	Closer *closer;
	char reason[LOOP_REASON_SIZE];
	bool quit;
	uint64_t now_ns;
	void (*on_turn)(void *userdata);
	void *userdata;
	Spin *spin;
	void (*on_spin)(void *userdata);
	void *spin_userdata;
	List listeners;
	List conns;
	List polls;
	List dirty;   /* LoopConn.dirty: may send */
	List starved; /* LoopConn.dirty: the kernel had no room for fds or memory; tried again by the timer */
	LoopTimer starved_timer;
	LoopTimer *timers; /* the heap's root */
	List expired;	   /* LoopTimer.link */
	uint8_t *buffer;   /* WIRE_MESSAGE_MAX bytes to receive into */
	int fds[WIRE_FDS_ROOM];
};

enum {
	_LOOP_RECEIVE_SUCCESS,
	LOOP_RECEIVE_HANGUP,
};

/* Takes one message without blocking. Returns 0, LOOP_RECEIVE_HANGUP, or -errno. @ret is valid until the next call. */
int loop_receive(Loop *loop, int fd, uint32_t uid, LoopMessage *ret);
/* Calls on_message and closes the fds that it left. @conn may be gone afterwards. */
void loop_conn_deliver(LoopConn *conn, LoopMessage *message);
/*
 * A message was taken: look for another one in this turn? Most peers wait for the answer first, so whoever looked in
 * vain looks ever more rarely, up to once in 64 messages; readiness is level-triggered, the next turn finds the rest.
 */
static inline bool loop_conn_tries_more(LoopConn *conn) {
	if (!conn->skips)
		return true;
	conn->skips--;
	return false;
}
static inline void loop_conn_tried_more(LoopConn *conn, bool found) {
	conn->patience = found ? 0 : conn->patience < 63 ? (uint8_t)(conn->patience * 2 + 1) : 63;
	conn->skips = conn->patience;
}
/*
 * Accepts what there is, a bounded number, for the listener that @at points to until a callback unlinks it. Returns
 * true when fds ran out: then it is time for a pause.
 */
bool loop_listener_accept(LoopListener **at, int fd);
/* Calls on_end, once. @conn may be gone afterwards. */
void loop_conn_end(LoopConn *conn, int reason, int error);
/* Closes what a message left behind. */
void loop_close_fds(Loop *loop, uint32_t uid, int *fds, size_t n_fds);

LoopOut *loop_conn_out(LoopConn *conn);
/* takes the oldest message off the queue, it was sent or the connection is gone */
LoopOut *loop_conn_take_out(LoopConn *conn);
LoopOut *loop_out_free(LoopOut *out);
/* there may be something to send */
void loop_conn_wake(LoopConn *conn);
/* Is @error (positive) of a send a shortage that passes? Then the message is tried again some time later. */
bool loop_conn_starve(LoopConn *conn, int error);
