/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <string.h>

#include "broker.h"
#include "dispatch.h"
#include "log.h"
#include "region.h"
#include "session.h"
#include "wait.h"
#include "wire/name.h"

static int write_registered(Request *request, int r, const Region *region, const char *why) {
	WireRegisterResult result = {};

	if (r < 0) {
		r = SHMB_E_AGAIN;
		why = "the broker is out of memory";
	}
	if (r) {
		request->session->broker->stats.registrations_refused++;
		result.code = (uint32_t)r;
		result.text_length = request_text_length(why);
	} else {
		result.slot = region->slot;
		result.generation = region->generation;
		result.object = region->object->id;
		result.flags = region->flags;
	}
	wire_write(&request->reply, &result, sizeof(result));
	wire_write(&request->reply, why, result.text_length);
	return r;
}

int dispatch_register(Request *request) {
	Session *session = request->session;
	Broker *broker = session->broker;
	WireRegister entries[WIRE_BATCH_MAX];
	RegisterFds fds = { .fds = request->fds };
	WireCountHead head = {};
	char why[WIRE_TEXT_MAX];
	Region *region;
	int r;

	if (wire_read_register(&request->body, (uint32_t)request->n_fds, entries, &head.count))
		return DISPATCH_MALFORMED;
	/* fds of which one hangs in close() must not pile up */
	if (request->n_fds && broker_is_suspended(broker, session->peer.uid)) {
		if (closer_pending(broker->closer, session->peer.uid) > BROKER_SUSPENDED_FDS_MAX)
			session_disconnect(session, SHMB_E_AGAIN, "fds of this user wait for a close that hangs");
		return request_refuse(request, SHMB_E_AGAIN,
				      "an fd of this user hangs in close(): until it ends no further fd is taken");
	}

	request_reply(request);
	wire_write(&request->reply, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; ++i) {
		why[0] = 0;
		r = region_register(session, &entries[i], &fds, &region, why);
		write_registered(request, r, region, why);
	}
	for (size_t i = 0; i < request->n_fds; ++i)
		if (fds.taken >> i & 1)
			request->fds[i] = -EBADF;
	request_send(request, NULL, 0);
	return 0;
}

/* may the session retire this region by name? */
static int check_right(const Session *session, const Region *region) {
	if (region_is_mine(region, session) || session->roles & WIRE_ROLE_ADMIN)
		return 0;
	/* the CLI retires regions of its own user, whichever process registered them */
	if (region->owner_uid == session->peer.uid && !session->peer.overflow_uid)
		return 0;
	return SHMB_E_PERMISSION;
}

typedef struct Retirement {
	Request *request;
	WireUnregisterRequest asked;
	Wait *wait; /* holds the results even if nobody waits */
} Retirement;

static int retire_by_name(Retirement *retirement, const WireName *name, uint32_t index) {
	Session *session = retirement->request->session;
	WireUnregisterResult *result = &retirement->wait->results[index];
	char *text = retirement->wait->texts[index];
	const char *why;
	Region *region;
	int r;

	result->code = (uint32_t)wire_name_check(name->name, name->entry.name_length, &why);
	if (result->code) {
		strcpy(text, why);
		return 0;
	}
	region = registry_find(&session->broker->registry, name->name, name->entry.name_length);
	if (!region || (name->entry.generation && region->generation != name->entry.generation)) {
		result->code = region ? SHMB_E_STALE : SHMB_E_NOT_FOUND;
		strcpy(text, wire_error_text(result->code));
		return 0;
	}
	result->code = (uint32_t)check_right(session, region);
	if (result->code) {
		strcpy(text, "the region belongs to another user");
		return 0;
	}
	result->generation = region->generation;
	result->state = WIRE_UNREGISTERED_DRAINING;
	/* before it is retired: FORCE makes it gone at once */
	r = wait_add(retirement->wait, region, index);
	if (r)
		return r;
	result->discarded = region_retire(region, retirement->asked.mode, text);
	retirement->wait->reply.discarded += result->discarded;
	return 0;
}

static bool in_scope(const Session *session, const Region *region, uint32_t scope) {
	switch (scope) {
	case WIRE_SCOPE_SESSION:
		return region->owner == session;
	case WIRE_SCOPE_UID:
		return region->owner_uid == session->peer.uid;
	default:
		return true;
	}
}

static int retire_all(Retirement *retirement) {
	Session *session = retirement->request->session;
	Registry *registry = &session->broker->registry;
	Wait *wait = retirement->wait;
	char text[WIRE_TEXT_MAX];
	int r;

	for (uint32_t slot = 0; slot < registry->n_used; ++slot) {
		Region *region = registry->regions[slot];

		if (!region || region->state == WIRE_STATE_REVOKED ||
		    !in_scope(session, region, retirement->asked.scope))
			continue;
		r = wait_add(wait, region, UINT32_MAX);
		if (r)
			return r;
		wait->reply.discarded += region_retire(region, retirement->asked.mode, text);
	}
	return 0;
}

static int check_scope(Request *request, uint32_t scope) {
	Session *session = request->session;

	if (scope == WIRE_SCOPE_ALL && !(session->roles & WIRE_ROLE_ADMIN))
		return request_refuse(request, SHMB_E_PERMISSION, "all regions of all users: needs the role admin");
	if (scope == WIRE_SCOPE_UID && session->peer.overflow_uid)
		return request_refuse(request, SHMB_E_PERMISSION, "this host cannot tell this user from others");
	return 0;
}

int dispatch_unregister(Request *request) {
	Session *session = request->session;
	WireName names[WIRE_BATCH_MAX];
	Retirement retirement = { .request = request };
	WireUnregisterRequest *asked = &retirement.asked;
	Wait *wait;
	int r;

	if (wire_read_unregister(&request->body, asked, names))
		return DISPATCH_MALFORMED;
	r = check_scope(request, asked->scope);
	if (r)
		return r;
	r = wait_new(&wait, session, request->header.serial);
	if (r)
		return r;
	retirement.wait = wait;
	wait->by_name = asked->scope == WIRE_SCOPE_NAMES;
	wait->reply.count = asked->count;

	if (!wait->by_name)
		r = retire_all(&retirement);
	for (uint32_t i = 0; i < asked->count && !r; ++i)
		r = retire_by_name(&retirement, &names[i], i);
	if (r) {
		wait_free(wait);
		return r;
	}
	regions_scan(session->broker);
	wait_start(wait, asked->flags & WIRE_UNREGISTER_WAIT ? asked->timeout_ms : 0);
	return 0;
}
