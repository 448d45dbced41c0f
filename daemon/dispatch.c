/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "broker.h"
#include "dispatch.h"
#include "event.h"
#include "kill-point.h"
#include "log.h"
#include "session.h"
#include "wire/fd.h"

void request_reply(Request *request) {
	wire_write_begin(&request->reply, request->session->broker->reply, WIRE_MESSAGE_MAX, request->header.opcode,
			 WIRE_FLAG_REPLY, request->header.serial);
}

void request_send(Request *request, int *fds, size_t n_fds) {
	kill_point();
	session_send(request->session, request->reply.buffer, wire_write_end(&request->reply), fds, n_fds);
}

int request_refuse(Request *request, uint32_t code, const char *text) {
	request->why = text;
	return (int)code;
}

uint16_t request_text_length(const char *text) {
	return (uint16_t)strnlen(text, WIRE_TEXT_MAX);
}

LedgerSerial *request_serial(const Request *request, bool *ret_again) {
	const Session *session = request->session;
	Ledger *ledger = &session->broker->ledger;
	LedgerSerial *serial = NULL;

	if (request->header.flags & WIRE_FLAG_RETRY)
		serial = ledger_find_serial(ledger, session, request->header.serial);
	if (ret_again)
		*ret_again = serial;
	return serial ?: ledger_put_serial(ledger, session, request->header.serial);
}

static int dispatch_ping(Request *request) {
	WirePing ping;

	if (wire_read_fixed(&request->body, &ping, sizeof(ping)))
		return DISPATCH_MALFORMED;
	request_reply(request);
	wire_write(&request->reply, &ping, sizeof(ping));
	request_send(request, NULL, 0);
	return 0;
}

static int dispatch_subscribe(Request *request) {
	WireSubscribeRequest subscribe;

	if (wire_read_fixed(&request->body, &subscribe, sizeof(subscribe)) || subscribe.reserved)
		return DISPATCH_MALFORMED;
	event_subscribe(request->session, subscribe.mask & ((UINT32_C(1) << (WIRE_EVENT_OVERFLOW + 1)) - 1));
	ledger_update_session(&request->session->broker->ledger, request->session);
	request_reply(request);
	request_send(request, NULL, 0);
	return 0;
}

static int (*const handlers[_WIRE_OP_N])(Request *request) = {
	[WIRE_OP_HELLO] = dispatch_hello,
	[WIRE_OP_PING] = dispatch_ping,
	[WIRE_OP_INFO] = dispatch_info,
	[WIRE_OP_REGISTER] = dispatch_register,
	[WIRE_OP_UNREGISTER] = dispatch_unregister,
	[WIRE_OP_LOOKUP] = dispatch_lookup,
	[WIRE_OP_RELEASE] = dispatch_release,
	[WIRE_OP_ATTACH] = dispatch_attach,
	[WIRE_OP_MAP] = dispatch_map,
	[WIRE_OP_UNMAP] = dispatch_unmap,
	[WIRE_OP_NOTIFY] = dispatch_notify,
	[WIRE_OP_STATUS] = dispatch_status,
	[WIRE_OP_CLIENTS] = dispatch_clients,
	[WIRE_OP_STATS] = dispatch_stats,
	[WIRE_OP_SUBSCRIBE] = dispatch_subscribe,
};

/* the last word to a peer: sent at once if it can be, for what is queued goes with the connection */
static void dispatch_reject(Session *session, const WireHeader *header, uint32_t code, const char *why) {
	uint8_t buffer[WIRE_ERROR_REPLY_MAX] __attribute__((aligned(8)));
	size_t size;

	if (!session->conn.out_messages) {
		size = wire_write_error(buffer, header->opcode, header->serial, code, why);
		(void)fd_send(session->conn.fd, buffer, size, NULL, 0, MSG_DONTWAIT);
	}
	session_disconnect(session, 0, why);
}

/* a peer that cannot count bytes */
static void dispatch_malformed(Session *session, const WireHeader *header, const char *why) {
	session->broker->stats.messages_malformed++;
	session_log(session, LOG_PEER_PROTOCOL, "a malformed message: %s", why);
	dispatch_reject(session, header, SHMB_E_INVALID, why);
}

static int dispatch_request(Request *request) {
	uint16_t opcode = request->header.opcode;

	if (opcode >= _WIRE_OP_N || !handlers[opcode])
		return SHMB_E_UNKNOWN_OP;
	return handlers[opcode](request);
}

void dispatch(Session *session, LoopMessage *message) {
	Request request = {
		.session = session,
		.message = message->data,
		.fds = message->fds,
		.n_fds = message->n_fds,
	};
	Broker *broker = session->broker;
	const char *why;
	int r;

	broker->stats.messages++;
	broker->stats.fds_received += message->n_fds;
	if (message->truncated || wire_header_read(message->data, message->size, &request.header)) {
		dispatch_malformed(session, &(WireHeader){ .opcode = WIRE_OP_HELLO },
				   message->truncated ? "a message of more than 65536 bytes"
						      : "the header's length is not that of the message");
		return;
	}
	if (wire_header_check_request(&request.header, &why)) {
		dispatch_malformed(session, &request.header, why);
		return;
	}
	if (session->state == SESSION_NEW && request.header.opcode != WIRE_OP_HELLO) {
		broker->stats.messages_malformed++;
		dispatch_reject(session, &request.header, SHMB_E_STATE, "the first message must be HELLO");
		return;
	}
	if (message->n_fds > WIRE_FDS_MAX || (message->n_fds && request.header.opcode != WIRE_OP_REGISTER)) {
		dispatch_malformed(session, &request.header,
				   message->n_fds > WIRE_FDS_MAX ? "more than 64 fds"
								 : "fds with a message that takes none");
		return;
	}
	if (message->fds_lost) {
		/* our own shortage: what did arrive is closed, the peer may ask again */
		broker->stats.fds_lost++;
		session_error(session, request.header.opcode, request.header.serial, SHMB_E_AGAIN,
			      "the broker had no room for the fds: try again");
		return;
	}

	request.body = wire_reader_body(message->data, message->size);
	r = dispatch_request(&request);
	if (r == DISPATCH_MALFORMED) {
		dispatch_malformed(session, &request.header, request.body.why ?: "a malformed body");
	} else if (r < 0) {
		log_write(LOG_INTERNAL_ERROR, LOG_NO_UID, NULL, "%s: %s", wire_opcode_name(request.header.opcode),
			  strerror(-r));
		session_error(session, request.header.opcode, request.header.serial, SHMB_E_AGAIN,
			      r == -ENOMEM ? "the broker is out of memory" : strerror(-r));
	} else if (r > 0 && session->state == SESSION_NEW) {
		dispatch_reject(session, &request.header, (uint32_t)r, request.why ?: wire_error_text((uint32_t)r));
	} else if (r > 0) {
		session_error(session, request.header.opcode, request.header.serial, (uint32_t)r, request.why);
	}
}
