/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Protocol: the structs and numbers of shmbroker-protocol(7), which is normative.
 *
 * The structs are made from messages.def, the codes from errors.def, the opcodes and other numbers from the
 * lists below; the manual page's tables and the test client are checked against the same lists. Integers are
 * little-endian; hosts of the other byte order are not supported.
 */

#include <stddef.h>
#include <stdint.h>

#include "messages.def"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the protocol's structs are little-endian");

#define WIRE_VERSION 1
#define WIRE_MESSAGE_MAX 65536
#define WIRE_FDS_MAX 64	  /* a message that carries more is refused */
#define WIRE_FDS_ROOM 253 /* SCM_MAX_FD: control buffers always have room for these */
#define WIRE_BATCH_MAX 64
#define WIRE_OUTSTANDING_MAX 64
#define WIRE_NAME_MAX 255
#define WIRE_TEXT_MAX 400
#define WIRE_ACL_MAX 64
#define WIRE_HANDLE_SIZE 64
#define WIRE_HOLDERS_MAX 256
#define WIRE_TOKEN_SIZE 16
#define WIRE_COMM_SIZE 16

#define WIRE_NO_FD UINT16_MAX
#define WIRE_ANY_UID UINT32_MAX
#define WIRE_REST UINT64_MAX
#define WIRE_FOREVER UINT32_MAX

/* clang-format off */
/* W(NAME, value, "what it asks for") */
#define WIRE_OPCODES(W)                                                                                        \
	W(HELLO, 1, "opens a session; the first message of a connection")                                      \
	W(PING, 2, "asks for a sign of life")                                                                  \
	W(INFO, 3, "asks what this broker is: keys and values")                                                \
	W(REGISTER, 4, "registers regions")                                                                    \
	W(UNREGISTER, 5, "retires regions")                                                                    \
	W(LOOKUP, 6, "takes leases by message")                                                                \
	W(RELEASE, 7, "gives leases back")                                                                     \
	W(ATTACH, 8, "asks for the registry and a lease page")                                                 \
	W(MAP, 9, "asks for the memory of a generation")                                                       \
	W(UNMAP, 10, "says that a generation is not mapped any more")                                          \
	W(NOTIFY, 11, "says that the last lease on a retiring slot may have gone")                             \
	W(STATUS, 12, "lists regions")                                                                         \
	W(CLIENTS, 13, "lists sessions")                                                                       \
	W(STATS, 14, "lists counters")                                                                         \
	W(SUBSCRIBE, 15, "asks for events")                                                                    \
	W(EVENT, 16, "an event; sent by the broker only")

/* W(GROUP, NAME, value) */
#define WIRE_NUMBERS(W)                                                                                        \
	W(FLAG, REPLY, 1)                                                                                      \
	W(FLAG, ERROR, 2)                                                                                      \
	W(FLAG, EVENT, 4)                                                                                      \
	W(FLAG, RETRY, 8)                                                                                      \
	W(ROLE, OWNER, 1)                                                                                      \
	W(ROLE, CONSUMER, 2)                                                                                   \
	W(ROLE, ADMIN, 4)                                                                                      \
	W(RIGHT, KEEP, 1)                                                                                      \
	W(RIGHT, DELEGATE, 2)                                                                                  \
	W(FEATURE, LEASE_PAGE, 1)                                                                              \
	W(FEATURE, EVENTS, 2)                                                                                  \
	W(FEATURE, RESUME, 4)                                                                                  \
	W(FEATURE, CUDA, 8)                                                                                    \
	W(FEATURE, POOL, 16)                                                                                   \
	W(FEATURE, READY, 32)                                                                                  \
	W(HELLO, ACCEPT_UNSEALED, 1)                                                                           \
	W(HELLO_REPLY, RESUMED, 1)                                                                             \
	W(KIND, MEMORY, 1)                                                                                     \
	W(KIND, CUDA_IPC, 2)                                                                                   \
	W(KIND, CUDA_VMM, 3)                                                                                   \
	W(ACCESS, READ, 1)                                                                                     \
	W(ACCESS, WRITE, 2)                                                                                    \
	W(REGISTER, KEEP, 1)                                                                                   \
	W(REGISTER, REPLACE, 2)                                                                                \
	W(ACL, UID, 1)                                                                                         \
	W(ACL, GID, 2)                                                                                         \
	W(SCOPE, NAMES, 0)                                                                                     \
	W(SCOPE, SESSION, 1)                                                                                   \
	W(SCOPE, UID, 2)                                                                                       \
	W(SCOPE, ALL, 3)                                                                                       \
	W(MODE, STRICT, 0)                                                                                     \
	W(MODE, LAZY, 1)                                                                                       \
	W(MODE, FORCE, 2)                                                                                      \
	W(MODE, DISCARD, 3)                                                                                    \
	W(UNREGISTER, WAIT, 1)                                                                                 \
	W(UNREGISTERED, GONE, 0)                                                                               \
	W(UNREGISTERED, DRAINING, 1)                                                                           \
	W(LOOKUP, WANT_FD, 1)                                                                                  \
	W(LOOKUP, NO_LEASE, 2)                                                                                 \
	W(ATTACH, AUTO, 0)                                                                                     \
	W(ATTACH, ASYMMETRIC, 1)                                                                               \
	W(ATTACH, RMW, 2)                                                                                      \
	W(MAP, WANT_FD, 1)                                                                                     \
	W(STATUS, HOLDERS, 1)                                                                                  \
	W(MATCH, ANY, 0)                                                                                       \
	W(MATCH, EXACT, 1)                                                                                     \
	W(MATCH, PREFIX, 2)                                                                                    \
	W(STATE, REVOKED, 0)                                                                                   \
	W(STATE, ACTIVE, 1)                                                                                    \
	W(STATE, LAZY, 2)                                                                                      \
	W(STATE, RETIRING, 3)                                                                                  \
	W(REGION, UNSEALED, 1)                                                                                 \
	W(REGION, SPARSE, 2)                                                                                   \
	W(REGION, READ_ONLY_ADVISORY, 4)                                                                       \
	W(REGION, NO_READ_ONLY_FD, 8)                                                                          \
	W(REGION, KEPT, 16)                                                                                    \
	W(REGION, HUGETLB, 32)                                                                                 \
	W(REGION, UNINDEXED, 64)                                                                               \
	W(REGION, UNVALIDATED, 128)                                                                               \
	W(HOLDER, PAGE, 1)                                                                                     \
	W(HOLDER, MESSAGE, 2)                                                                                  \
	W(HOLDER, DETACHED, 4)                                                                                 \
	W(CLIENT, ATTACHED, 1)                                                                                 \
	W(CLIENT, DETACHED, 2)                                                                                 \
	W(CLIENT, AWAY, 4)                                                                                     \
	W(STATS, HELP, 1)                                                                                      \
	W(STATS, ACCOUNTS, 2)                                                                                  \
	W(STAT, COUNTER, 1)                                                                                    \
	W(STAT, GAUGE, 2)                                                                                      \
	W(EVENT, REGISTERED, 0)                                                                                \
	W(EVENT, RETIRING, 1)                                                                                  \
	W(EVENT, GONE, 2)                                                                                      \
	W(EVENT, REVOKED, 3)                                                                                   \
	W(EVENT, OWNER_DIED, 4)                                                                                \
	W(EVENT, JOINED, 5)                                                                                    \
	W(EVENT, LEFT, 6)                                                                                      \
	W(EVENT, OVERFLOW, 7)
/* clang-format on */

enum {
#define W(_name, _value, _text) WIRE_OP_##_name = (_value),
	WIRE_OPCODES(W)
#undef W
	_WIRE_OP_N
};

enum {
#define W(_group, _name, _value) WIRE_##_group##_##_name = (_value),
	WIRE_NUMBERS(W)
#undef W
};

/* the public header has the same codes as macros; whichever comes first defines them */
#ifndef SHMB_E_INVALID
enum {
#define SHMB_ERROR(_name, _value, _text) SHMB_E_##_name = (_value),
#include "errors.def"
#undef SHMB_ERROR
};
#endif

enum {
	_WIRE_E_SUCCESS,
#define SHMB_ERROR(_name, _value, _text) WIRE_E_##_name = (_value),
#include "errors.def"
#undef SHMB_ERROR
	_WIRE_E_N
};

typedef uint8_t wire_u8;
typedef uint16_t wire_u16;
typedef uint32_t wire_u32;
typedef uint64_t wire_u64;
typedef struct {
	uint8_t bytes[16];
} wire_b16;

/* WireHeader, WireHelloRequest, ...: one struct for each line of WIRE_STRUCTS */
#define WIRE_FIELD(_type, _name, _text) wire_##_type _name;
#define WIRE_STRUCT(_type, _title, _tail)  \
	typedef struct Wire##_type {       \
		_type##_FIELDS(WIRE_FIELD) \
	} Wire##_type;                     \
	_Static_assert(sizeof(Wire##_type) % 8 == 0, #_type " is a multiple of 8 bytes");
WIRE_STRUCTS(WIRE_STRUCT)
#undef WIRE_STRUCT
#undef WIRE_FIELD

/* bytes that a part of @size bytes takes with its padding */
static inline size_t wire_padded(size_t size) {
	return (size + 7) & ~(size_t)7;
}

/* the name of an opcode, of a code (upper case), and a code's sentence; NULL for unknown ones */
const char *wire_opcode_name(uint32_t opcode);
const char *wire_error_name(uint32_t code);
const char *wire_error_text(uint32_t code);
