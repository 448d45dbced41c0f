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

#define LIMIT(_name) printf("limit %s %" PRIu64 "\n", #_name, (uint64_t)WIRE_##_name)

int main(void) {
#define PRINT_STRUCT(_type, _title, _tail) print_##_type();
	WIRE_STRUCTS(PRINT_STRUCT)
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
