/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "regions.h"
#include "restart.h"

#define WINDOW_REST (UINT32_MAX - 1)
#define WINDOW_END UINT32_MAX
#define DEADLINE_NS UINT64_C(60000000000)
#define POLL_NS 20000

/* memory of both processes; what is not atomic belongs to the consumer until it has seen the next window */
struct RestartShared {
	_Atomic uint32_t wanted; /* the window that the consumer is to begin */
	_Atomic uint32_t begun;
	RestartWindow last;
	_Atomic uint64_t n_system_calls;
	_Atomic int system_call;
};

typedef struct Load {
	RestartShared *shared;
	struct shmb_client *client;
	uint32_t n;
	char (*names)[REGION_NAME_SIZE];
	struct shmb_handle *handles;
	struct shmb_lease *held;
} Load;

/* ---- in the consumer ---- */

static RestartShared *trapped; /* for the signal's handler */

static void on_trap(int number, siginfo_t *info, void *context) {
	(void)number;
	(void)context;
	atomic_store(&trapped->system_call, info->si_syscall);
	atomic_fetch_add(&trapped->n_system_calls, 1);
}

/* The end and the return from the handler have no other way; the clock is for where the kernel's page has none. */
static void trap_system_calls(RestartShared *shared) {
	static struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 3, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clock_gettime, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	static const struct sock_fprog program = { .len = sizeof(filter) / sizeof(filter[0]), .filter = filter };
	struct sigaction action = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO };

	trapped = shared;
	if (sigaction(SIGSYS, &action, NULL) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
		bench_die("system calls cannot be trapped: %s", strerror(errno));
	/* what a trap that never springs says about others is nothing */
	(void)syscall(SYS_getppid);
	if (atomic_exchange(&shared->n_system_calls, 0) != 1)
		_exit(EXIT_FAILURE);
}

static void load_init(Load *load, const Broker *broker) {
	load->client = client_new(broker, SHMB_ROLE_CONSUMER, 0);
	load->names = calloc(load->n, sizeof(*load->names));
	load->handles = calloc(load->n, sizeof(*load->handles));
	load->held = calloc(load->n, sizeof(*load->held));
	if (!load->names || !load->handles || !load->held)
		bench_die("out of memory");
	for (uint32_t i = 0; i < load->n; ++i) {
		const char *name = load->names[i];

		region_name(i, load->names[i]);
		check(shmb_client_get_memory_info(load->client, name, 0, SHMB_REST, SHMB_READ, &load->held[i]), name);
		check(shmb_handle_open(load->client, name, &load->handles[i]), name);
	}
}

static int load_acquire(const Load *load, uint32_t region, bool by_handle, struct shmb_lease *lease) {
	if (by_handle)
		return shmb_handle_get_memory_info(load->client, &load->handles[region], 0, SHMB_REST, SHMB_READ,
						   lease);
	return shmb_client_get_memory_info(load->client, load->names[region], 0, SHMB_REST, SHMB_READ, lease);
}

static void load_one(const Load *load, uint32_t region, bool by_handle, RestartWindow *window) {
	uint64_t begin = bench_now_ns(), ns;
	struct shmb_lease lease;
	int r = load_acquire(load, region, by_handle, &lease);

	r = r ?: shmb_lease_release(&lease);
	ns = bench_now_ns() - begin;
	window->n++;
	if (r) {
		window->n_failed++;
		window->result = r;
	}
	if (window->slowest_ns < ns)
		window->slowest_ns = ns;
}

_Noreturn static void load_run(const Load *load) {
	RestartShared *shared = load->shared;
	uint32_t region = 0, begun = 0;
	RestartWindow window = {};

	for (;;) {
		uint32_t wanted = atomic_load_explicit(&shared->wanted, memory_order_acquire);

		/* not _exit(), before which a sanitizer looks for leaks, with system calls */
		if (wanted == WINDOW_END)
			(void)syscall(SYS_exit_group, EXIT_SUCCESS);
		if (wanted != begun) {
			window.n_system_calls = atomic_exchange(&shared->n_system_calls, 0);
			window.system_call = atomic_load(&shared->system_call);
			shared->last = window;
			window = (RestartWindow){};
			begun = wanted;
			atomic_store_explicit(&shared->begun, begun, memory_order_release);
		}
		if (wanted == WINDOW_REST)
			continue;
		load_one(load, region, false, &window);
		load_one(load, region, true, &window);
		region = region + 1 < load->n ? region + 1 : 0;
	}
}

_Noreturn static void become_consumer(RestartShared *shared, const Broker *broker, uint32_t n, int cpu, pid_t parent) {
	static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
	Load load = { .shared = shared, .n = n };

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(EXIT_FAILURE);
	for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); ++i)
		(void)signal(signals[i], SIG_DFL);
	(void)close_range(STDERR_FILENO + 1, UINT32_MAX, 0);
	bench_unpin();
	if (cpu >= 0)
		(void)bench_pin((unsigned int)cpu);
	load_init(&load, broker);
	trap_system_calls(shared);
	load_run(&load);
}

/* ---- in the benchmark ---- */

static void begin_window(RestartConsumer *consumer, uint32_t window, RestartWindow *ret) {
	uint64_t deadline = bench_now_ns() + DEADLINE_NS;
	struct timespec wait = { .tv_nsec = POLL_NS };
	RestartShared *shared = consumer->shared;

	atomic_store_explicit(&shared->wanted, window, memory_order_release);
	while (atomic_load_explicit(&shared->begun, memory_order_acquire) != window) {
		if (waitpid(consumer->pid, NULL, WNOHANG) == consumer->pid)
			bench_die("the consumer has ended");
		if (bench_now_ns() > deadline)
			bench_die("the consumer does not go on");
		(void)nanosleep(&wait, NULL);
	}
	if (ret)
		*ret = shared->last;
}

void restart_consumer_start(RestartConsumer *ret, const Broker *broker, uint32_t n, int cpu) {
	pid_t parent = getpid();

	*ret = (RestartConsumer){
		.shared = mmap(NULL, sizeof(*ret->shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0),
	};
	if (ret->shared == MAP_FAILED)
		bench_die("mmap: %s", strerror(errno));
	fflush(NULL);
	ret->pid = fork();
	if (ret->pid < 0)
		bench_die("fork: %s", strerror(errno));
	if (!ret->pid)
		become_consumer(ret->shared, broker, n, cpu, parent);
	restart_consumer_turn(ret, NULL);
}

void restart_consumer_turn(RestartConsumer *consumer, RestartWindow *ret) {
	begin_window(consumer, ++consumer->window, ret);
}

void restart_consumer_rest(RestartConsumer *consumer) {
	begin_window(consumer, WINDOW_REST, NULL);
}

void restart_consumer_stop(RestartConsumer *consumer) {
	int status;

	atomic_store(&consumer->shared->wanted, WINDOW_END);
	if (waitpid(consumer->pid, &status, 0) < 0 || !WIFEXITED(status) || WEXITSTATUS(status))
		bench_die("the consumer has not ended well");
	(void)munmap(consumer->shared, sizeof(*consumer->shared));
	*consumer = (RestartConsumer){};
}
