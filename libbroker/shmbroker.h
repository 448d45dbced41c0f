/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SHMBROKER_H
#define SHMBROKER_H

/*
 * libshmbroker: shared memory of a host through one broker, shmbrokerd.
 *
 * An owner creates or adopts a region and registers it by file descriptor; a consumer gets memory by
 * shmb_client_get_memory_info() under a lease, on regions that it has used before without a system call; the
 * region cannot go away under a lease.
 *
 * Every function returns 0, a negative errno (the kernel or the transport failed) or a positive SHMB_E_* (the
 * request was refused; shmb_last_error() has the broker's sentence). Outputs are written only on 0. File
 * descriptors that are passed in are borrowed and duplicated. Timeouts are in milliseconds, -1 for none.
 * Structs that may grow begin with struct_size; set it to sizeof, and 0 in every field you do not use.
 *
 * A client may be used by many threads at once. After fork() the child may use nothing that it inherited:
 * every call answers SHMB_E_FORKED; make a new client. The library never prints, aborts, starts threads or
 * touches signal handlers. Kernel 5.14 or newer.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct shmb_client;
struct shmb_region;
struct shmb_pool;

#define SHMB_VERSION "0.1.0"
#define SHMB_REST UINT64_MAX /* the rest of the region from the offset on */
#define SHMB_ANY_UID UINT32_MAX
#define SHMB_NAME_MAX 255
#define SHMB_BATCH_MAX 64

/* codes */
#define SHMB_E_INVALID 1
#define SHMB_E_VERSION 2
#define SHMB_E_UNKNOWN_OP 3
#define SHMB_E_STATE 4
#define SHMB_E_PERMISSION 5
#define SHMB_E_NOT_FOUND 6
#define SHMB_E_EXISTS 7
#define SHMB_E_IN_USE 8
#define SHMB_E_QUOTA 9
#define SHMB_E_NO_FDS 10
#define SHMB_E_NO_SLOTS 11
#define SHMB_E_BAD_NAME 12
#define SHMB_E_BAD_FD 13
#define SHMB_E_OUT_OF_BOUNDS 14
#define SHMB_E_UNSEALED 15
#define SHMB_E_ACCESS 16
#define SHMB_E_ACCESS_DIFFERS 17
#define SHMB_E_NO_READ_ONLY_FD 18
#define SHMB_E_STALE 19
#define SHMB_E_REVOKED 20
#define SHMB_E_RETIRING 21
#define SHMB_E_AGAIN 22
#define SHMB_E_TIMED_OUT 23
#define SHMB_E_UNSUPPORTED 24
#define SHMB_E_NO_DEVICE 25
#define SHMB_E_SPARSE 26
#define SHMB_E_RESERVED 27
#define SHMB_E_BUSY 28
#define SHMB_E_DETACHED 29
#define SHMB_E_FORKED 30
#define SHMB_E_NOT_ATTACHED 31
#define SHMB_E_TRUNCATED 32

/* roles, for shmb_client_new(); 0 asks for all that this user may have */
#define SHMB_ROLE_OWNER 1
#define SHMB_ROLE_CONSUMER 2
#define SHMB_ROLE_ADMIN 4

/* flags of shmb_client_new() */
#define SHMB_ACCEPT_UNSEALED 1 /* pointers into memory that its owner can truncate: SIGBUS is possible */
#define SHMB_NO_POPULATE 2     /* first use of a region faults its pages in one by one */
#define SHMB_FORCE_RMW 4     /* releases by locked instructions, too, instead of membarrier, for tests and comparison */
#define SHMB_NO_LEASE_PAGE 8 /* every lease by message, for tests and comparison */
#define SHMB_CUDA_CONTEXT 16 /* a GPU's primary context may be made where this process has none */

/* access */
#define SHMB_READ 1
#define SHMB_WRITE 2
#define SHMB_COPY 4    /* no pointer, only shmb_lease_copy_in() and _out(); works on unsealed memory */
#define SHMB_NO_WAIT 8 /* SHMB_E_AGAIN instead of asking the broker, which only mapped regions can do without */

/* kinds of memory */
#define SHMB_MEMORY_CPU 1
#define SHMB_MEMORY_CUDA 2

/* states of a region */
#define SHMB_STATE_REVOKED 0
#define SHMB_STATE_ACTIVE 1
#define SHMB_STATE_LAZY 2
#define SHMB_STATE_RETIRING 3

/* flags of a region, in status and in leases */
#define SHMB_REGION_UNSEALED 1
#define SHMB_REGION_SPARSE 2
#define SHMB_REGION_READ_ONLY_ADVISORY 4
#define SHMB_REGION_NO_READ_ONLY_FD 8
#define SHMB_REGION_KEPT 16
#define SHMB_REGION_HUGETLB 32
#define SHMB_REGION_UNINDEXED 64
#define SHMB_REGION_UNVALIDATED 128 /* GPU memory that only its owner vouches for */

/* how a region is retired */
#define SHMB_RETIRE_STRICT 0   /* no new leases, the name is free at once, memory goes with the last lease */
#define SHMB_RETIRE_LAZY 1     /* usable and listed until its last lease is over */
#define SHMB_RETIRE_FORCE 2    /* revoked now; who has it mapped keeps what it has mapped */
#define SHMB_RETIRE_DISCARD 3  /* FORCE, and its whole pages are given back to the system */
#define SHMB_RETIRE_WAIT 0x100 /* or'ed: return when it is gone */

/* ---- codes and errors ---- */

/* "NOT_FOUND" for a code, NULL for an unknown one; static */
const char *shmb_error_name(int code);
/* the sentence of a code, or strerror() of a negative errno; static or thread-local */
const char *shmb_error_text(int result);
/* what the last failed call of this thread said, a sentence; "" when none failed; valid until the next call */
const char *shmb_last_error(void);

/* ---- client ---- */

/*
 * Connects. @socket NULL: $SHMBROKER_SOCKET or /run/shmbroker/shmbroker.sock. Consumers get a lease page.
 * Returns 0; -ENOENT, -ECONNREFUSED, -EACCES (no broker there); SHMB_E_PERMISSION (a role is refused),
 * SHMB_E_VERSION, SHMB_E_QUOTA, SHMB_E_NO_FDS, SHMB_E_INVALID (unknown flags); -ENOMEM.
 */
int shmb_client_new(struct shmb_client **ret, const char *socket, uint32_t roles, uint32_t flags);
/*
 * The same where a broker may be there and not answer: @timeout_ms is as of shmb_client_set_call_timeout(), is in force for
 * each step of connecting, and stays so. Returns also SHMB_E_TIMED_OUT; SHMB_E_INVALID (the timeout).
 */
int shmb_client_new_within(struct shmb_client **ret, const char *socket, uint32_t roles, uint32_t flags,
			   int timeout_ms);
/*
 * Disconnects and frees; regions that were not kept are retired by the broker, mappings are removed: no lease
 * of this client may be used any more. NULL is fine. Always returns NULL.
 */
struct shmb_client *shmb_client_free(struct shmb_client *client);

struct shmb_client_info {
	size_t struct_size;
	uint64_t session;
	uint64_t epoch;
	uint32_t roles;
	uint32_t rights;     /* 1 keep, 2 delegate */
	uint32_t lease_mode; /* 1 asymmetric, 2 read-modify-write, 0 by message */
	uint32_t lanes;
	uint32_t capacity;
	char broker_version[32];
};
int shmb_client_get_info(struct shmb_client *client, struct shmb_client_info *ret);

/*
 * For the caller's own loop: the fd, the same as long as the client lives and owned by it, is readable when
 * shmb_client_process() has something to do. It must be called then (any thread) so that events are delivered, memory
 * of regions that are gone is unmapped, and a broker that was started anew is found again. It is also readable as long
 * as events wait for shmb_client_next_event(). It is an epoll fd, made at the first call: -EMFILE, -ENOMEM, ... when it
 * cannot be made, -EBADF in a forked child.
 */
int shmb_client_get_fd(struct shmb_client *client);
/*
 * Never waits. Returns 0, also while the broker is away; -ECONNRESET when it has ended and cannot resume sessions;
 * SHMB_E_DETACHED when it does not know this session any more; SHMB_E_FORKED.
 */
int shmb_client_process(struct shmb_client *client);
/*
 * How long calls wait for a broker that has ended, in ms: 30,000 at first, -1 for ever, 0 for one try. Then they
 * return SHMB_E_AGAIN, and the next call tries again; what a call had asked for may have been done.
 * Returns 0, SHMB_E_INVALID, SHMB_E_FORKED.
 */
int shmb_client_set_resume_timeout(struct shmb_client *client, int timeout_ms);
/*
 * How long one call waits for the answer of a broker that is there and does not answer, in ms: -1 for ever, as at first. Then
 * it returns SHMB_E_TIMED_OUT; what it had asked for may have been done, or is done once the broker goes on: a region may be
 * registered or retired. Its answer is dropped when it comes, with the fds in it, and a lease by message is given back. A call
 * that waits on purpose (SHMB_RETIRE_WAIT) does so in addition. Returns 0, SHMB_E_INVALID, SHMB_E_FORKED.
 */
int shmb_client_set_call_timeout(struct shmb_client *client, int timeout_ms);
/* one round trip; @ret_ns how long it took, may be NULL */
int shmb_client_ping(struct shmb_client *client, uint64_t *ret_ns);

/* ---- owner ---- */

#define SHMB_HUGE_NONE 0
#define SHMB_HUGE_2M 21
#define SHMB_HUGE_1G 30

#define SHMB_REGION_OPT_KEEP 1	    /* outlives the session; needs the right `keep` */
#define SHMB_REGION_OPT_REPLACE 2   /* takes the name over from one's own older region */
#define SHMB_REGION_OPT_READ_ONLY 4 /* consumers may not ask for SHMB_WRITE; enforced where it can be */
#define SHMB_REGION_OPT_POPULATE 8 /* allocate every page now; a shortage is -ENOMEM or -ENOSPC now, not SIGBUS later */

#define SHMB_REGION_OPT_UNPUBLISHED 16 /* GPU memory only: nobody sees it before shmb_cuda_publish() */

struct shmb_region_options {
	size_t struct_size;
	uint32_t flags;
	uint32_t huge_pages;	      /* SHMB_HUGE_*: size is rounded up, -ENOMEM when the pool is short */
	int32_t numa_node;	      /* node + 1; 0 for any */
	uint32_t principal;	      /* uid + 1 that a delegate acts for; 0 for oneself */
	const uint32_t *allowed_uids; /* access list; both empty: any consumer */
	const uint32_t *allowed_gids;
	uint32_t n_allowed_uids;
	uint32_t n_allowed_gids;
	const char *key; /* by which others know this memory, for status only; at most 255 bytes, NULL or "" for none */
};

/*
 * Creates @size bytes (1 or more) as a sealed memfd, zeroed, maps it at a 64-byte aligned address and registers it.
 * Returns 0; SHMB_E_BAD_NAME (also of the key), SHMB_E_EXISTS, SHMB_E_QUOTA, SHMB_E_NO_SLOTS, SHMB_E_NO_FDS,
 * SHMB_E_PERMISSION, SHMB_E_RESERVED; -ENOMEM, -ENOSPC, -EMFILE.
 */
int shmb_region_create(struct shmb_client *client, const char *name, uint64_t size,
		       const struct shmb_region_options *options, struct shmb_region **ret);
/*
 * Registers @size bytes at @offset (any alignment) of memory that exists: memfd, POSIX shm, hugetlbfs. Borrows
 * @fd. Adds no seal. Also returns SHMB_E_BAD_FD, SHMB_E_OUT_OF_BOUNDS, SHMB_E_UNSEALED, SHMB_E_ACCESS_DIFFERS.
 */
int shmb_region_adopt(struct shmb_client *client, const char *name, int fd, uint64_t offset, uint64_t size,
		      const struct shmb_region_options *options, struct shmb_region **ret);

struct shmb_region_spec {
	size_t struct_size;
	const char *name;
	int fd;
	uint32_t reserved;
	uint64_t offset;
	uint64_t size;
	const struct shmb_region_options *options; /* NULL for defaults */
	struct shmb_region *region;		   /* set where the result is 0 */
};
/* Adopts @n regions in as few messages as possible; each stands alone and has its result in @ret_results. */
int shmb_region_adopt_many(struct shmb_client *client, struct shmb_region_spec *specs, uint32_t n, int *ret_results);

/* the owner's own mapping, made at the first call; read-write where the fd allows; NULL when it cannot be mapped */
void *shmb_region_get_data(struct shmb_region *region);
uint64_t shmb_region_get_size(struct shmb_region *region);
uint64_t shmb_region_get_generation(struct shmb_region *region);
uint32_t shmb_region_get_flags(struct shmb_region *region);
const char *shmb_region_get_name(struct shmb_region *region);
/* borrowed; -1 when there is none */
int shmb_region_get_fd(struct shmb_region *region);
/*
 * Retires. @mode SHMB_RETIRE_*; with SHMB_RETIRE_WAIT returns when it is gone or SHMB_E_TIMED_OUT after @timeout
 * ms. The struct stays valid until shmb_region_free(). A second call answers SHMB_E_STALE.
 */
int shmb_region_retire(struct shmb_region *region, uint32_t mode, int timeout);
/* Unmaps and frees; retires strictly when that was not done and the region is not kept. NULL is fine. */
struct shmb_region *shmb_region_free(struct shmb_region *region);

/* retires regions by name: results for each in @ret_results (may be NULL) */
int shmb_client_unregister(struct shmb_client *client, const char *const *names, uint32_t n, uint32_t mode, int timeout,
			   int *ret_results);
/*
 * The same with the rights of a user for whom a delegate acts: @principal is the uid + 1, whose regions it may retire and
 * nobody else's, not even its own; 0 is shmb_client_unregister(). Also returns SHMB_E_PERMISSION for the whole call when the
 * session has not the right delegate.
 */
int shmb_client_unregister_as(struct shmb_client *client, uint32_t principal, const char *const *names, uint32_t n,
			      uint32_t mode, int timeout, int *ret_results);
#define SHMB_ALL_SESSION 1  /* all of this session */
#define SHMB_ALL_UID 2	    /* all of this user */
#define SHMB_ALL_EVERYONE 3 /* needs the role admin */
struct shmb_retired {
	size_t struct_size;
	uint32_t gone;
	uint32_t draining;
	uint64_t discarded; /* bytes given back by SHMB_RETIRE_DISCARD */
};
/* @ret may be NULL */
int shmb_client_unregister_all(struct shmb_client *client, uint32_t scope, uint32_t mode, int timeout,
			       struct shmb_retired *ret);

/* ---- consumer ---- */

/*
 * A lease: filled in by the library, owned by the caller. Moved, never copied: exactly one release for each.
 */
struct shmb_lease {
	void *address;	      /* NULL with SHMB_COPY; a device pointer for SHMB_MEMORY_CUDA */
	uint64_t size;	      /* bytes granted */
	uint32_t memory_type; /* SHMB_MEMORY_* */
	int32_t device;	      /* ordinal in this process, -1 for CPU */
	uint8_t device_uuid[16];
	uint64_t generation;
	uint32_t access;
	uint32_t flags;		    /* SHMB_REGION_* */
	struct shmb_client *client; /* NULL once released */
	uint64_t internal[4];
};

/*
 * Memory of a region: @size bytes (SHMB_REST for the rest) at @offset of @name, under a lease. @access SHMB_READ,
 * SHMB_READ | SHMB_WRITE, with SHMB_COPY for guarded copies only. The first use of a generation asks the broker
 * and maps; from then on there is no system call. SHMB_NO_WAIT only grants what is mapped. Any thread.
 * Returns 0; SHMB_E_NOT_FOUND, SHMB_E_OUT_OF_BOUNDS, SHMB_E_ACCESS, SHMB_E_PERMISSION, SHMB_E_NO_READ_ONLY_FD,
 * SHMB_E_UNSEALED (say SHMB_ACCEPT_UNSEALED or SHMB_COPY), SHMB_E_RETIRING, SHMB_E_REVOKED, SHMB_E_QUOTA,
 * SHMB_E_DETACHED, SHMB_E_AGAIN (the broker is away and the region is not mapped), SHMB_E_FORKED; -ENOMEM, -ECONNRESET.
 */
int shmb_client_get_memory_info(struct shmb_client *client, const char *name, uint64_t offset, uint64_t size,
				uint32_t access, struct shmb_lease *ret);
/*
 * Gives a lease back, on any thread. SHMB_E_STALE the second time, SHMB_E_REVOKED when it was taken back meanwhile.
 * Calls for the same lease are the caller's to order, as with free(): two at once may both be counted.
 */
int shmb_lease_release(struct shmb_lease *lease);
/*
 * Guarded copies between @size bytes at @offset of the lease and the caller's buffer: never SIGBUS; SHMB_E_TRUNCATED
 * when the owner has cut the memory, SHMB_E_OUT_OF_BOUNDS, SHMB_E_ACCESS, SHMB_E_UNSUPPORTED (hugetlb).
 */
int shmb_lease_copy_in(struct shmb_lease *lease, uint64_t offset, const void *data, uint64_t size);
int shmb_lease_copy_out(struct shmb_lease *lease, uint64_t offset, void *ret_data, uint64_t size);
/*
 * The file behind a lease, for those who map, send or adopt it themselves: @ret_fd is the library's, and valid as long as
 * the lease; the lease's first byte is at @ret_offset of it (may be NULL). It is open for writing with SHMB_WRITE. The
 * first time the broker is asked. Returns 0; SHMB_E_STALE (released before), SHMB_E_FORKED, and what a lease on memory
 * that is not mapped returns.
 */
int shmb_lease_get_fd(struct shmb_lease *lease, int *ret_fd, uint64_t *ret_offset);

/*
 * A name resolved once. A handle names one generation: when that one is not given out any more its use answers
 * SHMB_E_RETIRING, SHMB_E_REVOKED or SHMB_E_STALE; open it again.
 */
struct shmb_handle {
	uint32_t slot;
	uint32_t reserved;
	uint64_t generation;
	uint64_t size;
};
int shmb_handle_open(struct shmb_client *client, const char *name, struct shmb_handle *ret);
int shmb_handle_get_memory_info(struct shmb_client *client, const struct shmb_handle *handle, uint64_t offset,
				uint64_t size, uint32_t access, struct shmb_lease *ret);

struct shmb_lookup_spec {
	size_t struct_size;
	const char *name;
	uint64_t offset;
	uint64_t size;
	uint32_t access;
	uint32_t reserved;
};
/* Many leases in one call; each has its result, and what is mapped already costs no system call. Returns 0. */
int shmb_client_get_memory_info_many(struct shmb_client *client, const struct shmb_lookup_spec *specs, uint32_t n,
				     struct shmb_lease *ret_leases, int *ret_results);

/* Leases by message, without mapping anything: for brokers of requests and for comparison. At most SHMB_BATCH_MAX. */
struct shmb_message_lease {
	uint64_t lease;
	uint64_t generation;
	uint64_t offset; /* bytes into the memory behind the region */
	uint64_t size;
	uint64_t object;
	uint32_t slot;
	uint32_t flags;
};
int shmb_client_lookup(struct shmb_client *client, const struct shmb_lookup_spec *specs, uint32_t n,
		       struct shmb_message_lease *ret, int *ret_results);
int shmb_client_release(struct shmb_client *client, const uint64_t *leases, uint32_t n, int *ret_results);

/* ---- GPU memory ---- */

/*
 * GPU memory is under the same names, leases, access lists and ways to retire as system memory. A lease on it has
 * memory_type SHMB_MEMORY_CUDA, a device pointer as its address, the device's ordinal in this process, and its UUID; the
 * allocation is opened once in a process, in the device's primary context. libcuda.so.1 is loaded by the first call that
 * needs it. All of these functions also return SHMB_E_UNSUPPORTED (no driver, an integrated GPU, ...), SHMB_E_NO_DEVICE,
 * SHMB_E_STATE (this process has no context on the device and the client was made without SHMB_CUDA_CONTEXT),
 * SHMB_E_FORKED (CUDA was initialised before a fork), -ENOMEM, -EIO (the driver failed otherwise); shmb_last_error() has
 * cause and remedy, with the driver's code.
 *
 * Offers @size bytes at @device_pointer, which may be within an allocation: of cuMemCreate() with POSIX file descriptors
 * (then the memory outlives this process for whoever has it open, and with SHMB_REGION_OPT_KEEP for all), or of
 * cuMemAlloc() or cudaMalloc(), by a CUDA IPC handle. Whoever may have it has all of the allocation: for cudaMalloc() that
 * is a whole 2 MiB block, whatever else is in it. The memory is not to be freed before the region is gone
 * (SHMB_RETIRE_WAIT).
 * Also returns what shmb_region_adopt() does; SHMB_E_UNSUPPORTED for managed, pooled (cuMemAllocAsync) and imported
 * memory; SHMB_E_OUT_OF_BOUNDS when it spans allocations (expandable segments).
 */
int shmb_cuda_export(struct shmb_client *client, const char *name, const void *device_pointer, uint64_t size,
		     const struct shmb_region_options *options, struct shmb_region **ret);
/*
 * Allocates @size bytes (1 or more; whole multiples of the granularity of 2 MiB are taken) on the device with that
 * ordinal in this process, exportable, maps and offers them. shmb_region_get_data() is the device pointer. It is freed by
 * shmb_region_free(), and in fact with the last mapping of anybody.
 */
int shmb_cuda_alloc(struct shmb_client *client, const char *name, uint64_t size, int32_t device,
		    const struct shmb_region_options *options, struct shmb_region **ret);
/*
 * Waits until all that @stream (a CUstream or cudaStream_t, NULL for the default stream) has been given is done, and
 * registers the region if it was made with SHMB_REGION_OPT_UNPUBLISHED: from here on a consumer that asks finds it, with
 * what was written. For data of a later time say so yourself after this call, by whatever request names the region.
 * Also returns what shmb_region_adopt() does; SHMB_E_INVALID for a region of system memory.
 */
int shmb_cuda_publish(struct shmb_region *region, void *stream);

struct shmb_cuda_handle {
	size_t struct_size;
	uint8_t device_uuid[16];
	uint8_t handle[64];	  /* of cuIpcGetMemHandle(), of the allocation's base */
	uint64_t allocation_size; /* bytes, 0 for unknown */
	uint64_t offset;	  /* bytes into the allocation */
	uint64_t size;
	uint32_t owner_pid; /* of the process that exported it, in its own namespace; 0 for unknown */
	uint32_t reserved;
	uint64_t owner_pid_namespace; /* inode of /proc/PID/ns/pid, 0 for unknown */
};
/* Offers memory of another process, by a handle that it was given: for gateways. Needs no GPU. As shmb_region_adopt(). */
int shmb_cuda_adopt(struct shmb_client *client, const char *name, const struct shmb_cuda_handle *handle,
		    const struct shmb_region_options *options, struct shmb_region **ret);
/*
 * The same by an fd of cuMemExportToShareableHandle(), which is borrowed. Of @handle the UUID, the size of the allocation,
 * which must be there, offset and size are used.
 */
int shmb_cuda_adopt_fd(struct shmb_client *client, const char *name, int fd, const struct shmb_cuda_handle *handle,
		       const struct shmb_region_options *options, struct shmb_region **ret);

/*
 * Gives a lease back when all that @stream has been given is done, without waiting: for work on the memory that still
 * runs. On 0 the lease is gone for the caller; else it is as it was. shmb_client_free() waits for that, up to 10 s: then
 * it leaves the client as it is.
 * Also returns SHMB_E_STALE.
 */
int shmb_lease_release_after(struct shmb_lease *lease, void *stream);
/*
 * Page-locks the system memory behind a lease for the GPUs of this process, so that copies do not go through a bounce
 * buffer: all of it, once, until this process unmaps it, which is when the region is gone. @device is the ordinal of a
 * device whose context is used; @ret_device_pointer, which may be NULL, is where it sees the lease's first byte.
 * Also returns SHMB_E_INVALID (not system memory, or SHMB_COPY), SHMB_E_SPARSE, SHMB_E_IN_USE (locked by somebody else in
 * this process), SHMB_E_STALE.
 */
int shmb_lease_pin(struct shmb_lease *lease, int32_t device, void **ret_device_pointer);

/* ---- pools ---- */

#define SHMB_POOL_BLOCKS_MAX (1 << 20)

struct shmb_pool_options {
	size_t struct_size;
	uint64_t alignment;			  /* of blocks, in bytes: a power of two, at most 4,096; 0 for 64 */
	const struct shmb_region_options *region; /* of the pool's region; NULL for defaults */
};

/*
 * A block that this session holds: filled in by the library, owned by the caller. (region, offset, size) name it in a
 * request, and with the generation shmb_block_take() gets it.
 */
struct shmb_block {
	void *address;	     /* NULL once released */
	uint64_t offset;     /* bytes into the region */
	uint64_t size;	     /* bytes */
	uint32_t index;	     /* 0 to n_blocks - 1 */
	uint32_t generation; /* of the holding: another one with each holder; 22 bits, which wrap around */
	uint64_t internal;
};

/*
 * A pool is a region that is divided into @n_blocks blocks of @block_size bytes (both 1 or more), which this process and
 * all that open it acquire and release in the shared memory, without the broker. A block is held by a session, and comes
 * back by itself when the session ends. Members trust each other: each can write to all of it. Linux 5.14.
 *
 * Creates and registers the region, of which the pool is the owner. The client needs the roles owner and consumer.
 * @options may be NULL. Returns what shmb_region_create() does; SHMB_E_INVALID (counts, alignment, struct_size),
 * SHMB_E_OUT_OF_BOUNDS (@block_size 0, or too much in all), SHMB_E_UNSUPPORTED (SHMB_REGION_OPT_READ_ONLY, huge pages),
 * SHMB_E_NOT_ATTACHED (no lease page), SHMB_E_FORKED.
 */
int shmb_pool_create(struct shmb_client *client, const char *name, uint32_t n_blocks, uint64_t block_size,
		     const struct shmb_pool_options *options, struct shmb_pool **ret);
/*
 * Opens a pool by the name of its region, on which it has a lease for writing as long as it is open. A client that opens
 * a pool again gets the same object, which is then to be freed as many times.
 * Returns what shmb_client_get_memory_info() does; SHMB_E_INVALID (the region is no pool), SHMB_E_VERSION, SHMB_E_STALE (it
 * was made under a broker that is no more), SHMB_E_NOT_ATTACHED, SHMB_E_FORKED.
 */
int shmb_pool_open(struct shmb_client *client, const char *name, struct shmb_pool **ret);
/*
 * Closes: the last time, every block that this session holds in it becomes free, and the one that created it retires the
 * region strictly unless it is kept. To be called before shmb_client_free(). NULL is fine. Always returns NULL.
 */
struct shmb_pool *shmb_pool_free(struct shmb_pool *pool);

/* valid as long as the pool */
const char *shmb_pool_get_name(struct shmb_pool *pool);
/* of the region */
uint64_t shmb_pool_get_generation(struct shmb_pool *pool);
uint32_t shmb_pool_get_n_blocks(struct shmb_pool *pool);
/* bytes */
uint64_t shmb_pool_get_block_size(struct shmb_pool *pool);
/* what shmb_region_retire() and the like take; NULL unless this client created the pool. Never to be freed. */
struct shmb_region *shmb_pool_get_region(struct shmb_pool *pool);
/* how many could be acquired now, those of dead sessions included. Returns 0, SHMB_E_FORKED. */
int shmb_pool_count_free(struct shmb_pool *pool, uint32_t *ret);

/*
 * A block that nobody else holds; its contents are what the last holder left. Waits up to @timeout_ms, 0 to not wait, -1
 * for ever. Any thread. No system call where a block is free; waiters are not served in order.
 * Returns 0; SHMB_E_TIMED_OUT (all are held), SHMB_E_RETIRING (the region was retired, or its owner ended),
 * SHMB_E_REVOKED, SHMB_E_DETACHED (the broker has ended this session), SHMB_E_INVALID (@timeout_ms), SHMB_E_FORKED.
 */
int shmb_pool_acquire(struct shmb_pool *pool, int timeout_ms, struct shmb_block *ret);
/*
 * Gives a block back, on any thread of the process that holds it, also one that was given and not taken. Returns 0;
 * SHMB_E_STALE (it was released or taken before), SHMB_E_PERMISSION (another session holds it), SHMB_E_INVALID (no block
 * of this pool), SHMB_E_FORKED.
 */
int shmb_block_release(struct shmb_pool *pool, struct shmb_block *block);
/*
 * Lets another session take a block that this one holds: send it @block's offset and generation. Until it is taken it
 * is held as before. Returns as shmb_block_release() does.
 */
int shmb_block_give(struct shmb_pool *pool, struct shmb_block *block);
/*
 * Takes a block that was given, by an @offset anywhere in it and its @generation: from here on this session holds it.
 * Returns 0; SHMB_E_STALE (it was taken or released before, or its giver died and it has another holder),
 * SHMB_E_PERMISSION (its holder has not given it), SHMB_E_OUT_OF_BOUNDS (no block is there), SHMB_E_DETACHED, SHMB_E_FORKED.
 */
int shmb_block_take(struct shmb_pool *pool, uint64_t offset, uint32_t generation, struct shmb_block *ret);
/*
 * The block in which @size bytes at @offset of the region are, as it is now; whoever holds it goes on holding it.
 * Returns 0; SHMB_E_OUT_OF_BOUNDS (not within one block), SHMB_E_STALE (nobody holds it), SHMB_E_FORKED.
 */
int shmb_pool_find(struct shmb_pool *pool, uint64_t offset, uint64_t size, struct shmb_block *ret);

/* ---- looking around ---- */

struct shmb_status_filter {
	size_t struct_size;
	const char *name;      /* NULL for any */
	uint32_t prefix;       /* 1: names that begin with name */
	uint32_t uid_plus_one; /* 0 for any */
	uint32_t states;       /* bit per state, 0 for any */
	uint32_t with_holders;
};

struct shmb_holder {
	uint64_t session;
	uint32_t pid;
	uint32_t uid;
	uint32_t leases;
	uint32_t flags; /* 1 through its lease page, 2 by message, 4 detached */
	char comm[17];
};

struct shmb_status { /* valid until the next call on the iterator */
	const char *name;
	const char *container;
	uint64_t generation, size, offset, object, object_size, age_ns, session;
	uint32_t slot, pid, uid, leases, flags; /* uid SHMB_ANY_UID and pid 0 when not visible to this user */
	uint8_t state, kind, access, reserved;
	char comm[17];
	uint32_t n_holders, holders_total;
	const struct shmb_holder *holders;
	const char *key;	 /* "" when it has none or is not visible to this user */
	uint8_t device_uuid[16]; /* of GPU memory, else zero */
};

struct shmb_status_iter;
/* Pages through the broker's regions; each page is a consistent picture, the whole is not. */
int shmb_status_iter_new(struct shmb_client *client, const struct shmb_status_filter *filter,
			 struct shmb_status_iter **ret);
/* 0 with @ret set; @ret NULL at the end */
int shmb_status_iter_next(struct shmb_status_iter *iter, const struct shmb_status **ret);
struct shmb_status_iter *shmb_status_iter_free(struct shmb_status_iter *iter);

struct shmb_client_status {
	const char *container;
	uint64_t session, age_ns, bytes;
	uint32_t pid, uid, gid, roles, rights, regions, maps, leases, unread,
		flags; /* flags: 1 attached, 2 detached, 4 away */
	char comm[17];
};
/* Calls @each for every session that this user may see; a result that is not 0 ends it and is returned. */
int shmb_client_each_client(struct shmb_client *client, int (*each)(void *userdata, const struct shmb_client_status *),
			    void *userdata);

struct shmb_stat {
	const char *name;
	const char *help;
	uint64_t value;
	uint32_t uid;  /* SHMB_ANY_UID: the whole broker */
	uint32_t type; /* 1 counter, 2 gauge */
};
int shmb_client_each_stat(struct shmb_client *client, uint32_t with_accounts,
			  int (*each)(void *userdata, const struct shmb_stat *), void *userdata);
/* what this broker is: version, loop, loop_reason, membarrier, capacity, ... */
int shmb_client_each_info(struct shmb_client *client, int (*each)(void *userdata, const char *key, const char *value),
			  void *userdata);

#define SHMB_EVENT_REGISTERED 0
#define SHMB_EVENT_RETIRING 1
#define SHMB_EVENT_GONE 2
#define SHMB_EVENT_REVOKED 3
#define SHMB_EVENT_OWNER_DIED 4
#define SHMB_EVENT_JOINED 5
#define SHMB_EVENT_LEFT 6
#define SHMB_EVENT_OVERFLOW 7 /* count events were dropped: read the status again */
#define SHMB_EVENT_MASK_ALL 0xff

struct shmb_event {
	uint32_t type;
	uint32_t slot;
	uint64_t generation, session, size, count;
	uint32_t pid, uid;
	char name[SHMB_NAME_MAX + 1];
};
/* bit per event type; the events are then read with shmb_client_next_event() */
int shmb_client_subscribe(struct shmb_client *client, uint32_t mask);
/* the next event; waits up to @timeout ms: SHMB_E_TIMED_OUT. At most 4,096 are kept, then OVERFLOW. */
int shmb_client_next_event(struct shmb_client *client, struct shmb_event *ret, int timeout);
/*
 * Called from whichever library call receives it, without locks held, one event at a time; also for regions that this
 * client has mapped. It may use the client, but not free it.
 */
void shmb_client_set_event_callback(struct shmb_client *client,
				    void (*callback)(void *userdata, const struct shmb_event *), void *userdata);

#ifdef __cplusplus
}
#endif

#endif
