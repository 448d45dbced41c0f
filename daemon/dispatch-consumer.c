/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "broker.h"
#include "dispatch.h"
#include "lease.h"
#include "region.h"
#include "session.h"
#include "wire/fd.h"
#include "wire/name.h"
#include "wire/range.h"

#define WHY_UNREAD "no fds: too many of earlier replies are unread, or the broker's budget is used up"

/* what a session may have of a region, or why not */
static int check_use(const Session *session, const Region *region, uint32_t access, const char **ret_why) {
	if (!(session->roles & WIRE_ROLE_CONSUMER)) {
		*ret_why = "this session has not the role consumer";
		return SHMB_E_PERMISSION;
	}
	if (!region_admits(region, session)) {
		*ret_why = "the region's access list does not name this user";
		return SHMB_E_PERMISSION;
	}
	/* a name that is only resolved: the codec lets that through with NO_LEASE alone */
	if (!access)
		return 0;
	if (!(access & WIRE_ACCESS_READ) || access & ~(uint32_t)(WIRE_ACCESS_READ | WIRE_ACCESS_WRITE)) {
		*ret_why = "access is READ, or READ and WRITE";
		return SHMB_E_INVALID;
	}
	if (access & ~region->access) {
		*ret_why = "the region is offered for reading only";
		return SHMB_E_ACCESS;
	}
	/* GPU memory is mapped for reading by the consumer's own library */
	if (region->object->cuda)
		return 0;
	if (!(access & WIRE_ACCESS_WRITE) && region->object->key.mode != O_RDONLY && region->object->read_only_fd < 0) {
		*ret_why = "no read-only fd: the owner sent none and the broker cannot open the memory again";
		return SHMB_E_NO_READ_ONLY_FD;
	}
	return 0;
}

static int object_fd(const Object *object, uint32_t access) {
	return access & WIRE_ACCESS_WRITE || object->read_only_fd < 0 ? object->fd : object->read_only_fd;
}

/* finds a region that still grants leases; what is over is not found */
static Region *find_active(Broker *broker, const WireLookup *lookup, int *ret_code, const char **ret_why) {
	Region *region;

	region = registry_find(&broker->registry, lookup->name, lookup->entry.name_length);
	if (region)
		return region;
	/* names that are registered have been checked */
	*ret_code = wire_name_check(lookup->name, lookup->entry.name_length, ret_why);
	if (!*ret_code) {
		*ret_code = SHMB_E_NOT_FOUND;
		*ret_why = "no such region";
	}
	return NULL;
}

static int lookup_window(const Region *region, const WireLookupEntry *entry, uint64_t *ret_size, const char **ret_why) {
	uint64_t size = entry->size;

	if (size == WIRE_REST && entry->offset <= region->size)
		size = region->size - entry->offset;
	if (!range_within(entry->offset, size, region->size)) {
		*ret_why = "offset and size are not within the region";
		return SHMB_E_OUT_OF_BOUNDS;
	}
	*ret_size = size;
	return 0;
}

/* @lease is that of an earlier time that this was asked, or NULL */
static int lookup_one(Request *request, const WireLookup *lookup, uint32_t index, Lease *lease, WireLookupResult *ret,
		      int *fds, uint32_t *n_fds, const uint8_t **ret_handle, const char **ret_why) {
	Session *session = request->session;
	const WireLookupEntry *entry = &lookup->entry;
	uint64_t serial = request->header.serial;
	Region *region;
	uint64_t size;
	int r = 0;

	/* asked again: the lease that was granted then, whatever has become of the name */
	if (entry->flags & WIRE_LOOKUP_NO_LEASE)
		lease = NULL;
	/* of one that was revoked meanwhile the client knows nothing */
	if (lease && !lease->region)
		lease = lease_free(lease);
	region = lease ? lease->region : find_active(session->broker, lookup, &r, ret_why);
	if (!region)
		return r;
	r = check_use(session, region, entry->access, ret_why);
	if (!r)
		r = lookup_window(region, entry, &size, ret_why);
	if (r)
		return r;
	if (!(entry->flags & WIRE_LOOKUP_NO_LEASE) && !lease) {
		r = lease_new(session, region, serial, index, &lease);
		if (r) {
			*ret_why = "this user's quota of leases is used up";
			return r < 0 ? r : SHMB_E_QUOTA;
		}
	}
	*ret = (WireLookupResult){
		.slot = region->slot,
		.generation = region->generation,
		.lease = lease ? lease->id : 0,
		.offset = region->offset + entry->offset,
		.size = size,
		.object = region->object->id,
		.object_size = region->object->size,
		.flags = region->flags,
		.kind = region->kind,
		.access = (uint8_t)entry->access,
		.fd_index = WIRE_NO_FD,
	};
	if (region->object->cuda)
		memcpy(ret->device.bytes, region->object->cuda->record.device, sizeof(ret->device.bytes));
	if (entry->flags & WIRE_LOOKUP_WANT_FD && region->kind == WIRE_KIND_CUDA_IPC) {
		ret->handle_length = WIRE_HANDLE_SIZE;
		*ret_handle = region->object->cuda->record.handle;
	} else if (entry->flags & WIRE_LOOKUP_WANT_FD) {
		ret->fd_index = (uint16_t)*n_fds;
		fds[(*n_fds)++] = object_fd(region->object, entry->access);
	}
	return 0;
}

int dispatch_lookup(Request *request) {
	Broker *broker = request->session->broker;
	WireLookup entries[WIRE_BATCH_MAX];
	Lease *leases[WIRE_BATCH_MAX] = {};
	WireCountHead head = {};
	int fds[WIRE_BATCH_MAX], r;
	uint32_t n_asked = 0, n_fds = 0;

	if (wire_read_lookup(&request->body, entries, &head.count))
		return DISPATCH_MALFORMED;
	for (uint32_t i = 0; i < head.count; ++i)
		n_asked += !!(entries[i].entry.flags & WIRE_LOOKUP_WANT_FD);
	r = session_charge_unread(request->session, n_asked);
	if (r)
		return r < 0 ? r : request_refuse(request, (uint32_t)r, WHY_UNREAD);
	if (request->header.flags & WIRE_FLAG_RETRY)
		leases_find_asked(request->session, request->header.serial, leases);
	request_reply(request);
	wire_write(&request->reply, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; ++i) {
		WireLookupResult result = { .fd_index = WIRE_NO_FD };
		const uint8_t *handle = NULL;
		const char *why = "";

		r = lookup_one(request, &entries[i], i, leases[i], &result, fds, &n_fds, &handle, &why);
		if (r < 0) {
			r = SHMB_E_AGAIN;
			why = "the broker is out of memory";
		}
		if (r) {
			broker->stats.lookups_refused++;
			result = (WireLookupResult){ .code = (uint32_t)r, .fd_index = WIRE_NO_FD };
			result.text_length = request_text_length(why);
		} else {
			broker->stats.lookups++;
		}
		wire_write(&request->reply, &result, sizeof(result));
		if (result.text_length)
			wire_write(&request->reply, why, result.text_length);
		if (result.handle_length)
			wire_write(&request->reply, handle, result.handle_length);
	}
	request_send(request, fds, n_fds);
	return 0;
}

/* what the ledger says of a lease that is not there: asked again, this request may have been what released it */
static uint32_t released_before(const LedgerSerial *serial, uint32_t index) {
	if (!(serial->done >> index & 1))
		return SHMB_E_STALE;
	return serial->revoked >> index & 1 ? SHMB_E_REVOKED : 0;
}

static uint32_t release_one(Session *session, LedgerSerial *serial, uint64_t id, uint32_t index) {
	Lease *lease = lease_find(session, id);
	bool is_revoked = lease && !lease->region;

	if (!lease)
		return released_before(serial, index);
	session->broker->stats.releases++;
	if (!is_revoked)
		region_rescan(lease->region);
	ledger_set_serial_released(serial, index, is_revoked);
	lease_free(lease);
	return is_revoked ? SHMB_E_REVOKED : 0;
}

int dispatch_release(Request *request) {
	Session *session = request->session;
	uint64_t ids[WIRE_BATCH_MAX];
	WireCountHead head = {};
	LedgerSerial *serial;

	if (wire_read_release(&request->body, ids, &head.count))
		return DISPATCH_MALFORMED;
	serial = request_serial(request, NULL);
	request_reply(request);
	wire_write(&request->reply, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; ++i) {
		WireReleaseResult result = { .code = release_one(session, serial, ids[i], i) };

		wire_write(&request->reply, &result, sizeof(result));
	}
	request_send(request, NULL, 0);
	return 0;
}

static void attach_reply(Request *request) {
	const Session *session = request->session;
	const Registry *registry = &session->broker->registry;
	int fds[2] = { registry->read_only_fd, session->page.fd };
	WireAttachReply reply = {
		.mode = session->page.shape.mode,
		.lanes = session->page.shape.lanes,
		.capacity = registry->shape.capacity,
		.session_index = session->index,
		.registry_size = registry->shape.total_size,
		.page_size = session->page.shape.total_size,
		.epoch = registry->shape.epoch,
	};

	request_reply(request);
	wire_write(&request->reply, &reply, sizeof(reply));
	request_send(request, fds, 2);
}

int dispatch_attach(Request *request) {
	Session *session = request->session;
	Broker *broker = session->broker;
	WireAttachRequest attach;
	uint32_t lanes, mode;
	int r;

	if (wire_read_fixed(&request->body, &attach, sizeof(attach)) || attach.mode > WIRE_ATTACH_RMW ||
	    attach.lanes == 1 || attach.lanes > LAYOUT_LANES_MAX)
		return DISPATCH_MALFORMED;
	if (!(session->roles & WIRE_ROLE_CONSUMER))
		return request_refuse(request, SHMB_E_PERMISSION, "this session has not the role consumer");
	if (session->attached && request->header.flags & WIRE_FLAG_RETRY) {
		/* unlike the first time it can be asked for any number of times */
		r = session_charge_unread(session, 2);
		if (r)
			return r < 0 ? r : request_refuse(request, (uint32_t)r, WHY_UNREAD);
		attach_reply(request);
		return 0;
	}
	if (session->attached)
		return request_refuse(request, SHMB_E_STATE, "a lease page is attached already");
	r = account_charge(&session->page.charge, session->account, ACCOUNT_FDS, 1);
	if (r < 0)
		return r;
	if (r)
		return request_refuse(request, SHMB_E_NO_FDS, "no fds for a lease page");

	lanes = attach.lanes ?: broker->config->lanes;
	mode = attach.mode == WIRE_ATTACH_ASYMMETRIC && broker->barrier ? WIRE_ATTACH_ASYMMETRIC : WIRE_ATTACH_RMW;
	r = page_init(&session->page, session, broker->registry.shape.capacity, lanes, mode);
	if (r) {
		account_refund(&session->page.charge);
		return r == -ENOMEM ? r : request_refuse(request, SHMB_E_NO_FDS, keeper_why(r));
	}
	session->attached = true;
	ledger_update_session(&broker->ledger, session);
	attach_reply(request);
	return 0;
}

static int map_refuse_state(Request *request, const Region *region) {
	if (!region)
		return request_refuse(request, SHMB_E_STALE, "that generation is over");
	if (region->state == WIRE_STATE_REVOKED)
		return request_refuse(request, SHMB_E_REVOKED, "revoked");
	if (region->state == WIRE_STATE_RETIRING)
		return request_refuse(request, SHMB_E_RETIRING, "retiring: no new leases");
	return 0;
}

int dispatch_map(Request *request) {
	Session *session = request->session;
	WireMapRequest asked;
	WireMapReply reply;
	const ObjectCuda *cuda;
	Region *region;
	Map *map;
	bool want_fd;
	int fd, r;

	if (wire_read_fixed(&request->body, &asked, sizeof(asked)) || asked.reserved ||
	    asked.flags & ~(uint32_t)WIRE_MAP_WANT_FD)
		return DISPATCH_MALFORMED;
	region = registry_at(&session->broker->registry, asked.slot, asked.generation);
	if (!asked.access)
		return request_refuse(request, SHMB_E_INVALID, "access is READ, or READ and WRITE");
	r = map_refuse_state(request, region) ?: check_use(session, region, asked.access, &request->why);
	if (r)
		return r;
	want_fd =
		region->object->fd >= 0 && (asked.have_object != region->object->id || asked.flags & WIRE_MAP_WANT_FD);
	r = session_charge_unread(session, want_fd);
	if (r)
		return r < 0 ? r : request_refuse(request, (uint32_t)r, WHY_UNREAD);
	r = map_new(session, region, (uint8_t)asked.access, &map);
	if (r > 0)
		return request_refuse(request, SHMB_E_QUOTA, "this user's quota of maps is used up");
	if (r)
		return r;
	session->broker->stats.maps++;
	region_refresh(region);

	reply = (WireMapReply){
		.generation = region->generation,
		.object = region->object->id,
		.object_size = region->object->size,
		.offset = region->offset,
		.size = region->size,
		.flags = region->flags,
		.kind = region->kind,
		.access = (uint8_t)asked.access,
	};
	fd = object_fd(region->object, asked.access);
	cuda = region->object->cuda;
	if (cuda) {
		memcpy(reply.device.bytes, cuda->record.device, sizeof(reply.device.bytes));
		reply.owner_pid = cuda->record.owner_pid;
		reply.owner_pid_namespace = cuda->record.owner_pid_namespace;
		reply.handle_length = region->kind == WIRE_KIND_CUDA_IPC ? WIRE_HANDLE_SIZE : 0;
	}
	request_reply(request);
	wire_write(&request->reply, &reply, sizeof(reply));
	if (reply.handle_length)
		wire_write(&request->reply, cuda->record.handle, reply.handle_length);
	request_send(request, &fd, want_fd);
	return 0;
}

int dispatch_unmap(Request *request) {
	Session *session = request->session;
	WireUnmapRequest asked;
	Region *region;
	Map *map;

	if (wire_read_fixed(&request->body, &asked, sizeof(asked)) || asked.reserved)
		return DISPATCH_MALFORMED;
	region = registry_at(&session->broker->registry, asked.slot, asked.generation);
	map = region ? map_find(session, region) : NULL;
	if (!map && request->header.flags & WIRE_FLAG_RETRY) {
		request_reply(request);
		request_send(request, NULL, 0);
		return 0;
	}
	if (!map)
		return request_refuse(request, SHMB_E_STALE, "that generation is not mapped");
	if (map_count(map))
		return request_refuse(request, SHMB_E_IN_USE, "the lease page counts leases on it");
	map_free(map);
	region_rescan(region);
	request_reply(request);
	request_send(request, NULL, 0);
	return 0;
}

int dispatch_notify(Request *request) {
	Session *session = request->session;
	WireNotify notify;
	Registry *registry = &session->broker->registry;
	Region *region;

	if (wire_read_fixed(&request->body, &notify, sizeof(notify)))
		return DISPATCH_MALFORMED;
	session->broker->stats.notifies++;
	/*
	 * Whatever generation it names: a notice for one that is over has marked this scan as rung in the page, and a
	 * later release of the slot's next generation relies on it.
	 */
	region = notify.slot < registry->shape.capacity ? registry->regions[notify.slot] : NULL;
	if (region && map_find(session, region))
		region_rescan(region);
	return 0;
}
