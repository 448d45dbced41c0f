/* SPDX-License-Identifier: Apache-2.0 */

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "broker.h"
#include "log.h"
#include "session.h"
#include "stats.h"

typedef struct Gauge {
	const char *name;
	const char *help;
	uint64_t (*read)(const Broker *broker);
} Gauge;

static uint64_t read_sessions(const Broker *broker) {
	return broker->n_sessions;
}

static uint64_t read_detached(const Broker *broker) {
	return broker->n_detached;
}

static uint64_t read_away(const Broker *broker) {
	return broker->away.n;
}

static uint64_t read_parked(const Broker *broker) {
	return broker->keeper.n_parked;
}

static uint64_t read_regions(const Broker *broker) {
	return broker->registry.n_regions;
}

static uint64_t read_unindexed(const Broker *broker) {
	return broker->registry.n_unindexed;
}

static uint64_t read_objects(const Broker *broker) {
	return broker->objects.n;
}

static uint64_t read_capacity(const Broker *broker) {
	return broker->registry.shape.capacity;
}

static uint64_t read_fd_budget(const Broker *broker) {
	return broker->fd_budget;
}

static uint64_t read_fds_closing(const Broker *broker) {
	return closer_total(broker->closer);
}

static uint64_t read_suspended(const Broker *broker) {
	return broker->n_suspended;
}

static uint64_t read_suppressed(const Broker *broker) {
	(void)broker;
	return log_suppressed_total();
}

static const Gauge gauges[] = {
	{ "sessions", "sessions and connections", read_sessions },
	{ "sessions_detached", "sessions ended by the broker whose lease page still counts", read_detached },
	{ "sessions_away", "sessions that have not come back since the broker was restarted", read_away },
	{ "parked", "what is parked outside the broker: pieces of memory, lease pages, processes", read_parked },
	{ "regions", "regions, retiring and revoked ones included", read_regions },
	{ "regions_unindexed", "regions that resolve by LOOKUP only", read_unindexed },
	{ "objects", "pieces of memory behind regions", read_objects },
	{ "capacity", "slots for regions", read_capacity },
	{ "fd_budget", "file descriptors that may be held for clients", read_fd_budget },
	{ "fds_closing", "file descriptors that wait to be closed", read_fds_closing },
	{ "uids_suspended", "users one of whose file descriptors hangs in close()", read_suspended },
	{ "log_suppressed", "log lines that were suppressed", read_suppressed },
};

static const char *const counter_names[][2] = {
#define STAT(_name, _help) { #_name, _help },
	BROKER_COUNTERS(STAT)
#undef STAT
};

#define N_COUNTERS (sizeof(counter_names) / sizeof(counter_names[0]))
#define N_GAUGES (sizeof(gauges) / sizeof(gauges[0]))
#define N_BROKER (N_COUNTERS + N_GAUGES + _ACCOUNT_RESOURCE_N)

/* number @i of the broker as a whole: counters, gauges, then what all accounts hold together */
static void stat_get(const Broker *broker, uint64_t i, Stat *ret, char *name, size_t size) {
	const uint64_t counters[] = {
#define STAT(_name, _help) broker->stats._name,
		BROKER_COUNTERS(STAT)
#undef STAT
	};

	*ret = (Stat){ .uid = WIRE_ANY_UID, .type = WIRE_STAT_GAUGE };
	if (i < N_COUNTERS) {
		ret->type = WIRE_STAT_COUNTER;
		ret->name = counter_names[i][0];
		ret->help = counter_names[i][1];
		ret->value = counters[i];
	} else if ((i -= N_COUNTERS) < N_GAUGES) {
		ret->name = gauges[i].name;
		ret->help = gauges[i].help;
		ret->value = gauges[i].read(broker);
	} else {
		i -= N_GAUGES;
		snprintf(name, size, "held_%s", account_resource_name((AccountResource)i));
		ret->name = name;
		ret->help = account_resource_meaning((AccountResource)i);
		ret->value = broker->accounts.used[i];
	}
}

uint32_t stats_each(Session *session, uint64_t cursor, bool help, bool accounts, uint64_t *ret_next,
		    bool (*each)(void *userdata, const Stat *stat), void *userdata) {
	const Broker *broker = session->broker;
	uint64_t position = 0;
	uint32_t n = 0;
	char name[48];
	Stat stat;

	for (uint64_t i = 0; i < N_BROKER; ++i, ++position) {
		if (position < cursor)
			continue;
		stat_get(broker, i, &stat, name, sizeof(name));
		stat.help = help ? stat.help : "";
		if (!each(userdata, &stat)) {
			*ret_next = position;
			return n;
		}
		n++;
	}
	if (accounts) {
		list_for_each (link, &broker->accounts.list) {
			const Account *account = container_of(link, Account, link);

			for (uint32_t i = 0; i < _ACCOUNT_RESOURCE_N; ++i, ++position) {
				if (position < cursor || !session_sees(session, account->uid))
					continue;
				snprintf(name, sizeof(name), "held_%s", account_resource_name((AccountResource)i));
				stat = (Stat){
					.name = name,
					.help = help ? account_resource_meaning((AccountResource)i) : "",
					.value = account->held[i],
					.uid = account->uid,
					.type = WIRE_STAT_GAUGE,
				};
				if (!each(userdata, &stat)) {
					*ret_next = position;
					return n;
				}
				n++;
			}
		}
	}
	*ret_next = 0;
	return n;
}

void stats_info(const Broker *broker, void (*each)(void *userdata, const char *key, const char *value),
		void *userdata) {
	char name[48], number[32], cuda[WIRE_TEXT_MAX];

	each(userdata, "version", PACKAGE_VERSION);
	each(userdata, "loop", loop_name(broker->loop));
	each(userdata, "loop_reason", loop_reason(broker->loop));
	each(userdata, "membarrier", broker->barrier ? "yes" : "no");
	each(userdata, "membarrier_reason", broker->barrier_reason);
	each(userdata, "survives_restart", broker->keeper.enabled ? "yes" : "no");
	snprintf(number, sizeof(number), "%d", (int)getpid());
	each(userdata, "pid", number);
	snprintf(number, sizeof(number), "%" PRIu64, loop_now(broker->loop) - broker->start_ns);
	each(userdata, "uptime_ns", number);
	snprintf(number, sizeof(number), "%u", broker->registry.shape.capacity);
	each(userdata, "capacity", number);
	snprintf(number, sizeof(number), "%" PRIu64, broker->fd_budget);
	each(userdata, "fd_budget", number);
	for (AccountResource i = 0; i < _ACCOUNT_RESOURCE_N; ++i) {
		if (broker->accounts.limits[i] == ACCOUNT_UNLIMITED)
			continue;
		snprintf(name, sizeof(name), "quota_%s", account_resource_name(i));
		snprintf(number, sizeof(number), "%" PRIu64, broker->accounts.limits[i]);
		each(userdata, name, number);
	}
	each(userdata, "unsealed", broker->config->unsealed ? "accept" : "refuse");
	cuda_describe(broker->cuda, cuda, sizeof(cuda));
	each(userdata, "cuda", cuda);
}
