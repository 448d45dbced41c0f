/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Session: one client process at the other end of a connection.
 *
 * A session is made at accept and opened by HELLO. It ends when the peer hangs up or its process exits,
 * whichever is first: its regions retire strictly and its leases are gone. When the broker itself ends it
 * (malformed message, unread replies, retire timeout) while the process lives, it is first DETACHED: marked so in
 * the registry's session table, where acquire looks; its lease page counts until the process has unmapped it or
 * is gone. Time alone never ends a session that was opened.
 *
 * A session that an earlier broker left in the ledger is AWAY until its process shows its token (session_resume());
 * everything it has stays meanwhile.
 */

#include "account.h"
#include "lease.h"
#include "list.h"
#include "log.h"
#include "loop.h"
#include "peer.h"
#include "table.h"
#include "wire/protocol.h"

typedef struct Broker Broker;
typedef struct Identity Identity;
typedef struct Session Session;
typedef struct Wait Wait;

enum {
	SESSION_NEW, /* no HELLO yet */
	SESSION_OPEN,
	SESSION_AWAY,	  /* the broker was restarted, and it has not yet come back */
	SESSION_DETACHED, /* no connection any more, but its page may count */
};

/* who somebody was, shared by a session and the regions it registered */
struct Identity {
	unsigned long n_refs;
	uint32_t pid;
	uint32_t uid;
	char comm[WIRE_COMM_SIZE + 1];
	char container[];
};

struct Session {
	Broker *broker;
	int state;
	LoopConn conn;
	LoopPoll pidfd_poll;
	KeeperEntry parked_pidfd;
	TableLink id_link;   /* in Broker.by_id */
	TableLink away_link; /* in Broker.away while it is */
	LoopTimer hello_timer;
	Peer peer;
	Identity *identity;
	Account *account;
	AccountCharge charge_session;
	AccountCharge charge_fds;
	AccountCharge charge_unread; /* fds in replies that the peer may not have read */
	ListLink link;		     /* in Broker.sessions, oldest first */
	uint64_t id;
	uint8_t token[WIRE_TOKEN_SIZE];
	uint64_t born_ns;
	uint32_t listener;	/* identity is (listener, uid) */
	uint32_t index;		/* in the registry's session table, UINT32_MAX for none */
	uint32_t allowed_roles; /* by configuration, at HELLO and at reload */
	uint32_t roles;
	uint32_t rights;
	bool accept_unsealed;
	bool attached;
	bool may_pass_fds;
	bool dying;	/* in Broker.dying */
	bool overdrawn; /* beyond the quota: only good to come back as a session that is away */
	Page page;
	List regions;	    /* Region.owner_link */
	List maps;	    /* Map.session_link */
	List leases;	    /* Lease.session_link */
	List waits;	    /* Wait.session_link */
	List registrations; /* Registration.session_link: those that wait for a GPU's helper */
	Table map_table;
	Table lease_table;
	uint32_t n_regions;
	uint32_t n_maps;
	uint32_t n_leases;
	uint32_t n_waits;
	uint64_t n_bytes;
	uint32_t event_mask;
	ListLink subscriber_link; /* in Broker.subscribers while that is not 0 */
	uint64_t events_lost;
	ListLink lost_link; /* in Broker.lost while events_lost is not 0 */
};

/* Takes a connection that came in at listener number @listener. Consumes @fd. Returns 0 (also when the peer was turned away), or -errno. */
int session_accept(Broker *broker, int fd, uint32_t listener);
/*
 * HELLO: it gets what belongs to a session, in a ledger that may outlive the broker. Returns 0, or -errno of
 * keeper_park().
 */
int session_open(Session *session, uint32_t roles, bool accept_unsealed);
/*
 * The broker ends the session: @why is logged; an ERROR message with @code is tried if @code is not 0. The object
 * stays valid until the end of the turn.
 */
void session_disconnect(Session *session, uint32_t code, const char *why);
/* The peer is gone: everything it had retires or is dropped at once. Valid until the end of the turn. */
void session_end(Session *session);
/* end of turn: frees what died in it, tells slow subscribers what they missed */
void sessions_turn(Broker *broker);
/* One that the ledger has at @index: AWAY, or DETACHED, or about to end. Without its fds. NULL without memory. */
Session *session_restore(Broker *broker, uint32_t index);
/* its pidfd, consumed; without one it is looked for by pid and start time. Returns 0 or -errno. */
int session_set_pidfd(Session *session, int pidfd);
/* the session with that id, or NULL */
Session *session_find(Broker *broker, uint64_t id);
/* the session that is AWAY with that id, or NULL */
Session *session_find_away(Broker *broker, uint64_t id);
/* is @newcomer the process that opened @session, through the same listener? */
bool session_is_same(const Session *session, const Session *newcomer);
/* @session goes on with the connection of @newcomer, which ends */
void session_resume(Session *session, Session *newcomer);
/*
 * Frees detached sessions whose page is unmapped, and those that are away which nothing else can tell the end of; again
 * from time to time while there are any.
 */
void sessions_check_detached(Broker *broker);
/* frees every session without retiring anything: the broker stops */
void sessions_abandon(Broker *broker);
/* rights may have changed: for new requests */
void session_reload(Session *session);

/* Queues a message with fds (borrowed). Disconnects a peer that does not read. */
void session_send(Session *session, const void *message, size_t size, int *fds, size_t n_fds);
/*
 * Fds in replies that a peer leaves unread are in the broker's table, or count as in flight from its user: the peer
 * pays for @n_fds more, before they are sent, until it has read all. Returns 0, SHMB_E_NO_FDS or -errno.
 */
int session_charge_unread(Session *session, uint32_t n_fds);
/* Sends an error reply; @text NULL for the code's own sentence. */
void session_error(Session *session, uint16_t opcode, uint64_t serial, uint32_t code, const char *text);
/* is this peer an admin, or the same uid (and no overflow uid) ? */
bool session_sees(const Session *session, uint32_t uid);
/* logs a line that this peer has caused, with its pid and session as fields */
void session_log(const Session *session, LogId id, const char *format, ...)
	__attribute__((__format__(__printf__, 3, 4)));

/* NULL without memory */
Identity *identity_new(const Peer *peer);
Identity *identity_ref(Identity *identity);
Identity *identity_unref(Identity *identity);
