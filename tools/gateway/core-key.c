/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core-entry.h"
#include "core-key.h"
#include "log.h"
#include "text.h"

#define RESERVED_PREFIX "triton_python_backend_shm_region_"

AnswerCode core_key_check(const char *name, Bytes key, Bytes *ret, Answer *answer) {
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
			name, CORE_ARG(key));
	*ret = plain;
	return ANSWER_OK;
}

/* the fd of the region of @entry, whose name is @name */
static int open_lease(const LinkSession *session, const char *name, const CoreEntry *entry, CoreKeyMemory *ret) {
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
static AnswerCode open_region(Core *core, const Caller *caller, const char *key, CoreKeyMemory *ret, Answer *answer) {
	char name[sizeof(CORE_KEY_PREFIX) + CORE_KEY_MAX];
	LinkSession *session;
	AnswerCode code;
	CoreEntry *entry;
	int r;

	(void)snprintf(name, sizeof(name), CORE_KEY_PREFIX "%s", key);
	if (strlen(name) > CORE_NAME_MAX)
		return ANSWER_NOT_FOUND;
	code = core_find(core, name, SIZE_MAX, &entry, answer);
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
	core_entries_free(entry);
	return code;
}

AnswerCode core_key_open(Core *core, const Caller *caller, Bytes key, Bytes plain, CoreKeyMemory *ret, Answer *answer) {
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
						  CORE_ARG(key));
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
	return answer_set(answer, ANSWER_INTERNAL, "Unable to open shared memory region: '%.*s'", CORE_ARG(key));
}
