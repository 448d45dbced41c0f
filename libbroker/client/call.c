/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client.h"

uint8_t *client_request_begin(WireWriter *writer, uint16_t opcode) {
	uint8_t *buffer = malloc(WIRE_MESSAGE_MAX);

	if (buffer)
		wire_write_begin(writer, buffer, WIRE_MESSAGE_MAX, opcode, 0, 0);
	return buffer;
}

void call_end(Call *call) {
	for (size_t i = 0; i < call->n_fds; ++i)
		(void)close_fd(call->fds[i]);
	free(call->message);
	call->message = NULL;
	call->n_fds = 0;
}

WireReader call_body(const Call *call) {
	return wire_reader_body(call->message, call->size);
}

/* the connection is over: nobody gets an answer any more */
static void client_break(struct shmb_client *client, int error) {
	if (!client->broken)
		client->broken = error;
	for (Call *call = client->calls; call; call = call->next) {
		call->result = client->broken;
		call->done = true;
	}
	client->calls = NULL;
	client->n_calls = 0;
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
	Call **at = &client->calls;
	Call *call;

	while (*at && (*at)->serial != header->serial)
		at = &(*at)->next;
	/* a refusal before HELLO was read has no serial: it is for whoever waits */
	if (!*at && !header->serial && header->flags & WIRE_FLAG_ERROR)
		at = &client->calls;
	call = *at;
	if (!call)
		return;
	*at = call->next;
	client->n_calls--;
	call->message = malloc(received->size);
	if (call->message) {
		memcpy(call->message, client->receive, received->size);
		call->size = received->size;
		call->result = received->fds_lost ? -EMFILE : reply_result(call->message, call->size, header);
		memcpy(call->fds, fds, received->n_fds * sizeof(*fds));
		call->n_fds = received->n_fds;
		for (size_t i = 0; i < received->n_fds; ++i)
			fds[i] = -EBADF;
	} else {
		call->result = -ENOMEM;
	}
	call->done = true;
}

/* receives one message as the reader; io_lock is not held */
static int client_receive(struct shmb_client *client, int timeout, int *fds, FdMessage *ret) {
	struct pollfd poll_fd = { .fd = client->fd, .events = POLLIN };
	int r;

	for (;;) {
		r = fd_receive(client->fd, client->receive, WIRE_MESSAGE_MAX, MSG_DONTWAIT, fds, ret);
		if (r != -EAGAIN)
			return !r && !ret->size ? -ECONNRESET : r;
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
	WireHeader header;
	int r;

	client->reading = true;
	pthread_mutex_unlock(&client->io_lock);
	r = client_receive(client, timeout, fds, &received);
	pthread_mutex_lock(&client->io_lock);
	client->reading = false;

	if (r == -ETIMEDOUT) {
		pthread_cond_broadcast(&client->io_changed);
		return r;
	}
	if (r) {
		client_break(client, r);
	} else if (received.truncated || wire_header_read(client->receive, received.size, &header)) {
		client_break(client, -EPROTO);
	} else if (header.flags & WIRE_FLAG_EVENT) {
		client_take_event(client, client->receive, received.size);
	} else {
		client_take_reply(client, &header, fds, &received);
	}
	for (size_t i = 0; i < received.n_fds; ++i)
		(void)close_fd(fds[i]);
	pthread_cond_broadcast(&client->io_changed);
	return 0;
}

int client_read(struct shmb_client *client, int timeout) {
	struct timespec deadline;
	int r = 0;

	pthread_mutex_lock(&client->io_lock);
	if (client->broken) {
		r = client->broken;
	} else if (!client->reading) {
		r = client_read_locked(client, timeout);
	} else if (timeout < 0) {
		pthread_cond_wait(&client->io_changed, &client->io_lock);
	} else if (timeout > 0) {
		clock_gettime(CLOCK_MONOTONIC, &deadline);
		deadline.tv_sec += timeout / 1000;
		deadline.tv_nsec += timeout % 1000 * 1000000;
		if (deadline.tv_nsec >= 1000000000) {
			deadline.tv_sec++;
			deadline.tv_nsec -= 1000000000;
		}
		r = -pthread_cond_timedwait(&client->io_changed, &client->io_lock, &deadline);
	} else {
		r = -ETIMEDOUT;
	}
	pthread_mutex_unlock(&client->io_lock);
	return r;
}

static int call_start(struct shmb_client *client, Call *call) {
	int r;

	pthread_mutex_lock(&client->io_lock);
	while (!client->broken && client->n_calls >= WIRE_OUTSTANDING_MAX) {
		if (client->reading)
			pthread_cond_wait(&client->io_changed, &client->io_lock);
		else
			(void)client_read_locked(client, -1);
	}
	r = client->broken;
	if (!r) {
		call->serial = ++client->last_serial;
		call->next = client->calls;
		client->calls = call;
		client->n_calls++;
	}
	pthread_mutex_unlock(&client->io_lock);
	return r;
}

static void call_abandon(struct shmb_client *client, Call *call) {
	pthread_mutex_lock(&client->io_lock);
	for (Call **at = &client->calls; *at; at = &(*at)->next) {
		if (*at == call) {
			*at = call->next;
			client->n_calls--;
			break;
		}
	}
	pthread_mutex_unlock(&client->io_lock);
}

static int call_wait(struct shmb_client *client, Call *call) {
	pthread_mutex_lock(&client->io_lock);
	while (!call->done) {
		if (client->reading)
			pthread_cond_wait(&client->io_changed, &client->io_lock);
		else
			(void)client_read_locked(client, -1);
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
	WireHeader *header = (WireHeader *)request->buffer;
	size_t size;
	int r;

	*call = (Call){};
	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	size = wire_write_end(request);
	if (!size)
		return error_set(SHMB_E_INVALID, "the request is too long");
	r = call_start(client, call);
	if (r)
		return error_plain(r);
	header->serial = call->serial;
	r = fd_send(client->fd, request->buffer, size, fds, n_fds, 0);
	if (r && r != -EPIPE && r != -ECONNRESET) {
		call_abandon(client, call);
		/* the kernel speaks for the broker, which takes no fd of such a session (SO_PASSRIGHTS, Linux 6.16) */
		if (r == -EPERM && n_fds)
			return error_set(SHMB_E_PERMISSION, "this session has not the role owner");
		return error_plain(r);
	}
	/* a broker that hung up may have said why */
	r = call_wait(client, call);
	client_settle(client);
	if (r > 0)
		return call_refusal(call);
	return r ? error_plain(r) : 0;
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
	WireWriter writer;
	size_t size;
	int r;

	/* serials of messages without a reply need only be set */
	wire_write_begin(&writer, buffer, sizeof(buffer), WIRE_OP_NOTIFY, 0, UINT64_MAX);
	wire_write(&writer, &notify, sizeof(notify));
	size = wire_write_end(&writer);
	while ((r = fd_send(client->fd, buffer, size, NULL, 0, MSG_DONTWAIT)) == -EAGAIN)
		if (poll(&poll_fd, 1, -1) < 0 && errno != EINTR)
			return -errno;
	return r;
}
