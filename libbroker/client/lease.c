/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Leases without a system call. The order of the steps is what layout.h demands: count, then look again; count the
 * release, then look whether somebody waits for it.
 */

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "map.h"
#include "wire/name.h"
#include "wire/range.h"

/* internal[] of a lease */
enum {
	LEASE_WORD, /* the slot's word under which it was granted */
	LEASE_SLOT,
	LEASE_OFFSET, /* of the lease in the memory */
	LEASE_FD,     /* for guarded copies, plus one; 0 for none */
};

/* beside 0, codes and -errno */
enum {
	ACQUIRE_MAP = INT_MIN, /* the generation is not mapped with this access yet */
	ACQUIRE_AGAIN,	       /* the slot changed meanwhile */
};

/* the compiler must not move the count past the look; the broker's membarrier does the rest */
#define compiler_barrier() atomic_signal_fence(memory_order_seq_cst)

static inline LaneCounter *lane_counter(const struct shmb_client *client, uint32_t lane, uint32_t slot) {
	return layout_lane(client->page, lane) + slot;
}

static inline void count(const struct shmb_client *client, uint32_t lane, _Atomic uint32_t *counter) {
	if (client->mode == WIRE_ATTACH_ASYMMETRIC && lane != client->lanes - 1) {
		/* the lane has one writer; release, so that what the holder read is before a release that is seen */
		atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + 1,
				      memory_order_release);
		compiler_barrier();
	} else {
		atomic_fetch_add(counter, 1);
	}
}

/* the broker waits for the last release on this slot: one notice for each of its scans, marked once it is sent */
static void ring(struct shmb_client *client, uint32_t slot, uint64_t word) {
	uint32_t scan = atomic_load(&layout_slots(client->registry)[slot].scan);

	if (atomic_load(&layout_rung(client->page)[slot]) == scan + 1)
		return;
	if (!client_notify(client, slot, scan, layout_word_generation(word)))
		atomic_store(&layout_rung(client->page)[slot], scan + 1);
}

/*
 * Returns the word that stands in the slot after the count. Whatever generation waits there is told: a count that a
 * failed acquire takes back may have fallen on the one that came after.
 */
static uint64_t release_count(struct shmb_client *client, uint32_t slot) {
	uint32_t lane = lane_get(client);
	uint64_t now;

	count(client, lane, &lane_counter(client, lane, slot)->released);
	now = atomic_load(&layout_slots(client->registry)[slot].word);
	if (__builtin_expect(now && layout_word_state(now) != WIRE_STATE_ACTIVE, 0))
		ring(client, slot, now);
	return now;
}

static inline bool session_holds(const struct shmb_client *client) {
	return atomic_load_explicit(&client->registry->state, memory_order_acquire) == LAYOUT_OPEN &&
	       atomic_load_explicit(&layout_sessions(client->registry)[client->session_index], memory_order_acquire) ==
		       client->session;
}

static int out_of_bounds(void) {
	return error_set(SHMB_E_OUT_OF_BOUNDS, "offset and size are not within the region");
}

static int acquire(struct shmb_client *client, uint32_t slot, uint64_t word, uint64_t offset, uint64_t size,
		   uint32_t access, struct shmb_lease *ret) {
	const RegistrySlot *published = &layout_slots(client->registry)[slot];
	const MapEntry *entry = &client->maps[slot];
	uint64_t region_size;
	uint8_t *base;
	uint32_t lane;

	if (atomic_load_explicit(&entry->generation, memory_order_acquire) != layout_word_generation(word))
		return ACQUIRE_MAP;
	base = atomic_load_explicit(&entry->base[map_mode(access)], memory_order_acquire);
	if (!base && !(access & SHMB_COPY))
		return ACQUIRE_MAP;
	region_size = atomic_load_explicit(&entry->size, memory_order_relaxed);
	if (size == SHMB_REST && offset <= region_size)
		size = region_size - offset;
	if (__builtin_expect(!range_within(offset, size, region_size), 0))
		return out_of_bounds();

	lane = lane_get(client);
	count(client, lane, &lane_counter(client, lane, slot)->acquired);
	if (__builtin_expect(atomic_load(&published->word) != word || !session_holds(client), 0)) {
		(void)release_count(client, slot);
		return session_holds(client) ? ACQUIRE_AGAIN
					     : error_set(SHMB_E_DETACHED, "the broker has ended this session");
	}
	*ret = (struct shmb_lease){
		.address = access & SHMB_COPY ? NULL : base + offset,
		.size = size,
		.memory_type = SHMB_MEMORY_CPU,
		.device = -1,
		.generation = layout_word_generation(word),
		.access = access,
		.flags = atomic_load_explicit(&entry->flags, memory_order_relaxed),
		.client = client,
		.internal = {
			[LEASE_WORD] = word,
			[LEASE_SLOT] = slot,
			[LEASE_OFFSET] = atomic_load_explicit(&entry->offset, memory_order_relaxed) + offset,
		},
	};
	return 0;
}

/* the slot that a reader finds, with the word it had; false is not authoritative */
static bool probe(const struct shmb_client *client, const char *name, size_t length, uint32_t *ret_slot,
		  uint64_t *ret_word) {
	const RegistryHeader *registry = client->registry;
	uint64_t hash = wire_name_hash(registry->hash_seed, name, length);
	uint32_t mask = registry->index_size - 1;

	for (uint32_t i = 0; i < LAYOUT_PROBE_MAX; ++i) {
		uint64_t entry = atomic_load_explicit(&layout_index(registry)[((uint32_t)hash + i) & mask],
						      memory_order_acquire);
		const RegistrySlot *slot;
		uint32_t at;
		uint64_t word;

		if (!entry)
			return false;
		at = (uint32_t)entry - 1;
		if (entry >> 32 != hash >> 32 || at >= client->capacity)
			continue;
		slot = &layout_slots(registry)[at];
		word = atomic_load_explicit(&slot->word, memory_order_acquire);
		if (slot->name_length != length || memcmp(slot->name, name, length))
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
	if (!(access & SHMB_READ) || access & ~(uint32_t)(SHMB_READ | SHMB_WRITE | SHMB_COPY))
		return error_set(SHMB_E_INVALID, "access is SHMB_READ, with SHMB_WRITE, with SHMB_COPY");
	if (!client->page)
		return error_set(SHMB_E_NOT_ATTACHED, client->roles & SHMB_ROLE_CONSUMER
							      ? "this client was made without a lease page"
							      : "this client has not the role consumer");
	return 0;
}

static int check_name(const char *name, size_t length) {
	const char *why;
	int r = wire_name_check(name, length, &why);

	return r ? error_set(r, why) : 0;
}

/* the first use of a generation, and whatever else the fast path cannot settle */
static int acquire_generation(struct shmb_client *client, uint32_t slot, uint64_t generation, uint64_t offset,
			      uint64_t size, uint32_t access, struct shmb_lease *ret) {
	uint64_t word, populated = size;
	int r;

	if (populated == SHMB_REST)
		populated = layout_slots(client->registry)[slot].size - offset;
	r = map_ensure(client, slot, generation, access, offset, populated);
	if (r)
		return r;
	word = atomic_load_explicit(&layout_slots(client->registry)[slot].word, memory_order_acquire);
	if (layout_word_generation(word) != generation || !layout_word_grants(word))
		return ACQUIRE_AGAIN;
	r = acquire(client, slot, word, offset, size, access, ret);
	if (!r && access & SHMB_COPY)
		ret->internal[LEASE_FD] = (uint64_t)map_copy_fd(client, slot, generation, access) + 1;
	return r;
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

int shmb_client_get_memory_info(struct shmb_client *client, const char *name, uint64_t offset, uint64_t size,
				uint32_t access, struct shmb_lease *ret) {
	size_t length = strlen(name);
	uint64_t word;
	uint32_t slot;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	r = check_access(client, access);
	if (r)
		return r;
	/* a bad name is in no index: whoever is slow is told */
	if (!(access & SHMB_COPY) && length <= WIRE_NAME_MAX && probe(client, name, length, &slot, &word) &&
	    layout_word_grants(word)) {
		r = acquire(client, slot, word, offset, size, access, ret);
		if (r >= 0) {
			maps_reap(client);
			return r;
		}
	}
	r = check_name(name, length);
	return r ? r : acquire_slowly(client, name, length, offset, size, access, ret);
}

int shmb_handle_open(struct shmb_client *client, const char *name, struct shmb_handle *ret) {
	uint64_t generation, size;
	size_t length = strlen(name);
	uint32_t slot;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	r = check_access(client, SHMB_READ) ?: check_name(name, length);
	if (!r)
		r = resolve(client, name, length, &slot, &generation, &size);
	if (r)
		return r;
	*ret = (struct shmb_handle){ .slot = slot, .generation = generation, .size = size };
	return 0;
}

/* A slot that was found RETIRING may go back to LAZY: who asks for its name is answered after the broker's scan. */
static int ask_again(struct shmb_client *client, const struct shmb_handle *handle, uint64_t word) {
	const RegistrySlot *published = &layout_slots(client->registry)[handle->slot];
	size_t length = published->name_length;
	uint64_t generation, size;
	char name[SHMB_NAME_MAX];
	uint32_t slot;
	int r;

	if (length > sizeof(name))
		return error_plain(-EPROTO);
	memcpy(name, published->name, length);
	if (atomic_load_explicit(&published->word, memory_order_acquire) != word)
		return ACQUIRE_AGAIN;
	r = resolve(client, name, length, &slot, &generation, &size);
	if (r < 0)
		return r;
	return !r && slot == handle->slot && generation == handle->generation ? ACQUIRE_AGAIN
									      : error_plain(SHMB_E_RETIRING);
}

int shmb_handle_get_memory_info(struct shmb_client *client, const struct shmb_handle *handle, uint64_t offset,
				uint64_t size, uint32_t access, struct shmb_lease *ret) {
	uint64_t word;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	r = check_access(client, access);
	if (r)
		return r;
	if (handle->slot >= client->capacity)
		return error_plain(SHMB_E_STALE);
	for (int i = 0; i < CLIENT_TRIES; ++i) {
		word = atomic_load_explicit(&layout_slots(client->registry)[handle->slot].word, memory_order_acquire);
		if (layout_word_generation(word) != handle->generation)
			return error_set(SHMB_E_STALE, "that generation is over");
		if (layout_word_state(word) == WIRE_STATE_REVOKED)
			return error_plain(SHMB_E_REVOKED);
		if (!layout_word_grants(word)) {
			r = ask_again(client, handle, word);
			if (r != ACQUIRE_AGAIN)
				return r;
			continue;
		}
		r = ACQUIRE_MAP;
		if (!(access & SHMB_COPY))
			r = acquire(client, handle->slot, word, offset, size, access, ret);
		if (r == ACQUIRE_MAP)
			r = acquire_generation(client, handle->slot, handle->generation, offset, size, access, ret);
		if (r >= 0) {
			maps_reap(client);
			return r;
		}
		if (r != ACQUIRE_AGAIN && r != ACQUIRE_MAP)
			return r;
	}
	return error_plain(SHMB_E_RETIRING);
}

int shmb_lease_release(struct shmb_lease *lease) {
	struct shmb_client *client = __atomic_exchange_n(&lease->client, NULL, __ATOMIC_ACQ_REL);
	uint64_t word, now;

	if (!client)
		return error_set(SHMB_E_STALE, "the lease was released before");
	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	word = lease->internal[LEASE_WORD];
	lease->address = NULL;
	now = release_count(client, (uint32_t)lease->internal[LEASE_SLOT]);
	if (__builtin_expect(now == word, 1))
		return 0;
	maps_reap(client);
	if (layout_word_generation(now) == layout_word_generation(word) && layout_word_state(now) == WIRE_STATE_REVOKED)
		return error_plain(SHMB_E_REVOKED);
	return 0;
}

static int check_copy(const struct shmb_lease *lease, uint64_t offset, uint64_t size, uint32_t access) {
	if (!lease->client)
		return error_set(SHMB_E_STALE, "the lease was released before");
	if (client_is_foreign(lease->client))
		return error_plain(SHMB_E_FORKED);
	if (access & ~lease->access)
		return error_set(SHMB_E_ACCESS, "the lease is for reading only");
	if (!range_within(offset, size, lease->size))
		return error_set(SHMB_E_OUT_OF_BOUNDS, "offset and size are not within the lease");
	if (lease->flags & SHMB_REGION_HUGETLB && (lease->access & SHMB_COPY || lease->flags & SHMB_REGION_UNSEALED))
		return error_set(SHMB_E_UNSUPPORTED, "hugetlb memory has no guarded copies");
	return 0;
}

/* the fd behind the lease: that of a SHMB_COPY lease, or one that is asked for now */
static int copy_fd(const struct shmb_lease *lease, int *ret) {
	struct shmb_client *client = lease->client;
	uint32_t slot = (uint32_t)lease->internal[LEASE_SLOT], access = lease->access | SHMB_COPY;
	int r;

	*ret = (int)lease->internal[LEASE_FD] - 1;
	if (*ret >= 0)
		return 0;
	r = map_ensure(client, slot, lease->generation, access, 0, 0);
	if (r)
		return r;
	*ret = map_copy_fd(client, slot, lease->generation, access);
	return *ret < 0 ? error_plain(SHMB_E_STALE) : 0;
}

static int truncated(void) {
	return error_set(SHMB_E_TRUNCATED, "the owner has cut the memory");
}

/* never touches a mapping: a page that is gone is a short read, not a signal */
static int copy_by_fd(const struct shmb_lease *lease, uint64_t offset, void *to, const void *from, uint64_t size) {
	uint64_t at = lease->internal[LEASE_OFFSET] + offset, done = 0;
	struct stat st;
	int fd, r;

	r = copy_fd(lease, &fd);
	if (r)
		return r;
	/* pwrite() would let a file that was cut grow again */
	if (fstat(fd, &st) < 0)
		return error_plain(-errno);
	if (!range_within(at, size, (uint64_t)st.st_size))
		return truncated();
	while (done < size) {
		ssize_t n = to ? pread(fd, (uint8_t *)to + done, size - done, (off_t)(at + done))
			       : pwrite(fd, (const uint8_t *)from + done, size - done, (off_t)(at + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return error_plain(-errno);
		if (!n)
			return truncated();
		done += (uint64_t)n;
	}
	return 0;
}

static bool needs_guard(const struct shmb_lease *lease) {
	return !lease->address || lease->flags & SHMB_REGION_UNSEALED;
}

int shmb_lease_copy_in(struct shmb_lease *lease, uint64_t offset, const void *data, uint64_t size) {
	int r = check_copy(lease, offset, size, SHMB_WRITE);

	if (r || !size)
		return r;
	if (needs_guard(lease))
		return copy_by_fd(lease, offset, NULL, data, size);
	memcpy((uint8_t *)lease->address + offset, data, size);
	return 0;
}

int shmb_lease_copy_out(struct shmb_lease *lease, uint64_t offset, void *ret_data, uint64_t size) {
	int r = check_copy(lease, offset, size, SHMB_READ);

	if (r || !size)
		return r;
	if (needs_guard(lease))
		return copy_by_fd(lease, offset, ret_data, NULL, size);
	memcpy(ret_data, (const uint8_t *)lease->address + offset, size);
	return 0;
}

int shmb_client_get_memory_info_many(struct shmb_client *client, const struct shmb_lookup_spec *specs, uint32_t n,
				     struct shmb_lease *ret_leases, int *ret_results) {
	for (uint32_t i = 0; i < n; ++i)
		ret_results[i] = shmb_client_get_memory_info(client, specs[i].name, specs[i].offset, specs[i].size,
							     specs[i].access, &ret_leases[i]);
	return 0;
}
