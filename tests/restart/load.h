/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The load of the kill loop: owners and consumers that go on as if nothing had happened while their broker is killed,
 * and write down what they were told.
 *
 * Shared is in a memfd that the main program made and every client has mapped; a client that is killed leaves what it
 * wrote. For each name there is one Name, whose owner's thread is its only writer: what was acknowledged last, and
 * whether a call is under way, whose outcome is open. Its version changes before and after each change, so that
 * whoever compares with the broker knows that both pictures are of one moment. Each lease has a Hold.
 *
 * At the barrier threads stop between two calls, consumers with the leases that they hold: then the broker must have
 * exactly what is written here.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shmbroker.h"

#define LOAD_OWNERS 3 /* processes; the first one of each kind is never killed */
#define LOAD_OWNER_THREADS 2
#define LOAD_NAMES 8 /* of each thread of an owner */
#define LOAD_CONSUMERS 3
#define LOAD_CONSUMER_THREADS 3
#define LOAD_HELD 12 /* leases of a thread */
#define LOAD_NAME_SIZE 48
#define LOAD_PREFIX "kill-loop."
#define LOAD_ALL_NAMES (LOAD_OWNERS * LOAD_OWNER_THREADS * LOAD_NAMES)
#define LOAD_PROCESSES (LOAD_OWNERS + LOAD_CONSUMERS)
#define LOAD_THREADS 4	   /* the most that a process has */
#define LOAD_RECORDS 65536 /* generations that are remembered, by their low bits */
#define LOAD_REPORTS 64
#define LOAD_TEXT 256
#define LOAD_STUCK_MS 60000

typedef enum NameState {
	NAME_FREE,	 /* there is no region, or one that is over and drains */
	NAME_REGISTERED, /* acknowledged */
	NAME_LAZY,	 /* its lazy retirement is acknowledged: there as long as it is held */
	NAME_UNKNOWN,	 /* a call is under way, or its caller died */
} NameState;

typedef struct Name {
	_Alignas(64) _Atomic uint32_t version; /* odd while the rest changes */
	_Atomic uint32_t state;
	_Atomic uint32_t kept;
	_Atomic uint64_t generation;
	_Atomic uint64_t size;
} Name;

typedef enum HoldKind {
	HOLD_NONE,
	HOLD_PAGE,
	HOLD_MESSAGE,
} HoldKind;

typedef struct Hold {
	_Atomic uint32_t kind;
	_Atomic uint32_t name;
	_Atomic uint64_t generation;
	_Atomic uint64_t id; /* of a lease by message */
} Hold;

/* what is known of a generation */
typedef struct Record {
	_Atomic uint64_t generation;
	_Atomic uint32_t forced; /* it was or will be revoked: the memory of a lease tells nothing */
} Record;

/* of one thread */
typedef struct Seat {
	_Alignas(64) _Atomic uint32_t parked; /* the barrier that it stands at; 0 while it runs */
	_Atomic uint32_t doing;		      /* a line of its source, for who wonders why it does not come */
	Hold holds[LOAD_HELD];
} Seat;

typedef struct Process {
	_Atomic uint32_t threads; /* how many there are to be waited for; 0 before it is connected */
	_Atomic uint32_t orphans; /* sessions that may have been opened for it without its knowing */
	Seat seats[LOAD_THREADS];
} Process;

typedef struct Shared {
	_Atomic uint32_t barrier; /* number of the one that all are to stop at; even: none */
	_Atomic uint32_t stop_owners;
	_Atomic uint32_t stop_consumers;
	_Atomic uint32_t kills;
	_Atomic uint64_t newest; /* the newest generation that was acknowledged */
	_Atomic uint64_t serial; /* of canaries */
	_Atomic uint64_t registered;
	_Atomic uint64_t refused;
	_Atomic uint64_t retired;
	_Atomic uint64_t replaced;
	_Atomic uint64_t leases_by_page;
	_Atomic uint64_t leases_by_message;
	_Atomic uint64_t held_over; /* leases that were held while the broker was killed */
	_Atomic uint32_t n_reports;
	char reports[LOAD_REPORTS][LOAD_TEXT];
	Name names[LOAD_ALL_NAMES];
	Process processes[LOAD_PROCESSES]; /* owners, then consumers */
	Record records[LOAD_RECORDS];
} Shared;

/* What a client program runs with; made from its command line. */
typedef struct Load {
	Shared *shared;
	const char *socket;
	uint32_t process; /* in Shared.processes */
	uint64_t random;
} Load;

_Noreturn void owner_main(const Load *load);
_Noreturn void consumer_main(const Load *load);

/* a word of memory says which name it is of, and under which serial number it was registered */
static inline uint64_t canary(uint32_t name, uint64_t serial) {
	return (uint64_t)(name + 1) << 48 | (serial & ((UINT64_C(1) << 48) - 1));
}

static inline uint32_t canary_name(uint64_t word) {
	return (uint32_t)(word >> 48) - 1;
}

/* xorshift64; @state is not 0 */
static inline uint64_t load_random(uint64_t *state) {
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state >> 8;
}

static inline Record *load_record(Shared *shared, uint64_t generation) {
	return &shared->records[generation % LOAD_RECORDS];
}

void load_name(char ret[LOAD_NAME_SIZE], uint32_t name);
Shared *load_map(int fd);
uint64_t load_now_ms(void);
/* the broker, or the library, did what it must not */
void load_wrong(Shared *shared, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* tells where its thread is */
#define DOING(_seat) atomic_store_explicit(&(_seat)->doing, __LINE__, memory_order_relaxed)
/* connects however often the broker dies meanwhile */
struct shmb_client *load_connect(const Load *load, uint32_t roles, uint32_t flags);
/* fds of this process */
int load_count_fds(void);
/* waits there while there is one */
void load_barrier(const Load *load, Seat *seat);
bool load_is_forced(Shared *shared, uint64_t generation);

/* of a name's owner: between the two the rest is changed */
void name_begin(Name *name);
void name_end(Name *name);
void name_set(Name *name, NameState state, bool kept, uint64_t generation, uint64_t size);
/* a consistent picture; false when there is none now */
typedef struct NameView {
	uint32_t version;
	uint32_t state;
	bool kept;
	uint64_t generation;
	uint64_t size;
} NameView;
bool name_view(Name *name, NameView *ret);
