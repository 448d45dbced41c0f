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

/* May the session retire this region by name? Whoever names a principal has that user's rights and no other. */
static int check_right(const Session *session, const Region *region, uint32_t principal) {
	if (principal != WIRE_ANY_UID)
		return region->owner_uid == principal ? 0 : SHMB_E_PERMISSION;
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
	Wait *wait;			 /* holds the results even if nobody waits */
	LedgerSerial *serial;		 /* of this request, in the ledger */
	bool again;			 /* it was begun by an earlier broker */
	bool is_known;			 /* what follows has been looked for, once for all entries */
	Region *retired[WIRE_BATCH_MAX]; /* by this very request when it was first sent */
} Retirement;

static void find_all_retired(Retirement *retirement) {
	const Session *session = retirement->request->session;
	const Registry *registry = &session->broker->registry;

	retirement->is_known = true;
	for (uint32_t slot = 0; slot < registry->n_used; ++slot) {
		const LedgerRegion *at = ledger_region(&session->broker->ledger, slot);

		if (registry->regions[slot] && at->retired_session == session->id &&
		    at->retired_serial == retirement->request->header.serial && at->retired_index < WIRE_BATCH_MAX)
			retirement->retired[at->retired_index] = registry->regions[slot];
	}
}

/* a region that this very request retired when it was first sent, and that still drains */
static Region *find_retired(Retirement *retirement, uint32_t index) {
	Region *region;

	if (!retirement->is_known)
		find_all_retired(retirement);
	region = retirement->retired[index];
	return region && region->state != WIRE_STATE_REVOKED ? region : NULL;
}

static int retire(Retirement *retirement, Region *region, uint32_t index) {
	WireUnregisterResult *result = &retirement->wait->results[index];
	Session *session = retirement->request->session;
	int r;

	result->generation = region->generation;
	result->state = WIRE_UNREGISTERED_DRAINING;
	/* before it is retired: FORCE makes it gone at once */
	r = wait_add(retirement->wait, region, index);
	if (r)
		return r;
	ledger_set_region_retired(&session->broker->ledger, region, session->id, retirement->request->header.serial,
				  index);
	retirement->serial->done |= UINT64_C(1) << index;
	result->discarded = region_retire(region, retirement->asked.mode, retirement->wait->texts[index]);
	retirement->wait->reply.discarded += result->discarded;
	return 0;
}

/*
 * Asked again: what was begun then is done, or is done now, and whoever has the name since is not meant. What still
 * has its name is left to the caller, who asks for the right: this message need not name what the first one did.
 */
static int retire_again(Retirement *retirement, Region *region, uint32_t index, bool *ret_done) {
	WireUnregisterResult *result = &retirement->wait->results[index];

	*ret_done = true;
	if (!(retirement->serial->done >> index & 1) || (region && region->generation <= retirement->serial->counter)) {
		*ret_done = false;
		return 0;
	}
	region = find_retired(retirement, index);
	if (region)
		return retire(retirement, region, index);
	result->state = WIRE_UNREGISTERED_GONE;
	retirement->wait->reply.gone++;
	return 0;
}

static int retire_by_name(Retirement *retirement, const WireName *name, uint32_t index) {
	Session *session = retirement->request->session;
	WireUnregisterResult *result = &retirement->wait->results[index];
	char *text = retirement->wait->texts[index];
	const char *why;
	Region *region;
	bool done;
	int r;

	result->code = (uint32_t)wire_name_check(name->name, name->entry.name_length, &why);
	if (result->code) {
		strcpy(text, why);
		return 0;
	}
	region = registry_find(&session->broker->registry, name->name, name->entry.name_length);
	if (retirement->again) {
		r = retire_again(retirement, region, index, &done);
		if (r || done)
			return r;
		if (region && region->generation > retirement->serial->counter)
			region = NULL;
	}
	if (!region || (name->entry.generation && region->generation != name->entry.generation)) {
		result->code = region ? SHMB_E_STALE : SHMB_E_NOT_FOUND;
		strcpy(text, wire_error_text(result->code));
		return 0;
	}
	result->code = (uint32_t)check_right(session, region, retirement->asked.principal);
	if (result->code) {
		strcpy(text, "the region belongs to another user");
		return 0;
	}
	return retire(retirement, region, index);
}

static bool in_scope(const Session *session, const Region *region, const WireUnregisterRequest *asked) {
	switch (asked->scope) {
	case WIRE_SCOPE_SESSION:
		return region->owner == session;
	case WIRE_SCOPE_UID:
		return region->owner_uid == (asked->principal == WIRE_ANY_UID ? session->peer.uid : asked->principal);
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

		if (!region || region->state == WIRE_STATE_REVOKED || !in_scope(session, region, &retirement->asked))
			continue;
		/* asked again: what has come since is not meant */
		if (region->generation > retirement->serial->counter)
			continue;
		r = wait_add(wait, region, UINT32_MAX);
		if (r)
			return r;
		wait->reply.discarded += region_retire(region, retirement->asked.mode, text);
	}
	return 0;
}

static int check_scope(Request *request, uint32_t scope, uint32_t principal) {
	Session *session = request->session;

	if (principal != WIRE_ANY_UID && principal != session->peer.uid && !(session->rights & WIRE_RIGHT_DELEGATE))
		return request_refuse(request, SHMB_E_PERMISSION, "acting for another user needs the right delegate");
	if (principal != WIRE_ANY_UID && peer_is_overflow_uid(principal))
		return request_refuse(request, SHMB_E_PERMISSION, "this host cannot tell this user from others");
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
	r = check_scope(request, asked->scope, asked->principal);
	if (r)
		return r;
	r = wait_new(&wait, session, request->header.serial);
	if (r)
		return r;
	retirement.wait = wait;
	retirement.serial = request_serial(request, &retirement.again);
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
