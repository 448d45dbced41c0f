/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fuzz target: what a hostile peer sends to the gRPC door. An input is two bytes, how the session is used, and the bytes
 * of a connection after the client's magic.
 *
 * What holds for every input: nothing outside of what was allocated is touched; whatever the session held is given back
 * at its end; it never holds more than its budget; every call that was handed over is done with once or cancelled once.
 *
 * Built with -fsanitize=fuzzer -DFUZZ_LIBFUZZER it is a libFuzzer target. Built without, it replays the files of a
 * directory (the argument, else tests/fuzz/corpus-grpc below $srcdir): from y_* a call must be handed over and the
 * connection must stay of use, from n_* either must not be so.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "tools/gateway/grpc-session.h"

enum {
	/* the first byte */
	USE_LATER = 1,	     /* calls are answered when the next bytes have come */
	USE_DEAF = 2,	     /* output is never sent */
	USE_CLOCK = 4,	     /* time passes */
	USE_TINY_BUDGET = 8, /* most of what is asked for is refused */
	USE_PIECES = 16,     /* bytes come in pieces of the length that the second byte says */

	CALLS_MAX = 64,
};

typedef struct Owner {
	GrpcCall *calls[CALLS_MAX];
	size_t n_calls;
	size_t n_called;
	bool later;
} Owner;

static size_t message_max(void *userdata, const char *path, bool *ret_stream) {
	(void)userdata;
	if (strcmp(path, "/a/stream") == 0)
		*ret_stream = true;
	if (strcmp(path, "/a/long") == 0)
		return 100000;
	return strncmp(path, "/a/", 3) == 0 ? 4096 : 0;
}

static void answer(GrpcCall *call) {
	uint8_t *reply;

	if (call->message_size > 0 && call->message[0] == 'e') {
		grpc_call_finish(call, GRPC_NOT_FOUND, (const char *)call->message, call->message_size);
		return;
	}
	reply = grpc_call_reply(call, call->message_size);
	if (reply && call->message_size > 0)
		memcpy(reply, call->message, call->message_size);
	if (reply && strcmp(call->path, "/a/stream") == 0)
		grpc_call_next(call);
	else
		grpc_call_finish(call, reply ? GRPC_OK : GRPC_RESOURCE_EXHAUSTED, "", 0);
}

static void on_call(void *userdata, GrpcCall *call) {
	Owner *owner = userdata;

	owner->n_called++;
	if (!owner->later || owner->n_calls == CALLS_MAX)
		answer(call);
	else
		owner->calls[owner->n_calls++] = call;
}

static void on_cancel(void *userdata, GrpcCall *call) {
	Owner *owner = userdata;

	for (size_t i = 0; i < owner->n_calls; i++) {
		if (owner->calls[i] == call) {
			owner->calls[i] = owner->calls[--owner->n_calls];
			return;
		}
	}
	REQUIRE(!"a call was cancelled that was not handed over");
}

static void run(GrpcSession *session, uint64_t now) {
	while (grpc_session_run(session, now))
		;
}

static bool drain(GrpcSession *session, uint64_t now) {
	const uint8_t *data;
	size_t size;
	bool alive;

	do {
		alive = grpc_session_output(session, &data, &size);
		if (size > 0)
			grpc_session_sent(session, size, now);
		run(session, now);
	} while (size > 0);
	return alive;
}

/* true when a call was handed over, and the connection is still of use */
static bool take_input(const uint8_t *data, size_t size) {
	static const GrpcHandler handler = { message_max, on_call, on_cancel };
	uint8_t use = size > 0 ? data[0] : 0, piece = size > 1 ? data[1] : 0;
	Budget budget = { .limit = use & USE_TINY_BUDGET ? 300 : 1 << 20 };
	Owner owner = { .later = use & USE_LATER };
	GrpcSession *session = NULL;
	uint64_t now = 0;
	bool alive;

	data += size < 2 ? size : 2;
	size -= size < 2 ? size : 2;
	REQUIRE(grpc_session_new(&session, &grpc_limits_default, &budget, &handler, &owner, now) == 0);
	alive = grpc_session_receive(session, (const uint8_t *)NGHTTP2_CLIENT_MAGIC, NGHTTP2_CLIENT_MAGIC_LEN, now);
	while (alive && size > 0) {
		size_t n = use & USE_PIECES && piece < size ? (size_t)piece + 1 : size;
		uint8_t *bytes;

		if (n > size)
			n = size;
		/* a heap block of their own, so that a sanitizer sees the first byte too many */
		bytes = malloc(n);
		REQUIRE(bytes);
		memcpy(bytes, data, n);
		if (owner.n_calls > 0)
			answer(owner.calls[--owner.n_calls]);
		alive = grpc_session_receive(session, bytes, n, now);
		free(bytes);
		run(session, now);
		REQUIRE(budget.used <= budget.limit);
		data += n;
		size -= n;
		if (use & USE_CLOCK) {
			now += 700;
			alive = grpc_session_tick(session, now) && alive;
			REQUIRE(!alive || grpc_session_deadline(session) > now);
		}
		if (!(use & USE_DEAF))
			alive = drain(session, now) && alive;
		else if (!grpc_session_wants_input(session))
			break;
	}
	grpc_session_free(session);
	REQUIRE(budget.used == 0);
	REQUIRE(owner.n_calls == 0);
	return alive && owner.n_called > 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
	(void)take_input(data, size);
	return 0;
}

#ifndef FUZZ_LIBFUZZER

static bool judge(uint8_t *data, size_t size, bool wanted) {
	return take_input(data, size) == wanted;
}

int main(int argc, char **argv) {
	static uint8_t data[1 << 20];

	return replay_corpus(argc, argv, "corpus-grpc", data, sizeof(data), judge);
}

#endif
