/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "broker.h"
#include "event.h"
#include "lease.h"
#include "log.h"
#include "policy.h"
#include "region.h"
#include "session.h"
#include "wire/fd.h"
#include "wire/name.h"
#include "wire/range.h"

#define WHY(_why, ...) ((void)snprintf((_why), WIRE_TEXT_MAX, __VA_ARGS__))

static int refuse(char *why, int code, const char *text) {
	WHY(why, "%s", text);
	return code;
}

static int refuse_charge(Broker *broker, char *why, int r) {
	if (r < 0)
		return r;
	broker->stats.quota_refusals++;
	switch (r) {
	case ACCOUNT_E_FULL:
		return refuse(why, SHMB_E_NO_SLOTS, "the registry is full");
	case ACCOUNT_E_SHARE:
		return refuse(why, SHMB_E_QUOTA, "this user's fair share of the registry's slots is used up");
	default:
		return refuse(why, SHMB_E_QUOTA, "this user's quota of regions is used up");
	}
}

bool region_admits(const Region *region, const Session *session) {
	return !region->object || !region->object->n_acl || region_is_mine(region, session) ||
	       policy_acl_admits(region->object->acl, region->object->n_acl, &session->peer);
}

bool region_is_mine(const Region *region, const Session *session) {
	if (region->owner == session)
		return true;
	/* a peer that appears as the overflow uid has nothing uid-wide */
	return region->flags & WIRE_REGION_KEPT && region->owner_uid == session->peer.uid &&
	       !session->peer.overflow_uid;
}

static int check_request(Session *session, const WireRegister *request, char *why) {
	const WireRegisterEntry *entry = &request->entry;
	const char *text;
	int r;

	if (!(session->roles & WIRE_ROLE_OWNER))
		return refuse(why, SHMB_E_PERMISSION, "this session has not the role owner");
	r = wire_name_check(request->name, entry->name_length, &text);
	if (!r)
		r = wire_key_check(request->key, entry->key_length, &text);
	if (r)
		return refuse(why, r, text);
	if (entry->flags & WIRE_REGISTER_KEEP && !(session->rights & WIRE_RIGHT_KEEP))
		return refuse(why, SHMB_E_PERMISSION, "KEEP needs the right keep, [access] in shmbroker.conf");
	if (entry->flags & WIRE_REGISTER_KEEP && (session->peer.overflow_uid || peer_is_overflow_uid(entry->principal)))
		return refuse(why, SHMB_E_PERMISSION, "KEEP is not for users that this host cannot tell apart");
	if (entry->principal != WIRE_ANY_UID && entry->principal != session->peer.uid &&
	    !(session->rights & WIRE_RIGHT_DELEGATE))
		return refuse(why, SHMB_E_PERMISSION, "acting for another user needs the right delegate");
	if (!entry->size)
		return refuse(why, SHMB_E_OUT_OF_BOUNDS, "the size is 0");
	return 0;
}

/* Whoever names a principal takes nothing from anybody else, not even from itself. */
static bool may_replace(const Session *session, const WireRegister *request, const Region *holder) {
	uint32_t principal = request->entry.principal;

	if (principal == WIRE_ANY_UID)
		return region_is_mine(holder, session);
	return holder->owner_uid == principal &&
	       (holder->owner == session || (holder->flags & WIRE_REGION_KEPT && !peer_is_overflow_uid(principal)));
}

/* may @holder, if there is one, lose its name? The refusal tells nothing about it. */
static int check_holder(const Session *session, const WireRegister *request, const Region *holder, char *why) {
	if (holder && !(request->entry.flags & WIRE_REGISTER_REPLACE))
		return refuse(why, SHMB_E_EXISTS, "already exists");
	if (holder && !may_replace(session, request, holder))
		return refuse(why, SHMB_E_EXISTS, "already exists and is not this session's to replace");
	return 0;
}

static int check_name(Session *session, const WireRegister *request, uint32_t uid, char *why) {
	size_t length = request->entry.name_length;

	if (!policy_admits_name(session->broker, uid, request->name, length))
		return refuse(why, SHMB_E_RESERVED, "names with that prefix are reserved for another user");
	return check_holder(session, request, registry_find(&session->broker->registry, request->name, length), why);
}

static int refuse_object(Broker *broker, int r, const char *quota, char *why) {
	switch (r) {
	case OBJECT_E_QUOTA:
		broker->stats.quota_refusals++;
		return refuse(why, SHMB_E_QUOTA, quota);
	case OBJECT_E_NO_FDS:
		broker->stats.quota_refusals++;
		return refuse(why, SHMB_E_NO_FDS, "no fds: the broker's file descriptor budget is used up");
	case OBJECT_E_ACCESS_DIFFERS:
		return refuse(why, SHMB_E_ACCESS_DIFFERS, "access differs from another window of the same memory");
	case OBJECT_E_OTHER:
		return refuse(why, SHMB_E_AGAIN,
			      "the memory has the inode number of other memory of yours: retire that first");
	default:
		return r;
	}
}

static int take_cuda_object(Session *session, const WireRegister *request, RegisterFds *fds, CudaCheck *check,
			    uint32_t uid, Account *account, Object **ret, ObjectFds *ret_checked, char *why) {
	const WireRegisterEntry *entry = &request->entry;
	bool has_fd = entry->fd_index != WIRE_NO_FD;
	ObjectFds checked = {
		.fd = has_fd ? fds->fds[entry->fd_index] : -EBADF,
		.fd_taken = has_fd && fds->taken >> entry->fd_index & 1,
		.read_only_fd = -EBADF,
	};
	/* a handle or a VMM fd gives all of the memory to whoever has it: what is for reading is so by consent */
	ObjectKey key = {
		.session = entry->flags & WIRE_REGISTER_KEEP ? 0 : session->id,
		.uid = uid,
		.mode = O_RDWR,
	};
	int r;

	if (!range_within(entry->offset, entry->size, check->object_size))
		return refuse(why, SHMB_E_OUT_OF_BOUNDS, "offset and size are not within the allocation");
	r = objects_get_cuda(&session->broker->objects, &key, check, &checked, account, request->acl, entry->acl_count,
			     ret);
	if (checked.fd_taken)
		fds->taken |= UINT64_C(1) << entry->fd_index;
	*ret_checked = checked;
	return refuse_object(session->broker, r, "this user's quota of GPU bytes or share of fds is used up", why);
}

static int take_object(Session *session, const WireRegister *request, RegisterFds *fds, uint32_t uid, Account *account,
		       Object **ret, ObjectFds *ret_checked, char *why) {
	const WireRegisterEntry *entry = &request->entry;
	Broker *broker = session->broker;
	bool has_read_only = entry->read_only_fd_index != WIRE_NO_FD;
	ObjectFds checked = {};
	ObjectKey key;
	int r;

	r = object_fds_check(fds->fds[entry->fd_index], has_read_only ? fds->fds[entry->read_only_fd_index] : -EBADF,
			     policy_accepts_unsealed(broker, session), broker->config->require_allocated, &checked,
			     why);
	if (r == SHMB_E_BAD_FD) {
		broker->stats.fds_refused++;
		session_log(session, LOG_PEER_FD_REFUSED, "an fd was refused: %s", why);
	}
	if (r)
		return r;
	if (!range_within(entry->offset, entry->size, checked.size)) {
		WHY(why, "offset %llu and size %llu are not within %llu bytes", (unsigned long long)entry->offset,
		    (unsigned long long)entry->size, (unsigned long long)checked.size);
		return SHMB_E_OUT_OF_BOUNDS;
	}
	if (entry->access & WIRE_ACCESS_WRITE && checked.mode == O_RDONLY)
		return refuse(why, SHMB_E_ACCESS, "the fd is read-only: register it with access READ");

	key = (ObjectKey){
		.session = entry->flags & WIRE_REGISTER_KEEP ? 0 : session->id,
		.uid = uid,
		.mode = checked.mode,
		.device = checked.device,
		.inode = checked.inode,
	};
	checked.fd_taken = fds->taken >> entry->fd_index & 1;
	checked.read_only_fd_taken = has_read_only && fds->taken >> entry->read_only_fd_index & 1;
	r = objects_get(&broker->objects, &key, &checked, account, request->acl, entry->acl_count, ret);
	if (checked.fd_taken)
		fds->taken |= UINT64_C(1) << entry->fd_index;
	if (checked.read_only_fd_taken)
		fds->taken |= UINT64_C(1) << entry->read_only_fd_index;
	*ret_checked = checked;
	return refuse_object(broker, r, "this user's quota of bytes or share of fds is used up", why);
}

static Region *region_alloc(Broker *broker, const char *name, size_t name_length) {
	Region *region = malloc(sizeof(*region) + name_length + 1);

	if (!region)
		return NULL;
	*region = (Region){ .broker = broker, .slot = UINT32_MAX, .name_length = name_length };
	memcpy(region->name, name, name_length);
	region->name[name_length] = 0;
	list_init(&region->maps);
	list_init(&region->leases);
	list_init(&region->waits);
	return region;
}

static Region *region_new(Session *session, const WireRegister *request, uint32_t uid) {
	const WireRegisterEntry *entry = &request->entry;
	Region *region = region_alloc(session->broker, request->name, entry->name_length);

	if (!region)
		return NULL;
	region->offset = entry->offset;
	region->size = entry->size;
	region->kind = entry->kind;
	region->access = entry->access;
	region->key_length = (uint8_t)entry->key_length;
	region->owner_uid = uid;
	region->owner_session = entry->flags & WIRE_REGISTER_KEEP ? 0 : session->id;
	region->owner_number = session->index;
	region->identity = identity_ref(session->identity);
	region->born_ns = loop_now(session->broker->loop);
	return region;
}

static void region_set_flags(Region *region, const ObjectFds *checked, bool keep) {
	region->flags = region->object->flags | (keep ? WIRE_REGION_KEPT : 0);
	if (!(region->access & WIRE_ACCESS_WRITE) && !checked->read_only_enforced)
		region->flags |= WIRE_REGION_READ_ONLY_ADVISORY;
}

/* @owner NULL when it is kept */
static void region_link(Region *region, Session *owner) {
	list_append(&region->object->regions, &region->object_link);
	if (!owner)
		return;
	region->owner = owner;
	list_append(&owner->regions, &region->owner_link);
	owner->n_regions++;
	owner->n_bytes += region->size;
}

static uint32_t owner_uid(const Session *session, const WireRegister *request) {
	return request->entry.principal == WIRE_ANY_UID ? session->peer.uid : request->entry.principal;
}

int region_check(Session *session, const WireRegister *request, char *why) {
	int r = check_request(session, request, why);

	return r ? r : check_name(session, request, owner_uid(session, request), why);
}

int region_prepare(Session *session, const WireRegister *request, RegisterFds *fds, CudaCheck *check, Region **ret,
		   char *why) {
	Broker *broker = session->broker;
	uint32_t uid = owner_uid(session, request);
	Account *account, *other = NULL;
	ObjectFds checked = {};
	Region *region;
	int r;

	r = region_check(session, request, why);
	if (r)
		return r;
	account = uid == session->peer.uid ? session->account : (other = account_get(&broker->accounts, uid));
	region = region_new(session, request, uid);
	if (!account || !region) {
		account_put(other);
		region_free(region);
		return -ENOMEM;
	}

	/* all that can be refused comes before the object takes the fds over */
	r = account_charge(&region->charge, account, ACCOUNT_REGIONS, 1);
	if (r)
		r = refuse_charge(broker, why, r);
	else if (registry_reserve(&broker->registry, region))
		r = refuse(why, SHMB_E_NO_SLOTS, "the registry is full");
	else if (check)
		r = take_cuda_object(session, request, fds, check, uid, account, &region->object, &checked, why);
	else
		r = take_object(session, request, fds, uid, account, &region->object, &checked, why);
	account_put(other);
	if (r) {
		region_free(region);
		return r;
	}
	region_set_flags(region, &checked, request->entry.flags & WIRE_REGISTER_KEEP);
	*ret = region;
	return 0;
}

int region_commit(Region *region, Session *session, const WireRegister *request, uint64_t serial, uint32_t index,
		  char *why) {
	Broker *broker = region->broker;
	Region *replaces = registry_holder(&broker->registry, region);
	int r;

	r = check_holder(session, request, replaces, why);
	if (r) {
		region_free(region);
		return r;
	}
	region_link(region, region->flags & WIRE_REGION_KEPT ? NULL : session);
	ledger_put_region(&broker->ledger, region, request->key, session->id, serial, index);
	registry_publish(&broker->registry, region, replaces);
	if (replaces)
		region_retire(replaces, WIRE_MODE_STRICT, NULL);
	broker->stats.registrations++;
	event_region(WIRE_EVENT_REGISTERED, region);
	return 0;
}

/* who registered a region whose session is over */
static Identity *identity_of(const LedgerRegion *at) {
	Peer peer = { .pid = (pid_t)at->owner_pid, .uid = at->owner_uid };

	memcpy(peer.comm, at->comm, sizeof(at->comm));
	return identity_new(&peer);
}

Region *region_restore(Broker *broker, uint32_t slot, Object *object, Session *owner, Account *account) {
	const LedgerRegion *at = ledger_region(&broker->ledger, slot);
	Region *region = region_alloc(broker, at->name, at->name_length);

	if (!region)
		return NULL;
	region->identity = owner ? identity_ref(owner->identity) : identity_of(at);
	if (!region->identity) {
		free(region);
		return NULL;
	}
	region->generation = at->generation;
	region->offset = at->offset;
	region->size = at->size;
	region->kind = at->kind;
	region->access = at->access;
	region->key_length = at->key_length;
	region->flags = at->flags;
	region->state = at->state;
	region->owner_uid = at->owner_uid;
	region->owner_session = at->owner_session;
	region->owner_number = at->owner_number;
	region->born_ns = at->born_ns;
	if (!object) {
		region->pinned = at->pinned;
		memcpy(region->pinned_device, at->pinned_device, sizeof(region->pinned_device));
	}
	if (object) {
		region->object = object_ref(object);
		region_link(region, owner);
		account_take(&region->charge, account, ACCOUNT_REGIONS, 1);
	}
	return region;
}

void regions_find_asked(const Session *session, uint64_t serial, Region *ret_regions[WIRE_BATCH_MAX]) {
	const Registry *registry = &session->broker->registry;

	memset(ret_regions, 0, WIRE_BATCH_MAX * sizeof(ret_regions[0]));
	for (uint32_t slot = 0; slot < registry->n_used; ++slot) {
		const LedgerRegion *at = ledger_region(&session->broker->ledger, slot);

		if (registry->regions[slot] && at->asked_session == session->id && at->asked_serial == serial &&
		    at->asked_index < WIRE_BATCH_MAX)
			ret_regions[at->asked_index] = registry->regions[slot];
	}
}

Region *region_free(Region *region) {
	Broker *broker;

	if (!region)
		return NULL;
	broker = region->broker;
	loop_timer_unlink(&region->retire_timer);
	if (region->slot != UINT32_MAX) {
		/* before the slot can be used again */
		ledger_drop_region(&broker->ledger, region);
		registry_release(&broker->registry, region);
	}
	for (ListLink *link; (link = list_first(&region->maps));)
		map_free(container_of(link, Map, region_link));
	while (!list_is_empty(&region->leases))
		lease_revoke(container_of(list_first(&region->leases), Lease, region_link));
	list_remove(&region->scan_link);
	list_remove(&region->second_look_link);
	list_remove(&region->object_link);
	list_remove(&region->owner_link);
	if (region->owner) {
		region->owner->n_regions--;
		region->owner->n_bytes -= region->size;
	}
	object_unref(region->object);
	account_refund(&region->charge);
	identity_unref(region->identity);
	free(region);
	return NULL;
}

void region_refresh(Region *region) {
	if (!(region->flags & WIRE_REGION_SPARSE) || !region->object)
		return;
	object_refresh(region->object);
	if (region->object->flags & WIRE_REGION_SPARSE)
		return;
	region->flags &= ~(uint32_t)WIRE_REGION_SPARSE;
	registry_set_flags(&region->broker->registry, region);
}
