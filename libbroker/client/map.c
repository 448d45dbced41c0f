/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "lease.h"
#include "map.h"
#include "wire/compat.h"
#include "wire/range.h"

#define ASK_AGAIN_MAX 4

/* an object that has grown since it was mapped does not serve a region beyond: it is mapped once more */
static MappedObject *object_find(struct shmb_client *client, uint64_t id, uint32_t writable, uint64_t size) {
	MappedObject *object = client->objects;

	while (object && (object->id != id || object->writable != writable || (object->base && object->size < size)))
		object = object->next;
	return object;
}

static MappedObject *object_new(struct shmb_client *client, uint64_t id, uint32_t writable) {
	MappedObject *object = calloc(1, sizeof(*object));

	if (!object)
		return NULL;
	object->id = id;
	object->writable = writable;
	object->fd = -EBADF;
	object->next = client->objects;
	client->objects = object;
	return object;
}

/* returns the one behind it */
static MappedObject *object_free(MappedObject *object) {
	MappedObject *next = object->next;

	cuda_mapping_close(object->cuda);
	if (object->pinned_on)
		cuda_unpin(object->base, object->pinned_on - 1);
	if (object->base)
		munmap(object->base, object->size);
	(void)close_fd(object->fd);
	free(object);
	return next;
}

static void object_release(struct shmb_client *client, MappedObject *object) {
	if (!object || --object->n_refs)
		return;
	for (MappedObject **at = &client->objects; *at; at = &(*at)->next) {
		if (*at == object) {
			*at = object->next;
			break;
		}
	}
	/* a driver may take its time, and the lock is held */
	if (object->cuda || object->pinned_on) {
		object->next = client->closing;
		client->closing = object;
		atomic_store_explicit(&client->closing_hint, true, memory_order_relaxed);
		return;
	}
	(void)object_free(object);
}

/* after map_lock was let go */
static void close_what_is_over(struct shmb_client *client) {
	MappedObject *object;

	if (__builtin_expect(!atomic_load_explicit(&client->closing_hint, memory_order_relaxed), 1) || !cuda_may_call())
		return;
	pthread_mutex_lock(&client->map_lock);
	object = client->closing;
	client->closing = NULL;
	atomic_store_explicit(&client->closing_hint, false, memory_order_relaxed);
	pthread_mutex_unlock(&client->map_lock);
	while (object)
		object = object_free(object);
}

static int object_map(MappedObject *object, int fd, uint64_t size) {
	int protection = PROT_READ | (object->writable ? PROT_WRITE : 0);
	void *base;

	if (object->base)
		return 0;
	base = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED)
		return -errno;
	object->base = base;
	object->size = size;
	return 0;
}

/* faults the leased range in at once; pages that a sparse object does not have are left to its owner */
static void populate(const struct shmb_client *client, const MapEntry *entry, uint8_t *window, uint32_t writable,
		     uint64_t offset, uint64_t size) {
	uintptr_t page = (uintptr_t)getpagesize(), begin, end;

	if (client->flags & SHMB_NO_POPULATE ||
	    map_extent_flags(entry->extent) & (WIRE_REGION_SPARSE | WIRE_REGION_UNSEALED) || !size)
		return;
	begin = ((uintptr_t)window + offset) & ~(page - 1);
	end = ((uintptr_t)window + offset + size + page - 1) & ~(page - 1);
	/* Linux 5.14; without it pages come one by one */
	(void)madvise((void *)begin, end - begin, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}

static MapDetail *entry_detail(const struct shmb_client *client, const MapEntry *entry) {
	return &client->map_details[entry - client->maps];
}

static void entry_clear(struct shmb_client *client, MapEntry *entry) {
	MapDetail *detail = entry_detail(client, entry);

	atomic_store(&entry->generation, 0);
	for (int mode = 0; mode < 2; ++mode) {
		atomic_store(&entry->base[mode], NULL);
		object_release(client, detail->object[mode]);
		detail->object[mode] = NULL;
	}
}

static int slots_reserve(struct shmb_client *client) {
	uint32_t room = client->n_mapped_max ? client->n_mapped_max * 2 : 64;
	uint32_t *slots;

	if (client->n_mapped < client->n_mapped_max)
		return 0;
	slots = realloc(client->mapped_slots, room * sizeof(*slots));
	if (!slots)
		return -ENOMEM;
	client->mapped_slots = slots;
	client->n_mapped_max = room;
	return 0;
}

/* what the broker answered to MAP: map_lock is held */
static int entry_fill(struct shmb_client *client, uint32_t slot, const WireMapReply *reply, int *fd, CudaMapping **cuda,
		      uint32_t access, bool had_object) {
	MapEntry *entry = &client->maps[slot];
	MapDetail *detail = entry_detail(client, entry);
	uint32_t mode = map_mode(access);
	MappedObject *object;
	bool is_new = entry->generation != reply->generation;
	int r;

	/* this answer may have been overtaken, and the entry may serve the leases of the slot's next generation */
	if (layout_word_generation(atomic_load(&client->slots[slot].word)) != reply->generation)
		return SHMB_E_STALE;
	if (!range_within(reply->offset, reply->size, reply->object_size))
		return -EPROTO;
	if (reply->size > MAP_SIZE_MAX || reply->flags > UINT8_MAX)
		return -EOVERFLOW;
	object = object_find(client, reply->object, mode, reply->object_size);
	if (!object && *fd < 0 && !*cuda)
		return had_object ? -EAGAIN : -EPROTO;
	r = slots_reserve(client);
	if (!object && !r) {
		object = object_new(client, reply->object, mode);
		r = object ? 0 : -ENOMEM;
	}
	if (r)
		return r;

	object->n_refs++;
	if (reply->kind != WIRE_KIND_MEMORY) {
		if (!object->cuda)
			object->cuda = steal_ptr(*cuda);
		r = object->cuda ? cuda_mapping_check(object->cuda, reply) : -EAGAIN;
	} else if (access & SHMB_COPY) {
		if (object->fd < 0)
			object->fd = steal_fd(fd);
	} else {
		r = *fd < 0 && !object->base ? -EAGAIN : object_map(object, *fd, reply->object_size);
	}
	if (r) {
		object_release(client, object);
		return r;
	}
	if (is_new) {
		if (!entry->generation)
			client->mapped_slots[client->n_mapped++] = slot;
		entry_clear(client, entry);
		entry->extent = map_extent(reply->size, reply->flags);
		detail->offset = reply->offset;
		detail->kind = reply->kind;
	}
	if (detail->object[mode])
		object_release(client, object);
	else
		detail->object[mode] = object;
	if (!(access & SHMB_COPY) && object->base)
		atomic_store_explicit(&entry->base[mode], object->base + reply->offset, memory_order_release);
	atomic_store_explicit(&entry->generation, reply->generation, memory_order_release);
	return 0;
}

static bool entry_serves(const struct shmb_client *client, const MapEntry *entry, uint64_t generation,
			 uint32_t access) {
	uint32_t mode = map_mode(access);
	const MappedObject *object = entry_detail(client, entry)->object[mode];

	if (entry->generation != generation || !object)
		return false;
	return access & SHMB_COPY ? object->fd >= 0 : entry->base[mode] || object->cuda;
}

static int check_unsealed(const struct shmb_client *client, uint32_t flags, uint32_t access) {
	if (!(flags & WIRE_REGION_UNSEALED) || access & SHMB_COPY || client->flags & SHMB_ACCEPT_UNSEALED)
		return 0;
	return error_set(SHMB_E_UNSEALED, "the memory can be truncated by its owner: a pointer needs a client with "
					  "SHMB_ACCEPT_UNSEALED; SHMB_COPY works without");
}

static int ask(struct shmb_client *client, uint32_t slot, uint64_t generation, uint32_t access, uint64_t have_object,
	       WireMapReply *ret, uint8_t *ret_handle, int *ret_fd) {
	WireMapRequest request = {
		.slot = slot,
		.access = WIRE_ACCESS_READ | (access & SHMB_WRITE ? WIRE_ACCESS_WRITE : 0),
		.generation = generation,
		.have_object = have_object,
		.flags = access & SHMB_COPY ? WIRE_MAP_WANT_FD : 0,
	};
	const uint8_t *handle;
	WireReader body;
	Call call;
	int r;

	r = call_fixed(client, WIRE_OP_MAP, &request, sizeof(request), NULL, &call, &body, ret, sizeof(*ret));
	if (!r) {
		handle = wire_read_bytes(&body, ret->handle_length);
		if (!handle || !wire_reader_end(&body) || ret->generation != generation ||
		    ret->handle_length != (ret->kind == WIRE_KIND_CUDA_IPC ? WIRE_HANDLE_SIZE : 0))
			r = error_plain(-EPROTO);
		else
			memcpy(ret_handle, handle, ret->handle_length);
		if (!r && call.n_fds)
			*ret_fd = steal_fd(&call.fds[0]);
	}
	call_end(&call);
	return r;
}

/* @had: this process has the allocation open already */
static int open_cuda(struct shmb_client *client, const WireMapReply *reply, const uint8_t *handle, int fd,
		     uint32_t access, bool had, CudaMapping **ret) {
	if (access & SHMB_COPY)
		return error_set(SHMB_E_UNSUPPORTED,
				 "GPU memory has no guarded copies: copy with the GPU's own functions");
	if (had)
		return 0;
	if (reply->kind == WIRE_KIND_CUDA_VMM && fd < 0)
		return -EAGAIN;
	return cuda_mapping_open(client, reply, handle, fd, access, ret);
}

int map_ensure(struct shmb_client *client, uint32_t slot, uint64_t generation, uint32_t access, uint64_t offset,
	       uint64_t size) {
	MapEntry *entry = &client->maps[slot];
	uint64_t have = client->details[slot].object;
	uint8_t handle[WIRE_HANDLE_SIZE];
	WireMapReply reply;
	bool had, served;
	int r;

	for (int i = 0; i < ASK_AGAIN_MAX; ++i) {
		_cleanup_(closep) int fd = -EBADF;
		CudaMapping *cuda = NULL;

		pthread_mutex_lock(&client->map_lock);
		served = entry_serves(client, entry, generation, access);
		r = served ? check_unsealed(client, map_extent_flags(entry->extent), access) : 0;
		had = object_find(client, have, map_mode(access), 0);
		pthread_mutex_unlock(&client->map_lock);
		if (served || r)
			return r;
		/* whoever else maps the same meanwhile asks for the same: the second answer changes nothing */
		r = ask(client, slot, generation, access, had ? have : 0, &reply, handle, &fd);
		if (!r)
			r = check_unsealed(client, reply.flags, access);
		if (r)
			return r;
		if (reply.kind != WIRE_KIND_MEMORY)
			r = open_cuda(client, &reply, handle, fd, access, had && have == reply.object, &cuda);
		if (r == -EAGAIN) {
			have = 0;
			continue;
		}
		if (r)
			return r;

		pthread_mutex_lock(&client->map_lock);
		r = entry_fill(client, slot, &reply, &fd, &cuda, access, had);
		if (!r && reply.kind == WIRE_KIND_MEMORY && !(access & SHMB_COPY) &&
		    range_within(offset, size, map_extent_size(entry->extent)))
			populate(client, entry, entry->base[map_mode(access)], map_mode(access), offset, size);
		pthread_mutex_unlock(&client->map_lock);
		/* another thread may have been first */
		cuda_mapping_close(cuda);
		close_what_is_over(client);
		/* what is out of bounds has its sentence; what we had is gone meanwhile, or is too small: ask for the fd */
		if (r != -EAGAIN)
			return r && r != SHMB_E_OUT_OF_BOUNDS ? error_plain(r) : r;
		have = 0;
	}
	return error_plain(SHMB_E_AGAIN);
}

int map_copy_fd(struct shmb_client *client, uint32_t slot, uint64_t generation, uint32_t access) {
	MapEntry *entry = &client->maps[slot];
	int fd = -EBADF;

	pthread_mutex_lock(&client->map_lock);
	if (entry_serves(client, entry, generation, access | SHMB_COPY))
		fd = entry_detail(client, entry)->object[map_mode(access)]->fd;
	pthread_mutex_unlock(&client->map_lock);
	return fd;
}

bool map_cuda_place(struct shmb_client *client, uint32_t slot, uint64_t generation, uint32_t access, CudaPlace *ret,
		    uint64_t *ret_offset, uint64_t *ret_extent) {
	const MapEntry *entry = &client->maps[slot];
	const MapDetail *detail = &client->map_details[slot];
	const MappedObject *object;
	bool found;

	pthread_mutex_lock(&client->map_lock);
	object = detail->object[map_mode(access)];
	found = entry->generation == generation && object && object->cuda;
	if (found) {
		cuda_mapping_place(object->cuda, ret);
		*ret_offset = detail->offset;
		*ret_extent = entry->extent;
	}
	pthread_mutex_unlock(&client->map_lock);
	return found;
}

bool maps_have_cuda(struct shmb_client *client, uint64_t pointer) {
	const MappedObject *object;

	pthread_mutex_lock(&client->map_lock);
	object = client->objects;
	while (object && (!object->cuda || !cuda_mapping_has(object->cuda, pointer)))
		object = object->next;
	pthread_mutex_unlock(&client->map_lock);
	return object;
}

MappedObject *map_lease_object(const struct shmb_lease *lease) {
	struct shmb_client *client = lease->client;
	MappedObject *object;

	pthread_mutex_lock(&client->map_lock);
	object = client->map_details[lease->internal[LEASE_SLOT]].object[map_mode(lease->access)];
	pthread_mutex_unlock(&client->map_lock);
	return object;
}

void maps_reap(struct shmb_client *client) {
	uint64_t gone;

	/* a broker that has stopped says nothing about generations any more: what is mapped stays */
	if (!client->registry || atomic_load(&client->registry->state) != LAYOUT_OPEN)
		return;
	gone = atomic_load_explicit(&client->registry->gone_sequence, memory_order_acquire);
	if (gone == atomic_load_explicit(&client->gone_seen, memory_order_relaxed))
		return;
	if (pthread_mutex_trylock(&client->map_lock))
		return;
	atomic_store_explicit(&client->gone_seen, gone, memory_order_relaxed);
	for (uint32_t i = 0; i < client->n_mapped;) {
		uint32_t slot = client->mapped_slots[i];
		MapEntry *entry = &client->maps[slot];
		uint64_t word = atomic_load_explicit(&client->slots[slot].word, memory_order_acquire);

		if (layout_word_generation(word) == entry->generation) {
			i++;
			continue;
		}
		entry_clear(client, entry);
		client->mapped_slots[i] = client->mapped_slots[--client->n_mapped];
	}
	pthread_mutex_unlock(&client->map_lock);
	close_what_is_over(client);
}

void maps_free(struct shmb_client *client) {
	for (uint32_t i = 0; i < client->n_mapped; ++i)
		entry_clear(client, &client->maps[client->mapped_slots[i]]);
	for (MappedObject *object = client->closing; object;)
		object = object_free(object);
	free(client->mapped_slots);
	if (client->maps)
		munmap(client->maps, maps_size(client->capacity));
}
