/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Table: an intrusive chained hash table. Inserting cannot fail: without memory to grow, chains get longer.
 * Keys are compared by the caller, who walks a chain with table_for_each(). Hashes of what clients choose are
 * keyed ones. A zeroed Table is empty.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct TableLink TableLink;
typedef struct Table Table;

struct TableLink {
	TableLink *next;
	uint64_t hash;
};

struct Table {
	TableLink **buckets;
	size_t n_buckets; /* a power of two, or 0 */
	size_t n;
};

/* spreads the bits of a number, for tables keyed by ids */
static inline uint64_t table_hash(uint64_t id) {
	id *= UINT64_C(0x9e3779b97f4a7c15);
	return id ^ id >> 32;
}

static inline TableLink *table_chain(const Table *table, uint64_t hash) {
	return table->n_buckets ? table->buckets[hash & (table->n_buckets - 1)] : NULL;
}

#define table_for_each(_link, _table, _hash)                                                \
	for (TableLink *_link = table_chain((_table), (_hash)); _link; _link = _link->next) \
		if (_link->hash == (_hash))

static inline bool table_resize(Table *table, size_t n_buckets) {
	TableLink **buckets = calloc(n_buckets, sizeof(*buckets));

	if (!buckets)
		return false;
	for (size_t i = 0; i < table->n_buckets; ++i) {
		for (TableLink *link = table->buckets[i], *next; link; link = next) {
			TableLink **bucket = &buckets[link->hash & (n_buckets - 1)];

			next = link->next;
			link->next = *bucket;
			*bucket = link;
		}
	}
	free(table->buckets);
	table->buckets = buckets;
	table->n_buckets = n_buckets;
	return true;
}

/* Returns false only when there is no memory for the first buckets. */
static inline bool table_insert(Table *table, TableLink *link, uint64_t hash) {
	if (table->n >= table->n_buckets && !table_resize(table, table->n_buckets ? table->n_buckets * 2 : 16) &&
	    !table->n_buckets)
		return false;
	link->hash = hash;
	link->next = table->buckets[hash & (table->n_buckets - 1)];
	table->buckets[hash & (table->n_buckets - 1)] = link;
	table->n++;
	return true;
}

static inline void table_remove(Table *table, TableLink *link) {
	TableLink **at;

	if (!table->n_buckets)
		return;
	for (at = &table->buckets[link->hash & (table->n_buckets - 1)]; *at; at = &(*at)->next) {
		if (*at == link) {
			*at = link->next;
			link->next = NULL;
			table->n--;
			return;
		}
	}
}

static inline void table_deinit(Table *table) {
	free(table->buckets);
	*table = (Table){};
}
