/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Options of the command line. One table for each verb and one for all verbs make what getopt_long() takes and
 * what --help prints; shmbrokerctl(1) and the completion are checked against the latter.
 */

#include "ctl.h"

/* ids of what several verbs have; a verb's own begin at OPTION_VERB */
enum {
	OPTION_END = -1,
	OPTION_BAD = '?',
	OPTION_COLUMNS = 256,
	OPTION_NO_HEADINGS,
	OPTION_NO_COLOR,
	OPTION_TIMEOUT,
	OPTION_VERB,
};

/* a line of a verb's table for verbs that print one */
#define OPTIONS_TABLE                                                                                        \
	{ OPTION_COLUMNS, "columns", "LIST", "these columns, in this order, separated by commas" },          \
		{ OPTION_NO_HEADINGS, "no-headings", NULL, "no line of headings, no line below the table" }, \
		{ 'S', "sort", "COLUMN", "sort by this column" }, {                                          \
		'r', "reverse", NULL, "the other way round"                                                  \
	}

/* options before the verb, up to and without it; sets @ret_verb to its index. OPTION_END, or an exit code. */
int options_global(Ctl *ctl, int argc, char **argv, int *ret_verb);
/*
 * The next option of the verb: its id, its argument in optarg; OPTION_END when the rest, from optind on, are not
 * options; OPTION_BAD when the user was told. Options of all verbs are taken care of.
 */
int options_next(Ctl *ctl);

/* all verbs, NULL at the end */
extern const Verb *const verbs[];
