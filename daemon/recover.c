/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "broker.h"
#include "kill-point.h"
#include "lease.h"
#include "log.h"
#include "recover.h"
#include "region.h"
#include "session.h"
#include "wire/fd.h"
#include "wire/name.h"
#include "wire/range.h"

typedef struct Known {
	uint64_t id;
	uint32_t index;
	void *object;
} Known;

typedef struct Recovery {
	Broker *broker;
	Ledger *ledger;
	LedgerHeader *header;
	Known *sessions; /* by id, as what follows */
	size_t n_sessions;
	Known *objects;
	size_t n_objects;
	uint32_t n_regions;
	uint32_t n_maps;
	uint32_t n_leases;
	uint32_t n_half;	/* records that were being written */
	uint32_t n_unknown_fds; /* closed: no record is theirs */
	uint32_t n_mended;	/* slots of the registry that said something else */
	uint32_t n_lost;	/* regions without their fd, or that make no sense */
} Recovery;

static int known_compare(const void *a, const void *b) {
	uint64_t x = ((const Known *)a)->id, y = ((const Known *)b)->id;

	return x < y ? -1 : x > y;
}

static void *known_find(const Known *known, size_t n, uint64_t id) {
	const Known key = { .id = id }, *found = n ? bsearch(&key, known, n, sizeof(key), known_compare) : NULL;

	return found ? found->object : NULL;
}

static Session *find_session(const Recovery *recovery, uint64_t id) {
	return known_find(recovery->sessions, recovery->n_sessions, id);
}

static Object *find_object(const Recovery *recovery, uint64_t id) {
	return known_find(recovery->objects, recovery->n_objects, id);
}

/* ---- what there is ---- */

static NotifyFd *find_fd(NotifyFds *fds, const char *name) {
	for (size_t i = 0; i < fds->n; ++i)
		if (fds->items[i].fd >= 0 && !strcmp(fds->items[i].name, name))
			return &fds->items[i];
	return NULL;
}

/* the number of a segment's name, or 0 */
static uint64_t segment_number(const char *name) {
	size_t n = strlen(KEEPER_SEGMENT);
	uint64_t number;
	char *end;

	if (strncmp(name, KEEPER_SEGMENT, n) || name[n] < '1' || name[n] > '9')
		return 0;
	errno = 0;
	number = strtoull(name + n, &end, 10);
	return errno || *end ? 0 : number;
}

static int recovery_open(Recovery *recovery, int registry_fd, int ledger_fd, const char **ret_why) {
	Broker *broker = recovery->broker;
	int r;

	r = ledger_open(&broker->ledger, ledger_fd, ret_why);
	if (r)
		return r;
	recovery->header = broker->ledger.header;
	if (recovery->header->n_recoveries >= RECOVER_TRIES) {
		*ret_why = "brokers that took it over did not last";
		return -EINVAL;
	}
	recovery->header->n_recoveries++;
	kill_point();
	r = registry_open(&broker->registry, registry_fd, recovery->header->generation, ret_why);
	if (r)
		return r;
	if (broker->registry.shape.epoch != recovery->header->epoch ||
	    broker->registry.shape.capacity != recovery->header->region_capacity ||
	    broker->registry.shape.session_capacity != recovery->header->session_capacity)
		*ret_why = "registry and ledger do not belong together";
	else if (atomic_load(&broker->registry.header->state) != LAYOUT_OPEN)
		*ret_why = "the registry is closed";
	return *ret_why ? -EINVAL : 0;
}

/* ---- sessions ---- */

static int restore_sessions(Recovery *recovery) {
	recovery->sessions = calloc(recovery->header->n_used_sessions + 1, sizeof(*recovery->sessions));
	if (!recovery->sessions)
		return -ENOMEM;
	for (uint32_t i = 0; i < recovery->header->n_used_sessions; ++i) {
		uint64_t id = ledger_session(recovery->ledger, i)->id;

		/* one that was never given would be given again */
		if (id && id <= recovery->header->last_session)
			recovery->sessions[recovery->n_sessions++] = (Known){ .id = id, .index = i };
	}
	/* lists are paged by id */
	qsort(recovery->sessions, recovery->n_sessions, sizeof(*recovery->sessions), known_compare);
	for (size_t i = 0; i < recovery->n_sessions; ++i) {
		recovery->sessions[i].object = session_restore(recovery->broker, recovery->sessions[i].index);
		if (!recovery->sessions[i].object)
			return -ENOMEM;
	}
	return 0;
}

static KeeperEntry *take_pidfd(Recovery *recovery, Session *session, int fd) {
	uint64_t inode = ledger_session(recovery->ledger, session->index)->pidfd_inode;
	struct stat st;

	if (session->peer.pidfd >= 0 || fstat(fd, &st) < 0 || (uint64_t)st.st_ino != inode)
		return NULL;
	return session_set_pidfd(session, fd) ? NULL : &session->parked_pidfd;
}

static KeeperEntry *take_page(Recovery *recovery, Session *session, int fd) {
	const LedgerSession *at = ledger_session(recovery->ledger, session->index);
	struct stat st;

	/* a page whose ATTACH was not completed will be asked for again */
	if (session->page.header || !(at->flags & LEDGER_SESSION_ATTACHED) || fstat(fd, &st) < 0 ||
	    (uint64_t)st.st_ino != at->page_inode ||
	    page_open(&session->page, session, fd, recovery->header->region_capacity, at->page_lanes, at->page_mode))
		return NULL;
	account_take(&session->page.charge, session->account, ACCOUNT_FDS, 1);
	session->attached = true;
	return &session->page.parked;
}

/* when all fds are there */
static int settle_sessions(Recovery *recovery) {
	for (size_t i = 0; i < recovery->n_sessions; ++i) {
		Session *session = recovery->sessions[i].object;
		const LedgerSession *at = ledger_session(recovery->ledger, session->index);
		int r;

		if (session->dying)
			continue;
		if (session->peer.pidfd < 0) {
			r = session_set_pidfd(session, -EBADF);
			if (r)
				return r;
		}
		/* what it holds cannot be known: consumers see that its entry in the session table is gone */
		if (at->flags & LEDGER_SESSION_ATTACHED && !session->attached) {
			session_log(session, LOG_RECOVERY_LOSS, "its lease page was not recovered");
			session_end(session);
		}
	}
	return 0;
}

/* ---- objects ---- */

static int restore_objects(Recovery *recovery) {
	Broker *broker = recovery->broker;

	recovery->objects = calloc(recovery->header->n_used_objects + 1, sizeof(*recovery->objects));
	if (!recovery->objects)
		return -ENOMEM;
	for (uint32_t i = 0; i < recovery->header->n_used_objects; ++i) {
		const LedgerObject *at = ledger_object(recovery->ledger, i);
		Account *account;
		Object *object;

		if (!at->id || at->id > recovery->header->last_object || at->n_acl > WIRE_ACL_MAX ||
		    at->kind < WIRE_KIND_MEMORY || at->kind > WIRE_KIND_CUDA_VMM)
			continue;
		account = account_get(&broker->accounts, at->uid);
		if (!account)
			return -ENOMEM;
		object = objects_restore(&broker->objects, i, account);
		account_put(account);
		if (!object)
			return -ENOMEM;
		recovery->objects[recovery->n_objects++] = (Known){ .id = at->id, .index = i, .object = object };
	}
	qsort(recovery->objects, recovery->n_objects, sizeof(*recovery->objects), known_compare);
	return 0;
}

static bool is_the_file(const LedgerObject *at, int fd, uint32_t mode) {
	struct stat st;
	int flags = fcntl(fd, F_GETFL);

	return flags >= 0 && (uint32_t)(flags & O_ACCMODE) == mode && !fstat(fd, &st) &&
	       (uint64_t)st.st_dev == at->device && (uint64_t)st.st_ino == at->inode &&
	       /* of memory that is not sealed the owner may have cut something off since */
	       ((uint64_t)st.st_size >= at->size || at->flags & WIRE_REGION_UNSEALED);
}

static KeeperEntry *take_object(Recovery *recovery, Object *object, int *fds, size_t n_fds) {
	const LedgerObject *at = ledger_object(recovery->ledger, object->ledger_index);

	if (object->fd >= 0)
		return NULL;
	if (object->cuda) {
		/* nothing of such an fd tells more; ids of objects are never used again */
		if (object->kind != WIRE_KIND_CUDA_VMM || n_fds != 1 ||
		    cuda_fd_check(recovery->broker->cuda, fds[0], (char[WIRE_TEXT_MAX]){}))
			return NULL;
	} else if (!is_the_file(at, fds[0], at->mode) || (n_fds > 1 && !is_the_file(at, fds[1], O_RDONLY))) {
		return NULL;
	}
	object_set_fds(object, fds[0], n_fds > 1 ? fds[1] : -EBADF);
	return &object->parked;
}

/* ---- fds ---- */

static KeeperEntry *take_entry(void *userdata, uint32_t kind, uint64_t id, int *fds, size_t n_fds) {
	Recovery *recovery = userdata;
	KeeperEntry *entry = NULL;
	Session *session = kind == KEEPER_OBJECT ? NULL : find_session(recovery, id);
	Object *object = kind == KEEPER_OBJECT ? find_object(recovery, id) : NULL;

	if (object && n_fds)
		entry = take_object(recovery, object, fds, n_fds);
	else if (session && kind == KEEPER_PIDFD && n_fds == 1)
		entry = take_pidfd(recovery, session, fds[0]);
	else if (session && kind == KEEPER_PAGE && n_fds == 1)
		entry = take_page(recovery, session, fds[0]);
	recovery->n_unknown_fds += !entry;
	return entry;
}

static int read_segments(Recovery *recovery, NotifyFds *fds) {
	for (size_t i = 0; i < fds->n; ++i) {
		uint64_t number = segment_number(fds->items[i].name);
		int r;

		if (!number || fds->items[i].fd < 0)
			continue;
		if (recovery->header->last_segment < number)
			recovery->header->last_segment = number;
		r = keeper_read(&recovery->broker->keeper, number, steal_fd(&fds->items[i].fd), take_entry, recovery);
		/* what may be there the next time must not be given up */
		if (r == -EMFILE || r == -ENFILE || r == -ENOMEM || r == -ENOBUFS)
			return r;
		if (r)
			log_write(LOG_RECOVERY_LOSS, LOG_NO_UID, NULL, "what is parked as \"%s\" is damaged: %s",
				  fds->items[i].name, strerror(-r));
	}
	return 0;
}

/* ---- regions ---- */

/* the object of the record, NULL for a revoked region; false when the record makes no sense */
static bool region_object(const Recovery *recovery, uint32_t slot, const LedgerRegion *at, Object **ret) {
	const char *why;
	Object *object;

	*ret = NULL;
	/* others are told of them */
	if (wire_name_check(at->name, at->name_length, &why) ||
	    wire_key_check(ledger_key(recovery->ledger, slot), at->key_length, &why))
		return false;
	if (at->state > WIRE_STATE_RETIRING)
		return false;
	/* a generation that was never given would be given again */
	if (at->generation > recovery->header->generation ||
	    at->generation >> LAYOUT_COUNTER_BITS != recovery->header->epoch ||
	    at->access & ~(WIRE_ACCESS_READ | WIRE_ACCESS_WRITE))
		return false;
	if (at->state == WIRE_STATE_REVOKED)
		return true;
	if (at->object >= recovery->header->n_used_objects)
		return false;
	object = find_object(recovery, ledger_object(recovery->ledger, at->object)->id);
	if (!object || !object_is_whole(object) || at->kind != object->kind ||
	    !range_within(at->offset, at->size, object->size))
		return false;
	/* nobody's region shows the memory of another */
	if (object->key.uid != at->owner_uid || object->key.session != at->owner_session)
		return false;
	*ret = object;
	return true;
}

static void region_is_lost(Recovery *recovery, LedgerRegion *at) {
	recovery->n_lost++;
	log_write(LOG_RECOVERY_LOSS, LOG_NO_UID, NULL, "region \"%.*s\" of uid %u is lost: %s",
		  at->name_length > WIRE_NAME_MAX ? 0 : (int)at->name_length, at->name, at->owner_uid,
		  "its record is damaged, or its memory was not recovered");
	kill_point();
	at->generation = 0;
}

static int restore_region(Recovery *recovery, uint32_t slot) {
	Broker *broker = recovery->broker;
	LedgerRegion *at = ledger_region(recovery->ledger, slot);
	Session *owner = at->owner_session ? find_session(recovery, at->owner_session) : NULL;
	Region *region, *other;
	Account *account;
	Object *object;
	bool has_name;

	if (!region_object(recovery, slot, at, &object)) {
		region_is_lost(recovery, at);
		return 0;
	}
	account = account_get(&broker->accounts, at->owner_uid);
	if (!account)
		return -ENOMEM;
	region = region_restore(broker, slot, object, owner && object ? owner : NULL, account);
	account_put(account);
	if (!region)
		return -ENOMEM;
	region->slot = slot;
	has_name = region->state == WIRE_STATE_ACTIVE || region->state == WIRE_STATE_LAZY;
	other = has_name ? registry_find(&broker->registry, region->name, region->name_length) : NULL;
	/* a REPLACE that was published: the older one is retired below */
	if (other && other->generation > region->generation)
		has_name = false;
	else if (other)
		registry_unname(&broker->registry, other);
	recovery->n_mended += registry_restore(&broker->registry, region, has_name);
	recovery->n_regions++;
	return 0;
}

static int restore_regions(Recovery *recovery) {
	Registry *registry = &recovery->broker->registry;
	RegistrySessions sessions = {
		.words = calloc(recovery->header->session_capacity, sizeof(*sessions.words)),
		.used = calloc(recovery->header->session_capacity, sizeof(*sessions.used)),
	};
	int r = sessions.words && sessions.used ? 0 : -ENOMEM;

	for (uint32_t slot = 0; !r && slot < recovery->header->n_used_regions; ++slot)
		if (ledger_region(recovery->ledger, slot)->generation)
			r = restore_region(recovery, slot);
	for (size_t i = 0; !r && i < recovery->n_sessions; ++i) {
		const Session *session = recovery->sessions[i].object;

		sessions.used[session->index] = true;
		sessions.words[session->index] = session->state == SESSION_DETACHED || session->dying ? 0 : session->id;
	}
	if (!r)
		recovery->n_mended += registry_settle(registry, recovery->header->n_used_regions, &sessions);
	free(sessions.words);
	free(sessions.used);
	return r;
}

/* ---- who has what ---- */

static int restore_maps(Recovery *recovery) {
	for (uint32_t i = 0; i < recovery->header->n_used_maps; ++i) {
		LedgerMap *at = ledger_map(recovery->ledger, i);
		Session *session = at->session ? find_session(recovery, at->session) : NULL;
		Region *region = session ? registry_at(&recovery->broker->registry, at->slot, at->generation) : NULL;
		int r;

		if (!region || map_find(session, region)) {
			kill_point();
			at->session = 0;
			continue;
		}
		r = map_restore(session, region, (uint8_t)at->access, i);
		if (r)
			return r;
		recovery->n_maps++;
	}
	return 0;
}

static int restore_leases(Recovery *recovery) {
	for (uint32_t i = 0; i < recovery->header->n_used_leases; ++i) {
		LedgerLease *at = ledger_lease(recovery->ledger, i);
		Session *session = at->id ? find_session(recovery, at->session) : NULL;
		Region *region = session ? registry_at(&recovery->broker->registry, at->slot, at->generation) : NULL;
		int r;

		if (!session || at->id > recovery->header->last_lease || lease_find(session, at->id)) {
			kill_point();
			at->id = 0;
			continue;
		}
		/* revoked: its release will say so */
		if (region && region->state == WIRE_STATE_REVOKED)
			region = NULL;
		r = lease_restore(session, region, i);
		if (r)
			return r;
		recovery->n_leases++;
	}
	return 0;
}

/* what is due since, or was due before */
static void settle_regions(Recovery *recovery) {
	Registry *registry = &recovery->broker->registry;

	for (uint32_t slot = 0; slot < registry->n_used; ++slot) {
		Region *region = registry->regions[slot];

		if (!region)
			continue;
		if (region->state == WIRE_STATE_ACTIVE || region->state == WIRE_STATE_LAZY) {
			if (!region->named || (!region->owner && !(region->flags & WIRE_REGION_KEPT)))
				region_retire(region, WIRE_MODE_STRICT, NULL);
		}
		region_rescan(region);
	}
}

/* what helpers held was theirs, and they have ended with the last broker */
static void hold_again(Recovery *recovery) {
	if (recovery->broker->config->cuda_mode != CUDA_HOLD)
		return;
	for (size_t i = 0; i < recovery->n_objects; ++i) {
		Object *object = recovery->objects[i].object;

		if (object->kind == WIRE_KIND_CUDA_IPC && !list_is_empty(&object->regions))
			object_hold_again(object);
	}
}

static void count_fds(Recovery *recovery) {
	Broker *broker = recovery->broker;

	for (size_t i = 0; i < recovery->n_sessions; ++i) {
		const Session *session = recovery->sessions[i].object;

		broker->n_recovered_fds += (session->peer.pidfd >= 0) + (session->page.fd >= 0);
	}
	for (size_t i = 0; i < recovery->n_objects; ++i) {
		const Object *object = recovery->objects[i].object;

		broker->n_recovered_fds += (object->fd >= 0) + (object->read_only_fd >= 0);
	}
}

static void recovery_log(const Recovery *recovery) {
	char fields[160];

	snprintf(fields, sizeof(fields),
		 "SHMBROKER_RECOVERED_REGIONS=%u\nSHMBROKER_RECOVERED_SESSIONS=%zu\nSHMBROKER_LOST_REGIONS=%u",
		 recovery->n_regions, recovery->n_sessions, recovery->n_lost);
	log_write(LOG_RECOVERED, LOG_NO_UID, fields,
		  "recovered %u regions, %zu pieces of memory, %zu sessions, %u maps, %u leases by message; "
		  "%u records half written, %u slots mended, %u parked fds of nobody, %u regions lost",
		  recovery->n_regions, recovery->n_objects, recovery->n_sessions, recovery->n_maps, recovery->n_leases,
		  recovery->n_half, recovery->n_mended, recovery->n_unknown_fds, recovery->n_lost);
}

static int recovery_run(Recovery *recovery, NotifyFds *fds) {
	Broker *broker = recovery->broker;
	LedgerHeader *header = recovery->header;
	int r;

	recovery->n_half = atomic_load(&header->redo) != LEDGER_IDLE;
	atomic_store(&header->redo, LEDGER_IDLE);
	kill_point();
	r = restore_sessions(recovery);
	if (!r)
		r = restore_objects(recovery);
	if (!r)
		r = read_segments(recovery, fds);
	if (!r)
		r = settle_sessions(recovery);
	if (!r)
		r = restore_regions(recovery);
	if (!r)
		r = restore_maps(recovery);
	if (!r)
		r = restore_leases(recovery);
	if (r)
		return r;
	ledger_find_free(recovery->ledger);
	broker->last_session = header->last_session;
	broker->last_lease = header->last_lease;
	broker->objects.last_id = header->last_object;
	settle_regions(recovery);
	sessions_check_detached(broker);
	count_fds(recovery);
	hold_again(recovery);
	/* from here on an object lives as long as its regions */
	for (size_t i = 0; i < recovery->n_objects; ++i)
		object_unref(recovery->objects[i].object);
	recovery->n_objects = broker->objects.n;
	return 0;
}

/* consumers of a registry that nobody goes on with acquire no more */
static void close_registry(int fd) {
	RegistryHeader *header = mmap(NULL, LAYOUT_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (header == MAP_FAILED)
		return;
	if (header->magic == LAYOUT_REGISTRY_MAGIC)
		atomic_store(&header->state, LAYOUT_CLOSED);
	munmap(header, LAYOUT_PAGE);
}

/* the number that its fd has from here on, or -EBADF */
static int put_one_aside(NotifyFd *at, const char *name) {
	(void)notify_unstore(name);
	if (!at)
		return -EBADF;
	(void)notify_store(name, &at->fd, 1);
	(void)notify_unstore(at->name);
	return steal_fd(&at->fd);
}

/* the registry and the ledger NULL where there is none */
static void put_aside(Broker *broker, NotifyFds *fds, NotifyFd *registry, NotifyFd *ledger, const char *why) {
	struct stat st;

	if (registry && !fstat(registry->fd, &st) && st.st_size >= LAYOUT_PAGE)
		close_registry(registry->fd);
	broker->aside_fds[0] = put_one_aside(registry, KEEPER_ASIDE "registry");
	broker->aside_fds[1] = put_one_aside(ledger, KEEPER_ASIDE "ledger");
	for (size_t i = 0; i < fds->n; ++i) {
		if (!segment_number(fds->items[i].name))
			continue;
		(void)notify_unstore(fds->items[i].name);
		fds->items[i].fd = close_fd(fds->items[i].fd);
	}
	log_write(LOG_RECOVERY_REFUSED, LOG_NO_UID, NULL,
		  "STARTING EMPTY, every registration is lost: %s. For a report, the old state is in /proc/%d/fd/%d "
		  "(registry) and /proc/%d/fd/%d (ledger, which has secrets)",
		  why, (int)getpid(), broker->aside_fds[0], (int)getpid(), broker->aside_fds[1]);
}

int recover(Broker *broker, NotifyFds *fds) {
	NotifyFd *registry = find_fd(fds, KEEPER_REGISTRY), *ledger = find_fd(fds, KEEPER_LEDGER);
	Recovery recovery = { .broker = broker, .ledger = &broker->ledger };
	const char *why = NULL;
	int r;

	if (!registry && !ledger)
		return RECOVER_E_NOTHING;
	if (!registry || !ledger) {
		put_aside(broker, fds, registry, ledger,
			  registry ? "the ledger was not handed over" : "the registry was not handed over");
		return RECOVER_E_NOTHING;
	}
	r = recovery_open(&recovery, registry->fd, ledger->fd, &why);
	if (r == -EINVAL && why) {
		broker->registry.frozen = broker->ledger.frozen = true;
		registry_deinit(&broker->registry);
		ledger_deinit(&broker->ledger);
		put_aside(broker, fds, registry, ledger, why);
		return RECOVER_E_NOTHING;
	}
	if (r)
		return r;
	broker->keeper.last_segment = &recovery.header->last_segment;
	r = recovery_run(&recovery, fds);
	if (!r) {
		recovery_log(&recovery);
		/* the broker has its own */
		registry->fd = close_fd(registry->fd);
		ledger->fd = close_fd(ledger->fd);
	}
	/* the next broker tries again with all that there is */
	if (r)
		broker->keeper.frozen = broker->registry.frozen = broker->ledger.frozen = true;
	for (size_t i = 0; r && i < recovery.n_objects; ++i)
		object_unref(recovery.objects[i].object);
	free(recovery.sessions);
	free(recovery.objects);
	return r;
}
