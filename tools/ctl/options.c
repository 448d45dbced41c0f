/* SPDX-License-Identifier: Apache-2.0 */

#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "format.h"
#include "options.h"
#include "output.h"

#define OPTIONS_MAX 32

static const Option common[] = {
	{ 'j', "json", NULL, "print JSON" },
	{ 's', "socket", "PATH", "the broker's socket; $SHMBROKER_SOCKET, else /run/shmbroker/shmbroker.sock" },
	{ OPTION_TIMEOUT, "timeout", "DURATION", "give up after this time, with exit code 5" },
	{ OPTION_NO_COLOR, "no-color", NULL, "no colour on a terminal either, as with $NO_COLOR" },
	{ 'h', "help", NULL, "print this and exit" },
	{ 'V', "version", NULL, "print the version and exit" },
	{},
};

const Verb *const verbs[] = {
	&verb_status, &verb_watch, &verb_register, &verb_unregister, &verb_clients, &verb_stats,
	&verb_ping,   &verb_check, NULL,
};

static void print_option(const Option *option) {
	char text[64], letter[8] = "    ";

	if (option->id < 128)
		snprintf(letter, sizeof(letter), "-%c, ", option->id);
	if (!option->argument)
		snprintf(text, sizeof(text), "--%s", option->name);
	else if (option->argument[0] == '[')
		snprintf(text, sizeof(text), "--%s%s", option->name, option->argument);
	else
		snprintf(text, sizeof(text), "--%s=%s", option->name, option->argument);
	printf("  %s%-20s  %s\n", letter, text, option->help);
}

static void print_options(const Option *options) {
	for (; options->id; ++options)
		print_option(options);
}

static void print_help(const Verb *verb) {
	if (!verb) {
		puts("Usage: shmbrokerctl [OPTION...] VERB [ARGUMENT...]\n\n"
		     "Looks at the shared-memory broker of this host, and cleans up.\n\n"
		     "Verbs:");
		for (size_t i = 0; verbs[i]; ++i)
			printf("  %-12s %s\n", verbs[i]->name, verbs[i]->help);
		puts("\nOptions:");
		print_options(common);
		puts("\nshmbrokerctl VERB --help says what a verb takes. shmbrokerctl(1)");
		return;
	}
	printf("Usage: shmbrokerctl %s [OPTION...]%s%s\n\n%c%s.\n\nOptions:\n", verb->name,
	       verb->arguments[0] ? " " : "", verb->arguments, verb->help[0] - 'a' + 'A', verb->help + 1);
	print_options(verb->options);
	print_options(common);
	if (verb->columns) {
		fputs("\nColumns:", stdout);
		for (const Column *column = verb->columns; column->name; ++column)
			printf(" %s", column->name);
		putchar('\n');
	}
}

static void on_alarm(int number) {
	static const char text[] = "shmbrokerctl: timed out\n";

	(void)number;
	if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
		_exit(CTL_TIMED_OUT);
	_exit(CTL_TIMED_OUT);
}

/* also where the library waits for the broker, hence a signal */
static int start_timeout(Ctl *ctl, const char *text) {
	struct itimerval timer = {};
	uint64_t ns;

	if (format_parse_duration(text, &ns))
		return ctl_usage("--timeout: \"%s\" is not a duration with ms, s or min", text);
	if (ns / 1000000000 > INT32_MAX)
		return ctl_usage("--timeout: \"%s\" is too long", text);
	timer.it_value.tv_sec = (time_t)(ns / 1000000000);
	timer.it_value.tv_usec = (suseconds_t)(ns % 1000000000 / 1000);
	if (ns < 1000)
		timer.it_value.tv_usec = 1;
	signal(SIGALRM, on_alarm);
	setitimer(ITIMER_REAL, &timer, NULL);
	ctl->has_timeout = true;
	return 0;
}

/* what all verbs have; true when @id was one of those */
static bool take_common(Ctl *ctl, int id, const Verb *verb, int *ret_bad) {
	switch (id) {
	case 'j':
		ctl->json = true;
		return true;
	case 's':
		ctl->socket = optarg;
		return true;
	case OPTION_TIMEOUT:
		*ret_bad = start_timeout(ctl, optarg);
		return true;
	case OPTION_NO_COLOR:
		if (setenv("NO_COLOR", "1", 1) < 0)
			ctl_must(NULL);
		return true;
	case 'h':
		print_help(verb);
		exit(fflush(stdout) ? CTL_REFUSED : CTL_OK);
	case 'V':
		puts("shmbrokerctl " SHMB_VERSION);
		exit(fflush(stdout) ? CTL_REFUSED : CTL_OK);
	default:
		return false;
	}
}

static void add_options(struct option *at, char *letters, size_t *n, const Option *options) {
	for (; options->id; ++options) {
		int has = !options->argument		? no_argument
			  : options->argument[0] == '[' ? optional_argument
							: required_argument;

		at[(*n)++] = (struct option){ options->name, has, NULL, options->id };
		if (options->id < 128) {
			char letter[] = { (char)options->id, has == no_argument ? 0 : ':', 0 };

			strcat(letters, letter);
			if (has == optional_argument)
				strcat(letters, ":");
		}
	}
}

static int next(Ctl *ctl, int argc, char **argv, const Verb *verb, const char *mode) {
	struct option table[OPTIONS_MAX + 1] = {};
	char letters[4 + 3 * OPTIONS_MAX];
	size_t n = 0;
	int id, bad = 0;

	strcpy(letters, mode);
	add_options(table, letters, &n, common);
	if (verb)
		add_options(table, letters, &n, verb->options);
	do
		id = getopt_long(argc, argv, letters, table, NULL);
	while (take_common(ctl, id, verb, &bad) && !bad);
	return bad ? OPTION_BAD : id;
}

int options_global(Ctl *ctl, int argc, char **argv, int *ret_verb) {
	int id = next(ctl, argc, argv, NULL, "+");

	if (id != OPTION_END)
		return CTL_USAGE;
	if (optind >= argc)
		return ctl_usage("what shall be done? shmbrokerctl --help lists the verbs");
	*ret_verb = optind;
	/* getopt starts anew */
	optind = 0;
	return OPTION_END;
}

int options_next(Ctl *ctl) {
	return next(ctl, ctl->argc, ctl->argv, ctl->verb, "");
}
