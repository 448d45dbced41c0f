/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "link.h"
#include "log.h"

/* between two attempts to find a broker */
#define LINK_RETRY_MIN_MS 50
#define LINK_RETRY_MAX_MS 1000
/* how long one attempt may take with a broker that is there and does not answer */
#define LINK_PROBE_MS 100
#define LINK_CONNECT_MS 500

struct Link {
	struct event_base *base;
	const char *socket; /* NULL for the default */
	LinkSession *session;
	struct event *readable; /* of the session's client */
	struct event *timer;	/* pending while there is no session, or while its broker is away */
	uint32_t delay_ms;
	bool away; /* the session is there, its broker is not */
	char why[256];
};

static void link_say(Link *link, const char *what, int result) {
	(void)snprintf(link->why, sizeof(link->why), "the broker %s: %s", what, shmb_error_text(result));
}

static void link_retry(Link *link) {
	struct timeval delay = { link->delay_ms / 1000, link->delay_ms % 1000 * 1000 };

	(void)event_add(link->timer, &delay);
	link->delay_ms = link->delay_ms * 2 < LINK_RETRY_MAX_MS ? link->delay_ms * 2 : LINK_RETRY_MAX_MS;
}

LinkSession *link_session_ref(LinkSession *session) {
	session->n_ref++;
	return session;
}

LinkSession *link_session_unref(LinkSession *session) {
	if (session && --session->n_ref == 0) {
		shmb_client_free(session->client);
		free(session);
	}
	return NULL;
}

static void link_drop(Link *link) {
	if (link->readable)
		event_free(link->readable);
	link->readable = NULL;
	link->session = link_session_unref(link->session);
	link->away = false;
}

static void link_back(Link *link) {
	if (link->away)
		log_write("the broker is back");
	link->away = false;
	link->delay_ms = LINK_RETRY_MIN_MS;
	(void)event_del(link->timer);
}

bool link_lost(Link *link, int result) {
	switch (result) {
	case SHMB_E_DETACHED:
	case -ECONNRESET:
	case SHMB_E_FORKED:
		/* the broker knows this session no more */
		link_say(link, "was started anew", result);
		log_write("%s", link->why);
		link_drop(link);
		link->delay_ms = LINK_RETRY_MIN_MS;
		link_retry(link);
		return true;
	case SHMB_E_AGAIN:
	case SHMB_E_TIMED_OUT:
		link_say(link, "is away", result);
		if (!link->away) {
			link->away = true;
			log_write("%s", link->why);
			link->delay_ms = LINK_RETRY_MIN_MS;
			link_retry(link);
		}
		return true;
	default:
		return false;
	}
}

static void on_readable(evutil_socket_t fd, short what, void *userdata) {
	Link *link = userdata;

	(void)fd;
	(void)what;
	(void)link_lost(link, shmb_client_process(link->session->client));
}

/* waits for each step at most @timeout_ms */
static int session_new(LinkSession **ret, const Link *link, int timeout_ms) {
	LinkSession *session = calloc(1, sizeof(*session));
	int r;

	if (!session)
		return -ENOMEM;
	session->n_ref = 1;
	r = shmb_client_new_within(&session->client, link->socket, 0, 0, timeout_ms);
	if (r) {
		free(session);
		return r;
	}
	r = shmb_client_set_resume_timeout(session->client, 0);
	if (!r)
		r = shmb_client_set_call_timeout(session->client, LINK_CALL_MS);
	if (r)
		(void)link_session_unref(session);
	else
		*ret = session;
	return r;
}

int link_apart(const Link *link, LinkSession **ret) {
	int r = session_new(ret, link, LINK_CONNECT_MS);

	return r < 0 && r != -ENOMEM ? SHMB_E_AGAIN : r;
}

/* the same */
static int link_connect(Link *link, int timeout_ms) {
	struct shmb_client_info info = { .struct_size = sizeof(info) };
	LinkSession *session;
	int fd, r;

	r = session_new(&session, link, timeout_ms);
	if (r)
		return r;
	r = shmb_client_get_info(session->client, &info);
	fd = r ? r : shmb_client_get_fd(session->client);
	if (fd >= 0)
		link->readable = event_new(link->base, fd, EV_READ | EV_PERSIST, on_readable, link);
	if (fd < 0 || !link->readable || event_add(link->readable, NULL)) {
		(void)link_session_unref(session);
		return fd < 0 ? fd : -ENOMEM;
	}
	session->rights = info.rights;
	link->session = session;
	link_back(link);
	log_write("connected with the broker, version %s", info.broker_version);
	if (!(info.rights & LINK_RIGHT_KEEP))
		log_write("the broker does not let this user keep regions: nothing can be registered");
	return 0;
}

static void on_timer(evutil_socket_t fd, short what, void *userdata) {
	Link *link = userdata;
	int r;

	(void)fd;
	(void)what;
	if (!link->session) {
		r = link_connect(link, LINK_CONNECT_MS);
		if (!r)
			return;
		link_say(link, "cannot be reached", r);
		link_retry(link);
		return;
	}
	r = shmb_client_process(link->session->client);
	if (!r) {
		(void)shmb_client_set_call_timeout(link->session->client, LINK_PROBE_MS);
		r = shmb_client_ping(link->session->client, NULL);
		(void)shmb_client_set_call_timeout(link->session->client, LINK_CALL_MS);
	}
	if (!r)
		link_back(link);
	else if (link_lost(link, r) && link->session)
		link_retry(link);
}

int link_new(Link **ret, struct event_base *base, const char *socket) {
	Link *link;
	int r;

	link = calloc(1, sizeof(*link));
	if (!link)
		return -ENOMEM;
	link->base = base;
	link->socket = socket[0] ? socket : NULL;
	link->delay_ms = LINK_RETRY_MIN_MS;
	link->timer = evtimer_new(base, on_timer, link);
	if (!link->timer) {
		free(link);
		return -ENOMEM;
	}
	/* nobody is served yet who could mind */
	r = link_connect(link, LINK_CALL_MS);
	if (r) {
		link_say(link, "cannot be reached", r);
		/* clients are not told the path of the socket, which is in the library's text */
		log_write("%s", r < 0 && *shmb_last_error() ? shmb_last_error() : link->why);
		link_retry(link);
	}
	*ret = link;
	return 0;
}

Link *link_free(Link *link) {
	if (!link)
		return NULL;
	link_drop(link);
	event_free(link->timer);
	free(link);
	return NULL;
}

LinkSession *link_get(Link *link) {
	/* a broker that is away is not waited for by each request anew */
	return link->away ? NULL : link->session;
}

const char *link_why(const Link *link) {
	return link->why[0] ? link->why : "the broker cannot be reached";
}
