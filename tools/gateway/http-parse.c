/* SPDX-License-Identifier: Apache-2.0 */

#include <string.h>
#include <strings.h>

#include "http-parse.h"

/* what names of methods and headers consist of */
static bool is_token(char c) {
	return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
	       (c && strchr("!#$%&'*+-.^_`|~", c));
}

static size_t token_length(const char *text) {
	size_t n = 0;

	while (is_token(text[n]))
		n++;
	return n;
}

static int refuse(int status, const char *why, const char **ret_why) {
	*ret_why = why;
	return status;
}

static int parse_request_line(char *line, HttpHead *head, const char **ret_why) {
	size_t length = token_length(line);
	char *version, *query;

	if (!length || line[length] != ' ')
		return refuse(400, "the request line is malformed", ret_why);
	line[length] = 0;
	head->method = line;
	head->target = line + length + 1;
	version = strchr(head->target, ' ');
	if (!version || head->target[0] != '/')
		return refuse(400, "the request line is malformed", ret_why);
	*version++ = 0;
	for (const char *c = head->target; *c; c++) {
		if (*c <= 0x20 || *c == 0x7f)
			return refuse(400, "the path has bytes that must be percent-encoded", ret_why);
	}
	if (strncmp(version, "HTTP/", 5) != 0)
		return refuse(400, "the request line is malformed", ret_why);
	head->http_1_0 = strcmp(version, "HTTP/1.0") == 0;
	if (!head->http_1_0 && strcmp(version, "HTTP/1.1") != 0)
		return refuse(505, "only the versions 1.1 and 1.0 of HTTP are spoken here", ret_why);
	query = strpbrk(head->target, "?#");
	head->query = "";
	if (query) {
		*query = 0;
		head->query = query + 1;
	}
	return 0;
}

static bool parse_length(const char *text, uint64_t *ret) {
	uint64_t value = 0;

	if (!*text)
		return false;
	for (; *text; text++) {
		if (*text < '0' || *text > '9' || __builtin_mul_overflow(value, 10, &value) ||
		    __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value))
			return false;
	}
	*ret = value;
	return true;
}

/* whether the list of a Connection header has @word */
static bool list_has(const char *list, const char *word) {
	size_t size = strlen(word);

	while (*list) {
		list += strspn(list, ", \t");
		if (strncasecmp(list, word, size) == 0 && (!list[size] || strchr(", \t", list[size])))
			return true;
		list += strcspn(list, ",");
	}
	return false;
}

static int take_header(HttpHead *head, const HttpHeader *header, bool *ret_keep, const char **ret_why) {
	if (strcasecmp(header->name, "content-length") == 0) {
		if (head->has_length)
			return refuse(400, "there are two lengths", ret_why);
		if (!parse_length(header->value, &head->length))
			return refuse(400, "Content-Length is not a number", ret_why);
		head->has_length = true;
	} else if (strcasecmp(header->name, "transfer-encoding") == 0) {
		if (head->chunked || strcasecmp(header->value, "chunked") != 0)
			return refuse(400, "the only transfer coding here is chunked, once", ret_why);
		head->chunked = true;
	} else if (strcasecmp(header->name, "host") == 0) {
		if (head->host)
			return refuse(400, "there are two hosts", ret_why);
		head->host = header->value;
	} else if (strcasecmp(header->name, "expect") == 0) {
		head->expect = header->value;
	} else if (strcasecmp(header->name, "connection") == 0) {
		head->close |= list_has(header->value, "close");
		*ret_keep |= list_has(header->value, "keep-alive");
	}
	return 0;
}

static int parse_header(char *line, size_t length, HttpHeader *ret, const char **ret_why) {
	size_t name = token_length(line);
	char *value, *end = line + length;

	if (!name || line[name] != ':')
		return refuse(400, "a header is malformed", ret_why);
	line[name] = 0;
	value = line + name + 1;
	while (*value == ' ' || *value == '\t')
		value++;
	while (end > value && (end[-1] == ' ' || end[-1] == '\t'))
		end--;
	*end = 0;
	for (const char *c = value; c < end; c++) {
		if (((unsigned char)*c < 0x20 && *c != '\t') || *c == 0x7f)
			return refuse(400, "a header has control characters", ret_why);
	}
	*ret = (HttpHeader){ line, value };
	return 0;
}

int http_head_parse(char *data, size_t size, HttpHead *ret, const char **ret_why) {
	bool keep = false, first = true;
	int r;

	*ret = (HttpHead){};
	while (size) {
		char *end = memmem(data, size, "\r\n", 2);
		size_t length = end ? (size_t)(end - data) : size;

		if (!end || memchr(data, '\n', length) || memchr(data, '\r', length) || memchr(data, 0, length))
			return refuse(400, "a line does not end as it must, or has a NUL", ret_why);
		*end = 0;
		if (first) {
			r = parse_request_line(data, ret, ret_why);
			first = false;
		} else if (!length) {
			break;
		} else if (ret->n_headers == HTTP_HEADERS_MAX) {
			r = refuse(431, "there are too many headers", ret_why);
		} else {
			HttpHeader *header = &ret->headers[ret->n_headers++];

			r = parse_header(data, length, header, ret_why);
			if (!r)
				r = take_header(ret, header, &keep, ret_why);
		}
		if (r)
			return r;
		data += length + 2;
		size -= length + 2;
	}
	if (!ret->method || !ret->host)
		return refuse(400, "there is no Host", ret_why);
	if (ret->chunked && (ret->has_length || ret->http_1_0))
		return refuse(400, "Transfer-Encoding is beside a length, or in HTTP/1.0", ret_why);
	if (ret->expect && strcasecmp(ret->expect, "100-continue") != 0)
		return refuse(417, "the only expectation here is 100-continue", ret_why);
	ret->close |= ret->http_1_0 && !keep;
	return 0;
}

const char *http_head_get(const HttpHead *head, const char *name) {
	for (size_t i = 0; i < head->n_headers; i++) {
		if (strcasecmp(head->headers[i].name, name) == 0)
			return head->headers[i].value;
	}
	return NULL;
}

enum {
	CHUNK_SIZE,
	CHUNK_DATA,
	CHUNK_DATA_END,
	CHUNK_TRAILER
};

/* a line of the framing, complete and without its CR LF; false when it is malformed */
static bool take_size(HttpChunks *chunks) {
	uint64_t size = 0;
	size_t i;

	for (i = 0; i < chunks->line_size; i++) {
		char c = chunks->line[i];
		int digit = c >= '0' && c <= '9'		     ? c - '0'
			    : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10
								     : -1;

		if (digit < 0)
			break;
		if (size >> 59)
			return false;
		size = size << 4 | (uint64_t)digit;
	}
	/* extensions are ignored */
	if (!i || (i < chunks->line_size && chunks->line[i] != ';'))
		return false;
	chunks->left = size;
	return true;
}

/* Adds to the line. Returns 1 when it is complete, 0 when there is to be more, -1 when it is malformed. */
static int take_line(HttpChunks *chunks, const char *data, size_t size, size_t *taken) {
	while (*taken < size) {
		char c = data[(*taken)++];

		if (chunks->line_size && chunks->line[chunks->line_size - 1] == '\r') {
			if (c != '\n')
				return -1;
			chunks->line_size--;
			return 1;
		}
		if (chunks->line_size == HTTP_CHUNK_LINE_MAX - 1 || c == '\n' || !c)
			return -1;
		chunks->line[chunks->line_size++] = c;
	}
	return 0;
}

HttpChunksResult http_chunks_parse(HttpChunks *chunks, const char *data, size_t size, size_t *ret_taken,
				   size_t *ret_data) {
	size_t taken = 0;
	HttpChunksResult result = HTTP_CHUNKS_MORE;

	while (result == HTTP_CHUNKS_MORE) {
		int r;

		if (chunks->state == CHUNK_DATA) {
			if (taken == size)
				break;
			*ret_data = chunks->left < size - taken ? chunks->left : size - taken;
			chunks->left -= *ret_data;
			if (!chunks->left)
				chunks->state = CHUNK_DATA_END;
			result = HTTP_CHUNKS_DATA;
			break;
		}
		r = take_line(chunks, data, size, &taken);
		if (r == 0)
			break;
		if (r < 0) {
			result = HTTP_CHUNKS_MALFORMED;
			break;
		}
		switch (chunks->state) {
		case CHUNK_SIZE:
			if (!take_size(chunks))
				result = HTTP_CHUNKS_MALFORMED;
			else if (chunks->left && ++chunks->n_chunks > HTTP_CHUNKS_MAX)
				result = HTTP_CHUNKS_TOO_MANY;
			chunks->state = chunks->left ? CHUNK_DATA : CHUNK_TRAILER;
			break;
		case CHUNK_DATA_END:
			if (chunks->line_size)
				result = HTTP_CHUNKS_MALFORMED;
			chunks->state = CHUNK_SIZE;
			break;
		case CHUNK_TRAILER:
			/* trailers are read and ignored */
			if (!chunks->line_size)
				result = HTTP_CHUNKS_END;
			chunks->trailer_size += chunks->line_size;
			if (chunks->trailer_size > HTTP_HEAD_MAX)
				result = HTTP_CHUNKS_MALFORMED;
			break;
		}
		chunks->line_size = 0;
	}
	*ret_taken = taken;
	return result;
}
