/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Turns: whose request is worked on next, of all connections of all doors.
 *
 * There is one thread, and a list of many regions takes it milliseconds. So a complete request is not worked on where it
 * was read: its connection asks for a turn, and is called back when it has it. Between two turns that took long, the loop
 * looks at all sockets. First comes who will have used least of the thread's time when it is done, if it takes as long as
 * the last time, so that whoever asks for little waits for one piece of work of the others at most, and not for all that
 * they have asked for. One that was not asked for in a while has no credit from then: it has used as much as the one that
 * was called last.
 *
 * A Turn is a part of what it is the turn of, {} but for @take and @userdata at first, and is withdrawn before that goes.
 */

#include <event2/event.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

typedef struct Turns Turns;

typedef struct Turn {
	void (*take)(void *userdata); /* may ask anew, withdraw, and free what the turn is a part of */
	void *userdata;
	uint64_t used; /* ns of the thread's time, comparable between the turns that wait */
	uint64_t last; /* of them, the last time; 0 before that */
	bool waiting;
	TAILQ_ENTRY(Turn) link;
} Turn;

TAILQ_HEAD(TurnQueue, Turn);

struct Turns {
	struct event *event;
	struct TurnQueue waiting;
	uint64_t used; /* by the one that was called last, before that */
	Turn *current; /* NULL when it was withdrawn meanwhile */
};

/* 0 or -ENOMEM */
int turns_init(Turns *turns, struct event_base *base);
/* None waits any more. {} is fine. */
void turns_deinit(Turns *turns);

/* @turn->take is called once, from the loop and never from here; once also when this is called again before that. */
void turn_ask(Turns *turns, Turn *turn);
/* It is not called any more, and may be freed. Fine when it does not wait. */
void turn_withdraw(Turns *turns, Turn *turn);
