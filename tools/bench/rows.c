/* SPDX-License-Identifier: Apache-2.0 */

#include <inttypes.h>
#include <json-c/json.h>
#include <libsmartcols/libsmartcols.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define CELL_MAX 128

typedef enum ColumnId {
	COLUMN_NAME,
	COLUMN_N,
	COLUMN_PLACEMENT,
	COLUMN_THREADS,
	COLUMN_UNIT,
	COLUMN_MEDIAN,
	COLUMN_P99,
	COLUMN_MIN,
	COLUMN_RUNS,
	COLUMN_RATIO,
	COLUMN_DETAIL,
	N_COLUMNS,
} ColumnId;

static const struct {
	const char *key;
	const char *heading;
	bool right;
} columns[] = {
	[COLUMN_NAME] = { "name", "NAME", false },
	[COLUMN_N] = { "n", "N", true },
	[COLUMN_PLACEMENT] = { "placement", "PLACEMENT", false },
	[COLUMN_THREADS] = { "threads", "THREADS", true },
	[COLUMN_UNIT] = { "unit", "UNIT", false },
	[COLUMN_MEDIAN] = { "median", "MEDIAN", true },
	[COLUMN_P99] = { "p99", "P99", true },
	[COLUMN_MIN] = { "min", "MIN", true },
	[COLUMN_RUNS] = { "runs", "RUNS", true },
	[COLUMN_RATIO] = { "ratio", "RATIO", true },
	[COLUMN_DETAIL] = { "detail", "DETAIL", false },
};

static void *must(void *pointer) {
	if (!pointer)
		bench_die("out of memory");
	return pointer;
}

/* ---- JSON ---- */

/* to a thousandth: clocks tell no more, and the texts stay short */
static json_object *json_number(double value) {
	char text[64];

	(void)snprintf(text, sizeof(text), "%.3f", value);
	return must(json_object_new_double_s(value, text));
}

static json_object *json_text(const char *text) {
	return text && *text ? must(json_object_new_string(text)) : NULL;
}

static json_object *json_value(const BenchRow *row, ColumnId id) {
	switch (id) {
	case COLUMN_NAME:
		return json_text(row->name);
	case COLUMN_N:
		return must(json_object_new_uint64(row->n));
	case COLUMN_PLACEMENT:
		return json_text(row->placement);
	case COLUMN_THREADS:
		return must(json_object_new_uint64(row->threads));
	case COLUMN_UNIT:
		return must(json_object_new_string(row->unit));
	case COLUMN_MEDIAN:
		return json_number(row->median);
	case COLUMN_P99:
		return json_number(row->p99);
	case COLUMN_MIN:
		return json_number(row->min);
	case COLUMN_RUNS:
		return must(json_object_new_uint64(row->runs));
	case COLUMN_RATIO:
		return row->ratio > 0 ? json_number(row->ratio) : NULL;
	default:
		return json_text(row->detail);
	}
}

static void print_json(const Bench *bench) {
	json_object *array = must(json_object_new_array());

	for (size_t i = 0; i < bench->n_rows; ++i) {
		json_object *row = must(json_object_new_object());

		for (ColumnId id = 0; id < N_COLUMNS; ++id)
			if (json_object_object_add(row, columns[id].key, json_value(&bench->rows[i], id)) < 0)
				must(NULL);
		if (json_object_array_add(array, row) < 0)
			must(NULL);
	}
	puts(must((void *)json_object_to_json_string_ext(array, JSON_C_TO_STRING_PRETTY | JSON_C_TO_STRING_SPACED |
									JSON_C_TO_STRING_NOSLASHESCAPE)));
	json_object_put(array);
}

/* ---- table ---- */

/* four digits that count, and no fractions of bytes */
static void format_value(const BenchRow *row, double value, char *cell) {
	double size = fabs(value);
	bool whole = !strcmp(row->unit, "bytes") || !strcmp(row->unit, "fds");

	(void)snprintf(cell, CELL_MAX, "%.*f", whole || size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 3, value);
}

static void format_cell(const BenchRow *row, ColumnId id, char *cell) {
	const char *text = "";

	switch (id) {
	case COLUMN_NAME:
		text = row->name;
		break;
	case COLUMN_PLACEMENT:
		text = row->placement;
		break;
	case COLUMN_UNIT:
		text = row->unit;
		break;
	case COLUMN_DETAIL:
		text = row->detail;
		break;
	case COLUMN_N:
		(void)snprintf(cell, CELL_MAX, "%" PRIu64, row->n);
		return;
	case COLUMN_THREADS:
		(void)snprintf(cell, CELL_MAX, "%" PRIu32, row->threads);
		return;
	case COLUMN_RUNS:
		(void)snprintf(cell, CELL_MAX, "%" PRIu32, row->runs);
		return;
	case COLUMN_MEDIAN:
		format_value(row, row->median, cell);
		return;
	case COLUMN_P99:
		format_value(row, row->p99, cell);
		return;
	case COLUMN_MIN:
		format_value(row, row->min, cell);
		return;
	case COLUMN_RATIO:
		if (row->ratio > 0) {
			(void)snprintf(cell, CELL_MAX, "%.3f", row->ratio);
			return;
		}
		break;
	default:
		break;
	}
	(void)snprintf(cell, CELL_MAX, "%s", text && *text ? text : "-");
}

static void print_table(const Bench *bench) {
	struct libscols_table *table = must(scols_new_table());

	(void)scols_table_set_column_separator(table, "  ");
	for (ColumnId id = 0; id < N_COLUMNS; ++id)
		must(scols_table_new_column(table, columns[id].heading, 0, columns[id].right ? SCOLS_FL_RIGHT : 0));
	for (size_t i = 0; i < bench->n_rows; ++i) {
		struct libscols_line *line = must(scols_table_new_line(table, NULL));

		for (ColumnId id = 0; id < N_COLUMNS; ++id) {
			char cell[CELL_MAX];

			format_cell(&bench->rows[i], id, cell);
			if (scols_line_set_data(line, id, cell) < 0)
				must(NULL);
		}
	}
	(void)scols_print_table(table);
	scols_unref_table(table);
}

void rows_print(const Bench *bench) {
	if (bench->json)
		print_json(bench);
	else
		print_table(bench);
}
