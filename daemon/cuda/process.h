/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * CudaProcess: one shmbroker-cuda-helper, from its start until it was waited for. Started by posix_spawn(), so that
 * nothing of the broker is forked into it; it has nothing of the broker's but a socket, its standard error and its
 * environment. No call blocks on it.
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "config.h"
#include "cuda/helper.h"
#include "loop.h"

typedef struct CudaProcess CudaProcess;

struct CudaProcess {
	ListLink link; /* the caller's */
	Loop *loop;
	LoopConn conn;
	LoopPoll poll;
	LoopTimer timer; /* when one that was hung up on is killed */
	void *userdata;
	uint32_t number; /* the caller's */
	uint32_t n_holds;
	pid_t pid;
	int pidfd;
	bool has_conn;
	bool is_ready;
	bool is_over; /* waited for; @how says what it came to */
	char how[48]; /* "was killed by signal 9" */
	/* a message of the right size; @process may be killed or hung up on, not freed */
	void (*on_reply)(CudaProcess *process, const HelperReply *reply);
	/* It has ended, and every message of it was seen; the callee frees it. Not called after cuda_process_free(). */
	void (*on_end)(CudaProcess *process);
};

/*
 * Starts one for the GPU with @uuid. The caller fills in the callbacks before it returns to the loop. Returns 0 or -errno:
 * -ENOENT, -EACCES: there is no such program.
 */
int cuda_process_new(CudaProcess **ret, Loop *loop, const Config *config, const uint8_t uuid[16]);
/* kills it unless it is over, and waits for nothing */
CudaProcess *cuda_process_free(CudaProcess *process);
/* Borrows @fd, negative for none. Returns 0 or -errno. */
int cuda_process_send(CudaProcess *process, const HelperRequest *request, int fd);
/* Ends it in order; when that takes longer than @ns, it is killed. No reply is seen any more. */
void cuda_process_hang_up(CudaProcess *process, uint64_t ns);
void cuda_process_kill(CudaProcess *process);
/* the program that is started */
const char *cuda_process_path(const Config *config);
