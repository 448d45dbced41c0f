/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client.h"

#define SPIN_VAIN_MAX 8
#define SPIN_SKIPS 64

uint8_t *client_request_begin(WireWriter *writer, uint16_t opcode) {
	uint8_t *buffer = malloc(WIRE_MESSAGE_MAX);

	if (buffer)
		wire_write_begin(writer, buffer, WIRE_MESSAGE_MAX, opcode, 0, 0);
	return buffer;
}

void call_end(Call *call) {
	free(call->spare);
	call->spare = NULL;
	for (size_t i = 0; i < call->n_fds; ++i)
		(void)close_fd(call->fds[i]);
	free(call->message);
	call->message = NULL;
	call->n_fds = 0;
}

WireReader call_body(const Call *call) {
	return wire_reader_body(call->message, call->size);
}

void client_finish_call(struct shmb_client *client, Call *call, int result) {
	Call **at = &client->calls;

	while (*at != call)
		at = &(*at)->next;
	*at = call->next;
	client->n_calls--;
	if (call->is_abandoned) {
		free(call);
		return;
	}
	call->result = result;
	call->done = true;
}

void client_break(struct shmb_client *client, int error) {
	if (!client->broken)
		client->broken = error;
	while (client->calls)
		client_finish_call(client, client->calls, client->broken);
	pthread_cond_broadcast(&client->io_changed);
}

static void client_take_event(struct shmb_client *client, const uint8_t *message, size_t size) {
	WireReader reader = wire_reader_body(message, size);
	WireEvent event;
	const char *name;
	EventNode *node;

	wire_read(&reader, &event, sizeof(event));
	name = wire_read_bytes(&reader, event.name_length);
	if (!wire_reader_end(&reader) || event.name_length > SHMB_NAME_MAX)
		return;
	node = client->n_events < CLIENT_EVENTS_MAX ? malloc(sizeof(*node)) : NULL;
	if (!node) {
		client->events_lost += event.type == SHMB_EVENT_OVERFLOW ? event.count : 1;
		resume_show_events(client);
		return;
	}
	node->next = NULL;
	node->event = (struct shmb_event){
		.type = event.type,
		.slot = event.slot,
		.generation = event.generation,
		.session = event.session,
		.size = event.size,
		.count = event.count,
		.pid = event.pid,
		.uid = event.uid,
	};
	memcpy(node->event.name, name, event.name_length);
	*client->events_tail = node;
	client->events_tail = &node->next;
	client->n_events++;
	resume_show_events(client);
}

/* an ERROR reply tells the code in its body */
static int reply_result(const uint8_t *message, size_t size, const WireHeader *header) {
	WireReader reader = wire_reader_body(message, size);
	WireErrorReply error;

	if (!(header->flags & WIRE_FLAG_ERROR))
		return 0;
	wire_read(&reader, &error, sizeof(error));
	return error.code && error.code < INT32_MAX ? (int)error.code : -EPROTO;
}

static void client_take_reply(struct shmb_client *client, const WireHeader *header, int *fds,
			      const FdMessage *received) {
	Call *call = client->calls;

	while (call && call->serial != header->serial)
		call = call->next;
	/* a refusal before HELLO was read has no serial: it is for whoever waits */
	if (!call && !header->serial && header->flags & WIRE_FLAG_ERROR)
		call = client->calls;
	if (!call)
		return;
	if (call->is_abandoned) {
		abandoned_answered(client, call, client->receive, received->size);
		return;
	}
	call->message = malloc(received->size);
	if (!call->message) {
		client_finish_call(client, call, -ENOMEM);
		return;
	}
	memcpy(call->message, client->receive, received->size);
	call->size = received->size;
	memcpy(call->fds, fds, received->n_fds * sizeof(*fds));
	call->n_fds = received->n_fds;
	for (size_t i = 0; i < received->n_fds; ++i)
		fds[i] = -EBADF;
	client_finish_call(client, call,
			   received->fds_lost ? -EMFILE : reply_result(call->message, call->size, header));
}

void client_take_message(struct shmb_client *client, int *fds, FdMessage *received) {
	WireHeader header;

	client->n_received++;
	client->resume.heard = true;
	if (received->truncated || wire_header_read(client->receive, received->size, &header))
		client_break(client, -EPROTO);
	else if (header.flags & WIRE_FLAG_EVENT)
		client_take_event(client, client->receive, received->size);
	else
		client_take_reply(client, &header, fds, received);
	for (size_t i = 0; i < received->n_fds; ++i)
		(void)close_fd(fds[i]);
}

int client_receive_now(struct shmb_client *client, int fd, int *fds, FdMessage *ret) {
	int r = fd_receive(fd, client->receive, WIRE_MESSAGE_MAX, MSG_DONTWAIT, fds, ret);

	/* said once, before what came earlier: a peer that ended with something unread may have answered before */
	if (r == -ECONNRESET)
		r = fd_receive(fd, client->receive, WIRE_MESSAGE_MAX, MSG_DONTWAIT, fds, ret);
	return !r && !ret->size ? -ECONNRESET : r;
}

/* receives one message as the reader; io_lock is not held */
/*
 * A wake-up across CPUs costs more than most answers: where the broker looks for work before it sleeps, whoever waits
 * for it does the same, on another CPU than the broker's, unless it was in vain several times in a row.
 */
static bool spin_begins(struct shmb_client *client) {
	const RegistryHeader *registry = client->registry;

	if (!registry || !atomic_load_explicit(&registry->spin_us, memory_order_relaxed) ||
	    atomic_load_explicit(&registry->broker_cpu, memory_order_relaxed) == (uint32_t)sched_getcpu())
		return false;
	if (!client->spin_skips)
		return true;
	client->spin_skips--;
	return false;
}

static uint64_t now_ns(void) {
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int client_spin(struct shmb_client *client, int *fds, FdMessage *ret) {
	uint64_t until = now_ns() + (uint64_t)atomic_load(&client->registry->spin_us) * 1000;
	int r = -EAGAIN;

	while (r == -EAGAIN && now_ns() < until)
		r = client_receive_now(client, client->fd, fds, ret);
	client->spin_vain = r == -EAGAIN ? client->spin_vain + 1 : 0;
	if (client->spin_vain == SPIN_VAIN_MAX) {
		client->spin_vain = 0;
		client->spin_skips = SPIN_SKIPS;
	}
	return r;
}

static int client_receive(struct shmb_client *client, int timeout, int *fds, FdMessage *ret) {
	struct pollfd poll_fd = { .fd = client->fd, .events = POLLIN };
	int r;

	for (;;) {
		r = client_receive_now(client, client->fd, fds, ret);
		if (r == -EAGAIN && timeout && spin_begins(client))
			r = client_spin(client, fds, ret);
		if (r != -EAGAIN)
			return r;
		r = poll(&poll_fd, 1, timeout);
		if (!r)
			return -ETIMEDOUT;
		if (r < 0 && errno != EINTR)
			return -errno;
	}
}

/* the reader's turn: io_lock is held before and after, and one message, or the end, is dealt with */
static int client_read_locked(struct shmb_client *client, int timeout) {
	int fds[WIRE_FDS_ROOM];
	FdMessage received = {};
	int r;

	client->reading = true;
	pthread_mutex_unlock(&client->io_lock);
	r = client_receive(client, timeout, fds, &received);
	pthread_mutex_lock(&client->io_lock);
	client->reading = false;

	if (!r)
		client_take_message(client, fds, &received);
	else if (r == -ECONNRESET && client->resume.possible)
		resume_lost(client);
	else if (r != -ETIMEDOUT)
		client_break(client, r);
	pthread_cond_broadcast(&client->io_changed);
	return r == -ETIMEDOUT ? r : 0;
}

void client_wait_changed(struct shmb_client *client, int64_t deadline) {
	struct timespec until = { .tv_sec = deadline / 1000, .tv_nsec = deadline % 1000 * 1000000 };

	if (deadline == DEADLINE_NONE)
		pthread_cond_wait(&client->io_changed, &client->io_lock);
	else
		pthread_cond_timedwait(&client->io_changed, &client->io_lock, &until);
}

/*
 * What a call does that needs something from the connection: reads, or waits for the thread that does. What has come by
 * @deadline is read. Returns 0, or -ETIMEDOUT.
 */
static int client_turn(struct shmb_client *client, int64_t deadline) {
	int64_t left = deadline == DEADLINE_NONE ? -1 : deadline - client_now();

	if (!client->reading)
		return client_read_locked(client, deadline == DEADLINE_NONE ? -1
						  : left > INT32_MAX	    ? INT32_MAX
						  : left > 0		    ? (int)left
									    : 0);
	if (deadline != DEADLINE_NONE && left <= 0)
		return -ETIMEDOUT;
	client_wait_changed(client, deadline);
	return 0;
}

/* io_lock is held, and the client is away */
static int client_read_away(struct shmb_client *client, int timeout) {
	int64_t until = timeout < 0 ? DEADLINE_NONE : timeout ? client_now() + timeout : 0;
	int64_t deadline = resume_deadline(client);
	int r;

	r = resume_await(client, until < deadline ? until : deadline);
	return r == -ETIMEDOUT && deadline < until ? SHMB_E_AGAIN : r;
}

int client_read(struct shmb_client *client, int timeout) {
	int64_t deadline;
	int r = 0;

	pthread_mutex_lock(&client->io_lock);
	if (client->broken) {
		r = client->broken;
	} else if (client->away) {
		r = client_read_away(client, timeout);
	} else if (!client->reading) {
		r = client_read_locked(client, timeout);
	} else if (timeout) {
		deadline = timeout < 0 ? DEADLINE_NONE : client_now() + timeout;
		client_wait_changed(client, deadline);
		r = client_now() >= deadline ? -ETIMEDOUT : 0;
	} else {
		r = -ETIMEDOUT;
	}
	pthread_mutex_unlock(&client->io_lock);
	return r;
}

int client_error(struct shmb_client *client, int result) {
	char text[160];
	int why;

	if (result == SHMB_E_DETACHED)
		return error_set(result, "the broker does not know this session any more");
	if (result == SHMB_E_TIMED_OUT)
		return error_set(
			result, "the broker does not answer: what it was asked for may have been done, or be done yet");
	if (result != SHMB_E_AGAIN)
		return error_plain(result);
	pthread_mutex_lock(&client->io_lock);
	why = client->resume.why;
	pthread_mutex_unlock(&client->io_lock);
	snprintf(text, sizeof(text), "the broker is away (%s), try again",
		 why ? shmb_error_text(why) : "it has not answered yet");
	return error_set(result, text);
}

/* until when @call waits for an answer that it could have from here on */
static int64_t call_deadline(const struct shmb_client *client, const Call *call) {
	int timeout = atomic_load(&client->call_timeout_ms);

	return call->spare && timeout >= 0 ? client_now() + timeout + call->wait_ms : DEADLINE_NONE;
}

/* enters @call, whose request is complete but for its serial, and counts its thread among those that send */
static int call_start(struct shmb_client *client, Call *call) {
	int64_t deadline = -1;
	int r = 0;

	pthread_mutex_lock(&client->io_lock);
	while (!r && !client->broken && (client->away || client->n_calls >= WIRE_OUTSTANDING_MAX)) {
		if (!client->away) {
			if (client_turn(client, call->deadline) && client->n_calls >= WIRE_OUTSTANDING_MAX)
				r = SHMB_E_TIMED_OUT;
			continue;
		}
		if (deadline < 0)
			deadline = resume_deadline(client);
		if (resume_await(client, deadline) == -ETIMEDOUT)
			r = SHMB_E_AGAIN;
	}
	r = client->broken ?: r;
	if (!r) {
		call->serial = ++client->last_serial;
		((WireHeader *)call->request)->serial = call->serial;
		call->next = client->calls;
		client->calls = call;
		client->n_calls++;
		client->n_sending++;
	}
	pthread_mutex_unlock(&client->io_lock);
	return r;
}

/* -EAGAIN for a broker that takes nothing until the deadline */
static int call_send_until(struct shmb_client *client, const Call *call) {
	struct pollfd poll_fd = { .fd = client->fd, .events = POLLOUT };
	int flags = call->deadline == DEADLINE_NONE ? 0 : MSG_DONTWAIT, r;
	int64_t left;

	for (;;) {
		r = fd_send(client->fd, call->request, call->request_size, call->request_fds, call->n_request_fds,
			    flags);
		left = call->deadline - client_now();
		if (r != -EAGAIN || !flags || left <= 0)
			return r;
		if (poll(&poll_fd, 1, left > INT32_MAX ? INT32_MAX : (int)left) < 0 && errno != EINTR)
			return -errno;
	}
}

/* returns 0 for a call that is to be waited for, whether or not the broker has got it */
static int call_send(struct shmb_client *client, Call *call) {
	int r = call_send_until(client, call);

	/* a broker that hung up may have said why, and another one may follow */
	if (r == -EPIPE || r == -ECONNRESET)
		r = 0;
	pthread_mutex_lock(&client->io_lock);
	if (r == -EAGAIN && call->deadline != DEADLINE_NONE) {
		r = SHMB_E_TIMED_OUT;
		if (!call->done)
			call_abandon(client, call, r, false);
	} else if (r && !call->done) {
		client_finish_call(client, call, r);
	}
	/* who makes the connection anew waits for the last one */
	if (!--client->n_sending && client->away)
		pthread_cond_broadcast(&client->io_changed);
	pthread_mutex_unlock(&client->io_lock);
	return r;
}

static int call_wait(struct shmb_client *client, Call *call) {
	uint64_t heard = UINT64_MAX;
	int64_t deadline = 0;

	pthread_mutex_lock(&client->io_lock);
	while (!call->done) {
		if (!client->away) {
			if (client_turn(client, call->deadline) && !call->done && !client->away)
				call_abandon(client, call, SHMB_E_TIMED_OUT, true);
			continue;
		}
		/* a broker that ends again and again is waited for as long as one that stays away */
		if (heard != client->n_received) {
			heard = client->n_received;
			deadline = resume_deadline(client);
		}
		if (resume_await(client, deadline) == -ETIMEDOUT && !call->done)
			call_abandon(client, call, SHMB_E_AGAIN, true);
		call->deadline = call_deadline(client, call);
	}
	pthread_mutex_unlock(&client->io_lock);
	return call->result;
}

static int call_refusal(const Call *call) {
	WireReader reader = call_body(call);
	WireErrorReply error;
	const char *text;

	wire_read(&reader, &error, sizeof(error));
	text = wire_read_bytes(&reader, error.text_length);
	return text ? error_setn(call->result, text, error.text_length) : error_plain(call->result);
}

int call_run(struct shmb_client *client, WireWriter *request, const int *fds, size_t n_fds, Call *call) {
	return call_run_long(client, request, fds, n_fds, 0, call);
}

int call_run_long(struct shmb_client *client, WireWriter *request, const int *fds, size_t n_fds, int wait_ms,
		  Call *call) {
	int r;

	*call = (Call){
		.request = request->buffer,
		.request_fds = fds,
		.n_request_fds = n_fds,
		.wait_ms = wait_ms,
	};
	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	call->request_size = wire_write_end(request);
	if (!call->request_size)
		return error_set(SHMB_E_INVALID, "the request is too long");
	if (wait_ms >= 0 && atomic_load(&client->call_timeout_ms) >= 0) {
		call->spare = abandoned_new(call);
		if (!call->spare)
			return error_plain(-ENOMEM);
	}
	call->deadline = call_deadline(client, call);
	r = call_start(client, call) ?: call_send(client, call);
	if (r == SHMB_E_TIMED_OUT)
		return error_set(r, "the broker takes no requests: it was not asked");
	if (r > 0)
		return client_error(client, r);
	/* the kernel speaks for the broker, which takes no fd of such a session (SO_PASSRIGHTS, Linux 6.16) */
	if (r == -EPERM && n_fds)
		return error_set(SHMB_E_PERMISSION, "this session has not the role owner");
	if (r)
		return error_plain(r);
	r = call_wait(client, call);
	client_settle(client);
	if (r > 0 && call->message)
		return call_refusal(call);
	return r ? client_error(client, r) : 0;
}

int call_fixed(struct shmb_client *client, uint16_t opcode, const void *request, size_t size, const char *tail,
	       Call *call, WireReader *body, void *ret, size_t ret_size) {
	WireWriter writer;
	_cleanup_(freep) uint8_t *buffer = client_request_begin(&writer, opcode);
	int r;

	*call = (Call){};
	if (!buffer)
		return error_plain(-ENOMEM);
	wire_write(&writer, request, size);
	if (tail)
		wire_write(&writer, tail, strlen(tail));
	r = call_run(client, &writer, NULL, 0, call);
	if (r)
		return r;
	*body = call_body(call);
	wire_read(body, ret, ret_size);
	return body->bad ? error_plain(-EPROTO) : 0;
}

int client_notify(struct shmb_client *client, uint32_t slot, uint32_t scan, uint64_t generation) {
	uint8_t buffer[sizeof(WireHeader) + sizeof(WireNotify)] __attribute__((aligned(8)));
	WireNotify notify = { .slot = slot, .scan = scan, .generation = generation };
	struct pollfd poll_fd = { .fd = client->fd, .events = POLLOUT };
	/* who has waited in vain once does not wait for each */
	int timeout = atomic_load(&client->has_missed_notice) ? 0 : atomic_load(&client->call_timeout_ms);
	WireWriter writer;
	size_t size;
	int r, n;

	/* serials of messages without a reply need only be set */
	wire_write_begin(&writer, buffer, sizeof(buffer), WIRE_OP_NOTIFY, 0, UINT64_MAX);
	wire_write(&writer, &notify, sizeof(notify));
	size = wire_write_end(&writer);
	while ((r = fd_send(client->fd, buffer, size, NULL, 0, MSG_DONTWAIT)) == -EAGAIN) {
		n = poll(&poll_fd, 1, timeout);
		if (n < 0 && errno != EINTR)
			return -errno;
		if (!n) {
			atomic_store(&client->has_missed_notice, true);
			return -ETIMEDOUT;
		}
	}
	return r;
}
