/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Key: from the name of POSIX shared memory to an fd, without lending anybody a right that is not theirs.
 *
 * By default only memory of the gateway's own uid is opened, and for a caller at a Unix socket only memory of that
 * caller's uid (root may name any). With --key-owners also memory of those uids is opened, by a child that has been forked
 * before the privileges were dropped: it has CAP_DAC_OVERRIDE and nothing else, and does nothing else.
 *
 * Only regular files of the tmpfs at /dev/shm are opened, never through a link, and by names of a single part.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "access.h"

typedef struct KeyOpener KeyOpener;

/*
 * @owners: what --key-owners says, @prefix: --key-prefix; "" for none; both borrowed. To be called early: with @owners it
 * forks, and then drops all capabilities of this process for good. Returns 0; -EINVAL (@owners is malformed), -EPERM (there
 * is no CAP_DAC_OVERRIDE), another negative errno; all logged.
 */
int key_opener_new(KeyOpener **ret, const char *owners, const char *prefix);
/* False once the child has been found to have ended: nothing is opened any more. */
bool key_opener_works(const KeyOpener *opener);
/* Ends the child, too. NULL is fine. */
KeyOpener *key_opener_free(KeyOpener *opener);

/*
 * Opens the memory called @key, without its leading slashes and terminated, for reading and writing, for @caller. Returns
 * 0 with @ret_fd, which becomes the caller's, or a negative errno; the log says why.
 */
int key_open(KeyOpener *opener, const Caller *caller, const char *key, int *ret_fd);
