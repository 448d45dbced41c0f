/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fdstore.h"
#include "listen.h"
#include "log.h"
#include "supervise.h"
#include "wire/fd.h"

#define NS_PER_MS UINT64_C(1000000)
#define NS_PER_S (1000 * NS_PER_MS)
#define RESTART_NS (100 * NS_PER_MS)
#define HAND_OVER_NS (10 * NS_PER_MS) /* until fds are sent again that could not be */
#define START_NS (90 * NS_PER_S)      /* for a broker to be ready */
#define STOP_NS (10 * NS_PER_S)
#define CHECK_NS (10 * NS_PER_S)
#define STATUS_MAX 256
#define MESSAGE_MAX 1024
#define MESSAGES_PER_TURN 64 /* signals are looked at in between */
#define OWN_PROGRAM "/proc/self/exe"

typedef enum Goal {
	GOAL_RUN,
	GOAL_STOP,
	GOAL_REEXEC,
} Goal;

typedef struct Supervisor {
	char **argv;
	char **child_argv; /* without --supervise */
	char **check_argv; /* with --check-config */
	char path[PATH_MAX];
	uint64_t watchdog_ns;
	FdStore store;
	int signal_fd;
	Goal goal;
	bool first; /* no broker was ever ready, and none was before this program */
	pid_t child;
	int channel;	/* to the child */
	size_t n_given; /* entries of the store that the child has */
	bool given;	/* all, and it was told so; the store does not change before */
	bool ready;
	bool reload; /* SIGHUP waits until the child is ready: before, it would die of it */
	char status[STATUS_MAX];
	int exit_status;  /* of the last child */
	pid_t check;	  /* tries what is to be executed next */
	uint64_t give_ns; /* moments at which something is to be done, 0 for never */
	uint64_t start_ns;
	uint64_t alive_ns; /* the child is given up unless it was heard of by then */
	uint64_t kill_ns;
	uint64_t check_ns;
	uint64_t feed_ns; /* this process has a watchdog of its own */
} Supervisor;

#define say(_id, ...) log_write(LOG_##_id, LOG_NO_UID, NULL, "supervisor: " __VA_ARGS__)

static uint64_t now_ns(void) {
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

/* ---- children ---- */

/*
 * What to execute for a child of the version that this process has: by its path, for the sake of its name in lists of
 * processes, unless another file is there by now.
 */
static const char *own_program(const Supervisor *supervisor) {
	struct stat own, there;

	if (!stat(OWN_PROGRAM, &own) &&
	    (stat(supervisor->path, &there) || own.st_dev != there.st_dev || own.st_ino != there.st_ino))
		return OWN_PROGRAM;
	return supervisor->path;
}

/* In a new child. It must not outlive its parent without anybody knowing. */
static void become_child(pid_t parent, int death_signal) {
	sigset_t none;

	(void)prctl(PR_SET_PDEATHSIG, death_signal);
	if (getppid() != parent)
		_exit(EXIT_FAILURE);
	sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
	/* they are about this process; the child has another holder */
	for (const char *const *name = (const char *const[]){ "NOTIFY_SOCKET", "FDSTORE", "SHMBROKER_FDSTORE",
							      "WATCHDOG_USEC", "WATCHDOG_PID", NULL };
	     *name; ++name)
		(void)unsetenv(*name);
}

static void set_number(const char *name, unsigned long long number) {
	char text[24];

	(void)snprintf(text, sizeof(text), "%llu", number);
	if (setenv(name, text, 1))
		_exit(EXIT_FAILURE);
}

static void supervisor_start(Supervisor *supervisor) {
	_cleanup_(closep) int ours = -EBADF, theirs = -EBADF;
	pid_t parent = getpid();
	int ends[2];

	supervisor->start_ns = now_ns() + RESTART_NS;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) {
		say(INTERNAL_ERROR, "socketpair: %s", strerror(errno));
		return;
	}
	ours = ends[0];
	theirs = ends[1];
	supervisor->child = fork();
	if (supervisor->child < 0) {
		say(INTERNAL_ERROR, "fork: %s", strerror(errno));
		supervisor->child = 0;
		return;
	}
	if (!supervisor->child) {
		become_child(parent, SIGTERM);
		set_number(NOTIFY_SUPERVISOR_FD, (unsigned long long)theirs);
		set_number(NOTIFY_SUPERVISOR_PID, (unsigned long long)parent);
		if (supervisor->watchdog_ns) {
			set_number("WATCHDOG_USEC", supervisor->watchdog_ns / 1000);
			set_number("WATCHDOG_PID", (unsigned long long)getpid());
		}
		if (!fcntl(theirs, F_SETFD, 0))
			(void)execv(own_program(supervisor), supervisor->child_argv);
		say(INTERNAL_ERROR, "%s cannot be executed: %s", supervisor->path, strerror(errno));
		_exit(EXIT_FAILURE);
	}
	supervisor->channel = steal_fd(&ours);
	supervisor->n_given = 0;
	supervisor->given = supervisor->ready = supervisor->reload = false;
	supervisor->status[0] = 0;
	supervisor->start_ns = supervisor->give_ns = supervisor->kill_ns = 0;
	supervisor->alive_ns = now_ns() + START_NS;
	say(SUPERVISOR, "broker %d starts, with %zu kept file descriptors", (int)supervisor->child,
	    supervisor->store.fds.n);
}

/* Would the program that is at our path now start at all? Without an answer nothing is given up for it. */
static void supervisor_check(Supervisor *supervisor) {
	pid_t parent = getpid();

	if (supervisor->goal != GOAL_RUN || supervisor->check)
		return;
	supervisor->check = fork();
	if (supervisor->check < 0) {
		say(INTERNAL_ERROR, "fork: %s", strerror(errno));
		supervisor->check = 0;
		return;
	}
	if (!supervisor->check) {
		int null = open("/dev/null", O_RDWR | O_CLOEXEC);

		become_child(parent, SIGKILL);
		if (null >= 0 && dup2(null, STDOUT_FILENO) >= 0)
			(void)execv(supervisor->path, supervisor->check_argv);
		say(REEXEC_FAILED, "%s cannot be executed: %s", supervisor->path, strerror(errno));
		_exit(EXIT_FAILURE);
	}
	supervisor->check_ns = now_ns() + CHECK_NS;
}

static void supervisor_end(Supervisor *supervisor, Goal goal) {
	supervisor->goal = goal;
	supervisor->alive_ns = 0;
	if (!supervisor->child) {
		supervisor->exit_status = EXIT_SUCCESS;
	} else if (!supervisor->kill_ns) {
		/* a broker that is told SIGTERM leaves everything to the next one; after us there is none */
		(void)kill(supervisor->child, goal == GOAL_STOP ? SIGINT : SIGTERM);
		supervisor->kill_ns = now_ns() + STOP_NS;
	}
}

/* Returns only when it failed. */
static void supervisor_reexec(Supervisor *supervisor) {
	int fd = fdstore_save(&supervisor->store), r = fd;

	if (fd >= 0) {
		say(SUPERVISOR, "executing %s, with %zu kept file descriptors", supervisor->path,
		    supervisor->store.fds.n);
		(void)execv(supervisor->path, supervisor->argv);
		r = -errno;
		fdstore_unsave(&supervisor->store, fd);
	}
	say(REEXEC_FAILED, "%s cannot be executed: %s; this program goes on", supervisor->path, strerror(-r));
	supervisor->goal = GOAL_RUN;
}

/* ---- what the child says ---- */

static void supervisor_store(Supervisor *supervisor, const char *name, int *fds, size_t n) {
	for (size_t i = 0; i < n; ++i) {
		int r = fdstore_add(&supervisor->store, name, steal_fd(&fds[i]));

		if (r && !supervisor->store.full)
			say(STORE_FULL, "a file descriptor \"%s\" of the broker was not kept, it has %zu: %s", name,
			    supervisor->store.fds.n, strerror(-r));
		supervisor->store.full = supervisor->store.full || r;
	}
}

static void supervisor_is_ready(Supervisor *supervisor, const char *status) {
	notify_ready(status);
	supervisor->first = false;
	supervisor->ready = true;
	if (supervisor->reload)
		(void)kill(supervisor->child, SIGHUP);
	supervisor->reload = false;
}

static void supervisor_hear(Supervisor *supervisor, char *text, int *fds, size_t n_fds) {
	const char *name = "stored", *status = NULL;
	bool store = false, remove = false, ready = false, alive = false, reloading = false;

	for (char *line = text, *next; line; line = next) {
		next = strchr(line, '\n');
		if (next)
			*next++ = 0;
		if (!strncmp(line, "FDNAME=", 7) && line[7] && strlen(line + 7) <= NOTIFY_NAME_MAX)
			name = line + 7;
		else if (!strncmp(line, "STATUS=", 7))
			status = line + 7;
		store = store || !strcmp(line, "FDSTORE=1");
		remove = remove || !strcmp(line, "FDSTOREREMOVE=1");
		ready = ready || !strcmp(line, "READY=1");
		alive = alive || !strcmp(line, "WATCHDOG=1");
		reloading = reloading || !strcmp(line, "RELOADING=1");
	}
	if (store)
		supervisor_store(supervisor, name, fds, n_fds);
	if (remove)
		fdstore_remove(&supervisor->store, name);
	if (status)
		(void)snprintf(supervisor->status, sizeof(supervisor->status), "%s", status);
	if (reloading)
		notify_reloading();
	if (ready)
		supervisor_is_ready(supervisor, status);
	else if (status)
		notify_status("%s", status);
	if (supervisor->goal == GOAL_RUN && !supervisor->kill_ns && (ready || (alive && supervisor->ready)))
		supervisor->alive_ns = supervisor->watchdog_ns ? now_ns() + supervisor->watchdog_ns : 0;
}

/* Returns false when there is nothing more to read for now, or for ever; then the channel is closed. */
static bool supervisor_read(Supervisor *supervisor) {
	char text[MESSAGE_MAX];
	int fds[WIRE_FDS_ROOM], r;
	FdMessage message;

	r = fd_receive(supervisor->channel, text, sizeof(text) - 1, MSG_DONTWAIT, fds, &message);
	if (r == -EAGAIN)
		return false;
	/* it went before it had read all: what it said itself comes after this error */
	if (r == -ECONNRESET)
		return true;
	if (r || !message.size) {
		supervisor->channel = close_fd(supervisor->channel);
		return false;
	}
	text[message.size] = 0;
	if (message.fds_lost)
		say(STORE_FULL, "file descriptors of the broker were lost: this process can have no more");
	if (!message.truncated)
		supervisor_hear(supervisor, text, fds, message.n_fds);
	/* what was not kept; that of BARRIER=1 says by its end that all before it was dealt with */
	for (size_t i = 0; i < message.n_fds; ++i)
		(void)close_fd(fds[i]);
	return true;
}

/* Hands the kept fds over, as far as there is room. */
static void supervisor_give(Supervisor *supervisor) {
	const NotifyFds *fds = &supervisor->store.fds;
	int r = 0;

	supervisor->give_ns = 0;
	while (!r && supervisor->n_given < fds->n) {
		const NotifyFd *item = &fds->items[supervisor->n_given];
		char text[NOTIFY_NAME_MAX + 16];
		int length = snprintf(text, sizeof(text), "FDNAME=%s\n", item->name);

		r = fd_send(supervisor->channel, text, (size_t)length, &item->fd, 1, MSG_DONTWAIT);
		supervisor->n_given += !r;
	}
	if (!r) {
		r = fd_send(supervisor->channel, NOTIFY_END, sizeof(NOTIFY_END) - 1, NULL, 0, MSG_DONTWAIT);
		supervisor->given = !r;
	}
	if (!r || r == -EAGAIN)
		return;
	/* other processes of this user may have too many fds in flight for a moment: the child waits */
	if (r == -ETOOMANYREFS || r == -ENOMEM || r == -ENOBUFS)
		supervisor->give_ns = now_ns() + HAND_OVER_NS;
	else
		supervisor->given = true; /* it has gone: what it said before remains to be read */
}

/* ---- what happens to it ---- */

static const char *describe_end(int status, char *buffer, size_t size) {
	if (WIFEXITED(status))
		(void)snprintf(buffer, size, "exit status %d", WEXITSTATUS(status));
	else
		(void)snprintf(buffer, size, "signal %d, %s", WTERMSIG(status), strsignal(WTERMSIG(status)));
	return buffer;
}

static int exit_status_of(int status) {
	if (WIFEXITED(status))
		return WEXITSTATUS(status);
	/* it had not come as far as waiting for it */
	return WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGINT ? EXIT_SUCCESS : 128 + WTERMSIG(status);
}

static void on_child_end(Supervisor *supervisor, int status) {
	char how[64];

	supervisor->reload = false;
	/* what it stored before it died is kept */
	while (supervisor->channel >= 0 && supervisor_read(supervisor))
		;
	supervisor->channel = close_fd(supervisor->channel);
	supervisor->exit_status = exit_status_of(status);
	(void)describe_end(status, how, sizeof(how));
	if (supervisor->goal != GOAL_RUN) {
		say(SUPERVISOR, "broker %d ended: %s", (int)supervisor->child, how);
	} else if (supervisor->first && WIFEXITED(status) && supervisor->exit_status) {
		/* nothing is kept yet, and whoever started us learns of it: of its configuration, or of its socket */
		say(SUPERVISOR, "broker %d could not start: %s", (int)supervisor->child, how);
		supervisor->goal = GOAL_STOP;
	} else {
		say(BROKER_ENDED, "broker %d ended: %s; it said last: \"%s\"; it is started again",
		    (int)supervisor->child, how, supervisor->status);
	}
	supervisor->child = 0;
	supervisor->start_ns = now_ns() + RESTART_NS;
	supervisor->alive_ns = supervisor->kill_ns = supervisor->give_ns = 0;
}

static void on_check_end(Supervisor *supervisor, int status) {
	char how[64];

	supervisor->check = 0;
	supervisor->check_ns = 0;
	if (supervisor->goal != GOAL_RUN)
		return;
	if (WIFEXITED(status) && !WEXITSTATUS(status))
		supervisor_end(supervisor, GOAL_REEXEC);
	else
		say(REEXEC_FAILED, "%s is not executed: with --check-config it ended with %s", supervisor->path,
		    describe_end(status, how, sizeof(how)));
}

static void supervisor_reap(Supervisor *supervisor) {
	pid_t pid;
	int status;

	/* as PID 1 also what others left behind */
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (pid == supervisor->child)
			on_child_end(supervisor, status);
		else if (pid == supervisor->check)
			on_check_end(supervisor, status);
	}
}

static void supervisor_signals(Supervisor *supervisor) {
	struct signalfd_siginfo info;

	while (read(supervisor->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
		switch (info.ssi_signo) {
		case SIGTERM:
		case SIGINT:
			if (supervisor->goal != GOAL_STOP)
				notify_stopping();
			supervisor_end(supervisor, GOAL_STOP);
			break;
		case SIGHUP:
			if (supervisor->ready && supervisor->child)
				(void)kill(supervisor->child, SIGHUP);
			else
				supervisor->reload = true;
			break;
		case SIGUSR2:
			supervisor_check(supervisor);
			break;
		}
	}
	supervisor_reap(supervisor);
}

static void on_silence(Supervisor *supervisor) {
	say(BROKER_ENDED, "broker %d %s; it gets SIGABRT", (int)supervisor->child,
	    supervisor->ready ? "gives no sign of life" : "does not become ready");
	(void)kill(supervisor->child, SIGABRT);
	supervisor->alive_ns = 0;
	supervisor->kill_ns = now_ns() + (supervisor->watchdog_ns ?: STOP_NS);
}

static bool is_over(uint64_t *moment, uint64_t now) {
	if (!*moment || *moment > now)
		return false;
	*moment = 0;
	return true;
}

static void supervisor_times(Supervisor *supervisor) {
	uint64_t now = now_ns();

	if (is_over(&supervisor->feed_ns, now)) {
		notify_watchdog();
		supervisor->feed_ns = now + notify_watchdog_interval_ns();
	}
	if (supervisor->check && is_over(&supervisor->check_ns, now))
		(void)kill(supervisor->check, SIGKILL);
	if (supervisor->child && is_over(&supervisor->kill_ns, now)) {
		say(BROKER_ENDED, "broker %d does not end; it gets SIGKILL", (int)supervisor->child);
		(void)kill(supervisor->child, SIGKILL);
	}
	if (supervisor->child && is_over(&supervisor->alive_ns, now))
		on_silence(supervisor);
	if (supervisor->channel >= 0 && is_over(&supervisor->give_ns, now))
		supervisor_give(supervisor);
	if (!supervisor->child && supervisor->goal == GOAL_REEXEC)
		supervisor_reexec(supervisor);
	if (!supervisor->child && supervisor->goal == GOAL_RUN && is_over(&supervisor->start_ns, now))
		supervisor_start(supervisor);
}

static int until_next_time_ms(const Supervisor *supervisor) {
	const uint64_t moments[] = { supervisor->give_ns, supervisor->start_ns, supervisor->alive_ns,
				     supervisor->kill_ns, supervisor->check_ns, supervisor->feed_ns };
	uint64_t next = UINT64_MAX, now = now_ns();

	for (size_t i = 0; i < sizeof(moments) / sizeof(*moments); ++i)
		if (moments[i] && moments[i] < next)
			next = moments[i];
	if (next == UINT64_MAX)
		return -1;
	return next <= now ? 0 : (int)((next - now) / NS_PER_MS + 1);
}

static void supervisor_turn(Supervisor *supervisor) {
	struct pollfd fds[] = {
		{ .fd = supervisor->signal_fd, .events = POLLIN },
		{ .fd = supervisor->give_ns ? -1 : supervisor->channel,
		  .events = supervisor->given ? POLLIN : POLLOUT },
	};

	if (poll(fds, 2, until_next_time_ms(supervisor)) < 0)
		return;
	if (fds[1].revents && !supervisor->given)
		supervisor_give(supervisor);
	else if (fds[1].revents)
		for (int i = 0; i < MESSAGES_PER_TURN && supervisor_read(supervisor); ++i)
			;
	if (fds[0].revents)
		supervisor_signals(supervisor);
	supervisor_times(supervisor);
}

/* ---- its own life ---- */

/* The path that this program was executed by, not that of the file: another one may be there for the next exec. */
static int find_path(char *path) {
	const char *executed = (const char *)getauxval(AT_EXECFN);
	char directory[PATH_MAX];
	int n;

	if (!executed || !*executed)
		return -ENOENT;
	if (executed[0] == '/')
		n = snprintf(path, PATH_MAX, "%s", executed);
	else if (getcwd(directory, sizeof(directory)))
		n = snprintf(path, PATH_MAX, "%s/%s", directory, executed);
	else
		return -errno;
	return n < PATH_MAX ? 0 : -ENAMETOOLONG;
}

static int supervisor_init_arguments(Supervisor *supervisor, const char *own, int argc, char **argv) {
	int n = 0, n_check = 0;

	supervisor->argv = argv;
	supervisor->child_argv = calloc((size_t)argc + 2, sizeof(*argv));
	supervisor->check_argv = calloc((size_t)argc + 2, sizeof(*argv));
	if (!supervisor->child_argv || !supervisor->check_argv)
		return -ENOMEM;
	for (int i = 0; i < argc; ++i) {
		if (argv[i] != own)
			supervisor->child_argv[n++] = argv[i];
		supervisor->check_argv[n_check++] = argv[i];
		if (!i)
			supervisor->check_argv[n_check++] = (char *)(uintptr_t) "--check-config";
	}
	return find_path(supervisor->path);
}

static int supervisor_init_signals(Supervisor *supervisor) {
	sigset_t mask;

	sigemptyset(&mask);
	for (const int *number = (const int[]){ SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGUSR2, 0 }; *number; ++number) {
		sigaddset(&mask, *number);
		/* whoever started us may ignore it, and so would the broker */
		(void)signal(*number, SIG_DFL);
	}
	if (sigprocmask(SIG_BLOCK, &mask, NULL))
		return -errno;
	supervisor->signal_fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
	return supervisor->signal_fd < 0 ? -errno : 0;
}

/* what this process kept before its exec, or what the service manager listens on for the broker */
static int supervisor_init_store(Supervisor *supervisor) {
	NotifyFds fds = {};
	int r = fdstore_load(&supervisor->store);

	if (r) {
		supervisor->first = false;
		return r < 0 ? r : 0;
	}
	r = notify_take_fds(&fds);
	for (size_t i = 0; !r && i < fds.n; ++i)
		r = fdstore_add(&supervisor->store, fds.items[i].name, steal_fd(&fds.items[i].fd));
	notify_fds_deinit(&fds);
	return r;
}

static int supervisor_init(Supervisor *supervisor, const char *own, int argc, char **argv) {
	struct rlimit limit;
	int r, fd;

	/* tokens and keys of clients are in what is kept */
	(void)prctl(PR_SET_DUMPABLE, 0);
	do
		fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	while (fd >= 0 && fd <= STDERR_FILENO && !fcntl(fd, F_SETFD, 0));
	(void)close_fd(fd);
	if (!getrlimit(RLIMIT_NOFILE, &limit)) {
		limit.rlim_cur = limit.rlim_max;
		(void)setrlimit(RLIMIT_NOFILE, &limit);
	}
	r = supervisor_init_arguments(supervisor, own, argc, argv);
	if (!r)
		r = supervisor_init_signals(supervisor);
	if (!r)
		r = supervisor_init_store(supervisor);
	return r;
}

/* Sockets that the broker made would be left behind by one that expects to be started again. */
static void supervisor_deinit(Supervisor *supervisor) {
	const NotifyFds *fds = &supervisor->store.fds;

	for (size_t i = 0; i < fds->n; ++i) {
		if (!strncmp(fds->items[i].name, NOTIFY_OWN_LISTENER, sizeof(NOTIFY_OWN_LISTENER) - 1))
			listen_unlink(steal_fd(&fds->items[i].fd));
	}
	fdstore_deinit(&supervisor->store);
	(void)close_fd(supervisor->signal_fd);
	free(supervisor->child_argv);
	free(supervisor->check_argv);
}

int supervisor_run(const Options *options, int argc, char **argv) {
	Supervisor supervisor = {
		.watchdog_ns = options->watchdog_ns,
		.signal_fd = -EBADF,
		.channel = -EBADF,
		.first = true,
	};
	int r;

	log_init(LOG_TARGET_AUTO);
	r = supervisor_init(&supervisor, options->supervise, argc, argv);
	if (r) {
		say(INTERNAL_ERROR, "cannot start: %s", strerror(-r));
		supervisor.exit_status = EXIT_FAILURE;
	} else {
		if (notify_watchdog_interval_ns())
			supervisor.feed_ns = now_ns();
		/* what ended around the exec of this program */
		supervisor_reap(&supervisor);
		supervisor_start(&supervisor);
		while (supervisor.goal != GOAL_STOP || supervisor.child)
			supervisor_turn(&supervisor);
	}
	supervisor_deinit(&supervisor);
	return supervisor.exit_status;
}
