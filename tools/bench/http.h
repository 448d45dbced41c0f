/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Http: what both ends of a benchmark over a stream socket do. Whatever fails here ends the process. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HTTP_HEAD_MAX 4096

/* false at the end of the connection */
bool http_receive_all(int fd, void *data, size_t size);
void http_send_all(int fd, const void *head, size_t head_size, const void *data, size_t size);
/*
 * Receives a head up to and with its empty line and what else came with it. Returns the size of the head, 0 at the end
 * of the connection; @ret_size is that of everything. The head ends with NUL.
 */
size_t http_receive_head(int fd, char buffer[HTTP_HEAD_MAX], size_t *ret_size);
uint64_t http_content_length(const char *head);
/* a body of which some may have come with the head */
bool http_receive_body(int fd, const char *buffer, size_t head, size_t size, void *ret, uint64_t length);
