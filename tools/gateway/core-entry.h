/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * CoreEntry: a region as the broker tells of it, in a single block, since there may be many. For the core's own files.
 * Entries are a list, which whoever asked for it frees.
 */

#include "core.h"

#define CORE_STATE_BIT(_state) (1U << (_state))
/* those whose name finds them: a lazily retired one until it is idle */
#define CORE_STATES_LISTED (CORE_STATE_BIT(SHMB_STATE_ACTIVE) | CORE_STATE_BIT(SHMB_STATE_LAZY))

typedef struct CoreEntry {
	CoreKind kind;
	bool door; /* it came through this door, or that of another gateway */
	uint32_t uid;
	uint64_t generation;
	uint64_t offset;
	uint64_t size;
	uint8_t device[16];
	struct CoreEntry *next;
	const char *name; /* the end of @key */
	char key[];	  /* that it was given with, then its name; of what has no such key, both in one */
} CoreEntry;

/* NULL is fine. */
void core_entries_free(CoreEntry *entries);
/* whether a region came through this door, or that of another gateway */
bool core_is_of_door(const struct shmb_status *status);

/*
 * What the broker lists: the region called @name, or all but the memory of keys when that is NULL, of @max bytes together.
 * ANSWER_OK with @ret, to be freed by core_entries_free(); RESOURCE_EXHAUSTED (more than @max), what the broker says.
 */
AnswerCode core_find(Core *core, const char *name, size_t max, CoreEntry **ret, Answer *answer);
