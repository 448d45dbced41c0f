/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The protocol's lists: the public header has the same codes (it is included first, so that each code below is its
 * macro and a missing one does not compile), numbers are unique, structs have no holes and the sizes that the
 * manual page prints.
 */

#include "shmbroker.h"
#include "wire/protocol.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

typedef struct Code {
	const char *name;
	uint32_t public_value;
	uint32_t value;
	const char *text;
} Code;

static const Code codes[] = {
#define SHMB_ERROR(_name, _value, _text) { #_name, SHMB_E_##_name, _value, _text },
#include "wire/errors.def"
#undef SHMB_ERROR
};

#define N_CODES (sizeof(codes) / sizeof(codes[0]))

static void test_codes(void **state) {
	(void)state;
	for (size_t i = 0; i < N_CODES; i++) {
		assert_int_equal(codes[i].public_value, codes[i].value);
		assert_int_equal(codes[i].value, i + 1);
		assert_true(strlen(codes[i].text) > 0 && strlen(codes[i].text) <= WIRE_TEXT_MAX);
		assert_string_equal(wire_error_name(codes[i].value), codes[i].name);
		assert_string_equal(wire_error_text(codes[i].value), codes[i].text);
		for (size_t j = 0; j < i; j++) {
			assert_string_not_equal(codes[i].name, codes[j].name);
			assert_string_not_equal(codes[i].text, codes[j].text);
		}
	}
	assert_int_equal(_WIRE_E_N, N_CODES + 1);
	assert_null(wire_error_name(0));
	assert_null(wire_error_text(0));
	assert_null(wire_error_name(N_CODES + 1));
	assert_null(wire_error_text(UINT32_MAX));
}

/* a code of the public header that errors.def lacks would have no sentence */
static void test_public_header_has_no_more_codes(void **state) {
	const char *top = getenv("srcdir");
	char path[4096], line[1024];
	size_t n = 0;
	FILE *file;

	(void)state;
	(void)snprintf(path, sizeof(path), "%s/libbroker/shmbroker.h", top ? top : ".");
	file = fopen(path, "r");
	assert_non_null(file);
	while (fgets(line, sizeof(line), file))
		n += strncmp(line, "#define SHMB_E_", 15) == 0;
	fclose(file);
	assert_int_equal(n, N_CODES);
}

static void test_opcodes(void **state) {
	uint32_t next = 1;

	(void)state;
#define W(_name, _value, _text)                              \
	assert_int_equal(WIRE_OP_##_name, next);             \
	assert_string_equal(wire_opcode_name(next), #_name); \
	assert_true(strlen(_text) > 0);                      \
	next++;
	WIRE_OPCODES(W)
#undef W
	assert_int_equal(_WIRE_OP_N, next);
	assert_null(wire_opcode_name(0));
	assert_null(wire_opcode_name(next));
	assert_null(wire_opcode_name(UINT32_MAX));
}

typedef struct Number {
	const char *group;
	const char *name;
	uint32_t value;
} Number;

static const Number numbers[] = {
#define W(_group, _name, _value) { #_group, #_name, _value },
	WIRE_NUMBERS(W)
#undef W
};

/* within a group (an enumeration or a set of flags) no value and no name is there twice */
static void test_numbers(void **state) {
	(void)state;
	for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
		for (size_t j = 0; j < i; j++) {
			if (strcmp(numbers[i].group, numbers[j].group) != 0)
				continue;
			assert_string_not_equal(numbers[i].name, numbers[j].name);
			assert_int_not_equal(numbers[i].value, numbers[j].value);
		}
	/* a slot's word has two bits for its state, and 0 with generation 0 is a free slot */
	assert_true(WIRE_STATE_RETIRING <= 3);
}

#define FIELD(_type, _name, _text)                                                         \
	assert_int_equal(offsetof(Struct, _name), size);                                   \
	assert_int_equal(size % (sizeof(wire_##_type) < 8 ? sizeof(wire_##_type) : 8), 0); \
	assert_true(_text[0] != '\0' || strncmp(#_name, "reserved", 8) == 0);              \
	size += sizeof(wire_##_type);

#define STRUCT(_type, _title, _tail)                    \
	static void check_##_type(void) {               \
		typedef Wire##_type Struct;             \
		size_t size = 0;                        \
                                                        \
		_type##_FIELDS(FIELD);                  \
		assert_int_equal(sizeof(Struct), size); \
		assert_int_equal(size % 8, 0);          \
	}
WIRE_STRUCTS(STRUCT)
#undef STRUCT
#undef FIELD

static void test_structs_have_no_holes(void **state) {
	(void)state;
#define STRUCT(_type, _title, _tail) \
	check_##_type();             \
	assert_true(strlen(_title) > 0);
	WIRE_STRUCTS(STRUCT)
#undef STRUCT
}

/* version 1 of the protocol: a change of any of these needs another version */
static void test_struct_sizes(void **state) {
	size_t n = 0;

	(void)state;
#define SIZE(_type, _size)                            \
	assert_int_equal(sizeof(Wire##_type), _size); \
	n++
	SIZE(Header, 16);
	SIZE(ErrorReply, 8);
	SIZE(HelloRequest, 56);
	SIZE(HelloReply, 72);
	SIZE(CountHead, 8);
	SIZE(PageHead, 16);
	SIZE(RegisterEntry, 72);
	SIZE(AclEntry, 8);
	SIZE(RegisterResult, 32);
	SIZE(UnregisterRequest, 16);
	SIZE(NameEntry, 16);
	SIZE(UnregisterReply, 24);
	SIZE(UnregisterResult, 32);
	SIZE(LookupEntry, 24);
	SIZE(LookupResult, 88);
	SIZE(ReleaseEntry, 8);
	SIZE(ReleaseResult, 8);
	SIZE(AttachRequest, 8);
	SIZE(AttachReply, 40);
	SIZE(MapRequest, 32);
	SIZE(MapReply, 80);
	SIZE(UnmapRequest, 16);
	SIZE(Notify, 16);
	SIZE(StatusRequest, 32);
	SIZE(StatusEntry, 128);
	SIZE(StatusHolder, 40);
	SIZE(ClientsRequest, 16);
	SIZE(ClientEntry, 88);
	SIZE(StatsRequest, 16);
	SIZE(StatsEntry, 16);
	SIZE(InfoEntry, 8);
	SIZE(SubscribeRequest, 8);
	SIZE(Event, 56);
	SIZE(Ping, 8);
#undef SIZE
#define STRUCT(_type, _title, _tail) n--;
	WIRE_STRUCTS(STRUCT)
#undef STRUCT
	assert_int_equal(n, 0);
}

static void test_padded(void **state) {
	(void)state;
	assert_int_equal(wire_padded(0), 0);
	assert_int_equal(wire_padded(1), 8);
	assert_int_equal(wire_padded(8), 8);
	assert_int_equal(wire_padded(9), 16);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_codes),
		cmocka_unit_test(test_public_header_has_no_more_codes),
		cmocka_unit_test(test_opcodes),
		cmocka_unit_test(test_numbers),
		cmocka_unit_test(test_structs_have_no_holes),
		cmocka_unit_test(test_struct_sizes),
		cmocka_unit_test(test_padded),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
