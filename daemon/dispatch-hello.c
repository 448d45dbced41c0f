/* SPDX-License-Identifier: Apache-2.0 */

/* HELLO: a connection becomes a session, a new one or one that an earlier broker has left. */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "broker.h"
#include "dispatch.h"
#include "event.h"
#include "log.h"
#include "session.h"

static int check_roles(Request *request, const WireHelloRequest *hello) {
	Session *session = request->session;
	uint32_t missing = hello->roles & ~session->allowed_roles;

	if (hello->roles & ~(uint32_t)(WIRE_ROLE_OWNER | WIRE_ROLE_CONSUMER | WIRE_ROLE_ADMIN))
		return request_refuse(request, SHMB_E_INVALID, "unknown roles");
	if (!missing && session->allowed_roles)
		return 0;
	snprintf(request->text, sizeof(request->text), "uid %u may not be%s%s%s", session->peer.uid,
		 missing & WIRE_ROLE_OWNER || !session->allowed_roles ? " owner" : "",
		 missing & WIRE_ROLE_CONSUMER || !session->allowed_roles ? " consumer" : "",
		 missing & WIRE_ROLE_ADMIN ? " admin" : "");
	session_log(session, LOG_PEER_DENIED, "%s", request->text);
	return request_refuse(request, SHMB_E_PERMISSION, request->text);
}

static void hello_reply(Request *request, uint16_t flags) {
	const Session *session = request->session;
	const Broker *broker = session->broker;
	WireHelloReply reply = {
		.version = WIRE_VERSION,
		.roles = session->roles,
		.features = WIRE_FEATURE_LEASE_PAGE | WIRE_FEATURE_EVENTS |
			    (cuda_is_on(broker->cuda) ? WIRE_FEATURE_CUDA : 0) |
			    (broker->keeper.enabled ? WIRE_FEATURE_RESUME : 0),
		.session = session->id,
		.epoch = broker->registry.shape.epoch,
		.rights = session->rights,
		.session_index = session->index,
		.max_message = WIRE_MESSAGE_MAX,
		.max_fds = WIRE_FDS_MAX,
		.max_batch = WIRE_BATCH_MAX,
		.max_outstanding = WIRE_OUTSTANDING_MAX,
		.flags = flags,
		.version_length = sizeof(PACKAGE_VERSION) - 1,
	};

	memcpy(reply.token.bytes, session->token, sizeof(session->token));
	request_reply(request);
	wire_write(&request->reply, &reply, sizeof(reply));
	wire_write(&request->reply, PACKAGE_VERSION, sizeof(PACKAGE_VERSION) - 1);
	request_send(request, NULL, 0);
}

/* how far two tokens agree is not told by the time that it takes */
static bool token_is(const Session *session, const wire_b16 *token) {
	uint8_t difference = 0;

	for (size_t i = 0; i < sizeof(session->token); ++i)
		difference |= session->token[i] ^ token->bytes[i];
	return !difference;
}

/* told only to who knows its token */
static bool is_connected(Broker *broker, const WireHelloRequest *hello) {
	const Session *session = session_find(broker, hello->session);

	return session && session->state == SESSION_OPEN && token_is(session, &hello->token);
}

/* the session goes on with this connection; the request is the old session's from here on */
static int resume(Request *request, const WireHelloRequest *hello) {
	Session *newcomer = request->session, *session = session_find_away(newcomer->broker, hello->session);

	if (!session && is_connected(newcomer->broker, hello))
		return request_refuse(request, SHMB_E_BUSY, "that session is connected");
	if (!session)
		return request_refuse(request, SHMB_E_STALE, "no such session to resume: open a new one");
	if (!token_is(session, &hello->token) || !session_is_same(session, newcomer)) {
		session_log(newcomer, LOG_PEER_DENIED, "it may not resume session %llu: %s",
			    (unsigned long long)session->id,
			    token_is(session, &hello->token) ? "it is not the process that opened it"
							     : "it has not its token");
		return request_refuse(request, SHMB_E_PERMISSION, "that session is not this process's");
	}
	session_resume(session, newcomer);
	newcomer->broker->stats.resumes++;
	request->session = session;
	hello_reply(request, WIRE_HELLO_REPLY_RESUMED);
	return 0;
}

int dispatch_hello(Request *request) {
	Session *session = request->session;
	Broker *broker = session->broker;
	WireHelloRequest hello;
	int r;

	if (wire_read_hello(&request->body, &hello))
		return DISPATCH_MALFORMED;
	if (session->state != SESSION_NEW)
		return request_refuse(request, SHMB_E_STATE, "the session is open already");
	if (hello.version < WIRE_VERSION) {
		snprintf(request->text, sizeof(request->text), "the client speaks version %u at most, this broker %u",
			 hello.version, WIRE_VERSION);
		return request_refuse(request, SHMB_E_VERSION, request->text);
	}
	if (hello.session)
		return resume(request, &hello);
	if (session->overdrawn)
		return request_refuse(request, SHMB_E_QUOTA, "this user has too many connections");
	r = check_roles(request, &hello);
	if (r)
		return r;
	if (session->peer.uid == geteuid() && !broker->config->shared_uid)
		session_log(
			session, LOG_OWN_UID_CLIENT,
			"it has the broker's own uid: such a client can starve the broker (shared_uid = yes accepts it)");

	r = session_open(session, hello.roles ?: session->allowed_roles, hello.flags & WIRE_HELLO_ACCEPT_UNSEALED);
	if (r)
		return r < 0 && r != -ENOMEM ? request_refuse(request, SHMB_E_NO_FDS, keeper_why(r)) : r;
	hello_reply(request, 0);
	event_session(WIRE_EVENT_JOINED, session);
	return 0;
}
