/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Regions: many of them in few pieces of memory, through the client library, and what a benchmark asks a broker
 * between its samples. Whatever fails here ends the process.
 *
 * Regions have consecutive numbers and are named by them. Each call of regions_add() makes one sealed memfd with all
 * its pages, whose windows the new regions are.
 */

#include <stdint.h>

#include "bench.h"
#include "shmbroker.h"

#define REGIONS_AT_ONCE SHMB_BATCH_MAX
#define REGION_NAME_SIZE 32

typedef struct Regions {
	struct shmb_client *owner;
	uint64_t size;	 /* of a window */
	uint64_t stride; /* from one window to the next; less than @size: they overlap */
	struct shmb_region **regions;
	uint32_t n;
	uint32_t capacity;
} Regions;

void regions_init(Regions *ret, struct shmb_client *owner, uint64_t size, uint64_t stride);
/* registers @n more, at most REGIONS_AT_ONCE, in one message; returns the nanoseconds of that call alone */
uint64_t regions_add(Regions *regions, uint32_t n);
/* frees what the owner has of them; those that were not retired by then are retired one by one */
void regions_deinit(Regions *regions);
void region_name(uint32_t number, char ret[REGION_NAME_SIZE]);
/* a lease for reading on the whole of a region, given back at once */
void region_acquire(struct shmb_client *client, const char *name);

/* dies with @what and the library's sentence unless @r is 0 */
void check(int r, const char *what);
struct shmb_client *client_new(const Broker *broker, uint32_t roles, uint32_t flags);
/* one of the broker's numbers */
uint64_t client_stat(struct shmb_client *client, const char *name);
