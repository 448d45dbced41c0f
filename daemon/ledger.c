/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "broker.h"
#include "kill-point.h"
#include "ledger.h"
#include "region.h"
#include "session.h"
#include "wait.h"
#include "wire/compat.h"
#include "wire/fd.h"
#include "wire/layout.h"

#define MAPS_PER_REGION 4
#define LEASES_PER_REGION 2

static uint64_t take(uint64_t *offset, uint64_t size) {
	uint64_t at = *offset;

	*offset = (at + size + LAYOUT_PAGE - 1) / LAYOUT_PAGE * LAYOUT_PAGE;
	return at;
}

static void header_init(LedgerHeader *ret, uint32_t session_capacity, uint32_t region_capacity, uint64_t epoch) {
	uint64_t offset = LAYOUT_PAGE;

	*ret = (LedgerHeader){
		.magic = LEDGER_MAGIC,
		.version = LEDGER_VERSION,
		.header_size = sizeof(LedgerHeader),
		.epoch = epoch,
		.session_capacity = session_capacity,
		.region_capacity = region_capacity,
		.map_capacity = region_capacity * MAPS_PER_REGION,
		.lease_capacity = region_capacity * LEASES_PER_REGION,
		.generation = layout_generation(epoch, 0),
		/* ids of one boot are not those of another */
		.last_session = layout_generation(epoch, 0),
		.last_lease = layout_generation(epoch, 0),
		.last_object = layout_generation(epoch, 0),
	};
	ret->sessions_offset = take(&offset, (uint64_t)session_capacity * sizeof(LedgerSession));
	ret->objects_offset = take(&offset, (uint64_t)region_capacity * sizeof(LedgerObject));
	ret->acls_offset = take(&offset, (uint64_t)region_capacity * sizeof(LedgerAcl));
	ret->cuda_offset = take(&offset, (uint64_t)region_capacity * sizeof(LedgerCuda));
	ret->regions_offset = take(&offset, (uint64_t)region_capacity * sizeof(LedgerRegion));
	ret->keys_offset = take(&offset, (uint64_t)region_capacity * sizeof(LedgerKey));
	ret->maps_offset = take(&offset, (uint64_t)ret->map_capacity * sizeof(LedgerMap));
	ret->leases_offset = take(&offset, (uint64_t)ret->lease_capacity * sizeof(LedgerLease));
	ret->total_size = offset;
}

static int ledger_init_free(Ledger *ledger) {
	const LedgerHeader *header = ledger->header;

	ledger->free_objects.at = calloc(header->region_capacity, sizeof(uint32_t));
	ledger->free_maps.at = calloc(header->map_capacity, sizeof(uint32_t));
	ledger->free_leases.at = calloc(header->lease_capacity, sizeof(uint32_t));
	return ledger->free_objects.at && ledger->free_maps.at && ledger->free_leases.at ? 0 : -ENOMEM;
}

int ledger_init(Ledger *ledger, uint32_t session_capacity, uint32_t region_capacity, uint64_t epoch) {
	_cleanup_(closep) int fd = -EBADF;
	LedgerHeader header;
	void *map;
	int r;

	*ledger = (Ledger){ .fd = -EBADF };
	header_init(&header, session_capacity, region_capacity, epoch);
	fd = memfd_create("shmbroker-ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)header.total_size) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 || fchmod(fd, 0600) < 0)
		return -errno;
	map = mmap(NULL, header.total_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return -errno;
	memcpy(map, &header, sizeof(header));
	ledger->header = map;
	ledger->fd = steal_fd(&fd);
	r = ledger_init_free(ledger);
	if (r)
		ledger_deinit(ledger);
	return r;
}

/* everything that a header's own capacities determine */
static bool header_is_right(const LedgerHeader *header) {
	LedgerHeader right;

	if (!header->session_capacity || header->session_capacity > LAYOUT_CAPACITY_MAX || !header->region_capacity ||
	    header->region_capacity > LAYOUT_CAPACITY_MAX)
		return false;
	header_init(&right, header->session_capacity, header->region_capacity, header->epoch);
	return !memcmp(header, &right, offsetof(LedgerHeader, generation)) &&
	       header->generation >> LAYOUT_COUNTER_BITS == header->epoch &&
	       header->n_used_sessions <= header->session_capacity &&
	       header->n_used_regions <= header->region_capacity && header->n_used_objects <= header->region_capacity &&
	       header->n_used_maps <= header->map_capacity && header->n_used_leases <= header->lease_capacity;
}

/* the first field of every record is 0 while it is free */
static void find_free(LedgerFree *ret, const void *records, size_t size, uint32_t n_used) {
	for (uint32_t i = n_used; i > 0; --i) {
		uint64_t id;

		memcpy(&id, (const uint8_t *)records + (size_t)(i - 1) * size, sizeof(id));
		if (!id)
			ret->at[ret->n++] = i - 1;
	}
}

int ledger_open(Ledger *ledger, int fd, const char **ret_why) {
	LedgerHeader *header;
	struct stat st;
	void *map;
	int r;

	*ledger = (Ledger){ .fd = -EBADF };
	*ret_why = NULL;
	if (fstat(fd, &st) < 0)
		return -errno;
	if (st.st_size < LAYOUT_PAGE) {
		*ret_why = "the ledger is too short";
		return -EINVAL;
	}
	map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED) {
		/* none of ours, other than what may be short for a moment */
		if (errno != ENOMEM && errno != EAGAIN && errno != ENFILE)
			*ret_why = "the ledger cannot be mapped";
		return *ret_why ? -EINVAL : -errno;
	}
	header = map;
	if (header->magic != LEDGER_MAGIC)
		*ret_why = "the ledger is none of shmbrokerd's";
	else if (header->version != LEDGER_VERSION)
		*ret_why = "the ledger has the layout of another version";
	else if (!header_is_right(header) || (uint64_t)st.st_size != header->total_size)
		*ret_why = "the ledger's header is damaged";
	if (*ret_why) {
		munmap(map, (size_t)st.st_size);
		return -EINVAL;
	}
	ledger->header = header;
	ledger->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	r = ledger->fd < 0 ? -errno : ledger_init_free(ledger);
	if (r) {
		ledger_deinit(ledger);
		return r;
	}
	return 0;
}

void ledger_deinit(Ledger *ledger) {
	if (ledger->header)
		munmap(ledger->header, ledger->header->total_size);
	ledger->fd = close_fd(ledger->fd);
	free(ledger->free_objects.at);
	free(ledger->free_maps.at);
	free(ledger->free_leases.at);
	*ledger = (Ledger){ .fd = -EBADF };
}

static void *record(const Ledger *ledger, uint64_t offset, uint32_t index, size_t size) {
	return (uint8_t *)ledger->header + offset + (size_t)index * size;
}

LedgerSession *ledger_session(const Ledger *ledger, uint32_t index) {
	return record(ledger, ledger->header->sessions_offset, index, sizeof(LedgerSession));
}

LedgerObject *ledger_object(const Ledger *ledger, uint32_t index) {
	return record(ledger, ledger->header->objects_offset, index, sizeof(LedgerObject));
}

static LedgerAcl *acl(const Ledger *ledger, uint32_t index) {
	return record(ledger, ledger->header->acls_offset, index, sizeof(LedgerAcl));
}

const WireAclEntry *ledger_acl(const Ledger *ledger, uint32_t index) {
	return acl(ledger, index)->entries;
}

static LedgerCuda *cuda_of(const Ledger *ledger, uint32_t index) {
	return record(ledger, ledger->header->cuda_offset, index, sizeof(LedgerCuda));
}

const LedgerCuda *ledger_cuda(const Ledger *ledger, uint32_t index) {
	return cuda_of(ledger, index);
}

LedgerRegion *ledger_region(const Ledger *ledger, uint32_t slot) {
	return record(ledger, ledger->header->regions_offset, slot, sizeof(LedgerRegion));
}

static LedgerKey *key_of(const Ledger *ledger, uint32_t slot) {
	return record(ledger, ledger->header->keys_offset, slot, sizeof(LedgerKey));
}

const char *ledger_key(const Ledger *ledger, uint32_t slot) {
	return key_of(ledger, slot)->text;
}

LedgerMap *ledger_map(const Ledger *ledger, uint32_t index) {
	return record(ledger, ledger->header->maps_offset, index, sizeof(LedgerMap));
}

LedgerLease *ledger_lease(const Ledger *ledger, uint32_t index) {
	return record(ledger, ledger->header->leases_offset, index, sizeof(LedgerLease));
}

/* ---- commits ---- */

static void redo(Ledger *ledger, uint32_t kind, uint32_t index) {
	kill_point();
	ledger->header->redo_index = index;
	atomic_store_explicit(&ledger->header->redo, kind, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst);
	kill_point();
}

static void redo_end(Ledger *ledger) {
	kill_point();
	atomic_store_explicit(&ledger->header->redo, LEDGER_IDLE, memory_order_release);
	kill_point();
}

/* the store that makes a record be there, or not */
static void store_id(uint64_t *at, uint64_t id) {
	kill_point();
	__atomic_store_n(at, id, __ATOMIC_RELEASE);
	atomic_signal_fence(memory_order_seq_cst);
}

static void drop(Ledger *ledger, uint32_t kind, uint32_t index, uint64_t *id) {
	redo(ledger, kind, index);
	store_id(id, 0);
	redo_end(ledger);
}

static uint32_t index_take(LedgerFree *free_ones, uint32_t *n_used, uint32_t capacity) {
	if (free_ones->n)
		return free_ones->at[--free_ones->n];
	return *n_used < capacity ? (*n_used)++ : LEDGER_NONE;
}

/* sessions */

static uint32_t session_flags(const Session *session) {
	return (session->accept_unsealed ? LEDGER_SESSION_ACCEPTS_UNSEALED : 0) |
	       (session->page.header ? LEDGER_SESSION_ATTACHED : 0) |
	       (session->state == SESSION_DETACHED ? LEDGER_SESSION_DETACHED : 0) |
	       (session->peer.overflow_uid ? LEDGER_SESSION_OVERFLOW_UID : 0);
}

void ledger_put_session(Ledger *ledger, const Session *session) {
	LedgerSession *at = ledger_session(ledger, session->index);
	struct stat st = {};

	if (ledger->frozen)
		return;
	/* a pidfd asks no file system */
	if (session->peer.pidfd >= 0)
		(void)fstat(session->peer.pidfd, &st);
	redo(ledger, LEDGER_SESSION, session->index);
	*at = (LedgerSession){
		.start_time = session->peer.start_time,
		.pidfd_inode = st.st_ino,
		.born_ns = session->born_ns,
		.pid = (uint32_t)session->peer.pid,
		.uid = session->peer.uid,
		.gid = session->peer.gid,
		.listener = session->listener,
		.roles = session->roles,
		.rights = session->rights,
		.flags = session_flags(session),
	};
	memcpy(at->token, session->token, sizeof(at->token));
	memcpy(at->comm, session->identity->comm, sizeof(at->comm));
	memcpy(at->container, session->identity->container,
	       strnlen(session->identity->container, sizeof(at->container) - 1));
	/* ids are given when a connection comes, which need not say HELLO in that order */
	if (ledger->header->last_session < session->id)
		ledger->header->last_session = session->id;
	if (ledger->header->n_used_sessions <= session->index)
		ledger->header->n_used_sessions = session->index + 1;
	store_id(&at->id, session->id);
	redo_end(ledger);
}

void ledger_set_last_session(Ledger *ledger, uint64_t id) {
	if (!ledger->frozen)
		ledger->header->last_session = id;
	kill_point();
}

void ledger_set_page(Ledger *ledger, const Session *session, uint64_t inode) {
	kill_point();
	ledger_session(ledger, session->index)->page_inode = inode;
	kill_point();
}

void ledger_update_session(Ledger *ledger, const Session *session) {
	LedgerSession *at = ledger_session(ledger, session->index);

	if (ledger->frozen || at->id != session->id)
		return;
	at->roles = session->roles;
	at->rights = session->rights;
	at->event_mask = session->event_mask;
	kill_point();
	if (session->page.header) {
		at->page_mode = session->page.shape.mode;
		at->page_lanes = session->page.shape.lanes;
		atomic_signal_fence(memory_order_seq_cst);
	}
	kill_point();
	at->flags = session_flags(session) | (at->flags & LEDGER_SESSION_ENDING);
}

void ledger_end_session(Ledger *ledger, const Session *session) {
	LedgerSession *at = session->index != UINT32_MAX ? ledger_session(ledger, session->index) : NULL;

	if (!at || ledger->frozen || at->id != session->id)
		return;
	kill_point();
	at->flags |= LEDGER_SESSION_ENDING;
	kill_point();
}

void ledger_drop_session(Ledger *ledger, const Session *session) {
	LedgerSession *at = ledger_session(ledger, session->index);

	if (!ledger->frozen && at->id)
		drop(ledger, LEDGER_SESSION, session->index, &at->id);
}

LedgerSerial *ledger_find_serial(const Ledger *ledger, const Session *session, uint64_t serial) {
	LedgerSession *at = ledger_session(ledger, session->index);

	for (uint32_t i = 0; i < LEDGER_SERIALS; ++i)
		if (at->serials[i].serial == serial)
			return &at->serials[i];
	return NULL;
}

/*
 * A client has at most as many requests without an answer as the ring has places. One that waits for long keeps its
 * place: it is passed over.
 */
static bool serial_waits(const Session *session, const LedgerSerial *serial) {
	list_for_each (link, &session->waits)
		if (container_of(link, Wait, session_link)->serial == serial->serial)
			return true;
	return false;
}

LedgerSerial *ledger_put_serial(Ledger *ledger, const Session *session, uint64_t serial) {
	LedgerSession *at = ledger_session(ledger, session->index);
	LedgerSerial *place;

	for (uint32_t i = 0; i < LEDGER_SERIALS; ++i) {
		place = &at->serials[at->serial_next % LEDGER_SERIALS];
		at->serial_next++;
		if (!place->serial || !serial_waits(session, place))
			break;
	}
	kill_point();
	store_id(&place->serial, 0);
	place->counter = ledger->header->generation;
	place->done = place->revoked = 0;
	store_id(&place->serial, serial);
	return place;
}

void ledger_set_serial_released(LedgerSerial *serial, uint32_t index, bool is_revoked) {
	kill_point();
	serial->revoked |= (uint64_t)is_revoked << index;
	atomic_signal_fence(memory_order_seq_cst);
	kill_point();
	serial->done |= UINT64_C(1) << index;
	atomic_signal_fence(memory_order_seq_cst);
}

/* objects */

void ledger_put_object(Ledger *ledger, Object *object) {
	LedgerHeader *header = ledger->header;
	LedgerObject *at;

	object->ledger_index = index_take(&ledger->free_objects, &header->n_used_objects, header->region_capacity);
	if (object->ledger_index == LEDGER_NONE)
		return;
	at = ledger_object(ledger, object->ledger_index);
	redo(ledger, LEDGER_OBJECT, object->ledger_index);
	*at = (LedgerObject){
		.session = object->key.session,
		.device = object->key.device,
		.inode = object->key.inode,
		.size = object->size,
		.uid = object->key.uid,
		.mode = object->key.mode,
		.flags = object->flags,
		.n_acl = object->n_acl,
		.read_only_enforced = object->read_only_enforced,
		.kind = object->kind,
	};
	if (object->n_acl)
		memcpy(acl(ledger, object->ledger_index)->entries, object->acl, object->n_acl * sizeof(object->acl[0]));
	if (object->cuda)
		*cuda_of(ledger, object->ledger_index) = object->cuda->record;
	header->last_object = object->id;
	store_id(&at->id, object->id);
	redo_end(ledger);
}

void ledger_update_object(Ledger *ledger, const Object *object) {
	LedgerObject *at;

	if (ledger->frozen || object->ledger_index == LEDGER_NONE)
		return;
	at = ledger_object(ledger, object->ledger_index);
	kill_point();
	at->size = object->size;
	kill_point();
	at->flags = object->flags;
}

void ledger_drop_object(Ledger *ledger, const Object *object) {
	if (ledger->frozen || object->ledger_index == LEDGER_NONE)
		return;
	drop(ledger, LEDGER_OBJECT, object->ledger_index, &ledger_object(ledger, object->ledger_index)->id);
	ledger->free_objects.at[ledger->free_objects.n++] = object->ledger_index;
}

/* regions */

void ledger_put_region(Ledger *ledger, const Region *region, const char *key, uint64_t session, uint64_t serial,
		       uint32_t index) {
	LedgerRegion *at = ledger_region(ledger, region->slot);

	redo(ledger, LEDGER_REGION, region->slot);
	*at = (LedgerRegion){
		.offset = region->offset,
		.size = region->size,
		.owner_session = region->owner_session,
		.asked_session = session,
		.asked_serial = serial,
		.asked_index = (uint16_t)index,
		.born_ns = region->born_ns,
		.object = region->object->ledger_index,
		.owner_uid = region->owner_uid,
		.owner_pid = region->identity->pid,
		.owner_number = region->owner_number,
		.state = WIRE_STATE_ACTIVE,
		.flags = region->flags,
		.kind = region->kind,
		.access = region->access,
		.name_length = (uint16_t)region->name_length,
		.key_length = region->key_length,
	};
	memcpy(at->comm, region->identity->comm, sizeof(at->comm));
	memcpy(at->name, region->name, region->name_length);
	if (region->key_length)
		memcpy(key_of(ledger, region->slot)->text, key, region->key_length);
	ledger->header->generation = region->generation;
	if (ledger->header->n_used_regions <= region->slot)
		ledger->header->n_used_regions = region->slot + 1;
	store_id(&at->generation, region->generation);
	redo_end(ledger);
}

void ledger_set_region_state(Ledger *ledger, const Region *region) {
	LedgerRegion *at = ledger_region(ledger, region->slot);

	if (ledger->frozen)
		return;
	kill_point();
	at->pinned = region->pinned;
	memcpy(at->pinned_device, region->pinned_device, sizeof(at->pinned_device));
	kill_point();
	at->state = region->state;
	kill_point();
	if (region->state == WIRE_STATE_REVOKED)
		at->object = LEDGER_NONE;
	kill_point();
}

void ledger_set_region_retired(Ledger *ledger, const Region *region, uint64_t session, uint64_t serial,
			       uint32_t index) {
	LedgerRegion *at = ledger_region(ledger, region->slot);

	at->retired_serial = serial;
	at->retired_index = (uint16_t)index;
	kill_point();
	at->retired_session = session;
	kill_point();
}

void ledger_drop_region(Ledger *ledger, const Region *region) {
	LedgerRegion *at = ledger_region(ledger, region->slot);

	if (!ledger->frozen && at->generation == region->generation)
		drop(ledger, LEDGER_REGION, region->slot, &at->generation);
}

/* maps */

bool ledger_put_map(Ledger *ledger, Map *map) {
	LedgerHeader *header = ledger->header;
	LedgerMap *at;

	map->ledger_index = index_take(&ledger->free_maps, &header->n_used_maps, header->map_capacity);
	if (map->ledger_index == LEDGER_NONE)
		return false;
	at = ledger_map(ledger, map->ledger_index);
	redo(ledger, LEDGER_MAP, map->ledger_index);
	at->generation = map->region->generation;
	at->slot = map->region->slot;
	at->access = map->access;
	store_id(&at->session, map->session->id);
	redo_end(ledger);
	return true;
}

void ledger_update_map(Ledger *ledger, const Map *map) {
	if (ledger->frozen)
		return;
	kill_point();
	ledger_map(ledger, map->ledger_index)->access = map->access;
}

void ledger_drop_map(Ledger *ledger, const Map *map) {
	if (ledger->frozen)
		return;
	drop(ledger, LEDGER_MAP, map->ledger_index, &ledger_map(ledger, map->ledger_index)->session);
	ledger->free_maps.at[ledger->free_maps.n++] = map->ledger_index;
}

/* leases by message */

bool ledger_put_lease(Ledger *ledger, Lease *lease, uint64_t serial, uint32_t index) {
	LedgerHeader *header = ledger->header;
	LedgerLease *at;

	lease->ledger_index = index_take(&ledger->free_leases, &header->n_used_leases, header->lease_capacity);
	if (lease->ledger_index == LEDGER_NONE)
		return false;
	at = ledger_lease(ledger, lease->ledger_index);
	redo(ledger, LEDGER_LEASE, lease->ledger_index);
	at->session = lease->session->id;
	at->generation = lease->region->generation;
	at->slot = lease->region->slot;
	at->asked_serial = serial;
	at->asked_index = index;
	header->last_lease = lease->id;
	store_id(&at->id, lease->id);
	redo_end(ledger);
	return true;
}

void ledger_revoke_lease(Ledger *ledger, const Lease *lease) {
	if (ledger->frozen)
		return;
	kill_point();
	ledger_lease(ledger, lease->ledger_index)->slot = LEDGER_NONE;
}

void ledger_drop_lease(Ledger *ledger, const Lease *lease) {
	if (ledger->frozen)
		return;
	drop(ledger, LEDGER_LEASE, lease->ledger_index, &ledger_lease(ledger, lease->ledger_index)->id);
	ledger->free_leases.at[ledger->free_leases.n++] = lease->ledger_index;
}

void ledger_find_free(Ledger *ledger) {
	LedgerHeader *header = ledger->header;

	find_free(&ledger->free_objects, ledger_object(ledger, 0), sizeof(LedgerObject), header->n_used_objects);
	find_free(&ledger->free_maps, ledger_map(ledger, 0), sizeof(LedgerMap), header->n_used_maps);
	find_free(&ledger->free_leases, ledger_lease(ledger, 0), sizeof(LedgerLease), header->n_used_leases);
}
