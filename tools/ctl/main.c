/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl.h"
#include "format.h"
#include "options.h"

#define DEFAULT_SOCKET "/run/shmbroker/shmbroker.sock"

static void say(const char *prefix, const char *format, va_list arguments) {
	char *text, *clean;

	if (vasprintf(&text, format, arguments) < 0)
		text = NULL;
	clean = format_clean(text ?: "out of memory", FORMAT_TERMINAL);
	fprintf(stderr, "shmbrokerctl: %s%s\n", prefix, clean);
	free(clean);
	free(text);
}

void ctl_say(const char *format, ...) {
	va_list arguments;

	va_start(arguments, format);
	say("", format, arguments);
	va_end(arguments);
}

int ctl_usage(const char *format, ...) {
	va_list arguments;

	va_start(arguments, format);
	say("", format, arguments);
	va_end(arguments);
	return CTL_USAGE;
}

void *ctl_must(void *pointer) {
	if (!pointer) {
		fputs("shmbrokerctl: out of memory\n", stderr);
		exit(CTL_REFUSED);
	}
	return pointer;
}

int ctl_code(int result) {
	switch (result) {
	case 0:
		return CTL_OK;
	case SHMB_E_NOT_FOUND:
		return CTL_NOT_FOUND;
	case SHMB_E_TIMED_OUT:
		return CTL_TIMED_OUT;
	case -ECONNRESET:
	case -ENOTCONN:
	case -EPIPE:
	case -ESHUTDOWN:
		return CTL_UNREACHABLE;
	default:
		return CTL_REFUSED;
	}
}

int ctl_fail(int result, const char *format, ...) {
	const char *text = result > 0 ? shmb_last_error() : NULL;
	char *prefix;
	va_list arguments;

	if (!text || !text[0])
		text = shmb_error_text(result);
	va_start(arguments, format);
	if (vasprintf(&prefix, format, arguments) < 0)
		prefix = NULL;
	va_end(arguments);
	ctl_must(prefix);
	ctl_say("%s: %s", prefix, text);
	free(prefix);
	return ctl_code(result);
}

int ctl_connect(Ctl *ctl, uint32_t flags) {
	const char *environment = getenv("SHMBROKER_SOCKET");
	const char *path;
	int r;

	path = ctl->socket ?: (environment && environment[0] ? environment : DEFAULT_SOCKET);
	r = shmb_client_new(&ctl->client, ctl->socket, 0, flags);
	if (r >= 0)
		return r ? ctl_fail(r, "%s", path) : 0;
	(void)ctl_fail(r, "no broker at %s", path);
	if (r == -EACCES)
		ctl_say("is this user in the group of the socket?");
	return CTL_UNREACHABLE;
}

int main(int argc, char **argv) {
	Ctl ctl = {};
	char name[64];
	int r, at;

	setlocale(LC_CTYPE, "");
	r = options_global(&ctl, argc, argv, &at);
	if (r != OPTION_END)
		return r;
	for (size_t i = 0; verbs[i]; ++i)
		if (!strcmp(verbs[i]->name, argv[at]))
			ctl.verb = verbs[i];
	if (!ctl.verb)
		return ctl_usage("no verb \"%s\"; shmbrokerctl --help lists them", argv[at]);
	snprintf(name, sizeof(name), "shmbrokerctl %s", ctl.verb->name);
	ctl.argc = argc - at;
	ctl.argv = argv + at;
	ctl.argv[0] = name;
	r = ctl.verb->run(&ctl);
	(void)shmb_client_free(ctl.client);
	if ((fflush(stdout) || ferror(stdout)) && !r) {
		ctl_say("standard output: %s", strerror(errno));
		return CTL_REFUSED;
	}
	return r;
}
