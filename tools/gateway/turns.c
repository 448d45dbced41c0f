/* SPDX-License-Identifier: Apache-2.0 */

#include "turns.h"

#include <errno.h>

#include "clock.h"

/* turns that are shorter are taken one after the other, without a look at the sockets in between */
#define TURNS_NS 300000

/* what a turn is taken to be at first: a long one */
#define TURN_UNKNOWN_NS 1000000

static const struct timeval at_once;

static uint64_t done_at(const Turn *turn) {
	return turn->used + (turn->last ? turn->last : TURN_UNKNOWN_NS);
}

static Turn *first_of(const Turns *turns) {
	Turn *turn, *first = NULL;

	TAILQ_FOREACH(turn, &turns->waiting, link) {
		if (!first || done_at(turn) < done_at(first))
			first = turn;
	}
	return first;
}

static void on_event(evutil_socket_t fd, short what, void *userdata) {
	uint64_t begun = clock_ns(), before = begun, after;
	Turns *turns = userdata;
	Turn *turn;

	(void)fd;
	(void)what;
	while (before - begun < TURNS_NS && (turn = first_of(turns))) {
		turn_withdraw(turns, turn);
		turns->used = turn->used;
		turns->current = turn;
		turn->take(turn->userdata);
		after = clock_ns();
		if (turns->current) {
			turn->last = after - before;
			turn->used += turn->last;
		}
		turns->current = NULL;
		before = after;
	}
	if (!TAILQ_EMPTY(&turns->waiting))
		(void)event_add(turns->event, &at_once);
}

int turns_init(Turns *turns, struct event_base *base) {
	*turns = (Turns){};
	TAILQ_INIT(&turns->waiting);
	/* a timer, because an event that is made active is called before the loop looks at the sockets */
	turns->event = evtimer_new(base, on_event, turns);
	return turns->event ? 0 : -ENOMEM;
}

void turns_deinit(Turns *turns) {
	if (turns->event)
		event_free(turns->event);
	turns->event = NULL;
}

void turn_ask(Turns *turns, Turn *turn) {
	if (turn->waiting)
		return;
	turn->waiting = true;
	if (turn->used < turns->used)
		turn->used = turns->used;
	TAILQ_INSERT_TAIL(&turns->waiting, turn, link);
	(void)event_add(turns->event, &at_once);
}

void turn_withdraw(Turns *turns, Turn *turn) {
	if (turns->current == turn)
		turns->current = NULL;
	if (!turn->waiting)
		return;
	turn->waiting = false;
	TAILQ_REMOVE(&turns->waiting, turn, link);
}
