/* SPDX-License-Identifier: Apache-2.0 */

#include <ctype.h>
#include <inttypes.h>
#include <libsmartcols/libsmartcols.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "format.h"
#include "options.h"
#include "output.h"

/* ---- rows ---- */

json_object *row_new(void) {
	return ctl_must(json_object_new_object());
}

void row_object(json_object *row, const char *key, json_object *object) {
	if (json_object_object_add(row, key, object) < 0)
		ctl_must(NULL);
}

void row_text(json_object *row, const char *key, const char *text) {
	char *clean;

	if (!text) {
		row_null(row, key);
		return;
	}
	clean = format_clean(text, FORMAT_JSON);
	row_object(row, key, ctl_must(json_object_new_string(clean)));
	free(clean);
}

void row_number(json_object *row, const char *key, uint64_t number) {
	row_object(row, key, ctl_must(json_object_new_uint64(number)));
}

void row_null(json_object *row, const char *key) {
	row_object(row, key, NULL);
}

void row_words(json_object *row, const char *key, uint32_t bits, const char *const *words, size_t n) {
	json_object *array = ctl_must(json_object_new_array());

	for (size_t i = 0; i < n; ++i)
		if (bits >> i & 1 && json_object_array_add(array, ctl_must(json_object_new_string(words[i]))) < 0)
			ctl_must(NULL);
	row_object(row, key, array);
}

void row_identity(json_object *row, uint32_t pid, uint32_t uid) {
	if (uid == SHMB_ANY_UID)
		row_null(row, "uid");
	else
		row_number(row, "uid", uid);
	if (pid)
		row_number(row, "pid", pid);
	else
		row_null(row, "pid");
}

const char *name_of_state(uint32_t state) {
	static const char *const names[] = {
		[SHMB_STATE_REVOKED] = "revoked",
		[SHMB_STATE_ACTIVE] = "active",
		[SHMB_STATE_LAZY] = "lazy",
		[SHMB_STATE_RETIRING] = "retiring",
	};

	return state < ARRAY_N(names) ? names[state] : "unknown";
}

const char *name_of_kind(uint32_t kind) {
	return kind == SHMB_MEMORY_CPU ? "cpu" : kind == SHMB_MEMORY_CUDA ? "cuda" : "unknown";
}

void row_region_flags(json_object *row, uint32_t flags) {
	static const char *const words[] = { "unsealed", "sparse",  "ro-advisory", "no-ro-fd",
					     "kept",	 "hugetlb", "unindexed",   "unvalidated" };

	row_words(row, "flags", flags, words, ARRAY_N(words));
}

void row_access(json_object *row, uint32_t access) {
	static const char *const words[] = { "read", "write", "copy" };

	row_words(row, "access", access, words, ARRAY_N(words));
}

/* ---- JSON ---- */

static void print(json_object *object, int flags) {
	puts(ctl_must((void *)json_object_to_json_string_ext(object, flags | JSON_C_TO_STRING_NOSLASHESCAPE)));
}

void json_print(json_object *object) {
	print(object, JSON_C_TO_STRING_PRETTY | JSON_C_TO_STRING_SPACED);
}

void json_print_line(json_object *object) {
	print(object, JSON_C_TO_STRING_PLAIN);
	fflush(stdout);
}

/* ---- the terminal ---- */

bool output_is_terminal(void) {
	return isatty(STDOUT_FILENO);
}

bool output_has_colour(void) {
	const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");

	return output_is_terminal() && !(no_color && no_color[0]) && !(term && !strcmp(term, "dumb"));
}

/* ---- table ---- */

static const Column *find_column(const Table *table, const char *name) {
	for (const Column *column = table->columns; column->name; ++column)
		if (!strcmp(column->name, name))
			return column;
	return NULL;
}

void table_init(Table *table, const Column *columns, const char *sort) {
	*table = (Table){ .columns = columns, .headings = true, .rows = ctl_must(json_object_new_array()) };
	for (const Column *column = columns; column->name; ++column)
		if (!column->hidden)
			table->shown[table->n_shown++] = column;
	table->sort = sort ? find_column(table, sort) : NULL;
}

void table_deinit(Table *table) {
	json_object_put(table->rows);
	table->rows = NULL;
}

static int unknown_column(const Table *table, const char *name) {
	char known[512] = "";

	for (const Column *column = table->columns; column->name; ++column) {
		strcat(known, " ");
		strcat(known, column->name);
	}
	return ctl_usage("no column \"%s\"; there are:%s", name, known);
}

static int choose_columns(Table *table, const char *list) {
	char *names = ctl_must(strdup(list)), *rest = names, *name;
	int r = 0;

	table->n_shown = 0;
	while (!r && (name = strsep(&rest, ","))) {
		const Column *column = find_column(table, name);

		if (!column)
			r = unknown_column(table, name);
		else if (table->n_shown == TABLE_COLUMNS_MAX)
			r = ctl_usage("too many columns");
		else
			table->shown[table->n_shown++] = column;
	}
	free(names);
	return r;
}

int table_option(Table *table, int id, const char *argument) {
	switch (id) {
	case OPTION_COLUMNS:
		return choose_columns(table, argument);
	case OPTION_NO_HEADINGS:
		table->headings = false;
		return 0;
	case 'S':
		table->sort = find_column(table, argument);
		return table->sort ? 0 : unknown_column(table, argument);
	case 'r':
		table->reverse = true;
		return 0;
	default:
		return CTL_USAGE;
	}
}

void table_add(Table *table, json_object *row) {
	if (json_object_array_add(table->rows, row) < 0)
		ctl_must(NULL);
}

void table_clear(Table *table) {
	json_object_put(table->rows);
	table->rows = ctl_must(json_object_new_array());
}

static int compare_values(json_object *a, json_object *b) {
	if (!a || !b)
		return (a != NULL) - (b != NULL);
	if (json_object_is_type(a, json_type_int) && json_object_is_type(b, json_type_int)) {
		uint64_t x = json_object_get_uint64(a), y = json_object_get_uint64(b);

		return (x > y) - (x < y);
	}
	if (json_object_is_type(a, json_type_array) && json_object_is_type(b, json_type_array)) {
		size_t x = json_object_array_length(a), y = json_object_array_length(b);

		if (x != y)
			return x > y ? 1 : -1;
	}
	return strcmp(json_object_get_string(a), json_object_get_string(b));
}

/* rows that are alike keep the order of the first column */
static int compare_rows(const void *a, const void *b, void *userdata) {
	const Table *table = userdata;
	json_object *x = *(json_object *const *)a, *y = *(json_object *const *)b;
	int order;

	order = compare_values(json_object_object_get(x, table->sort->name),
			       json_object_object_get(y, table->sort->name));
	if (table->reverse)
		order = -order;
	return order
		       ?: compare_values(json_object_object_get(x, table->columns->name),
					 json_object_object_get(y, table->columns->name));
}

void table_sort(Table *table) {
	size_t n = json_object_array_length(table->rows);
	json_object **rows, *sorted;

	if (!table->sort || n < 2)
		return;
	rows = ctl_must(calloc(n, sizeof(*rows)));
	for (size_t i = 0; i < n; ++i)
		rows[i] = json_object_get(json_object_array_get_idx(table->rows, i));
	qsort_r(rows, n, sizeof(*rows), compare_rows, table);
	sorted = ctl_must(json_object_new_array());
	for (size_t i = 0; i < n; ++i)
		if (json_object_array_add(sorted, rows[i]) < 0)
			ctl_must(NULL);
	free(rows);
	json_object_put(table->rows);
	table->rows = sorted;
}

static void print_words(FILE *stream, json_object *words) {
	for (size_t i = 0; i < json_object_array_length(words); ++i)
		fprintf(stream, "%s%s", i ? "," : "", json_object_get_string(json_object_array_get_idx(words, i)));
}

static void print_holders(FILE *stream, json_object *holders, uint64_t total) {
	size_t n = json_object_array_length(holders);

	for (size_t i = 0; i < n; ++i) {
		json_object *holder = json_object_array_get_idx(holders, i);
		json_object *pid = json_object_object_get(holder, "pid");

		fprintf(stream, "%s%s[%s]:%" PRIu64, i ? ", " : "",
			json_object_get_string(json_object_object_get(holder, "comm")),
			pid ? json_object_get_string(pid) : "-",
			json_object_get_uint64(json_object_object_get(holder, "leases")));
	}
	if (total > n)
		fprintf(stream, "%s%" PRIu64 "%s", n ? ", +" : "", total - n, n ? "" : " of others");
}

/* what a person sees; new */
static char *cell_text(const Column *column, json_object *row) {
	json_object *value = json_object_object_get(row, column->name);
	char buffer[FORMAT_MAX], *text = NULL, *clean;
	size_t size;
	FILE *stream = ctl_must(open_memstream(&text, &size));

	if (!value) {
		fputc('-', stream);
	} else {
		switch (column->type) {
		case COLUMN_BYTES:
			fputs(format_bytes(json_object_get_uint64(value), buffer), stream);
			break;
		case COLUMN_DURATION:
			fputs(format_duration(json_object_get_uint64(value), buffer), stream);
			break;
		case COLUMN_TIME:
			fputs(format_time(json_object_get_uint64(value), buffer), stream);
			break;
		case COLUMN_WORDS:
			print_words(stream, value);
			break;
		case COLUMN_HOLDERS:
			print_holders(stream, value,
				      json_object_get_uint64(json_object_object_get(row, "holders_total")));
			break;
		default:
			fputs(json_object_get_string(value), stream);
			break;
		}
	}
	if (ferror(stream) | fclose(stream))
		ctl_must(NULL);
	clean = format_clean(text[0] ? text : "-", FORMAT_TERMINAL);
	free(text);
	return clean;
}

static bool is_right(ColumnType type) {
	return type == COLUMN_NUMBER || type == COLUMN_BYTES || type == COLUMN_DURATION;
}

static const char *state_colour(json_object *state) {
	const char *name = state ? json_object_get_string(state) : "";

	return !strcmp(name, "active") ? "green" : !strcmp(name, "revoked") ? "red" : "yellow";
}

#define HEADING_MAX 64

static const char *heading_of(const Column *column, char *buffer) {
	size_t n = 0;

	for (; column->name[n] && n < HEADING_MAX - 1; ++n)
		buffer[n] = (char)toupper((unsigned char)column->name[n]);
	buffer[n] = 0;
	return buffer;
}

/* libsmartcols prints nothing for a table without lines */
static void print_headings(const Table *table) {
	char heading[HEADING_MAX];

	for (size_t i = 0; i < table->n_shown; ++i)
		printf("%s%s", i ? "  " : "", heading_of(table->shown[i], heading));
	putchar('\n');
}

static void add_columns(struct libscols_table *table, const Table *from) {
	for (size_t i = 0; i < from->n_shown; ++i) {
		const Column *column = from->shown[i];
		struct libscols_column *added;
		char heading[HEADING_MAX];

		added = ctl_must(scols_table_new_column(table, heading_of(column, heading), 0,
							is_right(column->type)		     ? SCOLS_FL_RIGHT
							: column->type == COLUMN_HOLDERS     ? SCOLS_FL_WRAP
							: !strcmp(column->name, "container") ? SCOLS_FL_TRUNC
											     : 0));
		scols_cell_set_color(scols_column_get_header(added), "bold");
	}
}

static void add_row(struct libscols_table *table, const Table *from, json_object *row) {
	struct libscols_line *line = ctl_must(scols_table_new_line(table, NULL));

	for (size_t i = 0; i < from->n_shown; ++i) {
		if (scols_line_refer_data(line, i, cell_text(from->shown[i], row)) < 0)
			ctl_must(NULL);
		if (from->shown[i]->type == COLUMN_STATE)
			scols_cell_set_color(scols_line_get_cell(line, i),
					     state_colour(json_object_object_get(row, from->shown[i]->name)));
	}
}

void table_print(const Table *table, size_t max) {
	struct libscols_table *printed = ctl_must(scols_new_table());
	size_t n = json_object_array_length(table->rows);

	if (max && n > max)
		n = max;
	scols_table_enable_colors(printed, output_has_colour());
	scols_table_enable_noheadings(printed, !table->headings);
	/* cells are clean */
	scols_table_enable_noencoding(printed, 1);
	scols_table_set_column_separator(printed, "  ");
	add_columns(printed, table);
	for (size_t i = 0; i < n; ++i)
		add_row(printed, table, json_object_array_get_idx(table->rows, i));
	if (n)
		scols_print_table(printed);
	else if (table->headings)
		print_headings(table);
	scols_unref_table(printed);
}
