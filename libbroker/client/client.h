/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Client: one connection to the broker, and what a process has because of it: the registry and the lease page it
 * has mapped, its lanes, and the memory it has mapped (map.h).
 *
 * Many threads may use one client. Requests are answered out of order: whoever waits for a reply reads for all.
 * No lock is held while a socket is waited for, except that only one thread at a time reads. A client that was
 * made before a fork is refused in the child.
 *
 * A client whose broker has ended is away until somebody needs the connection and makes it anew (resume.c); where the
 * broker cannot resume sessions, and when it refuses to, the client is broken for good.
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/un.h>

#include "shmbroker.h"
#include "wire/codec.h"
#include "wire/fd.h"
#include "wire/layout.h"

typedef struct Call Call;
typedef struct EventNode EventNode;
typedef struct MapDetail MapDetail;
typedef struct MapEntry MapEntry;
typedef struct MappedObject MappedObject;

#define CLIENT_EVENTS_MAX 4096
#define CLIENT_TRIES 8

/* a request that waits for its reply; lives on its caller's stack, once it is abandoned (abandon.c) on the heap */
struct Call {
	uint64_t serial;
	uint8_t *message; /* the reply, owned by the call */
	size_t size;
	int fds[WIRE_FDS_ROOM]; /* owned by the call until taken with steal_fd() */
	size_t n_fds;
	int result; /* once done: 0, -errno or a wire code */
	bool done;
	uint8_t *request; /* the caller's, as long as the call is not done: it may have to be sent again */
	size_t request_size;
	const int *request_fds;
	size_t n_request_fds;
	int64_t deadline; /* when the answer of a broker that is there must have come, DEADLINE_NONE for never */
	int wait_ms;	  /* what the broker may take on purpose, before it answers */
	Call *spare;	  /* takes its place when it is abandoned; NULL where it waits for ever */
	bool is_abandoned;
	bool is_unsent; /* abandoned before it could be sent */
	Call *next;
};

/* the way back to the broker; under io_lock */
typedef struct Resume {
	struct sockaddr_un address;
	_Atomic bool possible; /* the broker has said that the session outlives it */
	int timeout_ms;	       /* how long a call waits for the broker, -1 for ever, 0 for one try */
	uint32_t session_index;
	int fd;		    /* a connection that has sent HELLO and awaits the answer, or -EBADF */
	int64_t attempt_at; /* when the next connection may be tried, in ms of the monotonic clock */
	uint32_t delay_ms;  /* after a failure, 0 at first */
	int why;	    /* -errno or code of the last failure */
	bool heard;	    /* something was received on the connection: the next one may be tried at once */
	int watch_fd;	    /* what shmb_client_get_fd() returns, or -EBADF before its first call */
	int timer_fd;	    /* in it, for the next attempt */
	int events_fd;	    /* in it, readable as long as events wait, whichever thread has read them */
	bool events_shown;
} Resume;

struct shmb_client {
	/* read by every acquire, written at the start only */
	uint32_t fork_epoch;
	uint32_t flags;
	uint32_t lanes;
	uint32_t mode; /* WIRE_ATTACH_*, 0 without a lease page */
	uint64_t id;   /* of this object in this process, never used again */
	uint64_t session;
	const RegistryHeader *registry;
	const RegistrySlot *slots; /* and the rest of the registry's parts */
	const RegistryDetail *details;
	const _Atomic uint64_t *index;
	/* points elsewhere once the broker knows the session no more */
	_Atomic(const _Atomic uint64_t *) session_word;
	uint64_t hash_seed[2];
	uint32_t index_mask;
	uint32_t capacity;
	MapEntry *maps;		    /* by slot */
	MapDetail *map_details;	    /* the same, and behind it in memory */
	_Atomic uint64_t gone_seen; /* the registry's gone_sequence when maps were last looked through */
	LeasePageHeader *page;
	uint64_t registry_size;
	uint64_t page_size;

	uint32_t roles;
	uint32_t rights;
	uint64_t epoch;
	uint8_t token[WIRE_TOKEN_SIZE];
	char broker_version[32];
	int fd;

	pthread_mutex_t io_lock; /* calls, events, the reader's role */
	pthread_cond_t io_changed;
	uint32_t spin_vain; /* of whoever reads: times in a row that looking for an answer was in vain */
	uint32_t spin_skips;
	bool reading;	    /* some thread receives, or makes the connection anew */
	int broken;	    /* -errno or a code once there will be no connection any more */
	_Atomic bool away;  /* the connection is lost and is to be made anew; changed under io_lock */
	uint32_t n_sending; /* threads that send a request on the connection */
	uint64_t n_received;
	_Atomic int call_timeout_ms;	/* how long a call waits for a broker that is there, -1 for ever */
	_Atomic bool has_missed_notice; /* a broker that is there has not taken it */
	Resume resume;
	uint64_t last_serial;
	uint32_t n_calls;
	Call *calls;
	uint8_t *receive; /* of the reader */
	EventNode *events, **events_tail;
	uint32_t n_events;
	uint64_t events_lost;
	uint32_t event_mask;
	bool delivering; /* some thread hands events to the callback */
	void (*callback)(void *userdata, const struct shmb_event *event);
	void *callback_userdata;

	pthread_mutex_t map_lock; /* objects, map entries, lanes, pools */
	MappedObject *objects;
	MappedObject *closing;	   /* what the GPU's driver has to close */
	_Atomic bool closing_hint; /* there may be something */
	uint32_t *mapped_slots;	   /* slots whose entry is in use */
	uint32_t n_mapped;
	uint32_t n_mapped_max;
	uint64_t lanes_taken;
	struct shmb_pool *pools;  /* that are open */
	_Atomic uint32_t n_later; /* leases that a stream will release: shmb_lease_release_after() */

	struct shmb_client *next; /* of all clients of this process */
};

struct EventNode {
	EventNode *next;
	struct shmb_event event;
};

/* true, and the error is set, when the client was made by another process */
static inline bool client_is_foreign(const struct shmb_client *client);

extern uint32_t client_fork_epoch;
static inline bool client_is_foreign(const struct shmb_client *client) {
	return __builtin_expect(client->fork_epoch != client_fork_epoch, 0);
}

/* ---- call.c ---- */

/*
 * Sends a request (writer's serial is set here) and waits for its reply. Borrows @fds. Returns 0 and a reply that
 * was accepted, or the refusal's code with its sentence as the last error, or -errno. The call must be ended.
 */
int call_run(struct shmb_client *client, WireWriter *request, const int *fds, size_t n_fds, Call *ret);
/* The same for a request that the broker answers only after up to @wait_ms, -1 for whenever it is done. */
int call_run_long(struct shmb_client *client, WireWriter *request, const int *fds, size_t n_fds, int wait_ms,
		  Call *ret);
/*
 * A request of one fixed struct, with a text behind it unless @tail is NULL, and a reply that begins with one: copies
 * that to @ret and leaves @body behind it. Returns what call_run() does, or -EPROTO. The call must be ended.
 */
int call_fixed(struct shmb_client *client, uint16_t opcode, const void *request, size_t size, const char *tail,
	       Call *call, WireReader *body, void *ret, size_t ret_size);
/* a reader on the reply's body */
WireReader call_body(const Call *call);
/* frees the reply and closes fds that were not taken; may be called twice */
void call_end(Call *call);
/*
 * Reads what is there; waits up to @timeout ms for something, -1 for ever. While the broker is away it is waited for
 * no longer than calls wait. 0, -ETIMEDOUT, or what client_error() takes.
 */
int client_read(struct shmb_client *client, int timeout);
/* sends without waiting for a reply; -EPIPE or -ECONNRESET when the broker has ended, -ETIMEDOUT when it takes nothing */
int client_notify(struct shmb_client *client, uint32_t slot, uint32_t scan, uint64_t generation);
/* sets the last error for what ended the client, or for a broker that is away; returns @result */
int client_error(struct shmb_client *client, int result);
/* a buffer for requests: WIRE_MESSAGE_MAX bytes, 8-byte aligned; free() it */
uint8_t *client_request_begin(WireWriter *writer, uint16_t opcode);

/* the rest is for resume.c, which holds io_lock */

/* one message without waiting; 0, -EAGAIN, -ECONNRESET at the end, or -errno */
int client_receive_now(struct shmb_client *client, int fd, int *fds, FdMessage *ret);
/* deals with a message in the reader's buffer; closes fds that nobody takes */
void client_take_message(struct shmb_client *client, int *fds, FdMessage *received);
/* there will be no connection any more: nobody gets an answer */
void client_break(struct shmb_client *client, int error);
/* a call that has its result; an abandoned one is freed */
void client_finish_call(struct shmb_client *client, Call *call, int result);
/* waits until something changes, or until @deadline */
void client_wait_changed(struct shmb_client *client, int64_t deadline);

/* ---- abandon.c ---- */

/* what takes the place of @call, whose request is complete, when it is abandoned; NULL without memory; free() it */
Call *abandoned_new(const Call *call);
/*
 * Nobody waits for @call any more, which has @result; where it has a spare and was sent (or is to be sent nevertheless) that
 * one takes its place and waits for the answer. io_lock is held.
 */
void call_abandon(struct shmb_client *client, Call *call, int result, bool is_sent);
/* the answer to an abandoned call; io_lock is held, @message is borrowed and aligned */
void abandoned_answered(struct shmb_client *client, Call *call, const uint8_t *message, size_t size);
/* sends what is still to be sent, as far as it goes without waiting; takes io_lock */
void abandoned_send(struct shmb_client *client);

/* ---- resume.c ---- */

#define DEADLINE_NONE INT64_MAX

/* ms of the monotonic clock */
int64_t client_now(void);
void resume_init(struct shmb_client *client);
/* a broker that has come back meanwhile is told of the session, which ends with the connection */
void resume_deinit(struct shmb_client *client);
/* after the queue of events has changed; io_lock is held */
void resume_show_events(struct shmb_client *client);
/* the reader has met the end of the connection; io_lock is held */
void resume_lost(struct shmb_client *client);
/* until when a call that meets a broker that is away waits for it; io_lock is held */
int64_t resume_deadline(const struct shmb_client *client);
/*
 * Waits until the broker is back, or until @deadline; 0 waits for nothing. io_lock is held, and let go meanwhile.
 * Returns 0, -ETIMEDOUT, or what ended the client.
 */
int resume_await(struct shmb_client *client, int64_t deadline);
/* goes one step towards a connection, if it is lost and nobody else does, and waits for nothing; takes io_lock */
void resume_nudge(struct shmb_client *client);

/* ---- event.c ---- */

/* hands queued events to the callback, unmaps what is gone */
void client_settle(struct shmb_client *client);

/* ---- error.c ---- */

/* sets this thread's last error and returns @result */
int error_set(int result, const char *text);
int error_setn(int result, const char *text, size_t size);
/* the sentence that belongs to @result itself */
int error_plain(int result);
/* 0 for what can be a name, else its code with the sentence that says why not */
int error_of_name(const char *name, size_t length);

/* ---- lease.c ---- */

/* sends the notices that may have met no broker, for every slot that is mapped */
void lease_ring_again(struct shmb_client *client);
/* the same where a broker that is there has missed one and takes them again */
void lease_ring_missed(struct shmb_client *client);

/* ---- region.c ---- */

/*
 * shmb_region_create(), for memory that others are to write to: @fill is called with it before anybody else can see it.
 * Also returns SHMB_E_UNSUPPORTED for options under which nobody else could write.
 */
int region_create(struct shmb_client *client, const char *name, uint64_t size,
		  const struct shmb_region_options *options, void (*fill)(void *memory, const void *userdata),
		  const void *userdata, struct shmb_region **ret);
uint32_t region_get_slot(const struct shmb_region *region);

/* ---- lane.c ---- */

void client_list_add(struct shmb_client *client);
void client_list_remove(struct shmb_client *client);
