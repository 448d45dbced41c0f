/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "http-connection.h"

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

static bool is_earlier(const struct timespec *a, const struct timespec *b) {
	return a->tv_sec < b->tv_sec || (a->tv_sec == b->tv_sec && a->tv_nsec < b->tv_nsec);
}

/* the connection that has been idle for longest */
static HttpConnection *find_idle(Http *http) {
	HttpConnection *connection, *found = NULL;

	TAILQ_FOREACH(connection, &http->connections, link) {
		if (connection->state == HTTP_IDLE &&
		    (!found || is_earlier(&connection->idle_since, &found->idle_since)))
			found = connection;
	}
	return found;
}

static void on_accept(struct evconnlistener *listener, evutil_socket_t fd, struct sockaddr *address, int size,
		      void *userdata) {
	Http *http = userdata;

	(void)listener;
	(void)address;
	(void)size;
	if (http->n_connections == http->options->max_connections) {
		HttpConnection *idle = find_idle(http);

		http->counters.cap_hits++;
		if (!idle) {
			(void)close(fd);
			return;
		}
		http_connection_free(idle);
	}
	(void)http_connection_new(http, fd);
	/* the others wait in the backlog until one goes */
	if (http->n_connections == http->options->max_connections && !find_idle(http))
		listen_switch(http, false);
}

static void on_retry(evutil_socket_t fd, short what, void *userdata) {
	Http *http = userdata;

	(void)fd;
	(void)what;
	if (!http->stopping)
		listen_switch(http, true);
}

static void on_accept_error(struct evconnlistener *listener, void *userdata) {
	const struct timeval soon = { .tv_usec = 100000 };
	Http *http = userdata;

	(void)listener;
	/* without this, a lack of fds would keep the loop busy */
	listen_switch(http, false);
	(void)event_add(http->retry, &soon);
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
	     Budget *budget, const ListenSet *listening, const char *door, HttpRoute *const *door_routes,
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
