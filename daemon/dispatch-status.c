/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Looking around: lists are paged, and a page looks at a bounded number of slots or sessions, so that no list
 * keeps the loop from its other work. Cursors are positions, plus one.
 */

#include <string.h>

#include "broker.h"
#include "dispatch.h"
#include "lease.h"
#include "region.h"
#include "session.h"
#include "stats.h"

#define SLOTS_PER_PAGE 4096
#define SESSIONS_PER_PAGE 1024

static bool status_matches(const Session *session, const Region *region, const WireStatusRequest *asked,
			   const char *name) {
	/* asking for each uid in turn must not tell what the entries hide */
	if (asked->uid != WIRE_ANY_UID && (region->owner_uid != asked->uid || !session_sees(session, asked->uid)))
		return false;
	if (asked->states && !(asked->states & UINT32_C(1) << region->state))
		return false;
	if (asked->kinds && !(asked->kinds & UINT32_C(1) << region->kind))
		return false;
	if (asked->match == WIRE_MATCH_ANY)
		return true;
	if (asked->match == WIRE_MATCH_EXACT && region->name_length != asked->name_length)
		return false;
	return region->name_length >= asked->name_length && !memcmp(region->name, name, asked->name_length);
}

typedef struct Holders {
	WireStatusHolder at[WIRE_HOLDERS_MAX];
	uint32_t n;
	uint32_t total;
	uint32_t leases;
} Holders;

static void holders_add(Holders *holders, const Session *session, uint32_t leases, uint32_t flags) {
	WireStatusHolder *holder;

	holders->leases += leases;
	/* a session that holds by page and by message is one holder */
	for (uint32_t i = 0; i < holders->n; ++i) {
		if (holders->at[i].session != session->id)
			continue;
		holders->at[i].leases += leases;
		holders->at[i].flags |= flags;
		return;
	}
	holders->total++;
	if (holders->n == WIRE_HOLDERS_MAX)
		return;
	holder = &holders->at[holders->n++];
	*holder = (WireStatusHolder){
		.session = session->id,
		.pid = session->identity->pid,
		.uid = session->identity->uid,
		.leases = leases,
		.flags = flags | (session->state == SESSION_DETACHED ? WIRE_HOLDER_DETACHED : 0),
	};
	memcpy(holder->comm.bytes, session->identity->comm, sizeof(holder->comm.bytes));
}

static void holders_collect(Holders *holders, const Region *region) {
	holders->n = holders->total = holders->leases = 0;
	list_for_each (link, &region->maps) {
		Map *map = container_of(link, Map, region_link);
		uint32_t leases = map_count(map);

		if (leases)
			holders_add(holders, map->session, leases, WIRE_HOLDER_PAGE);
	}
	list_for_each (link, &region->leases)
		holders_add(holders, container_of(link, Lease, region_link)->session, 1, WIRE_HOLDER_MESSAGE);
}

static size_t status_size(const WireStatusEntry *entry) {
	return sizeof(*entry) + wire_padded(entry->name_length) + wire_padded(entry->container_length) +
	       wire_padded(entry->key_length) + entry->holder_count * sizeof(WireStatusHolder);
}

/* false when the page is full */
static bool status_write(Request *request, const Region *region, Holders *holders, bool with_holders) {
	Session *session = request->session;
	bool visible = session_sees(session, region->owner_uid);
	/* who acts for others has to tell them apart */
	bool shows_user = visible || session->rights & WIRE_RIGHT_DELEGATE;
	const char *container = visible ? region->identity->container : "";
	WireStatusEntry entry = {
		.slot = region->slot,
		.generation = region->generation,
		.size = region->size,
		.offset = region->offset,
		.object = region->object ? region->object->id : 0,
		.object_size = region->object ? region->object->size : region->pinned,
		.age_ns = loop_now(session->broker->loop) - region->born_ns,
		.session = region->owner_session,
		.pid = visible && !(region->flags & WIRE_REGION_KEPT) ? region->identity->pid : 0,
		.uid = shows_user ? region->owner_uid : WIRE_ANY_UID,
		.flags = region->flags,
		.state = (uint8_t)region->state,
		.kind = region->kind,
		.access = region->access,
		.key_length = shows_user ? region->key_length : 0,
		.name_length = (uint16_t)region->name_length,
		.container_length = (uint16_t)strlen(container),
	};

	holders_collect(holders, region);
	entry.leases = holders->leases;
	entry.holder_total = holders->total;
	if (!with_holders || !visible)
		holders->n = 0;
	entry.holder_count = holders->n;
	entry.length = (uint32_t)status_size(&entry);
	if (entry.length > wire_writer_room(&request->reply))
		return false;
	if (region->object && region->object->cuda)
		memcpy(entry.device.bytes, region->object->cuda->record.device, sizeof(entry.device.bytes));
	else if (!region->object)
		memcpy(entry.device.bytes, region->pinned_device, sizeof(entry.device.bytes));
	if (visible)
		memcpy(entry.comm.bytes, region->identity->comm, sizeof(entry.comm.bytes));
	wire_write(&request->reply, &entry, sizeof(entry));
	wire_write(&request->reply, region->name, region->name_length);
	wire_write(&request->reply, container, entry.container_length);
	wire_write(&request->reply, ledger_key(&session->broker->ledger, region->slot), entry.key_length);
	wire_write(&request->reply, holders->at, holders->n * sizeof(holders->at[0]));
	return true;
}

/* the head is written first and completed last */
static void page_begin(Request *request, WirePageHead **ret) {
	static const WirePageHead empty;

	request_reply(request);
	*ret = wire_write(&request->reply, &empty, sizeof(empty));
}

int dispatch_status(Request *request) {
	Registry *registry = &request->session->broker->registry;
	WireStatusRequest asked;
	WirePageHead *head;
	Holders holders;
	const char *name;
	uint64_t slot;
	uint32_t seen;

	if (wire_read_status(&request->body, &asked, &name))
		return DISPATCH_MALFORMED;
	page_begin(request, &head);
	for (slot = asked.cursor, seen = 0; slot < registry->n_used && seen < SLOTS_PER_PAGE; ++slot, ++seen) {
		Region *region = registry->regions[slot];

		if (!region || !status_matches(request->session, region, &asked, name))
			continue;
		if (asked.max && head->count >= asked.max)
			break;
		region_refresh(region);
		if (!status_write(request, region, &holders, asked.flags & WIRE_STATUS_HOLDERS))
			break;
		head->count++;
	}
	head->next = slot < registry->n_used ? slot : 0;
	request_send(request, NULL, 0);
	return 0;
}

static bool client_write(Request *request, const Session *client) {
	uint32_t leases = client->n_leases;
	WireClientEntry entry = {
		.pid = client->identity->pid,
		.session = client->id,
		.age_ns = loop_now(client->broker->loop) - client->born_ns,
		.bytes = client->n_bytes,
		.uid = client->identity->uid,
		.gid = client->peer.gid,
		.roles = client->roles,
		.rights = client->rights,
		.regions = client->n_regions,
		.maps = client->n_maps,
		.unread = (uint32_t)client->conn.out_messages,
		.flags = (client->attached ? WIRE_CLIENT_ATTACHED : 0) |
			 (client->state == SESSION_DETACHED ? WIRE_CLIENT_DETACHED : 0) |
			 (client->state == SESSION_AWAY ? WIRE_CLIENT_AWAY : 0),
		.container_length = (uint16_t)strlen(client->identity->container),
	};

	entry.length = (uint32_t)(sizeof(entry) + wire_padded(entry.container_length));
	if (entry.length > wire_writer_room(&request->reply))
		return false;
	list_for_each (link, &client->maps)
		leases += map_count(container_of(link, Map, session_link));
	entry.leases = leases;
	memcpy(entry.comm.bytes, client->identity->comm, sizeof(entry.comm.bytes));
	wire_write(&request->reply, &entry, sizeof(entry));
	wire_write(&request->reply, client->identity->container, entry.container_length);
	return true;
}

int dispatch_clients(Request *request) {
	Session *session = request->session;
	List *sessions = &session->broker->sessions;
	WireClientsRequest asked;
	WirePageHead *head;
	Session *last;
	uint32_t seen = 0;

	if (wire_read_fixed(&request->body, &asked, sizeof(asked)))
		return DISPATCH_MALFORMED;
	page_begin(request, &head);
	/* ids only grow, and the list is in their order: it goes on behind the last one, if that is still there */
	last = session_find(session->broker, asked.cursor);
	for (ListLink *link = last && !last->dying ? last->link.next : sessions->head.next; link != &sessions->head;
	     link = link->next) {
		Session *client = container_of(link, Session, link);

		if (client->id <= asked.cursor || client->state == SESSION_NEW ||
		    !session_sees(session, client->peer.uid) ||
		    (asked.uid != WIRE_ANY_UID && client->peer.uid != asked.uid))
			continue;
		if (seen++ == SESSIONS_PER_PAGE || (asked.max && head->count >= asked.max) ||
		    !client_write(request, client)) {
			head->next = asked.cursor;
			break;
		}
		head->count++;
		asked.cursor = client->id;
	}
	request_send(request, NULL, 0);
	return 0;
}

static bool stat_write(void *userdata, const Stat *stat) {
	Request *request = userdata;
	WireStatsEntry entry = {
		.value = stat->value,
		.uid = stat->uid,
		.type = stat->type,
		.name_length = (uint8_t)strlen(stat->name),
		.help_length = (uint16_t)strlen(stat->help),
	};

	if (wire_writer_room(&request->reply) <
	    sizeof(entry) + wire_padded(entry.name_length) + wire_padded(entry.help_length))
		return false;
	wire_write(&request->reply, &entry, sizeof(entry));
	wire_write(&request->reply, stat->name, entry.name_length);
	wire_write(&request->reply, stat->help, entry.help_length);
	return true;
}

int dispatch_stats(Request *request) {
	WireStatsRequest asked;
	WirePageHead *head;
	uint64_t next;

	if (wire_read_fixed(&request->body, &asked, sizeof(asked)) || asked.reserved)
		return DISPATCH_MALFORMED;
	page_begin(request, &head);
	head->count = stats_each(request->session, asked.cursor, asked.flags & WIRE_STATS_HELP,
				 asked.flags & WIRE_STATS_ACCOUNTS, &next, stat_write, request);
	head->next = next;
	request_send(request, NULL, 0);
	return 0;
}

static void info_write(void *userdata, const char *key, const char *value) {
	Request *request = userdata;
	WireInfoEntry entry = { .key_length = (uint16_t)strlen(key), .value_length = (uint16_t)strlen(value) };

	wire_write(&request->reply, &entry, sizeof(entry));
	wire_write(&request->reply, key, entry.key_length);
	wire_write(&request->reply, value, entry.value_length);
	((WireCountHead *)(request->reply.buffer + sizeof(WireHeader)))->count++;
}

int dispatch_info(Request *request) {
	WireCountHead head = {};

	if (!wire_reader_end(&request->body))
		return DISPATCH_MALFORMED;
	request_reply(request);
	wire_write(&request->reply, &head, sizeof(head));
	stats_info(request->session->broker, info_write, request);
	request_send(request, NULL, 0);
	return 0;
}
