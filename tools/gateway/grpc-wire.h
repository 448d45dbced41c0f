/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What gRPC puts on top of HTTP/2, as functions of bytes: the names of encodings, deadlines, the text of a status,
 * and compressed messages. Nothing here keeps state, does input or output, or knows a connection.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* the codes of gRPC that the gateway answers with, as they are numbered on the wire */
enum {
	GRPC_OK = 0,
	GRPC_CANCELLED = 1,
	GRPC_UNKNOWN = 2,
	GRPC_INVALID_ARGUMENT = 3,
	GRPC_DEADLINE_EXCEEDED = 4,
	GRPC_NOT_FOUND = 5,
	GRPC_ALREADY_EXISTS = 6,
	GRPC_PERMISSION_DENIED = 7,
	GRPC_RESOURCE_EXHAUSTED = 8,
	GRPC_UNIMPLEMENTED = 12,
	GRPC_INTERNAL = 13,
	GRPC_UNAVAILABLE = 14,
	GRPC_UNAUTHENTICATED = 16,
};

typedef enum GrpcEncoding {
	GRPC_ENCODING_IDENTITY,
	GRPC_ENCODING_DEFLATE,
	GRPC_ENCODING_GZIP,
	GRPC_ENCODING_UNKNOWN,
} GrpcEncoding;

/* what is answered to a client that used an encoding we do not know */
#define GRPC_ENCODINGS "identity,deflate,gzip"

enum {
	GRPC_PREFIX_SIZE = 5,	 /* before each message: a flag, and the length in network order */
	GRPC_TEXT_MAX = 2048,	 /* bytes of a status text that are sent; a longer one is cut */
	GRPC_TIMEOUT_DIGITS = 8, /* of grpc-timeout, without its unit */
};

/* Space for grpc_text_encode(): every byte may become three. */
#define GRPC_TEXT_ENCODED_MAX (3 * GRPC_TEXT_MAX)

enum {
	_GRPC_INFLATE_E_SUCCESS,
	GRPC_INFLATE_E_BAD,	  /* not what the encoding says, or cut, or with something behind it */
	GRPC_INFLATE_E_TOO_LARGE, /* the result would be longer than the caller takes */
};

/* The encoding that the value of grpc-encoding names. */
GrpcEncoding grpc_encoding(const char *value, size_t length);

/* Whether a content-type is gRPC's: application/grpc, alone or with a suffix or parameters. */
bool grpc_content_type(const char *value, size_t length);

/*
 * The value of grpc-timeout, at most eight digits and a unit (H M S m u n), in milliseconds, rounded up.
 * Returns false, without a result, for anything else.
 */
bool grpc_timeout(const char *value, size_t length, uint64_t *ret_ms);

/*
 * @text as the value of grpc-message: what is not printable ASCII, and the percent sign, become %XX. At most
 * GRPC_TEXT_MAX bytes of it are used, never half of a UTF-8 sequence. @out has GRPC_TEXT_ENCODED_MAX bytes.
 * Returns the length of what was written, which has no final NUL.
 */
size_t grpc_text_encode(const char *text, size_t length, char *out);

/* The five bytes before a message of @size bytes that is not compressed. */
void grpc_prefix(uint8_t prefix[GRPC_PREFIX_SIZE], uint32_t size);

/*
 * Inflates a whole message, of which never more than @max bytes are kept. On 0 the caller owns *@ret (also when
 * the message is empty). Returns 0, GRPC_INFLATE_E_*, or -ENOMEM.
 */
int grpc_inflate(GrpcEncoding encoding, const uint8_t *data, size_t size, size_t max, uint8_t **ret, size_t *ret_size);
