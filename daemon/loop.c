/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "loop-engine.h"

#define SECOND_NS UINT64_C(1000000000)

static uint64_t clock_now(void) {
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * SECOND_NS + (uint64_t)ts.tv_nsec;
}

static void on_starved_timer(LoopTimer *timer) {
	Loop *loop = container_of(timer, Loop, starved_timer);

	for (ListLink *link; (link = list_first(&loop->starved));) {
		LoopConn *conn = container_of(link, LoopConn, dirty);

		list_remove(link);
		conn->sending = false;
		loop_conn_wake(conn);
	}
}

static int loop_choose(Loop *loop, int kind) {
	char why[LOOP_REASON_SIZE];
	int r;

	if (kind == LOOP_EPOLL) {
		(void)snprintf(loop->reason, sizeof(loop->reason), "chosen by configuration");
	} else {
		loop->engine = &loop_engine_uring;
		r = loop->engine->new (loop);
		if (!r || kind == LOOP_IO_URING)
			return r;
		(void)memcpy(why, loop->reason, sizeof(why));
		(void)snprintf(loop->reason, sizeof(loop->reason), "no io_uring: %.150s", why);
	}
	loop->engine = &loop_engine_epoll;
	return loop->engine->new (loop);
}

int loop_new(Loop **ret, int kind, Closer *closer) {
	Loop *loop = calloc(1, sizeof(*loop));
	int r;

	if (!loop)
		return -ENOMEM;
	loop->closer = closer;
	loop->now_ns = clock_now();
	list_init(&loop->listeners);
	list_init(&loop->conns);
	list_init(&loop->polls);
	list_init(&loop->dirty);
	list_init(&loop->starved);
	list_init(&loop->expired);
	loop->starved_timer.on_time = on_starved_timer;
	loop->buffer = malloc(WIRE_MESSAGE_MAX);
	r = loop->buffer ? loop_choose(loop, kind) : -ENOMEM;
	if (r) {
		free(loop->buffer);
		free(loop);
		return r;
	}
	*ret = loop;
	return 0;
}

Loop *loop_free(Loop *loop) {
	if (!loop)
		return NULL;
	for (ListLink *link; (link = list_first(&loop->listeners));)
		loop_listener_unlink(container_of(link, LoopListener, link));
	for (ListLink *link; (link = list_first(&loop->conns));)
		loop_conn_unlink(container_of(link, LoopConn, link));
	for (ListLink *link; (link = list_first(&loop->polls));)
		loop_poll_unlink(container_of(link, LoopPoll, link));
	loop->engine->free(loop);
	while (loop->timers)
		loop_timer_unlink(loop->timers);
	free(loop->buffer);
	free(loop);
	return NULL;
}

const char *loop_name(const Loop *loop) {
	return loop->engine->name;
}

const char *loop_reason(const Loop *loop) {
	return loop->reason;
}

void loop_quit(Loop *loop) {
	loop->quit = true;
}

void loop_set_turn(Loop *loop, void (*on_turn)(void *userdata), void *userdata) {
	loop->on_turn = on_turn;
	loop->userdata = userdata;
}

uint64_t loop_now(Loop *loop) {
	/* few turns want to know */
	if (!loop->now_ns)
		loop->now_ns = clock_now();
	return loop->now_ns;
}

/* timers: an intrusive pairing heap, so that arming one cannot fail */

static LoopTimer *timer_merge(LoopTimer *a, LoopTimer *b) {
	if (!a)
		return b;
	if (!b)
		return a;
	if (b->at_ns < a->at_ns) {
		LoopTimer *t = a;

		a = b;
		b = t;
	}
	b->prev = a;
	b->next = a->child;
	if (b->next)
		b->next->prev = b;
	a->child = b;
	return a;
}

/* merges siblings in pairs from the left, then the pairs from the right */
static LoopTimer *timer_merge_siblings(LoopTimer *first) {
	LoopTimer *pairs = NULL, *root = NULL;

	while (first) {
		LoopTimer *a = first, *b = first->next;

		first = b ? b->next : NULL;
		a->prev = a->next = NULL;
		if (b)
			b->prev = b->next = NULL;
		a = timer_merge(a, b);
		a->next = pairs;
		pairs = a;
	}
	while (pairs) {
		LoopTimer *a = pairs;

		pairs = a->next;
		a->next = NULL;
		root = timer_merge(root, a);
	}
	return root;
}

static void timer_leave_heap(LoopTimer *timer) {
	Loop *loop = timer->loop;
	LoopTimer *children = timer_merge_siblings(timer->child);

	timer->child = NULL;
	if (loop->timers == timer) {
		loop->timers = children;
		return;
	}
	if (timer->prev->child == timer)
		timer->prev->child = timer->next;
	else
		timer->prev->next = timer->next;
	if (timer->next)
		timer->next->prev = timer->prev;
	timer->prev = timer->next = NULL;
	loop->timers = timer_merge(loop->timers, children);
}

void loop_timer_set(Loop *loop, LoopTimer *timer, uint64_t at_ns) {
	loop_timer_unlink(timer);
	timer->loop = loop;
	timer->at_ns = at_ns ?: 1;
	timer->child = timer->next = timer->prev = NULL;
	loop->timers = timer_merge(loop->timers, timer);
}

void loop_timer_unlink(LoopTimer *timer) {
	if (!timer->at_ns)
		return;
	if (list_is_linked(&timer->link))
		list_remove(&timer->link);
	else
		timer_leave_heap(timer);
	timer->at_ns = 0;
	timer->loop = NULL;
}

/* those that are armed in a callback wait for the next turn, even when their time has passed */
static void loop_run_timers(Loop *loop) {
	while (loop->timers && loop->timers->at_ns <= loop_now(loop)) {
		LoopTimer *timer = loop->timers;

		timer_leave_heap(timer);
		list_append(&loop->expired, &timer->link);
	}
	for (ListLink *link; (link = list_first(&loop->expired));) {
		LoopTimer *timer = container_of(link, LoopTimer, link);

		loop_timer_unlink(timer);
		timer->on_time(timer);
	}
}

static int64_t loop_timeout(const Loop *loop) {
	uint64_t now;

	if (!list_is_empty(&loop->dirty))
		return 0;
	if (!loop->timers)
		return -1;
	now = clock_now();
	if (loop->timers->at_ns <= now)
		return 0;
	return loop->timers->at_ns - now < INT64_MAX ? (int64_t)(loop->timers->at_ns - now) : -1;
}

void loop_set_spin(Loop *loop, Spin *spin, void (*on_spin)(void *userdata), void *userdata) {
	loop->spin = spin;
	loop->on_spin = on_spin;
	loop->spin_userdata = userdata;
}

/* true when something came meanwhile; never longer than until the next timer */
static bool loop_spin(Loop *loop, int64_t timeout_ns) {
	uint64_t until, ns;
	bool found = false;

	if (!loop->spin || !timeout_ns || !spin_begins(loop->spin))
		return false;
	if (loop->on_spin)
		loop->on_spin(loop->spin_userdata);
	ns = timeout_ns > 0 && (uint64_t)timeout_ns < loop->spin->ns ? (uint64_t)timeout_ns : loop->spin->ns;
	until = clock_now() + ns;
	for (bool first = true; !found && clock_now() < until; first = false)
		found = loop->engine->look(loop, first);
	spin_ends(loop->spin, found);
	return found;
}

int loop_run(Loop *loop) {
	int64_t timeout;
	int r;

	while (!loop->quit) {
		loop->engine->flush(loop);
		timeout = loop_timeout(loop);
		r = loop->engine->wait(loop, loop_spin(loop, timeout) ? 0 : timeout);
		if (r)
			return r;
		loop->now_ns = 0;
		loop->engine->dispatch(loop);
		loop_run_timers(loop);
		if (loop->on_turn)
			loop->on_turn(loop->userdata);
	}
	loop->engine->flush(loop);
	loop->engine->submit(loop);
	loop->quit = false;
	return 0;
}

int loop_listener_link(Loop *loop, LoopListener *listener) {
	int r;

	listener->loop = loop;
	r = loop->engine->listener_link(listener);
	if (r) {
		listener->loop = NULL;
		return r;
	}
	list_append(&loop->listeners, &listener->link);
	return 0;
}

void loop_listener_unlink(LoopListener *listener) {
	if (!listener->loop)
		return;
	list_remove(&listener->link);
	listener->loop->engine->listener_unlink(listener);
	listener->engine = NULL;
	listener->loop = NULL;
}

int loop_poll_link(Loop *loop, LoopPoll *poll) {
	int r;

	poll->loop = loop;
	r = loop->engine->poll_link(poll);
	if (r) {
		poll->loop = NULL;
		return r;
	}
	list_append(&loop->polls, &poll->link);
	return 0;
}

void loop_poll_unlink(LoopPoll *poll) {
	if (!poll->loop)
		return;
	list_remove(&poll->link);
	poll->loop->engine->poll_unlink(poll);
	poll->engine = NULL;
	poll->loop = NULL;
}

int loop_conn_link(Loop *loop, LoopConn *conn) {
	int r;

	list_init(&conn->out);
	conn->out_messages = conn->out_bytes = 0;
	conn->sending = conn->ended = false;
	conn->patience = conn->skips = 0;
	conn->dirty = (ListLink){ 0 };
	conn->loop = loop;
	r = loop->engine->conn_link(conn);
	if (r) {
		closer_close(loop->closer, conn->owner_uid, steal_fd(&conn->fd));
		conn->loop = NULL;
		return r;
	}
	list_append(&loop->conns, &conn->link);
	return 0;
}

void loop_conn_unlink(LoopConn *conn) {
	if (!conn->loop)
		return;
	list_remove(&conn->link);
	list_remove(&conn->dirty);
	/* the peer learns it at once, also while the Closer or a request of the engine's holds the socket */
	(void)shutdown(conn->fd, SHUT_RDWR);
	conn->loop->engine->conn_unlink(conn);
	while (!list_is_empty(&conn->out))
		loop_out_free(loop_conn_take_out(conn));
	conn->engine = NULL;
	conn->loop = NULL;
}

void loop_conn_move(LoopConn *to, LoopConn *from) {
	*to = *from;
	list_replace(&from->link, &to->link);
	list_replace(&from->dirty, &to->dirty);
	list_init(&to->out);
	for (ListLink *link; (link = list_first(&from->out));) {
		list_remove(link);
		list_append(&to->out, link);
	}
	to->loop->engine->conn_moved(to);
	from->engine = NULL;
	from->loop = NULL;
	from->fd = -EBADF;
}

void loop_close_fds(Loop *loop, uint32_t uid, int *fds, size_t n_fds) {
	for (size_t i = 0; i < n_fds; i++)
		closer_close(loop->closer, uid, steal_fd(&fds[i]));
}

int loop_receive(Loop *loop, int fd, uint32_t uid, LoopMessage *ret) {
	FdMessage message;
	int r;

	r = fd_receive(fd, loop->buffer, WIRE_MESSAGE_MAX, MSG_DONTWAIT, loop->fds, &message);
	if (r)
		return r;
	if (!message.size) {
		loop_close_fds(loop, uid, loop->fds, message.n_fds);
		return LOOP_RECEIVE_HANGUP;
	}
	*ret = (LoopMessage){
		.data = loop->buffer,
		.size = message.size,
		.fds = loop->fds,
		.n_fds = message.n_fds,
		.truncated = message.truncated,
		.fds_lost = message.fds_lost,
	};
	return 0;
}

void loop_conn_deliver(LoopConn *conn, LoopMessage *message) {
	Loop *loop = conn->loop;
	uint32_t uid = conn->owner_uid;
	int *fds = message->fds;
	size_t n_fds = message->n_fds;

	conn->on_message(conn, message);
	loop_close_fds(loop, uid, fds, n_fds);
}

bool loop_listener_accept(LoopListener **at, int listener_fd) {
	for (int n = 0; n < LOOP_MESSAGES_PER_TURN && *at; n++) {
		int fd = accept4(listener_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd >= 0) {
			(*at)->on_accept(*at, fd);
			continue;
		}
		if (errno == EAGAIN)
			return false;
		if (errno == EINTR || errno == ECONNABORTED)
			continue;
		fd = -errno;
		if (fd == -EMFILE || fd == -ENFILE)
			(*at)->on_accept(*at, fd);
		return true;
	}
	return false;
}

void loop_conn_end(LoopConn *conn, int reason, int error) {
	if (conn->ended)
		return;
	conn->ended = true;
	list_remove(&conn->dirty);
	conn->on_end(conn, reason, error);
}

LoopOut *loop_out_free(LoopOut *out) {
	if (!out)
		return NULL;
	loop_close_fds(out->loop, out->uid, out->fds, out->n_fds);
	free(out);
	return NULL;
}

LoopOut *loop_conn_out(LoopConn *conn) {
	ListLink *link = list_first(&conn->out);

	return link ? container_of(link, LoopOut, link) : NULL;
}

LoopOut *loop_conn_take_out(LoopConn *conn) {
	LoopOut *out = loop_conn_out(conn);

	list_remove(&out->link);
	conn->out_messages--;
	conn->out_bytes -= out->size;
	return out;
}

void loop_conn_wake(LoopConn *conn) {
	if (conn->sending || conn->ended || list_is_empty(&conn->out) || list_is_linked(&conn->dirty))
		return;
	list_append(&conn->loop->dirty, &conn->dirty);
}

bool loop_conn_starve(LoopConn *conn, int error) {
	Loop *loop = conn->loop;

	if (error != ETOOMANYREFS && error != ENOMEM && error != ENOBUFS)
		return false;
	list_remove(&conn->dirty);
	list_append(&loop->starved, &conn->dirty);
	conn->sending = true;
	if (!loop->starved_timer.at_ns)
		loop_timer_set(loop, &loop->starved_timer, clock_now() + LOOP_RETRY_NS);
	return true;
}

static LoopOut *loop_out_new(Loop *loop, uint32_t uid, const void *data, size_t size, size_t n_fds) {
	size_t control = n_fds ? CMSG_SPACE(n_fds * sizeof(int)) : 0;
	size_t payload = (size + sizeof(int) - 1) / sizeof(int) * sizeof(int);
	LoopOut *out = malloc(sizeof(*out) + control + payload + n_fds * sizeof(int));

	if (!out)
		return NULL;
	*out = (LoopOut){ .loop = loop, .uid = uid, .size = size };
	if (control)
		memset(out->data, 0, control);
	memcpy(out->data + control, data, size);
	out->fds = (int *)(void *)(out->data + control + payload);
	out->iov = (struct iovec){ .iov_base = out->data + control, .iov_len = size };
	out->header.msg_iov = &out->iov;
	out->header.msg_iovlen = 1;
	out->header.msg_control = control ? out->data : NULL;
	out->header.msg_controllen = control;
	return out;
}

/* takes @fds into @out, or duplicates of them */
static int out_take_fds(LoopOut *out, int *fds, size_t n_fds, bool owned) {
	struct cmsghdr *cmsg;

	for (; out->n_fds < n_fds; out->n_fds++) {
		int fd = owned ? steal_fd(&fds[out->n_fds]) : fcntl(fds[out->n_fds], F_DUPFD_CLOEXEC, 0);

		if (fd < 0)
			return owned ? -EBADF : -errno;
		out->fds[out->n_fds] = fd;
	}
	if (!n_fds)
		return 0;
	cmsg = CMSG_FIRSTHDR(&out->header);
	cmsg->cmsg_level = SOL_SOCKET;
	cmsg->cmsg_type = SCM_RIGHTS;
	cmsg->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
	memcpy(CMSG_DATA(cmsg), out->fds, n_fds * sizeof(int));
	return 0;
}

static int conn_queue(LoopConn *conn, const void *data, size_t size, int *fds, size_t n_fds, bool owned) {
	LoopOut *out;
	int r;

	if (!size || size > WIRE_MESSAGE_MAX || n_fds > WIRE_FDS_ROOM)
		return -EINVAL;
	if (!conn->loop || conn->ended)
		return 0;
	out = loop_out_new(conn->loop, conn->owner_uid, data, size, n_fds);
	if (!out)
		return -ENOMEM;
	r = out_take_fds(out, fds, n_fds, owned);
	if (r) {
		loop_out_free(out);
		return r;
	}
	list_append(&conn->out, &out->link);
	conn->out_messages++;
	conn->out_bytes += size;
	loop_conn_wake(conn);
	return 0;
}

/* false when it has to be queued, if only to fail where that can be told */
static bool conn_send_now(LoopConn *conn, const void *data, size_t size, const int *fds, size_t n_fds) {
	if (!conn->loop || conn->ended || conn->sending || !list_is_empty(&conn->out) || !size ||
	    size > WIRE_MESSAGE_MAX)
		return false;
	if (!n_fds)
		return send(conn->fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
	return !fd_send(conn->fd, data, size, fds, n_fds, MSG_DONTWAIT);
}

int loop_conn_send(LoopConn *conn, const void *data, size_t size, int *fds, size_t n_fds, bool owned) {
	int r = conn_send_now(conn, data, size, fds, n_fds) ? 0 : conn_queue(conn, data, size, fds, n_fds, owned);

	/* what was not taken over: all of it when the message is gone, was dropped or refused */
	for (size_t i = 0; owned && i < n_fds; i++) {
		if (conn->loop)
			closer_close(conn->loop->closer, conn->owner_uid, steal_fd(&fds[i]));
		else
			fds[i] = close_fd(fds[i]);
	}
	return r;
}
