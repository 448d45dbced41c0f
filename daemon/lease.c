/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "broker.h"
#include "lease.h"
#include "region.h"
#include "session.h"
#include "wire/compat.h"
#include "wire/fd.h"

static uint64_t map_hash(const Region *region) {
	return table_hash(region->generation);
}

Map *map_find(Session *session, const Region *region) {
	table_for_each(link, &session->map_table, map_hash(region)) {
		Map *map = container_of(link, Map, link);

		if (map->region == region)
			return map;
	}
	return NULL;
}

static Map *map_alloc(Session *session, Region *region, uint8_t access) {
	Map *map = calloc(1, sizeof(*map));

	if (!map)
		return NULL;
	map->session = session;
	map->region = region;
	map->access = access;
	map->ledger_index = LEDGER_NONE;
	return map;
}

static bool map_link(Map *map) {
	if (!table_insert(&map->session->map_table, &map->link, map_hash(map->region)))
		return false;
	list_append(&map->session->maps, &map->session_link);
	list_append(&map->region->maps, &map->region_link);
	map->session->n_maps++;
	return true;
}

int map_new(Session *session, Region *region, uint8_t access, Map **ret) {
	Map *map = map_find(session, region);

	if (map) {
		map->access |= access;
		ledger_update_map(&session->broker->ledger, map);
		*ret = map;
		return 0;
	}
	map = map_alloc(session, region, access);
	if (!map)
		return -ENOMEM;
	if (account_charge(&map->charge, session->account, ACCOUNT_MAPS, 1) ||
	    !ledger_put_map(&session->broker->ledger, map)) {
		map_free(map);
		return LEASE_E_QUOTA;
	}
	if (!map_link(map)) {
		map_free(map);
		return -ENOMEM;
	}
	*ret = map;
	return 0;
}

int map_restore(Session *session, Region *region, uint8_t access, uint32_t index) {
	Map *map = map_alloc(session, region, access);

	if (!map)
		return -ENOMEM;
	map->ledger_index = index;
	account_take(&map->charge, session->account, ACCOUNT_MAPS, 1);
	return map_link(map) ? 0 : -ENOMEM;
}

Map *map_free(Map *map) {
	if (!map)
		return NULL;
	if (map->ledger_index != LEDGER_NONE)
		ledger_drop_map(&map->session->broker->ledger, map);
	if (list_is_linked(&map->session_link)) {
		table_remove(&map->session->map_table, &map->link);
		list_remove(&map->session_link);
		list_remove(&map->region_link);
		map->session->n_maps--;
	}
	account_refund(&map->charge);
	account_refund(&map->charge_revoked);
	free(map);
	return NULL;
}

uint32_t map_count(const Map *map) {
	const Session *session = map->session;

	if (!session->attached)
		return 0;
	return layout_lease_page_count(session->page.header, &session->page.shape, map->region->slot);
}

Lease *lease_find(Session *session, uint64_t id) {
	table_for_each(link, &session->lease_table, table_hash(id)) {
		Lease *lease = container_of(link, Lease, link);

		if (lease->id == id)
			return lease;
	}
	return NULL;
}

void leases_find_asked(const Session *session, uint64_t serial, Lease *ret_leases[WIRE_BATCH_MAX]) {
	list_for_each (link, &session->leases) {
		Lease *lease = container_of(link, Lease, session_link);
		const LedgerLease *at = ledger_lease(&session->broker->ledger, lease->ledger_index);

		if (at->asked_serial == serial && at->asked_index < WIRE_BATCH_MAX && !ret_leases[at->asked_index])
			ret_leases[at->asked_index] = lease;
	}
}

/* those that come and go by message are many: some are kept for the next ones */
static Lease *lease_alloc(Session *session, Region *region, uint64_t id) {
	Broker *broker = session->broker;
	ListLink *link = list_first(&broker->free_leases);
	Lease *lease;

	if (link) {
		list_remove(link);
		broker->n_free_leases--;
	}
	lease = link ? container_of(link, Lease, session_link) : malloc(sizeof(*lease));
	if (!lease)
		return NULL;
	*lease = (Lease){ .session = session, .region = region, .id = id, .ledger_index = LEDGER_NONE };
	return lease;
}

static void lease_keep(Broker *broker, Lease *lease) {
	if (broker->n_free_leases == LEASE_FREE_MAX) {
		free(lease);
		return;
	}
	list_append(&broker->free_leases, &lease->session_link);
	broker->n_free_leases++;
}

void leases_deinit(Broker *broker) {
	for (ListLink *link; (link = list_first(&broker->free_leases));) {
		list_remove(link);
		free(container_of(link, Lease, session_link));
	}
}

static bool lease_link(Lease *lease) {
	if (!table_insert(&lease->session->lease_table, &lease->link, table_hash(lease->id)))
		return false;
	list_append(&lease->session->leases, &lease->session_link);
	if (lease->region)
		list_append(&lease->region->leases, &lease->region_link);
	lease->session->n_leases++;
	return true;
}

int lease_new(Session *session, Region *region, uint64_t serial, uint32_t index, Lease **ret) {
	Lease *lease = lease_alloc(session, region, ++session->broker->last_lease);

	if (!lease)
		return -ENOMEM;
	if (account_charge(&lease->charge, session->account, ACCOUNT_LEASES, 1) ||
	    !ledger_put_lease(&session->broker->ledger, lease, serial, index)) {
		lease_free(lease);
		return LEASE_E_QUOTA;
	}
	if (!lease_link(lease)) {
		lease_free(lease);
		return -ENOMEM;
	}
	*ret = lease;
	return 0;
}

int lease_restore(Session *session, Region *region, uint32_t index) {
	Lease *lease = lease_alloc(session, region, ledger_lease(&session->broker->ledger, index)->id);

	if (!lease)
		return -ENOMEM;
	lease->ledger_index = index;
	account_take(&lease->charge, session->account, ACCOUNT_LEASES, 1);
	return lease_link(lease) ? 0 : -ENOMEM;
}

Lease *lease_free(Lease *lease) {
	if (!lease)
		return NULL;
	if (lease->ledger_index != LEDGER_NONE)
		ledger_drop_lease(&lease->session->broker->ledger, lease);
	if (list_is_linked(&lease->session_link)) {
		table_remove(&lease->session->lease_table, &lease->link);
		list_remove(&lease->session_link);
		list_remove(&lease->region_link);
		lease->session->n_leases--;
	}
	account_refund(&lease->charge);
	lease_keep(lease->session->broker, lease);
	return NULL;
}

void lease_revoke(Lease *lease) {
	ledger_revoke_lease(&lease->session->broker->ledger, lease);
	list_remove(&lease->region_link);
	lease->region = NULL;
}

/* through an O_RDONLY fd, so that it does not count as a writer */
static int page_map(Page *page, int fd, const LeasePageHeader *shape) {
	_cleanup_(closep) int read_only = fd_reopen(fd, O_RDONLY);
	void *map;

	if (read_only < 0)
		return read_only;
	map = mmap(NULL, shape->total_size, PROT_READ, MAP_SHARED, read_only, 0);
	if (map == MAP_FAILED)
		return -errno;
	page->shape = *shape;
	page->header = map;
	return 0;
}

static void page_unmap(Page *page) {
	if (page->header)
		munmap((void *)page->header, page->shape.total_size);
	page->header = NULL;
}

static void page_set_fd(Page *page, const Session *session, int fd) {
	page->fd = fd;
	page->parked.id = session->id;
	page->parked.kind = KEEPER_PAGE;
	page->parked.fds[0] = fd;
	page->parked.n_fds = 1;
}

int page_init(Page *page, Session *session, uint32_t capacity, uint32_t lanes, uint32_t mode) {
	_cleanup_(closep) int fd = -EBADF;
	KeeperEntry *entry = &page->parked;
	LeasePageHeader shape;
	struct stat st;
	int r;

	layout_lease_page_init(&shape, capacity, lanes, mode, session->id);
	fd = memfd_create("shmbroker-leases", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	/* not F_SEAL_SEAL: F_SEAL_WRITE, added later, tells whether anybody still maps it writable */
	if (ftruncate(fd, (off_t)shape.total_size) < 0 || fchmod(fd, 0600) < 0 ||
	    pwrite(fd, &shape, sizeof(shape), 0) != (ssize_t)sizeof(shape) || fstat(fd, &st) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
		return -errno;
	r = page_map(page, fd, &shape);
	if (r)
		return r;
	page_set_fd(page, session, steal_fd(&fd));
	ledger_set_page(&session->broker->ledger, session, (uint64_t)st.st_ino);
	r = keeper_park(&session->broker->keeper, &entry, 1);
	if (r) {
		page_deinit(page, session->broker, session->peer.uid);
		return r;
	}
	return 0;
}

int page_open(Page *page, const Session *session, int fd, uint32_t capacity, uint32_t lanes, uint32_t mode) {
	LeasePageHeader shape;
	struct stat st;
	int r;

	if (!layout_lease_page_init(&shape, capacity, lanes, mode, session->id))
		return -EINVAL;
	if (fstat(fd, &st) < 0)
		return -errno;
	if ((uint64_t)st.st_size != shape.total_size)
		return -EINVAL;
	r = page_map(page, fd, &shape);
	if (r)
		return r;
	/* what the client may have written over its header tells nothing: the shape is the ledger's */
	page_set_fd(page, session, fd);
	return 0;
}

void page_deinit(Page *page, Broker *broker, uint32_t uid) {
	struct stat st = {};

	page_unmap(page);
	if (page->fd >= 0)
		(void)fstat(page->fd, &st);
	keeper_drop(&broker->keeper, &page->parked, uid, (uint64_t)st.st_blocks * 512);
	page->fd = -EBADF;
	account_refund(&page->charge);
}

bool page_is_unmapped(const Page *page) {
	int seals;

	if (page->fd < 0)
		return true;
	seals = fcntl(page->fd, F_GET_SEALS);
	/* a client that adds F_SEAL_FUTURE_WRITE keeps its mapping: only F_SEAL_WRITE proves something */
	if (seals >= 0 && seals & F_SEAL_WRITE)
		return true;
	/* EPERM: the client has sealed the page against this proof, and so has only itself to thank for what it loses */
	return !fcntl(page->fd, F_ADD_SEALS, F_SEAL_WRITE) || errno == EPERM;
}
