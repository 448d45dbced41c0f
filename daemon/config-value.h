/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The values of options, as text and as what they mean. Every function returns 0, CONFIG_E_INVALID with a sentence in
 * @why (CONFIG_WHY_MAX bytes), or -ENOMEM; outputs are written on 0 only, except that lists are appended to.
 */

#include "config.h"

#define CONFIG_WHY_MAX 256

/* yes, no, true, false, on, off, 1, 0 */
int config_value_bool(const char *text, bool *ret, char *why);
/* a plain number from @min to @max */
int config_value_count(const char *text, uint64_t min, uint64_t max, uint64_t *ret, char *why);
/* bytes, with K, M or G (1024) */
int config_value_size(const char *text, uint64_t min, uint64_t max, uint64_t *ret, char *why);
/* a time with ms, s or min, in nanoseconds */
int config_value_duration(const char *text, uint64_t min, uint64_t max, uint64_t *ret, char *why);
/* octal digits */
int config_value_mode(const char *text, uint32_t max, uint32_t *ret, char *why);
/* one of @n_words words; @ret is its index */
int config_value_word(const char *text, const char *const *words, size_t n_words, size_t *ret, char *why);
/* a group by name or number; CONFIG_NO_ID for the empty text */
int config_value_group(const char *text, uint32_t *ret, char *why);

/* any text; takes the place of @field's, which is freed. Returns 0 or -ENOMEM. */
int config_value_text(const char *text, char **field);
/* an absolute path that fits into a socket's address */
int config_value_path(const char *text, StringList *list, char *why);
/* users and @groups, by name or number, separated by blanks or commas */
int config_value_ids(const char *text, IdList *list, char *why);
/* PREFIX USER */
int config_value_reserve(const char *text, ReservationList *list, char *why);

void string_list_clear(StringList *list);
void id_list_clear(IdList *list);
void reservation_list_clear(ReservationList *list);

/* the least number of letters to insert, delete or replace to make one word of the other */
size_t config_word_distance(const char *a, const char *b);
