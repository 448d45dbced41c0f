/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Output: rows of JSON objects, printed as JSON or as a table. A column names a key of the rows and says how its
 * values look to a person, so that the keys of the JSON are the names of the columns. Rows that are added belong
 * to the table.
 */

#include <json-c/json.h>

#include "ctl.h"

typedef enum ColumnType {
	COLUMN_TEXT,
	COLUMN_NUMBER,
	COLUMN_BYTES,
	COLUMN_DURATION, /* nanoseconds */
	COLUMN_TIME,	 /* nanoseconds since 1970 */
	COLUMN_WORDS,	 /* an array of texts */
	COLUMN_HOLDERS,	 /* an array of { comm, pid, leases }; the row's holders_total may be more */
	COLUMN_STATE,	 /* a text with a colour for each state of a region */
} ColumnType;

typedef struct Column {
	const char *name; /* NULL ends a list */
	ColumnType type;
	bool hidden; /* only shown when asked for */
} Column;

#define TABLE_COLUMNS_MAX 32

typedef struct Table {
	const Column *columns;
	const Column *shown[TABLE_COLUMNS_MAX];
	size_t n_shown;
	const Column *sort; /* NULL: as added */
	bool reverse;
	bool headings;
	json_object *rows;
} Table;

/* @sort a column, or NULL */
void table_init(Table *table, const Column *columns, const char *sort);
void table_deinit(Table *table);
/* takes an option of OPTIONS_TABLE; 0, or an exit code when the user was told what is wrong with it */
int table_option(Table *table, int id, const char *argument);
/* consumes @row */
void table_add(Table *table, json_object *row);
void table_clear(Table *table);
void table_sort(Table *table);
/* at most @max rows, 0 for all */
void table_print(const Table *table, size_t max);

/* keys of a row; text is cleaned, NULL becomes null */
json_object *row_new(void);
void row_text(json_object *row, const char *key, const char *text);
void row_number(json_object *row, const char *key, uint64_t number);
void row_null(json_object *row, const char *key);
void row_object(json_object *row, const char *key, json_object *object);
/* an array of the words whose bit is set, word 0 for bit 0 */
void row_words(json_object *row, const char *key, uint32_t bits, const char *const *words, size_t n);
/* the number, or null where the broker hides it: uid SHMB_ANY_UID */
void row_identity(json_object *row, uint32_t pid, uint32_t uid);

#define ARRAY_N(_array) (sizeof(_array) / sizeof((_array)[0]))

/* the names of SHMB_* constants; "unknown" for what a later broker may add */
const char *name_of_state(uint32_t state);
const char *name_of_kind(uint32_t kind);
void row_region_flags(json_object *row, uint32_t flags);
void row_access(json_object *row, uint32_t access);

/* one document, over several lines, or in one line */
void json_print(json_object *object);
void json_print_line(json_object *object);

bool output_is_terminal(void);
bool output_has_colour(void);
