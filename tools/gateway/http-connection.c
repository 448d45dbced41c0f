/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "http-connection.h"
#include "text.h"

/* what is read ahead; a head must fit */
#define HTTP_READ_AHEAD (HTTP_HEAD_MAX + 4096)
/* how long what follows the last reply is thrown away, so that the peer gets to read it */
#define HTTP_DRAIN_SECONDS 120

static void connection_set(HttpConnection *connection, HttpState state, uint32_t seconds) {
	struct timeval timeout = { .tv_sec = seconds };

	connection->state = state;
	if (seconds)
		(void)event_add(connection->timer, &timeout);
	else
		(void)event_del(connection->timer);
}

void http_request_free(HttpRequest *request) {
	if (!request)
		return;
	budget_give(request->http->budget, request->reserved);
	if (request->body)
		evbuffer_free(request->body);
	if (request->reply_headers)
		evbuffer_free(request->reply_headers);
	free(request);
}

void http_connection_free(HttpConnection *connection) {
	Http *http = connection->http;

	/* a route that still works on it will reply to nobody */
	if (connection->request && connection->state == HTTP_BUSY)
		connection->request->connection = NULL;
	else
		http_request_free(connection->request);
	budget_give(http->budget, connection->output);
	turn_withdraw(http->turns, &connection->turn);
	TAILQ_REMOVE(&http->connections, connection, link);
	http->n_connections--;
	event_free(connection->timer);
	bufferevent_free(connection->bev);
	free(connection);
	http_connection_gone(http);
}

static void split_path(HttpRequest *request, char *decoded) {
	const char *at = request->head.target;

	while (*at == '/') {
		size_t length = strcspn(++at, "/");
		Bytes *segment = &request->segments[request->n_segments];

		if (request->n_segments == HTTP_SEGMENTS_MAX ||
		    !text_percent_decode(at, length, decoded, &segment->size)) {
			request->n_segments = 0;
			return;
		}
		segment->data = decoded;
		decoded += segment->size;
		request->n_segments++;
		at += length;
	}
}

/* an inference carries tensors, all other requests a few words */
static uint64_t body_max(const HttpRequest *request) {
	static const char infer[] = "/infer";
	size_t size = strlen(request->head.target);

	if (size >= sizeof(infer) - 1 && strcmp(request->head.target + size - (sizeof(infer) - 1), infer) == 0)
		return request->options->http_max_input_size;
	return request->options->http_max_input_size < CORE_REQUEST_MAX ? request->options->http_max_input_size
									: CORE_REQUEST_MAX;
}

/* One piece of memory from the start, so that a body is never there twice to become one; untouched, it costs nothing. */
static void prepare_body(HttpConnection *connection) {
	uint64_t room = http_request_room(connection->request);

	(void)evbuffer_expand(connection->request->body, connection->left < room ? connection->left : room);
}

/* what must hold before a byte of the body is read; replies and returns false where it does not */
static bool admit(HttpConnection *connection, HttpRequest *request) {
	const Access *access = connection->http->access;
	const HttpHead *head = &request->head;
	const char *origin = http_head_get(head, "origin");
	const char *target = head->target;
	Answer answer = {};

	if (!request->caller.is_unix && !access_host_is_ours(access, head->host, strlen(head->host))) {
		http_reply_error(request, 403, "this server is not called by that Host: see --allow-host");
		return false;
	}
	if (origin && strcmp(head->method, "GET") != 0 &&
	    !access_origin_is_ours(origin, strlen(origin), head->host, strlen(head->host))) {
		http_reply_error(request, 403, "pages of other sites may not call this server");
		return false;
	}
	if (access_check(access, &request->caller, http_head_get(head, "authorization"), &answer) &&
	    strcmp(target, "/v2/health/live") != 0 && strcmp(target, "/v2/health/ready") != 0) {
		http_reply_header(request, "WWW-Authenticate", "Basic realm=\"shmbroker\"");
		http_reply_answer(request, &answer);
		answer_deinit(&answer);
		return false;
	}
	answer_deinit(&answer);
	if (request->caller.admin) {
		const char *scope = http_head_get(head, "shmbroker-scope");

		request->caller.everything = scope && strcmp(scope, "everything") == 0;
	}
	return true;
}

/* the body, if any, is complete or given up */
static void dispatch(HttpConnection *connection) {
	connection_set(connection, HTTP_READY, 0);
	turn_ask(connection->http->turns, &connection->turn);
}

static void on_turn(void *userdata) {
	HttpConnection *connection = userdata;

	connection->state = HTTP_BUSY;
	connection->http->counters.requests++;
	connection->served = true;
	http_route(connection->request);
}

/* the rest of the body is not kept */
static void give_up_body(HttpConnection *connection, uint64_t size) {
	connection->request->oversize = size;
	evbuffer_drain(connection->request->body, evbuffer_get_length(connection->request->body));
	connection->unread = true;
	dispatch(connection);
}

static int request_new(HttpConnection *connection, const char *data, size_t size, HttpRequest **ret) {
	HttpRequest *request;

	/* twice: as it came, and what is decoded of it */
	request = calloc(1, sizeof(*request) + 2 * size);
	if (!request)
		return -ENOMEM;
	request->http = connection->http;
	request->connection = connection;
	request->core = connection->http->core;
	request->options = connection->http->options;
	request->caller = connection->caller;
	request->body = evbuffer_new();
	request->reply_headers = evbuffer_new();
	if (!request->body || !request->reply_headers) {
		http_request_free(request);
		return -ENOMEM;
	}
	memcpy(request->bytes, data, size);
	*ret = request;
	return 0;
}

static int take_head(HttpConnection *connection, const char *data, size_t size) {
	struct evbuffer *input = bufferevent_get_input(connection->bev);
	HttpRequest *request;
	const char *why = "";
	int status;

	if (request_new(connection, data, size, &request))
		return -ENOMEM;
	connection->request = request;
	connection->state = HTTP_BUSY;
	status = http_head_parse(request->bytes, size, &request->head, &why);
	evbuffer_drain(input, size);
	if (status) {
		connection->http->counters.refused_heads++;
		connection->last = connection->unread = true;
		http_reply_error(request, status, why);
		return 0;
	}
	connection->last |= request->head.close;
	connection->unread = request->head.chunked || request->head.length;
	split_path(request, request->bytes + size);
	if (!admit(connection, request))
		return 0;
	connection->unread = false;
	connection->chunks = (HttpChunks){};
	connection->left = request->head.length;
	connection->max = body_max(request);
	if (!request->head.chunked && !connection->left) {
		dispatch(connection);
	} else if (connection->left > connection->max) {
		give_up_body(connection, connection->left);
	} else {
		if (request->head.expect && !evbuffer_get_length(input))
			(void)bufferevent_write(connection->bev, "HTTP/1.1 100 Continue\r\n\r\n", 25);
		prepare_body(connection);
		/* the deadline that the first byte has set goes on */
		connection->state = HTTP_BODY;
	}
	return 0;
}

/* Moves @size bytes of input to the body; false when that is too much. Copies: chains that are moved may be near empty. */
static bool take_body(HttpConnection *connection, const char *data, size_t size) {
	HttpRequest *request = connection->request;

	if (evbuffer_get_length(request->body) + size > connection->max)
		return false;
	if (!http_request_reserve(request, size))
		return false;
	return evbuffer_add(request->body, data, size) == 0;
}

static void read_length(HttpConnection *connection, struct evbuffer *input) {
	while (connection->left && evbuffer_get_length(input)) {
		size_t size = evbuffer_get_contiguous_space(input);

		if (size > connection->left)
			size = connection->left;
		if (!take_body(connection, (const char *)evbuffer_pullup(input, (ev_ssize_t)size), size)) {
			give_up_body(connection, connection->request->head.length);
			return;
		}
		evbuffer_drain(input, size);
		connection->left -= size;
	}
	if (!connection->left)
		dispatch(connection);
}

static void refuse_chunks(HttpConnection *connection, const char *why) {
	connection->state = HTTP_BUSY;
	connection->last = connection->unread = true;
	http_reply_error(connection->request, 400, why);
}

static void read_chunks(HttpConnection *connection, struct evbuffer *input) {
	while (evbuffer_get_length(input)) {
		size_t size = evbuffer_get_contiguous_space(input), taken = 0, n = 0;
		const char *data = (const char *)evbuffer_pullup(input, (ev_ssize_t)size);
		HttpChunksResult result = http_chunks_parse(&connection->chunks, data, size, &taken, &n);

		switch (result) {
		case HTTP_CHUNKS_MALFORMED:
			refuse_chunks(connection, "the chunks of the body are malformed");
			return;
		case HTTP_CHUNKS_TOO_MANY:
			refuse_chunks(connection, "the body has too many chunks");
			return;
		case HTTP_CHUNKS_DATA:
			if (!take_body(connection, data + taken, n)) {
				give_up_body(connection, evbuffer_get_length(connection->request->body) + n);
				return;
			}
			break;
		default:
			break;
		}
		evbuffer_drain(input, taken + n);
		if (result == HTTP_CHUNKS_END) {
			dispatch(connection);
			return;
		}
	}
}

/* Looks for a whole head and begins its request. 0, or -ENOMEM. */
static int read_head(HttpConnection *connection, struct evbuffer *input) {
	size_t length = evbuffer_get_length(input);
	HttpRequest *request;
	struct evbuffer_ptr end;
	int r;

	/* an empty line before a request is left over from the body of the last one */
	while (length >= 2 && memcmp(evbuffer_pullup(input, 2), "\r\n", 2) == 0) {
		evbuffer_drain(input, 2);
		length -= 2;
	}
	if (!length)
		return 0;
	if (connection->state == HTTP_IDLE)
		connection_set(connection, HTTP_HEAD, connection->http->options->request_timeout);
	end = evbuffer_search(input, "\r\n\r\n", 4, NULL);
	if (end.pos < 0) {
		/* whoever ends lines with LF alone would wait in vain */
		end = evbuffer_search(input, "\n\n", 2, NULL);
		if (end.pos >= 0)
			end.pos -= 2;
	}
	if (end.pos >= 0 && end.pos + 4 <= HTTP_HEAD_MAX)
		return take_head(connection, (const char *)evbuffer_pullup(input, end.pos + 4), (size_t)end.pos + 4);
	if (end.pos < 0 && length < HTTP_HEAD_MAX)
		return 0;
	r = request_new(connection, "", 0, &request);
	if (r)
		return r;
	connection->http->counters.refused_heads++;
	connection->request = request;
	connection->state = HTTP_BUSY;
	connection->last = connection->unread = true;
	http_reply_error(request, 431, "the head of the request is larger than 16384 bytes");
	return 0;
}

/* Goes on as far as what has arrived reaches. 0, or -ENOMEM: the connection must end. */
static int connection_read(HttpConnection *connection) {
	struct evbuffer *input = bufferevent_get_input(connection->bev);
	int r;

	if (connection->state <= HTTP_HEAD) {
		r = read_head(connection, input);
		if (r)
			return r;
	}
	if (connection->state == HTTP_BODY) {
		if (connection->request->head.chunked)
			read_chunks(connection, input);
		else
			read_length(connection, input);
	}
	if (connection->state == HTTP_DRAIN)
		evbuffer_drain(input, evbuffer_get_length(input));
	return 0;
}

static void on_read(struct bufferevent *bev, void *userdata) {
	HttpConnection *connection = userdata;

	(void)bev;
	if (connection_read(connection))
		http_connection_free(connection);
}

/* all that was to be written is */
static void on_written(struct bufferevent *bev, void *userdata) {
	HttpConnection *connection = userdata;

	if (connection->state != HTTP_WRITE)
		return;
	budget_give(connection->http->budget, connection->output);
	connection->output = 0;
	if (!connection->last) {
		connection_set(connection, HTTP_IDLE, connection->http->options->idle_timeout);
		(void)clock_gettime(CLOCK_MONOTONIC, &connection->idle_since);
		if (connection_read(connection))
			http_connection_free(connection);
		return;
	}
	if (!connection->unread || shutdown(bufferevent_getfd(bev), SHUT_WR)) {
		http_connection_free(connection);
		return;
	}
	/* closed with something unread, TCP would take the reply back */
	connection_set(connection, HTTP_DRAIN, HTTP_DRAIN_SECONDS);
	(void)clock_gettime(CLOCK_MONOTONIC, &connection->idle_since);
	(void)connection_read(connection);
}

static void on_event(struct bufferevent *bev, short what, void *userdata) {
	HttpConnection *connection = userdata;

	(void)bev;
	/* a peer that has said all that it had to say may still be listening */
	if ((what & BEV_EVENT_EOF) && connection->state >= HTTP_READY && connection->state <= HTTP_WRITE) {
		connection->last = true;
		connection->unread = false;
		return;
	}
	http_connection_free(connection);
}

static void on_timeout(evutil_socket_t fd, short what, void *userdata) {
	static const struct linger at_once = { .l_onoff = 1 };
	HttpConnection *connection = userdata;
	int unread;

	(void)fd;
	(void)what;
	if (connection->state != HTTP_IDLE && connection->state != HTTP_DRAIN)
		connection->http->counters.timed_out++;
	/* what a peer does not read would else stay in the kernel for minutes */
	if (!ioctl(bufferevent_getfd(connection->bev), SIOCOUTQ, &unread) && unread)
		(void)setsockopt(bufferevent_getfd(connection->bev), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
	http_connection_free(connection);
}

void http_connection_replied(HttpConnection *connection, bool last) {
	http_request_free(connection->request);
	connection->request = NULL;
	connection->last |= last;
	connection_set(connection, HTTP_WRITE, connection->http->options->request_timeout);
}

int http_connection_new(Http *http, int fd) {
	HttpConnection *connection;

	connection = calloc(1, sizeof(*connection));
	if (!connection) {
		(void)close(fd);
		return -ENOMEM;
	}
	connection->http = http;
	connection->turn = (Turn){ .take = on_turn, .userdata = connection };
	access_identify(http->access, fd, TRANSPORT_HTTP, &connection->caller);
	connection->bev = bufferevent_socket_new(http->base, fd, BEV_OPT_CLOSE_ON_FREE);
	connection->timer = evtimer_new(http->base, on_timeout, connection);
	if (!connection->bev || !connection->timer) {
		if (connection->bev)
			bufferevent_free(connection->bev);
		else
			(void)close(fd);
		if (connection->timer)
			event_free(connection->timer);
		free(connection);
		return -ENOMEM;
	}
	TAILQ_INSERT_TAIL(&http->connections, connection, link);
	http->n_connections++;
	bufferevent_setwatermark(connection->bev, EV_READ, 0, HTTP_READ_AHEAD);
	bufferevent_setcb(connection->bev, on_read, on_written, on_event, connection);
	connection_set(connection, HTTP_IDLE, http->options->request_timeout);
	(void)clock_gettime(CLOCK_MONOTONIC, &connection->idle_since);
	(void)bufferevent_enable(connection->bev, EV_READ | EV_WRITE);
	return 0;
}
