/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The end of a region's life: retire, scan, gone. What is retired goes on the broker's scan list; one scan takes
 * all of the list with one barrier, and reads the pages of each region's own mappers only.
 */

#include <stdio.h>
#include <string.h>

#include "broker.h"
#include "event.h"
#include "lease.h"
#include "log.h"
#include "region.h"
#include "session.h"
#include "wait.h"
#include "wire/barrier.h"

/* far longer than what a processor has stored can stay its own */
#define SECOND_LOOK_NS UINT64_C(10000000)

void region_rescan(Region *region) {
	if (region->scanning || region->state == WIRE_STATE_ACTIVE)
		return;
	region->scanning = true;
	list_append(&region->broker->scan, &region->scan_link);
}

static void region_set_state(Region *region, uint32_t state) {
	registry_set_state(&region->broker->registry, region, state);
	ledger_set_region_state(&region->broker->ledger, region);
}

/* a holder that never lets go loses its session, where the configuration says so */
static void evict(Region *region, Session *holder) {
	session_log(holder, LOG_RETIRE_TIMEOUT, "it did not let go of region \"%s\" within retire_timeout",
		    region->name);
	session_disconnect(holder, SHMB_E_TIMED_OUT, "it held a lease beyond retire_timeout");
}

static void on_retire_timeout(LoopTimer *timer) {
	Region *region = container_of(timer, Region, retire_timer);

	list_for_each (link, &region->leases)
		evict(region, container_of(link, Lease, region_link)->session);
	list_for_each (link, &region->maps) {
		Map *map = container_of(link, Map, region_link);

		if (map_count(map))
			evict(region, map->session);
	}
}

static void region_arm_timeout(Region *region) {
	uint64_t timeout = region->broker->config->retire_timeout_ns;

	if (!timeout || region->retire_timer.at_ns)
		return;
	region->retire_timer.on_time = on_retire_timeout;
	loop_timer_set(region->broker->loop, &region->retire_timer, loop_now(region->broker->loop) + timeout);
}

/* who holds a revoked slot pays for it; who holds too many is detached */
static void region_charge_holders(Region *region) {
	list_for_each (link, &region->maps) {
		Map *map = container_of(link, Map, region_link);

		if (!map_count(map) || map->charge_revoked.account)
			continue;
		if (account_charge(&map->charge_revoked, map->session->account, ACCOUNT_REVOKED, 1))
			session_disconnect(map->session, SHMB_E_QUOTA, "it holds too many revoked regions");
	}
}

static uint64_t region_revoke(Region *region, uint32_t mode, char *why) {
	Broker *broker = region->broker;
	uint64_t discarded = 0;
	char fields[300];

	snprintf(fields, sizeof(fields), "SHMBROKER_REGION=%s", region->name);
	/* so that it is not one of the others that discard spares */
	list_remove(&region->object_link);
	if (mode == WIRE_MODE_DISCARD) {
		discarded = object_discard(region->object, region->offset, region->size, why);
		log_write(LOG_DISCARD, region->owner_uid, fields,
			  "%llu of %llu bytes of region \"%s\" were given back%s%s", (unsigned long long)discarded,
			  (unsigned long long)region->size, region->name, why[0] ? ": " : "", why);
	}
	registry_unname(&broker->registry, region);
	if (region->object->cuda) {
		region->pinned = region->object->size;
		memcpy(region->pinned_device, region->object->cuda->record.device, sizeof(region->pinned_device));
	}
	region_set_state(region, WIRE_STATE_REVOKED);
	registry_gone(&broker->registry);
	broker->stats.revoked++;
	broker->stats.discarded_bytes += discarded;

	event_region(WIRE_EVENT_REVOKED, region);
	log_write(LOG_REVOKED, region->owner_uid, fields, "region \"%s\" of uid %u was revoked", region->name,
		  region->owner_uid);
	for (ListLink *link; (link = list_first(&region->leases));)
		lease_revoke(container_of(link, Lease, region_link));
	list_remove(&region->owner_link);
	if (region->owner) {
		region->owner->n_regions--;
		region->owner->n_bytes -= region->size;
		region->owner = NULL;
	}
	region->object = object_unref(region->object);
	account_refund(&region->charge);
	waits_region_gone(region);
	return discarded;
}

uint64_t region_retire(Region *region, uint32_t mode, char *why) {
	uint64_t discarded = 0;
	char ignored[WIRE_TEXT_MAX];

	if (region->state == WIRE_STATE_REVOKED)
		return 0;
	region->broker->stats.retired += region->state == WIRE_STATE_ACTIVE;
	switch (mode) {
	case WIRE_MODE_STRICT:
		if (region->state == WIRE_STATE_RETIRING)
			break;
		registry_unname(&region->broker->registry, region);
		region_set_state(region, WIRE_STATE_RETIRING);
		event_region(WIRE_EVENT_RETIRING, region);
		break;
	case WIRE_MODE_LAZY:
		if (region->state == WIRE_STATE_ACTIVE) {
			region_set_state(region, WIRE_STATE_LAZY);
			event_region(WIRE_EVENT_RETIRING, region);
		}
		break;
	default:
		discarded = region_revoke(region, mode, why ?: ignored);
		break;
	}
	region_rescan(region);
	return discarded;
}

static bool region_is_idle(Region *region) {
	if (!list_is_empty(&region->leases))
		return false;
	list_for_each (link, &region->maps) {
		Map *map = container_of(link, Map, region_link);

		region->broker->stats.pages_scanned += map->session->attached;
		if (map_count(map))
			return false;
	}
	return true;
}

/* some of its mappers count releases without fences */
static bool region_is_asymmetric(const Region *region) {
	list_for_each (link, &region->maps) {
		const Session *session = container_of(link, Map, region_link)->session;

		if (session->attached && session->page.shape.mode == WIRE_ATTACH_ASYMMETRIC)
			return true;
	}
	return false;
}

/*
 * The broker's half of the ordering: the states were stored, now what consumers did before they could see them is
 * read. The barrier is for releases that were counted without a fence; those that it misses are found by the second
 * look.
 */
static void scan_barrier(Broker *broker, List *regions) {
	bool asymmetric = false;

	list_for_each (link, regions) {
		Region *region = container_of(link, Region, scan_link);

		registry_begin_scan(&broker->registry, region);
		asymmetric |= region_is_asymmetric(region);
	}
	atomic_thread_fence(memory_order_seq_cst);
	if (!asymmetric)
		return;
	broker->stats.barriers++;
	(void)barrier_global();
}

/* ---- the second look, for which layout.h has the reason ---- */

static void on_second_look(LoopTimer *timer) {
	Broker *broker = container_of(timer, Broker, second_look_timer);
	uint64_t now = loop_now(broker->loop);

	for (ListLink *link; (link = list_first(&broker->second_looks));) {
		Region *region = container_of(link, Region, second_look_link);

		if (region->second_look_ns > now) {
			loop_timer_set(broker->loop, timer, region->second_look_ns);
			break;
		}
		list_remove(link);
		region->second_look = SECOND_LOOK_NOW;
		region_rescan(region);
	}
}

/*
 * Once in a region's life: who releases from now on sees that it is over, and says so. All wait for the same time, and
 * so the list is in the order of time.
 */
static void region_look_again_later(Region *region) {
	Broker *broker = region->broker;

	if (region->second_look == SECOND_LOOK_NOW)
		region->second_look = SECOND_LOOK_DONE;
	if (region->second_look != SECOND_LOOK_NEEDED || !region_is_asymmetric(region))
		return;
	region->second_look = SECOND_LOOK_LATER;
	region->second_look_ns = loop_now(broker->loop) + SECOND_LOOK_NS;
	list_append(&broker->second_looks, &region->second_look_link);
	if (broker->second_look_timer.at_ns)
		return;
	broker->second_look_timer.on_time = on_second_look;
	loop_timer_set(broker->loop, &broker->second_look_timer, region->second_look_ns);
}

static void region_gone(Region *region) {
	region->broker->stats.gone++;
	region->broker->stats.releases_missed += region->second_look == SECOND_LOOK_NOW;
	if (region->state != WIRE_STATE_REVOKED) {
		/* who waits for it is answered first: its mappers, who are told, may be many */
		waits_region_gone(region);
		event_region(WIRE_EVENT_GONE, region);
	}
	region_free(region);
}

static void list_move(List *from, List *to) {
	list_init(to);
	for (ListLink *link; (link = list_first(from));) {
		list_remove(link);
		list_append(to, link);
	}
}

void regions_scan(Broker *broker) {
	List first, second;

	while (!list_is_empty(&broker->scan)) {
		broker->stats.scans++;
		list_move(&broker->scan, &first);
		list_init(&second);
		scan_barrier(broker, &first);
		for (ListLink *link; (link = list_first(&first));) {
			Region *region = container_of(link, Region, scan_link);

			list_remove(link);
			region->scanning = false;
			if (!region_is_idle(region)) {
				region_look_again_later(region);
				if (region->state == WIRE_STATE_RETIRING)
					region_arm_timeout(region);
				else if (region->state == WIRE_STATE_REVOKED)
					region_charge_holders(region);
			} else if (region->state == WIRE_STATE_LAZY) {
				/*
				 * Leases are granted until the state says otherwise: say so, then look again. The
				 * ledger is not told: it may be taken back.
				 */
				registry_set_state(&broker->registry, region, WIRE_STATE_RETIRING);
				list_append(&second, link);
			} else {
				region_gone(region);
			}
		}
		if (list_is_empty(&second))
			continue;
		scan_barrier(broker, &second);
		for (ListLink *link; (link = list_first(&second));) {
			Region *region = container_of(link, Region, scan_link);

			list_remove(link);
			if (region_is_idle(region)) {
				region_gone(region);
				continue;
			}
			region_look_again_later(region);
			registry_set_state(&broker->registry, region, WIRE_STATE_LAZY);
		}
	}
}
