/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Ctl: one run of shmbrokerctl, that is one verb with its options and at most one connection to the broker.
 * main.c makes it, a verb uses it and returns an exit code. What went wrong is said once, on stderr, by
 * whoever returns the code first.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shmbroker.h"

typedef struct Ctl Ctl;
typedef struct Option Option;
typedef struct Verb Verb;
struct Column;

/* documented in shmbrokerctl(1) */
enum {
	CTL_OK = 0,
	CTL_REFUSED = 1,
	CTL_USAGE = 2,
	CTL_NOT_FOUND = 3,
	CTL_UNREACHABLE = 4,
	CTL_TIMED_OUT = 5,
};

struct Option {
	int id; /* below 128 also the short option; 0 ends a table */
	const char *name;
	const char *argument; /* NULL: none; "[=X]": optional */
	const char *help;
};

struct Verb {
	const char *name;
	const char *arguments; /* as in the synopsis */
	const char *help;
	const Option *options;
	const struct Column *columns; /* what --columns and --sort may name; NULL: the verb prints no table */
	int (*run)(Ctl *ctl);
};

struct Ctl {
	const Verb *verb;
	const char *socket;
	bool json;
	bool has_timeout;
	int argc; /* of the verb; argv[0] is the program and the verb */
	char **argv;
	struct shmb_client *client;
};

extern const Verb verb_status, verb_watch, verb_register, verb_unregister, verb_clients, verb_stats, verb_ping,
	verb_check;

/* connects; 0 or an exit code, of which the reason has been said */
int ctl_connect(Ctl *ctl, uint32_t flags);
/* the exit code for a result of the library */
int ctl_code(int result);
/* says that what @format describes failed with @result, and returns the exit code */
int ctl_fail(int result, const char *format, ...) __attribute__((__format__(__printf__, 2, 3)));
/* "shmbrokerctl: ..." on stderr; the latter returns CTL_USAGE */
void ctl_say(const char *format, ...) __attribute__((__format__(__printf__, 1, 2)));
int ctl_usage(const char *format, ...) __attribute__((__format__(__printf__, 1, 2)));
/* stops the program when @pointer is NULL: there is nothing else to do without memory */
void *ctl_must(void *pointer);
