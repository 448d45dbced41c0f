/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"
#include "grpc-door.h"

enum {
	READ_SIZE = 32768, /* in one turn, from one connection */
	SENDS_MAX = 16,	   /* in one turn, to one connection */
};

struct GrpcConnection {
	Grpc *grpc;
	int fd;
	GrpcSession *session;
	struct event *readable, *writable, *timer;
	Caller caller; /* as at the connection's beginning */
	Turn turn;
	uint64_t used; /* when a call began or ended last, 0 before the first */
	bool reading;
	bool inside; /* its session is at work, and what there is to send is looked for afterwards */
	TAILQ_ENTRY(GrpcConnection) link;
};

static void listen_switch(Grpc *grpc, bool on) {
	for (uint32_t i = 0; i < grpc->n_listeners; i++) {
		if (on)
			(void)evconnlistener_enable(grpc->listeners[i]);
		else
			(void)evconnlistener_disable(grpc->listeners[i]);
	}
}

static void connection_gone(Grpc *grpc) {
	if (!grpc->stopping) {
		listen_switch(grpc, true);
	} else if (grpc->n_connections == 0 && grpc->stopped) {
		void (*stopped)(void *) = grpc->stopped;

		grpc->stopped = NULL;
		stopped(grpc->stopped_userdata);
	}
}

static GrpcConnection *connection_free(GrpcConnection *connection) {
	Grpc *grpc;

	if (!connection)
		return NULL;
	grpc = connection->grpc;
	grpc_session_free(connection->session);
	turn_withdraw(grpc->turns, &connection->turn);
	if (connection->readable)
		event_free(connection->readable);
	if (connection->writable)
		event_free(connection->writable);
	if (connection->timer)
		event_free(connection->timer);
	(void)close(connection->fd);
	TAILQ_REMOVE(&grpc->connections, connection, link);
	grpc->n_connections--;
	free(connection);
	return NULL;
}

static void connection_end(GrpcConnection *connection) {
	Grpc *grpc = connection->grpc;

	connection_free(connection);
	connection_gone(grpc);
}

static void connection_arm(GrpcConnection *connection) {
	Grpc *grpc = connection->grpc;
	uint64_t until = grpc_session_deadline(connection->session), now = clock_ms();
	uint64_t left = until > now ? until - now : 0;
	struct timeval wait = { .tv_sec = (time_t)(left / 1000), .tv_usec = (suseconds_t)(left % 1000 * 1000) };

	if (until == UINT64_MAX)
		(void)event_del(connection->timer);
	else
		(void)event_add(connection->timer, &wait);
	if (grpc_session_is_ready(connection->session))
		turn_ask(grpc->turns, &connection->turn);
	if (connection->reading != grpc_session_wants_input(connection->session)) {
		connection->reading = !connection->reading;
		(void)(connection->reading ? event_add(connection->readable, NULL) : event_del(connection->readable));
	}
}

/* sends what there is, and then waits for whatever comes next; the connection may be gone afterwards */
static void connection_send(GrpcConnection *connection) {
	const uint8_t *data;
	size_t size;
	ssize_t n;
	bool alive;

	for (int i = 0; i < SENDS_MAX; i++) {
		alive = grpc_session_output(connection->session, &data, &size);
		if (size == 0) {
			if (!alive) {
				connection_end(connection);
				return;
			}
			(void)event_del(connection->writable);
			connection_arm(connection);
			return;
		}
		n = send(connection->fd, data, size, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n < 0) {
			connection_end(connection);
			return;
		}
		connection->inside = true;
		grpc_session_sent(connection->session, (size_t)n, clock_ms());
		connection->inside = false;
	}
	(void)event_add(connection->writable, NULL);
	connection_arm(connection);
}

static void on_readable(evutil_socket_t fd, short what, void *userdata) {
	static uint8_t buffer[READ_SIZE];
	GrpcConnection *connection = userdata;
	ssize_t n;

	(void)what;
	n = recv(fd, buffer, sizeof(buffer), 0);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		connection_end(connection);
		return;
	}
	connection->inside = true;
	(void)grpc_session_receive(connection->session, buffer, (size_t)n, clock_ms());
	connection->inside = false;
	connection_send(connection);
}

static void on_writable(evutil_socket_t fd, short what, void *userdata) {
	(void)fd;
	(void)what;
	connection_send(userdata);
}

static void on_turn(void *userdata) {
	GrpcConnection *connection = userdata;

	connection->inside = true;
	(void)grpc_session_run(connection->session, clock_ms());
	connection->inside = false;
	connection_send(connection);
}

static void on_timer(evutil_socket_t fd, short what, void *userdata) {
	GrpcConnection *connection = userdata;

	bool alive;

	(void)fd;
	(void)what;
	connection->inside = true;
	alive = grpc_session_tick(connection->session, clock_ms());
	connection->inside = false;
	if (!alive)
		connection_end(connection);
	else
		connection_send(connection);
}

/* ---- what sessions ask ---- */

static size_t session_message_max(void *userdata, const char *path, bool *ret_stream) {
	const GrpcConnection *connection = userdata;
	const GrpcMethod *method = grpc_method_find(path);

	if (!method)
		return 0;
	*ret_stream = method->flags & GRPC_METHOD_STREAM;
	return method->flags & GRPC_METHOD_TENSORS ? connection->grpc->options->grpc_max_input_size : CORE_REQUEST_MAX;
}

static void session_call(void *userdata, GrpcCall *call) {
	GrpcConnection *connection = userdata;

	connection->used = clock_ms();
	grpc_request_begin(connection->grpc, &connection->caller, call);
}

static void session_cancel(void *userdata, GrpcCall *call) {
	(void)userdata;
	grpc_request_cancel(call);
}

static const GrpcHandler session_handler = { session_message_max, session_call, session_cancel };

void grpc_connection_wake(GrpcSession *session) {
	GrpcConnection *connection = grpc_session_userdata(session);

	connection->used = clock_ms();
	if (!connection->inside)
		event_active(connection->writable, EV_WRITE, 0);
}

/* ---- connections ---- */

static int connection_new(Grpc *grpc, int fd) {
	GrpcConnection *connection = calloc(1, sizeof(*connection));
	uint64_t now = clock_ms();

	if (!connection) {
		(void)close(fd);
		return -ENOMEM;
	}
	*connection = (GrpcConnection){ .grpc = grpc, .fd = fd, .turn = { .take = on_turn, .userdata = connection } };
	TAILQ_INSERT_TAIL(&grpc->connections, connection, link);
	grpc->n_connections++;
	grpc->counters.connections++;
	access_identify(grpc->access, fd, TRANSPORT_GRPC, &connection->caller);
	connection->readable = event_new(grpc->base, fd, EV_READ | EV_PERSIST, on_readable, connection);
	connection->writable = event_new(grpc->base, fd, EV_WRITE, on_writable, connection);
	connection->timer = evtimer_new(grpc->base, on_timer, connection);
	if (!connection->readable || !connection->writable || !connection->timer ||
	    grpc_session_new(&connection->session, &grpc->limits, grpc->budget, &session_handler, connection, now)) {
		connection_free(connection);
		return -ENOMEM;
	}
	connection_send(connection);
	return 0;
}

/* the connection that has been without a call for longest, those first that never made one */
static GrpcConnection *find_idle(Grpc *grpc) {
	GrpcConnection *connection, *found = NULL;

	TAILQ_FOREACH(connection, &grpc->connections, link) {
		if (grpc_session_calls(connection->session) == 0 && (!found || connection->used < found->used))
			found = connection;
	}
	return found;
}

/* tells the client that it is not to blame, if it can be told at once */
static void connection_evict(GrpcConnection *connection) {
	const uint8_t *data;
	size_t size;

	grpc_session_shutdown(connection->session);
	(void)grpc_session_output(connection->session, &data, &size);
	if (size > 0)
		(void)!send(connection->fd, data, size, MSG_NOSIGNAL);
	connection_free(connection);
}

static void on_accept(struct evconnlistener *listener, evutil_socket_t fd, struct sockaddr *address, int size,
		      void *userdata) {
	Grpc *grpc = userdata;

	(void)listener;
	(void)address;
	(void)size;
	if (grpc->n_connections >= grpc->options->max_connections) {
		GrpcConnection *idle = find_idle(grpc);

		grpc->counters.cap_hits++;
		if (!idle) {
			(void)close(fd);
			return;
		}
		connection_evict(idle);
	}
	(void)connection_new(grpc, fd);
	/* the others wait in the backlog until one goes */
	if (grpc->n_connections >= grpc->options->max_connections && !find_idle(grpc))
		listen_switch(grpc, false);
}

static void on_retry(evutil_socket_t fd, short what, void *userdata) {
	Grpc *grpc = userdata;

	(void)fd;
	(void)what;
	if (!grpc->stopping)
		listen_switch(grpc, true);
}

static void on_accept_error(struct evconnlistener *listener, void *userdata) {
	const struct timeval soon = { .tv_usec = 100000 };
	Grpc *grpc = userdata;

	(void)listener;
	/* without this, a lack of fds would keep the loop busy */
	listen_switch(grpc, false);
	(void)event_add(grpc->retry, &soon);
}

/* ---- the door ---- */

int grpc_new(Grpc **ret, struct event_base *base, const Options *options, const Access *access, Core *core,
	     Budget *budget, Turns *turns, const ListenSet *listening) {
	Grpc *grpc = calloc(1, sizeof(*grpc));

	if (!grpc)
		return -ENOMEM;
	*grpc = (Grpc){
		.base = base, .options = options, .access = access, .core = core, .budget = budget, .turns = turns
	};
	grpc->limits = grpc_limits_default;
	grpc->limits.request_ms = (uint64_t)options->request_timeout * 1000;
	grpc->limits.preface_ms = grpc->limits.request_ms;
	TAILQ_INIT(&grpc->connections);
	grpc->retry = evtimer_new(base, on_retry, grpc);
	if (!grpc->retry) {
		free(grpc);
		return -ENOMEM;
	}
	for (size_t i = 0; i < listening->n; i++) {
		struct evconnlistener *listener;

		if (strcmp(listening->sockets[i].door, "grpc") != 0)
			continue;
		listener =
			evconnlistener_new(base, on_accept, grpc, LEV_OPT_CLOSE_ON_EXEC, 0, listening->sockets[i].fd);
		if (!listener) {
			grpc_free(grpc);
			return -ENOMEM;
		}
		evconnlistener_set_error_cb(listener, on_accept_error);
		grpc->listeners[grpc->n_listeners++] = listener;
	}
	*ret = grpc;
	return 0;
}

void grpc_stop(Grpc *grpc, void (*done)(void *userdata), void *userdata) {
	GrpcConnection *connection, *next;

	grpc->stopping = true;
	listen_switch(grpc, false);
	grpc->stopped = done;
	grpc->stopped_userdata = userdata;
	for (connection = TAILQ_FIRST(&grpc->connections); connection; connection = next) {
		next = TAILQ_NEXT(connection, link);
		grpc_session_shutdown(connection->session);
		connection_send(connection);
	}
	connection_gone(grpc);
}

Grpc *grpc_free(Grpc *grpc) {
	if (!grpc)
		return NULL;
	while (!TAILQ_EMPTY(&grpc->connections))
		connection_free(TAILQ_FIRST(&grpc->connections));
	for (uint32_t i = 0; i < grpc->n_listeners; i++)
		evconnlistener_free(grpc->listeners[i]);
	event_free(grpc->retry);
	free(grpc);
	return NULL;
}

uint32_t grpc_n_connections(const Grpc *grpc) {
	return grpc->n_connections;
}

const GrpcCounters *grpc_counters(const Grpc *grpc) {
	return &grpc->counters;
}
