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

int map_new(Session *session, Region *region, uint8_t access, Map **ret) {
	Map *map = map_find(session, region);

	if (map) {
		map->access |= access;
		*ret = map;
		return 0;
	}
	map = calloc(1, sizeof(*map));
	if (!map)
		return -ENOMEM;
	if (account_charge(&map->charge, session->account, ACCOUNT_MAPS, 1)) {
		free(map);
		return LEASE_E_QUOTA;
	}
	map->session = session;
	map->region = region;
	map->access = access;
	if (!ledger_put_map(&session->broker->ledger, map)) {
		account_refund(&map->charge);
		free(map);
		return LEASE_E_QUOTA;
	}
	if (!table_insert(&session->map_table, &map->link, map_hash(region))) {
		ledger_drop_map(&session->broker->ledger, map);
		account_refund(&map->charge);
		free(map);
		return -ENOMEM;
	}
	list_append(&session->maps, &map->session_link);
	list_append(&region->maps, &map->region_link);
	session->n_maps++;
	*ret = map;
	return 0;
}

Map *map_free(Map *map) {
	if (!map)
		return NULL;
	ledger_drop_map(&map->session->broker->ledger, map);
	table_remove(&map->session->map_table, &map->link);
	list_remove(&map->session_link);
	list_remove(&map->region_link);
	map->session->n_maps--;
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

int lease_new(Session *session, Region *region, Lease **ret) {
	Lease *lease = calloc(1, sizeof(*lease));

	if (!lease)
		return -ENOMEM;
	if (account_charge(&lease->charge, session->account, ACCOUNT_LEASES, 1)) {
		free(lease);
		return LEASE_E_QUOTA;
	}
	lease->session = session;
	lease->region = region;
	lease->id = ++session->broker->last_lease;
	if (!table_insert(&session->lease_table, &lease->link, table_hash(lease->id))) {
		account_refund(&lease->charge);
		free(lease);
		return -ENOMEM;
	}
	list_append(&session->leases, &lease->session_link);
	list_append(&region->leases, &lease->region_link);
	session->n_leases++;
	*ret = lease;
	return 0;
}

Lease *lease_free(Lease *lease) {
	if (!lease)
		return NULL;
	table_remove(&lease->session->lease_table, &lease->link);
	list_remove(&lease->session_link);
	list_remove(&lease->region_link);
	lease->session->n_leases--;
	account_refund(&lease->charge);
	free(lease);
	return NULL;
}

void lease_revoke(Lease *lease) {
	list_remove(&lease->region_link);
	lease->region = NULL;
}

int page_init(Page *page, Session *session, uint32_t capacity, uint32_t lanes, uint32_t mode, int *ret_fd) {
	_cleanup_(closep) int fd = -EBADF, read_only = -EBADF;
	LeasePageHeader shape;
	void *map;

	layout_lease_page_init(&shape, capacity, lanes, mode, session->id);
	fd = memfd_create("shmbroker-leases", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	/* not F_SEAL_SEAL: F_SEAL_WRITE, added later, tells whether anybody still maps it writable */
	if (ftruncate(fd, (off_t)shape.total_size) < 0 || fchmod(fd, 0600) < 0 ||
	    pwrite(fd, &shape, sizeof(shape), 0) != (ssize_t)sizeof(shape) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
		return -errno;
	read_only = fd_reopen(fd, O_RDONLY);
	if (read_only < 0)
		return read_only;
	map = mmap(NULL, shape.total_size, PROT_READ, MAP_SHARED, read_only, 0);
	if (map == MAP_FAILED)
		return -errno;

	page->shape = shape;
	page->header = map;
	page->fd = steal_fd(&fd);
	*ret_fd = page->fd;
	return 0;
}

void page_deinit(Page *page, Broker *broker, uint32_t uid) {
	if (page->header)
		munmap((void *)page->header, page->shape.total_size);
	page->header = NULL;
	closer_close(broker->closer, uid, page->fd);
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
