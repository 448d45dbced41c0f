/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Options: the command line of shmbrokerd.
 */

#include <stdbool.h>

#include "config.h"

enum {
	OPTIONS_RUN = -1, /* go on; all else is an exit status */
	OPTIONS_USAGE = 2,
	OPTIONS_BAD_CONFIG = 78,
};

typedef struct Options {
	ConfigPaths paths;
	const char *socket; /* NULL: what the configuration says */
	int loop;	    /* LOOP_*, -1: what the configuration says */
	bool check_config;
	const char *supervise; /* the argument itself, NULL without it */
	uint64_t watchdog_ns;  /* of the supervisor, 0 for none */
} Options;

/* Returns OPTIONS_RUN, or the exit status after --help, --version, --dump-options or an error that was printed. */
int options_parse(Options *ret, int argc, char **argv);
/* Puts what the command line overrides into @config. Returns 0 or -ENOMEM. */
int options_apply(const Options *options, Config *config);
