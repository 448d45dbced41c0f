/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The engine on io_uring. Everything is asked of the kernel in the one io_uring_enter() that also waits: what is to
 * be armed or cancelled is noted in its Source and becomes an SQE there.
 *
 * Requests name their Source, which therefore lives until the last CQE of each: unlinking clears its back pointer
 * and cancels. An armed request also holds the socket, so that closing alone would not end it; and a send that the
 * kernel has not begun looks its fd up by number when it does: so the fd of a connection goes to the Closer after
 * the last CQE, never before, lest the number means another socket by then. The peer has seen the shutdown() by then.
 *
 * A connection receives by a one-shot poll, then recvmsg(), again only where more is likely, then the poll again,
 * which looks before it waits. A multishot recvmsg into a ring of buffers would save a system call, but its buffers go
 * round, and a message in memory that is cold costs more; and its fds would come unasked. Replies are sent by the loop
 * itself; what has to wait for room goes through the ring.
 */

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "loop-engine.h"

#define NOMEM_WAITS 2
#define NOMEM_WAIT_NS 250000000
#define FREE_TURNS 100
#define FREE_WAIT_NS 10000000

/* the requests of a source, at most one of each at a time; the low bits of user_data */
enum {
	REQUEST_ACCEPT,
	REQUEST_POLL,
	REQUEST_ROOM,
	REQUEST_SEND,
	_REQUEST_N,
};

#define REQUEST_MASK 7U
#define BIT(_request) (1U << (_request))

typedef struct Engine Engine;
typedef struct Source Source;

struct Source {
	Engine *engine;
	LoopListener *listener; /* all three NULL once it is unlinked */
	LoopConn *conn;
	LoopPoll *poll;
	int fd;
	uint32_t uid;
	uint32_t want;	    /* to be armed */
	uint32_t cancel;    /* to be cancelled */
	uint32_t in_flight; /* no last CQE yet */
	bool owns_fd;
	bool reset;	       /* ECONNRESET was read, what the peer sent before follows */
	int error;	       /* a send failed */
	LoopOut *orphan;       /* being sent when the connection was unlinked */
	LoopTimer pause;       /* of a listener that ran out of fds */
	ListLink link;	       /* in Engine.sources or Engine.graveyard */
	ListLink changed_link; /* in Engine.changed while @want or @cancel is set */
	ListLink ready_link;   /* in Engine.ready while there may be something to receive */
};

struct Engine {
	Loop *loop;
	struct io_uring ring;
	List sources;
	List graveyard; /* unlinked with nothing in flight: freed when no callback runs */
	List changed;
	List ready;
};

/* the ring */

static const struct {
	unsigned flags;
	const char *text;
} ring_flags[] = {
	/* Linux 6.1 */
	{ IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_SUBMIT_ALL,
	  "SINGLE_ISSUER DEFER_TASKRUN TASKRUN_FLAG SUBMIT_ALL" },
	/* Linux 6.0 */
	{ IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_SUBMIT_ALL,
	  "SINGLE_ISSUER COOP_TASKRUN TASKRUN_FLAG SUBMIT_ALL" },
	/* Linux 5.14 */
	{ 0, "no flags" },
};

static const struct {
	unsigned sq;
	unsigned cq;
} ring_sizes[] = { { 256, 4096 }, { 256, 1024 }, { 64, 512 } };

static void sleep_ns(long ns) {
	struct timespec ts = { .tv_nsec = ns };

	(void)nanosleep(&ts, NULL);
}

/* the first flags that this kernel knows; *@flags is where to begin and what was taken */
static int ring_init(struct io_uring *ring, size_t size, size_t *flags) {
	int r = -EINVAL;

	for (; *flags < sizeof(ring_flags) / sizeof(ring_flags[0]); (*flags)++) {
		struct io_uring_params params = {
			.flags = ring_flags[*flags].flags | IORING_SETUP_CLAMP | IORING_SETUP_CQSIZE,
			.cq_entries = ring_sizes[size].cq,
		};

		r = io_uring_queue_init_params(ring_sizes[size].sq, ring, &params);
		if (r != -EINVAL)
			return r;
	}
	return r;
}

static int engine_init_ring(Engine *engine) {
	Loop *loop = engine->loop;
	size_t flags = 0, size = 0;
	int waits = 0, r;

	for (;;) {
		r = ring_init(&engine->ring, size, &flags);
		if (r != -ENOMEM)
			break;
		/* locked memory of a ring that has gone is given back some time later */
		if (waits++ < NOMEM_WAITS)
			sleep_ns(NOMEM_WAIT_NS);
		else if (++size == sizeof(ring_sizes) / sizeof(ring_sizes[0]))
			break;
	}
	if (r < 0) {
		(void)snprintf(loop->reason, sizeof(loop->reason), "io_uring_setup: %s", strerror(-r));
		return r;
	}
	if (!(engine->ring.features & IORING_FEAT_EXT_ARG) || !(engine->ring.features & IORING_FEAT_NODROP)) {
		io_uring_queue_exit(&engine->ring);
		(void)snprintf(loop->reason, sizeof(loop->reason),
			       "io_uring_setup: the kernel lacks EXT_ARG or NODROP");
		return -EOPNOTSUPP;
	}
	/* saves looking up the ring; Linux 5.18 */
	(void)io_uring_register_ring_fd(&engine->ring);
	(void)snprintf(loop->reason, sizeof(loop->reason), "%s, %u/%u entries", ring_flags[flags].text,
		       ring_sizes[size].sq, ring_sizes[size].cq);
	return 0;
}

static int uring_new(Loop *loop) {
	Engine *engine = calloc(1, sizeof(*engine));
	int r;

	if (!engine) {
		(void)snprintf(loop->reason, sizeof(loop->reason), "out of memory");
		return -ENOMEM;
	}
	engine->loop = loop;
	list_init(&engine->sources);
	list_init(&engine->graveyard);
	list_init(&engine->changed);
	list_init(&engine->ready);
	r = engine_init_ring(engine);
	if (r) {
		free(engine);
		return r;
	}
	loop->state = engine;
	return 0;
}

static struct io_uring_sqe *engine_sqe(Engine *engine) {
	struct io_uring_sqe *sqe = io_uring_get_sqe(&engine->ring);

	if (sqe)
		return sqe;
	(void)io_uring_submit(&engine->ring);
	return io_uring_get_sqe(&engine->ring);
}

/* sources */

static int source_new(Source **ret, Loop *loop, int fd) {
	Engine *engine = loop->state;
	Source *source = malloc(sizeof(*source));

	if (!source)
		return -ENOMEM;
	*source = (Source){
		.engine = engine,
		.fd = fd,
		.uid = LOOP_NO_UID,
	};
	list_append(&engine->sources, &source->link);
	*ret = source;
	return 0;
}

static void source_change(Source *source) {
	if (!list_is_linked(&source->changed_link))
		list_append(&source->engine->changed, &source->changed_link);
}

static void source_arm(Source *source, unsigned request) {
	if (source->in_flight & BIT(request))
		return;
	source->want |= BIT(request);
	source_change(source);
}

static void source_cancel(Source *source, uint32_t requests) {
	source->want &= ~requests;
	source->cancel |= source->in_flight & requests;
	if (source->cancel)
		source_change(source);
}

static void source_ready(Source *source) {
	if (!list_is_linked(&source->ready_link))
		list_append(&source->engine->ready, &source->ready_link);
}

static Source *source_free(Source *source) {
	list_remove(&source->link);
	list_remove(&source->changed_link);
	list_remove(&source->ready_link);
	loop_out_free(source->orphan);
	if (source->owns_fd)
		closer_close(source->engine->loop->closer, source->uid, source->fd);
	free(source);
	return NULL;
}

static bool source_is_unlinked(const Source *source) {
	return !source->listener && !source->conn && !source->poll;
}

/* No callback finds it any more. It is freed with the last CQE, or before the next wait when there is none to come. */
static void source_unlink(Source *source) {
	source->listener = NULL;
	source->conn = NULL;
	source->poll = NULL;
	loop_timer_unlink(&source->pause);
	list_remove(&source->ready_link);
	/* a send does not wait for anything, its CQE comes by itself */
	source_cancel(source, ~BIT(REQUEST_SEND));
	if (source->in_flight)
		return;
	list_remove(&source->link);
	list_append(&source->engine->graveyard, &source->link);
}

static void engine_bury(Engine *engine) {
	for (ListLink *link; (link = list_first(&engine->graveyard));)
		source_free(container_of(link, Source, link));
}

static void on_pause_over(LoopTimer *timer) {
	source_arm(container_of(timer, Source, pause), REQUEST_ACCEPT);
}

static int uring_listener_link(LoopListener *listener) {
	Source *source;
	int r;

	r = source_new(&source, listener->loop, listener->fd);
	if (r)
		return r;
	source->listener = listener;
	source->pause.on_time = on_pause_over;
	listener->engine = source;
	source_arm(source, REQUEST_ACCEPT);
	return 0;
}

static void uring_listener_unlink(LoopListener *listener) {
	source_unlink(listener->engine);
}

static int uring_poll_link(LoopPoll *poll) {
	Source *source;
	int r;

	r = source_new(&source, poll->loop, poll->fd);
	if (r)
		return r;
	source->poll = poll;
	poll->engine = source;
	source_arm(source, REQUEST_POLL);
	return 0;
}

static void uring_poll_unlink(LoopPoll *poll) {
	source_unlink(poll->engine);
}

static int uring_conn_link(LoopConn *conn) {
	Source *source;
	int r;

	r = source_new(&source, conn->loop, conn->fd);
	if (r)
		return r;
	source->conn = conn;
	source->uid = conn->owner_uid;
	source->owns_fd = true;
	conn->engine = source;
	source_arm(source, REQUEST_POLL);
	return 0;
}

static void uring_conn_unlink(LoopConn *conn) {
	Source *source = conn->engine;

	if (source->in_flight & BIT(REQUEST_SEND))
		source->orphan = loop_conn_take_out(conn);
	(void)steal_fd(&conn->fd);
	source_unlink(source);
}

static void uring_conn_moved(LoopConn *conn) {
	Source *source = conn->engine;

	source->conn = conn;
}

/* requests */

static uint64_t source_user_data(Source *source, unsigned request) {
	return (uint64_t)(uintptr_t)source | request;
}

static void source_prepare(Source *source, unsigned request, struct io_uring_sqe *sqe) {
	switch (request) {
	case REQUEST_ACCEPT:
		/*
		 * Not an accept request: that waits exclusively, and the ring of a broker that was killed, whose
		 * listening socket this may be, would swallow our wake-up as long as it is not torn down.
		 */
		io_uring_prep_poll_add(sqe, source->fd, POLLIN);
		break;
	case REQUEST_POLL:
		io_uring_prep_poll_add(sqe, source->fd, source->conn ? POLLIN | POLLRDHUP : POLLIN);
		break;
	case REQUEST_ROOM:
		io_uring_prep_poll_add(sqe, source->fd, POLLOUT);
		break;
	case REQUEST_SEND:
		/* never waits in the kernel: with MSG_DONTWAIT it is done, or not, within io_uring_enter() */
		io_uring_prep_sendmsg(sqe, source->fd, &loop_conn_out(source->conn)->header,
				      MSG_NOSIGNAL | MSG_DONTWAIT);
		break;
	}
	io_uring_sqe_set_data64(sqe, source_user_data(source, request));
	source->in_flight |= BIT(request);
}

/* turns what @source wants into SQEs; false when there is no room for more */
static bool source_request(Source *source) {
	Engine *engine = source->engine;

	for (unsigned request = 0; request < _REQUEST_N; request++) {
		struct io_uring_sqe *sqe;

		if (!((source->cancel | source->want) & BIT(request)))
			continue;
		if (source->cancel & BIT(request)) {
			sqe = engine_sqe(engine);
			if (!sqe)
				return false;
			io_uring_prep_cancel64(sqe, source_user_data(source, request), 0);
			io_uring_sqe_set_data64(sqe, 0);
			source->cancel &= ~BIT(request);
		}
		if (!(source->want & BIT(request)) || source->in_flight & BIT(request))
			continue;
		sqe = engine_sqe(engine);
		if (!sqe)
			return false;
		source_prepare(source, request, sqe);
		source->want &= ~BIT(request);
	}
	return true;
}

/* Prepares the sends first: a reply does not wait for what else is asked. */
static void uring_flush(Loop *loop) {
	Engine *engine = loop->state;

	engine_bury(engine);
	list_for_each (link, &loop->dirty) {
		LoopConn *conn = container_of(link, LoopConn, dirty);
		struct io_uring_sqe *sqe = engine_sqe(engine);

		if (!sqe)
			return;
		list_remove(link);
		conn->sending = true;
		source_prepare(conn->engine, REQUEST_SEND, sqe);
	}
	for (ListLink *link; (link = list_first(&engine->changed));) {
		Source *source = container_of(link, Source, changed_link);

		if (!source_request(source))
			return;
		list_remove(link);
	}
}

static void uring_submit(Loop *loop) {
	Engine *engine = loop->state;

	(void)io_uring_submit_and_get_events(&engine->ring);
}

static int engine_enter(Engine *engine, int64_t timeout_ns) {
	struct __kernel_timespec ts;
	struct io_uring_cqe *cqe;
	int r;

	if (timeout_ns == 0) {
		r = io_uring_submit_and_get_events(&engine->ring);
	} else if (timeout_ns < 0) {
		r = io_uring_submit_and_wait(&engine->ring, 1);
	} else {
		ts.tv_sec = timeout_ns / 1000000000;
		ts.tv_nsec = timeout_ns % 1000000000;
		r = io_uring_submit_and_wait_timeout(&engine->ring, &cqe, 1, &ts, NULL);
	}
	/* EBUSY and EAGAIN: the kernel wants CQEs to be taken first */
	return r >= 0 || r == -ETIME || r == -EINTR || r == -EBUSY || r == -EAGAIN ? 0 : r;
}

static int uring_wait(Loop *loop, int64_t timeout_ns) {
	Engine *engine = loop->state;

	if (!list_is_empty(&engine->ready) || !list_is_empty(&engine->changed))
		timeout_ns = 0;
	return engine_enter(engine, timeout_ns);
}

/* with DEFER_TASKRUN or COOP_TASKRUN the kernel flags what it has for us; without, it is in the queue */
static bool uring_look(Loop *loop, bool first) {
	Engine *engine = loop->state;

	if (first)
		(void)io_uring_submit(&engine->ring);
	return !list_is_empty(&engine->ready) || !list_is_empty(&engine->changed) || io_uring_cq_ready(&engine->ring) ||
	       __atomic_load_n(engine->ring.sq.kflags, __ATOMIC_ACQUIRE) & IORING_SQ_TASKRUN;
}

/* completions */

static void source_accept(Source *source, int result) {
	if (!source->listener || result < 0)
		return;
	if (!loop_listener_accept(&source->listener, source->fd) && source->listener)
		source_arm(source, REQUEST_ACCEPT);
	else if (source->listener)
		loop_timer_set(source->engine->loop, &source->pause, loop_now(source->engine->loop) + LOOP_RETRY_NS);
}

static void source_polled(Source *source, int result) {
	if (source->conn) {
		source_ready(source);
		return;
	}
	if (!source->poll)
		return;
	if (result < 0)
		return;
	/* one-shot and asked again: so it is level-triggered */
	source_arm(source, REQUEST_POLL);
	source->poll->on_ready(source->poll, (uint32_t)result);
}

static void source_has_room(Source *source) {
	if (!source->conn)
		return;
	source->conn->sending = false;
	loop_conn_wake(source->conn);
}

static void source_sent(Source *source, int result) {
	LoopConn *conn = source->conn;

	if (!conn) {
		source->orphan = loop_out_free(source->orphan);
		return;
	}
	if (result == -EAGAIN) {
		source_arm(source, REQUEST_ROOM);
	} else if (result >= 0 || result == -EINTR) {
		if (result >= 0)
			loop_out_free(loop_conn_take_out(conn));
		conn->sending = false;
		loop_conn_wake(conn);
	} else if (!loop_conn_starve(conn, -result)) {
		source->error = -result;
		source_ready(source);
	}
}

static void engine_complete(const struct io_uring_cqe *cqe) {
	unsigned request = (unsigned)(cqe->user_data & REQUEST_MASK);
	Source *source = (Source *)(uintptr_t)(cqe->user_data & ~(uint64_t)REQUEST_MASK);
	bool more = cqe->flags & IORING_CQE_F_MORE;
	bool unlinked;

	if (!source)
		return;
	unlinked = source_is_unlinked(source);
	if (!more) {
		source->in_flight &= ~BIT(request);
		source->cancel &= ~BIT(request);
	}
	switch (request) {
	case REQUEST_ACCEPT:
		source_accept(source, cqe->res);
		break;
	case REQUEST_POLL:
		source_polled(source, cqe->res);
		break;
	case REQUEST_ROOM:
		source_has_room(source);
		break;
	case REQUEST_SEND:
		source_sent(source, cqe->res);
		break;
	}
	/* one that was unlinked in a callback of this very CQE is in the graveyard, or has a CQE to come */
	if (unlinked && !source->in_flight)
		source_free(source);
}

/* those that are there at the start: new ones wait for the next turn */
static void engine_complete_all(Engine *engine) {
	unsigned n = io_uring_cq_ready(&engine->ring);

	for (unsigned i = 0; i < n; i++) {
		struct io_uring_cqe *cqe, copy;

		if (io_uring_peek_cqe(&engine->ring, &cqe))
			return;
		copy = *cqe;
		io_uring_cqe_seen(&engine->ring, cqe);
		engine_complete(&copy);
	}
}

/* receiving */

static void source_end(Source *source, int reason, int error) {
	source_cancel(source, ~BIT(REQUEST_SEND));
	list_remove(&source->ready_link);
	loop_conn_end(source->conn, reason, error);
}

/* takes one message, the @n-th of this turn; false when there is no more for this turn */
static bool source_receive(Source *source, int n) {
	LoopMessage message;
	int r;

	if (n && !loop_conn_tries_more(source->conn)) {
		source_arm(source, REQUEST_POLL);
		return false;
	}
	r = loop_receive(source->engine->loop, source->fd, source->uid, &message);
	if (n)
		loop_conn_tried_more(source->conn, r != -EAGAIN);
	if (!r) {
		loop_conn_deliver(source->conn, &message);
		return true;
	}
	if (r == -ECONNRESET && !source->reset) {
		source->reset = true;
		return true;
	}
	if (r == -EAGAIN)
		source_arm(source, REQUEST_POLL);
	else if (r == LOOP_RECEIVE_HANGUP)
		source_end(source, LOOP_END_HANGUP, 0);
	else
		source_end(source, LOOP_END_ERROR, -r);
	return false;
}

static void source_serve(Source *source) {
	if (source->conn->ended)
		return;
	if (source->error) {
		source_end(source, LOOP_END_ERROR, source->error);
		return;
	}
	for (int n = 0; n < LOOP_MESSAGES_PER_TURN; n++) {
		/* unlinked, but not freed while callbacks run; or a send's failure found it while it waits */
		if (!source_receive(source, n) || !source->conn || source->conn->ended)
			return;
	}
	source_ready(source);
}

static void uring_dispatch(Loop *loop) {
	Engine *engine = loop->state;
	List ready;

	engine_complete_all(engine);
	/* those that become ready again meanwhile are served next turn */
	list_init(&ready);
	for (ListLink *link; (link = list_first(&engine->ready));) {
		list_remove(link);
		list_append(&ready, link);
	}
	for (ListLink *link; (link = list_first(&ready));) {
		list_remove(link);
		source_serve(container_of(link, Source, ready_link));
	}
}

/* Waits for the CQEs of what was unlinked; a kernel that keeps one back loses us a little memory, not an fd. */
static void uring_free(Loop *loop) {
	Engine *engine = loop->state;

	for (int i = 0; i < FREE_TURNS && !list_is_empty(&engine->sources); i++) {
		uring_flush(loop);
		if (engine_enter(engine, FREE_WAIT_NS))
			break;
		engine_complete_all(engine);
	}
	io_uring_queue_exit(&engine->ring);
	for (ListLink *link; (link = list_first(&engine->sources));)
		source_free(container_of(link, Source, link));
	engine_bury(engine);
	free(engine);
}

const LoopEngine loop_engine_uring = {
	.name = "io_uring",
	.new = uring_new,
	.free = uring_free,
	.listener_link = uring_listener_link,
	.listener_unlink = uring_listener_unlink,
	.conn_link = uring_conn_link,
	.conn_unlink = uring_conn_unlink,
	.conn_moved = uring_conn_moved,
	.poll_link = uring_poll_link,
	.poll_unlink = uring_poll_unlink,
	.flush = uring_flush,
	.submit = uring_submit,
	.wait = uring_wait,
	.look = uring_look,
	.dispatch = uring_dispatch,
};
