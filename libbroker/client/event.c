/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "client.h"

int shmb_client_subscribe(struct shmb_client *client, uint32_t mask) {
	WireSubscribeRequest request = { .mask = mask };
	WireWriter writer;
	Call call;
	_cleanup_(freep) uint8_t *buffer = client_request_begin(&writer, WIRE_OP_SUBSCRIBE);
	int r;

	if (!buffer)
		return error_plain(-ENOMEM);
	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	/* before the reply: events may come with it */
	pthread_mutex_lock(&client->io_lock);
	client->event_mask = mask;
	pthread_mutex_unlock(&client->io_lock);
	wire_write(&writer, &request, sizeof(request));
	r = call_run(client, &writer, NULL, 0, &call);
	call_end(&call);
	return r;
}

void shmb_client_set_event_callback(struct shmb_client *client, void (*callback)(void *userdata, const struct shmb_event *),
				    void *userdata) {
	if (client_is_foreign(client))
		return;
	pthread_mutex_lock(&client->io_lock);
	client->callback = callback;
	client->callback_userdata = userdata;
	pthread_mutex_unlock(&client->io_lock);
}

static bool take_event(struct shmb_client *client, struct shmb_event *ret) {
	EventNode *node;

	pthread_mutex_lock(&client->io_lock);
	node = client->events;
	if (node) {
		client->events = node->next;
		if (!client->events)
			client->events_tail = &client->events;
		client->n_events--;
		*ret = node->event;
	} else if (client->events_lost) {
		*ret = (struct shmb_event){ .type = SHMB_EVENT_OVERFLOW, .count = client->events_lost, .uid = SHMB_ANY_UID };
		client->events_lost = 0;
	} else {
		pthread_mutex_unlock(&client->io_lock);
		return false;
	}
	pthread_mutex_unlock(&client->io_lock);
	free(node);
	return true;
}

static int64_t now_ms(void) {
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int shmb_client_next_event(struct shmb_client *client, struct shmb_event *ret, int timeout) {
	int64_t deadline = timeout < 0 ? INT64_MAX : now_ms() + timeout, left;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	for (;;) {
		if (take_event(client, ret))
			return 0;
		left = deadline == INT64_MAX ? -1 : deadline - now_ms();
		r = client_read(client, left < 0 && deadline != INT64_MAX ? 0 : (int)left);
		if (r == -ETIMEDOUT && (timeout >= 0 && now_ms() >= deadline))
			return error_plain(SHMB_E_TIMED_OUT);
		if (r && r != -ETIMEDOUT)
			return take_event(client, ret) ? 0 : error_plain(r);
	}
}
