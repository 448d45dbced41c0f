/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"

#define OPTIONS_FIRST 256

typedef enum OptionType {
	TEXT,
	BOOL,
	PORT,
	MODE,
	SIZE,
	COUNT
} OptionType;

typedef struct Option {
	const char *name;
	OptionType type;
	size_t place;
	const char *value; /* the default */
	const char *argument;
	const char *help;
} Option;

static const Option options[] = {
#define OPTION(_field, _name, _type, _default, _argument, _help) \
	{ _name, _type, offsetof(Options, _field), _default, _argument, _help },
#include "options.def"
#undef OPTION
};

#define OPTIONS_N (sizeof(options) / sizeof(options[0]))

static bool parse_bool(const char *text, bool *ret) {
	static const char *const words[] = { "false", "0", "off", "no", "true", "1", "on", "yes" };

	for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
		if (strcasecmp(text, words[i]) == 0) {
			*ret = i >= 4;
			return true;
		}
	}
	return false;
}

/* a whole number up to @max, with K, M or G (of 1024) where @units */
static bool parse_number(const char *text, int base, bool units, uint64_t max, uint64_t *ret) {
	static const char letters[] = "KMG";
	const char *letter;
	uint64_t value;
	char *end;

	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	value = strtoull(text, &end, base);
	if (errno)
		return false;
	if (units && *end && (letter = strchr(letters, *end))) {
		if (__builtin_mul_overflow(value, UINT64_C(1) << (10 * (letter - letters + 1)), &value))
			return false;
		end++;
	}
	if (*end || value > max)
		return false;
	*ret = value;
	return true;
}

/* NULL, or what the value should have been */
static const char *set(Options *to, const Option *option, const char *text) {
	void *place = (char *)to + option->place;
	uint64_t number;

	switch (option->type) {
	case TEXT:
		*(const char **)place = text;
		return NULL;
	case BOOL:
		return parse_bool(text, place) ? NULL : "true or false";
	case PORT:
		if (!parse_number(text, 10, false, UINT16_MAX, &number))
			return "a number up to 65535";
		*(uint16_t *)place = number;
		return NULL;
	case MODE:
		if (!parse_number(text, 8, false, 0777, &number))
			return "an octal mode up to 0777";
		*(mode_t *)place = number;
		return NULL;
	case SIZE:
		if (!parse_number(text, 10, true, INT64_MAX, &number) || !number)
			return "a number of bytes, K, M and G being units";
		*(uint64_t *)place = number;
		return NULL;
	case COUNT:
		if (!parse_number(text, 10, false, 1000000, &number) || !number)
			return "a number from 1 to 1000000";
		*(uint32_t *)place = number;
		return NULL;
	}
	return "something else";
}

static void print_help(void) {
	puts("Usage: shmbroker-gateway [OPTION...]\n\n"
	     "Serves Triton's shared-memory extension over HTTP and gRPC from this host's broker.\n\nOptions:");
	for (const Option *option = options; option < options + OPTIONS_N; option++) {
		char text[64];

		(void)snprintf(text, sizeof(text), "--%s%s%s", option->name, option->argument[0] ? "=" : "",
			       option->argument);
		printf("  %-31s %s", text, option->help);
		if (!option->value[0])
			putchar('\n');
		else
			printf(" (%s)\n", option->value);
	}
	puts("  --version                       print the version and exit\n"
	     "  -h, --help                      print this and exit\n\n"
	     "BOOL is true or false; the option alone says true. shmbroker-gateway(8)");
}

int options_parse(Options *ret, int argc, char **argv) {
	struct option table[OPTIONS_N + 3] = {};
	int c;

	*ret = (Options){};
	for (size_t i = 0; i < OPTIONS_N; i++) {
		int argument = options[i].type == BOOL ? optional_argument : required_argument;

		table[i] = (struct option){ options[i].name, argument, NULL, OPTIONS_FIRST + (int)i };
		(void)set(ret, &options[i], options[i].value);
	}
	table[OPTIONS_N] = (struct option){ "version", no_argument, NULL, 'V' };
	table[OPTIONS_N + 1] = (struct option){ "help", no_argument, NULL, 'h' };

	while ((c = getopt_long(argc, argv, "h", table, NULL)) >= 0) {
		const Option *option;
		const char *expected;
		bool word;

		switch (c) {
		case 'V':
			puts("shmbroker-gateway " PACKAGE_VERSION);
			return EXIT_SUCCESS;
		case 'h':
			print_help();
			return EXIT_SUCCESS;
		case '?':
			return OPTIONS_USAGE;
		}
		option = &options[c - OPTIONS_FIRST];
		/* the value of a BOOL may also be the next word, as with Triton */
		if (option->type == BOOL && !optarg && optind < argc && parse_bool(argv[optind], &word))
			optarg = argv[optind++];
		expected = set(ret, option, optarg ?: "true");
		if (expected) {
			fprintf(stderr, "shmbroker-gateway: --%s is %s, not \"%s\"\n", option->name, expected, optarg);
			return OPTIONS_USAGE;
		}
	}
	if (optind < argc) {
		fprintf(stderr, "shmbroker-gateway: takes no argument \"%s\"\n", argv[optind]);
		return OPTIONS_USAGE;
	}
	return OPTIONS_RUN;
}
