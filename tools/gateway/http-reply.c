/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <string.h>

#include "http-connection.h"
#include "json.h"

static const char *status_text(int status) {
	static const struct {
		int status;
		const char *text;
	} texts[] = {
		{ 200, "OK" },
		{ 400, "Bad Request" },
		{ 401, "Unauthorized" },
		{ 403, "Forbidden" },
		{ 404, "Not Found" },
		{ 405, "Method Not Allowed" },
		{ 417, "Expectation Failed" },
		{ 429, "Too Many Requests" },
		{ 431, "Request Header Fields Too Large" },
		{ 500, "Internal Server Error" },
		{ 501, "Not Implemented" },
		{ 503, "Service Unavailable" },
		{ 505, "HTTP Version Not Supported" },
	};

	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
		if (texts[i].status == status)
			return texts[i].text;
	}
	return "Other";
}

AnswerCode http_request_check_size(const HttpRequest *request, Answer *answer) {
	uint64_t max = request->options->http_max_input_size;
	uint64_t own = request->connection ? request->connection->max : max;

	if (!request->oversize)
		return ANSWER_OK;
	if (request->oversize > max)
		return answer_set(
			answer, ANSWER_INVALID_ARG,
			"request JSON size of %llu bytes exceeds the maximum allowed input size of %llu bytes. Use "
			"--http-max-input-size to increase the limit.",
			(unsigned long long)request->oversize, (unsigned long long)max);
	if (request->oversize > own)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "a body of %llu bytes is more than the %llu bytes of a request that is no inference",
				  (unsigned long long)request->oversize, (unsigned long long)own);
	return answer_set(answer, ANSWER_RESOURCE_EXHAUSTED,
			  "a body of %llu bytes is more than is held for this request now",
			  (unsigned long long)request->oversize);
}

uint64_t http_request_room(const HttpRequest *request) {
	const Budget *budget = request->http->budget;

	return budget_room(budget, budget->limit / HTTP_RESERVE, request->reserved, BUDGET_SHARE);
}

bool http_request_reserve(HttpRequest *request, uint64_t bytes) {
	if (!budget_take_of(request->http->budget, http_request_room(request), bytes))
		return false;
	request->reserved += bytes;
	return true;
}

/* what a document may take beside what is held of all requests: at least half of what one may have that is alone */
static size_t json_room(const HttpRequest *request) {
	uint64_t used = request->http->budget->used;

	return JSON_COST_MAX - (size_t)(used < JSON_COST_MAX / 2 ? used : JSON_COST_MAX / 2);
}

AnswerCode http_request_json(HttpRequest *request, size_t size, size_t cost_max, struct json_object **ret,
			     Answer *answer) {
	size_t room = json_room(request), length = evbuffer_get_length(request->body);
	AnswerCode code = http_request_check_size(request, answer);
	char *data;

	if (code)
		return code;
	if (size > length)
		size = length;
	data = size ? (char *)evbuffer_pullup(request->body, (ev_ssize_t)size) : NULL;
	if (size && !data)
		return answer_set(answer, ANSWER_INTERNAL, "out of memory");
	code = json_parse(data, size, cost_max < room ? cost_max : room, ret, answer);
	evbuffer_drain(request->body, size);
	return code;
}

void http_reply_header(HttpRequest *request, const char *name, const char *value) {
	(void)evbuffer_add_printf(request->reply_headers, "%s: %s\r\n", name, value);
}

static void reply(HttpRequest *request, int status, const char *content_type, struct evbuffer *body, uint64_t charge) {
	HttpConnection *connection = request->connection;
	struct evbuffer *output = bufferevent_get_output(connection->bev);
	size_t size = body ? evbuffer_get_length(body) : 0;
	bool last = connection->last || connection->unread || request->http->stopping;

	connection->output = charge;
	request->http->counters.replies[status / 100 % 6]++;
	(void)evbuffer_add_printf(output, "HTTP/1.1 %d %s\r\n", status, status_text(status));
	if (content_type)
		(void)evbuffer_add_printf(output, "Content-Type: %s\r\n", content_type);
	(void)evbuffer_add_printf(output, "Content-Length: %zu\r\nX-Content-Type-Options: nosniff\r\n", size);
	(void)evbuffer_add_buffer(output, request->reply_headers);
	if (last)
		(void)evbuffer_add_printf(output, "Connection: close\r\n");
	else if (request->head.http_1_0)
		(void)evbuffer_add_printf(output, "Connection: keep-alive\r\n");
	(void)evbuffer_add(output, "\r\n", 2);
	if (body && !(request->head.method && strcmp(request->head.method, "HEAD") == 0))
		(void)evbuffer_add_buffer(output, body);
	http_connection_replied(connection, last);
}

void http_reply_buffer(HttpRequest *request, int status, const char *content_type, struct evbuffer *body) {
	uint64_t size = body ? evbuffer_get_length(body) : 0;

	if (!request->connection) {
		/* whom it was for has gone */
		http_request_free(request);
		return;
	}
	/* the request is over: what it held makes room for its reply */
	evbuffer_drain(request->body, evbuffer_get_length(request->body));
	budget_give(request->http->budget, request->reserved);
	request->reserved = 0;
	if (!budget_take_of(request->http->budget, http_request_room(request), size)) {
		evbuffer_drain(body, size);
		(void)evbuffer_add_printf(body, "{\"error\":\"a reply of %llu bytes is more than is held now\"}",
					  (unsigned long long)size);
		status = 429;
		content_type = "application/json";
		size = 0;
	}
	reply(request, status, content_type, body, size);
}

void http_reply_empty(HttpRequest *request, int status) {
	http_reply_buffer(request, status, "application/json", NULL);
}

int http_add_json(struct evbuffer *out, struct json_object *borrowed) {
	size_t size = 0;
	const char *text;

	text = json_object_to_json_string_length(borrowed, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE,
						 &size);
	return text && evbuffer_add(out, text, size) == 0 ? 0 : -ENOMEM;
}

void http_reply_json(HttpRequest *request, int status, struct json_object *borrowed) {
	struct evbuffer *body = evbuffer_new();

	if (!body || http_add_json(body, borrowed))
		status = 500;
	http_reply_buffer(request, status, "application/json", body);
	if (body)
		evbuffer_free(body);
}

void http_reply_error(HttpRequest *request, int status, const char *text) {
	struct json_object *object = json_object_new_object();

	json_object_object_add(object, "error", json_object_new_string(text));
	http_reply_json(request, status, object);
	json_object_put(object);
}

void http_reply_answer(HttpRequest *request, const Answer *answer) {
	if (answer->code == ANSWER_OK)
		http_reply_empty(request, 200);
	else
		http_reply_error(request, answer_code_to_http(answer->code), answer_text(answer));
}
