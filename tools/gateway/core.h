/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Core: what the gateway does, whichever door it was asked through. Every rule and every sentence of Triton's
 * shared-memory extension is here once; HTTP and gRPC parse, call, and render the Answer.
 *
 * The core keeps no registry: every call asks the broker, and so both doors, all other clients and the next gateway see
 * the same regions. A region that is registered here is handed to the broker by fd, is kept (it belongs to the uid of the
 * caller, or of the gateway, and outlives both connections and gateway), and carries its key as a label, by which the
 * regions of this door are told from those that were registered natively.
 *
 * Calls are synchronous and wait for the broker no longer than LINK_CALL_MS. Without a broker all of them but core_live()
 * answer ANSWER_UNAVAILABLE. Names, keys and handles are bytes with a length, as the peer sent them: the core checks them
 * (UTF-8, no control characters, at most 255 bytes). Every `Answer *` must be {} or set; it is set on every refusal.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "access.h"
#include "answer.h"
#include "devices.h"
#include "core-metrics.h"
#include "key.h"
#include "link.h"

#define CORE_NAME_MAX 255
#define CORE_KEY_MAX 255
#define CORE_CUDA_HANDLE_SIZE 64
/* bytes of a request that carries no tensors: of an HTTP body, of a message of gRPC */
#define CORE_REQUEST_MAX 65536

typedef enum CoreKind {
	CORE_SYSTEM,
	CORE_CUDA
} CoreKind;

/* bytes that a peer sent; not terminated, not checked */
typedef struct Bytes {
	const char *data;
	size_t size;
} Bytes;

#define BYTES(_text) ((Bytes){ (_text), __builtin_strlen(_text) })
/* for "%.*s" */
#define CORE_ARG(_bytes) (int)(_bytes).size, (_bytes).data

typedef struct Core {
	Link *link;		 /* borrowed */
	KeyOpener *opener;	 /* borrowed */
	CoreMetrics *metrics;	 /* borrowed; NULL counts nothing */
	const Devices *devices;	 /* borrowed */
	const char *server_name; /* borrowed */
	uint32_t uid;		 /* the gateway's own */
	bool allow_client_shm;
	struct Models *models; /* borrowed; NULL: there are none */
} Core;

/* ---- the server ---- */

/* always true: it answers */
bool core_live(const Core *core);
/* whether the broker answers now; one round trip */
bool core_ready(Core *core);

#define CORE_EXTENSIONS_MAX 8

typedef struct CoreMetadata {
	const char *name;
	const char *version;
	const char *extensions[CORE_EXTENSIONS_MAX]; /* only what works now; NULL at the end */
} CoreMetadata;
/* Texts are borrowed from @core and from constants. Also without a broker. */
void core_metadata(Core *core, CoreMetadata *ret);

/* ---- regions ---- */

/*
 * Registers @byte_size bytes at @offset of the POSIX shared memory @key as @name. Codes: UNSUPPORTED (client shm is off),
 * INVALID_ARG (name, key, bounds), ALREADY_EXISTS, INTERNAL (cannot be opened), PERMISSION_DENIED (the broker's policy),
 * RESOURCE_EXHAUSTED (its quotas), UNAVAILABLE.
 */
AnswerCode core_system_register(Core *core, const Caller *caller, Bytes name, Bytes key, uint64_t offset,
				uint64_t byte_size, Answer *answer);
/*
 * Registers @byte_size bytes from the start of the allocation behind @raw_handle, a cudaIpcMemHandle_t, on the GPU with
 * the ordinal @device_id. Order: off, the handle's length, the name.
 */
AnswerCode core_cuda_register(Core *core, const Caller *caller, Bytes name, Bytes raw_handle, int64_t device_id,
			      uint64_t byte_size, Answer *answer);

/* Whether clients may register and unregister at all; UNSUPPORTED. The calls below ask it themselves, first. */
AnswerCode core_check_allowed(const Core *core, Answer *answer);

typedef struct CoreRegion {
	const char *name;
	const char *key; /* NULL with CUDA; "shmbroker:NAME" for what was registered natively; "" for another user's */
	uint64_t offset;
	uint64_t byte_size;
	uint64_t device_id;
} CoreRegion;

typedef struct CoreRegionList {
	CoreRegion *regions; /* in the order of their names' bytes */
	size_t n;
	struct CoreEntry *entries; /* what their texts are in; the core's */
} CoreRegionList;

/*
 * The regions of @kind: the one called @name, or all when @name is empty, those that are going once they are idle
 * included. @ret is set on ANSWER_OK, and is then to be freed by core_region_list_deinit(). NOT_FOUND, INVALID_ARG (the
 * name), RESOURCE_EXHAUSTED (they are too many), UNAVAILABLE.
 */
AnswerCode core_status(Core *core, const Caller *caller, CoreKind kind, Bytes name, CoreRegionList *ret,
		       Answer *answer);
void core_region_list_deinit(CoreRegionList *list);

/* Whether @caller is told the key of a region of @uid: administrators, and whose it is. */
bool core_shows_key(const Core *core, const Caller *caller, uint32_t uid);

/* Whether @caller may unregister the region that @status tells of, as far as is seen from here. */
bool core_may_unregister(const Core *core, const Caller *caller, const struct shmb_status *status);

/*
 * Unregisters @name, which is not empty: at once, or when its last user is done. An unknown name and one of the other kind
 * are fine. UNSUPPORTED, PERMISSION_DENIED (it was registered natively or by another user, and is not the caller's),
 * UNAVAILABLE.
 */
AnswerCode core_unregister(Core *core, const Caller *caller, CoreKind kind, Bytes name, Answer *answer);
/*
 * Unregisters what came through this door and is the caller's: with caller->admin whosever it is, with caller->everything
 * also what was registered natively. INTERNAL names those that could not be unregistered.
 */
AnswerCode core_unregister_all(Core *core, const Caller *caller, CoreKind kind, Answer *answer);

/*
 * Both doors and the inference code say these things with the same words. Each returns the code that it sets.
 * @result is what a call of libshmbroker returned (not 0) about @name.
 */
AnswerCode core_unavailable(Core *core, Answer *answer);
AnswerCode core_broker_refused(Core *core, int result, Bytes name, Answer *answer);

/* NULL, or why these bytes are no name of a region: a static sentence */
const char *core_name_why(Bytes name);
