/* SPDX-License-Identifier: Apache-2.0 */

/*
 * GetMemoryInfo: a name or a handle becomes a lease, without a system call where the generation is mapped. The order
 * of the steps in acquire() is what layout.h demands: count, then look again.
 */

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "lease.h"
#include "map.h"
#include "wire/name.h"
#include "wire/range.h"

/* beside 0, codes and -errno */
enum {
	ACQUIRE_MAP = INT_MIN, /* the generation is not mapped with this access yet */
	ACQUIRE_AGAIN,	       /* the slot changed meanwhile */
};

static inline bool session_holds(const struct shmb_client *client, const RegistryHeader *registry) {
	return atomic_load_explicit(&registry->state, memory_order_acquire) == LAYOUT_OPEN &&
	       atomic_load_explicit(atomic_load_explicit(&client->session_word, memory_order_relaxed),
				    memory_order_acquire) == client->session;
}

/* whether a lease on what is mapped can be had; what is not 0 is for the slow path to settle */
enum {
	GRANT_OTHERWISE = 1, /* the generation is not mapped so, or the range is not within it */
	GRANT_UNDO,	     /* counted, but the slot or the session changed: the count must be taken back */
};

/*
 * Grants a lease on what is mapped, if the slot has @generation and @state, one that grants. lane_cache is @client's.
 * Whether the entry is that of the generation is settled by the look after the count: nothing is unmapped before the
 * registry shows that its generation is over. No call, so that the functions which are this and little else save no registers.
 */
static inline __attribute__((always_inline)) int grant(struct shmb_client *client, uint32_t slot, uint64_t generation,
						       uint32_t state, uint64_t offset, uint64_t size, uint32_t access,
						       struct shmb_lease *ret) {
	const RegistryHeader *registry = client->registry;
	const MapEntry *entry = &client->maps[slot];
	uint64_t extent, region_size;

	if (__builtin_expect(atomic_load_explicit(&entry->generation, memory_order_acquire) != generation, 0))
		return GRANT_OTHERWISE;
	if (!(access & SHMB_COPY) &&
	    __builtin_expect(!atomic_load_explicit(&entry->base[map_mode(access)], memory_order_acquire), 0))
		return GRANT_OTHERWISE;
	region_size = map_extent_size(atomic_load_explicit(&entry->extent, memory_order_relaxed));
	if (__builtin_expect(offset > region_size || (size > region_size - offset && size != SHMB_REST), 0))
		return GRANT_OTHERWISE;

	lane_count_acquire(slot);
	if (__builtin_expect(atomic_load(&client->slots[slot].word) != layout_word(generation, state) ||
				     !session_holds(client, registry),
			     0))
		return GRANT_UNDO;
	/* the entry cannot change from here on */
	ret->address = access & SHMB_COPY
			       ? NULL
			       : atomic_load_explicit(&entry->base[map_mode(access)], memory_order_relaxed) + offset;
	extent = atomic_load_explicit(&entry->extent, memory_order_relaxed);
	ret->size = size != SHMB_REST ? size : map_extent_size(extent) - offset;
	ret->memory_type = SHMB_MEMORY_CPU;
	ret->device = -1;
	memset(ret->device_uuid, 0, sizeof(ret->device_uuid));
	ret->generation = generation;
	ret->access = access & ~(uint32_t)SHMB_NO_WAIT;
	ret->flags = map_extent_flags(extent);
	ret->client = client;
	ret->internal[LEASE_SLOT] = slot;
	ret->internal[LEASE_OFFSET] = offset;
	ret->internal[LEASE_FD] = 0;
	return 0;
}

/*
 * The same for GPU memory that is open. It is no matter of nanoseconds: what is there is read under a lock, once it is
 * counted and cannot go.
 */
static int acquire_cuda(struct shmb_client *client, uint32_t slot, uint64_t word, uint64_t offset, uint64_t size,
			uint32_t access, struct shmb_lease *ret) {
	uint64_t generation = layout_word_generation(word), window, extent;
	CudaPlace place;

	if (access & SHMB_COPY)
		return ACQUIRE_MAP;
	lane_count_acquire(slot);
	if (atomic_load(&client->slots[slot].word) != word || !session_holds(client, client->registry)) {
		lease_count_release(client, slot);
		return session_holds(client, client->registry)
			       ? ACQUIRE_AGAIN
			       : error_set(SHMB_E_DETACHED, "the broker has ended this session");
	}
	if (!map_cuda_place(client, slot, generation, access, &place, &window, &extent)) {
		lease_count_release(client, slot);
		return ACQUIRE_MAP;
	}
	if (size == SHMB_REST && offset <= map_extent_size(extent))
		size = map_extent_size(extent) - offset;
	if (!range_within(offset, size, map_extent_size(extent))) {
		lease_count_release(client, slot);
		return error_set(SHMB_E_OUT_OF_BOUNDS, "offset and size are not within the region");
	}
	*ret = (struct shmb_lease){
		.address = (void *)(uintptr_t)(place.base + window + offset),
		.size = size,
		.memory_type = SHMB_MEMORY_CUDA,
		.device = place.device,
		.generation = generation,
		.access = access & ~(uint32_t)SHMB_NO_WAIT,
		.flags = map_extent_flags(extent),
		.client = client,
		.internal = { [LEASE_SLOT] = slot, [LEASE_OFFSET] = offset },
	};
	memcpy(ret->device_uuid, place.uuid, sizeof(ret->device_uuid));
	return 0;
}

/* grant() with its reasons told: 0, a wire code, -errno, or ACQUIRE_* */
static int acquire(struct shmb_client *client, uint32_t slot, uint64_t word, uint64_t offset, uint64_t size,
		   uint32_t access, struct shmb_lease *ret) {
	const MapEntry *entry = &client->maps[slot];
	uint64_t region_size;

	if (!lane_is_ready(client))
		lane_select(client);
	switch (grant(client, slot, layout_word_generation(word), layout_word_state(word), offset, size, access, ret)) {
	case 0:
		return 0;
	case GRANT_UNDO:
		lease_count_release(client, slot);
		return session_holds(client, client->registry)
			       ? ACQUIRE_AGAIN
			       : error_set(SHMB_E_DETACHED, "the broker has ended this session");
	default:
		if (atomic_load_explicit(&entry->generation, memory_order_acquire) == layout_word_generation(word) &&
		    atomic_load_explicit(&client->map_details[slot].kind, memory_order_relaxed) != WIRE_KIND_MEMORY)
			return acquire_cuda(client, slot, word, offset, size, access, ret);
		region_size = map_extent_size(atomic_load_explicit(&entry->extent, memory_order_relaxed));
		if (atomic_load_explicit(&entry->generation, memory_order_acquire) != layout_word_generation(word) ||
		    range_within(offset, size == SHMB_REST ? 0 : size, region_size))
			return ACQUIRE_MAP;
		return error_set(SHMB_E_OUT_OF_BOUNDS, "offset and size are not within the region");
	}
}

/* 8 bytes at a time, the last ones overlapping */
static inline bool bytes_are(const char *a, const char *b, size_t length) {
	uint64_t x, y;
	size_t i;

	if (length < 8)
		return !memcmp(a, b, length);
	for (i = 0; i + 8 < length; i += 8) {
		memcpy(&x, a + i, 8);
		memcpy(&y, b + i, 8);
		if (x != y)
			return false;
	}
	memcpy(&x, a + length - 8, 8);
	memcpy(&y, b + length - 8, 8);
	return x == y;
}

static inline bool name_is(const struct shmb_client *client, uint32_t slot, const char *name, size_t length) {
	const RegistrySlot *published = &client->slots[slot];
	size_t head = layout_name_head(length);

	return published->name_length == length && bytes_are(published->name, name, head) &&
	       (__builtin_expect(length == head, 1) ||
		!memcmp(client->details[slot].name_rest, name + head, length - head));
}

/* the slot that a reader finds, with the word it had; false is not authoritative */
static inline bool probe(const struct shmb_client *client, const char *name, size_t length, uint32_t *ret_slot,
			 uint64_t *ret_word) {
	uint64_t hash = wire_name_hash(client->hash_seed, name, length);

	for (uint32_t i = 0; i < LAYOUT_PROBE_MAX; ++i) {
		uint64_t entry = atomic_load_explicit(&client->index[((uint32_t)hash + i) & client->index_mask],
						      memory_order_acquire);
		uint32_t at;
		uint64_t word;

		if (!entry)
			return false;
		at = (uint32_t)entry - 1;
		if (entry >> 32 != hash >> 32 || at >= client->capacity)
			continue;
		word = atomic_load_explicit(&client->slots[at].word, memory_order_acquire);
		if (!name_is(client, at, name, length))
			continue;
		*ret_slot = at;
		*ret_word = word;
		return true;
	}
	return false;
}

/* asks the broker, whose word on names is final */
static int resolve(struct shmb_client *client, const char *name, size_t length, uint32_t *ret_slot,
		   uint64_t *ret_generation, uint64_t *ret_size) {
	WireCountHead head = { .count = 1 };
	WireLookupEntry entry = {
		.size = WIRE_REST,
		.flags = WIRE_LOOKUP_NO_LEASE,
		.name_length = (uint16_t)length,
	};
	WireLookupResult result;
	WireWriter writer;
	WireReader body;
	const char *text;
	Call call;
	_cleanup_(freep) uint8_t *buffer = client_request_begin(&writer, WIRE_OP_LOOKUP);
	int r;

	if (!buffer)
		return error_plain(-ENOMEM);
	wire_write(&writer, &head, sizeof(head));
	wire_write(&writer, &entry, sizeof(entry));
	wire_write(&writer, name, length);
	r = call_run(client, &writer, NULL, 0, &call);
	if (!r) {
		body = call_body(&call);
		wire_read(&body, &head, sizeof(head));
		wire_read(&body, &result, sizeof(result));
		text = wire_read_bytes(&body, result.text_length);
		if (!text || head.count != 1)
			r = error_plain(-EPROTO);
		else if (result.code)
			r = error_setn((int)result.code, text, result.text_length);
		else if (result.slot >= client->capacity && client->capacity)
			r = error_plain(-EPROTO);
	}
	call_end(&call);
	if (r)
		return r;
	*ret_slot = result.slot;
	*ret_generation = result.generation;
	*ret_size = result.size;
	return 0;
}

static int check_access(const struct shmb_client *client, uint32_t access) {
	if (!(access & SHMB_READ) || access & ~(uint32_t)(SHMB_READ | SHMB_WRITE | SHMB_COPY | SHMB_NO_WAIT))
		return error_set(SHMB_E_INVALID, "access is SHMB_READ, with SHMB_WRITE, SHMB_COPY, SHMB_NO_WAIT");
	if (!client->page)
		return error_set(SHMB_E_NOT_ATTACHED, client->roles & SHMB_ROLE_CONSUMER
							      ? "this client was made without a lease page"
							      : "this client has not the role consumer");
	return 0;
}

/* the first use of a generation, and whatever else the fast path cannot settle */
static int acquire_generation(struct shmb_client *client, uint32_t slot, uint64_t generation, uint64_t offset,
			      uint64_t size, uint32_t access, struct shmb_lease *ret) {
	uint64_t word, populated = size;
	int r;

	if (populated == SHMB_REST)
		populated = client->slots[slot].size - offset;
	r = map_ensure(client, slot, generation, access, offset, populated);
	if (r)
		return r;
	word = atomic_load_explicit(&client->slots[slot].word, memory_order_acquire);
	if (layout_word_generation(word) != generation || !layout_word_grants(word))
		return ACQUIRE_AGAIN;
	r = acquire(client, slot, word, offset, size, access, ret);
	if (!r && access & SHMB_COPY)
		ret->internal[LEASE_FD] = (uint64_t)map_copy_fd(client, slot, generation, access) + 1;
	return r;
}

/* for SHMB_NO_WAIT */
static int must_wait(void) {
	return error_set(SHMB_E_AGAIN, "the broker must be asked, and SHMB_NO_WAIT was said");
}

static int acquire_slowly(struct shmb_client *client, const char *name, size_t length, uint64_t offset, uint64_t size,
			  uint32_t access, struct shmb_lease *ret) {
	uint64_t generation, region_size;
	uint32_t slot;
	int r;

	for (int i = 0; i < CLIENT_TRIES; ++i) {
		r = resolve(client, name, length, &slot, &generation, &region_size);
		if (r)
			return r;
		r = acquire_generation(client, slot, generation, offset, size, access, ret);
		/* it was replaced, or retired for a moment, between the answer and our look */
		if (r >= 0 && r != SHMB_E_STALE && r != SHMB_E_RETIRING)
			return r;
		if (r < 0 && r != ACQUIRE_AGAIN && r != ACQUIRE_MAP)
			return r;
	}
	return error_set(SHMB_E_AGAIN, "the name changes hands faster than it can be mapped");
}

/* grant() has counted in lane_cache.undo and must not have: takes that back */
static void undo(struct shmb_client *client) {
	if (lane_cache.undo == LANE_NO_UNDO)
		return;
	lease_count_release(client, lane_cache.undo);
	lane_cache.undo = LANE_NO_UNDO;
}

static __attribute__((noinline)) int get_slowly(struct shmb_client *client, const char *name, uint64_t offset,
						uint64_t size, uint32_t access, struct shmb_lease *ret) {
	size_t length = strlen(name);
	uint64_t word;
	uint32_t slot;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	undo(client);
	r = check_access(client, access) ?: error_of_name(name, length);
	if (r)
		return r;
	if (!(access & SHMB_COPY) && probe(client, name, length, &slot, &word) && layout_word_grants(word)) {
		r = acquire(client, slot, word, offset, size, access, ret);
		if (r >= 0) {
			maps_settle(client);
			return r;
		}
	}
	if (access & SHMB_NO_WAIT)
		return must_wait();
	return acquire_slowly(client, name, length, offset, size, access, ret);
}

/* what the fast path may take on: a pointer is wanted, and this thread has used the client before */
static inline bool is_fast(const struct shmb_client *client, uint32_t access) {
	return lane_is_ready(client) &&
	       __builtin_expect((access & ~(uint32_t)(SHMB_WRITE | SHMB_NO_WAIT)) == SHMB_READ, 1);
}

/* a lease was granted: what is gone meanwhile is unmapped */
static __attribute__((noinline, cold)) int granted_and_gone(struct shmb_client *client) {
	maps_reap(client);
	return 0;
}

int shmb_client_get_memory_info(struct shmb_client *client, const char *name, uint64_t offset, uint64_t size,
				uint32_t access, struct shmb_lease *ret) {
	size_t length = strlen(name);
	uint64_t word;
	uint32_t slot;
	int r;

	/* a bad name is in no index: whoever is slow is told */
	if (is_fast(client, access) && length <= WIRE_NAME_MAX && probe(client, name, length, &slot, &word) &&
	    layout_word_state(word) == WIRE_STATE_ACTIVE) {
		r = grant(client, slot, layout_word_generation(word), WIRE_STATE_ACTIVE, offset, size, access, ret);
		if (__builtin_expect(!r, 1))
			return maps_are_settled(client) ? 0 : granted_and_gone(client);
		if (r == GRANT_UNDO)
			lane_cache.undo = slot;
	}
	return get_slowly(client, name, offset, size, access, ret);
}

int shmb_handle_open(struct shmb_client *client, const char *name, struct shmb_handle *ret) {
	uint64_t generation, size;
	size_t length = strlen(name);
	uint32_t slot;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	r = check_access(client, SHMB_READ) ?: error_of_name(name, length);
	if (!r)
		r = resolve(client, name, length, &slot, &generation, &size);
	if (r)
		return r;
	*ret = (struct shmb_handle){ .slot = slot, .generation = generation, .size = size };
	return 0;
}

/* A slot that was found RETIRING may go back to LAZY: who asks for its name is answered after the broker's scan. */
static int ask_again(struct shmb_client *client, const struct shmb_handle *handle, uint64_t word) {
	const RegistrySlot *published = &client->slots[handle->slot];
	size_t length = published->name_length, head;
	uint64_t generation, size;
	char name[SHMB_NAME_MAX];
	uint32_t slot;
	int r;

	if (length > sizeof(name))
		return error_plain(-EPROTO);
	head = layout_name_head(length);
	memcpy(name, published->name, head);
	memcpy(name + head, client->details[handle->slot].name_rest, length - head);
	if (atomic_load_explicit(&published->word, memory_order_acquire) != word)
		return ACQUIRE_AGAIN;
	r = resolve(client, name, length, &slot, &generation, &size);
	if (r < 0)
		return r;
	return !r && slot == handle->slot && generation == handle->generation ? ACQUIRE_AGAIN
									      : error_plain(SHMB_E_RETIRING);
}

static __attribute__((noinline)) int get_by_handle_slowly(struct shmb_client *client, const struct shmb_handle *handle,
							  uint64_t offset, uint64_t size, uint32_t access,
							  struct shmb_lease *ret) {
	uint64_t word;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	undo(client);
	r = check_access(client, access);
	if (r)
		return r;
	if (handle->slot >= client->capacity)
		return error_plain(SHMB_E_STALE);
	for (int i = 0; i < CLIENT_TRIES; ++i) {
		word = atomic_load_explicit(&client->slots[handle->slot].word, memory_order_acquire);
		if (layout_word_generation(word) != handle->generation)
			return error_set(SHMB_E_STALE, "that generation is over");
		if (layout_word_state(word) == WIRE_STATE_REVOKED)
			return error_plain(SHMB_E_REVOKED);
		if (!layout_word_grants(word)) {
			if (access & SHMB_NO_WAIT)
				return must_wait();
			r = ask_again(client, handle, word);
			if (r != ACQUIRE_AGAIN)
				return r;
			continue;
		}
		r = ACQUIRE_MAP;
		if (!(access & SHMB_COPY))
			r = acquire(client, handle->slot, word, offset, size, access, ret);
		if (r == ACQUIRE_MAP && access & SHMB_NO_WAIT)
			return must_wait();
		if (r == ACQUIRE_MAP)
			r = acquire_generation(client, handle->slot, handle->generation, offset, size, access, ret);
		if (r >= 0) {
			maps_settle(client);
			return r;
		}
		if (r != ACQUIRE_AGAIN && r != ACQUIRE_MAP)
			return r;
	}
	return error_plain(SHMB_E_RETIRING);
}

int shmb_handle_get_memory_info(struct shmb_client *client, const struct shmb_handle *handle, uint64_t offset,
				uint64_t size, uint32_t access, struct shmb_lease *ret) {
	uint32_t slot = handle->slot;
	int r;

	/* no first look at the word: the handle says what it must be */
	if (is_fast(client, access) && __builtin_expect(slot < client->capacity, 1)) {
		r = grant(client, slot, handle->generation, WIRE_STATE_ACTIVE, offset, size, access, ret);
		if (__builtin_expect(!r, 1))
			return maps_are_settled(client) ? 0 : granted_and_gone(client);
		if (r == GRANT_UNDO)
			lane_cache.undo = slot;
	}
	return get_by_handle_slowly(client, handle, offset, size, access, ret);
}

int shmb_client_get_memory_info_many(struct shmb_client *client, const struct shmb_lookup_spec *specs, uint32_t n,
				     struct shmb_lease *ret_leases, int *ret_results) {
	for (uint32_t i = 0; i < n; ++i)
		ret_results[i] = shmb_client_get_memory_info(client, specs[i].name, specs[i].offset, specs[i].size,
							     specs[i].access, &ret_leases[i]);
	return 0;
}
