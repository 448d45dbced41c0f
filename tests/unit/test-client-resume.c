/* SPDX-License-Identifier: Apache-2.0 */

/* The library and a broker that ends and comes back: what is lost, what is sent again, and what notices nothing. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "client-broker.h"
#include "count-fds.h"

#define OBJECT_SIZE 8192
#define THREADS 16
#define DEADLINE_MS 60000
#define ROUNDS 10000

static FakeBroker fake;
static struct shmb_client *client;
static int memory;

static size_t fds_before;

static int start_with(uint64_t features) {
	fds_before = count_fds();
	client = fake_start_with(&fake, features, WIRE_ATTACH_RMW, SHMB_FORCE_RMW);
	memory = memfd_create("memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_true(memory >= 0);
	assert_int_equal(ftruncate(memory, OBJECT_SIZE), 0);
	assert_int_equal(pwrite(memory, "frame", 5, 0), 5);
	fake_register(&fake, 0, 100, (FakeRegion){ .name = "r", .size = 4096, .object = 9, .fd = memory });
	fake_register(&fake, 1, 101, (FakeRegion){ .name = "s", .size = 4096, .object = 9, .fd = memory });
	return 0;
}

static int start(void **state) {
	(void)state;
	return start_with(WIRE_FEATURE_RESUME);
}

static int stop(void **state) {
	(void)state;
	fake_stop(&fake, client);
	(void)close_fd(memory);
	assert_int_equal(count_fds(), fds_before);
	return 0;
}

static uint32_t asked(uint16_t opcode) {
	return atomic_load(&fake.n_asked[opcode]);
}

#define until(_condition)                                                   \
	do {                                                                \
		int64_t _end = client_now() + DEADLINE_MS;                  \
		while (!(_condition)) {                                     \
			if (client_now() > _end)                            \
				fail_msg("it never came: %s", #_condition); \
			(void)poll(NULL, 0, 1);                             \
		}                                                           \
	} while (0)

static struct shmb_lease get(const char *name) {
	struct shmb_lease lease;

	assert_int_equal(shmb_client_get_memory_info(client, name, 0, SHMB_REST, SHMB_READ, &lease), 0);
	return lease;
}

/* somebody has tried for some time */
static bool is_delayed(uint32_t ms) {
	bool delayed;

	pthread_mutex_lock(&client->io_lock);
	delayed = client->away && client->resume.delay_ms > ms;
	pthread_mutex_unlock(&client->io_lock);
	return delayed;
}

static int ping(void) {
	return shmb_client_ping(client, NULL);
}

/* ---- threads that ask for something and wait ---- */

typedef struct Asker {
	pthread_t thread;
	int (*ask)(void);
	int result;
	char error[200];
} Asker;

static void *asker_run(void *data) {
	Asker *asker = data;

	asker->result = asker->ask();
	snprintf(asker->error, sizeof(asker->error), "%s", shmb_last_error());
	return NULL;
}

static void asker_start(Asker *asker, int (*ask)(void)) {
	*asker = (Asker){ .ask = ask };
	assert_int_equal(pthread_create(&asker->thread, NULL, asker_run, asker), 0);
}

static int asker_end(Asker *asker) {
	pthread_join(asker->thread, NULL);
	return asker->result;
}

/* 64 long names: some of these are more than a socket takes */
static int lookup_much(void) {
	static char name[SHMB_NAME_MAX + 1];
	struct shmb_lookup_spec specs[WIRE_BATCH_MAX];
	struct shmb_message_lease leases[WIRE_BATCH_MAX];
	int results[WIRE_BATCH_MAX], r;

	memset(name, 'n', SHMB_NAME_MAX);
	for (int i = 0; i < WIRE_BATCH_MAX; ++i)
		specs[i] = (struct shmb_lookup_spec){
			.struct_size = sizeof(specs[i]),
			.name = name,
			.size = 1,
			.access = SHMB_READ,
		};
	r = shmb_client_lookup(client, specs, WIRE_BATCH_MAX, leases, results);
	for (int i = 0; !r && i < WIRE_BATCH_MAX; ++i)
		r = results[i] == SHMB_E_NOT_FOUND ? 0 : -EINVAL;
	return r;
}

static struct shmb_region *region;

static int create(void) {
	return shmb_region_create(client, "mine", 100, NULL, &region);
}

/* what came with @opcode from the @from-th request on; returns how many */
static uint32_t logged(uint32_t from, uint16_t opcode, const FakeRequest **ret) {
	uint32_t n = 0;

	for (uint32_t i = from; i < atomic_load(&fake.n_log); ++i)
		if (fake.log[i].opcode == opcode)
			ret[n++] = &fake.log[i];
	return n;
}

/* ---- requests ---- */

static void a_request_in_flight_is_answered_once(void **state) {
	const FakeRequest *pings[FAKE_LOG_MAX];
	Asker asker;

	(void)state;
	fake.is_silent = true;
	asker_start(&asker, ping);
	until(asked(WIRE_OP_PING) == 1);
	fake_die(&fake);
	fake.is_silent = false;
	fake_come_back(&fake);
	assert_int_equal(asker_end(&asker), 0);
	assert_int_equal(logged(0, WIRE_OP_PING, pings), 2);
	assert_int_equal(pings[0]->serial, pings[1]->serial);
	assert_int_equal(pings[0]->flags, 0);
	assert_int_equal(pings[1]->flags, WIRE_FLAG_RETRY);
	assert_int_equal(fake.last_hello.flags, 0);
	assert_true(fake.last_hello.features & WIRE_FEATURE_RESUME);
	assert_int_equal(asked(WIRE_OP_ATTACH), 1);
	assert_int_equal(fcntl(client->fd, F_GETFD), FD_CLOEXEC);
	assert_int_equal(fcntl(client->fd, F_GETFL) & O_NONBLOCK, 0);
	/* what comes later is new */
	assert_int_equal(ping(), 0);
	assert_int_equal(logged(0, WIRE_OP_PING, pings), 3);
	assert_int_equal(pings[2]->flags, 0);
	assert_true(pings[2]->serial > pings[1]->serial);
}

static void answers_that_came_before_the_end_are_taken(void **state) {
	const FakeRequest *pings[FAKE_LOG_MAX];
	Asker asker;

	(void)state;
	assert_int_equal(ping(), 0);
	fake_event(&fake, 1);
	fake_die(&fake);
	fake_come_back(&fake);
	asker_start(&asker, ping);
	assert_int_equal(asker_end(&asker), 0);
	assert_int_equal(logged(0, WIRE_OP_PING, pings), 2);
	assert_int_equal(client->n_received, 5);
}

/* the kernel says ECONNRESET first, and then what came before */
static void an_answer_of_a_broker_that_read_no_further(void **state) {
	int pair[2], fds[WIRE_FDS_ROOM];
	FdMessage received;

	(void)state;
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(send(pair[0], "request", 7, 0), 7);
	assert_int_equal(send(pair[1], "answer", 6, 0), 6);
	(void)close(pair[1]);
	assert_int_equal(client_receive_now(client, pair[0], fds, &received), 0);
	assert_int_equal(received.size, 6);
	assert_int_equal(client_receive_now(client, pair[0], fds, &received), -ECONNRESET);
	(void)close(pair[0]);
}

static void threads_with_requests(uint32_t late) {
	const FakeRequest *before[FAKE_LOG_MAX], *after[FAKE_LOG_MAX];
	Asker askers[THREADS];
	uint32_t life;

	fake.is_silent = true;
	for (int i = 0; i < THREADS; ++i)
		asker_start(&askers[i], lookup_much);
	until(asked(WIRE_OP_LOOKUP) == THREADS);
	assert_int_equal(logged(0, WIRE_OP_LOOKUP, before), THREADS);
	life = fake.n_log;
	fake_die(&fake);
	fake.is_silent = false;
	fake.reads_late = late;
	fake_come_back(&fake);
	for (int i = 0; i < THREADS; ++i)
		assert_int_equal(asker_end(&askers[i]), 0);
	assert_int_equal(logged(life, WIRE_OP_LOOKUP, after), THREADS);
	for (int i = 0; i < THREADS; ++i) {
		bool found = false;

		assert_int_equal(after[i]->flags, WIRE_FLAG_RETRY);
		assert_true(!i || after[i]->serial > after[i - 1]->serial);
		for (int j = 0; j < THREADS; ++j)
			found |= before[j]->serial == after[i]->serial;
		assert_true(found);
	}
	assert_int_equal(client->n_calls, 0);
	assert_int_equal(ping(), 0);
}

static void all_requests_are_sent_again_in_their_order(void **state) {
	(void)state;
	threads_with_requests(false);
}

static void a_broker_that_reads_late_gets_them_all(void **state) {
	(void)state;
	threads_with_requests(true);
}

static void fds_are_sent_again(void **state) {
	const FakeRequest *requests[FAKE_LOG_MAX];
	struct stat st;
	Asker asker;

	(void)state;
	fake.is_silent = true;
	asker_start(&asker, create);
	until(asked(WIRE_OP_REGISTER) == 1);
	fake_die(&fake);
	fake.is_silent = false;
	fake_come_back(&fake);
	assert_int_equal(asker_end(&asker), 0);
	assert_int_equal(logged(0, WIRE_OP_REGISTER, requests), 2);
	assert_int_equal(fstat(shmb_region_get_fd(region), &st), 0);
	for (int i = 0; i < 2; ++i) {
		assert_int_equal(requests[i]->n_fds, 2);
		assert_int_equal(requests[i]->inode, st.st_ino);
	}
	assert_int_equal(requests[1]->flags, WIRE_FLAG_RETRY);
	assert_int_equal(shmb_region_get_generation(region), 200);
	shmb_region_free(region);
}

/* those that begin while there is no broker */
static void requests_wait_for_the_broker(void **state) {
	const FakeRequest *pings[FAKE_LOG_MAX];
	Asker askers[THREADS];

	(void)state;
	fake_die(&fake);
	for (int i = 0; i < THREADS; ++i)
		asker_start(&askers[i], ping);
	until(is_delayed(4));
	fake_come_back(&fake);
	for (int i = 0; i < THREADS; ++i)
		assert_int_equal(asker_end(&askers[i]), 0);
	assert_int_equal(logged(0, WIRE_OP_PING, pings), THREADS);
	assert_int_equal(fake.n_resumed, 1);
}

static void a_request_is_given_up_after_a_while(void **state) {
	const FakeRequest *pings[FAKE_LOG_MAX];
	struct shmb_event event;
	Asker asker;
	uint32_t life;

	(void)state;
	assert_int_equal(shmb_client_set_resume_timeout(client, -2), SHMB_E_INVALID);
	assert_int_equal(shmb_client_set_resume_timeout(client, 30), 0);
	fake.is_silent = true;
	asker_start(&asker, ping);
	until(asked(WIRE_OP_PING) == 1);
	/* before it dies: every attempt finds nothing there, however late this thread runs again */
	(void)unlink(fake.path);
	fake_die(&fake);
	assert_int_equal(asker_end(&asker), SHMB_E_AGAIN);
	assert_non_null(strstr(asker.error, "the broker is away (No such file"));
	assert_int_equal(ping(), SHMB_E_AGAIN);
	assert_int_equal(shmb_client_next_event(client, &event, -1), SHMB_E_AGAIN);
	assert_int_equal(shmb_client_next_event(client, &event, 3), SHMB_E_TIMED_OUT);
	assert_int_equal(shmb_client_set_resume_timeout(client, 0), 0);
	assert_int_equal(ping(), SHMB_E_AGAIN);
	assert_int_equal(client->n_calls, 0);

	life = fake.n_log;
	fake.is_silent = false;
	fake_come_back(&fake);
	/* one attempt is given some time only, and is taken up by the next */
	until(!ping());
	/* of the first one nothing more is heard */
	assert_int_equal(logged(life, WIRE_OP_PING, pings), 1);
	assert_int_equal(pings[0]->flags, 0);
	assert_int_equal(shmb_client_set_resume_timeout(client, -1), 0);
	assert_int_equal(ping(), 0);
}

static void attempts_that_fail_are_made_again(void **state) {
	(void)state;
	fake_die(&fake);
	fake.n_hung_up = 2;
	fake.refusal = SHMB_E_BUSY;
	fake.n_refused = 3;
	fake_come_back(&fake);
	assert_int_equal(ping(), 0);
	assert_int_equal(asked(WIRE_OP_HELLO), 1 + 2 + 3 + 1);
	assert_int_equal(asked(WIRE_OP_PING), 1);
}

static void a_broker_that_ends_again_and_again(void **state) {
	Asker asker;

	(void)state;
	fake.is_silent = true;
	asker_start(&asker, ping);
	until(asked(WIRE_OP_PING) == 1);
	fake_die(&fake);
	fake.n_hung_up_later = 5;
	fake.is_silent = false;
	fake_come_back(&fake);
	assert_int_equal(asker_end(&asker), 0);
	assert_int_equal(fake.n_resumed, 6);

	/* and one that does nothing else, which is left more and more time */
	assert_int_equal(shmb_client_set_resume_timeout(client, 30), 0);
	fake_die(&fake);
	fake.n_hung_up_later = UINT32_MAX;
	fake_come_back(&fake);
	assert_int_equal(ping(), SHMB_E_AGAIN);
	assert_true(fake.n_resumed <= 6 + 8);
}

/* ---- a session that is not taken up ---- */

static void assert_it_is_over(struct shmb_lease *lease) {
	struct shmb_lease other;
	struct shmb_event event;
	uint32_t hellos = asked(WIRE_OP_HELLO);
	struct pollfd poll_fd = { .fd = shmb_client_get_fd(client), .events = POLLIN };

	assert_int_equal(poll(&poll_fd, 1, DEADLINE_MS), 1);
	assert_int_equal(shmb_client_process(client), SHMB_E_DETACHED);
	assert_int_equal(ping(), SHMB_E_DETACHED);
	assert_string_equal(shmb_last_error(), "the broker does not know this session any more");
	assert_int_equal(shmb_client_next_event(client, &event, -1), SHMB_E_DETACHED);
	assert_int_equal(shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &other), SHMB_E_DETACHED);
	assert_int_equal(fake_count(&fake, 0), 1);
	assert_memory_equal(lease->address, "frame", 5);
	assert_int_equal(shmb_lease_release(lease), 0);
	assert_int_equal(fake_count(&fake, 0), 0);
	assert_int_equal(asked(WIRE_OP_HELLO), hellos);
}

static void refused_with(uint32_t code, WireHelloReply lie) {
	struct shmb_lease lease = get("r");
	Asker asker;

	fake.is_silent = true;
	asker_start(&asker, ping);
	until(asked(WIRE_OP_PING) == 1);
	fake_die(&fake);
	fake.is_silent = false;
	fake.refusal = code;
	fake.n_refused = !!code;
	fake.lie = lie;
	fake_come_back(&fake);
	assert_int_equal(asker_end(&asker), SHMB_E_DETACHED);
	assert_string_equal(asker.error, "the broker does not know this session any more");
	assert_int_equal(asked(WIRE_OP_PING), 1);
	assert_it_is_over(&lease);
}

static void a_session_that_is_not_known_any_more(void **state) {
	(void)state;
	refused_with(SHMB_E_STALE, (WireHelloReply){});
}

static void a_session_that_is_not_ours(void **state) {
	(void)state;
	refused_with(SHMB_E_PERMISSION, (WireHelloReply){});
}

static void a_reply_that_resumes_nothing(void **state) {
	(void)state;
	refused_with(0, (WireHelloReply){ .flags = WIRE_HELLO_REPLY_RESUMED });
}

static void a_reply_of_another_session(void **state) {
	(void)state;
	refused_with(0, (WireHelloReply){ .session = 1 });
}

static void a_reply_of_another_epoch(void **state) {
	(void)state;
	refused_with(0, (WireHelloReply){ .epoch = 1 });
}

static void a_reply_with_another_index(void **state) {
	(void)state;
	refused_with(0, (WireHelloReply){ .session_index = 1 });
}

static void a_registry_that_was_closed(void **state) {
	struct shmb_lease lease = get("r");

	(void)state;
	fake_die(&fake);
	atomic_store(&((RegistryHeader *)fake.registry)->state, LAYOUT_CLOSED);
	fake_come_back(&fake);
	assert_int_equal(ping(), SHMB_E_DETACHED);
	assert_it_is_over(&lease);
}

static int start_without(void **state) {
	(void)state;
	return start_with(0);
}

static void a_broker_that_resumes_nothing_is_lost(void **state) {
	struct shmb_lease lease = get("r"), other;

	(void)state;
	fake_die(&fake);
	fake_come_back(&fake);
	assert_int_equal(ping(), -ECONNRESET);
	assert_int_equal(shmb_client_process(client), -ECONNRESET);
	other = get("r");
	assert_int_equal(shmb_lease_release(&other), 0);
	assert_int_equal(shmb_lease_release(&lease), 0);
	assert_int_equal(asked(WIRE_OP_HELLO), 1);
}

/* ---- leases ---- */

static volatile sig_atomic_t n_trapped;

static void on_trap(int number) {
	(void)number;
	n_trapped++;
}

/* every system call is a trap, but for those with which a thread ends and memory is managed */
static int trap_system_calls(void) {
	static const unsigned allowed[] = { SYS_exit,	SYS_rt_sigreturn, SYS_rt_sigprocmask, SYS_sigaltstack,
					    SYS_mmap,	SYS_munmap,	  SYS_madvise,	      SYS_mprotect,
					    SYS_gettid, SYS_exit_group };
	struct sock_filter filter[2 * sizeof(allowed) / sizeof(allowed[0]) + 2];
	struct sock_fprog program = { .filter = filter };
	struct sigaction action = { .sa_handler = on_trap };

	filter[program.len++] =
		(struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (size_t i = 0; i < sizeof(allowed) / sizeof(allowed[0]); ++i) {
		filter[program.len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
		filter[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	filter[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
	if (sigaction(SIGSYS, &action, NULL) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return -errno;
	return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0 ? -errno : 0;
}

static bool under_valgrind(void) {
	const char *preload = getenv("LD_PRELOAD");

	return preload && strstr(preload, "vgpreload");
}

/* the last system call that this thread makes is the one that forbids them */
static int acquire_and_release(void) {
	struct shmb_lease lease;
	int failures = 0, r;

	/* a lane is taken at the first use */
	r = shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &lease) ?: shmb_lease_release(&lease);
	/* valgrind would be bound by the filter itself */
	if (!r && !under_valgrind())
		r = trap_system_calls();
	for (int i = 0; !r && i < ROUNDS; ++i)
		failures += shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &lease) ||
			    memcmp(lease.address, "frame", 5) || shmb_lease_release(&lease);
	if (!under_valgrind()) {
		/* it is a trap indeed */
		r = r ?: n_trapped ? -EFAULT : 0;
		(void)syscall(SYS_getppid);
		r = r ?: n_trapped == 1 ? 0 : -ENOSYS;
	}
	return r ?: failures;
}

static void who_only_reads_notices_nothing(void **state) {
	struct shmb_lease lease = get("r"), other;
	Asker asker;

	(void)state;
	n_trapped = 0;
	fake_die(&fake);
	asker_start(&asker, acquire_and_release);
	assert_int_equal(asker_end(&asker), 0);
	assert_false(client->away);

	/* nor when others have noticed */
	assert_int_equal(shmb_client_set_resume_timeout(client, 0), 0);
	assert_int_equal(ping(), SHMB_E_AGAIN);
	assert_true(client->away);
	n_trapped = 0;
	asker_start(&asker, acquire_and_release);
	assert_int_equal(asker_end(&asker), 0);
	/* what is not mapped needs the broker */
	assert_int_equal(shmb_client_get_memory_info(client, "s", 0, 1, SHMB_READ, &other), SHMB_E_AGAIN);
	assert_int_equal(shmb_lease_release(&lease), 0);
	assert_int_equal(fake_count(&fake, 0), 0);

	assert_int_equal(shmb_client_set_resume_timeout(client, DEADLINE_MS), 0);
	fake_come_back(&fake);
	other = get("s");
	assert_int_equal(shmb_lease_release(&other), 0);
}

static void a_notice_that_met_no_broker_is_sent_later(void **state) {
	struct shmb_lease lease = get("r");
	uint32_t scan = atomic_load(&fake_detail(&fake, 0)->scan);

	(void)state;
	assert_int_equal(shmb_client_set_resume_timeout(client, 0), 0);
	fake_die(&fake);
	assert_int_equal(ping(), SHMB_E_AGAIN);
	fake_set(&fake, 0, 100, WIRE_STATE_RETIRING);
	assert_int_equal(shmb_lease_release(&lease), 0);
	assert_int_not_equal(layout_rung(client->page)[0], scan + 1);
	assert_int_equal(shmb_client_set_resume_timeout(client, DEADLINE_MS), 0);
	fake_come_back(&fake);
	assert_int_equal(ping(), 0);
	until(fake.notified == 100);
	assert_int_equal(layout_rung(client->page)[0], scan + 1);
}

/* nobody but a thread that releases would ever find out */
static void a_notice_finds_the_next_broker(void **state) {
	struct shmb_lease lease = get("r");

	(void)state;
	fake_die(&fake);
	fake_come_back(&fake);
	fake_set(&fake, 0, 100, WIRE_STATE_RETIRING);
	assert_int_equal(shmb_lease_release(&lease), 0);
	until(fake.n_resumed == 1);
	assert_int_equal(ping(), 0);
	until(fake.notified == 100);
	assert_int_equal(fake.n_resumed, 1);
}

static void a_client_that_is_freed_tells_the_next_broker(void **state) {
	struct shmb_client *other;

	(void)state;
	fake_die(&fake);
	fake_come_back(&fake);
	client = shmb_client_free(client);
	/* it has resumed the session, and met its end */
	pthread_join(fake.thread, NULL);
	assert_int_equal(fake.last_hello.session, FAKE_SESSION);
	assert_int_equal(fake.n_resumed, 1);
	fake.listener = close_fd(fake.listener);

	fake_come_back(&fake);
	munmap(fake.registry, fake.shape.total_size);
	munmap(fake.page, fake.page_shape.total_size);
	assert_int_equal(shmb_client_new(&other, fake.path, 0, 0), 0);
	client = other;
}

/* ---- events, and a loop of the application's own ---- */

static void count(void *userdata, const struct shmb_event *event) {
	(void)event;
	(*(int *)userdata)++;
}

static void events_go_on(void **state) {
	struct shmb_event event;

	(void)state;
	assert_int_equal(shmb_client_subscribe(client, SHMB_EVENT_MASK_ALL), 0);
	fake.n_events = 2;
	assert_int_equal(ping(), 0);
	fake_die(&fake);
	fake_come_back(&fake);
	fake.n_events = 3;
	assert_int_equal(ping(), 0);
	for (uint64_t i = 0; i < 5; ++i) {
		assert_int_equal(shmb_client_next_event(client, &event, 0), 0);
		assert_int_equal(event.generation, 1 + (i < 2 ? i : i - 2));
	}
	assert_int_equal(shmb_client_next_event(client, &event, 0), SHMB_E_TIMED_OUT);
	assert_int_equal(asked(WIRE_OP_SUBSCRIBE), 1);

	/* who waits for an event finds the broker again */
	fake_die(&fake);
	fake_come_back(&fake);
	assert_int_equal(shmb_client_next_event(client, &event, 1), SHMB_E_TIMED_OUT);
	until(shmb_client_next_event(client, &event, 1) == SHMB_E_TIMED_OUT && fake.n_resumed == 2);
}

/* one turn of a loop; false when there was nothing to do */
static bool turn(int fd, int timeout) {
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
	int r = poll(&poll_fd, 1, timeout);

	assert_true(r >= 0);
	if (r)
		assert_int_equal(shmb_client_process(client), 0);
	return r;
}

static void in_a_loop(bool made_while_away) {
	int fd = made_while_away ? -1 : shmb_client_get_fd(client), n = 0;

	shmb_client_set_event_callback(client, count, &n);
	if (!made_while_away)
		assert_false(turn(fd, 0));
	for (int life = 0; life < 3; ++life) {
		fake_die(&fake);
		if (fd < 0) {
			assert_int_equal(shmb_client_process(client), 0);
			fd = shmb_client_get_fd(client);
		}
		until(turn(fd, DEADLINE_MS) && is_delayed(20));
		/* it does not spin */
		until(!turn(fd, 0));
		fake_come_back(&fake);
		until(turn(fd, DEADLINE_MS) && !client->away);
		until(!turn(fd, 0));
		fake_event(&fake, 1);
		until(turn(fd, DEADLINE_MS) && n == life + 1);
		assert_int_equal(shmb_client_get_fd(client), fd);
	}
	assert_int_equal(fake.n_resumed, 3);
	assert_int_equal(ping(), 0);
}

static void a_loop_finds_the_broker_again(void **state) {
	(void)state;
	in_a_loop(false);
}

static void a_loop_that_begins_without_a_broker(void **state) {
	(void)state;
	in_a_loop(true);
}

/* the child keeps all of the old connection open */
static void a_child_does_not_disturb(void **state) {
	int fd = shmb_client_get_fd(client), status, ends[2];
	pid_t child;
	char byte;

	(void)state;
	assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
	child = fork();
	assert_true(child >= 0);
	if (!child) {
		if (shmb_client_get_fd(client) != -EBADF || shmb_client_set_resume_timeout(client, 1) != SHMB_E_FORKED)
			_exit(1);
		(void)close(ends[1]);
		if (read(ends[0], &byte, 1))
			_exit(2);
		shmb_client_free(client);
		_exit(0);
	}
	fake_die(&fake);
	fake_come_back(&fake);
	until(turn(fd, DEADLINE_MS) && !client->away);
	assert_int_equal(fake.n_resumed, 1);
	until(!turn(fd, 0));
	(void)close(ends[0]);
	(void)close(ends[1]);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	assert_int_equal(ping(), 0);
}

#define resumable(_test) cmocka_unit_test_setup_teardown(_test, start, stop)

int main(void) {
	const struct CMUnitTest tests[] = {
		resumable(a_request_in_flight_is_answered_once),
		resumable(answers_that_came_before_the_end_are_taken),
		resumable(an_answer_of_a_broker_that_read_no_further),
		resumable(all_requests_are_sent_again_in_their_order),
		resumable(a_broker_that_reads_late_gets_them_all),
		resumable(fds_are_sent_again),
		resumable(requests_wait_for_the_broker),
		resumable(a_request_is_given_up_after_a_while),
		resumable(attempts_that_fail_are_made_again),
		resumable(a_broker_that_ends_again_and_again),
		resumable(a_session_that_is_not_known_any_more),
		resumable(a_session_that_is_not_ours),
		resumable(a_reply_that_resumes_nothing),
		resumable(a_reply_of_another_session),
		resumable(a_reply_of_another_epoch),
		resumable(a_reply_with_another_index),
		resumable(a_registry_that_was_closed),
		cmocka_unit_test_setup_teardown(a_broker_that_resumes_nothing_is_lost, start_without, stop),
		resumable(who_only_reads_notices_nothing),
		resumable(a_notice_that_met_no_broker_is_sent_later),
		resumable(a_notice_finds_the_next_broker),
		resumable(a_client_that_is_freed_tells_the_next_broker),
		resumable(events_go_on),
		resumable(a_loop_finds_the_broker_again),
		resumable(a_loop_that_begins_without_a_broker),
		resumable(a_child_does_not_disturb),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
