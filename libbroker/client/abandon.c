/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Calls that nobody waits for any more, because the broker, which is there, has not answered in time. Each stays in the
 * client's list on the heap until its answer comes, so that no more requests are outstanding than the broker takes and
 * nothing is held for an answer that was not read: what a LOOKUP has got is given back by a RELEASE, and a RELEASE that
 * could not be sent is sent later. Only these two are asked for again from a broker that comes back.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"

static uint16_t opcode_of(const Call *call) {
	return ((const WireHeader *)call->request)->opcode;
}

static bool is_remembered(uint16_t opcode) {
	return opcode == WIRE_OP_LOOKUP || opcode == WIRE_OP_RELEASE;
}

Call *abandoned_new(const Call *call) {
	size_t size = is_remembered(opcode_of(call)) ? call->request_size : 0;
	Call *ret = calloc(1, sizeof(*ret) + size);

	if (!ret)
		return NULL;
	ret->is_abandoned = true;
	/* Call has the alignment that a message needs */
	ret->request = size ? (uint8_t *)(ret + 1) : NULL;
	ret->request_size = size;
	return ret;
}

void call_abandon(struct shmb_client *client, Call *call, int result, bool is_sent) {
	Call *spare = call->spare, **at = &client->calls;

	if (!spare || (!is_sent && opcode_of(call) != WIRE_OP_RELEASE)) {
		client_finish_call(client, call, result);
		return;
	}
	while (*at != call)
		at = &(*at)->next;
	if (spare->request)
		memcpy(spare->request, call->request, spare->request_size);
	spare->serial = call->serial;
	spare->is_unsent = !is_sent;
	spare->next = call->next;
	*at = spare;
	call->spare = NULL;
	call->result = result;
	call->done = true;
}

/* The leases of an answer to a LOOKUP, as a RELEASE in the same place, which is larger. Returns how many there are. */
static uint32_t make_release(Call *call, const uint8_t *message, size_t size) {
	WireReader reader = wire_reader_body(message, size);
	WireLookupResult result;
	WireCountHead head, *leases;
	WireWriter writer;

	wire_read(&reader, &head, sizeof(head));
	wire_write_begin(&writer, call->request, call->request_size, WIRE_OP_RELEASE, 0, call->serial);
	leases = wire_write(&writer, NULL, sizeof(*leases));
	for (uint32_t i = 0; i < head.count && !reader.bad && leases; ++i) {
		wire_read(&reader, &result, sizeof(result));
		(void)wire_read_bytes(&reader, result.text_length);
		(void)wire_read_bytes(&reader, result.handle_length);
		if (reader.bad || result.code || !result.lease)
			continue;
		wire_write(&writer, &(WireReleaseEntry){ .lease = result.lease }, sizeof(WireReleaseEntry));
		leases->count++;
	}
	call->request_size = wire_write_end(&writer);
	return call->request_size ? leases->count : 0;
}

void abandoned_answered(struct shmb_client *client, Call *call, const uint8_t *message, size_t size) {
	const WireHeader *header = (const WireHeader *)message;

	if (!call->request || opcode_of(call) != WIRE_OP_LOOKUP || header->flags & WIRE_FLAG_ERROR ||
	    !make_release(call, message, size)) {
		client_finish_call(client, call, 0);
		return;
	}
	call->serial = ++client->last_serial;
	((WireHeader *)call->request)->serial = call->serial;
	call->is_unsent = true;
}

void abandoned_send(struct shmb_client *client) {
	int r = 0;

	pthread_mutex_lock(&client->io_lock);
	/* whoever makes the connection anew sends them */
	for (Call *call = client->away || client->broken ? NULL : client->calls; call && !r; call = call->next) {
		if (!call->is_abandoned || !call->is_unsent)
			continue;
		r = fd_send(client->fd, call->request, call->request_size, NULL, 0, MSG_DONTWAIT);
		call->is_unsent = r != 0;
	}
	pthread_mutex_unlock(&client->io_lock);
}
