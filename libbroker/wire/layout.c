/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <string.h>

#include "layout.h"

static uint64_t layout_pages(uint64_t size) {
	return (size + LAYOUT_PAGE - 1) / LAYOUT_PAGE * LAYOUT_PAGE;
}

uint64_t layout_registry_init(RegistryHeader *ret, uint32_t capacity, uint32_t session_capacity, uint64_t epoch,
			      const uint64_t hash_seed[2]) {
	uint32_t index_size = 1;
	uint64_t at = LAYOUT_PAGE;

	if (capacity == 0 || capacity > LAYOUT_CAPACITY_MAX)
		return 0;
	if (session_capacity == 0 || session_capacity > LAYOUT_CAPACITY_MAX)
		return 0;
	if (epoch >> (LAYOUT_GENERATION_BITS - LAYOUT_COUNTER_BITS) != 0)
		return 0;
	while (index_size < 2 * capacity)
		index_size *= 2;

	memset((void *)ret, 0, sizeof(*ret));
	ret->magic = LAYOUT_REGISTRY_MAGIC;
	ret->version = LAYOUT_VERSION;
	ret->header_size = sizeof(RegistryHeader);
	ret->epoch = epoch;
	ret->hash_seed[0] = hash_seed[0];
	ret->hash_seed[1] = hash_seed[1];
	ret->capacity = capacity;
	ret->index_size = index_size;
	ret->session_capacity = session_capacity;
	ret->slot_size = sizeof(RegistrySlot);
	ret->index_offset = at;
	at += layout_pages((uint64_t)index_size * sizeof(uint64_t));
	ret->sessions_offset = at;
	at += layout_pages((uint64_t)session_capacity * sizeof(uint64_t));
	ret->slots_offset = at;
	at += layout_pages((uint64_t)capacity * sizeof(RegistrySlot));
	ret->details_offset = at;
	ret->detail_size = sizeof(RegistryDetail);
	at += layout_pages((uint64_t)capacity * sizeof(RegistryDetail));
	ret->total_size = at;
	atomic_init(&ret->state, LAYOUT_OPEN);
	return at;
}

uint64_t layout_lease_page_init(LeasePageHeader *ret, uint32_t capacity, uint32_t lanes, uint32_t mode,
				uint64_t session) {
	uint64_t at = LAYOUT_PAGE;

	if (capacity == 0 || capacity > LAYOUT_CAPACITY_MAX || lanes == 0 || lanes > LAYOUT_LANES_MAX)
		return 0;
	if (mode != WIRE_ATTACH_ASYMMETRIC && mode != WIRE_ATTACH_RMW)
		return 0;

	memset((void *)ret, 0, sizeof(*ret));
	ret->magic = LAYOUT_LEASE_MAGIC;
	ret->version = LAYOUT_VERSION;
	ret->header_size = sizeof(LeasePageHeader);
	ret->session = session;
	ret->capacity = capacity;
	ret->lanes = lanes;
	ret->mode = mode;
	ret->rung_offset = at;
	at += layout_pages((uint64_t)capacity * sizeof(uint32_t));
	ret->lanes_offset = at;
	at += layout_pages((uint64_t)capacity * lanes * sizeof(LaneCounter));
	ret->total_size = at;
	return at;
}

/* a header is right when its parts stand where a header made from its own shape has them */
int layout_registry_check(const RegistryHeader *header, uint64_t file_size) {
	RegistryHeader right;
	uint32_t state;

	if (file_size < LAYOUT_PAGE)
		return -EINVAL;
	if (header->magic != LAYOUT_REGISTRY_MAGIC || header->version != LAYOUT_VERSION)
		return -EINVAL;
	if (layout_registry_init(&right, header->capacity, header->session_capacity, header->epoch,
				 header->hash_seed) == 0)
		return -EINVAL;
	if (header->header_size != right.header_size || header->slot_size != right.slot_size)
		return -EINVAL;
	if (header->index_size != right.index_size || header->index_offset != right.index_offset)
		return -EINVAL;
	if (header->sessions_offset != right.sessions_offset || header->slots_offset != right.slots_offset)
		return -EINVAL;
	if (header->details_offset != right.details_offset || header->detail_size != right.detail_size)
		return -EINVAL;
	if (header->total_size != right.total_size || file_size != right.total_size)
		return -EINVAL;
	state = atomic_load_explicit(&header->state, memory_order_acquire);
	if (state != LAYOUT_OPEN && state != LAYOUT_CLOSED)
		return -EINVAL;
	return 0;
}

int layout_lease_page_check(const LeasePageHeader *header, uint64_t file_size) {
	LeasePageHeader right;

	if (file_size < LAYOUT_PAGE)
		return -EINVAL;
	if (header->magic != LAYOUT_LEASE_MAGIC || header->version != LAYOUT_VERSION)
		return -EINVAL;
	if (layout_lease_page_init(&right, header->capacity, header->lanes, header->mode, header->session) == 0)
		return -EINVAL;
	if (header->header_size != right.header_size || header->rung_offset != right.rung_offset)
		return -EINVAL;
	if (header->lanes_offset != right.lanes_offset)
		return -EINVAL;
	if (header->total_size != right.total_size || file_size != right.total_size)
		return -EINVAL;
	return 0;
}

uint32_t layout_lease_page_count(const LeasePageHeader *page, const LeasePageHeader *shape, uint32_t slot) {
	const LaneCounter *counters = (const LaneCounter *)((uintptr_t)page + shape->lanes_offset) + slot;
	uint64_t used = atomic_load_explicit(&page->lanes_used, memory_order_acquire);
	uint32_t acquired = 0, released = 0;

	if (shape->lanes < 64)
		used &= (UINT64_C(1) << shape->lanes) - 1;

	for (uint64_t left = used; left != 0; left &= left - 1) {
		const LaneCounter *counter = counters + (size_t)__builtin_ctzll(left) * shape->capacity;

		released += atomic_load_explicit(&counter->released, memory_order_acquire);
	}
	atomic_thread_fence(memory_order_seq_cst);
	for (uint64_t left = used; left != 0; left &= left - 1) {
		const LaneCounter *counter = counters + (size_t)__builtin_ctzll(left) * shape->capacity;

		acquired += atomic_load_explicit(&counter->acquired, memory_order_acquire);
	}
	return acquired - released;
}
