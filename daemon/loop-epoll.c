/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>

#include "loop-engine.h"

#define EPOLL_EVENTS 256
#define MS_NS INT64_C(1000000)

typedef struct Engine Engine;
typedef struct Source Source;

struct Source {
	Engine *engine;
	int fd;
	uint32_t events;	/* what epoll watches for */
	LoopListener *listener; /* all three NULL once it is unlinked */
	LoopConn *conn;
	LoopPoll *poll;
	bool reset;	 /* ECONNRESET was read, what the peer sent before follows */
	int error;	 /* a send failed */
	LoopTimer pause; /* of a listener that ran out of fds */
	ListLink link;	 /* in Engine.failed or Engine.graveyard */
};

struct Engine {
	Loop *loop;
	int fd;
	List failed;	/* a send failed in flush() */
	List graveyard; /* unlinked while events that name them may be at hand */
	int n_events;
	struct epoll_event events[EPOLL_EVENTS];
};

static int epoll_new(Loop *loop) {
	Engine *engine = calloc(1, sizeof(*engine));

	if (!engine)
		return -ENOMEM;
	engine->loop = loop;
	list_init(&engine->failed);
	list_init(&engine->graveyard);
	engine->fd = epoll_create1(EPOLL_CLOEXEC);
	if (engine->fd < 0) {
		int r = -errno;

		free(engine);
		return r;
	}
	loop->state = engine;
	return 0;
}

static void engine_bury(Engine *engine) {
	for (ListLink *link; (link = list_first(&engine->graveyard));) {
		list_remove(link);
		free(container_of(link, Source, link));
	}
}

static void epoll_free(Loop *loop) {
	Engine *engine = loop->state;

	engine_bury(engine);
	(void)close(engine->fd);
	free(engine);
}

static int source_new(Source **ret, Loop *loop, int fd, uint32_t events) {
	Engine *engine = loop->state;
	Source *source = calloc(1, sizeof(*source));
	struct epoll_event event = { .events = events, .data.ptr = source };

	if (!source)
		return -ENOMEM;
	source->engine = engine;
	source->fd = fd;
	source->events = events;
	if (epoll_ctl(engine->fd, EPOLL_CTL_ADD, fd, &event) < 0) {
		int r = -errno;

		free(source);
		return r;
	}
	*ret = source;
	return 0;
}

/* stops watching; what has been found already finds nobody */
static void source_unwatch(Source *source) {
	if (source->fd >= 0)
		(void)epoll_ctl(source->engine->fd, EPOLL_CTL_DEL, source->fd, NULL);
	source->fd = -EBADF;
}

static void source_unlink(Source *source) {
	source_unwatch(source);
	source->listener = NULL;
	source->conn = NULL;
	source->poll = NULL;
	loop_timer_unlink(&source->pause);
	list_remove(&source->link);
	list_append(&source->engine->graveyard, &source->link);
}

static void source_watch(Source *source, uint32_t events) {
	struct epoll_event event = { .events = events, .data.ptr = source };

	if (source->events == events || source->fd < 0)
		return;
	/* changing what is watched allocates nothing */
	(void)epoll_ctl(source->engine->fd, EPOLL_CTL_MOD, source->fd, &event);
	source->events = events;
}

static void on_pause_over(LoopTimer *timer) {
	source_watch(container_of(timer, Source, pause), EPOLLIN);
}

static int epoll_listener_link(LoopListener *listener) {
	Source *source;
	int r;

	r = source_new(&source, listener->loop, listener->fd, EPOLLIN);
	if (r)
		return r;
	source->listener = listener;
	source->pause.on_time = on_pause_over;
	listener->engine = source;
	return 0;
}

static void epoll_listener_unlink(LoopListener *listener) {
	source_unlink(listener->engine);
}

static int epoll_conn_link(LoopConn *conn) {
	Source *source;
	int r;

	r = source_new(&source, conn->loop, conn->fd, EPOLLIN | EPOLLRDHUP);
	if (r)
		return r;
	source->conn = conn;
	conn->engine = source;
	return 0;
}

static void epoll_conn_unlink(LoopConn *conn) {
	source_unlink(conn->engine);
	closer_close(conn->loop->closer, conn->owner_uid, steal_fd(&conn->fd));
}

static void epoll_conn_moved(LoopConn *conn) {
	Source *source = conn->engine;

	source->conn = conn;
}

static int epoll_poll_link(LoopPoll *poll) {
	Source *source;
	int r;

	r = source_new(&source, poll->loop, poll->fd, EPOLLIN);
	if (r)
		return r;
	source->poll = poll;
	poll->engine = source;
	return 0;
}

static void epoll_poll_unlink(LoopPoll *poll) {
	source_unlink(poll->engine);
}

/* Sends what @conn has, a bounded number of messages. */
static void conn_flush(LoopConn *conn) {
	Source *source = conn->engine;

	for (int n = 0; n < LOOP_MESSAGES_PER_TURN; n++) {
		LoopOut *out = loop_conn_out(conn);

		if (!out) {
			list_remove(&conn->dirty);
			return;
		}
		if (sendmsg(conn->fd, &out->header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
			loop_out_free(loop_conn_take_out(conn));
			continue;
		}
		if (errno == EINTR)
			continue;
		if (loop_conn_starve(conn, errno))
			return;
		list_remove(&conn->dirty);
		conn->sending = true;
		if (errno == EAGAIN) {
			source_watch(source, source->events | EPOLLOUT);
			return;
		}
		source->error = errno;
		list_append(&source->engine->failed, &source->link);
		return;
	}
	if (!loop_conn_out(conn))
		list_remove(&conn->dirty);
}

static void epoll_flush(Loop *loop) {
	list_for_each (link, &loop->dirty)
		conn_flush(container_of(link, LoopConn, dirty));
}

static void epoll_submit(Loop *loop) {
	(void)loop;
}

static int epoll_engine_wait(Loop *loop, int64_t timeout_ns) {
	Engine *engine = loop->state;
	int timeout = -1;

	if (!list_is_empty(&engine->failed))
		timeout = 0;
	else if (timeout_ns >= 0)
		timeout = timeout_ns / MS_NS < INT32_MAX ? (int)((timeout_ns + MS_NS - 1) / MS_NS) : INT32_MAX;
	engine->n_events = epoll_wait(engine->fd, engine->events, EPOLL_EVENTS, timeout);
	if (engine->n_events < 0) {
		engine->n_events = 0;
		return errno == EINTR ? 0 : -errno;
	}
	return 0;
}

static bool epoll_look(Loop *loop, bool first) {
	Engine *engine = loop->state;

	(void)first;
	return !list_is_empty(&engine->failed) || epoll_wait(engine->fd, engine->events, 1, 0) > 0;
}

static void listener_pause(Source *source) {
	source_watch(source, 0);
	loop_timer_set(source->engine->loop, &source->pause, loop_now(source->engine->loop) + LOOP_RETRY_NS);
}

static void listener_serve(Source *source) {
	if (loop_listener_accept(&source->listener, source->fd) && source->listener)
		listener_pause(source);
}

static void conn_end(Source *source, int reason, int error) {
	/* a hang-up would be found again and again until the connection is unlinked */
	source_unwatch(source);
	list_remove(&source->link);
	loop_conn_end(source->conn, reason, error);
}

static void conn_receive(Source *source) {
	Loop *loop = source->engine->loop;

	for (int n = 0; n < LOOP_MESSAGES_PER_TURN && source->conn && !source->conn->ended; n++) {
		LoopMessage message;
		int r;

		if (n && !loop_conn_tries_more(source->conn))
			return;
		r = loop_receive(loop, source->fd, source->conn->owner_uid, &message);
		if (n)
			loop_conn_tried_more(source->conn, r != -EAGAIN);
		if (!r) {
			loop_conn_deliver(source->conn, &message);
		} else if (r == -EAGAIN) {
			return;
		} else if (r == LOOP_RECEIVE_HANGUP) {
			conn_end(source, LOOP_END_HANGUP, 0);
			return;
		} else if (r == -ECONNRESET && !source->reset) {
			source->reset = true;
		} else {
			conn_end(source, LOOP_END_ERROR, -r);
			return;
		}
	}
}

static void conn_serve(Source *source, uint32_t events) {
	if (source->error) {
		conn_end(source, LOOP_END_ERROR, source->error);
		return;
	}
	if (events & EPOLLOUT) {
		source_watch(source, source->events & ~(uint32_t)EPOLLOUT);
		source->conn->sending = false;
		loop_conn_wake(source->conn);
	}
	if (events & ~(uint32_t)EPOLLOUT)
		conn_receive(source);
}

static void epoll_dispatch(Loop *loop) {
	Engine *engine = loop->state;

	for (ListLink *link; (link = list_first(&engine->failed));) {
		Source *source = container_of(link, Source, link);

		conn_end(source, LOOP_END_ERROR, source->error);
	}
	for (int i = 0; i < engine->n_events; i++) {
		Source *source = engine->events[i].data.ptr;

		if (source->listener)
			listener_serve(source);
		else if (source->poll)
			source->poll->on_ready(source->poll, engine->events[i].events);
		else if (source->conn && !source->conn->ended)
			conn_serve(source, engine->events[i].events);
	}
	engine->n_events = 0;
	engine_bury(engine);
}

const LoopEngine loop_engine_epoll = {
	.name = "epoll",
	.new = epoll_new,
	.free = epoll_free,
	.listener_link = epoll_listener_link,
	.listener_unlink = epoll_listener_unlink,
	.conn_link = epoll_conn_link,
	.conn_unlink = epoll_conn_unlink,
	.conn_moved = epoll_conn_moved,
	.poll_link = epoll_poll_link,
	.poll_unlink = epoll_poll_unlink,
	.flush = epoll_flush,
	.submit = epoll_submit,
	.wait = epoll_engine_wait,
	.look = epoll_look,
	.dispatch = epoll_dispatch,
};
