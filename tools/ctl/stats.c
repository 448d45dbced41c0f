/* SPDX-License-Identifier: Apache-2.0 */

#include <ctype.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "broker-info.h"
#include "options.h"
#include "output.h"

#define METRIC_MAX 128

static const Column columns[] = {
	{ "name", COLUMN_TEXT, false },	 { "value", COLUMN_NUMBER, false }, { "type", COLUMN_TEXT, false },
	{ "uid", COLUMN_NUMBER, false }, { "help", COLUMN_TEXT, false },    {},
};

enum {
	OPTION_FORMAT = OPTION_VERB,
	OPTION_ACCOUNTS
};

static const Option options[] = {
	{ OPTION_FORMAT, "format", "FORMAT", "table, json or openmetrics" },
	{ OPTION_ACCOUNTS, "accounts", NULL, "also what each user holds" },
	OPTIONS_TABLE,
	{},
};

typedef enum Format {
	FORMAT_OF_TABLE,
	FORMAT_OF_JSON,
	FORMAT_OF_OPENMETRICS,
} Format;

typedef struct Stats {
	Ctl *ctl;
	Format format;
	uint32_t accounts;
	Table table;
} Stats;

static int on_stat(void *userdata, const struct shmb_stat *stat) {
	Stats *stats = userdata;
	json_object *row = row_new();

	row_text(row, "name", stat->name);
	row_number(row, "value", stat->value);
	row_text(row, "type", stat->type == 1 ? "counter" : "gauge");
	if (stat->uid == SHMB_ANY_UID)
		row_null(row, "uid");
	else
		row_number(row, "uid", stat->uid);
	row_text(row, "help", stat->help ?: "");
	table_add(&stats->table, row);
	return 0;
}

/* ---- OpenMetrics ---- */

/* of a family: shmbroker_NAME for the broker, shmbroker_account_NAME for users, so that no sum counts twice */
static const char *metric_name(const char *name, bool account, char *buffer) {
	size_t n;

	snprintf(buffer, METRIC_MAX, "shmbroker_%s%s", account ? "account_" : "", name);
	for (char *at = buffer; *at; ++at)
		if (!isalnum((unsigned char)*at))
			*at = '_';
	n = strlen(buffer);
	if (n > 6 && !strcmp(buffer + n - 6, "_total"))
		buffer[n - 6] = 0;
	return buffer;
}

static void print_escaped(const char *text) {
	for (; *text; ++text) {
		if (*text == '\\' || *text == '"')
			printf("\\%c", *text);
		else if (*text == '\n')
			fputs("\\n", stdout);
		else
			putchar(*text);
	}
}

static const char *text_of(json_object *row, const char *key) {
	return json_object_get_string(json_object_object_get(row, key));
}

static void print_family(json_object *row, const char *metric) {
	printf("# TYPE %s %s\n# HELP %s ", metric, text_of(row, "type"), metric);
	print_escaped(text_of(row, "help"));
	putchar('\n');
}

static void print_sample(json_object *row, const char *metric) {
	json_object *uid = json_object_object_get(row, "uid");

	printf("%s%s", metric, strcmp(text_of(row, "type"), "counter") ? "" : "_total");
	if (uid)
		printf("{uid=\"%s\"}", json_object_get_string(uid));
	printf(" %" PRIu64 "\n", json_object_get_uint64(json_object_object_get(row, "value")));
}

static bool is_same_family(json_object *a, json_object *b) {
	return !json_object_object_get(a, "uid") == !json_object_object_get(b, "uid") &&
	       !strcmp(text_of(a, "name"), text_of(b, "name"));
}

/* the samples of a family stand together, families in the order of their first sample */
static void print_metrics(json_object *rows) {
	size_t n = json_object_array_length(rows);
	bool *printed = ctl_must(calloc(n + 1, sizeof(*printed)));
	char metric[METRIC_MAX];

	for (size_t i = 0; i < n; ++i) {
		json_object *first = json_object_array_get_idx(rows, i);

		if (printed[i])
			continue;
		metric_name(text_of(first, "name"), json_object_object_get(first, "uid"), metric);
		print_family(first, metric);
		for (size_t j = i; j < n; ++j) {
			json_object *row = json_object_array_get_idx(rows, j);

			if (printed[j] || !is_same_family(first, row))
				continue;
			print_sample(row, metric);
			printed[j] = true;
		}
	}
	free(printed);
}

static void print_info(json_object *info) {
	static const char *const labels[] = { "version", "loop" };

	fputs("# TYPE shmbroker info\n# HELP shmbroker the broker and its loop\nshmbroker_info{", stdout);
	for (size_t i = 0; i < ARRAY_N(labels); ++i) {
		json_object *value = json_object_object_get(info, labels[i]);

		printf("%s%s=\"", i ? "," : "", labels[i]);
		print_escaped(value ? json_object_get_string(value) : "");
		putchar('"');
	}
	puts("} 1");
}

static int print_openmetrics(Stats *stats) {
	json_object *info;
	int r;

	r = broker_info_read(stats->ctl, &info);
	if (r)
		return r;
	print_info(info);
	print_metrics(stats->table.rows);
	puts("# EOF");
	json_object_put(info);
	return 0;
}

static int show(Stats *stats) {
	json_object *document;
	int r;

	r = shmb_client_each_stat(stats->ctl->client, stats->accounts, on_stat, stats);
	if (r)
		return ctl_fail(r, "statistics");
	if (stats->format == FORMAT_OF_OPENMETRICS)
		return print_openmetrics(stats);
	table_sort(&stats->table);
	if (stats->format == FORMAT_OF_TABLE) {
		table_print(&stats->table, 0);
		return 0;
	}
	document = row_new();
	row_object(document, "stats", json_object_get(stats->table.rows));
	json_print(document);
	json_object_put(document);
	return 0;
}

static int parse_format(Stats *stats, const char *text) {
	static const char *const formats[] = { "table", "json", "openmetrics" };

	for (size_t i = 0; i < ARRAY_N(formats); ++i) {
		if (!strcmp(text, formats[i])) {
			stats->format = (Format)i;
			return 0;
		}
	}
	return ctl_usage("--format: table, json or openmetrics, not \"%s\"", text);
}

static int parse(Stats *stats) {
	Ctl *ctl = stats->ctl;
	int id, r = 0;

	while (!r && (id = options_next(ctl)) != OPTION_END) {
		switch (id) {
		case OPTION_FORMAT:
			r = parse_format(stats, optarg);
			break;
		case OPTION_ACCOUNTS:
			stats->accounts = 1;
			break;
		default:
			r = table_option(&stats->table, id, optarg);
		}
	}
	if (!r && ctl->argv[optind])
		r = ctl_usage("takes no argument \"%s\"", ctl->argv[optind]);
	if (!r && ctl->json && stats->format == FORMAT_OF_OPENMETRICS)
		r = ctl_usage("either --json or --format=openmetrics");
	if (!r && ctl->json)
		stats->format = FORMAT_OF_JSON;
	return r;
}

static int run(Ctl *ctl) {
	Stats stats = { .ctl = ctl };
	int r;

	table_init(&stats.table, columns, NULL);
	r = parse(&stats);
	if (!r)
		r = ctl_connect(ctl, SHMB_NO_LEASE_PAGE);
	if (!r)
		r = show(&stats);
	table_deinit(&stats.table);
	return r;
}

const Verb verb_stats = {
	.name = "stats",
	.arguments = "",
	.help = "prints the broker's counters and gauges",
	.options = options,
	.columns = columns,
	.run = run,
};
