/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <linux/sockios.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include "broker.h"
#include "dispatch.h"
#include "event.h"
#include "log.h"
#include "policy.h"
#include "region.h"
#include "registration.h"
#include "session.h"
#include "wait.h"
#include "wire/codec.h"
#include "wire/compat.h"
#include "wire/fd.h"

#define CONNECTION_FDS 2 /* the socket and the pidfd */
#define DETACHED_CHECK_NS UINT64_C(1000000000)
#define SLOW_CHECK_NS UINT64_C(20000000)
#define SLOW_CHECK_SHARE 500

Identity *identity_ref(Identity *identity) {
	identity->n_refs++;
	return identity;
}

Identity *identity_unref(Identity *identity) {
	if (identity && !--identity->n_refs)
		free(identity);
	return NULL;
}

Identity *identity_new(const Peer *peer) {
	size_t length = strlen(peer->container);
	Identity *identity = calloc(1, sizeof(*identity) + length + 1);

	if (!identity)
		return NULL;
	identity->n_refs = 1;
	identity->pid = (uint32_t)peer->pid;
	identity->uid = peer->uid;
	memcpy(identity->comm, peer->comm, strnlen(peer->comm, WIRE_COMM_SIZE));
	memcpy(identity->container, peer->container, length);
	return identity;
}

bool session_sees(const Session *session, uint32_t uid) {
	return session->roles & WIRE_ROLE_ADMIN || (session->peer.uid == uid && !session->peer.overflow_uid);
}

void session_log(const Session *session, LogId id, const char *format, ...) {
	char fields[128], text[LOG_LINE_MAX / 2];
	va_list args;

	snprintf(fields, sizeof(fields), "SHMBROKER_PID=%d\nSHMBROKER_SESSION=%llu", (int)session->peer.pid,
		 (unsigned long long)session->id);
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	log_write(id, session->peer.uid, fields, "pid %d (%s) of uid %u: %s", (int)session->peer.pid,
		  session->peer.comm, session->peer.uid, text);
}

void session_send(Session *session, const void *message, size_t size, int *fds, size_t n_fds) {
	const Config *config = session->broker->config;
	int r;

	if (session->dying || session->state == SESSION_DETACHED || session->state == SESSION_AWAY || !size)
		return;
	if (session->conn.out_messages >= config->unread_messages ||
	    session->conn.out_bytes + size > config->unread_bytes) {
		session_disconnect(session, 0, "it does not read its replies");
		return;
	}
	r = loop_conn_send(&session->conn, message, size, fds, n_fds, false);
	if (r)
		session_disconnect(session, 0, "its reply could not be queued");
}

void session_error(Session *session, uint16_t opcode, uint64_t serial, uint32_t code, const char *text) {
	uint8_t buffer[WIRE_ERROR_REPLY_MAX] __attribute__((aligned(8)));

	session_send(session, buffer, wire_write_error(buffer, opcode, serial, code, text), NULL, 0);
}

int session_charge_unread(Session *session, uint32_t n_fds) {
	int unread, r;

	if (!n_fds)
		return 0;
	if (!session->conn.out_messages && !ioctl(session->conn.fd, SIOCOUTQ, &unread) && !unread) {
		account_refund(&session->charge_unread);
		/* who reads is served also when all fds are in use */
		if (n_fds == 1)
			return 0;
	}
	r = session->charge_unread.account
		    ? account_charge_more(&session->charge_unread, n_fds)
		    : account_charge(&session->charge_unread, session->account, ACCOUNT_FDS, n_fds);
	return r > 0 ? SHMB_E_NO_FDS : r;
}

static void session_set_may_pass_fds(Session *session, bool may) {
	int value = may;

	if (session->may_pass_fds == may)
		return;
	/* a kernel without it leaves the fds to be refused one by one */
	if (setsockopt(session->conn.fd, SOL_SOCKET, SO_PASSRIGHTS, &value, sizeof(value)) < 0)
		return;
	session->may_pass_fds = may;
}

void session_reload(Session *session) {
	/* its groups are not known before it comes back */
	if (session->state == SESSION_AWAY)
		return;
	policy_roles(session->broker, &session->peer, &session->allowed_roles, &session->rights);
	session->roles &= session->allowed_roles;
	if (session->id && session->index != UINT32_MAX)
		ledger_update_session(&session->broker->ledger, session);
	if (session->state != SESSION_OPEN)
		return;
	session_set_may_pass_fds(session, session->roles & WIRE_ROLE_OWNER);
}

int session_open(Session *session, uint32_t roles, bool accept_unsealed) {
	Broker *broker = session->broker;
	KeeperEntry *entry = &session->parked_pidfd;
	int r;

	if (session->peer.pidfd >= 0) {
		*entry = (KeeperEntry){
			.id = session->id,
			.kind = KEEPER_PIDFD,
			.fds = { session->peer.pidfd, -EBADF },
			.n_fds = 1,
		};
		r = keeper_park(&broker->keeper, &entry, 1);
		if (r)
			return r;
	}
	session->roles = roles;
	session->accept_unsealed = accept_unsealed;
	session->state = SESSION_OPEN;
	loop_timer_unlink(&session->hello_timer);
	session_reload(session);
	ledger_put_session(&broker->ledger, session);
	registry_session_set(&broker->registry, session->index, session->id);
	return 0;
}

static bool session_enter_away(Session *session) {
	if (!table_insert(&session->broker->away, &session->away_link, table_hash(session->id)))
		return false;
	session->account->n_away++;
	return true;
}

static void session_leave_away(Session *session) {
	table_remove(&session->broker->away, &session->away_link);
	session->account->n_away--;
}

/* marks it for the end of the turn; until then nothing of it is freed, whoever walks over its lists */
static void session_die(Session *session) {
	if (session->dying)
		return;
	session->dying = true;
	list_remove(&session->link);
	list_append(&session->broker->dying, &session->link);
	loop_conn_unlink(&session->conn);
	loop_timer_unlink(&session->hello_timer);
	if (session->state == SESSION_AWAY)
		session_leave_away(session);
}

void session_end(Session *session) {
	session_die(session);
	session->attached = false;
}

void session_disconnect(Session *session, uint32_t code, const char *why) {
	uint8_t buffer[WIRE_ERROR_REPLY_MAX] __attribute__((aligned(8)));
	size_t size;

	if (session->dying || session->state == SESSION_DETACHED)
		return;
	session->broker->stats.disconnects++;
	session_log(session, LOG_PEER_DISCONNECTED, "disconnected: %s", why);
	if (code && session->conn.loop && !session->conn.out_messages) {
		size = wire_write_error(buffer, WIRE_OP_HELLO, 0, code, why);
		(void)fd_send(session->conn.fd, buffer, size, NULL, 0, MSG_DONTWAIT);
	}
	session_die(session);
}

static void on_end(LoopConn *conn, int reason, int error) {
	Session *session = container_of(conn, Session, conn);

	(void)reason;
	(void)error;
	ledger_end_session(&session->broker->ledger, session);
	session_end(session);
}

static void on_pidfd(LoopPoll *poll, uint32_t events) {
	Session *session = container_of(poll, Session, pidfd_poll);

	(void)events;
	loop_poll_unlink(poll);
	session_end(session);
}

static void on_message(LoopConn *conn, LoopMessage *message) {
	dispatch(container_of(conn, Session, conn), message);
}

static void on_hello_timeout(LoopTimer *timer) {
	session_disconnect(container_of(timer, Session, hello_timer), SHMB_E_TIMED_OUT,
			   "no HELLO within hello_timeout");
}

/* everything that does not outlive the connection */
static void session_drop_requests(Session *session) {
	for (ListLink *link; (link = list_first(&session->waits));)
		wait_free(container_of(link, Wait, session_link));
	registrations_drop(session);
	if (session->event_mask)
		event_subscribe(session, 0);
	list_remove(&session->lost_link);
	session->events_lost = 0;
}

static void session_drop_leases(Session *session) {
	for (ListLink *link; (link = list_first(&session->leases));) {
		Lease *lease = container_of(link, Lease, session_link);

		if (lease->region)
			region_rescan(lease->region);
		lease_free(lease);
	}
}

static void session_drop_maps(Session *session) {
	for (ListLink *link; (link = list_first(&session->maps));) {
		Map *map = container_of(link, Map, session_link);

		region_rescan(map->region);
		map_free(map);
	}
}

static void session_retire_regions(Session *session) {
	if (list_is_empty(&session->regions))
		return;
	session->broker->stats.owner_deaths++;
	session_log(session, LOG_OWNER_DIED, "the session ended with %u regions of %llu bytes", session->n_regions,
		    (unsigned long long)session->n_bytes);
	event_session(WIRE_EVENT_OWNER_DIED, session);
	for (ListLink *link; (link = list_first(&session->regions));) {
		Region *region = container_of(link, Region, owner_link);

		list_remove(link);
		region->owner = NULL;
		session->n_regions--;
		session->n_bytes -= region->size;
		region_retire(region, WIRE_MODE_STRICT, NULL);
	}
}

static Session *session_free(Session *session) {
	Broker *broker = session->broker;

	session_drop_requests(session);
	session_drop_leases(session);
	session_drop_maps(session);
	/* only a broker that stops has any left: they outlive their owner for a moment */
	for (ListLink *link; (link = list_first(&session->regions));) {
		list_remove(link);
		container_of(link, Region, owner_link)->owner = NULL;
	}
	loop_conn_unlink(&session->conn);
	loop_poll_unlink(&session->pidfd_poll);
	loop_timer_unlink(&session->hello_timer);
	page_deinit(&session->page, broker, session->peer.uid);
	/* it is closed with the peer */
	session->parked_pidfd.n_fds = 0;
	keeper_drop(&broker->keeper, &session->parked_pidfd, session->peer.uid, 0);
	if (session->index != UINT32_MAX) {
		ledger_drop_session(&broker->ledger, session);
		registry_session_release(&broker->registry, session->index);
	}
	table_remove(&broker->by_id, &session->id_link);
	list_remove(&session->link);
	broker->n_sessions--;
	account_refund(&session->charge_session);
	account_refund(&session->charge_fds);
	account_refund(&session->charge_unread);
	if (session->overdrawn)
		session->account->n_overdrawn--;
	account_put(session->account);
	identity_unref(session->identity);
	peer_deinit(&session->peer);
	table_deinit(&session->map_table);
	table_deinit(&session->lease_table);
	free(session);
	return NULL;
}

/* puts a session back at its place: lists are paged by id */
static void sessions_insert(Session *session) {
	ListLink *at = &session->broker->sessions.head;

	while (at->prev != &session->broker->sessions.head && container_of(at->prev, Session, link)->id > session->id)
		at = at->prev;
	session->link.prev = at->prev;
	session->link.next = at;
	at->prev->next = &session->link;
	at->prev = &session->link;
}

static uint64_t clock_now(void) {
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/*
 * Asking takes the kernel some 100 ms when a page of the file is pinned (vmsplice(2), io_uring), in which nobody is
 * served. Whoever does that is asked no more for a while: until its process ends its pages count as mapped.
 */
static bool session_has_unmapped(Session *session) {
	Account *account = session->account;
	uint64_t begin = clock_now(), ns;
	bool unmapped;

	if (account->patience_ns > begin)
		return session->page.fd < 0;
	unmapped = page_is_unmapped(&session->page);
	ns = clock_now() - begin;
	if (ns > SLOW_CHECK_NS)
		account->patience_ns = begin + ns * SLOW_CHECK_SHARE;
	return unmapped;
}

/* The connection is over. True when the lease page goes on counting: a live process may still read the memory. */
static bool session_detach(Session *session) {
	Broker *broker = session->broker;

	if (!session->attached || list_is_empty(&session->maps) || session_has_unmapped(session))
		return false;
	/* an acquire reads this word after it has counted: what is counted later is not granted */
	registry_session_set(&broker->registry, session->index, 0);
	session->state = SESSION_DETACHED;
	ledger_update_session(&broker->ledger, session);
	session->dying = false;
	list_remove(&session->link);
	sessions_insert(session);
	broker->n_detached++;
	list_for_each (link, &session->maps)
		region_rescan(container_of(link, Map, session_link)->region);
	if (!broker->detached_timer.at_ns)
		loop_timer_set(broker->loop, &broker->detached_timer, loop_now(broker->loop) + DETACHED_CHECK_NS);
	return true;
}

/* by message, or counted by its page, which tells even when the session is not believed any more */
static bool session_holds_leases(const Session *session) {
	if (!list_is_empty(&session->leases))
		return true;
	list_for_each (link, &session->maps) {
		const Map *map = container_of(link, Map, session_link);

		if (session->page.header &&
		    layout_lease_page_count(session->page.header, &session->page.shape, map->region->slot))
			return true;
	}
	return false;
}

static void session_bury(Session *session) {
	Broker *broker = session->broker;
	bool was_open = session->state == SESSION_OPEN || session->state == SESSION_AWAY;

	if (was_open) {
		broker->stats.consumer_deaths += session_holds_leases(session);
		session_drop_requests(session);
		session_retire_regions(session);
		session_drop_leases(session);
		event_session(WIRE_EVENT_LEFT, session);
		if (session_detach(session))
			return;
	} else if (session->state == SESSION_DETACHED) {
		broker->n_detached--;
	}
	session_free(session);
}

void sessions_turn(Broker *broker) {
	for (ListLink *link; (link = list_first(&broker->dying));)
		session_bury(container_of(link, Session, link));
}

/*
 * May nothing but its page tell that it is over? Of one that is away not only where its process is not watched: it may
 * have hung up on a broker that died of it. A page that no lane of is used may not have been mapped yet.
 */
static bool only_page_tells(const Session *session) {
	return session->state == SESSION_DETACHED ||
	       (session->state == SESSION_AWAY && session->attached &&
		(session->peer.pidfd < 0 || atomic_load(&session->page.header->lanes_used)));
}

void sessions_check_detached(Broker *broker) {
	bool again = false;

	list_for_each (link, &broker->sessions) {
		Session *session = container_of(link, Session, link);

		if (!only_page_tells(session))
			continue;
		again = true;
		if (session_has_unmapped(session))
			session_end(session);
	}
	if (again)
		loop_timer_set(broker->loop, &broker->detached_timer, loop_now(broker->loop) + DETACHED_CHECK_NS);
}

void sessions_abandon(Broker *broker) {
	sessions_turn(broker);
	for (ListLink *link; (link = list_first(&broker->sessions));)
		session_free(container_of(link, Session, link));
}

/* too much for this peer or for us: it is told, and no session is made */
static int turn_away(Broker *broker, const Peer *peer, int fd, uint32_t code, const char *text) {
	uint8_t buffer[WIRE_ERROR_REPLY_MAX] __attribute__((aligned(8)));
	size_t size = wire_write_error(buffer, WIRE_OP_HELLO, 0, code, text);

	broker->stats.connections_refused++;
	log_write(LOG_PEER_QUOTA, peer->uid, NULL, "a connection of uid %u was turned away: %s", peer->uid, text);
	(void)fd_send(fd, buffer, size, NULL, 0, MSG_DONTWAIT);
	closer_close(broker->closer, peer->uid, fd);
	return 0;
}

/* a session that is away is charged for already: the connection that it comes back by must not fail for that */
static bool session_overdraw(Session *session) {
	Account *account = session->account;

	if (session->overdrawn)
		return true;
	if (account->n_overdrawn >= account->n_away)
		return false;
	account->n_overdrawn++;
	session->overdrawn = true;
	return true;
}

static int session_charge(Session *session) {
	Account *account = session->account;
	int r;

	r = account_charge(&session->charge_session, account, ACCOUNT_SESSIONS, 1);
	if (r && !session_overdraw(session))
		return SHMB_E_QUOTA;
	if (r)
		account_take(&session->charge_session, account, ACCOUNT_SESSIONS, 1);
	r = account_charge(&session->charge_fds, account, ACCOUNT_FDS, CONNECTION_FDS);
	if (r && !session_overdraw(session))
		return r == ACCOUNT_E_FULL ? SHMB_E_NO_FDS : SHMB_E_QUOTA;
	if (r)
		account_take(&session->charge_fds, account, ACCOUNT_FDS, CONNECTION_FDS);
	session->index = registry_session_reserve(&session->broker->registry);
	return session->index != UINT32_MAX || session_overdraw(session) ? 0 : SHMB_E_QUOTA;
}

static int session_link(Session *session, int fd) {
	Broker *broker = session->broker;
	int r;

	session->conn.fd = fd;
	session->conn.owner_uid = session->peer.uid;
	session->may_pass_fds = true;
	session->conn.on_message = on_message;
	session->conn.on_end = on_end;
	r = loop_conn_link(broker->loop, &session->conn);
	if (r)
		return r;
	if (session->peer.pidfd >= 0) {
		session->pidfd_poll.fd = session->peer.pidfd;
		session->pidfd_poll.on_ready = on_pidfd;
		r = loop_poll_link(broker->loop, &session->pidfd_poll);
		if (r)
			return r;
	}
	session->hello_timer.on_time = on_hello_timeout;
	if (broker->config->hello_timeout_ns)
		loop_timer_set(broker->loop, &session->hello_timer,
			       loop_now(broker->loop) + broker->config->hello_timeout_ns);
	if (!(session->allowed_roles & WIRE_ROLE_OWNER))
		session_set_may_pass_fds(session, false);
	return 0;
}

static Session *session_alloc(Broker *broker) {
	Session *session = calloc(1, sizeof(*session));

	if (!session)
		return NULL;
	session->broker = broker;
	session->peer.pidfd = -EBADF;
	session->conn.fd = -EBADF;
	session->page.fd = -EBADF;
	session->index = UINT32_MAX;
	list_init(&session->regions);
	list_init(&session->maps);
	list_init(&session->leases);
	list_init(&session->waits);
	list_init(&session->registrations);
	list_append(&broker->sessions, &session->link);
	broker->n_sessions++;
	return session;
}

static Session *session_new(Broker *broker, Peer *peer) {
	Session *session = session_alloc(broker);

	if (!session)
		return NULL;
	session->state = SESSION_NEW;
	session->peer = *peer;
	*peer = (Peer){ .pidfd = -EBADF };
	session->born_ns = loop_now(broker->loop);
	policy_roles(broker, &session->peer, &session->allowed_roles, &session->rights);
	return session;
}

int session_accept(Broker *broker, int accepted, uint32_t listener) {
	_cleanup_(closep) int fd = accepted;
	Peer peer;
	Session *session;
	int r;

	broker->stats.connections++;
	r = peer_read(fd, &peer);
	if (r)
		return r;
	/* gone already, whoever else holds its end: nothing would ever tell that such a session is over */
	if (peer.exited) {
		peer_deinit(&peer);
		closer_close(broker->closer, LOG_NO_UID, steal_fd(&fd));
		return 0;
	}
	session = session_new(broker, &peer);
	if (!session) {
		peer_deinit(&peer);
		return -ENOMEM;
	}
	session->listener = listener;
	session->account = account_get(&broker->accounts, session->peer.uid);
	session->identity = identity_new(&session->peer);
	if (!session->account || !session->identity) {
		r = -ENOMEM;
	} else {
		r = session_charge(session);
		if (r > 0)
			r = turn_away(broker, &session->peer, steal_fd(&fd), (uint32_t)r,
				      r == SHMB_E_NO_FDS ? "no fds: the broker's file descriptor budget is used up"
							 : "this user has too many connections")
				    ?: SHMB_E_QUOTA;
	}
	if (!r) {
		session->id = ++broker->last_session;
		ledger_set_last_session(&broker->ledger, session->id);
		r = table_insert(&broker->by_id, &session->id_link, table_hash(session->id)) ? 0 : -ENOMEM;
	}
	if (!r) {
		if (getrandom(session->token, sizeof(session->token), 0) != (ssize_t)sizeof(session->token))
			r = -EIO;
	}
	if (!r)
		r = session_link(session, steal_fd(&fd));
	if (r) {
		session_free(session);
		return r > 0 ? 0 : r;
	}
	return 0;
}

/* ---- after a restart ---- */

static void session_restore_peer(Session *session, const LedgerSession *at) {
	session->peer.pid = (pid_t)at->pid;
	session->peer.uid = at->uid;
	session->peer.gid = at->gid;
	session->peer.start_time = at->start_time;
	session->peer.overflow_uid = at->flags & LEDGER_SESSION_OVERFLOW_UID;
	memcpy(session->peer.comm, at->comm, sizeof(at->comm));
	memcpy(session->peer.container, at->container, sizeof(at->container) - 1);
}

Session *session_restore(Broker *broker, uint32_t index) {
	const LedgerSession *at = ledger_session(&broker->ledger, index);
	Session *session = session_alloc(broker);

	if (!session)
		return NULL;
	session->id = at->id;
	session->index = index;
	session->state = at->flags & LEDGER_SESSION_DETACHED ? SESSION_DETACHED : SESSION_AWAY;
	session->listener = at->listener;
	session->allowed_roles = session->roles = at->roles;
	session->rights = at->rights;
	session->accept_unsealed = at->flags & LEDGER_SESSION_ACCEPTS_UNSEALED;
	session->born_ns = at->born_ns;
	memcpy(session->token, at->token, sizeof(session->token));
	session_restore_peer(session, at);
	session->account = account_get(&broker->accounts, at->uid);
	session->identity = identity_new(&session->peer);
	if (!session->account || !session->identity ||
	    !table_insert(&broker->by_id, &session->id_link, table_hash(session->id)) ||
	    (session->state == SESSION_AWAY && !session_enter_away(session))) {
		session->index = UINT32_MAX;
		return session_free(session);
	}
	account_take(&session->charge_session, session->account, ACCOUNT_SESSIONS, 1);
	account_take(&session->charge_fds, session->account, ACCOUNT_FDS, CONNECTION_FDS);
	if (at->event_mask)
		event_subscribe(session, at->event_mask & ((UINT32_C(1) << (WIRE_EVENT_OVERFLOW + 1)) - 1));
	if (session->state == SESSION_DETACHED)
		broker->n_detached++;
	/* its connection, which was up, is over: the last broker did not get to the end of it */
	if (at->flags & LEDGER_SESSION_ENDING && session->state == SESSION_AWAY)
		session_end(session);
	return session;
}

int session_set_pidfd(Session *session, int pidfd) {
	KeeperEntry *entry = &session->parked_pidfd;
	bool is_parked = pidfd >= 0;
	int r;

	if (!is_parked)
		pidfd = peer_open(session->peer.pid, session->peer.start_time);
	if (pidfd == -ESRCH)
		session_end(session);
	if (pidfd < 0)
		return 0;
	session->peer.pidfd = pidfd;
	session->pidfd_poll.fd = pidfd;
	session->pidfd_poll.on_ready = on_pidfd;
	*entry = (KeeperEntry){ .id = session->id, .kind = KEEPER_PIDFD, .fds = { pidfd, -EBADF }, .n_fds = 1 };
	r = loop_poll_link(session->broker->loop, &session->pidfd_poll);
	/* in vain as long as there is no segment: then the next broker looks for the process as this one did */
	if (!r && !is_parked)
		(void)keeper_park(&session->broker->keeper, &entry, 1);
	return r;
}

Session *session_find(Broker *broker, uint64_t id) {
	table_for_each(link, &broker->by_id, table_hash(id)) {
		Session *session = container_of(link, Session, id_link);

		if (session->id == id)
			return session;
	}
	return NULL;
}

Session *session_find_away(Broker *broker, uint64_t id) {
	table_for_each(link, &broker->away, table_hash(id)) {
		Session *session = container_of(link, Session, away_link);

		if (session->id == id && !session->dying)
			return session;
	}
	return NULL;
}

static uint64_t pidfd_inode(const Peer *peer) {
	struct stat st;

	return peer->pidfd >= 0 && !fstat(peer->pidfd, &st) ? st.st_ino : 0;
}

bool session_is_same(const Session *session, const Session *newcomer) {
	/* before Linux 6.9 all pidfds have one inode: pid and start time tell then */
	return session->listener == newcomer->listener && session->peer.uid == newcomer->peer.uid &&
	       session->peer.pid == newcomer->peer.pid && session->peer.start_time == newcomer->peer.start_time &&
	       (session->peer.pidfd < 0 || newcomer->peer.pidfd < 0 ||
		pidfd_inode(&session->peer) == pidfd_inode(&newcomer->peer));
}

/* what was read at its new connection is newer, and has the groups */
static void peer_refresh(Peer *peer, Peer *newer) {
	Peer old = *peer;

	*peer = *newer;
	*newer = old;
	newer->pidfd = peer->pidfd;
	newer->pidfd_by_pid = peer->pidfd_by_pid;
	peer->pidfd = old.pidfd;
	peer->pidfd_by_pid = old.pidfd_by_pid;
}

void session_resume(Session *session, Session *newcomer) {
	Broker *broker = session->broker;

	session_leave_away(session);
	session->state = SESSION_OPEN;
	loop_conn_move(&session->conn, &newcomer->conn);
	session->may_pass_fds = newcomer->may_pass_fds;
	/* the newcomer's poll is on its own pidfd */
	peer_refresh(&session->peer, &newcomer->peer);
	session_end(newcomer);
	session_reload(session);
	/* notices that it sent to a broker that was no more */
	list_for_each (link, &session->maps)
		region_rescan(container_of(link, Map, session_link)->region);
	/* events that it may have missed */
	if (session->event_mask && !session->events_lost)
		session->events_lost = 1;
	if (session->events_lost && !list_is_linked(&session->lost_link))
		list_append(&broker->lost, &session->lost_link);
}
