/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Validator: one GPU as shmbroker-cuda-helper sees it through the driver. What it is asked may hang; the broker has the
 * deadlines. It makes no context before something needs one, and leaves nothing open but holds.
 */

#include "cuda/cause.h"
#include "cuda/helper.h"
#include "wire/cuda-driver.h"

typedef struct Validator Validator;
typedef struct ValidatorHold ValidatorHold;

struct Validator {
	CudaDriver driver;
	uint8_t uuid[16];
	CUdevice device;
	CUcontext context; /* NULL before one was needed */
	bool is_mig;
	bool has_mps;		 /* a server runs that we do not use */
	bool has_opened_foreign; /* a handle of another user was opened once */
	bool is_broken;		 /* a sticky code was seen: nothing works any more */
	ValidatorHold *holds;
};

/*
 * Loads the driver, starts it and finds the GPU with @uuid; asks @nvml for words about both. Without the MPS server when @bypass_mps. Fills in @reply as
 * READY. Returns 0, or the cause, which is in @reply too.
 */
CudaCause validator_init(Validator *validator, const char *library, const char *nvml, const uint8_t uuid[16],
			 bool bypass_mps, HelperReply *reply);
/* Closes holds and the context, unless the driver is broken. */
void validator_deinit(Validator *validator);
/* Answers CHECK_IPC and CHECK_VMM into @reply, and does DROP. Borrows @fd. */
void validator_handle(Validator *validator, const HelperRequest *request, int fd, HelperReply *reply);
