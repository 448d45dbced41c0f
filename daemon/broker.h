/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Broker: everything that one shmbrokerd has. Made once by main(), lives as long as the process.
 */

#include "account.h"
#include "closer.h"
#include "config.h"
#include "cuda/cuda.h"
#include "keeper.h"
#include "ledger.h"
#include "list.h"
#include "loop.h"
#include "object.h"
#include "registry.h"
#include "table.h"

typedef struct Broker Broker;
typedef struct BrokerListener BrokerListener;
typedef struct Session Session;
typedef struct Stats Stats;

/* clang-format off */
/* STAT(name, "help"): counters that only grow; gauges are computed in stats.c */
#define BROKER_COUNTERS(STAT)                                                                                  \
	STAT(connections, "connections accepted")                                                              \
	STAT(connections_refused, "connections turned away: quota or fds")                                     \
	STAT(messages, "messages received")                                                                    \
	STAT(messages_malformed, "messages that ended their connection")                                       \
	STAT(registrations, "regions registered")                                                              \
	STAT(registrations_refused, "entries of REGISTER that were refused")                                   \
	STAT(fds_received, "file descriptors received from clients")                                           \
	STAT(fds_refused, "file descriptors that were not shareable memory")                                   \
	STAT(fds_lost, "messages whose file descriptors did not fit")                                          \
	STAT(lookups, "entries of LOOKUP answered with memory")                                                \
	STAT(lookups_refused, "entries of LOOKUP that were refused")                                           \
	STAT(maps, "generations handed to consumers")                                                          \
	STAT(releases, "leases released by message")                                                           \
	STAT(notifies, "release notices from lease pages")                                                     \
	STAT(retired, "regions retired")                                                                       \
	STAT(revoked, "regions revoked")                                                                       \
	STAT(gone, "regions gone")                                                                             \
	STAT(discarded_bytes, "bytes given back by discard")                                                   \
	STAT(scans, "lease page scans")                                                                        \
	STAT(pages_scanned, "lease pages read by scans")                                                       \
	STAT(barriers, "membarrier calls")                                                                     \
	STAT(releases_missed, "regions gone that only a second look found released")                           \
	STAT(owner_deaths, "sessions that ended while they owned regions")                                     \
	STAT(consumer_deaths, "sessions that ended while they held leases")                                    \
	STAT(resumes, "sessions resumed after a restart of the broker")                                        \
	STAT(disconnects, "sessions ended by the broker")                                                      \
	STAT(events, "events sent")                                                                            \
	STAT(events_dropped, "events collapsed into OVERFLOW")                                                 \
	STAT(quota_refusals, "requests over a quota or a fair share")
/* clang-format on */

struct Stats {
#define STAT(_name, _help) uint64_t _name;
	BROKER_COUNTERS(STAT)
#undef STAT
};

struct BrokerListener {
	Broker *broker;
	LoopListener listener;
};

struct Broker {
	ConfigPaths paths;
	Config *config;
	Loop *loop;
	Closer *closer;
	Cuda *cuda;
	Spin spin;
	Accounts accounts;
	Registry registry;
	Ledger ledger;
	Keeper keeper;
	Objects objects;
	Stats stats;
	uint64_t start_ns;
	uint64_t fd_budget;
	bool barrier; /* membarrier works: lease pages may be asymmetric */
	char barrier_reason[64];
	uint64_t last_session;
	uint64_t last_lease;
	List sessions;
	Table away;	   /* Session.away_link, by id */
	Table by_id;	   /* Session.id_link, all of them */
	List subscribers;  /* Session.subscriber_link */
	List dying;	   /* Session.link of what ends with this turn */
	List scan;	   /* Region.scan_link */
	List second_looks; /* Region.second_look_link, by time */
	List lost;	   /* Session.lost_link */
	List free_leases;  /* Lease.session_link */
	uint32_t n_free_leases;
	uint32_t n_sessions;
	uint32_t n_detached;
	uint64_t n_recovered_fds; /* of sessions and objects of an earlier broker */
	LoopTimer detached_timer;
	LoopTimer second_look_timer;
	LoopTimer closer_timer;
	LoopTimer recovered_timer;
	LoopTimer watchdog_timer;
	LoopTimer status_timer;
	uint64_t status_ns;	 /* when the service manager was last told */
	uint32_t status_regions; /* and what */
	uint32_t status_sessions;
	LoopPoll signal_poll;
	int signal_fd;
	uint32_t suspended[CLOSER_THREADS_MAX]; /* uids one of whose closes hangs */
	size_t n_suspended;
	bool is_recovered; /* and has not yet had its first turn */
	bool is_final;	   /* it stops and nobody goes on with what it has */
	int aside_fds[2];  /* of a state that could not be taken over, for a report; else -EBADF */
	BrokerListener *listeners;
	size_t n_listeners;
	int *listen_fds;
	char **bound_paths; /* sockets of our own, unlinked at the end; NULL when they were handed over */
	uint8_t *reply;	    /* WIRE_MESSAGE_MAX bytes that requests build their replies in */
};

/*
 * Makes the broker: takes over listening sockets or binds those of the configuration, sets up the loop. @loop_kind
 * overrides the configuration unless it is < 0. Consumes @config. Returns 0 or -errno, which was logged.
 */
int broker_new(Broker **ret, Config *config, const ConfigPaths *paths, int loop_kind);
Broker *broker_free(Broker *broker);
/* READY, run until SIGTERM, and stop in order; nothing is retired */
int broker_run(Broker *broker);
/* May this uid pass no fds, because the close of one hangs? Its fds that wait are bounded meanwhile. */
#define BROKER_SUSPENDED_FDS_MAX 1024
bool broker_is_suspended(const Broker *broker, uint32_t uid);
/* takes the configuration again; a bad one changes nothing */
void broker_reload(Broker *broker);
