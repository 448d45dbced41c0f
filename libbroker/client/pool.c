/* SPDX-License-Identifier: Apache-2.0 */

/* Pools as they are made, opened and closed; block.c has what is done in them. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#include "wire/range.h"

static int check_client(const struct shmb_client *client) {
	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (!client->page)
		return error_set(SHMB_E_NOT_ATTACHED,
				 "a pool needs a client with a lease page, and so the role consumer: "
				 "nobody else sees which sessions live");
	return 0;
}

/* ---- the shape ---- */

static bool round_up(uint64_t value, uint64_t to, uint64_t *ret) {
	return !__builtin_add_overflow(value, to - 1, ret) && (*ret = *ret / to * to, true);
}

static int shape(PoolHeader *ret, const struct shmb_client *client, uint32_t n_blocks, uint64_t block_size,
		 uint64_t alignment) {
	uint64_t line = alignment > POOL_ALIGNMENT ? alignment : POOL_ALIGNMENT;

	if (!n_blocks || n_blocks > SHMB_POOL_BLOCKS_MAX)
		return error_set(SHMB_E_INVALID, "a pool has 1 to 1,048,576 blocks");
	if (alignment & (alignment - 1) || alignment > POOL_ALIGNMENT_MAX)
		return error_set(SHMB_E_INVALID, "an alignment is a power of two, at most 4,096");
	*ret = (PoolHeader){
		.magic = POOL_MAGIC,
		.version = POOL_VERSION,
		.header_size = sizeof(*ret),
		.epoch = (uint32_t)(client->session >> LAYOUT_COUNTER_BITS),
		.n_blocks = n_blocks,
		.block_size = block_size,
		.words_offset = sizeof(*ret),
	};
	if (!block_size)
		return error_set(SHMB_E_OUT_OF_BOUNDS, "the size of a block is 0");
	if (!round_up(sizeof(*ret) + n_blocks * sizeof(uint64_t), line, &ret->blocks_offset) ||
	    !round_up(block_size, alignment, &ret->stride) ||
	    __builtin_mul_overflow(ret->stride, n_blocks, &ret->total_size) ||
	    __builtin_add_overflow(ret->total_size, ret->blocks_offset, &ret->total_size))
		return error_set(SHMB_E_OUT_OF_BOUNDS, "that many blocks of that size are more than a region can have");
	return 0;
}

/* before anybody else can see the memory; all words are 0, which is free */
static void fill(void *memory, const void *userdata) {
	memcpy(memory, userdata, sizeof(PoolHeader));
}

/* @header is a copy: what is checked cannot be changed by another member any more */
static int check_shape(const PoolHeader *header, const struct shmb_client *client, uint64_t size) {
	uint64_t end;

	if (header->magic != POOL_MAGIC)
		return error_set(SHMB_E_INVALID, "the region is no pool");
	if (header->version != POOL_VERSION)
		return error_set(SHMB_E_VERSION, "the pool was made by a library of another version");
	if (header->epoch != client->session >> LAYOUT_COUNTER_BITS)
		return error_set(SHMB_E_STALE,
				 "the pool was made under another broker, whose sessions nobody knows any more");
	if (header->header_size != sizeof(*header) || header->words_offset != sizeof(*header) || !header->n_blocks ||
	    header->n_blocks > SHMB_POOL_BLOCKS_MAX || !header->block_size || header->stride < header->block_size ||
	    header->blocks_offset < header->words_offset + header->n_blocks * sizeof(uint64_t) ||
	    __builtin_mul_overflow(header->stride, header->n_blocks, &end) ||
	    !range_within(header->blocks_offset, end, header->total_size) || header->total_size > size)
		return error_set(SHMB_E_INVALID, "the pool is damaged");
	return 0;
}

/* ---- the object ---- */

static struct shmb_pool *pool_drop(struct shmb_pool *pool) {
	(void)shmb_region_free(pool->region);
	if (pool->lease.client)
		(void)shmb_lease_release(&pool->lease);
	free(pool->name);
	free(pool);
	return NULL;
}

static struct shmb_pool *pool_new(struct shmb_client *client, const char *name) {
	struct shmb_pool *pool = calloc(1, sizeof(*pool));

	if (!pool)
		return NULL;
	pool->client = client;
	pool->n_refs = 1;
	pool->sessions = layout_sessions(client->registry);
	pool->session_capacity = client->registry->session_capacity;
	pool->holder = pool_holder(client->session, client->resume.session_index);
	pool->name = strdup(name);
	return pool->name ? pool : pool_drop(pool);
}

static void pool_set(struct shmb_pool *pool, uint8_t *base, const PoolHeader *header) {
	pool->base = base;
	pool->sequence = &((PoolHeader *)base)->sequence;
	pool->words = (_Atomic uint64_t *)(base + header->words_offset);
	pool->n_blocks = header->n_blocks;
	pool->block_size = header->block_size;
	pool->stride = header->stride;
	pool->blocks_offset = header->blocks_offset;
}

/* a reference to the pool on this generation that the client has open; map_lock is held */
static struct shmb_pool *pool_find(const struct shmb_client *client, uint32_t slot, uint64_t generation) {
	struct shmb_pool *pool = client->pools;

	while (pool && (pool->slot != slot || pool->generation != generation))
		pool = pool->next;
	if (pool)
		pool->n_refs++;
	return pool;
}

/* The client's, which another thread may have opened meanwhile: then @pool is dropped, and its region goes over. */
static struct shmb_pool *pool_add(struct shmb_pool *pool) {
	struct shmb_client *client = pool->client;
	struct shmb_pool *found;

	pthread_mutex_lock(&client->map_lock);
	found = pool_find(client, pool->slot, pool->generation);
	if (!found) {
		pool->next = client->pools;
		client->pools = pool;
	} else if (pool->region) {
		found->region = pool->region;
		pool->region = NULL;
	}
	pthread_mutex_unlock(&client->map_lock);
	if (!found)
		return pool;
	pool_drop(pool);
	return found;
}

int shmb_pool_create(struct shmb_client *client, const char *name, uint32_t n_blocks, uint64_t block_size,
		     const struct shmb_pool_options *asked, struct shmb_pool **ret) {
	struct shmb_pool_options options = { .struct_size = sizeof(options) };
	struct shmb_pool *pool;
	PoolHeader header;
	uint8_t *base;
	int r;

	r = check_client(client);
	if (r)
		return r;
	if (asked) {
		if (!asked->struct_size)
			return error_set(SHMB_E_INVALID, "struct_size of the options is not set");
		memcpy(&options, asked, asked->struct_size < sizeof(options) ? asked->struct_size : sizeof(options));
	}
	r = shape(&header, client, n_blocks, block_size, options.alignment ?: POOL_ALIGNMENT);
	if (r)
		return r;
	pool = pool_new(client, name);
	if (!pool)
		return error_plain(-ENOMEM);
	r = region_create(client, name, header.total_size, options.region, fill, &header, &pool->region);
	if (r) {
		pool_drop(pool);
		return r;
	}
	pool->slot = region_get_slot(pool->region);
	pool->generation = shmb_region_get_generation(pool->region);
	base = shmb_region_get_data(pool->region);
	if (pool->slot >= client->capacity || !base) {
		pool_drop(pool);
		return error_plain(base ? -EPROTO : -ENOMEM);
	}
	pool_set(pool, base, &header);
	*ret = pool_add(pool);
	return 0;
}

static int pool_map(struct shmb_pool *pool, const struct shmb_handle *handle) {
	PoolHeader header;
	int r;

	r = shmb_handle_get_memory_info(pool->client, handle, 0, SHMB_REST, SHMB_READ | SHMB_WRITE, &pool->lease);
	if (r) {
		pool->lease.client = NULL;
		return r;
	}
	if (pool->lease.memory_type != SHMB_MEMORY_CPU)
		return error_set(SHMB_E_INVALID, "the region is of GPU memory, in which there are no pools");
	pool->slot = handle->slot;
	pool->generation = handle->generation;
	if (pool->lease.size < sizeof(header) || (uintptr_t)pool->lease.address % _Alignof(uint64_t))
		return error_set(SHMB_E_INVALID, "the region is no pool");
	memcpy(&header, pool->lease.address, sizeof(header));
	r = check_shape(&header, pool->client, pool->lease.size);
	if (!r)
		pool_set(pool, pool->lease.address, &header);
	return r;
}

int shmb_pool_open(struct shmb_client *client, const char *name, struct shmb_pool **ret) {
	struct shmb_handle handle;
	struct shmb_pool *pool;
	int r;

	r = check_client(client);
	for (int i = 0; !r && i < CLIENT_TRIES; ++i) {
		r = shmb_handle_open(client, name, &handle);
		if (r)
			return r;
		pthread_mutex_lock(&client->map_lock);
		pool = pool_find(client, handle.slot, handle.generation);
		pthread_mutex_unlock(&client->map_lock);
		if (!pool) {
			pool = pool_new(client, name);
			if (!pool)
				return error_plain(-ENOMEM);
			r = pool_map(pool, &handle);
			/* the name may go on to another generation between the two; what is old itself stays so */
			if (r == SHMB_E_STALE && !pool->lease.client && i < CLIENT_TRIES - 1) {
				pool_drop(pool);
				r = 0;
				continue;
			}
			if (r) {
				pool_drop(pool);
				return r;
			}
			pool = pool_add(pool);
		}
		*ret = pool;
		return 0;
	}
	return r;
}

struct shmb_pool *shmb_pool_free(struct shmb_pool *pool) {
	struct shmb_client *client;
	bool is_last;

	if (!pool)
		return NULL;
	client = pool->client;
	/* a child has a copy of the object, and no block; another thread of the parent may have had the lock */
	if (client_is_foreign(client))
		return __atomic_sub_fetch(&pool->n_refs, 1, __ATOMIC_ACQ_REL) ? NULL : pool_drop(pool);
	pthread_mutex_lock(&client->map_lock);
	is_last = !--pool->n_refs;
	if (is_last) {
		/* under the lock: whoever opens it anew acquires afterwards */
		pool_release_all(pool);
		for (struct shmb_pool **at = &client->pools; *at; at = &(*at)->next) {
			if (*at == pool) {
				*at = pool->next;
				break;
			}
		}
	}
	pthread_mutex_unlock(&client->map_lock);
	return is_last ? pool_drop(pool) : NULL;
}

/* ---- what it is ---- */

const char *shmb_pool_get_name(struct shmb_pool *pool) {
	return pool->name;
}

uint32_t shmb_pool_get_n_blocks(struct shmb_pool *pool) {
	return pool->n_blocks;
}

uint64_t shmb_pool_get_block_size(struct shmb_pool *pool) {
	return pool->block_size;
}

uint64_t shmb_pool_get_generation(struct shmb_pool *pool) {
	return pool->generation;
}

struct shmb_region *shmb_pool_get_region(struct shmb_pool *pool) {
	struct shmb_region *region;

	/* as in shmb_pool_free() */
	if (client_is_foreign(pool->client))
		return pool->region;
	pthread_mutex_lock(&pool->client->map_lock);
	region = pool->region;
	pthread_mutex_unlock(&pool->client->map_lock);
	return region;
}
