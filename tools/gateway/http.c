/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "http-connection.h"

/* at the cap: how often room is looked for, for how many, and how long a connection is spared */
#define HTTP_RETRY_MS 20
#define HTTP_ROOM 16
#define HTTP_SPARE_MS 1000
#define HTTP_SPARE_NEW_MS 100
#define HTTP_SPARE_DRAIN_MS 30000

/* the parts of the door, in the order in which they are asked */
static HttpRoute *const routes[] = {
	http_server_route, http_shm_route, dashboard_route, http_models_route, NULL,
};

void http_route(HttpRequest *request) {
	if (!request->n_segments) {
		http_reply_error(request, 400,
				 "the path has too many parts, or a % that no two hexadecimal digits follow");
		return;
	}
	for (HttpRoute *const *route = request->http->routes; *route; route++) {
		if ((*route)(request))
			return;
	}
	http_reply_error(request, 404, "Not Found");
}

bool http_path_is(const HttpRequest *request, size_t first, const char *const *words) {
	size_t i = first;

	for (; *words; words++, i++) {
		const Bytes *segment = &request->segments[i];

		if (i >= request->n_segments || !segment->size)
			return false;
		if (strcmp(*words, "*") != 0 &&
		    (segment->size != strlen(*words) || memcmp(segment->data, *words, segment->size)))
			return false;
	}
	return i == request->n_segments;
}

bool http_method_is(HttpRequest *request, const char *method) {
	if (strcmp(request->head.method, method) == 0)
		return true;
	http_reply_header(request, "Allow", method);
	http_reply_error(request, 405, "Method Not Allowed");
	return false;
}

/* ---- connections ---- */

static void listen_switch(Http *http, bool on) {
	for (uint32_t i = 0; i < http->n_listeners; i++) {
		if (on)
			(void)evconnlistener_enable(http->listeners[i]);
		else
			(void)evconnlistener_disable(http->listeners[i]);
	}
}

/* whether somebody has connected who has not been accepted */
static bool is_waited_for(const Http *http) {
	struct pollfd fds[LISTEN_MAX];

	for (uint32_t i = 0; i < http->n_listeners; i++)
		fds[i] = (struct pollfd){ evconnlistener_get_fd(http->listeners[i]), POLLIN, 0 };
	return poll(fds, http->n_listeners, 0) > 0;
}

/* milliseconds for which @connection has been without a request */
static int64_t idle_ms(const HttpConnection *connection, const struct timespec *now) {
	return (now->tv_sec - connection->idle_since.tv_sec) * 1000 +
	       (now->tv_nsec - connection->idle_since.tv_nsec) / 1000000;
}

static int64_t spare_ms(const HttpConnection *connection) {
	if (connection->state == HTTP_DRAIN)
		return HTTP_SPARE_DRAIN_MS;
	return connection->served ? HTTP_SPARE_MS : HTTP_SPARE_NEW_MS;
}

/*
 * Ends some of the connections that have been idle for so long that their clients do not seem to need them; one that never
 * asked for anything is spared for less long.
 */
static void make_room(Http *http) {
	HttpConnection *connection, *next;
	uint32_t made = 0;
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	for (connection = TAILQ_FIRST(&http->connections); connection && made < HTTP_ROOM; connection = next) {
		next = TAILQ_NEXT(connection, link);
		if ((connection->state != HTTP_IDLE && connection->state != HTTP_DRAIN) ||
		    idle_ms(connection, &now) < spare_ms(connection))
			continue;
		http->counters.cap_hits++;
		made++;
		http_connection_free(connection);
	}
}

/* accepts no more until there is room */
static void listen_later(Http *http) {
	const struct timeval soon = { .tv_usec = HTTP_RETRY_MS * 1000 };

	listen_switch(http, false);
	(void)event_add(http->retry, &soon);
}

static void on_retry(evutil_socket_t fd, short what, void *userdata) {
	Http *http = userdata;

	(void)fd;
	(void)what;
	if (http->stopping)
		return;
	if (http->n_connections >= http->options->max_connections && is_waited_for(http))
		make_room(http);
	if (http->n_connections < http->options->max_connections)
		listen_switch(http, true);
	else
		listen_later(http);
}

static void on_accept(struct evconnlistener *listener, evutil_socket_t fd, struct sockaddr *address, int size,
		      void *userdata) {
	Http *http = userdata;

	(void)listener;
	(void)address;
	(void)size;
	/* who finds no room waits in the backlog */
	if (!http_connection_new(http, fd) && http->n_connections >= http->options->max_connections)
		listen_later(http);
}

static void on_accept_error(struct evconnlistener *listener, void *userdata) {
	(void)listener;
	/* without this, a lack of fds would keep the loop busy */
	listen_later(userdata);
}

void http_connection_gone(Http *http) {
	if (http->stopping) {
		if (!http->n_connections && http->stopped) {
			void (*stopped)(void *) = http->stopped;

			http->stopped = NULL;
			stopped(http->stopped_userdata);
		}
	} else if (http->n_connections < http->options->max_connections) {
		listen_switch(http, true);
	}
}

int http_new(Http **ret, struct event_base *base, const Options *options, const Access *access, Core *core,
	     Budget *budget, Turns *turns, const ListenSet *listening, const char *door, HttpRoute *const *door_routes,
	     void *userdata) {
	Http *http;

	http = calloc(1, sizeof(*http));
	if (!http)
		return -ENOMEM;
	*http = (Http){
		.base = base,
		.options = options,
		.access = access,
		.core = core,
		.budget = budget,
		.turns = turns,
		.routes = door_routes ?: routes,
		.userdata = userdata,
	};
	TAILQ_INIT(&http->connections);
	http->retry = evtimer_new(base, on_retry, http);
	if (!http->retry) {
		free(http);
		return -ENOMEM;
	}
	for (size_t i = 0; i < listening->n; i++) {
		struct evconnlistener *listener;

		if (strcmp(listening->sockets[i].door, door) != 0)
			continue;
		listener =
			evconnlistener_new(base, on_accept, http, LEV_OPT_CLOSE_ON_EXEC, 0, listening->sockets[i].fd);
		if (!listener) {
			http_free(http);
			return -ENOMEM;
		}
		evconnlistener_set_error_cb(listener, on_accept_error);
		http->listeners[http->n_listeners++] = listener;
	}
	*ret = http;
	return 0;
}

void http_stop(Http *http, void (*done)(void *userdata), void *userdata) {
	HttpConnection *connection, *next;

	http->stopping = true;
	listen_switch(http, false);
	http->stopped = done;
	http->stopped_userdata = userdata;
	for (connection = TAILQ_FIRST(&http->connections); connection; connection = next) {
		next = TAILQ_NEXT(connection, link);
		connection->last = true;
		if (connection->state == HTTP_IDLE || connection->state == HTTP_DRAIN)
			http_connection_free(connection);
	}
	http_connection_gone(http);
}

Http *http_free(Http *http) {
	HttpConnection *connection;

	if (!http)
		return NULL;
	http->stopping = true;
	http->stopped = NULL;
	while ((connection = TAILQ_FIRST(&http->connections)) != NULL) {
		/* nobody will answer what is being worked on */
		if (connection->state == HTTP_BUSY)
			connection->state = HTTP_BODY;
		http_connection_free(connection);
	}
	for (uint32_t i = 0; i < http->n_listeners; i++)
		evconnlistener_free(http->listeners[i]);
	event_free(http->retry);
	free(http);
	return NULL;
}

void *http_userdata(const Http *http) {
	return http->userdata;
}

uint32_t http_n_connections(const Http *http) {
	return http->n_connections;
}

const HttpCounters *http_counters(const Http *http) {
	return &http->counters;
}
