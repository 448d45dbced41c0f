/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the key of a system region names: POSIX shared memory, which key.h opens, or where there is none of that name a
 * region of the broker. For the core's own files.
 */

#include "core.h"

/* the name of the region that is the memory of a key, before the key: the Python module's drop-in makes such */
#define CORE_KEY_PREFIX "shm:"

/* a part of a file */
typedef struct CoreKeyMemory {
	int fd; /* of whoever has this */
	uint64_t offset;
	uint64_t size;
} CoreKeyMemory;

/*
 * Checks the key that the region @name is to be registered with. Sets @ret to the part of it after its slashes, which are
 * not significant. INVALID_ARG.
 */
AnswerCode core_key_check(const char *name, Bytes key, Bytes *ret, Answer *answer);
/*
 * Opens the memory of @key, of which core_key_check() made @plain, for @caller. INTERNAL when it cannot be opened; the log
 * says why. UNAVAILABLE.
 */
AnswerCode core_key_open(Core *core, const Caller *caller, Bytes key, Bytes plain, CoreKeyMemory *ret, Answer *answer);
