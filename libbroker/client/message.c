/* SPDX-License-Identifier: Apache-2.0 */

/* Leases by message: one round trip for up to 64 of them, nothing is mapped. */

#include <errno.h>
#include <string.h>

#include "client.h"
#include "wire/name.h"

/* @positions: where in the caller's arrays each of @n answers belongs */
static int read_lookups(const Call *call, const uint32_t *positions, uint32_t n, struct shmb_message_lease *ret,
			int *ret_results) {
	WireReader body = call_body(call);
	WireLookupResult result;
	WireCountHead head;
	const char *text;

	wire_read(&body, &head, sizeof(head));
	if (head.count != n)
		return error_plain(-EPROTO);
	for (uint32_t i = 0; i < n; ++i) {
		uint32_t at = positions[i];

		wire_read(&body, &result, sizeof(result));
		text = wire_read_bytes(&body, result.text_length);
		if (!text || !wire_read_bytes(&body, result.handle_length))
			return error_plain(-EPROTO);
		ret_results[at] = result.code ? error_setn((int)result.code, text, result.text_length) : 0;
		ret[at] = (struct shmb_message_lease){
			.lease = result.lease,
			.generation = result.generation,
			.offset = result.offset,
			.size = result.size,
			.object = result.object,
			.slot = result.slot,
			.flags = result.flags,
		};
	}
	return wire_reader_end(&body) ? 0 : error_plain(-EPROTO);
}

int shmb_client_lookup(struct shmb_client *client, const struct shmb_lookup_spec *specs, uint32_t n,
		       struct shmb_message_lease *ret, int *ret_results) {
	uint32_t positions[WIRE_BATCH_MAX];
	WireCountHead *head;
	WireWriter writer;
	Call call;
	_cleanup_(freep) uint8_t *buffer = NULL;
	const char *why;
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (!n || n > WIRE_BATCH_MAX)
		return error_set(SHMB_E_INVALID, "1 to 64 lookups a call");
	buffer = client_request_begin(&writer, WIRE_OP_LOOKUP);
	if (!buffer)
		return error_plain(-ENOMEM);
	head = wire_write(&writer, NULL, sizeof(*head));
	for (uint32_t i = 0; i < n; ++i) {
		size_t length = strlen(specs[i].name);
		WireLookupEntry entry = {
			.offset = specs[i].offset,
			.size = specs[i].size,
			.access = specs[i].access,
			.name_length = (uint16_t)length,
		};

		/* a name that cannot be one is refused here, the others go on */
		r = wire_name_check(specs[i].name, length, &why);
		ret_results[i] = r ? error_set(r, why) : 0;
		if (r)
			continue;
		positions[head->count++] = i;
		wire_write(&writer, &entry, sizeof(entry));
		wire_write(&writer, specs[i].name, length);
	}
	if (!head->count)
		return 0;
	r = call_run(client, &writer, NULL, 0, &call);
	if (!r)
		r = read_lookups(&call, positions, head->count, ret, ret_results);
	call_end(&call);
	return r;
}

int shmb_client_release(struct shmb_client *client, const uint64_t *leases, uint32_t n, int *ret_results) {
	WireCountHead head = { .count = n };
	WireReleaseResult result;
	WireWriter writer;
	WireReader body;
	Call call;
	_cleanup_(freep) uint8_t *buffer = NULL;
	int r;

	if (!n || n > WIRE_BATCH_MAX)
		return error_set(SHMB_E_INVALID, "1 to 64 leases a call");
	buffer = client_request_begin(&writer, WIRE_OP_RELEASE);
	if (!buffer)
		return error_plain(-ENOMEM);
	wire_write(&writer, &head, sizeof(head));
	for (uint32_t i = 0; i < n; ++i)
		wire_write(&writer, &(WireReleaseEntry){ .lease = leases[i] }, sizeof(WireReleaseEntry));
	r = call_run(client, &writer, NULL, 0, &call);
	if (!r) {
		body = call_body(&call);
		wire_read(&body, &head, sizeof(head));
		for (uint32_t i = 0; i < n; ++i) {
			wire_read(&body, &result, sizeof(result));
			ret_results[i] = error_plain((int)result.code);
		}
		if (!wire_reader_end(&body) || head.count != n)
			r = error_plain(-EPROTO);
	}
	call_end(&call);
	return r;
}
