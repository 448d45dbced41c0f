/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "bench.h"
#include "grpc.h"
#include "http.h"

#define FRAME_HEAD 9
#define MESSAGE_HEAD 5
/* what may be in flight of replies, of a stream and of the connection */
#define WINDOW (1 << 20)

enum {
	FRAME_DATA = 0,
	FRAME_HEADERS = 1,
	FRAME_SETTINGS = 4,
	FRAME_PING = 6,
	FRAME_WINDOW_UPDATE = 8,
};

enum {
	FLAG_ACK = 1,
	FLAG_END_STREAM = 1,
	FLAG_END_HEADERS = 4,
};

typedef struct Frame {
	uint32_t length;
	uint8_t type;
	uint8_t flags;
	uint32_t stream;
	const uint8_t *payload;
} Frame;

static uint8_t *put_big(uint8_t *at, uint32_t value, unsigned bytes) {
	for (unsigned i = bytes; i-- > 0;)
		*at++ = (uint8_t)(value >> 8 * i);
	return at;
}

static uint32_t get_big(const uint8_t *at, unsigned bytes) {
	uint32_t value = 0;

	for (unsigned i = 0; i < bytes; ++i)
		value = value << 8 | at[i];
	return value;
}

static uint8_t *put_frame_head(uint8_t *at, uint32_t length, uint8_t type, uint8_t flags, uint32_t stream) {
	at = put_big(at, length, 3);
	*at++ = type;
	*at++ = flags;
	return put_big(at, stream, 4);
}

static void send_frame(const GrpcClient *client, uint8_t type, uint8_t flags, const void *payload, uint32_t length) {
	uint8_t head[FRAME_HEAD];

	(void)put_frame_head(head, length, type, flags, 0);
	http_send_all(client->fd, head, sizeof(head), payload, length);
}

/* a header that no table is to remember; name and value are shorter than 127 bytes */
static uint8_t *put_header(uint8_t *at, const char *name, const char *value) {
	*at++ = 0;
	*at++ = (uint8_t)strlen(name);
	at = mempcpy(at, name, strlen(name));
	*at++ = (uint8_t)strlen(value);
	return mempcpy(at, value, strlen(value));
}

static uint8_t *put_varint(uint8_t *at, uint64_t value) {
	for (; value > 0x7f; value >>= 7)
		*at++ = (uint8_t)(value | 0x80);
	*at++ = (uint8_t)value;
	return at;
}

uint8_t *grpc_put_text(uint8_t *at, uint32_t field, const char *text) {
	at = put_varint(at, field << 3 | 2);
	at = put_varint(at, strlen(text));
	return mempcpy(at, text, strlen(text));
}

uint8_t *grpc_put_number(uint8_t *at, uint32_t field, uint64_t number) {
	at = put_varint(at, field << 3);
	return put_varint(at, number);
}

void grpc_client_init(GrpcClient *client, int fd) {
	static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
	uint8_t settings[6], window[4];

	client->fd = fd;
	client->stream = client->received = 0;
	client->size = client->at = 0;
	http_send_all(fd, preface, sizeof(preface) - 1, NULL, 0);
	/* SETTINGS_INITIAL_WINDOW_SIZE */
	(void)put_big(put_big(settings, 4, 2), WINDOW, 4);
	send_frame(client, FRAME_SETTINGS, 0, settings, sizeof(settings));
	(void)put_big(window, WINDOW, 4);
	send_frame(client, FRAME_WINDOW_UPDATE, 0, window, sizeof(window));
}

/* until there are @size bytes behind client->at */
static const uint8_t *need(GrpcClient *client, size_t size) {
	if (size > sizeof(client->buffer))
		bench_die("a frame of %zu bytes", size);
	if (client->at + size > sizeof(client->buffer)) {
		memmove(client->buffer, client->buffer + client->at, client->size - client->at);
		client->size -= client->at;
		client->at = 0;
	}
	while (client->size - client->at < size) {
		ssize_t n = recv(client->fd, client->buffer + client->size, sizeof(client->buffer) - client->size, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			bench_die("a gRPC connection ended: %s", n < 0 ? strerror(errno) : "hung up");
		client->size += (size_t)n;
	}
	return client->buffer + client->at;
}

static Frame read_frame(GrpcClient *client) {
	const uint8_t *head = need(client, FRAME_HEAD);
	Frame frame = {
		.length = get_big(head, 3),
		.type = head[3],
		.flags = head[4],
		.stream = get_big(head + 5, 4) & INT32_MAX,
	};

	frame.payload = need(client, FRAME_HEAD + frame.length) + FRAME_HEAD;
	client->at += FRAME_HEAD + frame.length;
	if (client->at == client->size)
		client->at = client->size = 0;
	return frame;
}

static void take_data(GrpcClient *client, const Frame *frame) {
	uint8_t window[4];

	client->received += frame->length;
	if (client->received < WINDOW / 2)
		return;
	(void)put_big(window, client->received, 4);
	send_frame(client, FRAME_WINDOW_UPDATE, 0, window, sizeof(window));
	client->received = 0;
}

static void send_call(const GrpcClient *client, const char *path, const void *message, size_t size) {
	uint8_t request[512], *at = request + FRAME_HEAD, *data;

	at = put_header(at, ":method", "POST");
	at = put_header(at, ":scheme", "http");
	at = put_header(at, ":path", path);
	at = put_header(at, ":authority", "localhost");
	at = put_header(at, "te", "trailers");
	at = put_header(at, "content-type", "application/grpc");
	(void)put_frame_head(request, (uint32_t)(at - request - FRAME_HEAD), FRAME_HEADERS, FLAG_END_HEADERS,
			     client->stream);
	data = at;
	at = put_frame_head(data, (uint32_t)(MESSAGE_HEAD + size), FRAME_DATA, FLAG_END_STREAM, client->stream);
	/* not compressed */
	*at++ = 0;
	at = put_big(at, (uint32_t)size, 4);
	http_send_all(client->fd, request, (size_t)(at - request), message, size);
}

size_t grpc_client_call(GrpcClient *client, const char *path, const void *message, size_t size) {
	size_t got = 0;
	Frame frame;

	client->stream += client->stream ? 2 : 1;
	send_call(client, path, message, size);
	do {
		frame = read_frame(client);
		switch (frame.type) {
		case FRAME_DATA:
			got += frame.length;
			take_data(client, &frame);
			break;
		case FRAME_SETTINGS:
			if (!(frame.flags & FLAG_ACK))
				send_frame(client, FRAME_SETTINGS, FLAG_ACK, NULL, 0);
			break;
		case FRAME_PING:
			if (!(frame.flags & FLAG_ACK))
				send_frame(client, FRAME_PING, FLAG_ACK, frame.payload, frame.length);
			break;
		case FRAME_HEADERS:
		case FRAME_WINDOW_UPDATE:
			break;
		default:
			bench_die("%s: a frame of type %u", path, frame.type);
		}
	} while (frame.stream != client->stream || !(frame.flags & FLAG_END_STREAM) ||
		 (frame.type != FRAME_DATA && frame.type != FRAME_HEADERS));
	if (got < MESSAGE_HEAD)
		bench_die("%s: the call was refused", path);
	return got - MESSAGE_HEAD;
}
