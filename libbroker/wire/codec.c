/* SPDX-License-Identifier: Apache-2.0 */

#include <string.h>

#include "codec.h"

#define ACCESS_ALL (WIRE_ACCESS_READ | WIRE_ACCESS_WRITE)

int wire_header_read(const void *message, size_t size, WireHeader *ret) {
	WireHeader header;

	if (size < sizeof(header) || size > WIRE_MESSAGE_MAX)
		return SHMB_E_INVALID;
	memcpy(&header, message, sizeof(header));
	if (header.length != size)
		return SHMB_E_INVALID;
	*ret = header;
	return 0;
}

int wire_header_check_request(const WireHeader *header, const char **ret_why) {
	if ((header->flags & ~WIRE_FLAG_RETRY) != 0) {
		*ret_why = "flags in the header of a request";
		return SHMB_E_INVALID;
	}
	if (header->flags != 0 && (header->opcode == WIRE_OP_HELLO || header->opcode == WIRE_OP_NOTIFY)) {
		*ret_why = "a retry of what is never sent again";
		return SHMB_E_INVALID;
	}
	if (header->serial == 0) {
		*ret_why = "the serial is 0";
		return SHMB_E_INVALID;
	}
	return 0;
}

WireReader wire_reader_body(const void *message, size_t size) {
	const uint8_t *bytes = message;

	return (WireReader){ .at = bytes + sizeof(WireHeader), .end = bytes + size };
}

static void reader_fail(WireReader *reader, const char *why) {
	if (reader->bad)
		return;
	reader->bad = true;
	reader->why = why;
}

static size_t reader_left(const WireReader *reader) {
	return (size_t)(reader->end - reader->at);
}

static inline bool bytes_are_zero(const void *bytes, size_t size) {
	const uint8_t *at = bytes;
	uint8_t any = 0;

	for (size_t i = 0; i < size; i++)
		any |= at[i];
	return any == 0;
}

static inline __attribute__((__always_inline__)) void reader_copy(WireReader *reader, void *ret, size_t size) {
	if (!reader->bad && size > reader_left(reader))
		reader_fail(reader, "the message is truncated");
	if (reader->bad) {
		memset(ret, 0, size);
		return;
	}
	memcpy(ret, reader->at, size);
	reader->at += size;
}

void wire_read(WireReader *reader, void *ret, size_t size) {
	reader_copy(reader, ret, size);
}

/* up to 7 bytes after @size bytes at @at */
static inline bool padding_is_zero(const uint8_t *at, size_t size) {
	uint64_t last;

	if (size % 8 == 0)
		return true;
	memcpy(&last, at + size / 8 * 8, sizeof(last));
	return last >> size % 8 * 8 == 0;
}

const void *wire_read_bytes(WireReader *reader, size_t size) {
	const uint8_t *at = reader->at;

	if (!reader->bad && (size > reader_left(reader) || wire_padded(size) > reader_left(reader)))
		reader_fail(reader, "the message is truncated");
	if (!reader->bad && !padding_is_zero(at, size))
		reader_fail(reader, "padding is not zero");
	if (reader->bad)
		return NULL;
	reader->at += wire_padded(size);
	return at;
}

bool wire_reader_end(WireReader *reader) {
	if (!reader->bad && reader->at != reader->end)
		reader_fail(reader, "bytes are left over");
	return !reader->bad;
}

static int reader_result(WireReader *reader) {
	return wire_reader_end(reader) ? 0 : SHMB_E_INVALID;
}

/* clang-format off */
/* true when all fields of @type whose names begin with reserved are zero */
static inline __attribute__((__always_inline__)) bool reserved_is_zero(WireType type, const void *bytes) {
	switch (type) {
#define FIELD(_type, _name, _text)                                                                             \
	&& (strncmp(#_name, "reserved", 8) != 0 || bytes_are_zero(&body->_name, sizeof(body->_name)))
#define STRUCT(_type, _title, _tail)                                                                           \
	case WIRE_TYPE_##_type: {                                                                              \
		const Wire##_type *body = bytes;                                                               \
                                                                                                               \
		return body != NULL _type##_FIELDS(FIELD);                                                           \
	}
		WIRE_STRUCTS(STRUCT)
#undef STRUCT
#undef FIELD
	case WIRE_TYPE_NONE:
	default:
		return true;
	}
}
/* clang-format on */

/* inlined, so that of all types only one is left */
static inline __attribute__((__always_inline__)) void reader_struct(WireReader *reader, WireType type, void *ret,
								    size_t size) {
	reader_copy(reader, ret, size);
	if (!reader->bad && !reserved_is_zero(type, ret))
		reader_fail(reader, "a reserved field is not zero");
}

#define READ_STRUCT(_reader, _type, _ret) \
	reader_struct(_reader, WIRE_TYPE_##_type, (Wire##_type *)(_ret), sizeof(Wire##_type))

static void reader_require(WireReader *reader, bool condition, const char *why) {
	if (!condition)
		reader_fail(reader, why);
}

static void reader_flags(WireReader *reader, uint64_t flags, uint64_t known) {
	reader_require(reader, (flags & ~known) == 0, "unknown flags");
}

static void reader_access(WireReader *reader, uint32_t access) {
	reader_require(reader, (access & ~(uint32_t)ACCESS_ALL) == 0, "unknown access bits");
	reader_require(reader, access & WIRE_ACCESS_READ, "the access does not include READ");
}

/* the head of a list of 1 to WIRE_BATCH_MAX entries; 0 when bad */
static uint32_t reader_count(WireReader *reader) {
	WireCountHead head;

	READ_STRUCT(reader, CountHead, &head);
	reader_require(reader, head.count != 0, "the list is empty");
	reader_require(reader, head.count <= WIRE_BATCH_MAX, "the list has more than 64 entries");
	return reader->bad ? 0 : head.count;
}

int wire_read_hello(WireReader *reader, WireHelloRequest *ret) {
	READ_STRUCT(reader, HelloRequest, ret);
	reader_flags(reader, ret->flags, WIRE_HELLO_ACCEPT_UNSEALED);
	reader_require(reader, (ret->roles & ~(uint32_t)(WIRE_ROLE_OWNER | WIRE_ROLE_CONSUMER | WIRE_ROLE_ADMIN)) == 0,
		       "unknown roles");
	reader_require(reader, ret->session != 0 || bytes_are_zero(&ret->token, sizeof(ret->token)),
		       "a token without a session");
	return reader_result(reader);
}

/* what a region of each kind needs */
static void register_check_kind(WireReader *reader, const WireRegisterEntry *entry) {
	bool has_fd = entry->fd_index != WIRE_NO_FD;
	bool has_read_only_fd = entry->read_only_fd_index != WIRE_NO_FD;

	switch (entry->kind) {
	case WIRE_KIND_MEMORY:
		reader_require(reader, has_fd, "memory without an fd");
		reader_require(reader, entry->handle_length == 0, "memory with a handle");
		reader_require(reader, entry->object_size == 0, "memory with an object size");
		reader_require(reader, bytes_are_zero(&entry->device, sizeof(entry->device)), "memory with a device");
		break;
	case WIRE_KIND_CUDA_IPC:
		reader_require(reader, entry->handle_length == WIRE_HANDLE_SIZE, "a CUDA IPC handle has 64 bytes");
		reader_require(reader, !has_fd && !has_read_only_fd, "a CUDA IPC handle with an fd");
		break;
	case WIRE_KIND_CUDA_VMM:
		reader_require(reader, has_fd, "CUDA memory without an fd");
		reader_require(reader, !has_read_only_fd, "CUDA memory with a read-only fd");
		reader_require(reader, entry->handle_length == 0, "CUDA memory with both an fd and a handle");
		break;
	default:
		reader_fail(reader, "unknown kind of memory");
	}
}

static void register_read_entry(WireReader *reader, WireRegister *ret) {
	WireRegisterEntry *entry = &ret->entry;

	READ_STRUCT(reader, RegisterEntry, entry);
	reader_flags(reader, entry->flags, WIRE_REGISTER_KEEP | WIRE_REGISTER_REPLACE);
	reader_access(reader, entry->access);
	register_check_kind(reader, entry);
	reader_require(reader, entry->acl_count <= WIRE_ACL_MAX, "the access list has more than 64 entries");
	ret->name = wire_read_bytes(reader, entry->name_length);
	ret->acl = wire_read_bytes(reader, entry->acl_count * sizeof(WireAclEntry));
	ret->handle = wire_read_bytes(reader, entry->handle_length);
	ret->key = wire_read_bytes(reader, entry->key_length);
	for (uint32_t i = 0; i < entry->acl_count && !reader->bad; i++)
		reader_require(reader, ret->acl[i].kind == WIRE_ACL_UID || ret->acl[i].kind == WIRE_ACL_GID,
			       "an access list entry that is neither uid nor gid");
}

static void register_name_fd(WireReader *reader, uint16_t fd_index, uint32_t n_fds, uint64_t *named) {
	if (fd_index == WIRE_NO_FD)
		return;
	if (fd_index >= n_fds) {
		reader_fail(reader, "an entry names an fd that the message does not carry");
		return;
	}
	*named |= UINT64_C(1) << fd_index;
}

int wire_read_register(WireReader *reader, uint32_t n_fds, WireRegister *ret_entries, uint32_t *ret_count) {
	uint64_t named = 0;
	uint32_t count;

	reader_require(reader, n_fds <= WIRE_FDS_MAX, "more than 64 fds");
	count = reader_count(reader);
	for (uint32_t i = 0; i < count && !reader->bad; i++) {
		register_read_entry(reader, &ret_entries[i]);
		if (reader->bad)
			break;
		register_name_fd(reader, ret_entries[i].entry.fd_index, n_fds, &named);
		register_name_fd(reader, ret_entries[i].entry.read_only_fd_index, n_fds, &named);
	}
	reader_require(reader, (uint32_t)__builtin_popcountll(named) == n_fds, "fds with no slot for them");
	if (!wire_reader_end(reader))
		return SHMB_E_INVALID;
	*ret_count = count;
	return 0;
}

int wire_read_unregister(WireReader *reader, WireUnregisterRequest *ret, WireName *ret_names) {
	READ_STRUCT(reader, UnregisterRequest, ret);
	reader_flags(reader, ret->flags, WIRE_UNREGISTER_WAIT);
	reader_require(reader, ret->scope <= WIRE_SCOPE_ALL, "unknown scope");
	reader_require(reader, ret->mode <= WIRE_MODE_DISCARD, "unknown mode");
	reader_require(reader,
		       ret->principal == WIRE_ANY_UID || ret->scope == WIRE_SCOPE_NAMES || ret->scope == WIRE_SCOPE_UID,
		       "a principal with a scope that takes none");
	if (ret->scope == WIRE_SCOPE_NAMES) {
		reader_require(reader, ret->count != 0, "the list is empty");
		reader_require(reader, ret->count <= WIRE_BATCH_MAX, "the list has more than 64 entries");
	} else {
		reader_require(reader, ret->count == 0, "names with a scope that takes none");
	}
	for (uint32_t i = 0; i < ret->count && !reader->bad; i++) {
		READ_STRUCT(reader, NameEntry, &ret_names[i].entry);
		ret_names[i].name = wire_read_bytes(reader, ret_names[i].entry.name_length);
	}
	return reader_result(reader);
}

int wire_read_lookup(WireReader *reader, WireLookup *ret_entries, uint32_t *ret_count) {
	uint32_t count = reader_count(reader);

	for (uint32_t i = 0; i < count && !reader->bad; i++) {
		WireLookupEntry *entry = &ret_entries[i].entry;

		READ_STRUCT(reader, LookupEntry, entry);
		reader_flags(reader, entry->flags, WIRE_LOOKUP_WANT_FD | WIRE_LOOKUP_NO_LEASE);
		/* who takes no lease and no fd need not say what for */
		if (entry->access != 0 || entry->flags != WIRE_LOOKUP_NO_LEASE)
			reader_access(reader, entry->access);
		ret_entries[i].name = wire_read_bytes(reader, entry->name_length);
	}
	if (!wire_reader_end(reader))
		return SHMB_E_INVALID;
	*ret_count = count;
	return 0;
}

int wire_read_release(WireReader *reader, uint64_t *ret_leases, uint32_t *ret_count) {
	uint32_t count = reader_count(reader);

	for (uint32_t i = 0; i < count && !reader->bad; i++) {
		WireReleaseEntry entry;

		READ_STRUCT(reader, ReleaseEntry, &entry);
		ret_leases[i] = entry.lease;
	}
	if (!wire_reader_end(reader))
		return SHMB_E_INVALID;
	*ret_count = count;
	return 0;
}

int wire_read_status(WireReader *reader, WireStatusRequest *ret, const char **ret_name) {
	const char *name;

	READ_STRUCT(reader, StatusRequest, ret);
	reader_flags(reader, ret->flags, WIRE_STATUS_HOLDERS);
	reader_require(reader, ret->states >> (WIRE_STATE_RETIRING + 1) == 0, "unknown states");
	reader_require(reader, (ret->kinds & 1) == 0 && ret->kinds >> (WIRE_KIND_CUDA_VMM + 1) == 0, "unknown kinds");
	reader_require(reader, ret->match <= WIRE_MATCH_PREFIX, "unknown match");
	reader_require(reader, ret->match != WIRE_MATCH_ANY || ret->name_length == 0,
		       "a name that is not to be matched");
	reader_require(reader, ret->name_length <= WIRE_NAME_MAX, "the name is longer than 255 bytes");
	name = wire_read_bytes(reader, ret->name_length);
	if (!wire_reader_end(reader))
		return SHMB_E_INVALID;
	*ret_name = name;
	return 0;
}

int wire_read_fixed_type(WireReader *reader, void *ret, size_t size, WireType type) {
	reader_struct(reader, type, ret, size);

	switch (type) {
	case WIRE_TYPE_AttachRequest: {
		const WireAttachRequest *attach = ret;

		reader_require(reader, attach->mode <= WIRE_ATTACH_RMW, "unknown mode");
		break;
	}
	case WIRE_TYPE_MapRequest: {
		const WireMapRequest *map = ret;

		reader_flags(reader, map->flags, WIRE_MAP_WANT_FD);
		reader_access(reader, map->access);
		break;
	}
	case WIRE_TYPE_StatsRequest: {
		const WireStatsRequest *stats = ret;

		reader_flags(reader, stats->flags, WIRE_STATS_HELP | WIRE_STATS_ACCOUNTS);
		break;
	}
	default:
		break;
	}
	return reader_result(reader);
}

void wire_write_begin(WireWriter *writer, void *buffer, size_t capacity, uint16_t opcode, uint16_t flags,
		      uint64_t serial) {
	WireHeader header = { .opcode = opcode, .flags = flags, .serial = serial };

	*writer = (WireWriter){
		.buffer = buffer,
		.capacity = (capacity < WIRE_MESSAGE_MAX ? capacity : WIRE_MESSAGE_MAX) & ~(size_t)7,
	};
	(void)wire_write(writer, &header, sizeof(header));
}

size_t wire_write_end(WireWriter *writer) {
	uint32_t length = (uint32_t)writer->size;

	if (writer->overflow)
		return 0;
	memcpy(writer->buffer + offsetof(WireHeader, length), &length, sizeof(length));
	return writer->size;
}

size_t wire_write_error(void *buffer, uint16_t opcode, uint64_t serial, uint32_t code, const char *text) {
	WireErrorReply reply = { .code = code };
	WireWriter writer;
	size_t size;

	if (!text)
		text = wire_error_text(code);
	if (!text)
		text = "";
	size = strlen(text);
	if (size > WIRE_TEXT_MAX) {
		size = WIRE_TEXT_MAX;
		/* never half a character */
		while (size > 0 && ((uint8_t)text[size] & 0xc0) == 0x80)
			size--;
	}
	reply.text_length = (uint16_t)size;
	wire_write_begin(&writer, buffer, WIRE_ERROR_REPLY_MAX, opcode, WIRE_FLAG_REPLY | WIRE_FLAG_ERROR, serial);
	(void)wire_write(&writer, &reply, sizeof(reply));
	(void)wire_write(&writer, text, size);
	return wire_write_end(&writer);
}
