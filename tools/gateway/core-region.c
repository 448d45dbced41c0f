/* SPDX-License-Identifier: Apache-2.0 */

/* What the core does with regions: see core.h. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "core-entry.h"
#include "core-key.h"
#include "log.h"

/* the key of GPU memory that came through this door, where clients give none */
#define CUDA_KEY "cuda"
/* of all regions that are listed at a time, so that however many they are the gateway stays small */
#define LIST_BYTES_MAX ((size_t)16 << 20)
#define WHY_SIZE 512

static const char *kind_word(CoreKind kind) {
	return kind == CORE_SYSTEM ? "system" : "cuda";
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
	CoreEntry *entries;
	AnswerCode code;

	code = core_find(core, name, SIZE_MAX, &entries, answer);
	if (code)
		return code;
	if (entries)
		code = answer_set(answer, ANSWER_ALREADY_EXISTS, "shared memory region '%s' already in manager", name);
	core_entries_free(entries);
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
				  CORE_ARG(name));
	case SHMB_E_OUT_OF_BOUNDS:
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "failed to register shared memory region '%.*s': invalid args", CORE_ARG(name));
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
		return answer_set(answer, code, "failed to register shared memory region '%.*s': %s", CORE_ARG(name),
				  why);
	return answer_set(answer, code, "%s", why);
}

/* ---- register ---- */

static AnswerCode check_window(const CoreKeyMemory *memory, const char *name, uint64_t offset, uint64_t size,
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
	uint64_t began = clock_ns();
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
	CoreKeyMemory memory;

	if (code)
		return code;
	if (!name.size)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "'region name' is necessary to register system shared memory region");
	code = take_name(name, text, answer);
	if (!code)
		code = core_key_check(text, key, &plain, answer);
	if (!code)
		code = check_free(core, text, answer);
	if (!code)
		code = core_key_open(core, caller, key, plain, &memory, answer);
	if (code)
		return code;
	code = check_window(&memory, text, offset, byte_size, answer);
	if (!code) {
		/* as it was given, where it is not all slashes */
		if (key.size > CORE_KEY_MAX)
			key = plain;
		(void)snprintf(label, sizeof(label), "%.*s", CORE_ARG(key));
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

/*
 * The broker's helper failed, or did not answer in time, over the memory of one client; the broker itself may be well. What
 * it has not done is not done any more, since the session that asked for it is over.
 */
static AnswerCode cuda_not_tried(Core *core, const char *name, const char *why, Answer *answer) {
	CoreEntry *entry;
	AnswerCode code;

	code = core_find(core, name, SIZE_MAX, &entry, answer);
	if (code)
		return code;
	/* the name was free, and nobody else's requests are answered meanwhile: it was done at the last moment */
	if (!entry || entry->kind != CORE_CUDA || !entry->door)
		code = answer_set(answer, ANSWER_UNAVAILABLE,
				  "failed to register shared memory region '%s': it is not registered: %s", name, why);
	core_entries_free(entry);
	return code;
}

static AnswerCode cuda_adopt(Core *core, const Caller *caller, const char *name, Bytes raw_handle, int64_t device_id,
			     uint64_t size, Answer *answer) {
	struct shmb_region_options options = {
		.struct_size = sizeof(options),
		.flags = SHMB_REGION_OPT_KEEP,
		.key = CUDA_KEY,
	};
	struct shmb_cuda_handle handle = { .struct_size = sizeof(handle), .size = size };
	LinkSession *session = link_get(core->link), *apart;
	AnswerCode code = ANSWER_UNAVAILABLE;
	struct shmb_region *region;
	char why[WHY_SIZE] = "";
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
	r = link_apart(core->link, &apart);
	if (r)
		return core_broker_refused(core, r, BYTES(name), answer);
	began = clock_ns();
	r = shmb_cuda_adopt(apart->client, name, &handle, &options, &region);
	core_metrics_broker(core->metrics, began);
	if (!r) {
		shmb_region_free(region);
		code = ANSWER_OK;
	} else if (r == SHMB_E_TIMED_OUT && clock_ns() - began >= LINK_CALL_MS * UINT64_C(1000000)) {
		(void)snprintf(why, sizeof(why), "the broker's driver took longer than %u ms", LINK_CALL_MS);
	} else if (r == SHMB_E_TIMED_OUT || r == SHMB_E_AGAIN) {
		(void)snprintf(why, sizeof(why), "%s", shmb_last_error());
	} else {
		code = cuda_refused(core, r, name, answer);
	}
	(void)link_session_unref(apart);
	return code == ANSWER_UNAVAILABLE ? cuda_not_tried(core, name, why, answer) : code;
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
	return caller->admin || uid == (session && principal_of(session, caller) ? caller->uid : core->uid);
}

static CoreRegion region_of(const Core *core, const Caller *caller, const CoreEntry *entry) {
	CoreRegion region = { .name = entry->name, .byte_size = entry->size };

	if (entry->kind == CORE_CUDA) {
		region.device_id = devices_find(core->devices, entry->device);
	} else if (entry->door) {
		region.offset = entry->offset;
		region.key = core_shows_key(core, caller, entry->uid) ? entry->key : "";
	} else {
		region.key = entry->key;
	}
	return region;
}

void core_region_list_deinit(CoreRegionList *list) {
	core_entries_free(list->entries);
	free(list->regions);
	*list = (CoreRegionList){};
}

/* Takes @entries over when it returns ANSWER_OK. */
static AnswerCode list_make(const Core *core, const Caller *caller, CoreEntry *entries, CoreKind kind,
			    CoreRegionList *ret, Answer *answer) {
	CoreRegionList list = { .entries = entries };
	size_t n = 0;

	for (const CoreEntry *entry = entries; entry; entry = entry->next)
		n += entry->kind == kind;
	list.regions = calloc(n ? n : 1, sizeof(*list.regions));
	if (!list.regions)
		return answer_set(answer, ANSWER_INTERNAL, "out of memory");
	for (const CoreEntry *entry = entries; entry; entry = entry->next) {
		if (entry->kind == kind)
			list.regions[list.n++] = region_of(core, caller, entry);
	}
	qsort(list.regions, list.n, sizeof(*list.regions), compare_regions);
	*ret = list;
	return ANSWER_OK;
}

static AnswerCode region_status(Core *core, const Caller *caller, CoreKind kind, Bytes name, CoreRegionList *ret,
				Answer *answer) {
	char text[CORE_NAME_MAX + 1];
	CoreEntry *entries = NULL;
	AnswerCode code;

	if (name.size) {
		code = take_name(name, text, answer);
		if (code)
			return code;
	}
	code = core_find(core, name.size ? text : NULL, LIST_BYTES_MAX, &entries, answer);
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
	if (code)
		core_entries_free(entries);
	return code;
}

/* ---- unregister ---- */

/*
 * With whose rights @caller may retire a region of @uid, which came through the @door or did not: sets @ret_principal,
 * uid + 1 or 0 for the gateway's own. False when it may not, as far as is seen from here; the broker decides about the rest.
 */
static bool may_retire(const Core *core, const LinkSession *session, const Caller *caller, bool door, uint32_t uid,
		       uint32_t *ret_principal) {
	bool delegate = session->rights & LINK_RIGHT_DELEGATE;

	*ret_principal = principal_of(session, caller);
	if (caller->admin) {
		/* the rights of whoever has the region, where the gateway may act for others */
		*ret_principal = delegate ? uid + 1 : 0;
		return true;
	}
	/* TCP has no identity: what came through this door is the gateway's, and nothing else is such a caller's */
	if (!caller->is_unix)
		*ret_principal = delegate ? core->uid + 1 : 0;
	if (delegate)
		return door || caller->is_unix;
	if (uid != core->uid)
		return false;
	return door || (caller->is_unix && caller->uid == core->uid);
}

static int retire(Core *core, LinkSession *session, uint32_t principal, const char *name) {
	uint64_t began = clock_ns();
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

static AnswerCode deny(const CoreEntry *entry, Answer *answer) {
	return answer_set(answer, ANSWER_PERMISSION_DENIED, "cannot unregister shared memory region '%s': it %s",
			  entry->name,
			  entry->door ? "belongs to another user" : "was registered natively, and is not the caller's");
}

static AnswerCode region_unregister(Core *core, const Caller *caller, CoreKind kind, Bytes name, Answer *answer) {
	char text[CORE_NAME_MAX + 1];
	AnswerCode code = core_check_allowed(core, answer);
	LinkSession *session;
	uint32_t principal;
	CoreEntry *entry;
	int r;

	if (!code)
		code = take_name(name, text, answer);
	if (!code)
		code = core_find(core, text, SIZE_MAX, &entry, answer);
	if (code)
		return code;
	session = link_get(core->link);
	if (!session) {
		code = core_unavailable(core, answer);
	} else if (entry && entry->kind == kind) {
		r = may_retire(core, session, caller, entry->door, entry->uid, &principal)
			    ? retire(core, session, principal, text)
			    : SHMB_E_PERMISSION;
		if (r == SHMB_E_PERMISSION)
			code = deny(entry, answer);
		else if (!is_retired(r))
			code = core_broker_refused(core, r, (Bytes){}, answer);
	}
	core_entries_free(entry);
	return code;
}

static AnswerCode region_unregister_all(Core *core, const Caller *caller, CoreKind kind, Answer *answer) {
	AnswerCode code = core_check_allowed(core, answer);
	LinkSession *session;
	char *failed = NULL;
	CoreEntry *entries;

	if (!code)
		code = core_find(core, NULL, SIZE_MAX, &entries, answer);
	if (code)
		return code;
	for (const CoreEntry *entry = entries; entry && !code; entry = entry->next) {
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
		if (!may_retire(core, session, caller, entry->door, entry->uid, &principal))
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
	core_entries_free(entries);
	return code;
}

bool core_may_unregister(const Core *core, const Caller *caller, const struct shmb_status *status) {
	LinkSession *session = link_get(core->link);
	uint32_t principal;

	if (!core->allow_client_shm || !session || !(CORE_STATES_LISTED & CORE_STATE_BIT(status->state)))
		return false;
	return may_retire(core, session, caller, core_is_of_door(status), status->uid, &principal);
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
