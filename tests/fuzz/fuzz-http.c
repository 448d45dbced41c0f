/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fuzz target: what a hostile peer sends to the HTTP door, over a socket pair, with a core that says yes to everything. An
 * input is one byte, how it is sent (1: as over TCP, 2: in pieces of a few bytes), and the bytes of a connection.
 *
 * What holds for every input: nothing outside of what was allocated is touched; the connection ends when its peer does,
 * and whatever it held is given back; every reply is one, with a body of its length, which is empty or JSON; what the check
 * of JSON lets through is parsed.
 *
 * Built with -fsanitize=fuzzer -DFUZZ_LIBFUZZER it is a libFuzzer target. Built without, it replays the files of a
 * directory (the argument, else tests/fuzz/corpus-http below $srcdir): to y_* the first reply must be no error, to n_* it
 * must be one, or there must be none.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"
#include "tools/gateway/dashboard.h"
#include "tools/gateway/http-connection.h"
#include "tools/gateway/json.h"
#include "tools/gateway/text.h"

#define INPUT_MAX (1 << 17)
#define REPLIES_MAX (1 << 22)
/* what is asked for at a time, all of which valgrind looks at */
#define RECEIVE_MAX 4096
/* turns of the loop in which everything that can happen has */
#define TURNS_MAX 100000

/* ---- what the door needs besides itself ---- */

bool core_live(const Core *core) {
	(void)core;
	return true;
}

bool core_ready(Core *core) {
	(void)core;
	return true;
}

void core_metadata(Core *core, CoreMetadata *ret) {
	(void)core;
	*ret = (CoreMetadata){ .name = "fuzz", .version = "0", .extensions = { "none" } };
}

AnswerCode core_check_allowed(const Core *core, Answer *answer) {
	(void)core;
	(void)answer;
	return ANSWER_OK;
}

AnswerCode core_system_register(Core *core, const Caller *caller, Bytes name, Bytes key, uint64_t offset,
				uint64_t byte_size, Answer *answer) {
	bool control;

	(void)core;
	(void)caller;
	(void)offset;
	(void)byte_size;
	(void)answer;
	REQUIRE(name.size);
	/* of JSON */
	REQUIRE(text_is_utf8(key.data, key.size, &control));
	return ANSWER_OK;
}

AnswerCode core_cuda_register(Core *core, const Caller *caller, Bytes name, Bytes raw_handle, int64_t device_id,
			      uint64_t byte_size, Answer *answer) {
	(void)core;
	(void)caller;
	(void)byte_size;
	(void)answer;
	REQUIRE(name.size && raw_handle.size == CORE_CUDA_HANDLE_SIZE && device_id >= 0);
	return ANSWER_OK;
}

AnswerCode core_status(Core *core, const Caller *caller, CoreKind kind, Bytes name, CoreRegionList *ret,
		       Answer *answer) {
	static CoreRegion region = { .name = "a \"name\"", .key = "/key", .byte_size = UINT64_MAX };

	(void)core;
	(void)caller;
	(void)kind;
	if (name.size > CORE_NAME_MAX)
		return answer_set(answer, ANSWER_INVALID_ARG, "the name is too long");
	*ret = (CoreRegionList){ .regions = &region, .n = 1 };
	return ANSWER_OK;
}

void core_region_list_deinit(CoreRegionList *list) {
	*list = (CoreRegionList){};
}

AnswerCode core_unregister(Core *core, const Caller *caller, CoreKind kind, Bytes name, Answer *answer) {
	(void)core;
	(void)caller;
	(void)kind;
	(void)answer;
	REQUIRE(name.size);
	return ANSWER_OK;
}

AnswerCode core_unregister_all(Core *core, const Caller *caller, CoreKind kind, Answer *answer) {
	(void)core;
	(void)caller;
	(void)kind;
	(void)answer;
	return ANSWER_OK;
}

bool dashboard_route(HttpRequest *request) {
	(void)request;
	return false;
}

bool http_models_route(HttpRequest *request) {
	(void)request;
	return false;
}

/* ---- one connection ---- */

static const Options options = {
	.http_max_input_size = 1 << 12,
	.max_connections = 4,
	.request_timeout = 1000,
	.idle_timeout = 1000,
};
static Budget budget = { .limit = 1 << 20 };

static Http *door(struct event_base **ret_base) {
	static const ListenSet nowhere = {};
	static struct event_base *base;
	static Access *access_rules;
	static Turns turns;
	static Core core;
	static Http *http;

	if (!http) {
		base = event_base_new();
		REQUIRE(base && !access_new(&access_rules, "", "") && !turns_init(&turns, base));
		REQUIRE(!http_new(&http, base, &options, access_rules, &core, &budget, &turns, &nowhere, "http", NULL,
				  NULL));
	}
	*ret_base = base;
	return http;
}

static char replies[REPLIES_MAX];

/* adds what has arrived; false at the end */
static bool take_replies(int fd, size_t *size) {
	ssize_t r;

	do {
		REQUIRE(*size + RECEIVE_MAX <= REPLIES_MAX);
		r = recv(fd, replies + *size, RECEIVE_MAX, MSG_DONTWAIT);
		if (r > 0)
			*size += (size_t)r;
	} while (r > 0);
	return r < 0;
}

/* the status of the first one, 0 when there is none */
static int check_replies(char *text, size_t size) {
	int first = 0;

	while (size) {
		char *end = memmem(text, size, "\r\n\r\n", 4), *length;
		size_t offset, body = 0;
		const char *why;
		int status;

		/* the last one may have been cut by the end of the connection */
		if (!end)
			break;
		*end = 0;
		REQUIRE(sscanf(text, "HTTP/1.1 %d ", &status) == 1);
		length = strstr(text, "Content-Length: ");
		if (status != 100) {
			REQUIRE(length);
			body = strtoul(length + 16, NULL, 10);
			first = first ?: status;
		}
		size -= (size_t)(end + 4 - text);
		text = end + 4;
		if (body > size)
			break;
		REQUIRE(!body || json_check(text, body, &why, &offset));
		size -= body;
		text += body;
	}
	return first;
}

static int serve(const uint8_t *data, size_t size, uint8_t how) {
	size_t piece = how & 2 ? 1u + (how >> 4) : size, sent = 0, got = 0, turns = 0;
	struct event_base *base;
	Http *http = door(&base);
	int pair[2];

	REQUIRE(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair));
	REQUIRE(!http_connection_new(http, pair[0]));
	if (how & 1)
		TAILQ_FIRST(&http->connections)->caller.is_unix = false;
	while (sent < size && turns++ < TURNS_MAX) {
		ssize_t r = send(pair[1], data + sent, size - sent < piece ? size - sent : piece, MSG_NOSIGNAL);

		if (r > 0)
			sent += (size_t)r;
		(void)event_base_loop(base, EVLOOP_NONBLOCK);
		if (!take_replies(pair[1], &got))
			break;
	}
	(void)shutdown(pair[1], SHUT_WR);
	while (http_n_connections(http) && turns++ < TURNS_MAX) {
		(void)event_base_loop(base, EVLOOP_NONBLOCK);
		(void)take_replies(pair[1], &got);
	}
	(void)take_replies(pair[1], &got);
	REQUIRE(!http_n_connections(http) && !budget.used);
	(void)close(pair[1]);
	/* a reply to HEAD has the length of a body that it has not */
	return size && memmem(data, size, "HEAD", 4) ? 0 : check_replies(replies, got);
}

static void use_json(const uint8_t *data, size_t size) {
	char *text = malloc(size ? size : 1), *copy = malloc(size ? size : 1);
	struct json_object *object = NULL;
	Answer answer = {};
	const char *why;
	size_t offset;

	REQUIRE(text && copy);
	if (size) {
		memcpy(text, data, size);
		memcpy(copy, data, size);
	}
	REQUIRE(json_check(copy, size, &why, &offset) ==
		(json_parse(text, size, JSON_COST_MAX, &object, &answer) == ANSWER_OK));
	json_object_put(object);
	answer_deinit(&answer);
	free(text);
	free(copy);
}

static int take_input(const uint8_t *data, size_t size) {
	if (!size || size > INPUT_MAX)
		return 0;
	use_json(data + 1, size - 1);
	return serve(data + 1, size - 1, data[0]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
	(void)take_input(data, size);
	return 0;
}

#ifndef FUZZ_LIBFUZZER

static bool judge(uint8_t *data, size_t size, bool wanted) {
	int status;

	/* in pieces it would take valgrind minutes */
	for (int how = 0; how < (getenv("SHMBROKER_VALGRIND") ? 1 : 2); how++) {
		/* at once, and in pieces: of a byte where that does not take too long */
		data[0] = (uint8_t)((data[0] & 1) | (!how ? 0 : size < 2048 ? 0x02 : 0xf2));
		status = take_input(data, size);
		if ((status && status < 400) != wanted) {
			fprintf(stderr, "status %d\n", status);
			return false;
		}
	}
	return true;
}

int main(int argc, char **argv) {
	static uint8_t data[INPUT_MAX + 1];

	return replay_corpus(argc, argv, "corpus-http", data, sizeof(data), judge);
}

#endif
