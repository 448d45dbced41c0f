/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "core-entry.h"
#include "core-key.h"

/* the key of what was registered natively, before its name */
#define NATIVE_PREFIX "shmbroker:"

void core_entries_free(CoreEntry *entries) {
	while (entries) {
		CoreEntry *next = entries->next;

		free(entries);
		entries = next;
	}
}

bool core_is_of_door(const struct shmb_status *status) {
	return status->key[0] && (status->flags & SHMB_REGION_KEPT);
}

/* Adds one to @entries. Returns how many bytes it has, or 0 when there is no memory. */
static size_t entry_new(CoreEntry **entries, const struct shmb_status *status) {
	bool door = core_is_of_door(status);
	size_t key_size = door ? strlen(status->key) + 1 : sizeof(NATIVE_PREFIX) - 1;
	size_t name_size = strlen(status->name) + 1;
	size_t size = sizeof(CoreEntry) + key_size + name_size;
	CoreEntry *entry = malloc(size);

	if (!entry)
		return 0;
	*entry = (CoreEntry){
		.kind = status->kind == SHMB_MEMORY_CPU ? CORE_SYSTEM : CORE_CUDA,
		.door = door,
		.uid = status->uid,
		.generation = status->generation,
		.offset = status->offset,
		.size = status->size,
		.next = *entries,
		.name = entry->key + key_size,
	};
	memcpy(entry->device, status->device_uuid, sizeof(entry->device));
	memcpy(entry->key, door ? status->key : NATIVE_PREFIX, key_size);
	memcpy(entry->key + key_size, status->name, name_size);
	*entries = entry;
	return size;
}

/* memory that waits for its registration, as an object in /dev/shm does */
static bool is_of_key(const struct shmb_status *status) {
	return !status->key[0] && strncmp(status->name, CORE_KEY_PREFIX, sizeof(CORE_KEY_PREFIX) - 1) == 0;
}

AnswerCode core_find(Core *core, const char *name, size_t max, CoreEntry **ret, Answer *answer) {
	struct shmb_status_filter filter = { .struct_size = sizeof(filter),
					     .name = name,
					     .states = CORE_STATES_LISTED };
	LinkSession *session = link_get(core->link);
	struct shmb_status_iter *iter;
	const struct shmb_status *status;
	uint64_t began = clock_ns();
	CoreEntry *entries = NULL;
	size_t left = max;
	int r;

	if (!session)
		return core_unavailable(core, answer);
	r = shmb_status_iter_new(session->client, &filter, &iter);
	if (r)
		return core_broker_refused(core, r, (Bytes){}, answer);
	while (!(r = shmb_status_iter_next(iter, &status)) && status) {
		size_t size;

		if (!name && is_of_key(status))
			continue;
		size = entry_new(&entries, status);
		if (!size || size > left) {
			r = size ? -E2BIG : -ENOMEM;
			break;
		}
		left -= size;
	}
	shmb_status_iter_free(iter);
	core_metrics_broker(core->metrics, began);
	if (r == -E2BIG) {
		core_entries_free(entries);
		return answer_set(answer, ANSWER_RESOURCE_EXHAUSTED,
				  "there are more regions than are listed at a time");
	}
	if (r) {
		core_entries_free(entries);
		return core_broker_refused(core, r, (Bytes){}, answer);
	}
	*ret = entries;
	return ANSWER_OK;
}
