/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The codec: what is taken apart, what is refused and with which sentence. The corpus of tests/fuzz has the broad
 * list of accept and reject cases; here are the sentences, every truncation, and the steps one by one.
 */

#include "wire/codec.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
/* after the protocol's own: both orders have to work */
#include "shmbroker.h"

_Static_assert(SHMB_E_INVALID == WIRE_E_INVALID && SHMB_E_TRUNCATED == WIRE_E_TRUNCATED, "one list of codes");

static _Alignas(8) uint8_t buffer[WIRE_MESSAGE_MAX];

/* writes a message whose body is @body; returns its size */
static size_t make(uint16_t opcode, const void *body, size_t size) {
	WireWriter writer;

	wire_write_begin(&writer, buffer, sizeof(buffer), opcode, 0, 1);
	(void)wire_write(&writer, body, size);
	size = wire_write_end(&writer);
	assert_true(size > 0);
	return size;
}

static void test_header(void **state) {
	WireHeader header = { .opcode = 77 };
	size_t size = make(WIRE_OP_PING, &(WirePing){ 5 }, sizeof(WirePing));
	uint32_t lie;

	(void)state;
	assert_int_equal(size, 24);
	for (size_t i = 0; i < 16; i++)
		assert_int_equal(wire_header_read(buffer, i, &header), SHMB_E_INVALID);
	assert_int_equal(wire_header_read(buffer, size - 1, &header), SHMB_E_INVALID);
	assert_int_equal(wire_header_read(buffer, size + 1, &header), SHMB_E_INVALID);
	assert_int_equal(header.opcode, 77);
	assert_int_equal(wire_header_read(buffer, size, &header), 0);
	assert_true(header.opcode == WIRE_OP_PING && header.flags == 0 && header.length == 24 && header.serial == 1);

	lie = WIRE_MESSAGE_MAX;
	memcpy(buffer + 4, &lie, 4);
	assert_int_equal(wire_header_read(buffer, WIRE_MESSAGE_MAX, &header), 0);
	lie = WIRE_MESSAGE_MAX + 8;
	memcpy(buffer + 4, &lie, 4);
	/* longer than any message: refused before anything of it is believed */
	assert_int_equal(wire_header_read(buffer, WIRE_MESSAGE_MAX + 8, &header), SHMB_E_INVALID);
}

static void test_header_of_a_request(void **state) {
	const char *why = NULL;

	(void)state;
	assert_int_equal(wire_header_check_request(&(WireHeader){ .serial = 1 }, &why), 0);
	assert_null(why);
	assert_int_equal(wire_header_check_request(&(WireHeader){ .serial = 0 }, &why), SHMB_E_INVALID);
	assert_string_equal(why, "the serial is 0");
	for (unsigned bit = 0; bit < 16; bit++) {
		WireHeader header = { .serial = 1, .flags = (uint16_t)(1u << bit) };

		if (header.flags == WIRE_FLAG_RETRY)
			continue;
		assert_int_equal(wire_header_check_request(&header, &why), SHMB_E_INVALID);
		assert_string_equal(why, "flags in the header of a request");
	}
	for (uint16_t opcode = WIRE_OP_HELLO; opcode < _WIRE_OP_N; opcode++) {
		WireHeader header = { .opcode = opcode, .serial = 1, .flags = WIRE_FLAG_RETRY };
		bool never = opcode == WIRE_OP_HELLO || opcode == WIRE_OP_NOTIFY;

		assert_int_equal(wire_header_check_request(&header, &why), never ? SHMB_E_INVALID : 0);
	}
	assert_string_equal(why, "a retry of what is never sent again");
}

static void test_reader_is_sticky(void **state) {
	uint8_t body[24] = { 1, 2, 3, 4, 5, 6, 7, 8, 'a', 'b', 'c' };
	size_t size = make(WIRE_OP_PING, body, sizeof(body));
	WireReader reader = wire_reader_body(buffer, size);
	uint64_t number = 0;
	uint8_t more[16];

	(void)state;
	wire_read(&reader, &number, 8);
	assert_true(number == UINT64_C(0x0807060504030201));
	assert_memory_equal(wire_read_bytes(&reader, 3), "abc", 3);
	assert_false(reader.bad);
	memset(more, 0xff, sizeof(more));
	wire_read(&reader, more, 16);
	assert_true(reader.bad);
	assert_string_equal(reader.why, "the message is truncated");
	for (size_t i = 0; i < sizeof(more); i++)
		assert_int_equal(more[i], 0);
	/* eight bytes are left, and are not given any more */
	number = 1;
	wire_read(&reader, &number, 8);
	assert_true(number == 0);
	assert_null(wire_read_bytes(&reader, 0));
	assert_null(wire_read_bytes(&reader, 1));
	assert_false(wire_reader_end(&reader));
	assert_string_equal(reader.why, "the message is truncated");
}

static void test_reader_bytes(void **state) {
	uint8_t body[16] = { 1, 2, 3, 4, 5, 6, 7, 8, 9 };
	size_t size = make(WIRE_OP_PING, body, sizeof(body));
	WireReader reader = wire_reader_body(buffer, size);

	(void)state;
	assert_non_null(wire_read_bytes(&reader, 0));
	assert_false(wire_reader_end(&reader));
	assert_string_equal(reader.why, "bytes are left over");

	reader = wire_reader_body(buffer, size);
	assert_ptr_equal(wire_read_bytes(&reader, 9), buffer + 16);
	assert_true(wire_reader_end(&reader));

	/* padding that is not zero */
	for (size_t i = 1; i < 8; i++) {
		reader = wire_reader_body(buffer, size);
		assert_null(wire_read_bytes(&reader, i));
		assert_string_equal(reader.why, "padding is not zero");
	}

	reader = wire_reader_body(buffer, size);
	assert_null(wire_read_bytes(&reader, 17));
	reader = wire_reader_body(buffer, size);
	assert_null(wire_read_bytes(&reader, SIZE_MAX));
	reader = wire_reader_body(buffer, size);
	assert_null(wire_read_bytes(&reader, SIZE_MAX - 6));

	/* the bytes are there and their padding is not */
	reader = wire_reader_body(buffer, size - 1);
	assert_null(wire_read_bytes(&reader, 15));
	assert_string_equal(reader.why, "the message is truncated");
}

/* an entry of REGISTER that is right, to be spoilt; name "frame", one line of access list */
typedef struct Register {
	WireCountHead head;
	WireRegisterEntry entry;
	char name[8];
	WireAclEntry acl[1];
} Register;

static Register register_right(void) {
	return (Register){
		.head.count = 1,
		.entry = {
			.kind = WIRE_KIND_MEMORY,
			.access = WIRE_ACCESS_READ,
			.read_only_fd_index = WIRE_NO_FD,
			.size = 1,
			.name_length = 5,
			.acl_count = 1,
			.principal = WIRE_ANY_UID,
		},
		.name = "frame",
		.acl[0] = { WIRE_ACL_UID, 1000 },
	};
}

static const char *register_why(const void *body, size_t size, uint32_t n_fds) {
	WireRegister entries[WIRE_BATCH_MAX];
	WireReader reader;
	uint32_t count = 99;
	int r;

	size = make(WIRE_OP_REGISTER, body, size);
	reader = wire_reader_body(buffer, size);
	r = wire_read_register(&reader, n_fds, entries, &count);
	if (r == 0) {
		assert_false(reader.bad);
		assert_null(reader.why);
		return "";
	}
	assert_int_equal(r, SHMB_E_INVALID);
	assert_int_equal(count, 99);
	assert_non_null(reader.why);
	return reader.why;
}

static void test_register(void **state) {
	Register body = register_right();
	WireRegister entries[WIRE_BATCH_MAX];
	WireReader reader;
	uint32_t count;

	(void)state;
	reader = wire_reader_body(buffer, make(WIRE_OP_REGISTER, &body, sizeof(body)));
	assert_int_equal(wire_read_register(&reader, 1, entries, &count), 0);
	assert_int_equal(count, 1);
	assert_memory_equal(&entries[0].entry, &body.entry, sizeof(body.entry));
	assert_memory_equal(entries[0].name, "frame", 5);
	assert_int_equal(entries[0].acl[0].kind, WIRE_ACL_UID);
	assert_int_equal(entries[0].acl[0].id, 1000);
	assert_true((const uint8_t *)entries[0].name > buffer &&
		    (const uint8_t *)entries[0].name < buffer + sizeof(buffer));
}

static void test_register_sentences(void **state) {
	Register body;

	(void)state;
#define REFUSED(_change, _n_fds, _why)                                                \
	do {                                                                          \
		body = register_right();                                              \
		_change;                                                              \
		assert_string_equal(register_why(&body, sizeof(body), _n_fds), _why); \
	} while (0)
	REFUSED((void)0, 1, "");
	REFUSED(body.head.count = 0, 1, "the list is empty");
	REFUSED(body.head.count = 65, 1, "the list has more than 64 entries");
	REFUSED(body.head.count = UINT32_MAX, 1, "the list has more than 64 entries");
	REFUSED(body.head.count = 2, 1, "the message is truncated");
	REFUSED(body.head.reserved = 1, 1, "a reserved field is not zero");
	REFUSED(body.entry.key_length = 1, 1, "the message is truncated");
	REFUSED(body.entry.flags = 4, 1, "unknown flags");
	REFUSED(body.entry.access = 0, 1, "the access does not include READ");
	REFUSED(body.entry.access = WIRE_ACCESS_WRITE, 1, "the access does not include READ");
	REFUSED(body.entry.access = 4 | WIRE_ACCESS_READ, 1, "unknown access bits");
	REFUSED(body.entry.kind = 0, 1, "unknown kind of memory");
	REFUSED(body.entry.kind = 255, 1, "unknown kind of memory");
	REFUSED(body.entry.acl_count = 0, 1, "bytes are left over");
	REFUSED(body.entry.acl_count = 2, 1, "the message is truncated");
	REFUSED(body.entry.acl_count = 65, 1, "the access list has more than 64 entries");
	REFUSED(body.acl[0].kind = 0, 1, "an access list entry that is neither uid nor gid");
	REFUSED(body.acl[0].kind = 3, 1, "an access list entry that is neither uid nor gid");
	REFUSED(body.name[5] = 1, 1, "padding is not zero");
	REFUSED(body.name[7] = 1, 1, "padding is not zero");
	REFUSED(body.entry.name_length = 4, 1, "padding is not zero");
	REFUSED(body.entry.name_length = UINT16_MAX, 1, "the message is truncated");
	REFUSED(body.entry.fd_index = WIRE_NO_FD, 0, "memory without an fd");
	REFUSED(body.entry.handle_length = 64, 1, "memory with a handle");
	REFUSED(body.entry.object_size = 1, 1, "memory with an object size");
	REFUSED(body.entry.device.bytes[15] = 1, 1, "memory with a device");
	REFUSED(body.entry.kind = WIRE_KIND_CUDA_IPC, 1, "a CUDA IPC handle has 64 bytes");
	REFUSED((body.entry.kind = WIRE_KIND_CUDA_IPC, body.entry.handle_length = 64), 1,
		"a CUDA IPC handle with an fd");
	REFUSED((body.entry.kind = WIRE_KIND_CUDA_IPC, body.entry.handle_length = 64, body.entry.fd_index = WIRE_NO_FD,
		 body.entry.read_only_fd_index = 0),
		1, "a CUDA IPC handle with an fd");
	REFUSED((body.entry.kind = WIRE_KIND_CUDA_IPC, body.entry.handle_length = 64, body.entry.fd_index = WIRE_NO_FD),
		0, "the message is truncated");
	REFUSED(body.entry.kind = WIRE_KIND_CUDA_VMM, 1, "");
	REFUSED((body.entry.kind = WIRE_KIND_CUDA_VMM, body.entry.fd_index = WIRE_NO_FD), 0,
		"CUDA memory without an fd");
	REFUSED((body.entry.kind = WIRE_KIND_CUDA_VMM, body.entry.read_only_fd_index = 0), 1,
		"CUDA memory with a read-only fd");
	REFUSED((body.entry.kind = WIRE_KIND_CUDA_VMM, body.entry.handle_length = 64), 1,
		"CUDA memory with both an fd and a handle");
	/* which fds came, and which are named */
	REFUSED((void)0, 0, "an entry names an fd that the message does not carry");
	REFUSED(body.entry.fd_index = 1, 1, "an entry names an fd that the message does not carry");
	REFUSED(body.entry.fd_index = 64, 64, "an entry names an fd that the message does not carry");
	REFUSED(body.entry.read_only_fd_index = 1, 1, "an entry names an fd that the message does not carry");
	REFUSED(body.entry.read_only_fd_index = 1, 2, "");
	REFUSED((void)0, 2, "fds with no slot for them");
	REFUSED((void)0, 64, "fds with no slot for them");
	REFUSED((void)0, 65, "more than 64 fds");
	REFUSED((void)0, 253, "more than 64 fds");
	/* each entry's own fate, not the message's */
	REFUSED(body.entry.size = 0, 1, "");
	REFUSED(body.name[0] = '\n', 1, "");
#undef REFUSED
}

/* cut anywhere, the message is refused and nothing behind the cut is read */
static void test_register_truncated_everywhere(void **state) {
	Register body = register_right();
	size_t size = make(WIRE_OP_REGISTER, &body, sizeof(body));

	(void)state;
	for (size_t cut = sizeof(WireHeader); cut < size; cut++) {
		WireRegister entries[WIRE_BATCH_MAX];
		uint8_t *message = malloc(cut);
		WireReader reader;
		uint32_t count = 99;

		assert_non_null(message);
		memcpy(message, buffer, cut);
		reader = wire_reader_body(message, cut);
		assert_int_equal(wire_read_register(&reader, 1, entries, &count), SHMB_E_INVALID);
		assert_string_equal(reader.why, "the message is truncated");
		assert_int_equal(count, 99);
		free(message);
	}
}

static void test_unregister_sentences(void **state) {
	typedef struct Body {
		WireUnregisterRequest request;
		WireNameEntry entry;
		char name[8];
	} Body;
	WireName names[WIRE_BATCH_MAX];
	WireUnregisterRequest request;
	WireReader reader;
	Body body;

	(void)state;
#define REFUSED(_size, _change, _why)                                                             \
	do {                                                                                      \
		body = (Body){                                                                    \
			.request = { .count = 1, .principal = WIRE_ANY_UID },                     \
			.entry.name_length = 8,                                                   \
			.name = "12345678",                                                       \
		};                                                                                \
		_change;                                                                          \
		reader = wire_reader_body(buffer, make(WIRE_OP_UNREGISTER, &body, _size));        \
		assert_int_equal(wire_read_unregister(&reader, &request, names), SHMB_E_INVALID); \
		assert_string_equal(reader.why, _why);                                            \
	} while (0)
	REFUSED(sizeof(body), body.request.scope = 4, "unknown scope");
	REFUSED(sizeof(body), body.request.mode = 4, "unknown mode");
	REFUSED(sizeof(body), body.request.flags = 2, "unknown flags");
	REFUSED(sizeof(body), body.request.count = 0, "the list is empty");
	REFUSED(sizeof(body), body.request.count = 65, "the list has more than 64 entries");
	REFUSED(sizeof(body), body.request.count = 2, "the message is truncated");
	REFUSED(sizeof(body), body.request.scope = WIRE_SCOPE_SESSION, "names with a scope that takes none");
	REFUSED(sizeof(body), (body.request.scope = WIRE_SCOPE_ALL, body.request.count = 0), "bytes are left over");
	REFUSED(sizeof(body), (body.request.scope = WIRE_SCOPE_ALL, body.request.principal = 0),
		"a principal with a scope that takes none");
	REFUSED(sizeof(body), (body.request.scope = WIRE_SCOPE_SESSION, body.request.principal = 1000),
		"a principal with a scope that takes none");
	REFUSED(sizeof(body), body.entry.reserved = 1, "a reserved field is not zero");
	REFUSED(sizeof(body), body.entry.reserved2 = 1, "a reserved field is not zero");
	REFUSED(sizeof(body) - 8, (void)0, "the message is truncated");
#undef REFUSED
	body = (Body){
		.request = { .mode = WIRE_MODE_LAZY, .flags = WIRE_UNREGISTER_WAIT, .timeout_ms = 7, .count = 1 },
		.entry = { .generation = 9, .name_length = 8 },
		.name = "12345678"
	};
	reader = wire_reader_body(buffer, make(WIRE_OP_UNREGISTER, &body, sizeof(body)));
	assert_int_equal(wire_read_unregister(&reader, &request, names), 0);
	assert_true(request.mode == WIRE_MODE_LAZY && request.timeout_ms == 7 && request.count == 1);
	assert_true(request.principal == 0);
	assert_true(names[0].entry.generation == 9);
	assert_memory_equal(names[0].name, "12345678", 8);
}

static void test_lookup_access(void **state) {
	typedef struct Body {
		WireCountHead head;
		WireLookupEntry entry;
	} Body;
	static const struct {
		uint32_t access;
		uint16_t flags;
		const char *why;
	} cases[] = {
		{ WIRE_ACCESS_READ, 0, NULL },
		{ WIRE_ACCESS_READ | WIRE_ACCESS_WRITE, WIRE_LOOKUP_WANT_FD, NULL },
		{ 0, WIRE_LOOKUP_NO_LEASE, NULL },
		{ 0, 0, "the access does not include READ" },
		{ 0, WIRE_LOOKUP_NO_LEASE | WIRE_LOOKUP_WANT_FD, "the access does not include READ" },
		{ WIRE_ACCESS_WRITE, WIRE_LOOKUP_NO_LEASE, "the access does not include READ" },
		{ WIRE_ACCESS_READ | 0x10000, 0, "unknown access bits" },
		{ WIRE_ACCESS_READ, 4, "unknown flags" },
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		Body body = { .head.count = 1, .entry = { .access = cases[i].access, .flags = cases[i].flags } };
		WireLookup entries[WIRE_BATCH_MAX];
		WireReader reader = wire_reader_body(buffer, make(WIRE_OP_LOOKUP, &body, sizeof(body)));
		uint32_t count = 0;
		int r = wire_read_lookup(&reader, entries, &count);

		if (cases[i].why) {
			assert_int_equal(r, SHMB_E_INVALID);
			assert_string_equal(reader.why, cases[i].why);
		} else {
			assert_int_equal(r, 0);
			assert_int_equal(count, 1);
		}
	}
}

static void test_release(void **state) {
	struct {
		WireCountHead head;
		uint64_t leases[65];
	} body = { .head.count = 64 };
	uint64_t leases[WIRE_BATCH_MAX];
	WireReader reader;
	uint32_t count = 0;

	(void)state;
	for (uint32_t i = 0; i < 65; i++)
		body.leases[i] = UINT64_C(1) << 40 | i;
	reader = wire_reader_body(buffer, make(WIRE_OP_RELEASE, &body, sizeof(body) - 8));
	assert_int_equal(wire_read_release(&reader, leases, &count), 0);
	assert_int_equal(count, 64);
	assert_memory_equal(leases, body.leases, sizeof(leases));
	body.head.count = 65;
	reader = wire_reader_body(buffer, make(WIRE_OP_RELEASE, &body, sizeof(body)));
	assert_int_equal(wire_read_release(&reader, leases, &count), SHMB_E_INVALID);
}

static void test_hello_and_status_sentences(void **state) {
	WireHelloRequest hello;
	WireStatusRequest status;
	WireReader reader;
	const char *name;

	(void)state;
#define HELLO(_why, ...)                                                                       \
	do {                                                                                   \
		hello = (WireHelloRequest){ .version = 1, __VA_ARGS__ };                       \
		reader = wire_reader_body(buffer, make(WIRE_OP_HELLO, &hello, sizeof(hello))); \
		assert_int_equal(wire_read_hello(&reader, &hello), SHMB_E_INVALID);            \
		assert_string_equal(reader.why, _why);                                         \
	} while (0)
	HELLO("unknown flags", .flags = 2);
	HELLO("unknown roles", .roles = 8);
	HELLO("a reserved field is not zero", .reserved = 1);
	HELLO("a token without a session", .token.bytes[3] = 1);
#undef HELLO
	hello = (WireHelloRequest){
		.version = 1, .roles = 7, .features = UINT64_MAX, .session = 4, .token.bytes[3] = 1
	};
	reader = wire_reader_body(buffer, make(WIRE_OP_HELLO, &hello, sizeof(hello)));
	assert_int_equal(wire_read_hello(&reader, &hello), 0);
	assert_true(hello.features == UINT64_MAX && hello.token.bytes[3] == 1);

#define STATUS(_why, ...)                                                                         \
	do {                                                                                      \
		status = (WireStatusRequest){ __VA_ARGS__ };                                      \
		reader = wire_reader_body(buffer, make(WIRE_OP_STATUS, &status, sizeof(status))); \
		assert_int_equal(wire_read_status(&reader, &status, &name), SHMB_E_INVALID);      \
		assert_string_equal(reader.why, _why);                                            \
	} while (0)
	STATUS("unknown flags", .flags = 2);
	STATUS("unknown states", .states = 16);
	STATUS("unknown kinds", .kinds = 1);
	STATUS("unknown kinds", .kinds = 16);
	STATUS("unknown match", .match = 3);
	STATUS("a name that is not to be matched", .name_length = 1);
	STATUS("the name is longer than 255 bytes", .match = WIRE_MATCH_EXACT, .name_length = 256);
	STATUS("the message is truncated", .match = WIRE_MATCH_EXACT, .name_length = 255);
	STATUS("a reserved field is not zero", .reserved = 1);
	STATUS("a reserved field is not zero", .reserved2 = 1);
#undef STATUS
}

static const char *fixed_why(int r, const WireReader *reader) {
	assert_int_equal(r, reader->bad ? SHMB_E_INVALID : 0);
	return reader->why ? reader->why : "";
}

#define FIXED(_why, _type, ...)                                                                               \
	do {                                                                                                  \
		_type body = { __VA_ARGS__ };                                                                 \
		WireReader reader = wire_reader_body(buffer, make(WIRE_OP_PING, &body, sizeof(body)));        \
                                                                                                              \
		assert_string_equal(fixed_why(wire_read_fixed(&reader, &body, sizeof(body)), &reader), _why); \
	} while (0)

static void test_fixed(void **state) {
	(void)state;
	FIXED("", WirePing, .payload = 7);
	FIXED("", WireAttachRequest, .mode = WIRE_ATTACH_RMW, .lanes = 1000);
	FIXED("unknown mode", WireAttachRequest, .mode = 3);
	FIXED("", WireMapRequest, .access = 3, .flags = WIRE_MAP_WANT_FD);
	FIXED("unknown flags", WireMapRequest, .access = 1, .flags = 2);
	FIXED("the access does not include READ", WireMapRequest, .access = 2);
	FIXED("unknown access bits", WireMapRequest, .access = 5);
	FIXED("a reserved field is not zero", WireMapRequest, .access = 1, .reserved = 1);
	FIXED("", WireUnmapRequest, .slot = 1);
	FIXED("a reserved field is not zero", WireUnmapRequest, .reserved = 1);
	FIXED("", WireStatsRequest, .flags = 3);
	FIXED("unknown flags", WireStatsRequest, .flags = 4);
	FIXED("a reserved field is not zero", WireStatsRequest, .reserved = 1);
	FIXED("", WireSubscribeRequest, .mask = UINT32_MAX);
	FIXED("a reserved field is not zero", WireSubscribeRequest, .reserved = 1);
}

static void test_fixed_size(void **state) {
	WireReader reader;
	WireNotify notify;
	WirePing ping;

	(void)state;
	reader = wire_reader_body(buffer, make(WIRE_OP_NOTIFY, "", 0));
	assert_string_equal(fixed_why(wire_read_fixed(&reader, &notify, sizeof(notify)), &reader),
			    "the message is truncated");
	reader = wire_reader_body(buffer, make(WIRE_OP_PING, &(WireNotify){ 0 }, sizeof(WireNotify)));
	assert_string_equal(fixed_why(wire_read_fixed(&reader, &ping, sizeof(ping)), &reader), "bytes are left over");
}

static void test_writer(void **state) {
	_Alignas(8) uint8_t small[40];
	WireWriter writer;
	WireHeader header;
	uint8_t *at;

	(void)state;
	memset(small, 0xff, sizeof(small));
	wire_write_begin(&writer, small, sizeof(small), WIRE_OP_INFO, WIRE_FLAG_REPLY, 9);
	assert_int_equal(wire_writer_room(&writer), 24);
	at = wire_write(&writer, "abc", 3);
	assert_ptr_equal(at, small + 16);
	assert_memory_equal(at, "abc\0\0\0\0\0", 8);
	assert_int_equal(wire_writer_room(&writer), 16);
	at = wire_write(&writer, NULL, 16);
	assert_non_null(at);
	for (size_t i = 0; i < 16; i++)
		assert_int_equal(at[i], 0);
	assert_int_equal(wire_writer_room(&writer), 0);
	assert_non_null(wire_write(&writer, "", 0));
	assert_int_equal(wire_write_end(&writer), 40);
	assert_int_equal(wire_header_read(small, 40, &header), 0);
	assert_true(header.opcode == WIRE_OP_INFO && header.flags == WIRE_FLAG_REPLY && header.serial == 9);
}

static void test_writer_overflow(void **state) {
	uint8_t *exact = malloc(31);
	WireWriter writer;

	/* what the compiler knows it warns about */
	volatile size_t too_much = SIZE_MAX;

	(void)state;
	assert_non_null(exact);
	/* padding counts: of 31 bytes 24 are used */
	wire_write_begin(&writer, exact, 31, WIRE_OP_INFO, 0, 9);
	assert_int_equal(wire_writer_room(&writer), 8);
	assert_null(wire_write(&writer, "123456789", 9));
	assert_true(writer.overflow);
	assert_int_equal(wire_writer_room(&writer), 0);
	assert_null(wire_write(&writer, "", 1));
	assert_int_equal(wire_write_end(&writer), 0);

	wire_write_begin(&writer, exact, 15, WIRE_OP_INFO, 0, 9);
	assert_true(writer.overflow);
	assert_int_equal(wire_write_end(&writer), 0);

	wire_write_begin(&writer, exact, 31, WIRE_OP_INFO, 0, 9);
	assert_null(wire_write(&writer, NULL, too_much));
	assert_true(writer.overflow);
	free(exact);

	/* no message is longer than the protocol allows, however long the buffer is */
	wire_write_begin(&writer, buffer, SIZE_MAX, WIRE_OP_INFO, 0, 9);
	assert_int_equal(wire_writer_room(&writer), WIRE_MESSAGE_MAX - 16);
}

static WireErrorReply error_read(const uint8_t *message, size_t size, const char **ret_text) {
	WireErrorReply reply;
	WireHeader header;
	WireReader reader;

	assert_int_equal(wire_header_read(message, size, &header), 0);
	assert_int_equal(header.flags, WIRE_FLAG_REPLY | WIRE_FLAG_ERROR);
	assert_true(header.opcode == WIRE_OP_MAP && header.serial == 12);
	reader = wire_reader_body(message, size);
	wire_read(&reader, &reply, sizeof(reply));
	*ret_text = wire_read_bytes(&reader, reply.text_length);
	assert_true(wire_reader_end(&reader));
	assert_int_equal(reply.reserved, 0);
	return reply;
}

static void test_error(void **state) {
	_Alignas(8) uint8_t message[WIRE_ERROR_REPLY_MAX];
	char longest[WIRE_TEXT_MAX + 100];
	WireErrorReply reply;
	const char *text;
	size_t size;

	(void)state;
	size = wire_write_error(message, WIRE_OP_MAP, 12, SHMB_E_STALE, NULL);
	reply = error_read(message, size, &text);
	assert_int_equal(reply.code, SHMB_E_STALE);
	assert_int_equal(reply.text_length, strlen(wire_error_text(SHMB_E_STALE)));
	assert_memory_equal(text, wire_error_text(SHMB_E_STALE), reply.text_length);

	size = wire_write_error(message, WIRE_OP_MAP, 12, SHMB_E_STALE, "why");
	reply = error_read(message, size, &text);
	assert_int_equal(reply.text_length, 3);
	assert_memory_equal(text, "why", 3);

	size = wire_write_error(message, WIRE_OP_MAP, 12, 9999, NULL);
	reply = error_read(message, size, &text);
	assert_true(reply.code == 9999 && reply.text_length == 0);

	memset(longest, 'x', sizeof(longest));
	longest[sizeof(longest) - 1] = '\0';
	size = wire_write_error(message, WIRE_OP_MAP, 12, SHMB_E_INVALID, longest);
	assert_int_equal(size, WIRE_ERROR_REPLY_MAX);
	reply = error_read(message, size, &text);
	assert_int_equal(reply.text_length, WIRE_TEXT_MAX);

	/* a character of four bytes over the limit is left out as a whole */
	memcpy(longest + WIRE_TEXT_MAX - 2, "\xf0\x9f\x8e\x89", 4);
	size = wire_write_error(message, WIRE_OP_MAP, 12, SHMB_E_INVALID, longest);
	reply = error_read(message, size, &text);
	assert_int_equal(reply.text_length, WIRE_TEXT_MAX - 2);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_header),
		cmocka_unit_test(test_header_of_a_request),
		cmocka_unit_test(test_reader_is_sticky),
		cmocka_unit_test(test_reader_bytes),
		cmocka_unit_test(test_register),
		cmocka_unit_test(test_register_sentences),
		cmocka_unit_test(test_register_truncated_everywhere),
		cmocka_unit_test(test_unregister_sentences),
		cmocka_unit_test(test_lookup_access),
		cmocka_unit_test(test_release),
		cmocka_unit_test(test_hello_and_status_sentences),
		cmocka_unit_test(test_fixed),
		cmocka_unit_test(test_fixed_size),
		cmocka_unit_test(test_writer),
		cmocka_unit_test(test_writer_overflow),
		cmocka_unit_test(test_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
