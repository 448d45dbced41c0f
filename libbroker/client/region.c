/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Regions of an owner: made or adopted, registered in batches, retired. The library always sends a read-only fd
 * along, because a broker of another user often could not open the memory again.
 */

#include "owner.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "wire/compat.h"
#include "wire/name.h"

#define FILES_BACK 64

static const struct shmb_region_options *options_get(const struct shmb_region_options *options,
						     struct shmb_region_options *copy) {
	*copy = (struct shmb_region_options){ .struct_size = sizeof(*copy) };
	if (options) {
		memcpy(copy, options, options->struct_size < sizeof(*copy) ? options->struct_size : sizeof(*copy));
		copy->struct_size = options->struct_size;
	}
	return copy;
}

static const char *options_key(const struct shmb_region_options *options) {
	return options->key ?: "";
}

static int check_options(const struct shmb_region_options *options) {
	const char *why;
	int r;

	if (!options->struct_size)
		return error_set(SHMB_E_INVALID, "struct_size of the options is not set");
	if (options->flags & ~(uint32_t)(SHMB_REGION_OPT_KEEP | SHMB_REGION_OPT_REPLACE | SHMB_REGION_OPT_READ_ONLY |
					 SHMB_REGION_OPT_POPULATE | SHMB_REGION_OPT_UNPUBLISHED))
		return error_set(SHMB_E_INVALID, "unknown option flags");
	if (options->huge_pages != SHMB_HUGE_NONE && options->huge_pages != SHMB_HUGE_2M &&
	    options->huge_pages != SHMB_HUGE_1G)
		return error_set(SHMB_E_INVALID, "huge_pages is SHMB_HUGE_NONE, SHMB_HUGE_2M or SHMB_HUGE_1G");
	if (options->numa_node < 0 || options->numa_node > REGION_NODES_MAX)
		return error_set(SHMB_E_INVALID, "numa_node is a node plus one, or 0");
	if (options->n_allowed_uids > WIRE_ACL_MAX || options->n_allowed_gids > WIRE_ACL_MAX - options->n_allowed_uids)
		return error_set(SHMB_E_INVALID, "an access list has at most 64 entries");
	r = wire_key_check(options_key(options), strlen(options_key(options)), &why);
	return r ? error_set(r, why) : 0;
}

static MemoryFile *file_new(int fd) {
	MemoryFile *file = calloc(1, sizeof(*file));

	if (!file)
		return NULL;
	file->n_refs = 1;
	file->fd = fd;
	return file;
}

static MemoryFile *file_ref(MemoryFile *file) {
	atomic_fetch_add(&file->n_refs, 1);
	return file;
}

static void file_unref(MemoryFile *file) {
	if (!file || atomic_fetch_sub(&file->n_refs, 1) > 1)
		return;
	(void)close_fd(file->fd);
	free(file);
}

/* takes the reference to @file over, also when it fails */
static struct shmb_region *region_new(struct shmb_client *client, const char *name, MemoryFile *file, uint64_t offset,
				      uint64_t size) {
	struct shmb_region *region = file ? calloc(1, sizeof(*region)) : NULL;

	if (!region) {
		file_unref(file);
		return NULL;
	}
	region->client = client;
	region->name = strdup(name);
	region->file = file;
	region->offset = offset;
	region->size = size;
	region->retired = true;
	if (!region->name) {
		file_unref(file);
		free(region);
		return NULL;
	}
	return region;
}

static void region_drop(struct shmb_region *region) {
	if (region->mapped)
		munmap(region->mapped, region->mapped_size);
	file_unref(region->file);
	cuda_owned_free(region->cuda);
	free(region->unpublished);
	free(region->name);
	free(region);
}

/* ---- registration ---- */

/* one message of REGISTER as it is put together */
typedef struct Batch {
	WireWriter writer;
	uint8_t *buffer;
	WireCountHead *head;
	int fds[WIRE_FDS_MAX]; /* borrowed, except the read-only ones */
	int owned[WIRE_FDS_MAX];
	uint16_t read_only_of[WIRE_FDS_MAX]; /* where the read-only companion of an fd is */
	uint32_t n_fds;
	uint32_t n_owned;
	struct shmb_region *regions[WIRE_BATCH_MAX];
	uint32_t positions[WIRE_BATCH_MAX]; /* in the caller's arrays */
} Batch;

static int batch_begin(Batch *batch) {
	static const WireCountHead empty;

	batch->n_fds = batch->n_owned = 0;
	batch->buffer = client_request_begin(&batch->writer, WIRE_OP_REGISTER);
	if (!batch->buffer)
		return -ENOMEM;
	batch->head = wire_write(&batch->writer, &empty, sizeof(empty));
	return 0;
}

static void batch_end(Batch *batch) {
	for (uint32_t i = 0; i < batch->n_owned; ++i)
		(void)close_fd(batch->owned[i]);
	free(batch->buffer);
	batch->buffer = NULL;
}

/* windows of one message share an fd, if they name the same one */
static void batch_add_fds(Batch *batch, int fd, WireRegisterEntry *entry) {
	int read_only;
	uint16_t i;

	for (i = 0; i < batch->n_fds && batch->fds[i] != fd; ++i)
		;
	entry->fd_index = i;
	if (i < batch->n_fds) {
		entry->read_only_fd_index = batch->read_only_of[i];
		return;
	}
	batch->fds[batch->n_fds++] = fd;
	batch->read_only_of[i] = entry->read_only_fd_index = WIRE_NO_FD;
	/* whatever is no memory is not opened either: that may wait, or have effects; the broker says what it is */
	if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR || fd_seals(fd) < 0)
		return;
	read_only = fd_reopen(fd, O_RDONLY);
	if (read_only < 0)
		return;
	batch->owned[batch->n_owned++] = read_only;
	batch->read_only_of[i] = entry->read_only_fd_index = (uint16_t)batch->n_fds;
	batch->read_only_of[batch->n_fds] = WIRE_NO_FD;
	batch->fds[batch->n_fds++] = read_only;
}

static bool batch_has_room(const Batch *batch, const char *name, const struct shmb_region_options *options) {
	size_t size = sizeof(WireRegisterEntry) + wire_padded(strlen(name)) +
		      (options->n_allowed_uids + options->n_allowed_gids) * sizeof(WireAclEntry) +
		      wire_padded(strlen(options_key(options)));

	return batch->head->count < WIRE_BATCH_MAX && batch->n_fds + 2 <= WIRE_FDS_MAX &&
	       wire_writer_room(&batch->writer) >= size;
}

static void batch_add_cuda(Batch *batch, const struct shmb_region *region, int fd, CudaOffer *ret,
			   WireRegisterEntry *entry) {
	cuda_owned_offer(region->cuda, ret);
	entry->kind = ret->kind;
	entry->object_size = ret->object_size;
	entry->handle_length = ret->kind == WIRE_KIND_CUDA_IPC ? WIRE_HANDLE_SIZE : 0;
	entry->fd_index = entry->read_only_fd_index = WIRE_NO_FD;
	entry->owner_pid = ret->owner_pid;
	entry->owner_pid_namespace = ret->owner_pid_namespace;
	memcpy(entry->device.bytes, ret->device, sizeof(entry->device.bytes));
	if (fd < 0)
		return;
	entry->fd_index = (uint16_t)batch->n_fds;
	batch->read_only_of[batch->n_fds] = WIRE_NO_FD;
	batch->fds[batch->n_fds++] = fd;
}

static void batch_add(Batch *batch, struct shmb_region *region, int fd, const struct shmb_region_options *options,
		      uint32_t position) {
	WireRegisterEntry entry = {
		.kind = WIRE_KIND_MEMORY,
		.access = WIRE_ACCESS_READ,
		.offset = region->offset,
		.size = region->size,
		.name_length = (uint16_t)strlen(region->name),
		.acl_count = (uint16_t)(options->n_allowed_uids + options->n_allowed_gids),
		.key_length = (uint16_t)strlen(options_key(options)),
		.principal = options->principal ? options->principal - 1 : WIRE_ANY_UID,
		.flags = (uint16_t)((options->flags & SHMB_REGION_OPT_KEEP ? WIRE_REGISTER_KEEP : 0) |
				    (options->flags & SHMB_REGION_OPT_REPLACE ? WIRE_REGISTER_REPLACE : 0)),
	};
	CudaOffer offer;

	if (region->cuda)
		batch_add_cuda(batch, region, fd, &offer, &entry);
	else
		batch_add_fds(batch, fd, &entry);
	if (!(options->flags & SHMB_REGION_OPT_READ_ONLY) &&
	    (region->cuda || (fcntl(region->file->fd, F_GETFL) & O_ACCMODE) == O_RDWR))
		entry.access |= WIRE_ACCESS_WRITE;
	wire_write(&batch->writer, &entry, sizeof(entry));
	wire_write(&batch->writer, region->name, entry.name_length);
	for (uint32_t i = 0; i < options->n_allowed_uids; ++i)
		wire_write(&batch->writer, &(WireAclEntry){ WIRE_ACL_UID, options->allowed_uids[i] },
			   sizeof(WireAclEntry));
	for (uint32_t i = 0; i < options->n_allowed_gids; ++i)
		wire_write(&batch->writer, &(WireAclEntry){ WIRE_ACL_GID, options->allowed_gids[i] },
			   sizeof(WireAclEntry));
	if (entry.handle_length)
		wire_write(&batch->writer, offer.handle, entry.handle_length);
	wire_write(&batch->writer, options_key(options), entry.key_length);
	region->kept = options->flags & SHMB_REGION_OPT_KEEP;
	batch->regions[batch->head->count] = region;
	batch->positions[batch->head->count++] = position;
}

static int batch_read(const Batch *batch, const Call *call, int *ret_results) {
	WireReader body = call_body(call);
	WireRegisterResult result;
	WireCountHead head;
	const char *text;

	wire_read(&body, &head, sizeof(head));
	if (head.count != batch->head->count)
		return error_plain(-EPROTO);
	for (uint32_t i = 0; i < head.count; ++i) {
		struct shmb_region *region = batch->regions[i];

		wire_read(&body, &result, sizeof(result));
		text = wire_read_bytes(&body, result.text_length);
		if (!text)
			return error_plain(-EPROTO);
		ret_results[batch->positions[i]] =
			result.code ? error_setn((int)result.code, text, result.text_length) : 0;
		if (result.code)
			continue;
		region->slot = result.slot;
		region->generation = result.generation;
		region->flags = result.flags;
		region->retired = false;
	}
	return wire_reader_end(&body) ? 0 : error_plain(-EPROTO);
}

/* sends what was collected; a failure of the message is the result of each of its entries */
static void batch_send(Batch *batch, struct shmb_client *client, int *ret_results) {
	Call call = {};
	int r = 0;

	if (batch->head->count) {
		r = call_run(client, &batch->writer, batch->fds, batch->n_fds, &call);
		if (!r)
			r = batch_read(batch, &call, ret_results);
		for (uint32_t i = 0; r && i < batch->head->count; ++i)
			ret_results[batch->positions[i]] = r;
		call_end(&call);
	}
	batch_end(batch);
}

static int region_register(struct shmb_region *region, const struct shmb_region_options *options) {
	Batch batch;
	int r;

	r = batch_begin(&batch);
	if (r)
		return error_plain(r);
	batch_add(&batch, region, region->file->fd, options, 0);
	batch_send(&batch, region->client, &r);
	return r;
}

/* ---- GPU memory ---- */

/* what it points to is the caller's only as long as its call */
static struct shmb_region_options *options_copy(const struct shmb_region_options *options) {
	size_t n_uids = options->n_allowed_uids, n_gids = options->n_allowed_gids;
	size_t key_size = strlen(options_key(options)) + 1;
	struct shmb_region_options *copy = malloc(sizeof(*copy) + (n_uids + n_gids) * sizeof(uint32_t) + key_size);
	uint32_t *ids;

	if (!copy)
		return NULL;
	*copy = *options;
	ids = (uint32_t *)(copy + 1);
	if (n_uids)
		memcpy(ids, options->allowed_uids, n_uids * sizeof(*ids));
	if (n_gids)
		memcpy(ids + n_uids, options->allowed_gids, n_gids * sizeof(*ids));
	copy->allowed_uids = ids;
	copy->allowed_gids = ids + n_uids;
	copy->key = memcpy(ids + n_uids + n_gids, options_key(options), key_size);
	return copy;
}

static int check_cuda(const struct shmb_region_options *options, uint64_t size) {
	if (options->flags & SHMB_REGION_OPT_POPULATE || options->huge_pages || options->numa_node)
		return error_set(SHMB_E_INVALID, "GPU memory has neither populate, huge_pages nor numa_node");
	return size ? 0 : error_set(SHMB_E_OUT_OF_BOUNDS, "the size is 0");
}

int region_adopt_cuda(struct shmb_client *client, const char *name, uint64_t offset, uint64_t size,
		      const struct shmb_region_options *asked, CudaOwned *owned, int passed_fd,
		      struct shmb_region **ret) {
	_cleanup_(closep) int fd = passed_fd;
	struct shmb_region_options copy;
	const struct shmb_region_options *options = options_get(asked, &copy);
	struct shmb_region *region = NULL;
	MemoryFile *file;
	int r;

	r = check_options(options) ?: error_of_name(name, strlen(name)) ?: check_cuda(options, size);
	if (!r) {
		/* one without an fd has a file all the same */
		file = file_new(fd);
		if (file)
			(void)steal_fd(&fd);
		region = region_new(client, name, file, offset, size);
		r = region ? 0 : error_plain(-ENOMEM);
	}
	if (r) {
		cuda_owned_free(owned);
		return r;
	}
	region->cuda = owned;
	if (options->flags & SHMB_REGION_OPT_UNPUBLISHED) {
		region->unpublished = options_copy(options);
		r = region->unpublished ? 0 : error_plain(-ENOMEM);
	} else {
		r = region_register(region, options);
	}
	if (r) {
		region_drop(region);
		return r;
	}
	*ret = region;
	return 0;
}

int region_publish(struct shmb_region *region) {
	int r;

	if (!region->unpublished)
		return 0;
	r = region_register(region, region->unpublished);
	if (!r) {
		free(region->unpublished);
		region->unpublished = NULL;
	}
	return r;
}

const CudaOwned *region_get_owned(const struct shmb_region *region) {
	return region->cuda;
}

struct shmb_client *region_get_client(const struct shmb_region *region) {
	return region->client;
}

int region_create(struct shmb_client *client, const char *name, uint64_t size, const struct shmb_region_options *asked,
		  void (*fill)(void *memory, const void *userdata), const void *userdata, struct shmb_region **ret) {
	struct shmb_region_options copy;
	const struct shmb_region_options *options = options_get(asked, &copy);
	struct shmb_region *region;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	r = check_options(options) ?: error_of_name(name, strlen(name));
	if (r)
		return r;
	if (options->flags & SHMB_REGION_OPT_UNPUBLISHED)
		return error_set(SHMB_E_INVALID, "only GPU memory can be published later");
	if (fill && (options->flags & SHMB_REGION_OPT_READ_ONLY || options->huge_pages))
		return error_set(SHMB_E_UNSUPPORTED,
				 "nobody else could write to it: neither SHMB_REGION_OPT_READ_ONLY nor "
				 "huge pages");
	if (!size)
		return error_set(SHMB_E_OUT_OF_BOUNDS, "the size is 0");
	region = region_new(client, name, file_new(-EBADF), 0, size);
	if (!region)
		return error_plain(-ENOMEM);
	r = error_plain(region_make_memory(region, options));
	if (!r && fill)
		fill(region->mapped, userdata);
	if (!r)
		r = region_register(region, options);
	if (r) {
		region_drop(region);
		return r;
	}
	*ret = region;
	return 0;
}

int shmb_region_create(struct shmb_client *client, const char *name, uint64_t size,
		       const struct shmb_region_options *options, struct shmb_region **ret) {
	return region_create(client, name, size, options, NULL, NULL, ret);
}

/* of the regions that this call has made before, one over the same fd */
static MemoryFile *file_of(const struct shmb_region_spec *specs, uint32_t i) {
	MemoryFile *file;
	int fd;

	for (uint32_t back = 1; back <= i && back <= FILES_BACK; ++back)
		if (specs[i - back].fd == specs[i].fd && specs[i - back].region)
			return file_ref(specs[i - back].region->file);
	fd = fcntl(specs[i].fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return NULL;
	file = file_new(fd);
	if (!file)
		(void)close_fd(fd);
	return file;
}

static int adopt_one(struct shmb_client *client, struct shmb_region_spec *specs, uint32_t i,
		     struct shmb_region_options *options) {
	struct shmb_region_spec *spec = &specs[i];
	MemoryFile *file;
	int r;

	options_get(spec->options, options);
	r = check_options(options) ?: error_of_name(spec->name, strlen(spec->name));
	if (r)
		return r;
	if (options->flags & SHMB_REGION_OPT_UNPUBLISHED)
		return error_set(SHMB_E_INVALID, "only GPU memory can be published later");
	if (!spec->size)
		return error_set(SHMB_E_OUT_OF_BOUNDS, "the size is 0");
	file = file_of(specs, i);
	if (!file)
		return error_plain(-errno);
	spec->region = region_new(client, spec->name, file, spec->offset, spec->size);
	return spec->region ? 0 : error_plain(-ENOMEM);
}

int shmb_region_adopt_many(struct shmb_client *client, struct shmb_region_spec *specs, uint32_t n, int *ret_results) {
	struct shmb_region_options options;
	Batch batch = {};
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	for (uint32_t i = 0; i < n; ++i) {
		specs[i].region = NULL;
		ret_results[i] = adopt_one(client, specs, i, &options);
		if (ret_results[i])
			continue;
		if (batch.buffer && !batch_has_room(&batch, specs[i].name, &options))
			batch_send(&batch, client, ret_results);
		if (!batch.buffer) {
			r = batch_begin(&batch);
			if (r) {
				ret_results[i] = error_plain(r);
				continue;
			}
		}
		batch_add(&batch, specs[i].region, specs[i].fd, &options, i);
	}
	if (batch.buffer)
		batch_send(&batch, client, ret_results);
	for (uint32_t i = 0; i < n; ++i) {
		if (ret_results[i] && specs[i].region) {
			region_drop(specs[i].region);
			specs[i].region = NULL;
		}
	}
	return 0;
}

int shmb_region_adopt(struct shmb_client *client, const char *name, int fd, uint64_t offset, uint64_t size,
		      const struct shmb_region_options *options, struct shmb_region **ret) {
	struct shmb_region_spec spec = {
		.struct_size = sizeof(spec),
		.name = name,
		.fd = fd,
		.offset = offset,
		.size = size,
		.options = options,
	};
	int result = 0, r;

	r = shmb_region_adopt_many(client, &spec, 1, &result);
	if (r || result)
		return r ?: result;
	*ret = spec.region;
	return 0;
}

/* ---- what the owner has ---- */

void *shmb_region_get_data(struct shmb_region *region) {
	uint64_t page = (uint64_t)getpagesize(), begin = region->offset / page * page;
	uint64_t size = region->offset - begin + region->size;
	uint8_t *mapped = atomic_load(&region->mapped), *found = NULL;

	if (region->cuda)
		return cuda_owned_pointer(region->cuda);
	if (mapped)
		return mapped + (region->offset - begin);
	mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, region->file->fd, (off_t)begin);
	if (mapped == MAP_FAILED)
		mapped = mmap(NULL, size, PROT_READ, MAP_SHARED, region->file->fd, (off_t)begin);
	if (mapped == MAP_FAILED) {
		(void)error_plain(-errno);
		return NULL;
	}
	/* another thread may have been first */
	if (atomic_compare_exchange_strong(&region->mapped, &found, mapped)) {
		region->mapped_size = size;
	} else {
		munmap(mapped, size);
		mapped = found;
	}
	return mapped + (region->offset - begin);
}

uint64_t shmb_region_get_size(struct shmb_region *region) {
	return region->size;
}

uint64_t shmb_region_get_generation(struct shmb_region *region) {
	return region->generation;
}

uint32_t shmb_region_get_flags(struct shmb_region *region) {
	return region->flags;
}

uint32_t region_get_slot(const struct shmb_region *region) {
	return region->slot;
}

const char *shmb_region_get_name(struct shmb_region *region) {
	return region->name;
}

int shmb_region_get_fd(struct shmb_region *region) {
	return region->file->fd < 0 ? -1 : region->file->fd;
}

/* ---- the end ---- */

int shmb_region_retire(struct shmb_region *region, uint32_t mode, int timeout) {
	const char *name = region->name;
	int result = 0, r;

	if (region->retired)
		return error_set(SHMB_E_STALE, "the region was retired before");
	r = unregister_named(region->client, 0, &name, &region->generation, 1, mode, timeout, &result);
	if (r)
		return r;
	/* with LAZY it can still be retired in another way */
	if (result == SHMB_E_NOT_FOUND || result == SHMB_E_STALE ||
	    ((mode & 3) != SHMB_RETIRE_LAZY && (!result || result == SHMB_E_TIMED_OUT)))
		region->retired = true;
	return result;
}

struct shmb_region *shmb_region_free(struct shmb_region *region) {
	if (!region)
		return NULL;
	if (!region->retired && !region->kept && !client_is_foreign(region->client))
		(void)shmb_region_retire(region, SHMB_RETIRE_STRICT, 0);
	region_drop(region);
	return NULL;
}
