/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fuzz target: requests as a hostile peer sends them. An input is one byte, the number of fds that came with the
 * message, and the message.
 *
 * What holds for every input: nothing outside the message is read; a refused body comes with a sentence; an
 * accepted message, put together again from what was taken out of it, is the same bytes.
 *
 * Built with -fsanitize=fuzzer -DFUZZ_LIBFUZZER it is a libFuzzer target. Built without, it replays the files of
 * a directory (the argument, else tests/fuzz/corpus below $srcdir): y_* must be accepted, n_* must be refused.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "wire/codec.h"
#include "wire/name.h"

static void use_name(const char *name, size_t size) {
	static const uint64_t seed[2] = { 1, 2 };
	const char *why = NULL;

	REQUIRE((wire_name_check(name, size, &why) == 0) == (why == NULL));
	(void)wire_name_hash(seed, name, size);
}

static void use_key(const char *key, size_t size) {
	const char *why = NULL;

	REQUIRE((wire_key_check(key, size, &why) == 0) == (why == NULL));
}

static int take_register(WireReader *reader, uint32_t n_fds, WireWriter *writer) {
	WireRegister entries[WIRE_BATCH_MAX];
	WireCountHead head = { 0 };
	int r;

	r = wire_read_register(reader, n_fds, entries, &head.count);
	if (r != 0)
		return r;
	(void)wire_write(writer, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; i++) {
		const WireRegister *entry = &entries[i];

		use_name(entry->name, entry->entry.name_length);
		use_key(entry->key, entry->entry.key_length);
		(void)wire_write(writer, &entry->entry, sizeof(entry->entry));
		(void)wire_write(writer, entry->name, entry->entry.name_length);
		(void)wire_write(writer, entry->acl, entry->entry.acl_count * sizeof(*entry->acl));
		(void)wire_write(writer, entry->handle, entry->entry.handle_length);
		(void)wire_write(writer, entry->key, entry->entry.key_length);
	}
	return 0;
}

static int take_unregister(WireReader *reader, WireWriter *writer) {
	WireUnregisterRequest request;
	WireName names[WIRE_BATCH_MAX];
	int r;

	r = wire_read_unregister(reader, &request, names);
	if (r != 0)
		return r;
	(void)wire_write(writer, &request, sizeof(request));
	for (uint32_t i = 0; i < request.count; i++) {
		use_name(names[i].name, names[i].entry.name_length);
		(void)wire_write(writer, &names[i].entry, sizeof(names[i].entry));
		(void)wire_write(writer, names[i].name, names[i].entry.name_length);
	}
	return 0;
}

static int take_lookup(WireReader *reader, WireWriter *writer) {
	WireLookup entries[WIRE_BATCH_MAX];
	WireCountHead head = { 0 };
	int r;

	r = wire_read_lookup(reader, entries, &head.count);
	if (r != 0)
		return r;
	(void)wire_write(writer, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; i++) {
		use_name(entries[i].name, entries[i].entry.name_length);
		(void)wire_write(writer, &entries[i].entry, sizeof(entries[i].entry));
		(void)wire_write(writer, entries[i].name, entries[i].entry.name_length);
	}
	return 0;
}

static int take_release(WireReader *reader, WireWriter *writer) {
	uint64_t leases[WIRE_BATCH_MAX];
	WireCountHead head = { 0 };
	int r;

	r = wire_read_release(reader, leases, &head.count);
	if (r != 0)
		return r;
	(void)wire_write(writer, &head, sizeof(head));
	(void)wire_write(writer, leases, head.count * sizeof(*leases));
	return 0;
}

static int take_status(WireReader *reader, WireWriter *writer) {
	WireStatusRequest request;
	const char *name;
	int r;

	r = wire_read_status(reader, &request, &name);
	if (r != 0)
		return r;
	use_name(name, request.name_length);
	(void)wire_write(writer, &request, sizeof(request));
	(void)wire_write(writer, name, request.name_length);
	return 0;
}

static int take_hello(WireReader *reader, WireWriter *writer) {
	WireHelloRequest request;
	int r;

	r = wire_read_hello(reader, &request);
	if (r == 0)
		(void)wire_write(writer, &request, sizeof(request));
	return r;
}

#define TAKE_FIXED(_type)                                                  \
	({                                                                 \
		_type body;                                                \
		int result = wire_read_fixed(reader, &body, sizeof(body)); \
                                                                           \
		if (result == 0)                                           \
			(void)wire_write(writer, &body, sizeof(body));     \
		result;                                                    \
	})

static int take_body(uint16_t opcode, uint32_t n_fds, WireReader *reader, WireWriter *writer) {
	if (opcode != WIRE_OP_REGISTER && n_fds != 0)
		return SHMB_E_INVALID;

	switch (opcode) {
	case WIRE_OP_HELLO:
		return take_hello(reader, writer);
	case WIRE_OP_PING:
		return TAKE_FIXED(WirePing);
	case WIRE_OP_INFO:
		return wire_reader_end(reader) ? 0 : SHMB_E_INVALID;
	case WIRE_OP_REGISTER:
		return take_register(reader, n_fds, writer);
	case WIRE_OP_UNREGISTER:
		return take_unregister(reader, writer);
	case WIRE_OP_LOOKUP:
		return take_lookup(reader, writer);
	case WIRE_OP_RELEASE:
		return take_release(reader, writer);
	case WIRE_OP_ATTACH:
		return TAKE_FIXED(WireAttachRequest);
	case WIRE_OP_MAP:
		return TAKE_FIXED(WireMapRequest);
	case WIRE_OP_UNMAP:
		return TAKE_FIXED(WireUnmapRequest);
	case WIRE_OP_NOTIFY:
		return TAKE_FIXED(WireNotify);
	case WIRE_OP_STATUS:
		return take_status(reader, writer);
	case WIRE_OP_CLIENTS:
		return TAKE_FIXED(WireClientsRequest);
	case WIRE_OP_STATS:
		return TAKE_FIXED(WireStatsRequest);
	case WIRE_OP_SUBSCRIBE:
		return TAKE_FIXED(WireSubscribeRequest);
	default:
		return SHMB_E_UNKNOWN_OP;
	}
}

/* true when @message is accepted */
static bool take_message(const void *message, size_t size, uint32_t n_fds) {
	static _Alignas(8) uint8_t again[WIRE_MESSAGE_MAX];
	const char *why = NULL;
	WireHeader header;
	WireReader reader;
	WireWriter writer;
	int r;

	if (wire_header_read(message, size, &header) != 0)
		return false;
	if (wire_header_check_request(&header, &why) != 0) {
		REQUIRE(why);
		return false;
	}
	reader = wire_reader_body(message, size);
	wire_write_begin(&writer, again, sizeof(again), header.opcode, header.flags, header.serial);
	r = take_body(header.opcode, n_fds, &reader, &writer);
	REQUIRE(reader.bad == (reader.why != NULL));
	REQUIRE(r >= 0);
	if (r != 0) {
		REQUIRE(reader.bad || r == SHMB_E_UNKNOWN_OP || n_fds != 0);
		return false;
	}
	REQUIRE(!reader.bad && reader.at == reader.end);
	REQUIRE(wire_write_end(&writer) == size && memcmp(again, message, size) == 0);
	return true;
}

/* the message in a heap block of its own, so that a sanitizer sees the first byte too many */
static bool take_input(const uint8_t *data, size_t size, bool set_length) {
	size_t length = size > 0 ? size - 1 : 0;
	uint8_t *message = malloc(length > 0 ? length : 1);
	bool accepted;

	REQUIRE(message);
	if (length > 0)
		memcpy(message, data + 1, length);
	if (set_length && length >= sizeof(WireHeader)) {
		uint32_t right = (uint32_t)length;

		memcpy(message + offsetof(WireHeader, length), &right, sizeof(right));
	}
	accepted = take_message(message, length, size > 0 ? data[0] : 0);
	free(message);
	return accepted;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
	(void)take_input(data, size, false);
	(void)take_input(data, size, true);
	return 0;
}

#ifndef FUZZ_LIBFUZZER

static bool judge(uint8_t *data, size_t size, bool wanted) {
	(void)LLVMFuzzerTestOneInput(data, size);
	return take_input(data, size, false) == wanted;
}

int main(int argc, char **argv) {
	static uint8_t data[WIRE_MESSAGE_MAX + 4096];

	return replay_corpus(argc, argv, "corpus", data, sizeof(data), judge);
}

#endif
