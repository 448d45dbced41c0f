/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Team: threads that stay, each on a CPU of its own, and begin what they are given at the same moment. The caller is
 * the first of them. Those that have nothing to do sleep.
 */

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>

#define TEAM_MAX 2

typedef struct Team Team;
typedef struct TeamMember TeamMember;

/* @count operations of thread @member, from 0 on */
typedef void (*TeamWork)(void *data, uint32_t member, uint64_t count);

struct TeamMember {
	Team *team;
	pthread_t thread;
	sem_t go;
	uint32_t number;
	uint64_t ns; /* that the work took */
};

struct Team {
	TeamMember members[TEAM_MAX];
	uint32_t n;
	TeamWork work; /* NULL: the end */
	void *data;
	uint64_t warm_up;
	uint64_t count;
	uint32_t n_at_work;
	_Atomic uint32_t n_ready;
	_Atomic uint32_t n_done;
};

/* TEAM_MAX threads, also where there are fewer CPUs; binds the caller to the first CPU */
void team_init(Team *team);
void team_deinit(Team *team);
/*
 * The nanoseconds that @count operations take a thread, on average over @n_threads which do as many each, all at the
 * same time. @warm_up operations go before, and are not counted.
 */
uint64_t team_run(Team *team, uint32_t n_threads, TeamWork work, void *data, uint64_t warm_up, uint64_t count);
