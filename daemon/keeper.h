/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Keeper: parks fds outside the process, so that the next broker has them: with the service manager or the
 * supervisor, whichever holds fds for us (notify.h).
 *
 * A store entry for each region does not scale, so fds are parked in bundles: messages in the receive queue of a
 * socket pair, a Segment, of which only the receiving end is stored. A message is there for the next process once
 * sendmsg() has returned. Its records say what each fd is, by ids that are never used again; recovery reads with
 * MSG_PEEK, which consumes nothing. A record whose object is gone is dead, and so are its fds' pages, pinned, until
 * its segment is compacted: the live ones are parked again in the current segment, then the old one is removed from
 * the store. A spare segment is always stored beforehand, because the manager may be slow and we do not wait.
 *
 * Invariant: a KeeperEntry with a segment is parked there. Without a holder nothing is parked and all calls succeed.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "closer.h"
#include "list.h"
#include "loop.h"

#define KEEPER_REGISTRY "shmb-registry"
#define KEEPER_LEDGER "shmb-ledger"
#define KEEPER_SEGMENT "shmb-s" /* and a number */
#define KEEPER_LISTENER "shmb-listen-"
#define KEEPER_ASIDE "shmb-aside-"
#define KEEPER_SEGMENT_MESSAGES 250
#define KEEPER_SEGMENT_FEW 64 /* live entries that are no reason to keep a segment that takes no more */
#define KEEPER_BATCH_MAX 64
#define KEEPER_DEAD_MAX (UINT64_C(64) << 20) /* bytes that dead entries of a segment may pin */
#define KEEPER_DEAD_NS UINT64_C(30000000000) /* and for how long: memory may grow once it is dead */

typedef struct Keeper Keeper;
typedef struct KeeperEntry KeeperEntry;
typedef struct Segment Segment;

/* what a record is; the numbers are kept by other processes */
enum {
	KEEPER_OBJECT = 1, /* fd of the memory, then its read-only fd if there is one; id of the object */
	KEEPER_PIDFD = 2,  /* id of the session */
	KEEPER_PAGE = 3,   /* lease page; id of the session */
};

struct KeeperEntry {
	Segment *segment; /* NULL while it is not parked */
	ListLink link;
	uint64_t id;
	int fds[2]; /* borrowed: as long as the entry is parked they stay open */
	uint16_t kind;
	uint16_t n_fds;
};

struct Keeper {
	bool enabled; /* somebody holds fds for us */
	bool frozen;  /* the broker stops: nothing changes any more */
	bool full;    /* the holder has taken no further segment; tried again by the timer */
	Loop *loop;
	Closer *closer;
	uint64_t *last_segment; /* in the ledger */
	Segment *current;
	Segment *spare;
	List segments; /* Segment.link, the current and the spare one included */
	List waste;    /* Segment.waste_link: to be compacted, or waiting for the barrier */
	LoopTimer timer;
	LoopTimer dead_timer;
	uint64_t n_parked; /* entries */
	uint64_t n_compacted;
};

/* Borrows @loop and @closer; @last_segment is where the last number of a segment is kept. */
void keeper_init(Keeper *keeper, Loop *loop, Closer *closer, uint64_t *last_segment);
/*
 * Makes the first segments and makes sure that the holder keeps them, waiting for it. Returns 0, or -errno after
 * which nothing is parked: -ENOSPC when the holder does not keep what it is sent.
 */
int keeper_start(Keeper *keeper);
/* Segments stay where they are. */
void keeper_deinit(Keeper *keeper);

/*
 * Parks up to KEEPER_BATCH_MAX entries whose id, fds and kind are filled in, as one message. Returns 0; -ENOSPC (the
 * holder keeps no more), -EAGAIN (it has not answered yet), -ETOOMANYREFS (the kernel holds no more fds in flight for
 * this user), -ENOMEM: then none is parked.
 */
int keeper_park(Keeper *keeper, KeeperEntry *const *entries, size_t n);
/* a sentence for what keeper_park() returned */
const char *keeper_why(int error);
/*
 * @entry's object is gone, with @bytes of memory. Consumes its fds, which are closed by the closer for @uid: at once,
 * or when its segment is gone, so that nobody else frees a lot of memory. An entry that is not parked is fine.
 */
void keeper_drop(Keeper *keeper, KeeperEntry *entry, uint32_t uid, uint64_t bytes);
/* end of turn: makes a spare segment, compacts what needs it */
void keeper_turn(Keeper *keeper);

/*
 * Reads segment @number from its receiving end, without consuming anything. For each record @take gets its kind, id
 * and fds: it keeps the fds and returns the entry that they belong to, or returns NULL, and they are closed. Consumes
 * @fd. Returns 0, -EMFILE when not all fds could be received, -EBADMSG for what is not ours, -errno.
 */
typedef KeeperEntry *(*KeeperTake)(void *userdata, uint32_t kind, uint64_t id, int *fds, size_t n_fds);
int keeper_read(Keeper *keeper, uint64_t number, int fd, KeeperTake take, void *userdata);
