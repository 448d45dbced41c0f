/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Object: one piece of memory that an owner has passed, whatever number of regions are windows of it.
 *
 * Objects are keyed by (owning session or KEEP principal, device, inode, access mode of the fd), so that a
 * region is never served by an fd that another principal supplied. An object lives as long as a region refers to
 * it; it owns one fd, and one read-only fd where there is one, and pays its size to its uid once. Before a region of
 * it is published its fds are parked and it is in the ledger: objects_keep().
 * Invariant: every region of an object has the object's access list.
 *
 * GPU memory is an object too. What comes as a CUDA IPC handle is found again by that handle, and has no fd. What comes
 * as a VMM fd is an object of its own each time: all such fds are of one device, and nothing of them tells which
 * allocation it is. Nothing that may ask a driver is done with such an fd: it is parked, handed out and closed.
 */

#include <sys/types.h>

#include "account.h"
#include "cuda/cuda.h"
#include "keeper.h"
#include "ledger.h"
#include "list.h"
#include "table.h"
#include "wire/codec.h"

typedef struct Object Object;
typedef struct Objects Objects;
typedef struct ObjectKey ObjectKey;
typedef struct ObjectFds ObjectFds;
typedef struct ObjectCuda ObjectCuda;

/* what was received and has passed object_fds_check() */
struct ObjectFds {
	int fd;		  /* borrowed from the message */
	int read_only_fd; /* the same, -EBADF for none */
	bool fd_taken;	  /* an object has taken the fd over; another one has to duplicate it */
	bool read_only_fd_taken;
	dev_t device;
	ino_t inode;
	uint64_t size;
	uint32_t mode;	/* O_RDONLY or O_RDWR */
	uint32_t flags; /* WIRE_REGION_* that follow from the memory */
	bool read_only_enforced;
};

struct ObjectKey {
	uint64_t session; /* 0 for KEEP */
	uint32_t uid;
	uint32_t mode;
	dev_t device;
	ino_t inode;
};

/* what GPU memory has besides */
struct ObjectCuda {
	LedgerCuda record;
	Object *object;
	uint64_t hold;	 /* of a helper, 0 for none */
	CudaCheck again; /* by which it gets one after a restart */
};

struct Object {
	unsigned long n_refs;
	Objects *objects;
	uint64_t id; /* never used again */
	ObjectKey key;
	TableLink link;
	int fd;
	int read_only_fd;
	KeeperEntry parked;
	uint32_t ledger_index; /* LEDGER_NONE until it is kept */
	uint32_t kind;	       /* WIRE_KIND_* */
	uint32_t flags;
	uint64_t size;
	ObjectCuda *cuda; /* NULL for system memory */
	bool read_only_enforced;
	bool keeping; /* while objects_keep() has it in its list */
	List regions; /* Region.object_link */
	AccountCharge charge_bytes;
	AccountCharge charge_fds;
	uint32_t n_acl;
	WireAclEntry acl[];
};

struct Objects {
	Table table;
	Closer *closer;
	Keeper *keeper;
	Ledger *ledger;
	Cuda *cuda;
	uint64_t last_id;
	uint64_t n;
};

enum {
	_OBJECT_E_SUCCESS,
	OBJECT_E_QUOTA,
	OBJECT_E_NO_FDS,
	OBJECT_E_ACCESS_DIFFERS,
	OBJECT_E_OTHER,
};

/*
 * Looks at a received fd, F_GET_SEALS first and nothing else on an fd that fails it, and at its read-only
 * companion (-EBADF for none). Borrows both. Returns 0, or a wire code (SHMB_E_BAD_FD, SHMB_E_UNSEALED,
 * SHMB_E_SPARSE) with a sentence in @why, WIRE_TEXT_MAX bytes.
 */
int object_fds_check(int fd, int read_only_fd, bool accept_unsealed, bool require_allocated, ObjectFds *ret, char *why);

/*
 * Finds the object of @key, or makes one: takes the fds over only then, and marks them as taken in @fds. Gives a
 * reference.
 * Returns 0, OBJECT_E_*, or -ENOMEM.
 */
int objects_get(Objects *objects, const ObjectKey *key, ObjectFds *fds, Account *account, const WireAclEntry *acl,
		uint32_t n_acl, Object **ret);
/*
 * The same for GPU memory that @check, which is over, has accepted: the fd of a VMM allocation, @fds, is taken over; the
 * check's hold goes to the object. Returns the same.
 */
int objects_get_cuda(Objects *objects, const ObjectKey *key, CudaCheck *check, ObjectFds *fds, Account *account,
		     const WireAclEntry *acl, uint32_t n_acl, Object **ret);
/*
 * Parks those of @objects that are not yet kept, as one message, and puts them into the ledger. Returns 0 or what
 * keeper_park() returned; then none of them is kept.
 */
int objects_keep(Objects *objects, Object *const *list, size_t n);
/* An object of the ledger's record @index, without its fds yet, which its charge is for all the same. NULL without memory. */
Object *objects_restore(Objects *objects, uint32_t index, Account *account);
/* it has all that it was registered with: no fd of it was lost */
bool object_is_whole(const Object *object);
/* gives it the fds; consumes them */
void object_set_fds(Object *object, int fd, int read_only_fd);
/* Asks for a hold on the allocation, which the last broker's helper has given up; in vain where its owner is gone. */
void object_hold_again(Object *object);
/* Looks again whether an object that was sparse has been allocated meanwhile; fstat() on shmem waits for nobody. */
void object_refresh(Object *object);
Object *object_ref(Object *object);
Object *object_unref(Object *object);

/*
 * Gives the whole pages of [@offset, @offset + @size) that no other region covers back to the system. Returns the
 * bytes given back; less than all leaves a sentence in @why, else "".
 */
uint64_t object_discard(Object *object, uint64_t offset, uint64_t size, char *why);
