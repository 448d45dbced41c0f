/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * FdStore: the file descriptors that a supervisor keeps for the broker, by name, several under one name. An entry
 * stays until it is removed; what is behind it is nobody's business here. The whole store can be taken through an
 * exec: fdstore_save() before, fdstore_load() after it.
 */

#include <stdbool.h>
#include <stddef.h>

#include "notify.h"

#define FDSTORE_MAX 4096

typedef struct FdStore {
	NotifyFds fds;
	bool full; /* the last entry was refused; reset when one is removed */
} FdStore;

/* closes all */
void fdstore_deinit(FdStore *store);
/* Consumes @fd. Returns 0, -ENOSPC at FDSTORE_MAX entries, or -ENOMEM. */
int fdstore_add(FdStore *store, const char *name, int fd);
/* closes all entries of this name */
void fdstore_remove(FdStore *store, const char *name);

/*
 * Makes all entries survive exec, and an inherited file that says which they are; the environment of this process
 * says where it is. Returns the file's fd or -errno.
 */
int fdstore_save(const FdStore *store);
/* Undoes that, when there was no exec. */
void fdstore_unsave(const FdStore *store, int fd);
/* Takes over what this very process saved before its exec. Returns 1, 0 when it saved nothing, or -errno. */
int fdstore_load(FdStore *store);
