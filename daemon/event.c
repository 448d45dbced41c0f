/* SPDX-License-Identifier: Apache-2.0 */

#include <string.h>

#include "broker.h"
#include "event.h"
#include "lease.h"
#include "region.h"
#include "session.h"
#include "wire/codec.h"

/* events may take this part of what a peer may leave unread; the rest is for replies */
#define EVENT_SHARE 2

static void event_write(Session *to, const WireEvent *event, const char *name) {
	uint8_t buffer[sizeof(WireHeader) + sizeof(WireEvent) + 256] __attribute__((aligned(8)));
	WireWriter writer;

	wire_write_begin(&writer, buffer, sizeof(buffer), WIRE_OP_EVENT, WIRE_FLAG_EVENT, 0);
	wire_write(&writer, event, sizeof(*event));
	wire_write(&writer, name, event->name_length);
	to->broker->stats.events++;
	session_send(to, buffer, wire_write_end(&writer), NULL, 0);
}

static void event_send(Session *to, WireEvent event, const char *name, uint32_t pid, uint32_t uid) {
	Broker *broker = to->broker;

	if (to->state != SESSION_OPEN || to->dying)
		return;
	if (to->events_lost || to->conn.out_messages >= broker->config->unread_messages / EVENT_SHARE) {
		if (!to->events_lost)
			list_append(&broker->lost, &to->lost_link);
		to->events_lost++;
		broker->stats.events_dropped++;
		return;
	}
	event.pid = session_sees(to, uid) ? pid : 0;
	event.uid = session_sees(to, uid) ? uid : WIRE_ANY_UID;
	event_write(to, &event, name);
}

void events_turn(Broker *broker) {
	list_for_each (link, &broker->lost) {
		Session *session = container_of(link, Session, lost_link);
		WireEvent event = { .type = WIRE_EVENT_OVERFLOW, .count = session->events_lost, .uid = WIRE_ANY_UID };

		if (session->conn.out_messages || session->conn.sending)
			continue;
		list_remove(link);
		session->events_lost = 0;
		event_write(session, &event, "");
	}
}

static void event_broadcast(Broker *broker, const WireEvent *event, const char *name, uint32_t pid, uint32_t uid) {
	list_for_each (link, &broker->subscribers) {
		Session *session = container_of(link, Session, subscriber_link);

		if (session->event_mask & UINT32_C(1) << event->type)
			event_send(session, *event, name, pid, uid);
	}
}

void event_region(uint32_t type, Region *region) {
	WireEvent event = {
		.type = type,
		.slot = region->slot,
		.generation = region->generation,
		.session = region->owner_session,
		.size = region->size,
		.name_length = (uint16_t)region->name_length,
	};

	event_broadcast(region->broker, &event, region->name, region->identity->pid, region->owner_uid);
	/* whoever has a GPU's memory open keeps all of it from everybody: it is told as soon as its owner is done */
	if (type != WIRE_EVENT_GONE && type != WIRE_EVENT_REVOKED &&
	    (type != WIRE_EVENT_RETIRING || !region->object || !region->object->cuda))
		return;
	list_for_each (link, &region->maps) {
		Session *holder = container_of(link, Map, region_link)->session;

		if (!(holder->event_mask & UINT32_C(1) << type))
			event_send(holder, event, region->name, region->identity->pid, region->owner_uid);
	}
	list_for_each (link, &region->leases) {
		Session *holder = container_of(link, Lease, region_link)->session;

		if (!(holder->event_mask & UINT32_C(1) << type) && !map_find(holder, region))
			event_send(holder, event, region->name, region->identity->pid, region->owner_uid);
	}
}

void event_session(uint32_t type, const Session *subject) {
	WireEvent event = {
		.type = type, .session = subject->id, .size = subject->n_bytes, .count = subject->n_regions
	};

	event_broadcast(subject->broker, &event, "", subject->identity->pid, subject->identity->uid);
}

void event_subscribe(Session *session, uint32_t mask) {
	list_remove(&session->subscriber_link);
	if (mask)
		list_append(&session->broker->subscribers, &session->subscriber_link);
	session->event_mask = mask;
}
