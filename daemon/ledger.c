/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "broker.h"
#include "ledger.h"
#include "region.h"
#include "session.h"
#include "wire/compat.h"
#include "wire/fd.h"
#include "wire/layout.h"

#define MAPS_PER_REGION 4

static uint64_t take(uint64_t *offset, uint64_t size) {
	uint64_t at = *offset;

	*offset = (at + size + LAYOUT_PAGE - 1) / LAYOUT_PAGE * LAYOUT_PAGE;
	return at;
}

int ledger_init(Ledger *ledger, uint32_t session_capacity, uint32_t region_capacity, uint64_t epoch) {
	LedgerHeader header = {
		.magic = LEDGER_MAGIC,
		.version = LEDGER_VERSION,
		.header_size = sizeof(LedgerHeader),
		.epoch = epoch,
		.session_capacity = session_capacity,
		.region_capacity = region_capacity,
		.map_capacity = region_capacity * MAPS_PER_REGION,
	};
	_cleanup_(closep) int fd = -EBADF;
	uint64_t offset = LAYOUT_PAGE;
	void *map;

	*ledger = (Ledger){ .fd = -EBADF };
	header.sessions_offset = take(&offset, (uint64_t)session_capacity * sizeof(LedgerSession));
	header.regions_offset = take(&offset, (uint64_t)region_capacity * sizeof(LedgerRegion));
	header.acls_offset = take(&offset, (uint64_t)region_capacity * sizeof(LedgerAcl));
	header.maps_offset = take(&offset, (uint64_t)header.map_capacity * sizeof(LedgerMap));
	header.total_size = offset;

	fd = memfd_create("shmbroker-ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)header.total_size) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 || fchmod(fd, 0600) < 0)
		return -errno;
	map = mmap(NULL, header.total_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return -errno;
	ledger->free_maps = calloc(header.map_capacity, sizeof(*ledger->free_maps));
	if (!ledger->free_maps) {
		munmap(map, header.total_size);
		return -ENOMEM;
	}
	memcpy(map, &header, sizeof(header));
	ledger->header = map;
	ledger->fd = steal_fd(&fd);
	return 0;
}

void ledger_deinit(Ledger *ledger) {
	if (ledger->header)
		munmap(ledger->header, ledger->header->total_size);
	ledger->fd = close_fd(ledger->fd);
	free(ledger->free_maps);
	*ledger = (Ledger){ .fd = -EBADF };
}

static void *record(Ledger *ledger, uint64_t offset, uint32_t index, size_t size) {
	return (uint8_t *)ledger->header + offset + (size_t)index * size;
}

static LedgerSession *session_record(Ledger *ledger, uint32_t index) {
	return record(ledger, ledger->header->sessions_offset, index, sizeof(LedgerSession));
}

static LedgerRegion *region_record(Ledger *ledger, uint32_t slot) {
	return record(ledger, ledger->header->regions_offset, slot, sizeof(LedgerRegion));
}

static LedgerMap *map_record(Ledger *ledger, uint32_t index) {
	return record(ledger, ledger->header->maps_offset, index, sizeof(LedgerMap));
}

/* a process that is killed between redo_begin() and redo_end() leaves one change to drop or to complete */
static void redo_begin(Ledger *ledger, uint32_t kind, uint32_t index) {
	ledger->header->redo_index = index;
	atomic_store_explicit(&ledger->header->redo_kind, kind, memory_order_release);
	atomic_signal_fence(memory_order_seq_cst);
}

static void redo_end(Ledger *ledger) {
	atomic_store_explicit(&ledger->header->redo_kind, LEDGER_NONE, memory_order_release);
}

void ledger_put_session(Ledger *ledger, const Session *session) {
	LedgerSession *at = session_record(ledger, session->index);

	redo_begin(ledger, LEDGER_PUT_SESSION, session->index);
	*at = (LedgerSession){
		.id = session->id,
		.start_time = session->peer.start_time,
		.pid = (uint32_t)session->peer.pid,
		.uid = session->peer.uid,
		.gid = session->peer.gid,
		.listener = session->listener,
		.roles = session->roles,
		.flags = session->accept_unsealed ? WIRE_HELLO_ACCEPT_UNSEALED : 0,
		.page_mode = session->attached ? session->page.shape.mode : 0,
		.page_lanes = session->attached ? session->page.shape.lanes : 0,
		.event_mask = session->event_mask,
	};
	memcpy(at->token, session->token, sizeof(at->token));
	memcpy(at->comm, session->identity->comm, sizeof(at->comm));
	ledger->header->last_session = session->id;
	redo_end(ledger);
}

void ledger_drop_session(Ledger *ledger, const Session *session) {
	redo_begin(ledger, LEDGER_DROP_SESSION, session->index);
	session_record(ledger, session->index)->id = 0;
	redo_end(ledger);
}

void ledger_put_region(Ledger *ledger, const Region *region) {
	LedgerRegion *at = region_record(ledger, region->slot);
	const Object *object = region->object;
	struct timespec now;

	(void)clock_gettime(CLOCK_REALTIME, &now);
	redo_begin(ledger, LEDGER_PUT_REGION, region->slot);
	*at = (LedgerRegion){
		.object = object->id,
		.object_size = object->size,
		.device = object->key.device,
		.inode = object->key.inode,
		.mode = object->key.mode,
		.object_session = object->key.session,
		.offset = region->offset,
		.size = region->size,
		.owner_session = region->owner_session,
		.born_realtime_ns = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec,
		.owner_uid = region->owner_uid,
		.owner_pid = region->identity->pid,
		.owner_number = region->owner_number,
		.state = WIRE_STATE_ACTIVE,
		.flags = region->flags,
		.kind = region->kind,
		.access = region->access,
		.name_length = (uint16_t)region->name_length,
		.n_acl = object->n_acl,
	};
	memcpy(at->name, region->name, region->name_length);
	if (object->n_acl)
		memcpy(record(ledger, ledger->header->acls_offset, region->slot, sizeof(LedgerAcl)), object->acl,
		       object->n_acl * sizeof(object->acl[0]));
	at->generation = region->generation;
	ledger->header->generation_counter = region->generation;
	ledger->header->last_object = object->id;
	redo_end(ledger);
}

void ledger_set_region_state(Ledger *ledger, const Region *region) {
	region_record(ledger, region->slot)->state = region->state;
}

void ledger_drop_region(Ledger *ledger, const Region *region) {
	redo_begin(ledger, LEDGER_DROP_REGION, region->slot);
	region_record(ledger, region->slot)->generation = 0;
	redo_end(ledger);
}

bool ledger_put_map(Ledger *ledger, Map *map) {
	LedgerMap *at;

	if (ledger->n_free_maps)
		map->ledger_index = ledger->free_maps[--ledger->n_free_maps];
	else if (ledger->n_used_maps < ledger->header->map_capacity)
		map->ledger_index = ledger->n_used_maps++;
	else
		return false;

	at = map_record(ledger, map->ledger_index);
	redo_begin(ledger, LEDGER_PUT_MAP, map->ledger_index);
	at->generation = map->region->generation;
	at->slot = map->region->slot;
	at->access = map->access;
	at->session = map->session->id;
	redo_end(ledger);
	return true;
}

void ledger_drop_map(Ledger *ledger, const Map *map) {
	redo_begin(ledger, LEDGER_DROP_MAP, map->ledger_index);
	map_record(ledger, map->ledger_index)->session = 0;
	redo_end(ledger);
	ledger->free_maps[ledger->n_free_maps++] = map->ledger_index;
}
