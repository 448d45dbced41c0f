/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Codec: takes messages apart and puts them together. Does no I/O, allocates nothing, trusts nothing.
 *
 * A WireReader walks over a received body. Its errors are sticky: after the first bad step every further step
 * gives nothing, wire_reader_end() tells, and `why` is a sentence for the error reply. Pointers that it hands out
 * point into the message, which outlives them.
 * A WireWriter fills a caller's buffer; when it is full every further step is dropped and `overflow` is set.
 */

#include <stdbool.h>
#include <string.h>

#include "protocol.h"

typedef struct WireReader {
	const uint8_t *at;
	const uint8_t *end;
	bool bad;
	const char *why; /* static; NULL while all is well */
} WireReader;

/* which struct of messages.def something is */
typedef enum WireType {
	WIRE_TYPE_NONE,
#define WIRE_TYPE(_type, _title, _tail) WIRE_TYPE_##_type,
	WIRE_STRUCTS(WIRE_TYPE)
#undef WIRE_TYPE
} WireType;

#define WIRE_TYPE_CASE(_type, _title, _tail) , Wire##_type * : WIRE_TYPE_##_type

typedef struct WireWriter {
	uint8_t *buffer;
	size_t size; /* bytes written */
	size_t capacity;
	bool overflow;
} WireWriter;

/* one entry of a REGISTER request, with what follows it */
typedef struct WireRegister {
	WireRegisterEntry entry;
	const char *name;	 /* entry.name_length bytes, not NUL-terminated */
	const WireAclEntry *acl; /* entry.acl_count entries */
	const uint8_t *handle;	 /* entry.handle_length bytes */
	const char *key;	 /* entry.key_length bytes, not NUL-terminated */
} WireRegister;

typedef struct WireName {
	WireNameEntry entry;
	const char *name;
} WireName;

typedef struct WireLookup {
	WireLookupEntry entry;
	const char *name;
} WireLookup;

/*
 * Checks the header of a message of @size bytes that was received with one recvmsg.
 * Returns 0 and copies the header to @ret, or SHMB_E_INVALID: too short, too long, or a length that lies.
 */
int wire_header_read(const void *message, size_t size, WireHeader *ret);
/* what the broker also demands of a request: no flags but RETRY where that may be, and a serial. Returns 0, or SHMB_E_INVALID and the sentence. */
int wire_header_check_request(const WireHeader *header, const char **ret_why);

/* begins to read the body of a message that wire_header_read() has accepted; @message is 8-byte aligned */
WireReader wire_reader_body(const void *message, size_t size);
/* copies a fixed struct of @size bytes; on a short message zeroes it and is bad from then on */
void wire_read(WireReader *reader, void *ret, size_t size);
/* hands out @size bytes and steps over their padding, which must be zero; NULL when bad */
const void *wire_read_bytes(WireReader *reader, size_t size);
/* true when all was well and nothing is left */
bool wire_reader_end(WireReader *reader);

/*
 * The request bodies that have structure. Each returns 0, or SHMB_E_INVALID with reader->why when it is truncated,
 * has bytes left over, has reserved fields or padding that are not zero, unknown flags, a count over the limit, or
 * fields that contradict each other. Arrays hold WIRE_BATCH_MAX entries. Names and keys are not checked here:
 * wire_name_check() and wire_key_check() tell each entry's fate. REGISTER names every one of its @n_fds fds; no other request carries
 * any, and whoever received them checks that.
 */
int wire_read_hello(WireReader *reader, WireHelloRequest *ret);
int wire_read_register(WireReader *reader, uint32_t n_fds, WireRegister *ret_entries, uint32_t *ret_count);
int wire_read_unregister(WireReader *reader, WireUnregisterRequest *ret, WireName *ret_names);
int wire_read_lookup(WireReader *reader, WireLookup *ret_entries, uint32_t *ret_count);
int wire_read_release(WireReader *reader, uint64_t *ret_leases, uint32_t *ret_count);
int wire_read_status(WireReader *reader, WireStatusRequest *ret, const char **ret_name);
/*
 * A body that is exactly one fixed struct, of a request or of a reply: @_ret points to one of the structs of
 * messages.def. Checks reserved fields, and what the request's flags, mode and access may be.
 */
/* clang-format off */
#define wire_read_fixed(_reader, _ret, _size)                                                                  \
	wire_read_fixed_type(_reader, _ret, _size,                                                             \
			     _Generic((_ret)WIRE_STRUCTS(WIRE_TYPE_CASE), default: WIRE_TYPE_NONE))
/* clang-format on */
int wire_read_fixed_type(WireReader *reader, void *ret, size_t size, WireType type);

/* begins a message: writes the header; wire_write_end() sets the length */
void wire_write_begin(WireWriter *writer, void *buffer, size_t capacity, uint16_t opcode, uint16_t flags,
		      uint64_t serial);
/* bytes that still fit */
static inline size_t wire_writer_room(const WireWriter *writer) {
	return writer->overflow ? 0 : writer->capacity - writer->size;
}
/* appends @size bytes (zeroes when @data is NULL) and pads to a multiple of 8; returns where they stand, or NULL */
static inline void *wire_write(WireWriter *writer, const void *data, size_t size) {
	uint8_t *at = writer->buffer + writer->size;

	/* the room is a multiple of 8, so what fits also fits with its padding */
	if (writer->overflow || size > wire_writer_room(writer)) {
		writer->overflow = true;
		return NULL;
	}
	if (size % 8)
		memset(at + size / 8 * 8, 0, 8);
	if (data && size)
		memcpy(at, data, size);
	else
		memset(at, 0, size);
	writer->size += wire_padded(size);
	return at;
}
/* completes the message; returns its size, or 0 when it overflowed */
size_t wire_write_end(WireWriter *writer);
/* a whole error reply; @text NULL for the code's own sentence, cut at WIRE_TEXT_MAX; @buffer has room for the maximum */
#define WIRE_ERROR_REPLY_MAX (sizeof(WireHeader) + sizeof(WireErrorReply) + WIRE_TEXT_MAX)
size_t wire_write_error(void *buffer, uint16_t opcode, uint64_t serial, uint32_t code, const char *text);
