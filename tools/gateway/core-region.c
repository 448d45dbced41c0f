/* SPDX-License-Identifier: Apache-2.0 */

/* What the core does with regions: see core.h. */

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core.h"
#include "log.h"
#include "text.h"

#define RESERVED_PREFIX "triton_python_backend_shm_region_"
/* the key of what was registered natively, before its name */
#define NATIVE_PREFIX "shmbroker:"
/* the name of the region that is the memory of a key, before the key: the Python module's drop-in makes such */
#define KEY_PREFIX "shm:"
/* the key of GPU memory that came through this door, where clients give none */
#define CUDA_KEY "cuda"
#define STATE_BIT(_state) (1U << (_state))
/* those whose name finds them: a lazily retired one until it is idle */
#define STATES_LISTED (STATE_BIT(SHMB_STATE_ACTIVE) | STATE_BIT(SHMB_STATE_LAZY))

/* for "%.*s" */
#define ARG(_bytes) (int)(_bytes).size, (_bytes).data

static const char *kind_word(CoreKind kind) {
	return kind == CORE_SYSTEM ? "system" : "cuda";
}

/* A region as the broker tells of it. */
typedef struct Entry {
	char name[CORE_NAME_MAX + 1];
	char key[CORE_KEY_MAX + 1];
	CoreKind kind;
	bool door; /* it came through this door, or that of another gateway */
	uint32_t uid;
	uint64_t generation;
	uint64_t offset;
	uint64_t size;
	uint8_t device[16];
	struct Entry *next;
} Entry;

static void entries_free(Entry *entry) {
	while (entry) {
		Entry *next = entry->next;

		free(entry);
		entry = next;
	}
}

static void entry_init(Entry *entry, const struct shmb_status *status) {
	*entry = (Entry){};
	(void)snprintf(entry->name, sizeof(entry->name), "%s", status->name);
	(void)snprintf(entry->key, sizeof(entry->key), "%s", status->key);
	entry->kind = status->kind == SHMB_MEMORY_CPU ? CORE_SYSTEM : CORE_CUDA;
	entry->door = status->key[0] && (status->flags & SHMB_REGION_KEPT);
	entry->uid = status->uid;
	entry->generation = status->generation;
	entry->offset = status->offset;
	entry->size = status->size;
	memcpy(entry->device, status->device_uuid, sizeof(entry->device));
}

/* memory that waits for its registration, as an object in /dev/shm does */
static bool is_of_key(const struct shmb_status *status) {
	return !status->key[0] && strncmp(status->name, KEY_PREFIX, sizeof(KEY_PREFIX) - 1) == 0;
}

/*
 * What the broker lists: the region called @name, or all but the memory of keys when that is NULL. ANSWER_OK with @ret, to
 * be freed by entries_free().
 */
static AnswerCode find(Core *core, const char *name, Entry **ret, Answer *answer) {
	struct shmb_status_filter filter = { .struct_size = sizeof(filter), .name = name, .states = STATES_LISTED };
	LinkSession *session = link_get(core->link);
	struct shmb_status_iter *iter;
	const struct shmb_status *status;
	uint64_t began = core_metrics_now();
	Entry *entries = NULL;
	int r;

	if (!session)
		return core_unavailable(core, answer);
	r = shmb_status_iter_new(session->client, &filter, &iter);
	if (r)
		return core_broker_refused(core, r, (Bytes){}, answer);
	while (!(r = shmb_status_iter_next(iter, &status)) && status) {
		Entry *entry;

		if (!name && is_of_key(status))
			continue;
		entry = malloc(sizeof(*entry));
		if (!entry) {
			r = -ENOMEM;
			break;
		}
		entry_init(entry, status);
		entry->next = entries;
		entries = entry;
	}
	shmb_status_iter_free(iter);
	core_metrics_broker(core->metrics, began);
	if (r) {
		entries_free(entries);
		return core_broker_refused(core, r, (Bytes){}, answer);
	}
	*ret = entries;
	return ANSWER_OK;
}

/* Checks @name and terminates it in @ret, of CORE_NAME_MAX + 1. */
static AnswerCode take_name(Bytes name, char *ret, Answer *answer) {
	const char *why = core_name_why(name);

	if (why)
		return answer_set(answer, ANSWER_INVALID_ARG, "invalid shared memory region name: %s", why);
	memcpy(ret, name.data, name.size);
	ret[name.size] = 0;
	return ANSWER_OK;
}

AnswerCode core_check_allowed(const Core *core, Answer *answer) {
	if (core->allow_client_shm)
		return ANSWER_OK;
	return answer_set(
		answer, ANSWER_UNSUPPORTED,
		"Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.");
}

/* What is the same for both kinds, in the order of Triton: the name, and that it is free. */
static AnswerCode check_free(Core *core, const char *name, Answer *answer) {
	Entry *entries;
	AnswerCode code;

	code = find(core, name, &entries, answer);
	if (code)
		return code;
	if (entries)
		code = answer_set(answer, ANSWER_ALREADY_EXISTS, "shared memory region '%s' already in manager", name);
	entries_free(entries);
	return code;
}

/*
 * Whose the regions of @caller are, as the broker counts: uid + 1 of the peer where the gateway may act for others, 0 for
 * the gateway itself.
 */
static uint32_t principal_of(const LinkSession *session, const Caller *caller) {
	if (!caller->is_unix || !(session->rights & LINK_RIGHT_DELEGATE))
		return 0;
	return caller->uid + 1;
}

AnswerCode core_unavailable(Core *core, Answer *answer) {
	return answer_set(answer, ANSWER_UNAVAILABLE, "%s", link_why(core->link));
}

AnswerCode core_broker_refused(Core *core, int result, Bytes name, Answer *answer) {
	char why[256];
	AnswerCode code;

	(void)snprintf(why, sizeof(why), "%s", shmb_last_error()[0] ? shmb_last_error() : shmb_error_text(result));
	if (link_lost(core->link, result))
		return core_unavailable(core, answer);
	switch (result) {
	case SHMB_E_EXISTS:
		return answer_set(answer, ANSWER_ALREADY_EXISTS, "shared memory region '%.*s' already in manager",
				  ARG(name));
	case SHMB_E_OUT_OF_BOUNDS:
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "failed to register shared memory region '%.*s': invalid args", ARG(name));
	case SHMB_E_QUOTA:
	case SHMB_E_NO_FDS:
	case SHMB_E_NO_SLOTS:
		code = ANSWER_RESOURCE_EXHAUSTED;
		break;
	case SHMB_E_PERMISSION:
	case SHMB_E_RESERVED:
	case SHMB_E_UNSEALED:
	case SHMB_E_ACCESS:
	case SHMB_E_ACCESS_DIFFERS:
		code = ANSWER_PERMISSION_DENIED;
		break;
	case SHMB_E_INVALID:
	case SHMB_E_BAD_NAME:
	case SHMB_E_SPARSE:
		code = ANSWER_INVALID_ARG;
		break;
	default:
		code = ANSWER_INTERNAL;
		break;
	}
	if (name.size)
		return answer_set(answer, code, "failed to register shared memory region '%.*s': %s", ARG(name), why);
	return answer_set(answer, code, "%s", why);
}

/* ---- register ---- */

/* Sets @ret to the part of @key after its slashes, which are not significant. */
static AnswerCode check_key(const char *name, Bytes key, Bytes *ret, Answer *answer) {
	Bytes plain = key;
	bool control = false, utf8;

	while (plain.size && plain.data[0] == '/') {
		plain.data++;
		plain.size--;
	}
	utf8 = text_is_utf8(key.data, key.size, &control);
	if (!plain.size || !utf8 || control)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "cannot register shared memory region '%s' - invalid shm key '%.*s'", name,
				  utf8 ? (int)key.size : 0, key.data);
	if (plain.size >= sizeof(RESERVED_PREFIX) - 1 &&
	    memcmp(plain.data, RESERVED_PREFIX, sizeof(RESERVED_PREFIX) - 1) == 0)
		return answer_set(
			answer, ANSWER_INVALID_ARG,
			"cannot register shared memory region '%s' with key '%.*s' as the key contains the reserved "
			"prefix '" RESERVED_PREFIX "'",
			name, ARG(key));
	*ret = plain;
	return ANSWER_OK;
}

/* What a key names: a part of a file. */
typedef struct KeyMemory {
	int fd; /* of whoever has this */
	uint64_t offset;
	uint64_t size;
} KeyMemory;

/* the fd of the region of @entry, whose name is @name */
static int open_lease(const LinkSession *session, const char *name, const Entry *entry, KeyMemory *ret) {
	struct shmb_lease lease;
	int fd, r;

	r = shmb_client_get_memory_info(session->client, name, 0, SHMB_REST, SHMB_READ | SHMB_WRITE | SHMB_COPY,
					&lease);
	if (r)
		return r;
	r = lease.generation == entry->generation ? shmb_lease_get_fd(&lease, &fd, &ret->offset) : SHMB_E_STALE;
	ret->size = lease.size;
	if (!r) {
		ret->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
		r = ret->fd < 0 ? -errno : 0;
	}
	(void)shmb_lease_release(&lease);
	return r;
}

/*
 * Opens the region that is the memory of @key, a name without slashes; the broker decides whether this gateway may have it.
 * ANSWER_NOT_FOUND, which is not set in @answer, when there is none.
 */
static AnswerCode open_region(Core *core, const Caller *caller, const char *key, KeyMemory *ret, Answer *answer) {
	char name[sizeof(KEY_PREFIX) + CORE_KEY_MAX];
	LinkSession *session;
	AnswerCode code;
	Entry *entry;
	int r;

	(void)snprintf(name, sizeof(name), KEY_PREFIX "%s", key);
	if (strlen(name) > CORE_NAME_MAX)
		return ANSWER_NOT_FOUND;
	code = find(core, name, &entry, answer);
	if (code)
		return code;
	session = link_get(core->link);
	if (!session || !entry || entry->kind != CORE_SYSTEM) {
		code = ANSWER_NOT_FOUND;
	} else if (caller->is_unix && !caller->admin && caller->uid != entry->uid) {
		/* who has an identity names memory of its own only, as in key_open() */
		log_write("key %s: refused, region %s belongs to uid %u, the caller is uid %u", key, name, entry->uid,
			  caller->uid);
		code = ANSWER_NOT_FOUND;
	} else {
		r = open_lease(session, name, entry, ret);
		if (r) {
			log_write("key %s: region %s: %s%s", key, name, shmb_error_text(r),
				  r == SHMB_E_PERMISSION ? ", its owner has to allow the gateway's user" : "");
			(void)link_lost(core->link, r);
			code = ANSWER_NOT_FOUND;
		}
	}
	entries_free(entry);
	return code;
}

static AnswerCode open_key(Core *core, const Caller *caller, Bytes key, Bytes plain, KeyMemory *ret, Answer *answer) {
	char text[CORE_KEY_MAX + 1];
	struct stat st;
	AnswerCode code;
	int r;

	if (plain.size <= CORE_KEY_MAX) {
		memcpy(text, plain.data, plain.size);
		text[plain.size] = 0;
		r = key_open(core->opener, caller, text, &ret->fd);
		if (!r) {
			if (fstat(ret->fd, &st)) {
				(void)close(ret->fd);
				return answer_set(answer, ANSWER_INTERNAL, "Invalid shared memory region: '%.*s'",
						  ARG(key));
			}
			ret->offset = 0;
			ret->size = (uint64_t)st.st_size;
			return ANSWER_OK;
		}
		if (r == -ENOENT) {
			code = open_region(core, caller, text, ret, answer);
			if (code != ANSWER_NOT_FOUND)
				return code;
		}
	}
	return answer_set(answer, ANSWER_INTERNAL, "Unable to open shared memory region: '%.*s'", ARG(key));
}

static AnswerCode check_window(const KeyMemory *memory, const char *name, uint64_t offset, uint64_t size,
			       Answer *answer) {
	uint64_t end;

	if (__builtin_add_overflow(offset, size, &end) || end > memory->size)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "failed to register shared memory region '%s': invalid args", name);
	if (!size)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "failed to register shared memory region '%s': unable to process address space%s",
				  name, strerror(EINVAL));
	return ANSWER_OK;
}

static AnswerCode adopt(Core *core, const Caller *caller, const char *name, int fd, const char *key, uint64_t offset,
			uint64_t size, Answer *answer) {
	LinkSession *session = link_get(core->link);
	struct shmb_region_options options = {
		.struct_size = sizeof(options),
		.flags = SHMB_REGION_OPT_KEEP,
		.key = key,
	};
	uint64_t began = core_metrics_now();
	struct shmb_region *region;
	int r;

	if (!session)
		return core_unavailable(core, answer);
	options.principal = principal_of(session, caller);
	r = shmb_region_adopt(session->client, name, fd, offset, size, &options, &region);
	core_metrics_broker(core->metrics, began);
	if (r)
		return core_broker_refused(core, r, BYTES(name), answer);
	/* it is kept: this frees what the library has of it */
	shmb_region_free(region);
	return ANSWER_OK;
}

static AnswerCode system_register(Core *core, const Caller *caller, Bytes name, Bytes key, uint64_t offset,
				  uint64_t byte_size, Answer *answer) {
	char text[CORE_NAME_MAX + 1], label[CORE_KEY_MAX + 1];
	AnswerCode code = core_check_allowed(core, answer);
	Bytes plain = {};
	KeyMemory memory;

	if (code)
		return code;
	if (!name.size)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "'region name' is necessary to register system shared memory region");
	code = take_name(name, text, answer);
	if (!code)
		code = check_key(text, key, &plain, answer);
	if (!code)
		code = check_free(core, text, answer);
	if (!code)
		code = open_key(core, caller, key, plain, &memory, answer);
	if (code)
		return code;
	code = check_window(&memory, text, offset, byte_size, answer);
	if (!code) {
		/* as it was given, where it is not all slashes */
		if (key.size > CORE_KEY_MAX)
			key = plain;
		(void)snprintf(label, sizeof(label), "%.*s", ARG(key));
		code = adopt(core, caller, text, memory.fd, label, memory.offset + offset, byte_size, answer);
	}
	(void)close(memory.fd);
	return code;
}

/* cause and remedy, which @why has, are in the log, as with Triton */
static AnswerCode cuda_unsupported(const char *why, const char *name, Answer *answer) {
	log_write("region %s: %s", name, why);
	return answer_set(answer, ANSWER_INVALID_ARG,
			  "failed to register CUDA shared memory region: '%s', GPUs not supported", name);
}

static AnswerCode cuda_refused(Core *core, int result, const char *name, Answer *answer) {
	switch (result) {
	case SHMB_E_UNSUPPORTED:
	case SHMB_E_NO_DEVICE:
		return cuda_unsupported(shmb_last_error(), name, answer);
	case SHMB_E_INVALID:
	case SHMB_E_BAD_FD:
	case -EIO:
		/* the same */
		log_write("region %s: %s", name, shmb_last_error());
		return answer_set(answer, ANSWER_INVALID_ARG, "failed to register shared memory region: invalid args");
	default:
		return core_broker_refused(core, result, BYTES(name), answer);
	}
}

static AnswerCode cuda_adopt(Core *core, const Caller *caller, const char *name, Bytes raw_handle, int64_t device_id,
			     uint64_t size, Answer *answer) {
	struct shmb_region_options options = {
		.struct_size = sizeof(options),
		.flags = SHMB_REGION_OPT_KEEP,
		.key = CUDA_KEY,
	};
	struct shmb_cuda_handle handle = { .struct_size = sizeof(handle), .size = size };
	LinkSession *session = link_get(core->link);
	struct shmb_region *region;
	uint64_t began;
	int r;

	if (!core->devices->n)
		return cuda_unsupported("no GPU memory is registered here without --cuda-devices", name, answer);
	if (device_id < 0 || device_id >= core->devices->n || !size)
		return answer_set(answer, ANSWER_INVALID_ARG, "failed to register shared memory region: invalid args");
	if (!session)
		return core_unavailable(core, answer);
	memcpy(handle.device_uuid, core->devices->uuids[device_id], sizeof(handle.device_uuid));
	memcpy(handle.handle, raw_handle.data, sizeof(handle.handle));
	options.principal = principal_of(session, caller);
	began = core_metrics_now();
	r = shmb_cuda_adopt(session->client, name, &handle, &options, &region);
	core_metrics_broker(core->metrics, began);
	if (r)
		return cuda_refused(core, r, name, answer);
	shmb_region_free(region);
	return ANSWER_OK;
}

static AnswerCode cuda_register(Core *core, const Caller *caller, Bytes name, Bytes raw_handle, int64_t device_id,
				uint64_t byte_size, Answer *answer) {
	char text[CORE_NAME_MAX + 1];
	AnswerCode code = core_check_allowed(core, answer);

	if (code)
		return code;
	if (raw_handle.size != CORE_CUDA_HANDLE_SIZE)
		return answer_set(answer, ANSWER_INVALID_ARG, "failed to register shared memory region: invalid args");
	if (!name.size)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "'region name' is necessary to register cuda shared memory region");
	code = take_name(name, text, answer);
	if (!code)
		code = check_free(core, text, answer);
	if (!code)
		code = cuda_adopt(core, caller, text, raw_handle, device_id, byte_size, answer);
	return code;
}

/* ---- status ---- */

static int compare_regions(const void *a, const void *b) {
	return strcmp(((const CoreRegion *)a)->name, ((const CoreRegion *)b)->name);
}

bool core_shows_key(const Core *core, const Caller *caller, uint32_t uid) {
	LinkSession *session = link_get(core->link);

	/* without the right to act for others, all that is registered here is the gateway's, and so every caller's */
	return caller->admin || uid == (session && principal_of(session, caller) ? caller->uid : geteuid());
}

static bool region_init(const Core *core, const Caller *caller, CoreRegion *region, const Entry *entry) {
	*region = (CoreRegion){ .name = strdup(entry->name), .byte_size = entry->size };
	if (entry->kind == CORE_CUDA) {
		region->device_id = devices_find(core->devices, entry->device);
		return region->name != NULL;
	}
	if (entry->door) {
		region->offset = entry->offset;
		region->key = strdup(core_shows_key(core, caller, entry->uid) ? entry->key : "");
	} else if (asprintf(&region->key, NATIVE_PREFIX "%s", entry->name) < 0) {
		region->key = NULL;
	}
	return region->name && region->key;
}

void core_region_list_deinit(CoreRegionList *list) {
	for (size_t i = 0; i < list->n; i++) {
		free(list->regions[i].name);
		free(list->regions[i].key);
	}
	free(list->regions);
	*list = (CoreRegionList){};
}

static AnswerCode list_make(const Core *core, const Caller *caller, const Entry *entries, CoreKind kind,
			    CoreRegionList *ret, Answer *answer) {
	CoreRegionList list = {};
	size_t n = 0;

	for (const Entry *entry = entries; entry; entry = entry->next)
		n += entry->kind == kind;
	list.regions = calloc(n ? n : 1, sizeof(*list.regions));
	for (const Entry *entry = entries; entry && list.regions; entry = entry->next) {
		if (entry->kind == kind && !region_init(core, caller, &list.regions[list.n++], entry)) {
			core_region_list_deinit(&list);
			break;
		}
	}
	if (!list.regions)
		return answer_set(answer, ANSWER_INTERNAL, "out of memory");
	qsort(list.regions, list.n, sizeof(*list.regions), compare_regions);
	*ret = list;
	return ANSWER_OK;
}

static AnswerCode region_status(Core *core, const Caller *caller, CoreKind kind, Bytes name, CoreRegionList *ret,
				Answer *answer) {
	char text[CORE_NAME_MAX + 1];
	Entry *entries = NULL;
	AnswerCode code;

	if (name.size) {
		code = take_name(name, text, answer);
		if (code)
			return code;
	}
	code = find(core, name.size ? text : NULL, &entries, answer);
	if (code)
		return code;
	if (name.size && !entries)
		code = answer_set(answer, ANSWER_NOT_FOUND, "Unable to find %s shared memory region: '%s'",
				  kind_word(kind), text);
	else if (name.size && entries->kind != kind && kind == CORE_SYSTEM)
		code = answer_set(answer, ANSWER_NOT_FOUND,
				  "The region named '%s' is registered as CUDA shared memory, not system shared memory",
				  text);
	else if (name.size && entries->kind != kind)
		code = answer_set(answer, ANSWER_NOT_FOUND,
				  "The region named '%s' is registered as system shared memory, not CUDA shared memory",
				  text);
	else
		code = list_make(core, caller, entries, kind, ret, answer);
	entries_free(entries);
	return code;
}

/* ---- unregister ---- */

/*
 * With whose rights @caller may retire @entry: sets @ret_principal, uid + 1 or 0 for the gateway's own. False when it may
 * not, as far as is seen from here; the broker decides about the rest.
 */
static bool may_retire(const LinkSession *session, const Caller *caller, const Entry *entry, uint32_t *ret_principal) {
	bool delegate = session->rights & LINK_RIGHT_DELEGATE;

	*ret_principal = principal_of(session, caller);
	if (caller->admin) {
		/* the rights of whoever has the region, where the gateway may act for others */
		*ret_principal = delegate ? entry->uid + 1 : 0;
		return true;
	}
	/* TCP has no identity: what came through this door is the gateway's, and nothing else is such a caller's */
	if (!caller->is_unix)
		*ret_principal = delegate ? geteuid() + 1 : 0;
	if (delegate)
		return entry->door || caller->is_unix;
	if (entry->uid != geteuid())
		return false;
	return entry->door || (caller->is_unix && caller->uid == geteuid());
}

static int retire(Core *core, LinkSession *session, uint32_t principal, const char *name) {
	uint64_t began = core_metrics_now();
	int result = 0, r;

	r = principal ? shmb_client_unregister_as(session->client, principal, &name, 1, SHMB_RETIRE_LAZY, 0, &result)
		      : shmb_client_unregister(session->client, &name, 1, SHMB_RETIRE_LAZY, 0, &result);
	core_metrics_broker(core->metrics, began);
	return r ? r : result;
}

/* whether it is gone, or going: what was asked for */
static bool is_retired(int result) {
	switch (result) {
	case 0:
	case SHMB_E_NOT_FOUND:
	case SHMB_E_STALE:
	case SHMB_E_RETIRING:
	case SHMB_E_REVOKED:
		return true;
	default:
		return false;
	}
}

static AnswerCode deny(const Entry *entry, Answer *answer) {
	return answer_set(answer, ANSWER_PERMISSION_DENIED, "cannot unregister shared memory region '%s': it %s",
			  entry->name,
			  entry->door ? "belongs to another user" : "was registered natively, and is not the caller's");
}

static AnswerCode region_unregister(Core *core, const Caller *caller, CoreKind kind, Bytes name, Answer *answer) {
	char text[CORE_NAME_MAX + 1];
	AnswerCode code = core_check_allowed(core, answer);
	LinkSession *session;
	uint32_t principal;
	Entry *entry;
	int r;

	if (!code)
		code = take_name(name, text, answer);
	if (!code)
		code = find(core, text, &entry, answer);
	if (code)
		return code;
	session = link_get(core->link);
	if (!session) {
		code = core_unavailable(core, answer);
	} else if (entry && entry->kind == kind) {
		r = may_retire(session, caller, entry, &principal) ? retire(core, session, principal, text)
								   : SHMB_E_PERMISSION;
		if (r == SHMB_E_PERMISSION)
			code = deny(entry, answer);
		else if (!is_retired(r))
			code = core_broker_refused(core, r, (Bytes){}, answer);
	}
	entries_free(entry);
	return code;
}

static AnswerCode region_unregister_all(Core *core, const Caller *caller, CoreKind kind, Answer *answer) {
	AnswerCode code = core_check_allowed(core, answer);
	LinkSession *session;
	char *failed = NULL;
	Entry *entries;

	if (!code)
		code = find(core, NULL, &entries, answer);
	if (code)
		return code;
	for (const Entry *entry = entries; entry && !code; entry = entry->next) {
		uint32_t principal;
		char *more;
		int r;

		if (entry->kind != kind || !(entry->door || (caller->admin && caller->everything)))
			continue;
		session = link_get(core->link);
		if (!session) {
			code = core_unavailable(core, answer);
			break;
		}
		/* what is another user's is not meant */
		if (!may_retire(session, caller, entry, &principal))
			continue;
		r = retire(core, session, principal, entry->name);
		if (is_retired(r) || (r == SHMB_E_PERMISSION && !caller->admin))
			continue;
		if (link_lost(core->link, r)) {
			code = core_unavailable(core, answer);
		} else if (asprintf(&more, "%s%s ,", failed ?: "", entry->name) >= 0) {
			free(failed);
			failed = more;
		}
	}
	if (!code && failed)
		code = answer_set(answer, ANSWER_INTERNAL,
				  "Failed to unregister the following %s shared memory regions: %s", kind_word(kind),
				  failed);
	free(failed);
	entries_free(entries);
	return code;
}

bool core_may_unregister(const Core *core, const Caller *caller, const struct shmb_status *status) {
	LinkSession *session = link_get(core->link);
	uint32_t principal;
	Entry entry;

	if (!core->allow_client_shm || !session || !(STATES_LISTED & STATE_BIT(status->state)))
		return false;
	entry_init(&entry, status);
	return may_retire(session, caller, &entry, &principal);
}

/* ---- what the doors call, counted ---- */

#define OPERATION(_kind, _what) ((_kind) == CORE_SYSTEM ? CORE_OPERATION_SYSTEM_##_what : CORE_OPERATION_CUDA_##_what)

AnswerCode core_system_register(Core *core, const Caller *caller, Bytes name, Bytes key, uint64_t offset,
				uint64_t byte_size, Answer *answer) {
	return core_metrics_call(core->metrics, CORE_OPERATION_SYSTEM_REGISTER, caller,
				 system_register(core, caller, name, key, offset, byte_size, answer));
}

AnswerCode core_cuda_register(Core *core, const Caller *caller, Bytes name, Bytes raw_handle, int64_t device_id,
			      uint64_t byte_size, Answer *answer) {
	return core_metrics_call(core->metrics, CORE_OPERATION_CUDA_REGISTER, caller,
				 cuda_register(core, caller, name, raw_handle, device_id, byte_size, answer));
}

AnswerCode core_status(Core *core, const Caller *caller, CoreKind kind, Bytes name, CoreRegionList *ret,
		       Answer *answer) {
	return core_metrics_call(core->metrics, OPERATION(kind, STATUS), caller,
				 region_status(core, caller, kind, name, ret, answer));
}

AnswerCode core_unregister(Core *core, const Caller *caller, CoreKind kind, Bytes name, Answer *answer) {
	return core_metrics_call(core->metrics, OPERATION(kind, UNREGISTER), caller,
				 region_unregister(core, caller, kind, name, answer));
}

AnswerCode core_unregister_all(Core *core, const Caller *caller, CoreKind kind, Answer *answer) {
	return core_metrics_call(core->metrics, OPERATION(kind, UNREGISTER_ALL), caller,
				 region_unregister_all(core, caller, kind, answer));
}
