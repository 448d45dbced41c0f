/* SPDX-License-Identifier: Apache-2.0 */

#include "config-value.h"

#include <ctype.h>
#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#include "wire/fd.h"

#define NS_PER_MS UINT64_C(1000000)
#define NS_PER_S UINT64_C(1000000000)
#define WORD_MAX 64

typedef struct Unit {
	const char *name;
	uint64_t factor;
} Unit;

__attribute__((__format__(__printf__, 2, 3))) static int refuse(char *why, const char *format, ...) {
	va_list arguments;

	va_start(arguments, format);
	(void)vsnprintf(why, CONFIG_WHY_MAX, format, arguments);
	va_end(arguments);
	return CONFIG_E_INVALID;
}

/* ---- numbers ---- */

/* digits, in base 8 or 10; @ret_rest is what follows them. False without digits, or when they overflow. */
static bool parse_digits(const char *text, unsigned base, uint64_t *ret, const char **ret_rest) {
	uint64_t value = 0;
	const char *at = text;

	for (; *at >= '0' && *at < (char)('0' + base); ++at)
		if (__builtin_mul_overflow(value, base, &value) ||
		    __builtin_add_overflow(value, (uint64_t)(*at - '0'), &value))
			return false;
	*ret = value;
	*ret_rest = at;
	return at != text;
}

static bool is_within(uint64_t value, uint64_t min, uint64_t max) {
	return value >= min && (!max || value <= max);
}

static int parse_with_unit(const char *text, const Unit *units, size_t n_units, const char *say, uint64_t *ret,
			   char *why) {
	const char *rest;
	uint64_t value;

	if (!isdigit((unsigned char)*text))
		return refuse(why, "\"%s\" is not a number with a unit: %s", text, say);
	if (!parse_digits(text, 10, &value, &rest))
		return refuse(why, "\"%s\" is too large", text);
	if (!*rest && value)
		return refuse(why, "\"%s\" needs a unit: %s", text, say);
	if (*rest) {
		size_t i = 0;

		while (i < n_units && strcmp(rest, units[i].name))
			++i;
		if (i == n_units)
			return refuse(why, "\"%s\" has an unknown unit: %s are known", text, say);
		if (__builtin_mul_overflow(value, units[i].factor, &value))
			return refuse(why, "\"%s\" is too large", text);
	}
	*ret = value;
	return 0;
}

int config_value_count(const char *text, uint64_t min, uint64_t max, uint64_t *ret, char *why) {
	const char *rest;
	uint64_t value;

	if (!isdigit((unsigned char)*text))
		return refuse(why, "\"%s\" is not a number", text);
	if (!parse_digits(text, 10, &value, &rest))
		return refuse(why, "\"%s\" is too large", text);
	if (*rest)
		return refuse(why, "\"%s\" is not a plain number", text);
	if (!is_within(value, min, max))
		return refuse(why, "\"%s\" is out of range: %llu to %llu", text, (unsigned long long)min,
			      (unsigned long long)max);
	*ret = value;
	return 0;
}

int config_value_size(const char *text, uint64_t min, uint64_t max, uint64_t *ret, char *why) {
	static const Unit units[] = { { "K", 1 << 10 }, { "M", 1 << 20 }, { "G", 1 << 30 } };
	uint64_t value;
	int r;

	r = parse_with_unit(text, units, sizeof(units) / sizeof(*units), "K, M, G", &value, why);
	if (r)
		return r;
	if (!is_within(value, min, max))
		return refuse(why, "\"%s\" is out of range: %lluK to %lluK", text, (unsigned long long)min >> 10,
			      (unsigned long long)max >> 10);
	*ret = value;
	return 0;
}

int config_value_duration(const char *text, uint64_t min, uint64_t max, uint64_t *ret, char *why) {
	static const Unit units[] = { { "ms", NS_PER_MS }, { "s", NS_PER_S }, { "min", 60 * NS_PER_S } };
	uint64_t value;
	int r;

	r = parse_with_unit(text, units, sizeof(units) / sizeof(*units), "ms, s, min", &value, why);
	if (r)
		return r;
	if (!is_within(value, min, max))
		return refuse(why, "\"%s\" is out of range: %llums to %llus", text,
			      (unsigned long long)(min / NS_PER_MS), (unsigned long long)(max / NS_PER_S));
	*ret = value;
	return 0;
}

int config_value_mode(const char *text, uint32_t max, uint32_t *ret, char *why) {
	const char *rest;
	uint64_t value;

	if (!parse_digits(text, 8, &value, &rest) || *rest)
		return refuse(why, "\"%s\" is not a mode in octal digits", text);
	if (value > max)
		return refuse(why, "\"%s\" is out of range: at most %04o", text, max);
	*ret = (uint32_t)value;
	return 0;
}

/* ---- words ---- */

int config_value_bool(const char *text, bool *ret, char *why) {
	static const char *const words[] = { "no", "yes", "false", "true", "off", "on", "0", "1" };
	size_t i;

	if (config_value_word(text, words, sizeof(words) / sizeof(*words), &i, why))
		return refuse(why, "\"%s\" is neither yes nor no", text);
	*ret = i % 2;
	return 0;
}

int config_value_word(const char *text, const char *const *words, size_t n_words, size_t *ret, char *why) {
	size_t n;

	for (size_t i = 0; i < n_words; ++i) {
		if (!strcmp(text, words[i])) {
			*ret = i;
			return 0;
		}
	}
	(void)refuse(why, "\"%s\" is not one of:", text);
	for (size_t i = 0; i < n_words; ++i) {
		n = strlen(why);
		(void)snprintf(why + n, CONFIG_WHY_MAX - n, "%s %s", i ? "," : "", words[i]);
	}
	return CONFIG_E_INVALID;
}

/* ---- users and groups ---- */

/* true when @text is a number, which may still be no id */
static bool parse_id(const char *text, uint32_t *ret, bool *ret_valid) {
	const char *rest;
	uint64_t value = 0;

	if (!isdigit((unsigned char)*text) || text[strspn(text, "0123456789")])
		return false;
	*ret_valid = parse_digits(text, 10, &value, &rest) && value < CONFIG_NO_ID;
	*ret = (uint32_t)value;
	return true;
}

static int find_user(const char *text, uint32_t *ret, char *why) {
	const struct passwd *user;
	bool valid;

	if (parse_id(text, ret, &valid))
		return valid ? 0 : refuse(why, "\"%s\" is not a uid", text);
	user = getpwnam(text);
	if (!user)
		return refuse(why, "unknown user \"%s\"", text);
	*ret = user->pw_uid;
	return 0;
}

static int find_group(const char *text, uint32_t *ret, char *why) {
	const struct group *group;
	bool valid;

	if (parse_id(text, ret, &valid))
		return valid ? 0 : refuse(why, "\"%s\" is not a gid", text);
	group = getgrnam(text);
	if (!group)
		return refuse(why, "unknown group \"%s\"", text);
	*ret = group->gr_gid;
	return 0;
}

int config_value_group(const char *text, uint32_t *ret, char *why) {
	if (!*text) {
		*ret = CONFIG_NO_ID;
		return 0;
	}
	return find_group(text, ret, why);
}

static int append_id(uint32_t **ids, size_t *n, uint32_t id) {
	uint32_t *grown = reallocarray(*ids, *n + 1, sizeof(**ids));

	if (!grown)
		return -ENOMEM;
	*ids = grown;
	grown[(*n)++] = id;
	return 0;
}

int config_value_ids(const char *text, IdList *list, char *why) {
	while (*(text += strspn(text, " \t,"))) {
		_cleanup_(freep) char *word = strndup(text, strcspn(text, " \t,"));
		uint32_t id;
		int r;

		if (!word)
			return -ENOMEM;
		text += strlen(word);
		if (*word == '@')
			r = find_group(word + 1, &id, why) ?: append_id(&list->gids, &list->n_gids, id);
		else
			r = find_user(word, &id, why) ?: append_id(&list->uids, &list->n_uids, id);
		if (r)
			return r;
	}
	return 0;
}

void id_list_clear(IdList *list) {
	free(list->uids);
	free(list->gids);
	*list = (IdList){};
}

int config_value_reserve(const char *text, ReservationList *list, char *why) {
	_cleanup_(freep) char *prefix = NULL;
	size_t end = strlen(text), start;
	Reservation *grown;
	uint32_t uid;
	int r;

	for (start = end; start && !isspace((unsigned char)text[start - 1]); --start)
		;
	for (end = start; end && isspace((unsigned char)text[end - 1]); --end)
		;
	if (!end)
		return refuse(why, "\"%s\" is not PREFIX USER", text);
	r = find_user(text + start, &uid, why);
	if (r)
		return r;
	prefix = strndup(text, end);
	grown = prefix ? reallocarray(list->items, list->n + 1, sizeof(*grown)) : NULL;
	if (!grown)
		return -ENOMEM;
	list->items = grown;
	grown[list->n++] = (Reservation){ .prefix = steal_ptr(prefix), .uid = uid };
	return 0;
}

void reservation_list_clear(ReservationList *list) {
	for (size_t i = 0; i < list->n; ++i)
		free(list->items[i].prefix);
	free(list->items);
	*list = (ReservationList){};
}

/* ---- paths ---- */

int config_value_text(const char *text, char **field) {
	char *copy = strdup(text);

	if (!copy)
		return -ENOMEM;
	free(*field);
	*field = copy;
	return 0;
}

int config_value_path(const char *text, StringList *list, char *why) {
	_cleanup_(freep) char *path = NULL;
	char **grown;

	if (*text != '/')
		return refuse(why, "\"%s\" is not an absolute path", text);
	if (strlen(text) >= sizeof(((struct sockaddr_un *)NULL)->sun_path))
		return refuse(why, "\"%.40s...\" is too long for a socket", text);
	path = strdup(text);
	grown = path ? reallocarray(list->items, list->n + 1, sizeof(*grown)) : NULL;
	if (!grown)
		return -ENOMEM;
	list->items = grown;
	grown[list->n++] = steal_ptr(path);
	return 0;
}

void string_list_clear(StringList *list) {
	for (size_t i = 0; i < list->n; ++i)
		free(list->items[i]);
	free(list->items);
	*list = (StringList){};
}

/* ---- typing errors ---- */

static size_t min3(size_t a, size_t b, size_t c) {
	size_t least = a < b ? a : b;

	return least < c ? least : c;
}

size_t config_word_distance(const char *a, const char *b) {
	size_t n_a = strnlen(a, WORD_MAX), n_b = strnlen(b, WORD_MAX), row[WORD_MAX + 1];

	for (size_t j = 0; j <= n_b; ++j)
		row[j] = j;
	for (size_t i = 1; i <= n_a; ++i) {
		size_t diagonal = row[0];

		row[0] = i;
		for (size_t j = 1; j <= n_b; ++j) {
			size_t above = row[j];

			row[j] = min3(above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1]));
			diagonal = above;
		}
	}
	return row[n_b];
}
