/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * HTTP/1.1 as bytes: the head of a request and chunked bodies, taken apart strictly and without any I/O. What two
 * implementations could understand differently is refused here: bare LF, folded lines, blanks before a colon, a second or
 * signed Content-Length, Content-Length beside Transfer-Encoding, any other coding than chunked, no Host or two.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HTTP_HEAD_MAX 16384
#define HTTP_HEADERS_MAX 100
#define HTTP_CHUNKS_MAX 65536
#define HTTP_CHUNK_LINE_MAX 256

typedef struct HttpHeader {
	const char *name;  /* as sent, terminated */
	const char *value; /* without blanks around it, terminated */
} HttpHeader;

/* Points into the bytes that it was parsed from. */
typedef struct HttpHead {
	const char *method;
	char *target;	   /* the path, raw, without the query; terminated */
	const char *query; /* "" without one */
	const char *host;
	const char *expect;
	bool http_1_0;
	bool close; /* the connection ends with this request */
	bool chunked;
	bool has_length;
	uint64_t length; /* of the body where has_length */
	size_t n_headers;
	HttpHeader headers[HTTP_HEADERS_MAX];
} HttpHead;

/*
 * Takes the @size bytes at @data apart, which end with the empty line, in place: @ret points into them. Returns 0, or the
 * status to refuse with and the reason in @ret_why, a static sentence.
 */
int http_head_parse(char *data, size_t size, HttpHead *ret, const char **ret_why);
/* the value of the header @name in any case, the first one; NULL when there is none */
const char *http_head_get(const HttpHead *head, const char *name);

/* A chunked body, as it arrives. {} at its beginning. */
typedef struct HttpChunks {
	uint8_t state;
	uint8_t line_size;
	uint64_t left;	   /* of the chunk */
	uint32_t n_chunks; /* that are not empty */
	uint32_t trailer_size;
	char line[HTTP_CHUNK_LINE_MAX];
} HttpChunks;

typedef enum HttpChunksResult {
	HTTP_CHUNKS_MORE, /* all is taken, there is to be more */
	HTTP_CHUNKS_DATA, /* @ret_data bytes of the body are at the place reached; call again after them */
	HTTP_CHUNKS_END,  /* the body is complete */
	HTTP_CHUNKS_MALFORMED,
	HTTP_CHUNKS_TOO_MANY,
} HttpChunksResult;

/*
 * Goes through the @size bytes at @data, and says in @ret_taken how many of them it has taken: framing, up to the next data
 * or the end. After HTTP_CHUNKS_DATA the caller takes @ret_data bytes itself, and passes what follows them.
 */
HttpChunksResult http_chunks_parse(HttpChunks *chunks, const char *data, size_t size, size_t *ret_taken,
				   size_t *ret_data);
