/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Config: the options of options.def as they were read at one time. Never changed once it is loaded; a reload makes
 * another one and frees this one. Names of users and groups are ids already.
 *
 * Read are shmbroker.conf in the configuration directory, then the files *.conf of the directories shmbroker.conf.d
 * beside it and in the vendor's directory, together by name; a file of the administrator masks one of the vendor with
 * the same name. What is read later wins; lists add up, and an empty value empties a list. An error anywhere refuses
 * all of it: a typing error never makes a broker that is laxer than was meant.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "account.h"

typedef struct Config Config;

#define CONFIG_UNLIMITED ACCOUNT_UNLIMITED
#define CONFIG_NO_ID UINT32_MAX
#define CONFIG_LINE_MAX 199 /* bytes of a line, newline included; inih would cut longer ones silently */

enum {
	_CONFIG_E_SUCCESS,
	CONFIG_E_INVALID,
};

typedef struct ConfigPaths {
	const char *file; /* this file alone, NULL for all of them */
	const char *root; /* put before the directories, NULL for none */
} ConfigPaths;

typedef struct StringList {
	char **items;
	size_t n;
} StringList;

typedef struct IdList {
	uint32_t *uids;
	size_t n_uids;
	uint32_t *gids;
	size_t n_gids;
} IdList;

typedef struct Reservation {
	char *prefix;
	uint32_t uid;
} Reservation;

typedef struct ReservationList {
	Reservation *items;
	size_t n;
} ReservationList;

/* what the TYPEs of options.def are in C */
#define CONFIG_TYPE_BOOL bool
#define CONFIG_TYPE_COUNT uint32_t
#define CONFIG_TYPE_COUNT_QUOTA uint64_t /* CONFIG_UNLIMITED for none */
#define CONFIG_TYPE_SIZE uint64_t	 /* bytes */
#define CONFIG_TYPE_SIZE_QUOTA uint64_t
#define CONFIG_TYPE_DURATION uint64_t /* nanoseconds */
#define CONFIG_TYPE_MODE uint32_t
#define CONFIG_TYPE_GROUP uint32_t /* CONFIG_NO_ID for none */
#define CONFIG_TYPE_LOOP int	   /* LOOP_AUTO, LOOP_IO_URING, LOOP_EPOLL */
#define CONFIG_TYPE_SPIN int	   /* SPIN_AUTO, SPIN_NO, SPIN_YES */
#define CONFIG_TYPE_UNSEALED bool  /* accept? */
#define CONFIG_TYPE_CUDA int	   /* CUDA_AUTO, ... of cuda.h */
#define CONFIG_TYPE_TEXT char *	   /* never NULL, may be empty */
#define CONFIG_TYPE_PATHS StringList
#define CONFIG_TYPE_IDS IdList
#define CONFIG_TYPE_RESERVE ReservationList

struct Config {
#define OPTION(_section, _key, _type, _field, _default, _list, _min, _max, _meaning) CONFIG_TYPE_##_type _field;
#include "options.def"
#undef OPTION
};

/*
 * Reads the configuration. Returns 0 and @ret; CONFIG_E_INVALID when it is refused; or -errno when a file cannot be
 * read (-ENOMEM without memory). Unless 0 is returned, @ret_error is a sentence ("FILE:LINE: what is wrong"), which
 * the caller frees; NULL without memory.
 */
int config_load(Config **ret, const ConfigPaths *paths, char **ret_error);
Config *config_free(Config *config);

/* Is a user with these groups in @list? An empty list has nobody in it. */
bool config_access_matches(const IdList *list, uint32_t uid, uint32_t gid, const uint32_t *groups, size_t n_groups);
static inline bool config_id_list_is_empty(const IdList *list) {
	return list->n_uids + list->n_gids == 0;
}

/* Takes the words of --loop. Returns LOOP_* or -EINVAL. */
int config_parse_loop(const char *text);
/* Writes "section key default" of every option, a line each. */
void config_dump_options(FILE *file);
