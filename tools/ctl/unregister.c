/* SPDX-License-Identifier: Apache-2.0 */

#include <ctype.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "format.h"
#include "options.h"
#include "output.h"

enum {
	OPTION_ALL = OPTION_VERB,
	OPTION_MINE,
	OPTION_LAZY,
	OPTION_FORCE,
	OPTION_DISCARD,
	OPTION_WAIT,
};

static const Option options[] = {
	{ OPTION_ALL, "all", NULL, "every region of everyone; needs the role admin" },
	{ OPTION_MINE, "mine", NULL, "with --all: every region of this user" },
	{ OPTION_LAZY, "lazy", NULL, "usable and listed until the last lease is over" },
	{ OPTION_FORCE, "force", NULL, "revoke: gone at once, whoever holds it" },
	{ OPTION_DISCARD, "discard", NULL, "with what --force does, give the pages back to the system" },
	{ OPTION_WAIT, "wait", "[=DURATION]", "return when they are gone, or with exit code 5" },
	{ 'y', "yes", NULL, "do not ask before --all" },
	{},
};

typedef struct Unregister {
	Ctl *ctl;
	bool all;
	bool mine;
	bool lazy;
	bool force;
	bool discard;
	bool wait;
	bool yes;
	int timeout; /* ms, -1: none */
	char **names;
	uint32_t n_names;
} Unregister;

static uint32_t mode_of(const Unregister *unregister) {
	uint32_t mode = unregister->discard ? SHMB_RETIRE_DISCARD
			: unregister->force ? SHMB_RETIRE_FORCE
			: unregister->lazy  ? SHMB_RETIRE_LAZY
					    : SHMB_RETIRE_STRICT;

	return mode | (unregister->wait ? SHMB_RETIRE_WAIT : 0);
}

/* ---- by name ---- */

/* "not_found" for SHMB_E_NOT_FOUND, "retired" or "gone" for 0; new */
static char *result_name(const Unregister *unregister, int result) {
	const char *name = result > 0 ? shmb_error_name(result) : NULL;
	char *lower;

	if (!result)
		return ctl_must(strdup(unregister->wait ? "gone" : "retired"));
	lower = ctl_must(strdup(name ?: "failed"));
	for (char *at = lower; *at; ++at)
		*at = (char)tolower((unsigned char)*at);
	return lower;
}

static json_object *result_row(const Unregister *unregister, const char *name, int result, const char *message) {
	json_object *row = row_new();
	char *word = result_name(unregister, result);

	row_text(row, "name", name);
	row_text(row, "result", word);
	row_text(row, "message", message[0] ? message : NULL);
	free(word);
	return row;
}

static void say_result(const Unregister *unregister, const char *name, int result, const char *message) {
	if (message[0])
		ctl_say("%s: %s", name, message);
	if (!result && !unregister->ctl->json) {
		char *clean = format_clean(name, FORMAT_TERMINAL);

		printf("%s %s\n", clean, unregister->wait ? "is gone" : "is retired");
		free(clean);
	}
}

/*
 * One by one, so that the broker's sentence for each is known; together where they are waited for, so that all
 * retire before that.
 */
static int by_name(const Unregister *unregister) {
	json_object *document = row_new(), *rows = ctl_must(json_object_new_array());
	uint32_t n = unregister->n_names, step = unregister->wait ? n : 1;
	int *results = ctl_must(calloc(n, sizeof(*results)));
	int r = 0, code = 0;

	for (uint32_t i = 0; i < n && ctl_code(r) != CTL_UNREACHABLE; ++i) {
		const char *name = unregister->names[i], *message;

		if (i % step == 0) {
			r = shmb_client_unregister(unregister->ctl->client, (const char *const *)unregister->names + i,
						   step, mode_of(unregister), unregister->timeout, results + i);
			/* it failed as a whole */
			for (uint32_t j = i; r && j < i + step; ++j)
				results[j] = r;
		}
		message = results[i] ? shmb_error_text(results[i]) : "";
		/* what DISCARD could not give back is told on success, too */
		if (step == 1 && results[i] >= 0 && (results[i] || (n == 1 && unregister->discard)) &&
		    shmb_last_error()[0])
			message = shmb_last_error();
		say_result(unregister, name, results[i], message);
		code = code ?: ctl_code(results[i]);
		if (json_object_array_add(rows, result_row(unregister, name, results[i], message)) < 0)
			ctl_must(NULL);
	}
	free(results);
	row_object(document, "regions", rows);
	if (unregister->ctl->json)
		json_print(document);
	json_object_put(document);
	return code;
}

/* ---- all ---- */

static int count(const Unregister *unregister, uint64_t *ret_n, uint64_t *ret_bytes) {
	struct shmb_status_filter filter = { .struct_size = sizeof(filter) };
	const struct shmb_status *region;
	struct shmb_status_iter *iter;
	uint64_t n = 0, bytes = 0;
	int r;

	if (unregister->mine)
		filter.uid_plus_one = geteuid() + 1;
	r = shmb_status_iter_new(unregister->ctl->client, &filter, &iter);
	if (r)
		return r;
	while (!(r = shmb_status_iter_next(iter, &region)) && region) {
		n++;
		bytes += region->size;
	}
	(void)shmb_status_iter_free(iter);
	*ret_n = n;
	*ret_bytes = bytes;
	return r;
}

static int ask(const Unregister *unregister) {
	char answer[16], buffer[FORMAT_MAX];
	uint64_t n, bytes;
	int r;

	r = count(unregister, &n, &bytes);
	if (r)
		return ctl_fail(r, "the regions cannot be counted");
	fprintf(stderr, "%s %" PRIu64 " region%s (%s) of %s? [y/N] ",
		unregister->discard ? "Revoke, and throw away what is in,"
		: unregister->force ? "Revoke"
				    : "Retire",
		n, n == 1 ? "" : "s", format_bytes(bytes, buffer), unregister->mine ? "this user" : "all users");
	fflush(stderr);
	if (!fgets(answer, sizeof(answer), stdin))
		answer[0] = 0;
	answer[strcspn(answer, "\n")] = 0;
	if (!strcasecmp(answer, "y") || !strcasecmp(answer, "yes"))
		return 0;
	ctl_say("nothing was done");
	return CTL_REFUSED;
}

static int all(const Unregister *unregister) {
	struct shmb_retired retired = { .struct_size = sizeof(retired) };
	char buffer[FORMAT_MAX];
	json_object *document;
	int r;

	if (!unregister->yes) {
		r = ask(unregister);
		if (r)
			return r;
	}
	r = shmb_client_unregister_all(unregister->ctl->client, unregister->mine ? SHMB_ALL_UID : SHMB_ALL_EVERYONE,
				       mode_of(unregister), unregister->timeout, &retired);
	if (r == SHMB_E_PERMISSION && !unregister->mine) {
		r = ctl_fail(r, "unregister --all");
		ctl_say("--all --mine is for the regions of this user");
		return r;
	}
	if (r)
		return ctl_fail(r, "unregister --all");
	if (unregister->ctl->json) {
		document = row_new();
		row_number(document, "gone", retired.gone);
		row_number(document, "draining", retired.draining);
		row_number(document, "discarded", retired.discarded);
		json_print(document);
		json_object_put(document);
		return 0;
	}
	printf("%" PRIu32 " gone, %" PRIu32 " until their leases are over", retired.gone, retired.draining);
	if (unregister->discard)
		printf(", %s given back", format_bytes(retired.discarded, buffer));
	putchar('\n');
	return 0;
}

/* ---- options ---- */

static int parse_wait(Unregister *unregister, const char *text) {
	uint64_t ns;

	unregister->wait = true;
	unregister->timeout = -1;
	if (!text)
		return 0;
	if (format_parse_duration(text, &ns) || ns / 1000000 > INT32_MAX)
		return ctl_usage("--wait: \"%s\" is not a duration with ms, s or min", text);
	unregister->timeout = (int)(ns / 1000000);
	return 0;
}

static int check(Unregister *unregister) {
	Ctl *ctl = unregister->ctl;

	unregister->names = ctl->argv + optind;
	unregister->n_names = (uint32_t)(ctl->argc - optind);
	if (unregister->all && unregister->n_names)
		return ctl_usage("either --all or names");
	if (!unregister->all && unregister->mine)
		return ctl_usage("--mine goes with --all");
	if (!unregister->all && !unregister->n_names)
		return ctl_usage("which regions? NAME... or --all");
	if (unregister->lazy && (unregister->force || unregister->discard))
		return ctl_usage("either --lazy or --force");
	if (unregister->all && !unregister->yes && !(isatty(STDIN_FILENO) && isatty(STDERR_FILENO)))
		return ctl_usage("--all asks first, and there is no terminal: say --yes");
	return 0;
}

static int parse(Unregister *unregister) {
	int id, r = 0;

	while (!r && (id = options_next(unregister->ctl)) != OPTION_END) {
		switch (id) {
		case OPTION_ALL:
			unregister->all = true;
			break;
		case OPTION_MINE:
			unregister->mine = true;
			break;
		case OPTION_LAZY:
			unregister->lazy = true;
			break;
		case OPTION_FORCE:
			unregister->force = true;
			break;
		case OPTION_DISCARD:
			unregister->discard = true;
			break;
		case OPTION_WAIT:
			r = parse_wait(unregister, optarg);
			break;
		case 'y':
			unregister->yes = true;
			break;
		default:
			r = CTL_USAGE;
		}
	}
	return r ?: check(unregister);
}

static int run(Ctl *ctl) {
	Unregister unregister = { .ctl = ctl, .timeout = -1 };
	int r;

	r = parse(&unregister);
	if (!r)
		r = ctl_connect(ctl, SHMB_NO_LEASE_PAGE);
	if (r)
		return r;
	return unregister.all ? all(&unregister) : by_name(&unregister);
}

const Verb verb_unregister = {
	.name = "unregister",
	.arguments = "NAME... | --all",
	.help = "retires regions",
	.options = options,
	.run = run,
};
