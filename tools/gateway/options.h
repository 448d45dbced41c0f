/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The command line. options.def makes the struct, the parser and --help. Texts point into argv or into constants and are
 * never freed; an empty text stands for "not given".
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define OPTIONS_TYPE_TEXT const char *
#define OPTIONS_TYPE_BOOL bool
#define OPTIONS_TYPE_FLAG bool
#define OPTIONS_TYPE_PORT uint16_t
#define OPTIONS_TYPE_MODE mode_t
#define OPTIONS_TYPE_SIZE uint64_t
#define OPTIONS_TYPE_COUNT uint32_t

#define OPTIONS_RUN (-1)
#define OPTIONS_USAGE 2

typedef struct Options {
#define OPTION(_field, _name, _type, _default, _argument, _help) OPTIONS_TYPE_##_type _field;
#include "options.def"
#undef OPTION
} Options;

/* Fills @ret. Returns OPTIONS_RUN, or the exit status: what there was to say is said. */
int options_parse(Options *ret, int argc, char **argv);
