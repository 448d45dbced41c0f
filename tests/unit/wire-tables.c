/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prints the protocol's tables, one fact a line, for the checks that compare other texts with them:
 *
 *	struct NAME SIZE title|what follows it
 *	field STRUCT OFFSET SIZE TYPE NAME meaning
 *	opcode NAME VALUE text
 *	number GROUP NAME VALUE
 *	error NAME VALUE text
 *	limit NAME VALUE
 *
 * The shared memories' structs come as struct and field lines like those of the messages.
 */

#include <inttypes.h>
#include <stdio.h>

#include "wire/layout.h"
#include "wire/protocol.h"

static void print_field(const char *of, size_t offset, size_t size, const char *type, const char *name,
			const char *text) {
	printf("field %s %zu %zu %s %s%s%s\n", of, offset, size, type, name, text[0] ? " " : "", text);
}

#define FIELD(_type, _name, _text) \
	print_field(of, offsetof(Struct, _name), sizeof(((Struct *)NULL)->_name), #_type, #_name, _text);

#define STRUCT(_type, _title, _tail)                                                \
	static void print_##_type(void) {                                           \
		typedef Wire##_type Struct;                                         \
		const char *of = #_type;                                            \
                                                                                    \
		printf("struct %s %zu %s|%s\n", of, sizeof(Struct), _title, _tail); \
		_type##_FIELDS(FIELD)                                               \
	}

WIRE_STRUCTS(STRUCT)

#define RegistryHeader_FIELDS(F)                                                \
	F(u64, magic, "0x67657262706d6873")                                     \
	F(u32, version, "layout version, 2")                                    \
	F(u32, header_size, "bytes of this struct")                             \
	F(u64, total_size, "bytes of the registry, whole pages")                \
	F(u64, epoch, "boot epoch")                                             \
	F(b16, hash_seed, "two u64: the seed of the name hash")                 \
	F(u32, capacity, "slots")                                               \
	F(u32, index_size, "entries of the index, a power of two")              \
	F(u32, session_capacity, "entries of the session table")                \
	F(u32, slot_size, "bytes of a slot")                                    \
	F(u64, index_offset, "where the index begins")                          \
	F(u64, sessions_offset, "where the session table begins")               \
	F(u64, slots_offset, "where the slots begin")                           \
	F(u64, details_offset, "where the details begin")                       \
	F(u32, detail_size, "bytes of a detail")                                \
	F(b28, reserved, "")                                                    \
	F(u32, state, "1 open, 2 closed: no acquire succeeds any more")         \
	F(u32, broker_cpu, "where the broker last ran")                         \
	F(u64, gone_sequence, "grows whenever a generation is gone or revoked") \
	F(b48, reserved2, "")

#define RegistrySlot_FIELDS(F)                                           \
	F(u64, word, "generation << 2 | state, 0 when the slot is free") \
	F(u64, size, "bytes of the region")                              \
	F(u64, offset, "where the region begins, bytes into the memory") \
	F(u16, name_length, "bytes of name")                             \
	F(u8, kind, "MEMORY, CUDA_IPC or CUDA_VMM")                      \
	F(u8, access, "READ, WRITE")                                     \
	F(u32, flags, "region flags")                                    \
	F(b32, name, "the first 32 bytes of name")

#define RegistryDetail_FIELDS(F)                         \
	F(b224, name_rest, "the rest of name")           \
	F(u64, object, "id of the memory")               \
	F(u64, object_size, "bytes of the whole memory") \
	F(u32, owner, "opaque number of the owner")      \
	F(u32, scan, "scan number, for NOTIFY")          \
	F(b72, reserved, "")

#define LeasePageHeader_FIELDS(F)                            \
	F(u64, magic, "0x65736c62706d6873")                  \
	F(u32, version, "layout version, 2")                 \
	F(u32, header_size, "bytes of this struct")          \
	F(u64, total_size, "bytes of the page, whole pages") \
	F(u64, session, "session id")                        \
	F(u32, capacity, "slots")                            \
	F(u32, lanes, "lanes; the last one is shared")       \
	F(u32, mode, "ASYMMETRIC or RMW")                    \
	F(u32, reserved, "")                                 \
	F(u64, rung_offset, "where the rung words begin")    \
	F(u64, lanes_offset, "where the lanes begin")        \
	F(u64, lanes_used, "bit per lane, set before the first use of a lane")

#define LaneCounter_FIELDS(F)                         \
	F(u32, acquired, "leases taken, modulo 2^32") \
	F(u32, released, "leases given back, modulo 2^32")

#define LAYOUT_STRUCT(_type, _title, _tail)                                         \
	static void print_##_type(void) {                                           \
		typedef _type Struct;                                               \
		const char *of = #_type;                                            \
                                                                                    \
		printf("struct %s %zu %s|%s\n", of, sizeof(Struct), _title, _tail); \
		_type##_FIELDS(FIELD)                                               \
	}

LAYOUT_STRUCT(RegistryHeader, "begin of the registry", "")
LAYOUT_STRUCT(RegistrySlot, "a slot of the registry: what an acquire looks at", "")
LAYOUT_STRUCT(RegistryDetail, "the rest of a slot", "")
LAYOUT_STRUCT(LeasePageHeader, "begin of a lease page", "")
LAYOUT_STRUCT(LaneCounter, "the count of a slot in a lane", "")

#define LIMIT(_name) printf("limit %s %" PRIu64 "\n", #_name, (uint64_t)WIRE_##_name)

int main(void) {
#define PRINT_STRUCT(_type, _title, _tail) print_##_type();
	WIRE_STRUCTS(PRINT_STRUCT)
	print_RegistryHeader();
	print_RegistrySlot();
	print_RegistryDetail();
	print_LeasePageHeader();
	print_LaneCounter();
#define PRINT_OPCODE(_name, _value, _text) printf("opcode %s %u %s\n", #_name, (unsigned)(_value), _text);
	WIRE_OPCODES(PRINT_OPCODE)
#define PRINT_NUMBER(_group, _name, _value) printf("number %s %s %u\n", #_group, #_name, (unsigned)(_value));
	WIRE_NUMBERS(PRINT_NUMBER)
#define SHMB_ERROR(_name, _value, _text) printf("error %s %u %s\n", #_name, (unsigned)(_value), _text);
#include "wire/errors.def"
#undef SHMB_ERROR
	LIMIT(VERSION);
	LIMIT(MESSAGE_MAX);
	LIMIT(FDS_MAX);
	LIMIT(BATCH_MAX);
	LIMIT(OUTSTANDING_MAX);
	LIMIT(NAME_MAX);
	LIMIT(TEXT_MAX);
	LIMIT(ACL_MAX);
	LIMIT(HANDLE_SIZE);
	LIMIT(HOLDERS_MAX);
	LIMIT(TOKEN_SIZE);
	LIMIT(COMM_SIZE);
	LIMIT(NO_FD);
	LIMIT(ANY_UID);
	LIMIT(REST);
	LIMIT(FOREVER);
	return fflush(stdout) != 0;
}
