/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "grpc-wire.h"
#include "http-coding.h"

#define PIECE_SIZE 16384 /* bytes that are compressed at a time */

typedef enum Coding {
	CODING_IDENTITY,
	CODING_DEFLATE,
	CODING_GZIP
} Coding;

static void free_data(const void *data, size_t size, void *userdata) {
	(void)size;
	(void)userdata;
	free((void *)data);
}

AnswerCode http_coding_undo(HttpRequest *request, Answer *answer) {
	const char *coding = http_head_get(&request->head, "Content-Encoding");
	uint64_t max = request->options->http_max_input_size, room = http_request_room(request);
	GrpcEncoding encoding;
	uint8_t *data = NULL;
	size_t size, length = evbuffer_get_length(request->body);
	int r;

	if (!coding || !*coding || !strcmp(coding, "identity"))
		return ANSWER_OK;
	encoding = grpc_encoding(coding, strlen(coding));
	if (encoding != GRPC_ENCODING_DEFLATE && encoding != GRPC_ENCODING_GZIP) {
		http_reply_header(request, "Accept-Encoding", "gzip, deflate");
		return answer_set(answer, ANSWER_UNSUPPORTED, "Unsupported compression type");
	}
	if (!length)
		return answer_set(answer, ANSWER_INVALID_ARG, "nothing to be decompressed");
	r = grpc_inflate(encoding, evbuffer_pullup(request->body, -1), length, max < room ? max : room, &data, &size);
	if (r == GRPC_INFLATE_E_TOO_LARGE && room < max)
		return answer_set(answer, ANSWER_RESOURCE_EXHAUSTED,
				  "a decompressed body of more than %" PRIu64
				  " bytes is more than is held for this request now",
				  room);
	if (r == GRPC_INFLATE_E_TOO_LARGE)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "Decompressed data size exceeds the maximum allowed value of %" PRIu64
				  " bytes. Use --http-max-input-size to increase the limit.",
				  max);
	if (r == GRPC_INFLATE_E_BAD)
		return answer_set(answer, ANSWER_INVALID_ARG, "the body is not what its Content-Encoding says");
	if (r || !http_request_reserve(request, size)) {
		free(data);
		return answer_no_memory(answer);
	}
	evbuffer_drain(request->body, length);
	if (evbuffer_add_reference(request->body, data, size, free_data, NULL)) {
		free(data);
		return answer_no_memory(answer);
	}
	return ANSWER_OK;
}

AnswerCode http_header_length(HttpRequest *request, size_t *ret, Answer *answer) {
	const char *text = http_head_get(&request->head, HTTP_HEADER_LENGTH);
	size_t size = evbuffer_get_length(request->body);
	char *end;
	long value;

	*ret = size;
	if (!text)
		return ANSWER_OK;
	errno = 0;
	value = strtol(text, &end, 10);
	if (end == text)
		return answer_set(answer, ANSWER_INVALID_ARG, "Unable to parse " HTTP_HEADER_LENGTH ", got: %s", text);
	if (errno || value < INT_MIN || value > INT_MAX)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "Unable to parse " HTTP_HEADER_LENGTH ", value is out of range [ %d, %d ], got: %s",
				  INT_MIN, INT_MAX, text);
	if (value < 0 || (size_t)value > size)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "inference header size should be in range (0, %zu), got: %s", size, text);
	*ret = (size_t)value;
	return ANSWER_OK;
}

/* the coding of the reply that the client likes best, as Triton chooses it */
static Coding accepted_coding(const HttpRequest *request) {
	static const char *const names[] = { "identity", "deflate", "gzip" };
	const char *text = http_head_get(&request->head, "Accept-Encoding"), *end, *weight_text;
	double weight, best_weight = 0;
	Coding best = CODING_IDENTITY, coding;
	size_t length;

	for (; text && *text; text = *end ? end + 1 : end) {
		end = strchrnul(text, ',');
		text += strspn(text, " ");
		weight_text = memmem(text, text < end ? (size_t)(end - text) : 0, ";q=", 3);
		length = text < end ? (size_t)((weight_text ?: end) - text) : 0;
		weight = weight_text ? strtod(weight_text + 3, NULL) : 1;
		for (coding = CODING_IDENTITY; coding <= CODING_GZIP; coding++)
			if (length == strlen(names[coding]) && !memcmp(text, names[coding], length) &&
			    weight > best_weight) {
				best = coding;
				best_weight = weight;
			}
	}
	return best;
}

/* replaces what is in @body; false when it stays as it was */
static bool compress_body(struct evbuffer *body, Coding coding) {
	struct evbuffer *compressed = evbuffer_new();
	z_stream stream = { .avail_in = (uInt)evbuffer_get_length(body), .next_in = evbuffer_pullup(body, -1) };
	uint8_t piece[PIECE_SIZE];
	int r = Z_MEM_ERROR;

	if (compressed &&
	    deflateInit2(&stream, Z_DEFAULT_COMPRESSION, Z_DEFLATED, coding == CODING_GZIP ? MAX_WBITS | 16 : MAX_WBITS,
			 8, Z_DEFAULT_STRATEGY) == Z_OK) {
		do {
			stream.next_out = piece;
			stream.avail_out = sizeof(piece);
			r = deflate(&stream, Z_FINISH);
			if (evbuffer_add(compressed, piece, sizeof(piece) - stream.avail_out))
				r = Z_MEM_ERROR;
		} while (r == Z_OK);
		(void)deflateEnd(&stream);
	}
	if (r == Z_STREAM_END) {
		evbuffer_drain(body, evbuffer_get_length(body));
		(void)evbuffer_add_buffer(body, compressed);
	}
	if (compressed)
		evbuffer_free(compressed);
	return r == Z_STREAM_END;
}

void http_coding_apply(HttpRequest *request, struct evbuffer *body) {
	Coding coding = accepted_coding(request);

	if (coding != CODING_IDENTITY && compress_body(body, coding))
		http_reply_header(request, "Content-Encoding", coding == CODING_GZIP ? "gzip" : "deflate");
}
