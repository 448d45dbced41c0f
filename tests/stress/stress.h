/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stress: owners and consumers that share memory through a real broker and the real library, as fast as they can,
 * and know what must be in the memory.
 *
 * Each generation has a serial number, which is never used again and is all over its memory before it is registered.
 * Once the broker says that the generation is gone, its owner poisons the memory, which then waits to serve another
 * generation, of whatever name. Whoever sees poison, or the serial number of another generation, under a lease has
 * been granted what the broker held to be free; whoever finds the memory unmapped under a lease dies of it.
 *
 * Shared is in memory that the supervisor made before it forked the others. Owners write what they know of their
 * generations, consumers look it up; both count.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define STRESS_OWNERS 2
#define STRESS_NAMES 8 /* of each owner */
#define STRESS_NAME_SIZE 48
#define STRESS_WINDOWS 16
#define STRESS_WINDOW_SIZE 4096
#define STRESS_REGIONS (STRESS_OWNERS * STRESS_NAMES)
#define STRESS_CONSUMERS 2
#define STRESS_THREADS 3
#define STRESS_RECORDS (1U << 16) /* far more than the generations that are known at one time */
#define STRESS_POISON UINT64_C(0xdead0000dead0000)
#define STRESS_SERIAL UINT64_C(0x5e00000000000000) /* what no poison and no fresh memory begins with */
#define STRESS_COLD_SIZE (32U << 20)
#define STRESS_REPORTS 8

typedef enum StressMode {
	STRESS_ASYMMETRIC,
	STRESS_RMW,
} StressMode;

/* what a run must show that is broken on purpose */
typedef enum StressControl {
	STRESS_NO_CONTROL,
	STRESS_VIOLATIONS,
	STRESS_MISSED, /* releases that only the broker's second look finds */
} StressControl;

/* ways in which it goes wrong */
enum {
	WRONG_POISON,  /* memory of a generation that is gone, under a lease */
	WRONG_CANARY,  /* memory of another generation, under a lease */
	WRONG_CHANGED, /* the memory was another one at the end of a lease than at its begin */
	WRONG_GRANTED, /* a lease on a generation that was gone, or revoked, before it was asked for */
	WRONG_REVOKED, /* a lease that was taken back although nobody revoked */
	WRONG_CRASHED, /* a consumer died of a signal that was not ours: memory was unmapped under a lease */
	_WRONG_N,
};

/* what its owner knows of a generation; found by the low bits of the generation */
typedef struct Record {
	_Atomic uint64_t generation; /* 0 while the rest changes */
	_Atomic uint64_t serial;
	_Atomic uint32_t forced; /* it was or will be revoked: leases on it say nothing of the memory */
} Record;

/* of a name: what its owner and consumers tell each other; a cache line each */
typedef struct Name {
	_Alignas(64) _Atomic uint64_t over; /* the newest generation that the broker said is gone or revoked */
	_Atomic uint64_t live;		    /* the generation that is to be had; 0 when that is over */
	_Alignas(64) _Atomic uint64_t used; /* the newest generation that a consumer had a lease on */
	_Atomic uint32_t slot;		    /* and its slot */
} Name;

typedef struct Report {
	uint32_t kind;
	uint32_t region;
	uint64_t generation;
	uint64_t seen;
	uint64_t expected;
} Report;

typedef struct Shared {
	_Atomic uint32_t stop_owners;
	_Atomic uint32_t stop_consumers;
	_Atomic uint64_t leases;
	_Atomic uint64_t by_handle;
	_Atomic uint64_t handed_over; /* leases that another thread released */
	_Atomic uint64_t threads;     /* that ended, holding leases or not */
	_Atomic uint64_t late;	      /* leases that ended before the owner had told of their generation */
	_Atomic uint64_t strict;      /* generations, by how they were retired */
	_Atomic uint64_t lazy;
	_Atomic uint64_t forced;
	_Atomic uint64_t stuck;
	_Atomic uint64_t wrong[_WRONG_N];
	_Atomic uint64_t serial;
	_Atomic uint32_t n_reports;
	Report reports[STRESS_REPORTS];
	Name names[STRESS_REGIONS];
	Record records[STRESS_RECORDS];
} Shared;

typedef struct Stress {
	const char *broker;
	StressMode mode;
	StressControl control;
	uint32_t seconds;
	char directory[64];
	char socket[96];
	Shared *shared;
	_Atomic uint64_t *cold; /* memory that is in no cache */
	int cpus[2];
} Stress;

/* the roles, each in a process of its own that it does not return from */
_Noreturn void owner_run(const Stress *stress, uint32_t number);
_Noreturn void consumer_run(const Stress *stress, uint32_t number, uint64_t seed);

static inline Record *stress_record(Shared *shared, uint64_t generation) {
	return &shared->records[generation % STRESS_RECORDS];
}

static inline void stress_name(char ret[STRESS_NAME_SIZE], uint32_t region) {
	snprintf(ret, STRESS_NAME_SIZE, "stress_owner_%u_region_%02u", region / STRESS_NAMES, region % STRESS_NAMES);
}

/* xorshift64; @state is not 0 */
static inline uint64_t stress_random(uint64_t *state) {
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

void stress_wrong(Shared *shared, uint32_t kind, uint32_t region, uint64_t generation, uint64_t seen,
		  uint64_t expected);
/* says what failed, which is neither expected nor a violation, and ends the process */
_Noreturn void stress_fail(const char *what, int result);
