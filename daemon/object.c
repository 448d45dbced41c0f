/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "log.h"
#include "object.h"
#include "region.h"
#include "wire/compat.h"
#include "wire/fd.h"
#include "wire/range.h"

#define WHY(_why, ...) ((void)snprintf((_why), WIRE_TEXT_MAX, __VA_ARGS__))

static bool seals_are_enough(int seals, bool hugetlb) {
	int needed = F_SEAL_SHRINK | F_SEAL_SEAL;

	if ((seals & needed) != needed)
		return false;
	/* punching holes and draining the pool kills a reader of hugetlbfs otherwise */
	return !hugetlb || seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE);
}

static const char *seals_missing(int seals, bool hugetlb) {
	if (!(seals & F_SEAL_SHRINK))
		return seals & F_SEAL_SEAL ? "it has no F_SEAL_SHRINK and cannot get one" : "it has no F_SEAL_SHRINK";
	if (!(seals & F_SEAL_SEAL))
		return "it has no F_SEAL_SEAL";
	return hugetlb ? "hugetlb memory needs F_SEAL_WRITE or F_SEAL_FUTURE_WRITE" : "";
}

/* its block size is that of its pages, which no other memory has unless its pages may be huge */
static int fd_is_hugetlb(int fd, const struct stat *st, bool *ret) {
	struct statfs sfs;

	*ret = false;
	if (st->st_blksize == getpagesize())
		return 0;
	if (fstatfs(fd, &sfs) < 0)
		return -errno;
	*ret = (uint32_t)sfs.f_type == (uint32_t)HUGETLBFS_MAGIC;
	return 0;
}

static int read_only_fd_check(int fd, const struct stat *memory, char *why) {
	struct stat st;
	int mode;

	if (fd_seals(fd) < 0) {
		WHY(why, "the read-only fd is not a memfd, tmpfs or hugetlbfs file");
		return SHMB_E_BAD_FD;
	}
	mode = fcntl(fd, F_GETFL);
	if (mode < 0 || mode & O_PATH || (mode & O_ACCMODE) != O_RDONLY) {
		WHY(why, "the read-only fd is not opened read-only");
		return SHMB_E_BAD_FD;
	}
	if (fstat(fd, &st) < 0 || st.st_dev != memory->st_dev || st.st_ino != memory->st_ino) {
		WHY(why, "the read-only fd is not the same memory");
		return SHMB_E_BAD_FD;
	}
	return 0;
}

int object_fds_check(int fd, int read_only_fd, bool accept_unsealed, bool require_allocated, ObjectFds *ret,
		     char *why) {
	struct stat st;
	bool hugetlb, sealed;
	int seals, mode, r;

	/* only shmem and hugetlbfs answer this, and they never ask a file system's server */
	seals = fd_seals(fd);
	if (seals < 0) {
		WHY(why, "not a memfd, tmpfs (POSIX shm) or hugetlbfs file");
		return SHMB_E_BAD_FD;
	}
	mode = fcntl(fd, F_GETFL);
	if (mode < 0 || mode & O_PATH || (mode & O_ACCMODE) == O_WRONLY) {
		WHY(why, "the fd is write-only: consumers could not map it");
		return SHMB_E_BAD_FD;
	}
	if (fstat(fd, &st) < 0 || fd_is_hugetlb(fd, &st, &hugetlb)) {
		WHY(why, "fstat: %s", strerror(errno));
		return SHMB_E_BAD_FD;
	}
	if (!S_ISREG(st.st_mode)) {
		WHY(why, "not a regular file");
		return SHMB_E_BAD_FD;
	}
	sealed = seals_are_enough(seals, hugetlb);
	if (!sealed && !accept_unsealed) {
		WHY(why, "the memory can be truncated by others: %s (policy: unsealed = refuse)",
		    seals_missing(seals, hugetlb));
		return SHMB_E_UNSEALED;
	}
	if (require_allocated && (uint64_t)st.st_blocks * 512 < (uint64_t)st.st_size) {
		WHY(why, "%llu of %llu bytes are allocated (policy: require_allocated = yes)",
		    (unsigned long long)st.st_blocks * 512, (unsigned long long)st.st_size);
		return SHMB_E_SPARSE;
	}
	if (read_only_fd >= 0) {
		r = read_only_fd_check(read_only_fd, &st, why);
		if (r)
			return r;
	}

	*ret = (ObjectFds){
		.fd = fd,
		.read_only_fd = read_only_fd,
		.device = st.st_dev,
		.inode = st.st_ino,
		.size = (uint64_t)st.st_size,
		.mode = (uint32_t)(mode & O_ACCMODE),
		.flags = (sealed ? 0 : WIRE_REGION_UNSEALED) | (hugetlb ? WIRE_REGION_HUGETLB : 0) |
			 ((uint64_t)st.st_blocks * 512 < (uint64_t)st.st_size ? WIRE_REGION_SPARSE : 0),
		.read_only_enforced = seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE) || !(st.st_mode & 0222),
	};
	return 0;
}

static uint64_t key_hash(const ObjectKey *key) {
	/* inode numbers are the kernel's, but an owner can collect memory with numbers of its liking: chains
	 * that it makes long are those of its own session */
	return table_hash(table_hash(key->inode ^ (uint64_t)key->device << 40) ^ key->session ^
			  (uint64_t)key->uid << 32 ^ key->mode);
}

/* GPU memory has none of the numbers of files */
#define CUDA_DEVICE ((dev_t)-1)

static uint64_t handle_hash(const CudaCheck *check) {
	uint64_t words[(WIRE_HANDLE_SIZE + sizeof(check->device)) / sizeof(uint64_t)], hash = 0;

	memcpy(words, check->handle, sizeof(check->handle));
	memcpy(words + WIRE_HANDLE_SIZE / sizeof(uint64_t), check->device, sizeof(check->device));
	for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); ++i)
		hash = table_hash(hash ^ words[i]);
	return hash;
}

static bool acl_equal(const Object *object, const WireAclEntry *acl, uint32_t n_acl) {
	return object->n_acl == n_acl && (!n_acl || !memcmp(object->acl, acl, n_acl * sizeof(*acl)));
}

static Object *objects_find(Objects *objects, const ObjectKey *key) {
	table_for_each(link, &objects->table, key_hash(key)) {
		Object *object = container_of(link, Object, link);

		if (object->key.session == key->session && object->key.uid == key->uid &&
		    object->key.mode == key->mode && object->key.device == key->device &&
		    object->key.inode == key->inode)
			return object;
	}
	return NULL;
}

/* takes a received fd over, or duplicates one that another object has taken; -EBADF on failure */
static int take_fd(int fd, bool *taken) {
	int duplicate;

	if (!*taken) {
		*taken = true;
		return fd;
	}
	duplicate = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	return duplicate < 0 ? -EBADF : duplicate;
}

/* the owner's own read-only fd if it sent one, else whatever the kernel lets us open */
static int take_read_only_fd(ObjectFds *fds) {
	/* the fd is that itself; the other one, which may be the same, is not charged for */
	if (fds->mode == O_RDONLY)
		return -EBADF;
	if (fds->read_only_fd >= 0)
		return take_fd(fds->read_only_fd, &fds->read_only_fd_taken);
	return fd_reopen(fds->fd, O_RDONLY);
}

static Object *object_new(Objects *objects, uint64_t id, const ObjectKey *key, const WireAclEntry *acl,
			  uint32_t n_acl) {
	Object *object = malloc(sizeof(*object) + n_acl * sizeof(*acl));

	if (!object)
		return NULL;
	*object = (Object){
		.n_refs = 1,
		.objects = objects,
		.id = id,
		.key = *key,
		.fd = -EBADF,
		.read_only_fd = -EBADF,
		.ledger_index = LEDGER_NONE,
		.kind = WIRE_KIND_MEMORY,
		.n_acl = n_acl,
	};
	if (n_acl)
		memcpy(object->acl, acl, n_acl * sizeof(*acl));
	list_init(&object->regions);
	objects->n++;
	return object;
}

void object_set_fds(Object *object, int fd, int read_only_fd) {
	object->fd = fd;
	object->read_only_fd = read_only_fd;
	object->parked.id = object->id;
	object->parked.kind = KEEPER_OBJECT;
	object->parked.fds[0] = fd;
	object->parked.fds[1] = read_only_fd;
	object->parked.n_fds = read_only_fd < 0 ? 1 : 2;
}

int objects_get(Objects *objects, const ObjectKey *key, ObjectFds *fds, Account *account, const WireAclEntry *acl,
		uint32_t n_acl, Object **ret) {
	Object *object = objects_find(objects, key);
	struct stat st;
	int fd, r;

	if (object) {
		if (!acl_equal(object, acl, n_acl))
			return OBJECT_E_ACCESS_DIFFERS;
		/* the owner has let the memory grow since */
		if (object->size < fds->size) {
			/* or the inode number, of 32 bits, has come round: then this is other memory */
			if (fstat(object->fd, &st) < 0 || (uint64_t)st.st_size < fds->size)
				return OBJECT_E_OTHER;
			r = account_charge_more(&object->charge_bytes, fds->size - object->size);
			if (r)
				return OBJECT_E_QUOTA;
			object->size = fds->size;
			ledger_update_object(objects->ledger, object);
		}
		*ret = object_ref(object);
		return 0;
	}

	object = object_new(objects, ++objects->last_id, key, acl, n_acl);
	if (!object)
		return -ENOMEM;
	object->size = fds->size;
	object->flags = fds->flags;
	object->read_only_enforced = fds->read_only_enforced;

	r = account_charge(&object->charge_bytes, account, ACCOUNT_BYTES, fds->size);
	if (!r)
		r = account_charge(&object->charge_fds, account, ACCOUNT_FDS, fds->mode == O_RDONLY ? 1 : 2);
	if (r) {
		object_unref(object);
		return r == ACCOUNT_E_FULL ? OBJECT_E_NO_FDS : r > 0 ? OBJECT_E_QUOTA : r;
	}
	if (!table_insert(&objects->table, &object->link, key_hash(key))) {
		object_unref(object);
		return -ENOMEM;
	}
	fd = take_fd(fds->fd, &fds->fd_taken);
	if (fd < 0) {
		object_unref(object);
		return OBJECT_E_NO_FDS;
	}
	object_set_fds(object, fd, take_read_only_fd(fds));
	if (object->read_only_fd < 0 && fds->mode != O_RDONLY)
		object->flags |= WIRE_REGION_NO_READ_ONLY_FD;
	*ret = object;
	return 0;
}

/* one that is the same allocation; several handles may have one hash */
static Object *objects_find_cuda(Objects *objects, const ObjectKey *key, const CudaCheck *check) {
	table_for_each(link, &objects->table, key_hash(key)) {
		Object *object = container_of(link, Object, link);

		if (object->cuda && object->key.session == key->session && object->key.uid == key->uid &&
		    object->kind == check->kind &&
		    !memcmp(object->cuda->record.handle, check->handle, sizeof(check->handle)) &&
		    !memcmp(object->cuda->record.device, check->device, sizeof(check->device)))
			return object;
	}
	return NULL;
}

static int object_init_cuda(Object *object, CudaCheck *check, ObjectFds *fds, Account *account) {
	int fd, r;

	object->kind = check->kind;
	object->size = check->object_size;
	object->flags = check->is_validated ? 0 : WIRE_REGION_UNVALIDATED;
	object->cuda = calloc(1, sizeof(*object->cuda));
	if (!object->cuda)
		return -ENOMEM;
	object->cuda->object = object;
	object->cuda->record = (LedgerCuda){
		.owner_pid = check->owner_pid,
		.owner_pid_namespace = check->owner_pid_namespace,
	};
	memcpy(object->cuda->record.device, check->device, sizeof(check->device));
	memcpy(object->cuda->record.handle, check->handle, sizeof(check->handle));
	r = account_charge(&object->charge_bytes, account, ACCOUNT_GPU_BYTES, object->size);
	if (r)
		return OBJECT_E_QUOTA;
	if (check->kind == WIRE_KIND_CUDA_IPC)
		return 0;
	r = account_charge(&object->charge_fds, account, ACCOUNT_FDS, 1);
	if (r)
		return r == ACCOUNT_E_FULL ? OBJECT_E_NO_FDS : OBJECT_E_QUOTA;
	fd = take_fd(fds->fd, &fds->fd_taken);
	if (fd < 0)
		return OBJECT_E_NO_FDS;
	object_set_fds(object, fd, -EBADF);
	return 0;
}

int objects_get_cuda(Objects *objects, const ObjectKey *asked, CudaCheck *check, ObjectFds *fds, Account *account,
		     const WireAclEntry *acl, uint32_t n_acl, Object **ret) {
	bool is_ipc = check->kind == WIRE_KIND_CUDA_IPC;
	ObjectKey key = *asked;
	Object *object = NULL;
	int r;

	key.device = CUDA_DEVICE;
	key.inode = is_ipc ? (ino_t)handle_hash(check) : (ino_t)(objects->last_id + 1);
	if (is_ipc)
		object = objects_find_cuda(objects, &key, check);
	if (object) {
		if (!acl_equal(object, acl, n_acl))
			return OBJECT_E_ACCESS_DIFFERS;
		/* without a helper the size is what a window needs, which the next one may exceed */
		if (object->size < check->object_size) {
			if (account_charge_more(&object->charge_bytes, check->object_size - object->size))
				return OBJECT_E_QUOTA;
			object->size = check->object_size;
			ledger_update_object(objects->ledger, object);
		}
		*ret = object_ref(object);
		return 0;
	}
	object = object_new(objects, ++objects->last_id, &key, acl, n_acl);
	if (!object)
		return -ENOMEM;
	r = object_init_cuda(object, check, fds, account);
	if (!r && !table_insert(&objects->table, &object->link, key_hash(&key)))
		r = -ENOMEM;
	if (r) {
		object_unref(object);
		return r;
	}
	object->cuda->hold = check->hold;
	check->hold = 0;
	*ret = object;
	return 0;
}

static void on_held(CudaCheck *check, int result) {
	ObjectCuda *cuda = container_of(check, ObjectCuda, again);

	if (!result)
		cuda->hold = check->hold;
	else
		log_write(LOG_RECOVERY_LOSS, cuda->object->key.uid, NULL,
			  "GPU memory of uid %u is not held any more: %s", cuda->object->key.uid, check->why);
}

void object_hold_again(Object *object) {
	ObjectCuda *cuda = object->cuda;
	int r;

	cuda->again = (CudaCheck){
		.kind = (uint8_t)object->kind,
		.access = WIRE_ACCESS_READ,
		.fd = -EBADF,
		.size = object->size,
		.object_size = object->size,
		.owner_pid = cuda->record.owner_pid,
		.owner_pid_namespace = cuda->record.owner_pid_namespace,
		.uid = object->key.uid,
		.on_done = on_held,
	};
	memcpy(cuda->again.device, cuda->record.device, sizeof(cuda->again.device));
	memcpy(cuda->again.handle, cuda->record.handle, sizeof(cuda->again.handle));
	r = cuda_check_start(object->objects->cuda, &cuda->again);
	if (r != CUDA_PENDING)
		on_held(&cuda->again, r);
}

bool object_is_whole(const Object *object) {
	return object->fd >= 0 || object->kind == WIRE_KIND_CUDA_IPC;
}

int objects_keep(Objects *objects, Object *const *list, size_t n) {
	KeeperEntry *entries[KEEPER_BATCH_MAX] = {};
	size_t n_entries = 0;
	int r;

	for (size_t i = 0; i < n; ++i) {
		/* several regions of one message may be windows of one object */
		if (list[i]->keeping || list[i]->ledger_index != LEDGER_NONE)
			continue;
		list[i]->keeping = true;
		if (list[i]->fd >= 0)
			entries[n_entries++] = &list[i]->parked;
	}
	r = keeper_park(objects->keeper, entries, n_entries);
	for (size_t i = 0; i < n; ++i) {
		if (!list[i]->keeping)
			continue;
		list[i]->keeping = false;
		if (!r)
			ledger_put_object(objects->ledger, list[i]);
	}
	return r;
}

Object *objects_restore(Objects *objects, uint32_t index, Account *account) {
	const LedgerObject *at = ledger_object(objects->ledger, index);
	ObjectKey key = {
		.session = at->session,
		.uid = at->uid,
		.mode = at->mode,
		.device = (dev_t)at->device,
		.inode = (ino_t)at->inode,
	};
	Object *object = object_new(objects, at->id, &key, ledger_acl(objects->ledger, index), at->n_acl);

	if (!object)
		return NULL;
	object->ledger_index = index;
	object->size = at->size;
	object->flags = at->flags;
	object->read_only_enforced = at->read_only_enforced;
	object->kind = at->kind;
	if (at->kind != WIRE_KIND_MEMORY) {
		object->cuda = calloc(1, sizeof(*object->cuda));
		if (!object->cuda)
			return object_unref(object);
		object->cuda->object = object;
		object->cuda->record = *ledger_cuda(objects->ledger, index);
		account_take(&object->charge_bytes, account, ACCOUNT_GPU_BYTES, object->size);
		if (at->kind == WIRE_KIND_CUDA_VMM)
			account_take(&object->charge_fds, account, ACCOUNT_FDS, 1);
	} else {
		account_take(&object->charge_bytes, account, ACCOUNT_BYTES, object->size);
		account_take(&object->charge_fds, account, ACCOUNT_FDS, key.mode == O_RDONLY ? 1 : 2);
	}
	return table_insert(&objects->table, &object->link, key_hash(&key)) ? object : object_unref(object);
}

void object_refresh(Object *object) {
	struct stat st;

	if (object->cuda || !(object->flags & WIRE_REGION_SPARSE) || fstat(object->fd, &st) < 0)
		return;
	if ((uint64_t)st.st_blocks * 512 >= (uint64_t)st.st_size)
		object->flags &= ~(uint32_t)WIRE_REGION_SPARSE;
}

Object *object_ref(Object *object) {
	object->n_refs++;
	return object;
}

/* its pages now: the owner need not say when the memory grows */
static uint64_t object_pins(const Object *object) {
	struct stat st;

	if (object->cuda || object->fd < 0 || fstat(object->fd, &st) < 0 || (uint64_t)st.st_blocks * 512 < object->size)
		return object->size;
	return (uint64_t)st.st_blocks * 512;
}

Object *object_unref(Object *object) {
	if (!object || --object->n_refs)
		return NULL;

	table_remove(&object->objects->table, &object->link);
	ledger_drop_object(object->objects->ledger, object);
	keeper_drop(object->objects->keeper, &object->parked, object->key.uid, object_pins(object));
	account_refund(&object->charge_bytes);
	account_refund(&object->charge_fds);
	object->objects->n--;
	if (object->cuda) {
		cuda_check_cancel(&object->cuda->again);
		cuda_hold_drop(object->objects->cuda, object->cuda->hold);
	}
	free(object->cuda);
	free(object);
	return NULL;
}

static uint64_t punch(Object *object, uint64_t begin, uint64_t end, char *why) {
	if (begin >= end)
		return 0;
	if (fallocate(object->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)begin, (off_t)(end - begin)) < 0) {
		WHY(why, "the pages cannot be given back: %s",
		    errno == EPERM   ? "the memory is sealed against writing"
		    : errno == EBADF ? "the fd is read-only"
				     : strerror(errno));
		return 0;
	}
	return end - begin;
}

uint64_t object_discard(Object *object, uint64_t offset, uint64_t size, char *why) {
	uint64_t page = object->flags & WIRE_REGION_HUGETLB ? UINT64_C(2) << 20 : (uint64_t)getpagesize();
	uint64_t begin = (offset + page - 1) / page * page, end = (offset + size) / page * page, done = 0;
	struct stat st;

	why[0] = 0;
	if (object->cuda) {
		WHY(why, "GPU memory goes back when its owner frees it and nobody has it open any more");
		return 0;
	}
	if (object->flags & WIRE_REGION_HUGETLB && !fstat(object->fd, &st) && st.st_blksize > 0) {
		page = (uint64_t)st.st_blksize;
		begin = (offset + page - 1) / page * page;
		end = (offset + size) / page * page;
	}
	/* a last page that the memory's end cuts is whole for our purpose */
	if (offset + size == object->size)
		end = (offset + size + page - 1) / page * page;
	while (begin < end && !why[0]) {
		uint64_t stop = end, skip = 0;

		/* the nearest other window at or after begin */
		list_for_each (link, &object->regions) {
			Region *other = container_of(link, Region, object_link);
			uint64_t other_end = (other->offset + other->size + page - 1) / page * page;
			uint64_t other_begin = other->offset / page * page;

			if (other_end <= begin || other_begin >= stop)
				continue;
			stop = other_begin > begin ? other_begin : begin;
			skip = other_end;
		}
		done += punch(object, begin, stop, why);
		begin = skip ? skip : end;
	}
	if (done < size && !why[0])
		WHY(why, "%llu of %llu bytes were given back: the other pages are shared with other regions",
		    (unsigned long long)done, (unsigned long long)size);
	return done < size ? done : size;
}
