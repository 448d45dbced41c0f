/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Baseline: the table that servers have in their own process, a std::map of names to std::shared_ptr under one
 * std::mutex. A lease is a copy of the std::shared_ptr. Names are std::string objects of the callers, as in a server
 * whose requests bring them.
 *
 * It means something only where a second thread is alive: libstdc++ counts without atomics until there is one.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Baseline Baseline;
typedef struct BaselineName BaselineName;

typedef struct BaselineLease {
	void *address;
	int32_t memory_type;
	int64_t device;
	uint64_t internal[2];
} BaselineLease;

/* whether the compiler was told to optimise it: a ratio to anything else is worth nothing */
bool baseline_is_optimized(void);

/* an empty table, and room for the @n names of its callers; NULL when memory is short, as false below */
Baseline *baseline_new(size_t n);
Baseline *baseline_free(Baseline *baseline);
/* the next name that callers have, and the i-th of them with its characters */
bool baseline_add_name(Baseline *baseline, const char *name);
const BaselineName *baseline_name(const Baseline *baseline, size_t i);
const char *baseline_name_text(const BaselineName *name);
/* @size bytes at @base; false also when the name exists */
bool baseline_register(Baseline *baseline, const BaselineName *name, void *base, uint64_t size);

/* false when there is no such region, or not that range in it */
bool baseline_get_memory_info(Baseline *baseline, const BaselineName *name, uint64_t offset, uint64_t size,
			      BaselineLease *ret);
void baseline_release(BaselineLease *lease);

#ifdef __cplusplus
}
#endif
