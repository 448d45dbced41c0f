/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "kill-point.h"
#include "region.h"
#include "registry.h"
#include "wire/compat.h"
#include "wire/fd.h"
#include "wire/name.h"

static int registry_create_memory(Registry *registry) {
	_cleanup_(closep) int fd = -EBADF, read_only = -EBADF;
	void *map;

	fd = memfd_create("shmbroker-registry", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	/* not F_SEAL_FUTURE_WRITE: a restarted broker must be able to map it writable */
	if (ftruncate(fd, (off_t)registry->shape.total_size) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 || fchmod(fd, 0400) < 0)
		return -errno;
	read_only = fd_reopen(fd, O_RDONLY);
	if (read_only < 0)
		return read_only;
	map = mmap(NULL, registry->shape.total_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return -errno;

	registry->header = map;
	registry->fd = steal_fd(&fd);
	registry->read_only_fd = steal_fd(&read_only);
	return 0;
}

static int registry_init_books(Registry *registry) {
	registry->regions = calloc(registry->shape.capacity, sizeof(*registry->regions));
	registry->free_slots = calloc(registry->shape.capacity, sizeof(*registry->free_slots));
	registry->free_sessions = calloc(registry->shape.session_capacity, sizeof(*registry->free_sessions));
	if (!registry->regions || !registry->free_slots || !registry->free_sessions ||
	    !table_resize(&registry->names, 256))
		return -ENOMEM;
	return 0;
}

int registry_init(Registry *registry, uint32_t capacity, uint32_t session_capacity) {
	uint64_t seed[2], epoch;
	int r;

	*registry = (Registry){ .fd = -EBADF, .read_only_fd = -EBADF };
	if (getrandom(seed, sizeof(seed), 0) != sizeof(seed) || getrandom(&epoch, sizeof(epoch), 0) != sizeof(epoch))
		return -EIO;
	epoch &= (UINT64_C(1) << (LAYOUT_GENERATION_BITS - LAYOUT_COUNTER_BITS)) - 1;
	epoch += !epoch;
	layout_registry_init(&registry->shape, capacity, session_capacity, epoch, seed);

	r = registry_init_books(registry);
	if (!r)
		r = registry_create_memory(registry);
	if (r) {
		registry_deinit(registry);
		return r;
	}

	memcpy(registry->header, &registry->shape, sizeof(registry->shape));
	atomic_store_explicit(&registry->header->state, LAYOUT_OPEN, memory_order_release);
	return 0;
}

int registry_open(Registry *registry, int fd, uint64_t generation, const char **ret_why) {
	struct stat st;
	void *map;
	int r;

	*registry = (Registry){ .fd = -EBADF, .read_only_fd = -EBADF };
	*ret_why = NULL;
	if (fstat(fd, &st) < 0)
		return -errno;
	if (st.st_size < LAYOUT_PAGE) {
		*ret_why = "the registry is too short";
		return -EINVAL;
	}
	map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED) {
		/* none of ours, other than what may be short for a moment */
		if (errno != ENOMEM && errno != EAGAIN && errno != ENFILE)
			*ret_why = "the registry cannot be mapped";
		return *ret_why ? -EINVAL : -errno;
	}
	if (layout_registry_check(map, (uint64_t)st.st_size)) {
		*ret_why = "the registry's header is damaged, or of another version";
		munmap(map, (size_t)st.st_size);
		return -EINVAL;
	}
	registry->header = map;
	memcpy(&registry->shape, map, sizeof(registry->shape));
	registry->counter = generation & ((UINT64_C(1) << LAYOUT_COUNTER_BITS) - 1);
	registry->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	registry->read_only_fd = registry->fd < 0 ? -EBADF : fd_reopen(fd, O_RDONLY);
	if (registry->fd < 0)
		r = -errno;
	else if (registry->read_only_fd < 0)
		r = registry->read_only_fd;
	else
		r = registry_init_books(registry);
	if (r) {
		registry->frozen = true;
		registry_deinit(registry);
	}
	return r;
}

void registry_deinit(Registry *registry) {
	if (registry->header) {
		if (!registry->frozen)
			atomic_store(&registry->header->state, LAYOUT_CLOSED);
		munmap(registry->header, registry->shape.total_size);
	}
	registry->fd = close_fd(registry->fd);
	registry->read_only_fd = close_fd(registry->read_only_fd);
	free(registry->regions);
	free(registry->free_slots);
	free(registry->free_sessions);
	table_deinit(&registry->names);
	*registry = (Registry){ .fd = -EBADF, .read_only_fd = -EBADF };
}

static RegistrySlot *registry_slot(Registry *registry, uint32_t slot) {
	return (RegistrySlot *)((uintptr_t)registry->header + registry->shape.slots_offset) + slot;
}

static RegistryDetail *registry_detail(Registry *registry, uint32_t slot) {
	return (RegistryDetail *)((uintptr_t)registry->header + registry->shape.details_offset) + slot;
}

static _Atomic uint64_t *registry_index(Registry *registry) {
	return (_Atomic uint64_t *)((uintptr_t)registry->header + registry->shape.index_offset);
}

static _Atomic uint64_t *registry_sessions(Registry *registry) {
	return (_Atomic uint64_t *)((uintptr_t)registry->header + registry->shape.sessions_offset);
}

Region *registry_find(Registry *registry, const char *name, size_t size) {
	uint64_t hash = wire_name_hash(registry->shape.hash_seed, name, size);

	table_for_each(link, &registry->names, hash) {
		Region *region = container_of(link, Region, name_link);

		if (region->name_length == size && !memcmp(region->name, name, size))
			return region;
	}
	return NULL;
}

Region *registry_at(Registry *registry, uint32_t slot, uint64_t generation) {
	Region *region;

	if (slot >= registry->shape.capacity)
		return NULL;
	region = registry->regions[slot];
	return region && region->generation == generation ? region : NULL;
}

int registry_reserve(Registry *registry, Region *region) {
	uint32_t slot;

	if (registry->n_free)
		slot = registry->free_slots[--registry->n_free];
	else if (registry->n_used < registry->shape.capacity)
		slot = registry->n_used++;
	else
		return REGISTRY_E_FULL;

	region->slot = slot;
	region->generation = layout_generation(registry->shape.epoch, ++registry->counter);
	registry->regions[slot] = region;
	registry->n_regions++;
	return 0;
}

static uint64_t index_entry(const Region *region) {
	return region->name_link.hash >> 32 << 32 | ((uint64_t)region->slot + 1);
}

/* where @region's entry stands in the index, or UINT32_MAX */
static uint32_t index_position(Registry *registry, const Region *region) {
	_Atomic uint64_t *index = registry_index(registry);
	uint32_t mask = registry->shape.index_size - 1;
	uint64_t entry = index_entry(region);

	for (uint32_t i = 0; i < LAYOUT_PROBE_MAX; ++i) {
		uint32_t at = (uint32_t)(region->name_link.hash + i) & mask;

		if (atomic_load_explicit(&index[at], memory_order_relaxed) == entry)
			return at;
	}
	return UINT32_MAX;
}

/* a name that does not fit into the probe length stays out of the index and resolves by LOOKUP */
static bool index_insert(Registry *registry, const Region *region) {
	_Atomic uint64_t *index = registry_index(registry);
	uint32_t mask = registry->shape.index_size - 1;

	for (uint32_t i = 0; i < LAYOUT_PROBE_MAX; ++i) {
		uint32_t at = (uint32_t)(region->name_link.hash + i) & mask;
		uint64_t entry = atomic_load_explicit(&index[at], memory_order_relaxed);

		if (!entry || entry == LAYOUT_TOMBSTONE) {
			atomic_store_explicit(&index[at], index_entry(region), memory_order_release);
			return true;
		}
	}
	return false;
}

static void index_remove(Registry *registry, uint32_t at) {
	_Atomic uint64_t *index = registry_index(registry);
	uint32_t mask = registry->shape.index_size - 1;

	if (atomic_load_explicit(&index[(at + 1) & mask], memory_order_relaxed)) {
		atomic_store_explicit(&index[at], LAYOUT_TOMBSTONE, memory_order_release);
		return;
	}
	/* at the end of a run of entries nothing probes past it: it and the tombstones before it become empty */
	do {
		atomic_store_explicit(&index[at], 0, memory_order_release);
		at = (at - 1) & mask;
	} while (atomic_load_explicit(&index[at], memory_order_relaxed) == LAYOUT_TOMBSTONE);
}

static void registry_write_slot(Registry *registry, const Region *region) {
	RegistrySlot *slot = registry_slot(registry, region->slot);
	RegistryDetail *detail = registry_detail(registry, region->slot);
	size_t head = layout_name_head(region->name_length), rest = region->name_length - head;

	kill_point();
	slot->size = region->size;
	slot->offset = region->offset;
	slot->name_length = (uint16_t)region->name_length;
	slot->kind = region->kind;
	slot->access = region->access;
	atomic_store_explicit(&slot->flags, region->flags, memory_order_relaxed);
	memcpy(slot->name, region->name, head);
	memset(slot->name + head, 0, sizeof(slot->name) - head);
	kill_point();
	memcpy(detail->name_rest, region->name + head, rest);
	memset(detail->name_rest + rest, 0, sizeof(detail->name_rest) - rest);
	detail->object = region->object ? region->object->id : 0;
	detail->object_size = region->object ? region->object->size : 0;
	detail->owner = region->owner_number;
}

void registry_set_flags(Registry *registry, const Region *region) {
	atomic_store_explicit(&registry_slot(registry, region->slot)->flags, region->flags, memory_order_release);
}

void registry_publish(Registry *registry, Region *region, Region *replaces) {
	uint64_t hash = wire_name_hash(registry->shape.hash_seed, region->name, region->name_length);
	uint32_t at = UINT32_MAX;

	if (replaces) {
		at = index_position(registry, replaces);
		table_remove(&registry->names, &replaces->name_link);
		replaces->named = false;
		if (replaces->flags & WIRE_REGION_UNINDEXED)
			registry->n_unindexed--;
	}

	registry_write_slot(registry, region);
	(void)table_insert(&registry->names, &region->name_link, hash);
	region->named = true;
	region->state = WIRE_STATE_ACTIVE;
	kill_point();
	atomic_store_explicit(&registry_slot(registry, region->slot)->word,
			      layout_word(region->generation, WIRE_STATE_ACTIVE), memory_order_release);

	kill_point();
	if (at != UINT32_MAX) {
		atomic_store_explicit(&registry_index(registry)[at], index_entry(region), memory_order_release);
	} else if (!index_insert(registry, region)) {
		registry->n_unindexed++;
		region->flags |= WIRE_REGION_UNINDEXED;
		registry_set_flags(registry, region);
	}
}

void registry_unname(Registry *registry, Region *region) {
	uint32_t at;

	if (!region->named)
		return;
	kill_point();
	if (registry->frozen) {
		/* the name stays for those who read, and for the next broker */
	} else if (region->flags & WIRE_REGION_UNINDEXED) {
		registry->n_unindexed--;
	} else {
		at = index_position(registry, region);
		if (at != UINT32_MAX)
			index_remove(registry, at);
	}
	table_remove(&registry->names, &region->name_link);
	region->named = false;
}

void registry_set_state(Registry *registry, Region *region, uint32_t state) {
	region->state = state;
	kill_point();
	atomic_store(&registry_slot(registry, region->slot)->word, layout_word(region->generation, state));
}

void registry_begin_scan(Registry *registry, Region *region) {
	atomic_fetch_add(&registry_detail(registry, region->slot)->scan, 1);
}

void registry_gone(Registry *registry) {
	atomic_fetch_add(&registry->header->gone_sequence, 1);
}

void registry_release(Registry *registry, Region *region) {
	/* a broker that stops retires nothing: consumers keep the generations that they have mapped */
	bool is_open = !registry->frozen && atomic_load(&registry->header->state) == LAYOUT_OPEN;

	registry_unname(registry, region);
	kill_point();
	if (is_open)
		atomic_store(&registry_slot(registry, region->slot)->word, 0);
	registry->regions[region->slot] = NULL;
	registry->free_slots[registry->n_free++] = region->slot;
	registry->n_regions--;
	if (is_open)
		registry_gone(registry);
}

uint32_t registry_session_reserve(Registry *registry) {
	if (registry->n_free_sessions)
		return registry->free_sessions[--registry->n_free_sessions];
	if (registry->n_used_sessions < registry->shape.session_capacity)
		return registry->n_used_sessions++;
	return UINT32_MAX;
}

void registry_session_set(Registry *registry, uint32_t index, uint64_t session) {
	if (registry->frozen)
		return;
	kill_point();
	atomic_store(&registry_sessions(registry)[index], session);
}

void registry_session_release(Registry *registry, uint32_t index) {
	registry_session_set(registry, index, 0);
	registry->free_sessions[registry->n_free_sessions++] = index;
}

/* ---- recovery ---- */

static bool slot_is_right(const RegistrySlot *slot, const RegistryDetail *detail, const Region *region) {
	size_t head = layout_name_head(region->name_length);

	return atomic_load(&slot->word) == layout_word(region->generation, region->state) &&
	       slot->size == region->size && slot->offset == region->offset &&
	       slot->name_length == region->name_length && slot->kind == region->kind &&
	       slot->access == region->access && !memcmp(slot->name, region->name, head) &&
	       !memcmp(detail->name_rest, region->name + head, region->name_length - head) &&
	       (!region->object ||
		(detail->object == region->object->id && detail->object_size >= region->offset + region->size));
}

bool registry_restore(Registry *registry, Region *region, bool has_name) {
	RegistrySlot *slot = registry_slot(registry, region->slot);
	uint64_t hash = wire_name_hash(registry->shape.hash_seed, region->name, region->name_length);
	bool mended = !slot_is_right(slot, registry_detail(registry, region->slot), region);

	registry->regions[region->slot] = region;
	registry->n_regions++;
	if (region->slot >= registry->n_used)
		registry->n_used = region->slot + 1;
	if (mended) {
		atomic_store(&slot->word, 0);
		registry_write_slot(registry, region);
		atomic_store(&slot->word, layout_word(region->generation, region->state));
		registry_gone(registry);
	}
	/* what else is said of it may have changed while nobody wrote it down */
	atomic_store(&slot->flags, region->flags & ~(uint32_t)WIRE_REGION_UNINDEXED);
	region->flags &= ~(uint32_t)WIRE_REGION_UNINDEXED;
	region->name_link.hash = hash;
	if (has_name) {
		(void)table_insert(&registry->names, &region->name_link, hash);
		region->named = true;
	}
	return mended;
}

/* does every entry lead to the region with that name, and does every name have one? */
static bool index_is_right(Registry *registry) {
	size_t n = 0;

	for (uint32_t at = 0; at < registry->shape.index_size; ++at) {
		uint64_t entry = atomic_load_explicit(&registry_index(registry)[at], memory_order_relaxed);
		uint32_t slot = (uint32_t)entry - 1;
		const Region *region;

		if (!entry || entry == LAYOUT_TOMBSTONE)
			continue;
		region = slot < registry->shape.capacity ? registry->regions[slot] : NULL;
		if (!region || !region->named || index_position(registry, region) != at)
			return false;
		n++;
	}
	return n == registry->names.n;
}

/* names that readers miss meanwhile they ask for by LOOKUP */
static void index_rebuild(Registry *registry) {
	for (uint32_t at = 0; at < registry->shape.index_size; ++at)
		if (atomic_load_explicit(&registry_index(registry)[at], memory_order_relaxed))
			atomic_store(&registry_index(registry)[at], 0);
	for (uint32_t slot = 0; slot < registry->n_used; ++slot) {
		Region *region = registry->regions[slot];

		if (!region || !region->named || index_insert(registry, region))
			continue;
		registry->n_unindexed++;
		region->flags |= WIRE_REGION_UNINDEXED;
		registry_set_flags(registry, region);
	}
}

uint32_t registry_settle(Registry *registry, uint32_t n_slots, const RegistrySessions *sessions) {
	bool index_is_wrong = !index_is_right(registry);
	uint32_t n_cleared = 0;

	if (index_is_wrong)
		index_rebuild(registry);
	for (uint32_t slot = 0; slot < n_slots; ++slot) {
		if (registry->regions[slot] || !atomic_load(&registry_slot(registry, slot)->word))
			continue;
		atomic_store(&registry_slot(registry, slot)->word, 0);
		n_cleared++;
	}
	for (uint32_t slot = registry->n_used; slot > 0; --slot)
		if (!registry->regions[slot - 1])
			registry->free_slots[registry->n_free++] = slot - 1;
	for (uint32_t index = registry->shape.session_capacity; index > 0; --index) {
		if (atomic_load(&registry_sessions(registry)[index - 1]) != sessions->words[index - 1])
			atomic_store(&registry_sessions(registry)[index - 1], sessions->words[index - 1]);
		if (sessions->used[index - 1] && registry->n_used_sessions < index)
			registry->n_used_sessions = index;
		else if (!sessions->used[index - 1] && index < registry->n_used_sessions)
			registry->free_sessions[registry->n_free_sessions++] = index - 1;
	}
	if (n_cleared)
		registry_gone(registry);
	return n_cleared + index_is_wrong;
}
