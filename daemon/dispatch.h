/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Dispatch: one message in, its effect, one reply out. Every malformed byte is answered by a code and a sentence
 * or by that peer's disconnect; nothing here trusts a peer.
 *
 * A handler gets a Request whose body is still unread. It returns 0 when it has replied (or has nothing to reply),
 * a wire code to be sent as an error reply, DISPATCH_MALFORMED for a body that does not decode, or -errno.
 */

#include "ledger.h"
#include "loop.h"
#include "wire/codec.h"

#define DISPATCH_MALFORMED (-1000)

typedef struct Request Request;
typedef struct Session Session;

struct Request {
	Session *session;
	WireHeader header;
	const uint8_t *message; /* the whole of it, as long as the handler runs */
	WireReader body;
	WireWriter reply; /* begun by request_reply() in the broker's buffer */
	int *fds;	  /* fds that stay here are closed by the loop */
	size_t n_fds;
	const char *why; /* with a returned code: the sentence, NULL for the code's own */
	char text[WIRE_TEXT_MAX];
};

void dispatch(Session *session, LoopMessage *message);

/* begins the reply; the handler appends with wire_write() and ends with request_send() */
void request_reply(Request *request);
void request_send(Request *request, int *fds, size_t n_fds);
/*
 * The place in the ledger of a request whose repetition must be told what the first one did. @ret_again, which may be
 * NULL, is whether an earlier broker had begun it.
 */
LedgerSerial *request_serial(const Request *request, bool *ret_again);
/* returns @code with a sentence */
int request_refuse(Request *request, uint32_t code, const char *text);
/* appends @count bytes of text to the reply and returns its length for a struct's text_length */
uint16_t request_text_length(const char *text);

int dispatch_hello(Request *request);
int dispatch_register(Request *request);
int dispatch_unregister(Request *request);
int dispatch_lookup(Request *request);
int dispatch_release(Request *request);
int dispatch_attach(Request *request);
int dispatch_map(Request *request);
int dispatch_unmap(Request *request);
int dispatch_notify(Request *request);
int dispatch_status(Request *request);
int dispatch_clients(Request *request);
int dispatch_stats(Request *request);
int dispatch_info(Request *request);
