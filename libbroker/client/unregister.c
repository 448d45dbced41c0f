/* SPDX-License-Identifier: Apache-2.0 */

/* The end of regions, asked for by their names or all at once. */

#include <errno.h>
#include <string.h>

#include "owner.h"

static int unregister(struct shmb_client *client, const WireUnregisterRequest *request, const WireNameEntry *entries,
		      const char *const *names, Call *call) {
	WireWriter writer;
	_cleanup_(freep) uint8_t *buffer = client_request_begin(&writer, WIRE_OP_UNREGISTER);

	*call = (Call){};
	if (!buffer)
		return error_plain(-ENOMEM);
	wire_write(&writer, request, sizeof(*request));
	for (uint32_t i = 0; i < request->count; ++i) {
		wire_write(&writer, &entries[i], sizeof(entries[i]));
		wire_write(&writer, names[i], entries[i].name_length);
	}
	/* the broker answers when they are gone, or says that they are not */
	return call_run_long(client, &writer, NULL, 0,
			     !(request->flags & WIRE_UNREGISTER_WAIT)	 ? 0
			     : request->timeout_ms > (uint32_t)INT32_MAX ? -1
									 : (int)request->timeout_ms,
			     call);
}

static int request_fill(WireUnregisterRequest *ret, uint32_t scope, uint32_t mode, int timeout, uint32_t count) {
	if ((mode & ~(uint32_t)SHMB_RETIRE_WAIT) > SHMB_RETIRE_DISCARD)
		return error_set(SHMB_E_INVALID, "mode is SHMB_RETIRE_STRICT, _LAZY, _FORCE or _DISCARD");
	*ret = (WireUnregisterRequest){
		.scope = (uint8_t)scope,
		.mode = (uint8_t)(mode & 3),
		.flags = mode & SHMB_RETIRE_WAIT ? WIRE_UNREGISTER_WAIT : 0,
		.timeout_ms = timeout < 0 ? WIRE_FOREVER : (uint32_t)timeout,
		.count = count,
		.principal = WIRE_ANY_UID,
	};
	return 0;
}

static int read_results(const Call *call, uint32_t n, int *ret_results) {
	WireReader body = call_body(call);
	WireUnregisterResult result;
	WireUnregisterReply reply;
	const char *text;

	wire_read(&body, &reply, sizeof(reply));
	if (reply.count != n)
		return error_plain(-EPROTO);
	for (uint32_t i = 0; i < n; ++i) {
		wire_read(&body, &result, sizeof(result));
		text = wire_read_bytes(&body, result.text_length);
		if (!text)
			return error_plain(-EPROTO);
		ret_results[i] = (int)result.code;
		if (result.code || result.text_length)
			(void)error_setn((int)result.code, text, result.text_length);
	}
	return wire_reader_end(&body) ? 0 : error_plain(-EPROTO);
}

int unregister_named(struct shmb_client *client, uint32_t principal, const char *const *names,
		     const uint64_t *generations, uint32_t n, uint32_t mode, int timeout, int *ret_results) {
	WireNameEntry entries[WIRE_BATCH_MAX];
	WireUnregisterRequest request;
	Call call;
	int r;

	r = request_fill(&request, WIRE_SCOPE_NAMES, mode, timeout, n);
	if (r)
		return r;
	request.principal = principal ? principal - 1 : WIRE_ANY_UID;
	for (uint32_t i = 0; i < n; ++i)
		entries[i] = (WireNameEntry){
			.generation = generations ? generations[i] : 0,
			.name_length = (uint16_t)strlen(names[i]),
		};
	r = unregister(client, &request, entries, names, &call);
	if (!r)
		r = read_results(&call, n, ret_results);
	call_end(&call);
	return r;
}

/* a name that cannot be one is refused here, the others go on */
static int unregister_part(struct shmb_client *client, uint32_t principal, const char *const *names, uint32_t n,
			   uint32_t mode, int timeout, int *ret_results) {
	const char *good[WIRE_BATCH_MAX];
	uint32_t positions[WIRE_BATCH_MAX], n_good = 0;
	int results[WIRE_BATCH_MAX], r;

	for (uint32_t i = 0; i < n; ++i) {
		ret_results[i] = error_of_name(names[i], strlen(names[i]));
		if (ret_results[i])
			continue;
		positions[n_good] = i;
		good[n_good++] = names[i];
	}
	if (!n_good)
		return 0;
	r = unregister_named(client, principal, good, NULL, n_good, mode, timeout, results);
	for (uint32_t i = 0; !r && i < n_good; ++i)
		ret_results[positions[i]] = results[i];
	return r;
}

int shmb_client_unregister_as(struct shmb_client *client, uint32_t principal, const char *const *names, uint32_t n,
			      uint32_t mode, int timeout, int *ret_results) {
	int results[WIRE_BATCH_MAX], first = 0, r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	for (uint32_t i = 0; i < n; i += WIRE_BATCH_MAX) {
		uint32_t part = n - i < WIRE_BATCH_MAX ? n - i : WIRE_BATCH_MAX;

		r = unregister_part(client, principal, names + i, part, mode, timeout, results);
		if (r)
			return r;
		for (uint32_t j = 0; j < part; ++j) {
			if (ret_results)
				ret_results[i + j] = results[j];
			first = first ?: results[j];
		}
	}
	/* with an array of results the call itself has succeeded */
	return ret_results ? 0 : first;
}

int shmb_client_unregister(struct shmb_client *client, const char *const *names, uint32_t n, uint32_t mode, int timeout,
			   int *ret_results) {
	return shmb_client_unregister_as(client, 0, names, n, mode, timeout, ret_results);
}

int shmb_client_unregister_all(struct shmb_client *client, uint32_t scope, uint32_t mode, int timeout,
			       struct shmb_retired *ret) {
	WireUnregisterRequest request;
	WireUnregisterReply reply;
	WireReader body;
	Call call;
	int r;

	if (scope < SHMB_ALL_SESSION || scope > SHMB_ALL_EVERYONE)
		return error_set(SHMB_E_INVALID, "scope is SHMB_ALL_SESSION, _UID or _EVERYONE");
	r = request_fill(&request, scope, mode, timeout, 0);
	if (r)
		return r;
	r = unregister(client, &request, NULL, NULL, &call);
	if (!r) {
		body = call_body(&call);
		wire_read(&body, &reply, sizeof(reply));
		r = wire_reader_end(&body) ? 0 : error_plain(-EPROTO);
	}
	call_end(&call);
	if (!r && ret) {
		ret->gone = reply.gone;
		ret->draining = reply.draining;
		ret->discarded = reply.discarded;
	}
	return r;
}
