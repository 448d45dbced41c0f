/* SPDX-License-Identifier: Apache-2.0 */

#include "grpc-wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <zlib.h>

static bool equals(const char *value, size_t length, const char *text) {
	return strlen(text) == length && memcmp(value, text, length) == 0;
}

GrpcEncoding grpc_encoding(const char *value, size_t length) {
	if (equals(value, length, "identity"))
		return GRPC_ENCODING_IDENTITY;
	if (equals(value, length, "deflate"))
		return GRPC_ENCODING_DEFLATE;
	if (equals(value, length, "gzip"))
		return GRPC_ENCODING_GZIP;
	return GRPC_ENCODING_UNKNOWN;
}

bool grpc_content_type(const char *value, size_t length) {
	static const char type[] = "application/grpc";
	const size_t n = sizeof(type) - 1;

	if (length < n || strncasecmp(value, type, n) != 0)
		return false;
	return length == n || value[n] == '+' || value[n] == ';';
}

bool grpc_timeout(const char *value, size_t length, uint64_t *ret_ms) {
	uint64_t amount = 0;

	if (length < 2 || length > GRPC_TIMEOUT_DIGITS + 1)
		return false;
	for (size_t i = 0; i < length - 1; i++) {
		if (value[i] < '0' || value[i] > '9')
			return false;
		amount = amount * 10 + (uint64_t)(value[i] - '0');
	}

	/* eight digits of hours are far below what 64 bits hold in milliseconds */
	switch (value[length - 1]) {
	case 'H':
		*ret_ms = amount * 3600 * 1000;
		return true;
	case 'M':
		*ret_ms = amount * 60 * 1000;
		return true;
	case 'S':
		*ret_ms = amount * 1000;
		return true;
	case 'm':
		*ret_ms = amount;
		return true;
	case 'u':
		*ret_ms = (amount + 999) / 1000;
		return true;
	case 'n':
		*ret_ms = (amount + 999999) / 1000000;
		return true;
	default:
		return false;
	}
}

size_t grpc_text_encode(const char *text, size_t length, char *out) {
	static const char digits[] = "0123456789ABCDEF";
	size_t n = 0;

	if (length > GRPC_TEXT_MAX) {
		length = GRPC_TEXT_MAX;
		while (length > 0 && ((uint8_t)text[length] & 0xc0) == 0x80)
			length--;
	}
	for (size_t i = 0; i < length; i++) {
		uint8_t byte = (uint8_t)text[i];

		if (byte >= 0x20 && byte <= 0x7e && byte != '%') {
			out[n++] = (char)byte;
		} else {
			out[n++] = '%';
			out[n++] = digits[byte >> 4];
			out[n++] = digits[byte & 15];
		}
	}
	return n;
}

void grpc_prefix(uint8_t prefix[GRPC_PREFIX_SIZE], uint32_t size) {
	prefix[0] = 0;
	prefix[1] = (uint8_t)(size >> 24);
	prefix[2] = (uint8_t)(size >> 16);
	prefix[3] = (uint8_t)(size >> 8);
	prefix[4] = (uint8_t)size;
}

/* makes room for more output, never beyond @max; false when there is no memory */
static bool grow(uint8_t **buffer, size_t *capacity, size_t max) {
	size_t wanted = *capacity * 2 > max ? max : *capacity * 2;
	uint8_t *larger = realloc(*buffer, wanted > 0 ? wanted : 1);

	if (!larger)
		return false;
	*buffer = larger;
	*capacity = wanted;
	return true;
}

static int inflate_bounded(z_stream *z, size_t first, size_t max, uint8_t **buffer, size_t *ret_size) {
	size_t capacity = first > max ? max : first;
	uint8_t beyond;
	int r;

	*buffer = malloc(capacity > 0 ? capacity : 1);
	if (!*buffer)
		return -ENOMEM;
	for (;;) {
		size_t done = z->total_out;

		/* one byte beyond the bound tells a message that just fits from one that does not */
		if (done > max)
			return GRPC_INFLATE_E_TOO_LARGE;
		if (done == capacity && capacity < max && !grow(buffer, &capacity, max))
			return -ENOMEM;
		z->next_out = done < capacity ? *buffer + done : &beyond;
		z->avail_out = done < capacity ? (uInt)(capacity - done) : 1;
		r = inflate(z, Z_NO_FLUSH);
		if (r == Z_STREAM_END)
			break;
		if (r == Z_MEM_ERROR)
			return -ENOMEM;
		if (r != Z_OK || (z->avail_in == 0 && z->avail_out > 0))
			return GRPC_INFLATE_E_BAD;
	}
	if (z->total_out > max)
		return GRPC_INFLATE_E_TOO_LARGE;
	if (z->avail_in > 0)
		return GRPC_INFLATE_E_BAD;
	*ret_size = z->total_out;
	return 0;
}

int grpc_inflate(GrpcEncoding encoding, const uint8_t *data, size_t size, size_t max, uint8_t **ret, size_t *ret_size) {
	z_stream z = { .next_in = (Bytef *)data, .avail_in = (uInt)size };
	uint8_t *buffer = NULL;
	size_t inflated;
	int r;

	if (encoding != GRPC_ENCODING_DEFLATE && encoding != GRPC_ENCODING_GZIP)
		return GRPC_INFLATE_E_BAD;
	/* 15 bits of window; 16 more ask for the frame of gzip, without them it is that of zlib */
	r = inflateInit2(&z, encoding == GRPC_ENCODING_GZIP ? 15 + 16 : 15);
	if (r != Z_OK)
		return -ENOMEM;
	r = inflate_bounded(&z, size < 1024 ? 1024 : size, max, &buffer, &inflated);
	(void)inflateEnd(&z);
	if (r != 0) {
		free(buffer);
		return r;
	}
	*ret = buffer;
	*ret_size = inflated;
	return 0;
}
