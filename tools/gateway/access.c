/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "access.h"
#include "log.h"
#include "text.h"

#define TOKEN_MIN 16
#define TOKEN_MAX 255
#define TOKENS_MAX 64

typedef struct Token {
	bool admin;
	size_t size;
	char text[TOKEN_MAX];
} Token;

struct Access {
	const char *allow_host;
	size_t n_tokens;
	Token tokens[TOKENS_MAX];
};

/* takes as long for every @given of a size, wherever it differs */
static bool token_equals(const Token *token, const char *given, size_t size) {
	volatile unsigned char differs = token->size != size;

	for (size_t i = 0; i < size; i++)
		differs |= (unsigned char)(token->text[i % TOKEN_MAX] ^ given[i]);
	return !differs;
}

static bool token_parse(char *line, Token *ret) {
	char *text = line;

	if (strncmp(line, "admin ", 6) == 0) {
		ret->admin = true;
		text += 6;
	}
	ret->size = strlen(text);
	if (ret->size < TOKEN_MIN || ret->size > TOKEN_MAX)
		return false;
	for (const char *c = text; *c; c++) {
		if (*c <= 0x20 || *c > 0x7e)
			return false;
	}
	memcpy(ret->text, text, ret->size);
	return true;
}

static int access_read(Access *access, const char *path) {
	char line[TOKEN_MAX + 64];
	FILE *file;
	int r = 0;

	file = fopen(path, "re");
	if (!file) {
		r = -errno;
		log_write("%s: %s", path, strerror(-r));
		return r;
	}
	while (!r && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = 0;
		if (!line[0] || line[0] == '#')
			continue;
		if (access->n_tokens == TOKENS_MAX || !token_parse(line, &access->tokens[access->n_tokens])) {
			log_write("%s: a line is not [admin ]TOKEN of %d to %d characters, or they are more than %d",
				  path, TOKEN_MIN, TOKEN_MAX, TOKENS_MAX);
			r = -EINVAL;
		} else {
			access->n_tokens++;
		}
	}
	explicit_bzero(line, sizeof(line));
	if (!r && !access->n_tokens) {
		log_write("%s: there is no token in it", path);
		r = -EINVAL;
	}
	(void)fclose(file);
	return r;
}

int access_new(Access **ret, const char *token_file, const char *allow_host) {
	Access *access;
	int r;

	access = calloc(1, sizeof(*access));
	if (!access)
		return -ENOMEM;
	access->allow_host = allow_host;
	r = token_file[0] ? access_read(access, token_file) : 0;
	if (r) {
		access_free(access);
		return r;
	}
	*ret = access;
	return 0;
}

Access *access_free(Access *access) {
	if (access)
		explicit_bzero(access, sizeof(*access));
	free(access);
	return NULL;
}

bool access_has_tokens(const Access *access) {
	return access->n_tokens > 0;
}

void access_identify(const Access *access, int fd, Transport transport, Caller *ret) {
	struct sockaddr_storage address = {};
	socklen_t size = sizeof(address);
	struct ucred peer;

	*ret = (Caller){ .transport = transport, .uid = geteuid(), .authenticated = !access->n_tokens };
	if (getsockname(fd, (struct sockaddr *)&address, &size) || address.ss_family != AF_UNIX)
		return;
	size = sizeof(peer);
	ret->is_unix = true;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size)) {
		/* nobody's uid, and so nobody's regions */
		ret->uid = UINT32_MAX;
		ret->authenticated = false;
		return;
	}
	ret->uid = peer.uid;
	ret->authenticated = true;
	ret->admin = peer.uid == 0;
}

/* the token of a header, decoded into @buffer of TOKEN_MAX where need be */
static bool access_token(const char *authorization, char *buffer, const char **ret, size_t *ret_size) {
	uint8_t decoded[2 * TOKEN_MAX + 2];
	const uint8_t *colon;
	size_t size;

	if (strncasecmp(authorization, "bearer ", 7) == 0) {
		*ret = authorization + 7 + strspn(authorization + 7, " ");
		*ret_size = strlen(*ret);
		return *ret_size <= TOKEN_MAX;
	}
	if (strncasecmp(authorization, "basic ", 6) != 0)
		return false;
	size = text_base64(authorization + 6, strlen(authorization + 6), decoded, sizeof(decoded));
	colon = size <= sizeof(decoded) ? memchr(decoded, ':', size) : NULL;
	if (!colon)
		return false;
	size -= colon + 1 - decoded;
	if (size > TOKEN_MAX)
		return false;
	memcpy(buffer, colon + 1, size);
	*ret = buffer;
	*ret_size = size;
	return true;
}

AnswerCode access_check(const Access *access, Caller *caller, const char *authorization, Answer *answer) {
	const char *token = "";
	char buffer[TOKEN_MAX];
	bool found = false;
	size_t size = 0;

	if (access->n_tokens && authorization) {
		if (access_token(authorization, buffer, &token, &size)) {
			for (size_t i = 0; i < access->n_tokens; i++) {
				bool equal = token_equals(&access->tokens[i], token, size);

				found |= equal;
				caller->admin |= equal && access->tokens[i].admin;
			}
		}
		if (!found)
			return answer_set(answer, ANSWER_UNAUTHENTICATED, "the credential is wrong");
		caller->authenticated = true;
	}
	if (!caller->authenticated)
		return answer_set(answer, ANSWER_UNAUTHENTICATED,
				  "a credential is needed: a bearer token, or a basic password");
	return ANSWER_OK;
}

/* whether these characters are nothing, or a colon and digits */
static bool is_port(const char *text, size_t length) {
	size_t i;

	for (i = 0; i < length; i++) {
		if (i ? text[i] < '0' || text[i] > '9' : text[i] != ':')
			return false;
	}
	return true;
}

/* without the port, and without the brackets of an IPv6 address; 0 when it is nothing of that kind */
static size_t host_name(const char **host, size_t length) {
	const char *at = *host, *end;

	if (length && at[0] == '[') {
		end = memchr(at, ']', length);
		if (!end || !is_port(end + 1, (size_t)(at + length - end - 1)))
			return 0;
		*host += 1;
		return (size_t)(end - at - 1);
	}
	end = memchr(at, ':', length);
	if (!end)
		return length;
	return is_port(end, (size_t)(at + length - end)) ? (size_t)(end - at) : 0;
}

static bool is_one_of(const char *list, const char *name, size_t length) {
	while (*list) {
		size_t size = strcspn(list, ",");

		if (size && size == length && strncasecmp(list, name, size) == 0)
			return true;
		list += size + (list[size] == ',');
	}
	return false;
}

bool access_host_is_ours(const Access *access, const char *host, size_t length) {
	size_t size = host_name(&host, length);

	return is_one_of("localhost,127.0.0.1,::1", host, size) || is_one_of(access->allow_host, host, size);
}

bool access_origin_is_ours(const char *origin, size_t origin_length, const char *host, size_t host_length) {
	static const char *const schemes[] = { "http://", "https://" };

	for (size_t i = 0; i < 2; i++) {
		size_t size = strlen(schemes[i]);

		if (origin_length == size + host_length && strncasecmp(origin, schemes[i], size) == 0 &&
		    strncasecmp(origin + size, host, host_length) == 0)
			return true;
	}
	return false;
}
