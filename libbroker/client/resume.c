/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The way back to a broker that has ended. Whoever needs the connection has the reader's role and goes in steps: a
 * connection, HELLO with the session's token, its answer, the requests that were not answered. What is not finished is
 * taken up by the next one: a connection that has sent HELLO is not given up, because the broker may have resumed the
 * session on it, and would take the hang-up for the session's end.
 *
 * The new socket gets the number of the old one, which a thread may use that sends a notice without a lock.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>

#include "client.h"

#define TIMEOUT_MS 30000
#define DELAY_MAX_MS 100
#define ONE_TRY_MS 1000

/* a session that no broker knows, see session_holds() */
static const _Atomic uint64_t no_session;

int64_t client_now(void) {
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void resume_init(struct shmb_client *client) {
	client->resume = (Resume){
		.timeout_ms = TIMEOUT_MS,
		.fd = -EBADF,
		.watch_fd = -EBADF,
		.timer_fd = -EBADF,
		.events_fd = -EBADF,
	};
}

void resume_deinit(struct shmb_client *client) {
	if (!client_is_foreign(client)) {
		client->resume.attempt_at = 0;
		resume_nudge(client);
	}
	client->resume.fd = close_fd(client->resume.fd);
	client->resume.watch_fd = close_fd(client->resume.watch_fd);
	client->resume.timer_fd = close_fd(client->resume.timer_fd);
	client->resume.events_fd = close_fd(client->resume.events_fd);
}

/* ---- what shmb_client_get_fd() returns ---- */

static int watch_add(const Resume *resume, int fd) {
	struct epoll_event event = { .events = EPOLLIN };

	return epoll_ctl(resume->watch_fd, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

/* before the fd is closed or replaced: a child of fork() may keep what it stands for, and the watch on it, alive */
static void watch_remove(const Resume *resume, int fd) {
	if (resume->watch_fd >= 0)
		(void)epoll_ctl(resume->watch_fd, EPOLL_CTL_DEL, fd, NULL);
}

static int watch_timer(const Resume *resume, bool armed) {
	struct itimerspec at = { .it_value.tv_nsec = armed };

	/* a time that has come long ago is not 0, which would be none */
	if (armed && resume->attempt_at > 0) {
		at.it_value.tv_sec = resume->attempt_at / 1000;
		at.it_value.tv_nsec = resume->attempt_at % 1000 * 1000000 + 1;
	}
	return timerfd_settime(resume->timer_fd, TFD_TIMER_ABSTIME, &at, NULL) < 0 ? -errno : 0;
}

/* what the next step waits for. The only failure is that of memory, which the timer makes up for. */
static int watch_update(const struct shmb_client *client) {
	const Resume *resume = &client->resume;
	int r = 0;

	if (resume->watch_fd < 0)
		return 0;
	if (!client->away)
		r = watch_add(resume, client->fd);
	else if (resume->fd >= 0)
		r = watch_add(resume, resume->fd);
	return watch_timer(resume, client->away && (resume->fd < 0 || r)) ?: r;
}

void resume_show_events(struct shmb_client *client) {
	Resume *resume = &client->resume;
	bool wait = client->events || client->events_lost;
	uint64_t count = 1;

	if (resume->events_fd < 0 || wait == resume->events_shown)
		return;
	resume->events_shown = wait;
	/* neither waits: the count is 0 or 1 */
	if (wait ? write(resume->events_fd, &count, sizeof(count)) < 0
		 : read(resume->events_fd, &count, sizeof(count)) < 0)
		resume->events_shown = !wait;
}

static int watch_new(struct shmb_client *client) {
	Resume *resume = &client->resume;
	int r;

	resume->watch_fd = epoll_create1(EPOLL_CLOEXEC);
	resume->timer_fd = resume->watch_fd < 0 ? -EBADF : timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	resume->events_fd = resume->timer_fd < 0 ? -EBADF : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	r = resume->events_fd < 0 ? -errno
				  : watch_add(resume, resume->timer_fd) ?: watch_add(resume, resume->events_fd)
				  ?: watch_update(client);
	if (!r)
		resume_show_events(client);
	else {
		resume->watch_fd = close_fd(resume->watch_fd);
		resume->timer_fd = close_fd(resume->timer_fd);
		resume->events_fd = close_fd(resume->events_fd);
	}
	return r;
}

int shmb_client_get_fd(struct shmb_client *client) {
	int r = 0, fd;

	if (client_is_foreign(client)) {
		(void)error_plain(SHMB_E_FORKED);
		return -EBADF;
	}
	pthread_mutex_lock(&client->io_lock);
	if (client->resume.watch_fd < 0)
		r = watch_new(client);
	fd = client->resume.watch_fd;
	pthread_mutex_unlock(&client->io_lock);
	return r ? error_plain(r) : fd;
}

/* ---- the steps; io_lock is held ---- */

/* nothing came of it: the next attempt is later */
static void resume_fail(struct shmb_client *client, int why) {
	Resume *resume = &client->resume;

	if (resume->fd >= 0)
		watch_remove(resume, resume->fd);
	resume->fd = close_fd(resume->fd);
	resume->why = why;
	resume->delay_ms = !resume->delay_ms			 ? 1
			   : resume->delay_ms < DELAY_MAX_MS / 2 ? resume->delay_ms * 2
								 : DELAY_MAX_MS;
	resume->attempt_at = client_now() + resume->delay_ms;
	(void)watch_update(client);
}

void resume_lost(struct shmb_client *client) {
	Resume *resume = &client->resume;

	atomic_store(&client->away, true);
	watch_remove(resume, client->fd);
	if (!resume->heard) {
		/* a broker that takes sessions up and ends at once, again and again */
		resume_fail(client, -ECONNRESET);
		return;
	}
	resume->why = 0;
	resume->delay_ms = 0;
	resume->attempt_at = 0;
	(void)watch_update(client);
}

/* leases that are held are not touched, and none is granted any more */
static void resume_refused(struct shmb_client *client) {
	Resume *resume = &client->resume;

	watch_remove(resume, resume->fd);
	resume->fd = close_fd(resume->fd);
	atomic_store(&client->session_word, &no_session);
	atomic_store(&client->away, false);
	/* the end of the old connection is what shmb_client_process() is to be called for */
	(void)watch_update(client);
	client_break(client, SHMB_E_DETACHED);
}

static int resume_connect(struct shmb_client *client) {
	uint8_t buffer[sizeof(WireHeader) + sizeof(WireHelloRequest)] __attribute__((aligned(8)));
	WireHelloRequest hello = {
		.version = WIRE_VERSION,
		.roles = client->roles,
		.features = WIRE_FEATURE_LEASE_PAGE | WIRE_FEATURE_EVENTS | WIRE_FEATURE_RESUME,
		.flags = client->flags & SHMB_ACCEPT_UNSEALED ? WIRE_HELLO_ACCEPT_UNSEALED : 0,
		.session = client->session,
		.epoch = client->epoch,
	};
	Resume *resume = &client->resume;
	_cleanup_(closep) int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	WireWriter writer;
	int r;

	if (fd < 0 || connect(fd, (const struct sockaddr *)&resume->address, sizeof(resume->address)) < 0)
		return -errno;
	memcpy(hello.token.bytes, client->token, sizeof(client->token));
	wire_write_begin(&writer, buffer, sizeof(buffer), WIRE_OP_HELLO, 0, ++client->last_serial);
	wire_write(&writer, &hello, sizeof(hello));
	r = fd_send(fd, buffer, wire_write_end(&writer), NULL, 0, MSG_DONTWAIT);
	if (r)
		return r;
	resume->fd = steal_fd(&fd);
	(void)watch_update(client);
	return 0;
}

/* a broker that has no room now may have some later, and one that has not seen our end will see it */
static bool is_for_later(uint32_t code) {
	return code == SHMB_E_BUSY || code == SHMB_E_AGAIN || code == SHMB_E_NO_FDS || code == SHMB_E_QUOTA;
}

static bool is_ours(const struct shmb_client *client, const WireHelloReply *reply) {
	return reply->version == WIRE_VERSION && reply->flags & WIRE_HELLO_REPLY_RESUMED &&
	       reply->session == client->session && reply->epoch == client->epoch &&
	       reply->session_index == client->resume.session_index &&
	       (!client->registry || atomic_load(&client->registry->state) == LAYOUT_OPEN);
}

/* 0, -EAGAIN, -errno or a code for another attempt, SHMB_E_DETACHED for none */
static int resume_answer(struct shmb_client *client) {
	int fds[WIRE_FDS_ROOM];
	FdMessage received = {};
	WireErrorReply error;
	WireHelloReply reply;
	const char *version;
	WireHeader header;
	WireReader body;
	int r;

	r = client_receive_now(client, client->resume.fd, fds, &received);
	if (r)
		return r;
	for (size_t i = 0; i < received.n_fds; ++i)
		(void)close_fd(fds[i]);
	if (wire_header_read(client->receive, received.size, &header) || header.opcode != WIRE_OP_HELLO)
		return SHMB_E_DETACHED;
	body = wire_reader_body(client->receive, received.size);
	if (header.flags & WIRE_FLAG_ERROR) {
		wire_read(&body, &error, sizeof(error));
		return is_for_later(error.code) ? (int)error.code : SHMB_E_DETACHED;
	}
	wire_read(&body, &reply, sizeof(reply));
	version = wire_read_bytes(&body, reply.version_length);
	if (!wire_reader_end(&body) || !is_ours(client, &reply))
		return SHMB_E_DETACHED;
	client->rights = reply.rights;
	memcpy(client->token, reply.token.bytes, sizeof(client->token));
	snprintf(client->broker_version, sizeof(client->broker_version), "%.*s", (int)reply.version_length, version);
	client->resume.possible = reply.features & WIRE_FEATURE_RESUME;
	return 0;
}

/* the connection that was answered becomes the client's */
static int resume_take_over(struct shmb_client *client) {
	Resume *resume = &client->resume;

	/* they meet the end of the old connection, and must not meet the new one */
	while (client->n_sending)
		client_wait_changed(client, DEADLINE_NONE);
	watch_remove(resume, resume->fd);
	if (fcntl(resume->fd, F_SETFL, 0) < 0 || dup3(resume->fd, client->fd, O_CLOEXEC) < 0)
		return -errno;
	resume->fd = close_fd(resume->fd);
	return 0;
}

static Call *oldest_call(struct shmb_client *client, uint64_t from) {
	Call *oldest = NULL;

	for (Call *call = client->calls; call; call = call->next)
		if (call->serial >= from && (!oldest || call->serial < oldest->serial))
			oldest = call;
	return oldest;
}

/* The broker may want its answers read before it reads more. false at the end of the connection. */
static bool resume_make_room(struct shmb_client *client) {
	struct pollfd poll_fd = { .fd = client->fd, .events = POLLIN | POLLOUT };
	int fds[WIRE_FDS_ROOM];
	FdMessage received = {};
	int r;

	pthread_mutex_unlock(&client->io_lock);
	(void)poll(&poll_fd, 1, -1);
	pthread_mutex_lock(&client->io_lock);
	r = client_receive_now(client, client->fd, fds, &received);
	if (!r) {
		client_take_message(client, fds, &received);
		pthread_cond_broadcast(&client->io_changed);
	}
	return !r || r == -EAGAIN;
}

/* Every request that was not answered. A connection that ends meanwhile is lost again once somebody reads. */
static void resume_send_calls(struct shmb_client *client) {
	uint64_t from = 0;
	Call *call;
	int r;

	while ((call = oldest_call(client, from))) {
		/* nobody waits for it, and whether it was done is all the same */
		if (!call->request) {
			client_finish_call(client, call, 0);
			continue;
		}
		((WireHeader *)call->request)->flags |= WIRE_FLAG_RETRY;
		r = fd_send(client->fd, call->request, call->request_size, call->request_fds, call->n_request_fds,
			    MSG_DONTWAIT);
		if (r == -EPIPE || r == -ECONNRESET || (r == -EAGAIN && !resume_make_room(client)))
			return;
		if (r == -EAGAIN)
			continue;
		from = call->serial + 1;
		call->is_unsent = false;
		if (r)
			client_finish_call(client, call, r);
	}
}

/* as far as it goes without waiting; the reader's role is the caller's */
static void resume_step(struct shmb_client *client) {
	Resume *resume = &client->resume;
	int r = 0;

	if (resume->fd < 0) {
		if (client_now() < resume->attempt_at)
			return;
		r = resume_connect(client);
	}
	/* the queue of the listening socket is full, which is not what -EAGAIN says below */
	if (r) {
		resume_fail(client, r);
		return;
	}
	r = resume_answer(client);
	if (r == -EAGAIN)
		return;
	if (r == SHMB_E_DETACHED) {
		resume_refused(client);
		return;
	}
	r = r ?: resume_take_over(client);
	if (r) {
		resume_fail(client, r);
		return;
	}
	resume->heard = false;
	resume_send_calls(client);
	atomic_store(&client->away, false);
	(void)watch_update(client);
}

/* until the next step can be made, or @deadline; io_lock is let go */
static void resume_wait(struct shmb_client *client, int64_t deadline) {
	struct pollfd poll_fd = { .fd = client->resume.fd, .events = POLLIN };
	int64_t now, until = deadline;

	if (poll_fd.fd < 0 && client->resume.attempt_at < until)
		until = client->resume.attempt_at;
	pthread_mutex_unlock(&client->io_lock);
	now = client_now();
	(void)poll(&poll_fd, 1, until == DEADLINE_NONE ? -1 : until > now ? (int)(until - now) : 0);
	pthread_mutex_lock(&client->io_lock);
}

static int resume_run(struct shmb_client *client, int64_t deadline) {
	bool one_try = deadline && !client->resume.timeout_ms;

	client->reading = true;
	if (one_try)
		client->resume.attempt_at = 0;
	for (;;) {
		resume_step(client);
		if (one_try && client->resume.fd >= 0) {
			one_try = false;
			deadline = client_now() + ONE_TRY_MS;
		}
		if (!client->away || client_now() >= deadline)
			break;
		resume_wait(client, deadline);
	}
	client->reading = false;
	pthread_cond_broadcast(&client->io_changed);
	if (client->away)
		return -ETIMEDOUT;
	if (!client->broken && client->page) {
		pthread_mutex_unlock(&client->io_lock);
		lease_ring_again(client);
		pthread_mutex_lock(&client->io_lock);
	}
	return client->broken;
}

int64_t resume_deadline(const struct shmb_client *client) {
	return client->resume.timeout_ms < 0 ? DEADLINE_NONE : client_now() + client->resume.timeout_ms;
}

int resume_await(struct shmb_client *client, int64_t deadline) {
	while (client->away && !client->broken) {
		if (!client->reading)
			return resume_run(client, deadline);
		if (client_now() >= deadline)
			return -ETIMEDOUT;
		client_wait_changed(client, deadline);
	}
	return client->broken;
}

void resume_nudge(struct shmb_client *client) {
	struct pollfd poll_fd = { .fd = client->fd };

	if (!client->resume.possible)
		return;
	/* what is to be read is left to who wants it, unless it is the last there will be */
	if (!atomic_load(&client->away) && (poll(&poll_fd, 1, 0) <= 0 || !(poll_fd.revents & (POLLHUP | POLLERR))))
		return;
	while (!client_read(client, 0))
		;
}

int shmb_client_set_resume_timeout(struct shmb_client *client, int timeout_ms) {
	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (timeout_ms < -1)
		return error_set(SHMB_E_INVALID, "a time to wait is -1 for ever, or 0 and more milliseconds");
	pthread_mutex_lock(&client->io_lock);
	client->resume.timeout_ms = timeout_ms;
	pthread_mutex_unlock(&client->io_lock);
	return 0;
}
