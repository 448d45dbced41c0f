/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A thread that ends gives its lane back with the counts as they stand: the next one goes on counting. Threads beyond
 * the lanes share the last.
 */

#include <stdlib.h>
#include <sys/mman.h>

#include "lane.h"

#define CACHE_LANES 4

typedef struct ThreadLane {
	uint64_t client;
	uint32_t lane;
} ThreadLane;

typedef struct ThreadLanes {
	uint32_t n;
	uint32_t room;
	ThreadLane at[];
} ThreadLanes;

uint32_t client_fork_epoch;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool key_is_made;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct shmb_client *all_clients;
static uint64_t last_id;
__thread LaneCache lane_cache __attribute__((tls_model("initial-exec"))) = { .undo = LANE_NO_UNDO };

static struct shmb_client *client_find(uint64_t id) {
	struct shmb_client *client = all_clients;

	while (client && client->id != id)
		client = client->next;
	return client;
}

static void thread_ends(void *data) {
	ThreadLanes *lanes = data;

	lane_cache = (LaneCache){ .undo = LANE_NO_UNDO };
	pthread_mutex_lock(&list_lock);
	for (uint32_t i = 0; i < lanes->n; ++i) {
		struct shmb_client *client = client_find(lanes->at[i].client);

		if (!client)
			continue;
		pthread_mutex_lock(&client->map_lock);
		client->lanes_taken &= ~(UINT64_C(1) << lanes->at[i].lane);
		pthread_mutex_unlock(&client->map_lock);
	}
	pthread_mutex_unlock(&list_lock);
	free(lanes);
}

static void fork_in_child(void) {
	/* whatever a thread of the parent held: these clients are never used again */
	client_fork_epoch++;
	all_clients = NULL;
	pthread_mutex_init(&list_lock, NULL);
	lane_cache = (LaneCache){ .undo = LANE_NO_UNDO };
}

static void make_key(void) {
	key_is_made = !pthread_key_create(&key, thread_ends);
	(void)pthread_atfork(NULL, NULL, fork_in_child);
}

void client_list_add(struct shmb_client *client) {
	pthread_once(&once, make_key);
	pthread_mutex_lock(&list_lock);
	client->id = ++last_id;
	client->fork_epoch = client_fork_epoch;
	client->next = all_clients;
	all_clients = client;
	pthread_mutex_unlock(&list_lock);
}

void client_list_remove(struct shmb_client *client) {
	pthread_mutex_lock(&list_lock);
	for (struct shmb_client **at = &all_clients; *at; at = &(*at)->next) {
		if (*at == client) {
			*at = client->next;
			break;
		}
	}
	pthread_mutex_unlock(&list_lock);
}

/* a thread that outlives many clients does not keep their lanes in mind */
static void thread_forget_dead(void) {
	ThreadLanes *lanes = key_is_made ? pthread_getspecific(key) : NULL;
	uint32_t n = 0;

	if (!lanes || lanes->n < lanes->room)
		return;
	pthread_mutex_lock(&list_lock);
	for (uint32_t i = 0; i < lanes->n; ++i)
		if (client_find(lanes->at[i].client))
			lanes->at[n++] = lanes->at[i];
	pthread_mutex_unlock(&list_lock);
	lanes->n = n;
}

/* Remembers the lane for the thread's end; false without memory: then the shared lane serves. */
static bool thread_remember(uint64_t client, uint32_t lane) {
	ThreadLanes *lanes = pthread_getspecific(key), *bigger;
	uint32_t room;

	if (!lanes || lanes->n == lanes->room) {
		room = lanes ? lanes->room * 2 : CACHE_LANES;
		bigger = realloc(lanes, sizeof(*lanes) + room * sizeof(lanes->at[0]));
		if (!bigger)
			return false;
		if (!lanes)
			bigger->n = 0;
		bigger->room = room;
		if (pthread_setspecific(key, bigger)) {
			if (!lanes)
				free(bigger);
			return false;
		}
		lanes = bigger;
	}
	lanes->at[lanes->n++] = (ThreadLane){ client, lane };
	return true;
}

static uint32_t lane_take(struct shmb_client *client) {
	uint32_t lane, shared = client->lanes - 1;

	thread_forget_dead();
	pthread_mutex_lock(&client->map_lock);
	for (lane = 0; lane < shared && client->lanes_taken >> lane & 1; ++lane)
		;
	if (lane < shared && key_is_made && thread_remember(client->id, lane))
		client->lanes_taken |= UINT64_C(1) << lane;
	else
		lane = shared;
	/* only flagged lanes are read, so the flag comes before the first count */
	atomic_fetch_or(&client->page->lanes_used, UINT64_C(1) << lane);
	pthread_mutex_unlock(&client->map_lock);
	return lane;
}

static uint32_t lane_find(struct shmb_client *client) {
	ThreadLanes *lanes = key_is_made ? pthread_getspecific(key) : NULL;

	for (uint32_t i = 0; lanes && i < lanes->n; ++i)
		if (lanes->at[i].client == client->id)
			return lanes->at[i].lane;
	return lane_take(client);
}

void lane_select(struct shmb_client *client) {
	uint32_t lane = lane_find(client);

	lane_cache = (LaneCache){
		.client = client->id,
		.counters = layout_lane(client->page, lane),
		.undo = LANE_NO_UNDO,
		.plain = client->mode == WIRE_ATTACH_ASYMMETRIC && lane != client->lanes - 1,
	};
}
