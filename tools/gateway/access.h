/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Access: who a caller is, and whether it may call at all. Both doors ask it before they do anything.
 *
 * A caller at a Unix socket is its uid, from SO_PEERCRED; it needs no credential. At TCP there is no identity: without a
 * token file everybody who reaches the port may call, which is why only loopback is listened at then; with one, a request
 * needs a token of it. Such a caller acts with the gateway's own uid.
 *
 * The token file has a token on each line, 16 to 255 printable characters without blanks, `admin TOKEN` for one whose
 * bearer may also see to what others own. Empty lines and those that begin with # do not count. The file is read once.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "answer.h"

typedef enum Transport {
	TRANSPORT_HTTP,
	TRANSPORT_GRPC
} Transport;

typedef struct Caller {
	Transport transport;
	bool is_unix;
	uint32_t uid;	    /* of the peer where is_unix, else the gateway's own */
	bool authenticated; /* by its uid or by a token */
	bool admin;	    /* root at a Unix socket, or an admin token */
	bool everything;    /* an admin asks for more than what came through this door (see core_unregister_all) */
} Caller;

typedef struct Access Access;

/*
 * Reads @token_file ("" for none) and keeps @allow_host, names separated by commas, which is borrowed. Returns 0; -EINVAL
 * (a line is no token, or there is none), another negative errno of the file. What is wrong is logged.
 */
int access_new(Access **ret, const char *token_file, const char *allow_host);
Access *access_free(Access *access);

/* whether a credential is configured, so that TCP may be listened at beyond loopback */
bool access_has_tokens(const Access *access);

/* The caller at the other end of the connected socket @fd. */
void access_identify(const Access *access, int fd, Transport transport, Caller *ret);

/*
 * Looks at the `authorization` header of a request (NULL, or its NUL-terminated value: Bearer TOKEN, or Basic whose
 * password is a token) and completes @caller. ANSWER_OK, or ANSWER_UNAUTHENTICATED with @answer set. Takes the same time
 * for every wrong token.
 */
AnswerCode access_check(const Access *access, Caller *caller, const char *authorization, Answer *answer);

/*
 * Whether a TCP client calls this server by a name that is its own: localhost, a loopback address, or one that is allowed;
 * with or without a port. What a page of another site makes a browser send (DNS rebinding) is not. Borrows @host, the
 * value of a Host header or of :authority.
 */
bool access_host_is_ours(const Access *access, const char *host, size_t length);
/* whether @origin, the value of an Origin header, is the site of @host */
bool access_origin_is_ours(const char *origin, size_t origin_length, const char *host, size_t host_length);
