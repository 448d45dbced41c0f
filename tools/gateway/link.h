/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Link: the gateway's connection to the broker. It is an ordinary client of libshmbroker, made when the broker can be
 * reached and made anew when the broker has forgotten it; the library resumes sessions by itself. Nothing here waits
 * longer than one bounded call.
 *
 * A LinkSession is one such client, counted: who holds leases of it holds a reference, so that a client that was
 * replaced is freed, with its mappings, when its last lease is over.
 */

#include <event2/event.h>
#include <shmbroker.h>
#include <stdbool.h>
#include <stdint.h>

/* how long one call may wait for the broker */
#define LINK_CALL_MS 2000

typedef struct LinkSession {
	struct shmb_client *client;
	uint32_t n_ref;
	uint32_t rights; /* of shmb_client_info */
} LinkSession;

typedef struct Link Link;

/* Connects if the broker is there; if not, tries again by itself. @socket "": the default. -ENOMEM. */
int link_new(Link **ret, struct event_base *base, const char *socket);
Link *link_free(Link *link);

/*
 * The session to use now, borrowed until the loop runs again (link_session_ref() to keep it longer), or NULL while there
 * is no broker or it does not answer; then link_why() says why.
 */
LinkSession *link_get(Link *link);
/* a sentence for clients, never NULL */
const char *link_why(const Link *link);
/*
 * To be told what a call returned: 0 and refusals are fine; a result that says that the broker is away or has forgotten
 * this session starts the search for it. Returns whether it was one of the latter: answer ANSWER_UNAVAILABLE.
 */
bool link_lost(Link *link, int result);

/*
 * A session of its own for one request that may take longer than a call may wait: the broker drops what it has not done
 * when link_session_unref() ends the session. Returns 0, a refusal, SHMB_E_AGAIN when it cannot be reached, or -ENOMEM.
 */
int link_apart(const Link *link, LinkSession **ret);

LinkSession *link_session_ref(LinkSession *session);
/* NULL is fine; always returns NULL */
LinkSession *link_session_unref(LinkSession *session);

#define LINK_RIGHT_KEEP 1
#define LINK_RIGHT_DELEGATE 2
