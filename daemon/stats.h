/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stats: the numbers that STATS and INFO show. Counters only grow; gauges are what is held now.
 */

#include <stdbool.h>
#include <stdint.h>

typedef struct Broker Broker;
typedef struct Session Session;

typedef struct Stat {
	const char *name;
	const char *help; /* "" unless asked for */
	uint64_t value;
	uint32_t uid; /* WIRE_ANY_UID for the whole broker */
	uint8_t type; /* WIRE_STAT_* */
} Stat;

/*
 * Hands the numbers that @session may see to @each, from @cursor on, until it returns false. Returns how many were
 * taken; @ret_next is the cursor of the first that was not, 0 at the end.
 */
uint32_t stats_each(Session *session, uint64_t cursor, bool help, bool accounts, uint64_t *ret_next,
		    bool (*each)(void *userdata, const Stat *stat), void *userdata);
/* keys and values that say what this broker is */
void stats_info(const Broker *broker, void (*each)(void *userdata, const char *key, const char *value), void *userdata);
