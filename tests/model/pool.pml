/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of a pool: acquire, release and the wait of libbroker/client/block.c among members that are killed between any
 * two steps. A step is one access to shared memory or one system call.
 *
 * What must hold: no block is used by two members at once; and nobody waits for ever, which would be an end state that is
 * not valid. Members end when they have used blocks ROUNDS times, and give back what they have.
 *
 * CRASH	member 2 is killed at any instant; the broker notices some time later
 * LOOK		waiters wake by themselves: only when there is something to be found, or every state would have a next one
 *
 * Broken on purpose:
 * NOT_ATOMIC		a claim reads the word and writes it
 * FREED_FIRST		a dead one's block is made free without looking at its word again, and claimed then
 * LOOKS_FIRST		a release looks whether somebody waits before it makes the block free
 * NO_SECOND_LOOK	a waiter that has said so sleeps without looking at the words again
 * CLEARED_SILENTLY	who finds nobody asleep takes the bit back, and wakes nobody afterwards
 * REGISTRY_EARLY	the broker says that a session is over while its process lives
 */

#ifndef MEMBERS
#define MEMBERS 3
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif

#define N (MEMBERS + 1)

/* the word: holder, 0 for none, and how many it has had */
byte holder[BLOCKS];
byte generation[BLOCKS];
byte sequence;	   /* bit 0: somebody waits */
bool asleep[N];
/* the registry's session table, and the truth */
bool lives[N];
bool dead[N];
byte users[BLOCKS]; /* bit per member */

#define available(b) (holder[b] == 0 || !lives[holder[b]])

#if BLOCKS == 1
#define any_available available(0)
#else
#define any_available (available(0) || available(1))
#endif

/* one compare-and-swap of block b's word from (h, g) to this member; got tells */
inline claim(b, h, g) {
#ifdef NOT_ATOMIC
	got = (holder[b] == h && generation[b] == g);
	if
	:: got -> d_step { holder[b] = me; generation[b] = g + 1 }
	:: else
	fi
#else
	d_step {
		got = (holder[b] == h && generation[b] == g);
		holder[b] = (got -> me : holder[b]);
		generation[b] = (got -> g + 1 : generation[b])
	}
#endif
}

inline try() {
	got = false;
	b = 0;
	do
	:: got || b == BLOCKS -> break
	:: else ->
		d_step { h = holder[b]; g = generation[b] };
		if
		:: h == 0 -> claim(b, h, g)
		:: h != 0 && !lives[h] ->
#ifdef FREED_FIRST
			holder[b] = 0;
			h = 0;
#endif
			claim(b, h, g)
		:: else
		fi;
		if
		:: got
		:: else -> b++
		fi
	od
}

inline acquire() {
	armed = false;
	do
	:: true ->
		try();
		if
		:: got -> break
		:: else
		fi;
		if
		:: !armed ->
			d_step { sequence = sequence | 1; seen = sequence };
			armed = true;
#ifdef NO_SECOND_LOOK
		:: armed -> skip
		fi;
		if
		:: armed ->
#else
		:: else ->
#endif
			/* the kernel compares and puts to sleep in one */
			asleep[me] = (sequence == seen);
			if
			:: !asleep[me]
#ifdef LOOK
			:: any_available -> asleep[me] = false
#endif
			fi;
			armed = false
		fi
	od
}

/* FUTEX_WAKE of one, whichever */
inline wake_one() {
	atomic {
		woken = true;
		if
		:: asleep[1] -> asleep[1] = false
		:: asleep[2] -> asleep[2] = false
#if MEMBERS > 2
		:: asleep[3] -> asleep[3] = false
#endif
		:: else -> woken = false
		fi
	}
}

inline wake() {
	d_step { sequence = sequence + 2; seen = sequence };
	wake_one();
	if
	:: !woken && (seen & 1) ->
		d_step {
			woken = (sequence == seen);
			sequence = (woken -> seen + 1 : sequence)
		};
#ifndef CLEARED_SILENTLY
		if
		:: woken -> d_step {
			asleep[1] = false;
			asleep[2] = false;
#if MEMBERS > 2
			asleep[3] = false;
#endif
		}
		:: else
		fi
#endif
	:: else
	fi
}

inline release() {
#ifdef LOOKS_FIRST
	waits = (sequence & 1);
#endif
	/* the generation stays; whoever claimed from a dead session never sees its member here again */
	d_step {
		assert(holder[b] == me && generation[b] == g + 1);
		holder[b] = 0
	};
#ifndef LOOKS_FIRST
	waits = (sequence & 1);
#endif
	if
	:: waits -> wake()
	:: else
	fi
}

proctype member(byte me) {
	byte b, h, g, seen, n = ROUNDS;
	bool got, armed, woken, waits;

	{
		do
		:: n == 0 -> break
		:: else ->
			acquire();
			/* a loop must not end in a d_step */
			skip;
			d_step {
				assert(users[b] == 0);
				users[b] = users[b] | (1 << me)
			};
			users[b] = users[b] & ~(1 << me);
			release();
			n--
		od
	} unless {
		dead[me]
	}
}

#ifdef CRASH
proctype killer(byte me) {
	if
	:: d_step {
		dead[me] = true;
		asleep[me] = false;
		users[0] = users[0] & ~(1 << me);
		users[BLOCKS - 1] = users[BLOCKS - 1] & ~(1 << me)
	   };
	   /* the kernel tells the broker afterwards */
	   lives[me] = false
	:: true
	fi
}
#endif

#ifdef REGISTRY_EARLY
proctype broker() {
	lives[2] = false
}
#endif

init {
	byte i = 1;

	atomic {
		do
		:: i > MEMBERS -> break
		:: else ->
			lives[i] = true;
			run member(i);
#ifdef CRASH
			if
			:: i == 2 -> run killer(i)
			:: else
			fi;
#endif
			i++
		od;
#ifdef REGISTRY_EARLY
		run broker()
#endif
	}
}
