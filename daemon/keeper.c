/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "keeper.h"
#include "kill-point.h"
#include "log.h"
#include "notify.h"
#include "wire/compat.h"
#include "wire/fd.h"

#define MAGIC UINT32_C(0x6b706d73) /* "smpk" */
#define RETRY_NS UINT64_C(10000000)
#define FULL_RETRY_NS UINT64_C(1000000000)
#define START_MS 5000

/* a message: a head, then as many records, whose fds follow each other in the control data */
typedef struct RecordHead {
	uint32_t magic;
	uint32_t n;
} RecordHead;

typedef struct Record {
	uint16_t kind;
	uint16_t n_fds;
	uint32_t reserved;
	uint64_t id;
} Record;

typedef struct Message {
	RecordHead head;
	Record records[KEEPER_BATCH_MAX];
} Message;

/* an fd of a dead entry that is closed when nobody else has the memory any more */
typedef struct Held {
	uint32_t uid;
	int fd;
} Held;

struct Segment {
	Keeper *keeper;
	ListLink link;
	uint64_t number;
	int write_fd; /* -EBADF for one of an earlier process, which takes no more */
	uint32_t n_messages;
	uint32_t n_entries; /* dead ones included */
	uint32_t n_live;
	uint64_t dead_bytes;
	uint64_t dead_ns;      /* until when what is dead may stay, 0 while there is no dead memory */
	List live;	       /* KeeperEntry.link */
	ListLink waste_link;   /* in Keeper.waste: wants compaction */
	bool is_removed;       /* from the store: waits for the barrier */
	LoopPoll barrier_poll; /* .fd -EBADF while there is none */
	Held *held;
	size_t n_held;
};

static void on_dead_time(LoopTimer *timer);

void keeper_init(Keeper *keeper, Loop *loop, Closer *closer, uint64_t *last_segment) {
	*keeper = (Keeper){
		.enabled = notify_has_store(),
		.loop = loop,
		.closer = closer,
		.last_segment = last_segment,
		.dead_timer.on_time = on_dead_time,
	};
	list_init(&keeper->segments);
	list_init(&keeper->waste);
}

static void segment_name(uint64_t number, char *ret, size_t size) {
	(void)snprintf(ret, size, KEEPER_SEGMENT "%" PRIu64, number);
}

static Segment *segment_alloc(Keeper *keeper, uint64_t number) {
	Segment *segment = calloc(1, sizeof(*segment));

	if (!segment)
		return NULL;
	segment->keeper = keeper;
	segment->number = number;
	segment->write_fd = -EBADF;
	segment->barrier_poll.fd = -EBADF;
	list_init(&segment->live);
	list_append(&keeper->segments, &segment->link);
	return segment;
}

static Segment *segment_free(Segment *segment) {
	Keeper *keeper = segment->keeper;

	list_remove(&segment->link);
	list_remove(&segment->waste_link);
	if (keeper->current == segment)
		keeper->current = NULL;
	if (keeper->spare == segment)
		keeper->spare = NULL;
	for (ListLink *link; (link = list_first(&segment->live));) {
		list_remove(link);
		container_of(link, KeeperEntry, link)->segment = NULL;
	}
	loop_poll_unlink(&segment->barrier_poll);
	(void)close_fd(segment->barrier_poll.fd);
	(void)close_fd(segment->write_fd);
	for (size_t i = 0; i < segment->n_held; ++i)
		closer_close(keeper->closer, segment->held[i].uid, segment->held[i].fd);
	free(segment->held);
	free(segment);
	return NULL;
}

/* the name is never used again, so that a removal never hits another segment */
static int segment_new(Segment **ret, Keeper *keeper) {
	_cleanup_(closep) int read_fd = -EBADF, write_fd = -EBADF;
	Segment *segment;
	char name[64];
	int pair[2], r;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	read_fd = pair[0];
	write_fd = pair[1];
	kill_point();
	segment_name(++*keeper->last_segment, name, sizeof(name));
	r = notify_store(name, &read_fd, 1);
	kill_point();
	if (r)
		return r;
	segment = segment_alloc(keeper, *keeper->last_segment);
	if (!segment)
		return -ENOMEM;
	segment->write_fd = steal_fd(&write_fd);
	*ret = segment;
	return 0;
}

/* the holder has closed its end: it never took it */
static bool segment_is_refused(const Segment *segment) {
	struct pollfd poll_fd = { .fd = segment->write_fd, .events = POLLOUT };

	return poll(&poll_fd, 1, 0) > 0 && poll_fd.revents & (POLLHUP | POLLERR);
}

static void keeper_retry(Keeper *keeper, uint64_t after_ns) {
	if (!keeper->timer.at_ns)
		loop_timer_set(keeper->loop, &keeper->timer, loop_now(keeper->loop) + after_ns);
}

static void on_timer(LoopTimer *timer) {
	/* on_turn() follows every timer */
	(void)timer;
}

/* beforehand, because the holder may be slow to take it */
static void keeper_make_spare(Keeper *keeper) {
	if (keeper->spare || (keeper->full && keeper->timer.at_ns))
		return;
	if (segment_new(&keeper->spare, keeper))
		keeper_retry(keeper, RETRY_NS);
}

static bool segment_is_waste(const Segment *segment) {
	bool is_open = segment == segment->keeper->current || segment == segment->keeper->spare;

	return segment->dead_bytes > KEEPER_DEAD_MAX ||
	       (segment->dead_ns && segment->dead_ns <= loop_now(segment->keeper->loop)) ||
	       (!is_open && (segment->n_live * 2 < segment->n_entries || segment->n_live < KEEPER_SEGMENT_FEW));
}

/* true when it is to be compacted */
static bool segment_judge(Segment *segment) {
	if (!list_is_linked(&segment->waste_link) && segment_is_waste(segment))
		list_append(&segment->keeper->waste, &segment->waste_link);
	return list_is_linked(&segment->waste_link);
}

static void on_dead_time(LoopTimer *timer) {
	Keeper *keeper = container_of(timer, Keeper, dead_timer);
	uint64_t next = UINT64_MAX;

	list_for_each (link, &keeper->segments) {
		Segment *segment = container_of(link, Segment, link);

		if (segment->dead_ns && !segment_judge(segment) && segment->dead_ns < next)
			next = segment->dead_ns;
	}
	/* on_turn() follows, which compacts */
	if (next != UINT64_MAX)
		loop_timer_set(keeper->loop, &keeper->dead_timer, next);
}

/* its owner may let it grow still, and nothing tells */
static void segment_has_dead(Segment *segment, uint32_t kind) {
	Keeper *keeper = segment->keeper;

	if (kind != KEEPER_OBJECT || segment->dead_ns)
		return;
	segment->dead_ns = loop_now(keeper->loop) + KEEPER_DEAD_NS;
	if (!keeper->dead_timer.at_ns)
		loop_timer_set(keeper->loop, &keeper->dead_timer, segment->dead_ns);
}

/* a segment that takes messages; NULL when there is none now */
static Segment *keeper_rotate(Keeper *keeper) {
	Segment *old = keeper->current;

	if (!keeper->spare)
		return NULL;
	if (segment_is_refused(keeper->spare)) {
		keeper->spare = segment_free(keeper->spare);
		if (!keeper->full)
			log_write(LOG_KEEPER_FULL, LOG_NO_UID, NULL,
				  "the holder of fds takes no more of them (FileDescriptorStoreMax=?): what needs "
				  "room is refused");
		keeper->full = true;
		keeper_retry(keeper, FULL_RETRY_NS);
		return NULL;
	}
	keeper->full = false;
	keeper->current = keeper->spare;
	keeper->spare = NULL;
	/* it takes no more: one that was never stored has nothing in it either */
	if (old)
		(void)segment_judge(old);
	keeper_make_spare(keeper);
	return keeper->current;
}

static bool wait_for(int fd, int timeout_ms) {
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };

	return poll(&poll_fd, 1, timeout_ms) > 0;
}

int keeper_start(Keeper *keeper) {
	_cleanup_(closep) int barrier = -EBADF;
	int r;

	keeper->timer.on_time = on_timer;
	if (!keeper->enabled)
		return 0;
	r = segment_new(&keeper->current, keeper);
	if (!r)
		r = segment_new(&keeper->spare, keeper);
	if (!r)
		r = notify_barrier(&barrier);
	if (!r && !wait_for(barrier, START_MS))
		r = -ETIMEDOUT;
	if (!r && (segment_is_refused(keeper->current) || segment_is_refused(keeper->spare)))
		r = -ENOSPC;
	return r;
}

void keeper_deinit(Keeper *keeper) {
	if (!keeper->loop)
		return;
	loop_timer_unlink(&keeper->timer);
	loop_timer_unlink(&keeper->dead_timer);
	for (ListLink *link; (link = list_first(&keeper->segments));)
		segment_free(container_of(link, Segment, link));
	keeper->enabled = false;
}

/* ---- parking ---- */

static int segment_send(Segment *segment, KeeperEntry *const *entries, size_t n) {
	Message message = { .head = { .magic = MAGIC, .n = (uint32_t)n } };
	int fds[KEEPER_BATCH_MAX * 2], r;
	size_t n_fds = 0;

	for (size_t i = 0; i < n; ++i) {
		message.records[i] =
			(Record){ .kind = entries[i]->kind, .n_fds = entries[i]->n_fds, .id = entries[i]->id };
		for (size_t j = 0; j < entries[i]->n_fds; ++j)
			fds[n_fds++] = entries[i]->fds[j];
	}
	kill_point();
	r = fd_send(segment->write_fd, &message, sizeof(message.head) + n * sizeof(message.records[0]), fds, n_fds,
		    MSG_DONTWAIT);
	kill_point();
	if (r)
		return r;
	segment->n_messages++;
	segment->n_entries += (uint32_t)n;
	segment->n_live += (uint32_t)n;
	return 0;
}

/* in the current segment, or in the next one */
static int keeper_send(Keeper *keeper, KeeperEntry *const *entries, size_t n) {
	Segment *segment = keeper->current;
	int r = -EAGAIN;

	if (segment && segment->n_messages < KEEPER_SEGMENT_MESSAGES)
		r = segment_send(segment, entries, n);
	if (r != -EAGAIN && r != -EPIPE && r != -ECONNRESET)
		return r;
	segment = keeper_rotate(keeper);
	if (!segment)
		return keeper->full ? -ENOSPC : -EAGAIN;
	r = segment_send(segment, entries, n);
	return r == -EPIPE || r == -ECONNRESET ? -ENOSPC : r;
}

static void entry_link(KeeperEntry *entry, Segment *segment) {
	list_remove(&entry->link);
	entry->segment = segment;
	list_append(&segment->live, &entry->link);
}

int keeper_park(Keeper *keeper, KeeperEntry *const *entries, size_t n) {
	int r;

	if (!keeper->enabled || !n)
		return 0;
	r = keeper_send(keeper, entries, n);
	if (r)
		return r;
	for (size_t i = 0; i < n; ++i)
		entry_link(entries[i], keeper->current);
	keeper->n_parked += n;
	return 0;
}

const char *keeper_why(int error) {
	switch (error) {
	case -ENOSPC:
		return "the service manager, or the supervisor, keeps no more fds for the broker";
	case -EAGAIN:
		return "the service manager, or the supervisor, has not yet taken the broker's fds: try again";
	case -ETOOMANYREFS:
		return "no fds: the kernel holds no more of them in flight for the broker's user";
	default:
		return "no fds: what must outlive the broker could not be parked";
	}
}

static bool segment_hold(Segment *segment, uint32_t uid, int fd) {
	Held *held;

	if (fd < 0)
		return true;
	held = realloc(segment->held, (segment->n_held + 1) * sizeof(*held));
	if (!held)
		return false;
	segment->held = held;
	held[segment->n_held++] = (Held){ .uid = uid, .fd = fd };
	return true;
}

void keeper_drop(Keeper *keeper, KeeperEntry *entry, uint32_t uid, uint64_t bytes) {
	Segment *segment = entry->segment;
	bool hold = false;

	if (segment) {
		list_remove(&entry->link);
		entry->segment = NULL;
		keeper->n_parked--;
	}
	if (segment && !keeper->frozen) {
		segment->n_live--;
		segment->dead_bytes += bytes;
		segment_has_dead(segment, entry->kind);
		hold = segment_judge(segment);
	}
	for (size_t i = 0; i < entry->n_fds; ++i) {
		if (!hold || !segment_hold(segment, uid, entry->fds[i]))
			closer_close(keeper->closer, uid, entry->fds[i]);
		entry->fds[i] = -EBADF;
	}
	entry->n_fds = 0;
}

/* ---- compaction ---- */

static void on_barrier(LoopPoll *poll, uint32_t events) {
	(void)events;
	segment_free(container_of(poll, Segment, barrier_poll));
}

/* the live ones are in another segment: the old one goes, then what we held of it */
static int segment_remove(Segment *segment) {
	Keeper *keeper = segment->keeper;
	char name[64];
	int r;

	if (!segment->is_removed) {
		segment_name(segment->number, name, sizeof(name));
		kill_point();
		r = notify_unstore(name);
		kill_point();
		if (r)
			return r;
		segment->is_removed = true;
		segment->write_fd = close_fd(segment->write_fd);
	}
	r = notify_barrier(&segment->barrier_poll.fd);
	if (r)
		return r;
	segment->barrier_poll.on_ready = on_barrier;
	return loop_poll_link(keeper->loop, &segment->barrier_poll);
}

static int segment_compact(Segment *segment) {
	Keeper *keeper = segment->keeper;
	KeeperEntry *batch[KEEPER_BATCH_MAX];
	int r;

	if (segment == keeper->current && !keeper_rotate(keeper))
		return -EAGAIN;
	while (!list_is_empty(&segment->live)) {
		size_t n = 0;

		list_for_each (link, &segment->live) {
			batch[n++] = container_of(link, KeeperEntry, link);
			if (n == KEEPER_BATCH_MAX)
				break;
		}
		r = keeper_send(keeper, batch, n);
		if (r)
			return r;
		for (size_t i = 0; i < n; ++i)
			entry_link(batch[i], keeper->current);
		segment->n_live -= (uint32_t)n;
	}
	keeper->n_compacted++;
	return 0;
}

void keeper_turn(Keeper *keeper) {
	int r;

	if (!keeper->enabled || keeper->frozen)
		return;
	keeper_make_spare(keeper);
	list_for_each (link, &keeper->waste) {
		Segment *segment = container_of(link, Segment, waste_link);

		if (segment->barrier_poll.fd >= 0)
			continue;
		r = segment->is_removed ? 0 : segment_compact(segment);
		if (!r)
			r = segment_remove(segment);
		/* whatever is short now may not be later */
		if (r)
			keeper_retry(keeper, r == -EAGAIN ? RETRY_NS : FULL_RETRY_NS);
	}
}

/* ---- recovery ---- */

static void close_all(Keeper *keeper, int *fds, size_t n) {
	for (size_t i = 0; i < n; ++i)
		closer_close(keeper->closer, 0, steal_fd(&fds[i]));
}

/* memory that a dead entry pins; what is no shmem and no hugetlbfs is of a GPU, and as much as would never be left */
static uint64_t pinned(uint32_t kind, const int *fds, size_t n_fds) {
	struct stat st;

	if (kind == KEEPER_OBJECT && n_fds && fd_seals(fds[0]) < 0)
		return KEEPER_DEAD_MAX + 1;
	return kind == KEEPER_OBJECT && n_fds && !fstat(fds[0], &st) ? (uint64_t)st.st_blocks * 512 : 0;
}

static int segment_take(Segment *segment, const Message *message, size_t size, int *fds, size_t n_fds, KeeperTake take,
			void *userdata) {
	Keeper *keeper = segment->keeper;
	size_t at = 0;

	if (size < sizeof(message->head) || message->head.magic != MAGIC || message->head.n > KEEPER_BATCH_MAX ||
	    size != sizeof(message->head) + message->head.n * sizeof(message->records[0]))
		return -EBADMSG;
	for (uint32_t i = 0; i < message->head.n; ++i) {
		const Record *record = &message->records[i];
		KeeperEntry *entry;

		if (record->n_fds > 2 || record->n_fds > n_fds - at)
			return -EBADMSG;
		segment->n_entries++;
		entry = take(userdata, record->kind, record->id, fds + at, record->n_fds);
		if (entry) {
			segment->n_live++;
			entry_link(entry, segment);
			keeper->n_parked++;
			for (size_t j = 0; j < record->n_fds; ++j)
				fds[at + j] = -EBADF;
		} else {
			segment->dead_bytes += pinned(record->kind, fds + at, record->n_fds);
			segment_has_dead(segment, record->kind);
			close_all(keeper, fds + at, record->n_fds);
		}
		at += record->n_fds;
	}
	return 0;
}

static int segment_read(Segment *segment, int fd, KeeperTake take, void *userdata) {
	Keeper *keeper = segment->keeper;
	int fds[WIRE_FDS_ROOM], from_the_start = 0, r;
	FdMessage received;
	Message message;

	/* the offset is the socket's, so it is where an earlier process left it */
	if (setsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &from_the_start, sizeof(from_the_start)) < 0)
		return -errno;
	for (;;) {
		r = fd_receive(fd, &message, sizeof(message), MSG_PEEK | MSG_DONTWAIT, fds, &received);
		if (r == -EAGAIN || (!r && !received.size))
			break;
		if (r)
			return r;
		if (received.fds_lost)
			r = -EMFILE;
		else if (received.truncated)
			r = -EBADMSG;
		else
			r = segment_take(segment, &message, received.size, fds, received.n_fds, take, userdata);
		close_all(keeper, fds, received.n_fds);
		if (r)
			return r;
		segment->n_messages++;
	}
	return 0;
}

int keeper_read(Keeper *keeper, uint64_t number, int passed_fd, KeeperTake take, void *userdata) {
	_cleanup_(closep) int fd = passed_fd;
	Segment *segment = segment_alloc(keeper, number);
	int r = segment ? segment_read(segment, fd, take, userdata) : -ENOMEM;

	if (segment)
		(void)segment_judge(segment);
	return r;
}
