/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Closer: closes fds that came from clients on threads of its own, because a close can block for ever (a FUSE
 * flush, a TCP socket with SO_LINGER, the last reference to a big object).
 *
 * The closes of one uid are done in order, and one that is stuck holds up nobody else's: when it lasts longer
 * than CLOSER_STUCK_MS another thread takes over, up to CLOSER_THREADS_MAX. closer_pending() tells how many
 * fds of a uid wait; the owner's rights of such a uid are suspended by the caller.
 * All functions are for the loop's thread. closer_free() lets the threads finish what does not block and abandons
 * those that are stuck, with the fds that wait behind them; what they share with it is freed by the last of them.
 */

#include <stddef.h>
#include <stdint.h>

#define CLOSER_STUCK_MS 200
#define CLOSER_THREADS_MAX 32

typedef struct Closer Closer;

/* what the threads close with; only tests set it, before any Closer exists, to have a close that is stuck */
extern int (*closer_close_fn)(int fd);
/* the clock that tells how long a close takes, in nanoseconds; only tests set it, as above */
extern uint64_t (*closer_now_fn)(void);

/* Starts the first thread. Returns 0 or -errno. */
int closer_new(Closer **ret);
Closer *closer_free(Closer *closer);
/* Closes @fd some time. Consumes @fd, cannot fail (without memory it closes here). Negative fds are ignored. */
void closer_close(Closer *closer, uint32_t uid, int fd);
/* fds of @uid that wait to be closed, the one being closed included */
size_t closer_pending(Closer *closer, uint32_t uid);
/* fds that wait in all */
size_t closer_total(Closer *closer);
/*
 * Starts further threads where one is stuck; called by a timer of the loop while closer_total() is not 0.
 * For each uid newly found stuck calls @on_stuck (may be NULL) once with the fd's number and how long it takes.
 */
void closer_check(Closer *closer, void (*on_stuck)(void *userdata, uint32_t uid, int fd, uint64_t ms), void *userdata);
