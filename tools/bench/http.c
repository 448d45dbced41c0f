/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "bench.h"
#include "http.h"

bool http_receive_all(int fd, void *data, size_t size) {
	uint8_t *at = data;

	while (size) {
		ssize_t n = recv(fd, at, size, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			bench_die("receiving: %s", strerror(errno));
		if (!n)
			return false;
		at += n;
		size -= (size_t)n;
	}
	return true;
}

void http_send_all(int fd, const void *head, size_t head_size, const void *data, size_t size) {
	struct iovec parts[] = {
		{ .iov_base = (void *)(uintptr_t)head, .iov_len = head_size },
		{ .iov_base = (void *)(uintptr_t)data, .iov_len = size },
	};
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 2 };

	while (parts[0].iov_len || parts[1].iov_len) {
		ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			bench_die("sending: %s", strerror(errno));
		for (size_t i = 0; i < 2; ++i) {
			size_t done = (size_t)n < parts[i].iov_len ? (size_t)n : parts[i].iov_len;

			parts[i].iov_base = (uint8_t *)parts[i].iov_base + done;
			parts[i].iov_len -= done;
			n -= (ssize_t)done;
		}
	}
}

size_t http_receive_head(int fd, char buffer[HTTP_HEAD_MAX], size_t *ret_size) {
	size_t size = 0;
	char *end;

	for (;;) {
		ssize_t n = recv(fd, buffer + size, HTTP_HEAD_MAX - 1 - size, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			bench_die("receiving a head: %s", strerror(errno));
		if (!n)
			return 0;
		size += (size_t)n;
		buffer[size] = 0;
		end = memmem(buffer, size, "\r\n\r\n", 4);
		if (end)
			break;
		if (size == HTTP_HEAD_MAX - 1)
			bench_die("a head of more than %d bytes", HTTP_HEAD_MAX);
	}
	*ret_size = size;
	end[3] = 0;
	return (size_t)(end + 4 - buffer);
}

uint64_t http_content_length(const char *head) {
	const char *line = strcasestr(head, "\r\nContent-Length:");
	unsigned long long length;

	if (!line || sscanf(line + 17, "%llu", &length) != 1)
		bench_die("a message without Content-Length");
	return length;
}

bool http_receive_body(int fd, const char *buffer, size_t head, size_t size, void *ret, uint64_t length) {
	size_t early = size - head;

	if (early > length)
		bench_die("more came than the body");
	memcpy(ret, buffer + head, early);
	return http_receive_all(fd, (uint8_t *)ret + early, length - early);
}
