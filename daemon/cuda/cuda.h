/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Cuda: what the broker may believe about GPU memory that an owner offers.
 *
 * The broker itself never loads libcuda. What can be told without it (lengths, bounds, whether an fd may be CUDA's) is
 * checked here; the rest is asked of shmbroker-cuda-helper, a process for each GPU, which may take as long as it
 * likes, hang or die: an answer comes within the deadlines of the configuration all the same, by a callback of the
 * loop, and nothing of it blocks. In mode `relay` no helper is asked and what it would have found out is the
 * consumers' to check.
 *
 * A CudaCheck is embedded in what waits for it and is filled in by cuda_check_start()'s caller. After
 * cuda_check_start() has returned CUDA_PENDING it belongs to this module until on_done is called or
 * cuda_check_cancel() is; it must not move meanwhile.
 *
 * In mode `hold` a check of a CUDA IPC handle that succeeds leaves the allocation open in the helper, so that it lives
 * on without its owner. Such a hold has a number, not 0, which is given back by cuda_hold_drop() when the broker has
 * no use for the memory any more. A hold ends with its helper, whatever ends that; nobody is told, because nothing
 * that was promised changes: leases go on, and who maps the memory for the first time is refused by the driver.
 */

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "list.h"
#include "loop.h"
#include "wire/protocol.h"

typedef struct Config Config;
typedef struct Cuda Cuda;
typedef struct CudaCheck CudaCheck;

/* key `mode` of [cuda] */
enum {
	CUDA_AUTO,     /* validate where a helper can work, else refuse */
	CUDA_OFF,      /* refuse */
	CUDA_RELAY,    /* without a helper: only lengths and bounds are checked */
	CUDA_VALIDATE, /* every registration is tried by the helper */
	CUDA_HOLD,     /* and CUDA IPC allocations stay open there */
};

#define CUDA_PENDING (-EINPROGRESS)

struct CudaCheck {
	/* the question; what it points to is copied or borrowed until the check is over */
	uint8_t kind;			  /* WIRE_KIND_CUDA_IPC or WIRE_KIND_CUDA_VMM */
	uint8_t access;			  /* WIRE_ACCESS_* that consumers may ask for */
	uint8_t device[16];		  /* UUID */
	uint8_t handle[WIRE_HANDLE_SIZE]; /* of CUDA_IPC */
	int fd;				  /* of CUDA_VMM, borrowed; else -EBADF */
	uint64_t offset;		  /* bytes into the allocation */
	uint64_t size;			  /* bytes, 1 or more */
	uint32_t owner_pid;		  /* hint: in the owner's own namespace, 0 for unknown */
	uint64_t owner_pid_namespace;	  /* hint: inode, 0 for unknown */
	uint32_t uid;			  /* of the peer that offers it */
	/* called once, from the loop, unless cuda_check_start() itself has answered; it may free the check */
	void (*on_done)(CudaCheck *check, int result);

	/* question and answer: bytes of the allocation, 0 while unknown (CUDA_IPC only); right when the result is 0 */
	uint64_t object_size;
	/* the answer */
	bool is_validated;	 /* false when nobody but the owner vouches for it (mode relay) */
	uint64_t hold;		 /* 0 for none; the caller's to drop */
	char why[WIRE_TEXT_MAX]; /* when refused: cause and remedy, with the driver's code and name where there is one */

	/* this module's own */
	Cuda *cuda; /* not NULL while it is pending */
	ListLink link;
	LoopTimer timer;
	void *helper;
};

/*
 * Makes the broker's GPU side; starts no process. Borrows @loop, and @config, until cuda_configure() gives another
 * one. Returns 0 or -ENOMEM.
 */
int cuda_new(Cuda **ret, Loop *loop, const Config *config);
/* Ends all helpers; checks that are pending are dropped without an answer. */
Cuda *cuda_free(Cuda *cuda);
/* The configuration was read again: new checks follow it. */
void cuda_configure(Cuda *cuda, const Config *config);

/*
 * Answers at once, or begins to. Returns 0 (accepted); a SHMB_E_* with a sentence in check->why; CUDA_PENDING when
 * on_done will tell, with the same values as a result; or -ENOMEM. SHMB_E_OUT_OF_BOUNDS: offset and size are not within
 * the allocation; SHMB_E_BAD_FD: the fd is no CUDA allocation; SHMB_E_INVALID: the handle is none; SHMB_E_NO_DEVICE: the
 * GPU is not visible to the broker; SHMB_E_UNSUPPORTED: off, no driver, no helper, or not on such a GPU;
 * SHMB_E_PERMISSION: another user's or another GPU instance's; SHMB_E_TIMED_OUT; SHMB_E_AGAIN: the helper died or is
 * being replaced.
 */
int cuda_check_start(Cuda *cuda, CudaCheck *check);
/* on_done will not be called any more; does nothing for a check that is not pending, a zeroed one included */
void cuda_check_cancel(CudaCheck *check);
/* Gives up a hold; 0 is ignored. */
void cuda_hold_drop(Cuda *cuda, uint64_t hold);

/*
 * What @fd says about itself without any file system being asked: may it be a CUDA allocation? It is a character device
 * of the driver's, unless [cuda] check_fd = no, and never memory that F_GET_SEALS answers for then. Returns 0, or
 * SHMB_E_BAD_FD with a sentence in @why (WIRE_TEXT_MAX).
 */
int cuda_fd_check(const Cuda *cuda, int fd, char *why);

/* one line for INFO and status: the mode in force and why it is that */
void cuda_describe(const Cuda *cuda, char *ret, size_t size);
/* GPU memory can be registered here at all */
bool cuda_is_on(const Cuda *cuda);
