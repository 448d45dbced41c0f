/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The zero-syscall lease, for spin: acquire, release, retire, scan, reuse of a slot, death of a consumer.
 *
 * What is modelled: one slot of the registry (its word and its scan number), which carries GENERATIONS
 * generations one after the other; the lease pages of its mappers, a lane for each thread; the threads of the
 * consumers; and the broker, which is one thread and takes its events in any order, as daemon/retire.c does. A
 * lease that one thread acquired may be handed to another thread of its process, which then releases it.
 *
 * Memory: a thread's stores wait in a buffer, first in, first out, until they are written at any later time (TSO;
 * that is the machine for which a compiler barrier alone orders the least). An acquire is counted by a locked
 * instruction, which waits until the buffer is empty; so do a fence and a system call. In asymmetric mode a release
 * is a plain store; in RMW mode every store of a thread is written at once. The broker's stores are sequentially
 * consistent in both modes. Every load is a step.
 *
 * The broker's membarrier may miss any thread. That of Linux does (5.10 to 6.18 at least): where a thread ends, its
 * processor forgets that the process is one to be reached, and is not told again when it goes on with another thread
 * of that process. So nothing may depend on it but how soon a wake-up comes. It is no step of the model: what it
 * does write out, the machine may write out at the same moment by itself: a broker whose membarrier misses whom
 * it likes does nothing that a broker without any does not do, and each run is for both. (A barrier that writes each
 * buffer out or does not, as spin likes, was tried: the same verdicts, more states.) PERFECT_BARRIER is a membarrier
 * that reaches every thread, one after the other.
 *
 * The second look: a region whose scan finds a lease, after it left ACTIVE, is scanned once more a while later. By
 * then the stores that are older than the change of the word are written out: they do not wait for ever. Newer ones
 * may wait still; who made them looks at the word afterwards, and rings. Where no wake-up is asked for, or no store
 * waits, the second scan comes at any moment after the first.
 *
 * What must hold:
 *	1. a generation is not freed, nor its slot used again, while a living consumer holds a lease on it; a lease
 *	   is not granted on a generation that is over;
 *	2. a lease is granted only on the generation that the slot has when the word is read again;
 *	3. no wake-up is lost: when nothing moves any more, no region is LAZY, RETIRING or REVOKED. Every thread
 *	   releases what it holds before it ends, so whatever is left would be left for ever;
 *	4. all of that for the honest consumer beside a mapper whose page reads as anything at any moment and who
 *	   sends NOTIFY when it likes (there 3 is not asked for: such a mapper may pin the region).
 *
 * What is abstracted: the index, names and the message path (LOOKUP is "not now"; MAP is one step of the broker);
 * counters are small numbers that do not wrap; lanes_used (a lane whose flag the scan missed was first used after
 * the change of the word, so its acquire fails its re-check); detached sessions; UNMAP; restart. A dead consumer's
 * buffered stores and its unread messages vanish, and its page leaves the mapper set later, at any time.
 *
 * By -D. Shape: TWO (each thread is a consumer of its own; else both threads are one consumer), THREE (a consumer
 * of one thread that acquires and one that only releases what was handed to it, and another consumer), QUOTA
 * (acquires that a thread tries), GENERATIONS, CRASH (consumer 0 dies, sooner or later), HOSTILE (one more mapper).
 * Mode: RMW, else asymmetric. What the broker does, at any time, with the last generation and with those before it:
 * LAST_OPERATION, FIRST_OPERATION and, while that is not through, LAST_SECOND, FIRST_SECOND.
 * SAFETY_ONLY: lost wake-ups are let pass.
 * PERFECT_BARRIER: see above. With it no wake-up needs the second look.
 * NO_SECOND_LOOK: right in RMW mode and with PERFECT_BARRIER, wrong else.
 * SCAN_FIRST: the scan number is read before the word, and so before the fence; right where the release is out
 * anyway, in RMW mode and with PERFECT_BARRIER, as long as a NOTIFY is taken for whatever region the slot carries
 * when it arrives.
 * RING_WITHOUT_FENCE: the scan number is read while the release may still wait; right with PERFECT_BARRIER only.
 * Broken on purpose, so that spin must find it: PLAIN_ACQUIRE (counted by a plain store; right with PERFECT_BARRIER
 * only), SECOND_LOOK_EARLY (older stores may still wait), SUMMED, ACQUIRES_FIRST, LAZY_ONE_PASS, SCAN_NEVER,
 * SCAN_LATE, SCAN_AFTER_BARRIER (wrong with RING_WITHOUT_FENCE), UNDO_FORGETS (a failed acquire decides whether to
 * ring by the word that it read before it counted its release), RECHECK_STATE (without the generation),
 * REVOKED_REUSED, STALE_NOTIFY_DROPPED (a NOTIFY of a generation that is over is not for the next one; wrong unless
 * SCAN_FIRST).
 */

#ifndef QUOTA
#define QUOTA 1
#endif
#ifndef FIRST_OPERATION
#define FIRST_OPERATION RETIRE_STRICT
#endif
#ifndef FIRST_SECOND
#define FIRST_SECOND NOTHING
#endif
#ifndef LAST_OPERATION
#define LAST_OPERATION RETIRE_STRICT
#endif
#ifndef LAST_SECOND
#define LAST_SECOND NOTHING
#endif
#ifndef GENERATIONS
#define GENERATIONS 2
#endif
#ifdef THREE
#define THREADS 3
#define QUOTA_OF(t) ((t) == 1 -> 0 : QUOTA)
#define CONSUMER(t) ((t) >> 1)
#define CONSUMERS 2
#elif defined(TWO)
#define THREADS 2
#define CONSUMER(t) (t)
#define CONSUMERS 2
#else
#define THREADS 2
#define CONSUMER(t) 0
#define CONSUMERS 1
#endif
#ifndef QUOTA_OF
#define QUOTA_OF(t) QUOTA
#endif
#ifdef HOSTILE
#define PAGES (CONSUMERS + 1)
#else
#define PAGES CONSUMERS
#endif

/* RegistrySlot.word */
#define ACTIVE 0
#define RETIRING 1
#define LAZY 2
#define REVOKED 3
#define WORD(g, s) ((g) << 2 | (s))
#define GENERATION(w) ((w) >> 2)
#define STATE(w) ((w) & 3)
#define GRANTS(w) ((w) != 0 && (STATE(w) == ACTIVE || STATE(w) == LAZY))

/* what waits in a store buffer */
#define ACQUIRED 1
#define RELEASED 2
#define HANDED 3

/* what the broker does with a region */
#define NOTHING 0
#define RETIRE_STRICT 1
#define RETIRE_LAZY 2
#define RETIRE_FORCE 3

/* a generation's second look */
#define NOT_YET 0
#define DUE 1
#define DONE 2

#define ACQUIRES 0
#define RELEASES THREADS

/* whether a second look waits for the stores that are older than the change of the word */
#if !defined(RMW) && !defined(NO_SECOND_LOOK) && !defined(SECOND_LOOK_EARLY) && !defined(HOSTILE) && \
	!defined(SAFETY_ONLY)
#define AGES
#endif
#if !defined(AGES)
#define AGED true
#elif defined(THREE)
#define AGED (old[0] == 0 && old[1] == 0 && old[2] == 0)
#else
#define AGED (old[0] == 0 && old[1] == 0)
#endif

/* shared memory */
byte word = WORD(1, ACTIVE);
byte scan;
byte counter[2 * THREADS];	/* what each lane acquired, then what each lane released */
byte rung[CONSUMERS];
chan stores[THREADS] = [3] of { byte };
#ifdef AGES
byte old[THREADS];		/* how many of them are older than the change of the word from ACTIVE */
#endif

/* the processes' own */
byte own[THREADS];		/* leases that a thread holds */
byte pool[CONSUMERS];		/* leases that were handed over and wait for a thread that releases them */
byte cached[CONSUMERS];		/* the generation that a consumer has mapped */
bool dead[CONSUMERS];

/* the broker's own */
bool mapper[PAGES];
bool scanning;			/* the region is on the scan list */
bool busy;			/* the broker is in a scan: it answers nobody */

/* NOTIFYs on their way, a bit a generation */
byte notify[PAGES];

/* what only the proof sees */
byte held[CONSUMERS];		/* leases of a living consumer */
byte held_generation[CONSUMERS];

inline write_out(t, entry) {
	if
	:: entry == ACQUIRED -> counter[ACQUIRES + t]++
	:: entry == RELEASED -> counter[RELEASES + t]++
	:: entry == HANDED -> pool[CONSUMER(t)]++
	fi
}

/* one store less of thread t waits */
inline count_written(t) {
#ifdef AGES
	old[t] = old[t] - (old[t] > 0 -> 1 : 0)
#else
	skip
#endif
}

inline write_next(t) {
	stores[t]?entry -> write_out(t, entry);
	entry = 0;
	count_written(t)
}

/* within an atomic sequence, where there is room */
inline store(entry) {
#ifdef RMW
	write_out(self, entry)
#else
	stores[self]!entry
#endif
}

/* a fence, or a system call: what the thread stored before is out */
#define WRITTEN_OUT empty(stores[self])

/* the first step of an acquire */
inline count_acquire() {
#ifdef PLAIN_ACQUIRE
	atomic { nfull(stores[self]) -> store(ACQUIRED) }
#else
	atomic { WRITTEN_OUT -> write_out(self, ACQUIRED) }
#endif
}

#ifdef RECHECK_STATE
#define SAME(w, found) ((w) != 0 && STATE(w) == STATE(found))
#else
#define SAME(w, found) ((w) == (found))
#endif
#define OVER(w) ((w) != 0 && STATE(w) != ACTIVE)

/*
 * After the count of released: rings unless this scan number was rung for. Who finds that it was leaves the release to
 * the scan with the next number, which is still to come; so that this one sees it, it must be out before the number is
 * read: the fence. The rung number is written by a locked instruction, once NOTIFY is sent.
 */
inline ring_if_over() {
#ifdef SCAN_FIRST
	number = scan;
	seen = word;
#else
	seen = word;
	if
#ifdef RING_WITHOUT_FENCE
	:: OVER(seen) -> number = scan
#else
	:: atomic { OVER(seen) && WRITTEN_OUT -> number = scan }
#endif
	:: !OVER(seen)
	fi;
#endif
	if
	:: OVER(seen) && rung[me] != number + 1 ->
		atomic { WRITTEN_OUT -> notify[me] = notify[me] | (1 << GENERATION(seen)); seen = 0 }
		atomic { rung[me] = number + 1; number = 0 }
	:: atomic { !OVER(seen) || rung[me] == number + 1 -> seen = 0; number = 0 }
	fi
}

proctype Thread(byte self) {
	byte me = CONSUMER(self);
	byte quota = QUOTA_OF(self);
	byte found, seen, number;
#ifdef UNDO_FORGETS
	byte undo;
#endif

	{
		do
		:: atomic { quota > 0 && GRANTS(word) && GENERATION(word) == cached[me] -> found = word; quota-- }
			count_acquire();
			if
			:: atomic { SAME(word, found) ->
				assert(GENERATION(word) == GENERATION(found));
				assert(held[me] == 0 || held_generation[me] == GENERATION(found));
				held[me]++;
				held_generation[me] = GENERATION(found);
				own[self]++;
				found = 0 }
			:: atomic { !SAME(word, found) -> found = 0;
#ifdef UNDO_FORGETS
				undo = word }
				atomic { nfull(stores[self]) -> store(RELEASED) }
				if
				:: atomic { OVER(undo) -> undo = 0 }
					ring_if_over()
				:: atomic { !OVER(undo) -> undo = 0 }
				fi
#else
				skip }
				atomic { nfull(stores[self]) -> store(RELEASED) }
				ring_if_over()
#endif
			fi
		/* MAP: a message, and so the thread's stores are out */
		:: atomic { quota > 0 && GRANTS(word) && GENERATION(word) != cached[me] && WRITTEN_OUT && !busy ->
			cached[me] = GENERATION(word);
			mapper[me] = true }
		/* LOOKUP would say that the region is over */
		:: atomic { quota > 0 && !GRANTS(word) -> quota-- }
		:: atomic { own[self] > 0 && nfull(stores[self]) -> own[self]--; held[me]--;
			store(RELEASED) }
			ring_if_over()
		:: atomic { own[self] > 0 && nfull(stores[self]) -> own[self]--;
			store(HANDED) }
		:: atomic { pool[me] > 0 && nfull(stores[self]) -> pool[me]--; held[me]--;
			store(RELEASED) }
			ring_if_over()
		:: quota == 0 && held[me] == 0 -> break
		od
	} unless { dead[me] }
}

/* the machine, which writes buffered stores out when it likes */
proctype Machine() {
	byte entry;

end:
	do
	:: atomic { write_next(0) }
	:: atomic { write_next(1) }
#ifdef THREE
	:: atomic { write_next(2) }
#endif
	od
}

#ifdef CRASH
/* at any time, after all else perhaps */
proctype Crash() {
	atomic {
		dead[0] = true;
		do
		:: nempty(stores[0]) -> stores[0]?_; count_written(0)
		:: empty(stores[0]) -> break
		od;
#ifndef TWO
		do
		:: nempty(stores[1]) -> stores[1]?_; count_written(1)
		:: empty(stores[1]) -> break
		od;
#endif
		held[0] = 0;
		pool[0] = 0;
		own[0] = 0;
#ifndef TWO
		own[1] = 0;
#endif
		notify[0] = 0 }
}
#endif

#ifdef HOSTILE
proctype Hostile() {
	notify[PAGES - 1] = 1 << GENERATION(word)
}
#endif

inline flush(t) {
	atomic {
		do
		:: write_next(t)
		:: empty(stores[t]) -> break
		od }
}

inline count_scan() {
#if !defined(SCAN_NEVER) && !defined(SCAN_LATE) && !defined(SCAN_AFTER_BARRIER)
	scan++
#else
	skip
#endif
}

inline barrier() {
#ifdef PERFECT_BARRIER
	flush(0);
	flush(1);
#ifdef THREE
	flush(2);
#endif
#endif
#ifdef SCAN_AFTER_BARRIER
	scan++;
#endif
	skip
}

#ifdef ACQUIRES_FIRST
#define FIRST ACQUIRES
#define THEN RELEASES
#else
#define FIRST RELEASES
#define THEN ACQUIRES
#endif

/* to the next counter that belongs to the page, or to a page's end */
inline next_counter() {
	do
	:: lane < 2 * THREADS && CONSUMER(lane % THREADS) != page -> lane++
	:: lane == 2 * THREADS || CONSUMER(lane % THREADS) == page -> break
	od
}

inline next_page() {
	lane = 0;
	do
	:: page < PAGES && !mapper[page] -> page++
	:: page == PAGES || mapper[page] -> break
	od;
	if
	:: page < CONSUMERS -> next_counter()
	:: page >= CONSUMERS
	fi
}

inline end_page() {
#ifdef SUMMED
	page++;
	next_page()
#else
	if
	:: first != then -> idle = false; page = PAGES
	:: first == then -> page++; next_page()
	fi;
	first = 0;
	then = 0
#endif
}

/* region_is_idle(): each counter is read in a step of its own */
inline read_pages() {
	atomic { idle = true; page = 0; next_page() }
	do
	:: atomic { page < CONSUMERS ->
		if
		:: lane < THREADS -> first = first + counter[FIRST + lane]
		:: lane >= THREADS -> then = then + counter[THEN + lane - THREADS]
		fi;
		lane++;
		next_counter();
		if
		:: lane == 2 * THREADS -> end_page()
		:: lane < 2 * THREADS
		fi }
#ifdef HOSTILE
	/* anything: a page by itself balances or it does not */
	:: atomic { page == CONSUMERS ->
		if
		:: then++
#ifdef SUMMED
		:: first++
#endif
		:: true
		fi;
		end_page() }
#endif
	:: atomic { page == PAGES ->
#ifdef SUMMED
		idle = (first == then);
		first = 0;
		then = 0;
#endif
		page = 0;
		lane = 0;
#ifdef SCAN_LATE
		scan++;
#endif
		break }
	od
}

inline gone() {
	assert(held[0] == 0 || held_generation[0] != GENERATION(word));
#if CONSUMERS > 1
	assert(held[1] == 0 || held_generation[1] != GENERATION(word));
#endif
	word = 0;
	mapper[0] = false;
#if PAGES > 1
	mapper[1] = false;
#endif
#if PAGES > 2
	mapper[2] = false;
#endif
	scanning = false;
	operation = NOTHING;
	second = NOTHING;
	idle = false;
#ifndef NO_SECOND_LOOK
	second_look = NOT_YET;
#endif
	busy = false
}

/* what will be done with the generation: one operation, and perhaps another while the first is not through */
inline choose() {
	if
	:: generation < GENERATIONS ->
		operation = FIRST_OPERATION;
		second = FIRST_SECOND
	:: generation == GENERATIONS ->
		operation = LAST_OPERATION;
		second = LAST_SECOND
	fi
}

/* region_retire() */
inline retire(what) {
#ifdef AGES
	if
	:: STATE(word) == ACTIVE ->
		old[0] = len(stores[0]);
		old[1] = len(stores[1])
#ifdef THREE
		; old[2] = len(stores[2])
#endif
	:: STATE(word) != ACTIVE
	fi;
#endif
	if
	:: what == RETIRE_STRICT -> word = WORD(GENERATION(word), RETIRING)
	:: what == RETIRE_LAZY -> word = WORD(GENERATION(word), LAZY)
	:: what == RETIRE_FORCE -> word = WORD(GENERATION(word), REVOKED)
	fi;
	scanning = true
}

/* a scan found a lease: that asks for the second look, once for a generation */
inline end_busy() {
#ifndef NO_SECOND_LOOK
	second_look = (second_look == NOT_YET -> DUE : second_look);
#endif
	busy = false
}

/* dispatch_notify() */
inline take_notify(from) {
#ifdef STALE_NOTIFY_DROPPED
	scanning = scanning || (word != 0 && STATE(word) != ACTIVE && mapper[from] &&
				(notify[from] >> GENERATION(word) & 1));
#else
	scanning = scanning || (word != 0 && STATE(word) != ACTIVE && mapper[from]);
#endif
	notify[from] = 0
}

proctype Broker() {
	byte generation = 1;
	byte operation, second;
	byte page, lane, first, then, entry;
	bool idle;
#ifndef NO_SECOND_LOOK
	byte second_look = NOT_YET;
#endif

	atomic { choose() }
	do
	:: atomic { word != 0 && operation != NOTHING -> retire(operation);
		operation = NOTHING }
	:: atomic { word != 0 && operation == NOTHING && second != NOTHING -> retire(second);
		second = NOTHING }
	:: atomic { notify[0] != 0 -> take_notify(0) }
#if PAGES > 1
	:: atomic { notify[1] != 0 -> take_notify(1) }
#endif
#if PAGES > 2
	:: atomic { notify[2] != 0 -> take_notify(2) }
#endif
#ifdef CRASH
	:: atomic { dead[0] && mapper[0] -> mapper[0] = false;
		scanning = word != 0 && STATE(word) != ACTIVE }
#endif
#ifndef NO_SECOND_LOOK
	:: atomic { second_look == DUE && AGED -> second_look = DONE;
		scanning = true }
#endif
	/* regions_scan() */
	:: atomic { scanning -> scanning = false;
		busy = true;
		count_scan() }
		barrier();
		read_pages();
		if
		:: atomic { idle && STATE(word) == LAZY ->
#ifdef LAZY_ONE_PASS
			gone() }
#else
			word = WORD(GENERATION(word), RETIRING) }
			count_scan();
			barrier();
			read_pages();
			if
			:: atomic { idle -> gone() }
			:: atomic { !idle -> word = WORD(GENERATION(word), LAZY);
				end_busy() }
			fi
#endif
		:: atomic { idle && STATE(word) != LAZY -> gone() }
		:: atomic { !idle -> end_busy() }
		fi
#ifdef REVOKED_REUSED
	:: atomic { word != 0 && STATE(word) == REVOKED -> gone() }
#endif
	:: atomic { word == 0 && generation < GENERATIONS -> generation++;
		choose();
#ifdef HOSTILE
		mapper[PAGES - 1] = true;
#endif
		word = WORD(generation, ACTIVE) }
	:: timeout ->
#if !defined(HOSTILE) && !defined(SAFETY_ONLY)
		assert(word == 0);
#endif
		break
	od
}

init {
	atomic {
		cached[0] = 1;
		mapper[0] = true;
#if CONSUMERS > 1
		cached[1] = 1;
		mapper[1] = true;
#endif
#ifdef HOSTILE
		mapper[PAGES - 1] = true;
#endif
		run Machine();
		run Broker();
		run Thread(0);
		run Thread(1);
#ifdef THREE
		run Thread(2);
#endif
#ifdef CRASH
		run Crash();
#endif
#ifdef HOSTILE
		run Hostile();
#endif
	}
}
