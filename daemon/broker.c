/* SPDX-License-Identifier: Apache-2.0 */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>

#include "broker.h"
#include "event.h"
#include "kill-point.h"
#include "listen.h"
#include "log.h"
#include "notify.h"
#include "recover.h"
#include "region.h"
#include "session.h"
#include "wire/barrier.h"
#include "wire/fd.h"

#define FD_TABLE_MIN 16384
#define CLOSER_CHECK_NS UINT64_C(100000000)
#define STATUS_NS UINT64_C(1000000000) /* the service manager is told no more often than that */

bool broker_is_suspended(const Broker *broker, uint32_t uid) {
	for (size_t i = 0; i < broker->n_suspended; ++i)
		if (broker->suspended[i] == uid)
			return true;
	return false;
}

static void on_stuck(void *userdata, uint32_t uid, int fd, uint64_t ms) {
	Broker *broker = userdata;

	if (!broker_is_suspended(broker, uid) && broker->n_suspended < CLOSER_THREADS_MAX)
		broker->suspended[broker->n_suspended++] = uid;
	log_write(
		LOG_CLOSE_STUCK, LOG_NO_UID, NULL,
		"close of fd %d from uid %u hangs for %" PRIu64
		" ms; that user may register nothing meanwhile. If it is FUSE, "
		"find the mount's device number in /proc/%d/mountinfo and write 1 to /sys/fs/fuse/connections/MINOR/abort",
		fd, uid, ms, (int)getpid());
}

static void on_closer_time(LoopTimer *timer) {
	Broker *broker = container_of(timer, Broker, closer_timer);

	closer_check(broker->closer, on_stuck, broker);
	for (size_t i = 0; i < broker->n_suspended;) {
		if (closer_pending(broker->closer, broker->suspended[i]))
			i++;
		else
			broker->suspended[i] = broker->suspended[--broker->n_suspended];
	}
	if (closer_total(broker->closer))
		loop_timer_set(broker->loop, timer, loop_now(broker->loop) + CLOSER_CHECK_NS);
}

static void on_detached_time(LoopTimer *timer) {
	sessions_check_detached(container_of(timer, Broker, detached_timer));
}

static void on_watchdog_time(LoopTimer *timer) {
	Broker *broker = container_of(timer, Broker, watchdog_timer);

	notify_watchdog();
	loop_timer_set(broker->loop, timer, loop_now(broker->loop) + notify_watchdog_interval_ns());
}

static void on_recovered_time(LoopTimer *timer) {
	/* there is a first turn, whether or not anybody comes: at its end what was recovered has been looked at */
	(void)timer;
}

static void broker_status(Broker *broker) {
	broker->status_ns = loop_now(broker->loop);
	broker->status_regions = broker->registry.n_regions;
	broker->status_sessions = broker->n_sessions;
	notify_status("%u regions, %u sessions, loop %s", broker->status_regions, broker->status_sessions,
		      loop_name(broker->loop));
}

static void on_status_time(LoopTimer *timer) {
	broker_status(container_of(timer, Broker, status_timer));
}

static bool status_has_changed(const Broker *broker) {
	return broker->status_regions != broker->registry.n_regions || broker->status_sessions != broker->n_sessions;
}

static void on_turn(void *userdata) {
	Broker *broker = userdata;

	/* what ended frees leases, whose regions may be gone, of which subscribers are told, who may not read */
	while (!list_is_empty(&broker->dying) || !list_is_empty(&broker->scan)) {
		sessions_turn(broker);
		regions_scan(broker);
	}
	events_turn(broker);
	keeper_turn(&broker->keeper);
	if (broker->is_recovered) {
		broker->is_recovered = false;
		kill_point();
		broker->ledger.header->n_recoveries = 0;
	}
	if (status_has_changed(broker) && !broker->status_timer.at_ns)
		loop_timer_set(broker->loop, &broker->status_timer, broker->status_ns + STATUS_NS);
	if (closer_total(broker->closer) && !broker->closer_timer.at_ns)
		loop_timer_set(broker->loop, &broker->closer_timer, loop_now(broker->loop) + CLOSER_CHECK_NS);
}

/* clients spin only where the broker does not run */
static void on_spin(void *userdata) {
	Broker *broker = userdata;
	uint32_t cpu = (uint32_t)sched_getcpu();
	RegistryHeader *header = broker->registry.header;

	if (atomic_load_explicit(&header->broker_cpu, memory_order_relaxed) != cpu)
		atomic_store_explicit(&header->broker_cpu, cpu, memory_order_relaxed);
}

static void broker_init_spin(Broker *broker) {
	spin_init(&broker->spin, broker->config->spin, spin_cpus());
	atomic_store(&broker->registry.header->spin_us, (uint32_t)(broker->spin.ns / 1000));
	if (broker->spin.ns)
		loop_set_spin(broker->loop, &broker->spin, on_spin, broker);
}

static void on_accept(LoopListener *listener, int fd) {
	BrokerListener *at = container_of(listener, BrokerListener, listener);
	Broker *broker = at->broker;
	int r;

	if (fd < 0) {
		log_write(LOG_INTERNAL_ERROR, LOG_NO_UID, NULL, "accept: %s", strerror(-fd));
		return;
	}
	r = session_accept(broker, fd, (uint32_t)(at - broker->listeners));
	if (r)
		log_write(LOG_INTERNAL_ERROR, LOG_NO_UID, NULL, "a connection could not be taken: %s", strerror(-r));
}

void broker_reload(Broker *broker) {
	_cleanup_(freep) char *error = NULL;
	Config *config;
	int r;

	notify_reloading();
	r = config_load(&config, &broker->paths, &error);
	if (r) {
		log_write(LOG_RELOAD_FAILED, LOG_NO_UID, NULL, "%s; the configuration in force stays",
			  error ?: strerror(-r));
		notify_ready("the configuration was not taken: see the log");
		return;
	}
	cuda_configure(broker->cuda, config);
	config_free(broker->config);
	broker->config = config;
	accounts_configure(&broker->accounts, config);
	list_for_each (link, &broker->sessions)
		session_reload(container_of(link, Session, link));
	log_write(LOG_RELOAD, LOG_NO_UID, NULL, "the configuration was read again");
	notify_ready(NULL);
	broker_status(broker);
}

static void on_signal(LoopPoll *poll, uint32_t events) {
	Broker *broker = container_of(poll, Broker, signal_poll);
	struct signalfd_siginfo info;

	(void)events;
	while (read(broker->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
		if (info.ssi_signo == SIGHUP) {
			broker_reload(broker);
		} else {
			/* SIGTERM may be the beginning of a restart */
			broker->is_final = info.ssi_signo == SIGINT;
			loop_quit(broker->loop);
		}
	}
}

static int broker_init_signals(Broker *broker) {
	sigset_t mask;

	sigemptyset(&mask);
	sigaddset(&mask, SIGTERM);
	sigaddset(&mask, SIGINT);
	sigaddset(&mask, SIGHUP);
	if (sigprocmask(SIG_BLOCK, &mask, NULL) < 0)
		return -errno;
	signal(SIGPIPE, SIG_IGN);
	broker->signal_fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
	if (broker->signal_fd < 0)
		return -errno;
	broker->signal_poll.fd = broker->signal_fd;
	broker->signal_poll.on_ready = on_signal;
	return loop_poll_link(broker->loop, &broker->signal_poll);
}

static uint64_t count_fds(void) {
	DIR *directory = opendir("/proc/self/fd");
	uint64_t n = 0;

	if (!directory)
		return 0;
	while (readdir(directory))
		n++;
	closedir(directory);
	return n;
}

/*
 * Room for fds before anything is recovered, and before there is a second thread. The kernel doubles a table that threads share only after a grace
 * period of RCU, some 15 ms each time, in which clients would wait, also for a broker that recovers.
 */
static void init_fd_table(void) {
	struct rlimit limit = {};
	int first, last;

	(void)getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	(void)setrlimit(RLIMIT_NOFILE, &limit);
	(void)getrlimit(RLIMIT_NOFILE, &limit);
	first = eventfd(0, EFD_CLOEXEC);
	if (first < 0)
		return;
	last = fcntl(first, F_DUPFD_CLOEXEC, (int)(limit.rlim_cur < FD_TABLE_MIN ? limit.rlim_cur : FD_TABLE_MIN) - 1);
	(void)close_fd(last);
	(void)close_fd(first);
}

/* beyond the budget a request is refused with a reason; EMFILE never comes as a surprise */
static void broker_init_fd_budget(Broker *broker) {
	struct rlimit limit = {};
	/* what was recovered is charged to its owners already, and what was not is on its way out */
	uint64_t used = count_fds() + broker->config->fd_reserve, clients;

	clients = broker->n_recovered_fds + closer_total(broker->closer);
	used -= clients < used ? clients : 0;
	(void)getrlimit(RLIMIT_NOFILE, &limit);
	broker->fd_budget = limit.rlim_cur > used ? limit.rlim_cur - used : 0;
	accounts_set_total(&broker->accounts, ACCOUNT_FDS, broker->fd_budget);
	log_write(LOG_FD_BUDGET, LOG_NO_UID, NULL,
		  "%" PRIu64 " fds for clients: a connection takes 2, a lease page 1, a piece of memory up to 2",
		  broker->fd_budget);
}

static void broker_init_barrier(Broker *broker) {
	int commands = barrier_query();

	broker->barrier = commands > 0 && commands & BARRIER_GLOBAL_EXPEDITED && !barrier_global();
	snprintf(broker->barrier_reason, sizeof(broker->barrier_reason), "%s",
		 broker->barrier ? "lease pages may be asymmetric"
		 : commands < 0	 ? strerror(-commands)
				 : "no GLOBAL_EXPEDITED");
	if (!broker->barrier)
		log_write(LOG_MEMBARRIER, LOG_NO_UID, NULL,
			  "membarrier is not available (%s): releases are counted by locked instructions",
			  broker->barrier_reason);
}

/* the next broker goes on listening: clients that come meanwhile wait */
static void broker_keep_listener(Broker *broker, size_t i) {
	char name[32];

	snprintf(name, sizeof(name), KEEPER_LISTENER "%zu", i);
	kill_point();
	if (broker->keeper.enabled)
		(void)notify_store(name, &broker->listen_fds[i], 1);
	kill_point();
}

/* the paths are kept: a reload may name others, which a restart will bind */
static int broker_bind(Broker *broker) {
	const StringList *paths = &broker->config->sockets;
	int fd;

	free(broker->listen_fds);
	broker->listen_fds = calloc(paths->n + 1, sizeof(*broker->listen_fds));
	broker->bound_paths = calloc(paths->n + 1, sizeof(*broker->bound_paths));
	if (!broker->listen_fds || !broker->bound_paths)
		return -ENOMEM;
	for (size_t i = 0; i < paths->n; ++i) {
		char *path = strdup(paths->items[i]);

		if (!path)
			return -ENOMEM;
		fd = listen_at(path, broker->config->socket_mode, broker->config->socket_group);
		if (fd < 0) {
			log_write(LOG_INTERNAL_ERROR, LOG_NO_UID, NULL, "%s: %s", path, strerror(-fd));
			free(path);
			return fd;
		}
		broker->bound_paths[broker->n_listeners] = path;
		broker->listen_fds[broker->n_listeners++] = fd;
		broker_keep_listener(broker, broker->n_listeners - 1);
	}
	return 0;
}

/* where a session came from is the number of its listener: those that we bound keep theirs */
static int compare_listeners(const void *a, const void *b) {
	size_t n = strlen(KEEPER_LISTENER);
	unsigned long x = strtoul(((const NotifyFd *)a)->name + n, NULL, 10);
	unsigned long y = strtoul(((const NotifyFd *)b)->name + n, NULL, 10);

	return x < y ? -1 : x > y;
}

static bool is_own_listener(const NotifyFd *fd) {
	return !strncmp(fd->name, KEEPER_LISTENER, strlen(KEEPER_LISTENER));
}

/* whoever holds them may hand them over in any order: moves them to the end, in theirs */
static void sort_own_listeners(NotifyFds *fds) {
	size_t n = fds->n;

	for (size_t i = fds->n; i > 0; --i) {
		NotifyFd at = fds->items[i - 1];

		if (!is_own_listener(&at))
			continue;
		fds->items[i - 1] = fds->items[--n];
		fds->items[n] = at;
	}
	if (n < fds->n)
		qsort(fds->items + n, fds->n - n, sizeof(*fds->items), compare_listeners);
}

static int broker_take_listeners(Broker *broker, NotifyFds *fds) {
	broker->listen_fds = calloc(fds->n + 1, sizeof(*broker->listen_fds));
	if (!broker->listen_fds)
		return -ENOMEM;
	sort_own_listeners(fds);
	for (size_t i = 0; i < fds->n; ++i) {
		if (fds->items[i].fd < 0 || !strncmp(fds->items[i].name, KEEPER_ASIDE, strlen(KEEPER_ASIDE)))
			continue;
		if (notify_is_listener(fds->items[i].fd)) {
			broker->listen_fds[broker->n_listeners++] = steal_fd(&fds->items[i].fd);
			continue;
		}
		log_write(LOG_INTERNAL_ERROR, LOG_NO_UID, NULL, "closing fd \"%s\", of which nothing is known",
			  fds->items[i].name);
		(void)notify_unstore(fds->items[i].name);
	}
	return 0;
}

static int broker_listen(Broker *broker, NotifyFds *fds) {
	int r;

	r = broker_take_listeners(broker, fds);
	if (r)
		return r;
	if (!broker->n_listeners)
		r = broker_bind(broker);
	if (r)
		return r;
	if (!broker->n_listeners) {
		log_write(LOG_CONFIG_ERROR, LOG_NO_UID, NULL, "there is no socket to listen on");
		return -EINVAL;
	}
	broker->listeners = calloc(broker->n_listeners, sizeof(*broker->listeners));
	if (!broker->listeners)
		return -ENOMEM;
	for (size_t i = 0; i < broker->n_listeners; ++i) {
		broker->listeners[i].broker = broker;
		broker->listeners[i].listener.fd = broker->listen_fds[i];
		broker->listeners[i].listener.on_accept = on_accept;
		r = loop_listener_link(broker->loop, &broker->listeners[i].listener);
		if (r)
			return r;
	}
	return 0;
}

static int broker_init_empty(Broker *broker) {
	uint64_t last_segment = broker->keeper.last_segment ? *broker->keeper.last_segment : 0;
	int r;

	r = registry_init(&broker->registry, broker->config->capacity, broker->config->sessions);
	if (!r)
		r = ledger_init(&broker->ledger, broker->config->sessions, broker->config->capacity,
				broker->registry.shape.epoch);
	if (r)
		return r;
	broker->last_session = broker->ledger.header->last_session;
	broker->last_lease = broker->ledger.header->last_lease;
	broker->objects.last_id = broker->ledger.header->last_object;
	broker->ledger.header->last_segment = last_segment;
	broker->keeper.last_segment = &broker->ledger.header->last_segment;
	if (!broker->keeper.enabled)
		return 0;
	/* the ledger last: without it there is nothing */
	(void)notify_unstore(KEEPER_LEDGER);
	(void)notify_unstore(KEEPER_REGISTRY);
	kill_point();
	r = notify_store(KEEPER_REGISTRY, &broker->registry.fd, 1);
	kill_point();
	if (!r)
		r = notify_store(KEEPER_LEDGER, &broker->ledger.fd, 1);
	kill_point();
	return r;
}

/* who holds fds for us may have those of an earlier broker; without a holder nothing outlives this one */
static int broker_init_memory(Broker *broker, NotifyFds *fds) {
	int r;

	keeper_init(&broker->keeper, broker->loop, broker->closer, NULL);
	broker->objects.closer = broker->closer;
	broker->objects.keeper = &broker->keeper;
	broker->objects.cuda = broker->cuda;
	broker->objects.ledger = &broker->ledger;
	r = broker->keeper.enabled ? recover(broker, fds) : RECOVER_E_NOTHING;
	if (r < 0)
		return r;
	if (r == RECOVER_E_NOTHING) {
		r = broker_init_empty(broker);
		if (!r)
			r = keeper_start(&broker->keeper);
		if (r && broker->registry.header && broker->ledger.header) {
			log_write(LOG_KEEPER_FULL, LOG_NO_UID, NULL,
				  "nothing will survive this process: the service manager keeps no fds for it (%s); "
				  "is FileDescriptorStoreMax set?",
				  strerror(-r));
			keeper_deinit(&broker->keeper);
			r = 0;
		}
		return r;
	}
	/* what is parked stays so; new ones are refused until there is room */
	if (keeper_start(&broker->keeper))
		broker->keeper.full = true;
	broker->recovered_timer.on_time = on_recovered_time;
	loop_timer_set(broker->loop, &broker->recovered_timer, loop_now(broker->loop));
	broker->is_recovered = true;
	return 0;
}

static void broker_log_start(const Broker *broker, int loop_kind) {
	char fields[256];

	snprintf(fields, sizeof(fields), "SHMBROKER_LOOP=%s\nSHMBROKER_LOOP_REASON=%s", loop_name(broker->loop),
		 loop_reason(broker->loop));
	log_write(LOG_START, LOG_NO_UID, fields, "shmbrokerd %s, loop %s (%s)", PACKAGE_VERSION,
		  loop_name(broker->loop), loop_reason(broker->loop));
	if (loop_kind == LOOP_AUTO && !strcmp(loop_name(broker->loop), "epoll"))
		log_write(LOG_LOOP_FALLBACK, LOG_NO_UID, fields,
			  "io_uring is not available here, epoll runs instead: %s", loop_reason(broker->loop));
}

int broker_new(Broker **ret, Config *config, const ConfigPaths *paths, int loop_kind) {
	Broker *broker = calloc(1, sizeof(*broker));
	const char *what = "the broker";
	NotifyFds fds = {};
	int r;

	if (!broker) {
		config_free(config);
		return -ENOMEM;
	}
	broker->config = config;
	broker->paths = *paths;
	broker->signal_fd = broker->aside_fds[0] = broker->aside_fds[1] = -EBADF;
	broker->registry.fd = broker->registry.read_only_fd = broker->ledger.fd = -EBADF;
	list_init(&broker->sessions);
	list_init(&broker->dying);
	list_init(&broker->subscribers);
	list_init(&broker->scan);
	list_init(&broker->second_looks);
	list_init(&broker->lost);
	list_init(&broker->free_leases);
	broker->closer_timer.on_time = on_closer_time;
	broker->detached_timer.on_time = on_detached_time;
	broker->watchdog_timer.on_time = on_watchdog_time;
	broker->status_timer.on_time = on_status_time;
	accounts_init(&broker->accounts);
	accounts_configure(&broker->accounts, config);
	accounts_set_total(&broker->accounts, ACCOUNT_REGIONS, config->capacity);
	/* tokens and keys of clients are in this memory */
	(void)prctl(PR_SET_DUMPABLE, 0);

	init_fd_table();
	r = notify_take_fds(&fds);
	broker->reply = aligned_alloc(64, WIRE_MESSAGE_MAX);
	if (!r)
		r = broker->reply ? closer_new(&broker->closer) : -ENOMEM;
	if (loop_kind < 0)
		loop_kind = config->loop;
	if (!r) {
		r = loop_new(&broker->loop, loop_kind, broker->closer);
		if (r && loop_kind == LOOP_IO_URING)
			what = "io_uring, which was insisted on";
	}
	if (!r)
		r = cuda_new(&broker->cuda, broker->loop, config);
	if (!r)
		r = broker_init_memory(broker, &fds);
	if (!r)
		r = broker_init_signals(broker);
	if (r) {
		log_write(LOG_INTERNAL_ERROR, LOG_NO_UID, NULL, "%s cannot start: %s", what, strerror(-r));
		notify_fds_deinit(&fds);
		broker_free(broker);
		return r;
	}
	loop_set_turn(broker->loop, on_turn, broker);
	broker->start_ns = loop_now(broker->loop);
	broker_log_start(broker, loop_kind);
	broker_init_barrier(broker);
	broker_init_spin(broker);
	r = broker_listen(broker, &fds);
	notify_fds_deinit(&fds);
	if (r) {
		broker_free(broker);
		return r;
	}
	broker_init_fd_budget(broker);
	*ret = broker;
	return 0;
}

int broker_run(Broker *broker) {
	int r;

	if (notify_watchdog_interval_ns())
		loop_timer_set(broker->loop, &broker->watchdog_timer,
			       loop_now(broker->loop) + notify_watchdog_interval_ns());
	notify_ready(NULL);
	broker_status(broker);
	log_write(LOG_READY, LOG_NO_UID, NULL, "ready");
	r = loop_run(broker->loop);
	notify_stopping();
	log_write(LOG_STOP, LOG_NO_UID, NULL, r ? "the loop broke: %s" : "stopping%s", r ? strerror(-r) : "");
	return r;
}

static void broker_free_regions(Broker *broker) {
	for (uint32_t slot = 0; slot < broker->registry.n_used; ++slot)
		region_free(broker->registry.regions[slot]);
}

Broker *broker_free(Broker *broker) {
	bool frozen;

	if (!broker)
		return NULL;
	/* a restart is not a farewell: everything stays as it is for the next broker */
	frozen = broker->keeper.enabled && !broker->is_final;
	broker->keeper.frozen = broker->registry.frozen = broker->ledger.frozen = frozen;
	for (size_t i = 0; i < broker->n_listeners; ++i) {
		if (broker->listeners)
			loop_listener_unlink(&broker->listeners[i].listener);
		(void)close_fd(broker->listen_fds[i]);
		if (broker->bound_paths) {
			if (!frozen)
				(void)unlink(broker->bound_paths[i]);
			free(broker->bound_paths[i]);
		}
	}
	/* consumers that are left behind must not acquire any more */
	if (broker->registry.header && !frozen)
		atomic_store(&broker->registry.header->state, LAYOUT_CLOSED);
	sessions_abandon(broker);
	broker_free_regions(broker);
	cuda_free(broker->cuda);
	if (broker->loop) {
		loop_poll_unlink(&broker->signal_poll);
		loop_timer_unlink(&broker->closer_timer);
		loop_timer_unlink(&broker->detached_timer);
		loop_timer_unlink(&broker->second_look_timer);
		loop_timer_unlink(&broker->watchdog_timer);
		loop_timer_unlink(&broker->status_timer);
		loop_timer_unlink(&broker->recovered_timer);
	}
	keeper_deinit(&broker->keeper);
	(void)close_fd(broker->signal_fd);
	(void)close_fd(broker->aside_fds[0]);
	(void)close_fd(broker->aside_fds[1]);
	leases_deinit(broker);
	table_deinit(&broker->away);
	table_deinit(&broker->by_id);
	ledger_deinit(&broker->ledger);
	registry_deinit(&broker->registry);
	loop_free(broker->loop);
	closer_free(broker->closer);
	table_deinit(&broker->objects.table);
	accounts_deinit(&broker->accounts);
	config_free(broker->config);
	free(broker->bound_paths);
	free(broker->listeners);
	free(broker->listen_fds);
	free(broker->reply);
	free(broker);
	return NULL;
}
