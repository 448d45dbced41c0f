/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>

#include "map.h"

int shmb_client_subscribe(struct shmb_client *client, uint32_t mask) {
	WireSubscribeRequest request = { .mask = mask };
	WireWriter writer;
	Call call;
	_cleanup_(freep) uint8_t *buffer = client_request_begin(&writer, WIRE_OP_SUBSCRIBE);
	uint32_t before;
	int r;

	if (!buffer)
		return error_plain(-ENOMEM);
	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	/* before the reply: events may come with it */
	pthread_mutex_lock(&client->io_lock);
	before = client->event_mask;
	client->event_mask = mask;
	pthread_mutex_unlock(&client->io_lock);
	wire_write(&writer, &request, sizeof(request));
	r = call_run(client, &writer, NULL, 0, &call);
	call_end(&call);
	if (r) {
		pthread_mutex_lock(&client->io_lock);
		client->event_mask = before;
		pthread_mutex_unlock(&client->io_lock);
	}
	return r;
}

void shmb_client_set_event_callback(struct shmb_client *client,
				    void (*callback)(void *userdata, const struct shmb_event *), void *userdata) {
	if (client_is_foreign(client))
		return;
	pthread_mutex_lock(&client->io_lock);
	client->callback = callback;
	client->callback_userdata = userdata;
	pthread_mutex_unlock(&client->io_lock);
}

/* the next event, an OVERFLOW for those that were not kept; io_lock is held */
static bool take_locked(struct shmb_client *client, struct shmb_event *ret) {
	EventNode *node = client->events;

	if (node) {
		client->events = node->next;
		if (!client->events)
			client->events_tail = &client->events;
		client->n_events--;
		*ret = node->event;
		free(node);
		resume_show_events(client);
		return true;
	}
	if (!client->events_lost)
		return false;
	*ret = (struct shmb_event){ .type = SHMB_EVENT_OVERFLOW, .count = client->events_lost, .uid = SHMB_ANY_UID };
	client->events_lost = 0;
	resume_show_events(client);
	return true;
}

static bool take_event(struct shmb_client *client, struct shmb_event *ret) {
	bool taken;

	pthread_mutex_lock(&client->io_lock);
	taken = take_locked(client, ret);
	pthread_mutex_unlock(&client->io_lock);
	return taken;
}

/* One thread at a time delivers, so that events stay in order and a callback that asks for something is not nested. */
void client_settle(struct shmb_client *client) {
	void (*callback)(void *userdata, const struct shmb_event *event);
	struct shmb_event event;
	void *userdata;

	maps_settle(client);
	abandoned_send(client);
	lease_ring_missed(client);
	pthread_mutex_lock(&client->io_lock);
	/* without a callback, events of a subscription wait for shmb_client_next_event() */
	while (!client->delivering && (client->callback || !client->event_mask) && take_locked(client, &event)) {
		callback = client->callback;
		userdata = client->callback_userdata;
		client->delivering = true;
		pthread_mutex_unlock(&client->io_lock);
		if (callback)
			callback(userdata, &event);
		pthread_mutex_lock(&client->io_lock);
		client->delivering = false;
	}
	pthread_mutex_unlock(&client->io_lock);
}

int shmb_client_next_event(struct shmb_client *client, struct shmb_event *ret, int timeout) {
	int64_t deadline = timeout < 0 ? INT64_MAX : client_now() + timeout, left;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	for (;;) {
		if (take_event(client, ret))
			return 0;
		left = deadline == INT64_MAX ? -1 : deadline - client_now();
		maps_settle(client);
		r = client_read(client, left < 0 && deadline != INT64_MAX ? 0 : (int)left);
		if (r == -ETIMEDOUT && (timeout >= 0 && client_now() >= deadline))
			return error_plain(SHMB_E_TIMED_OUT);
		if (r && r != -ETIMEDOUT)
			return take_event(client, ret) ? 0 : client_error(client, r);
	}
}
