/* SPDX-License-Identifier: Apache-2.0 */

/* The library and a broker that is there and does not answer: calls end, and nothing of their late answers stays. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client-broker.h"
#include "count-fds.h"

#define OBJECT_SIZE 8192
#define DEADLINE_MS 60000
#define TIMEOUT_MS 20
#define NAMES_MAX 4096

static FakeBroker fake;
static struct shmb_client *client;
static int memory;
static size_t fds_before;

static int start(void **state) {
	(void)state;
	fds_before = count_fds();
	client = fake_start_with(&fake, WIRE_FEATURE_RESUME, WIRE_ATTACH_RMW, SHMB_FORCE_RMW);
	memory = memfd_create("memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_true(memory >= 0);
	assert_int_equal(ftruncate(memory, OBJECT_SIZE), 0);
	fake_register(&fake, 0, 100, (FakeRegion){ .name = "r", .size = 4096, .object = 9, .fd = memory });
	fake_register(&fake, 1, 101, (FakeRegion){ .name = "s", .size = 4096, .object = 9, .fd = memory });
	return 0;
}

static int stop(void **state) {
	(void)state;
	fake.is_stopped = false;
	fake_stop(&fake, client);
	(void)close_fd(memory);
	assert_int_equal(count_fds(), fds_before);
	return 0;
}

#define until(_condition)                                                   \
	do {                                                                \
		int64_t _end = client_now() + DEADLINE_MS;                  \
		while (!(_condition)) {                                     \
			if (client_now() > _end)                            \
				fail_msg("it never came: %s", #_condition); \
			assert_int_equal(shmb_client_process(client), 0);   \
			(void)poll(NULL, 0, 1);                             \
		}                                                           \
	} while (0)

static uint32_t asked(uint16_t opcode) {
	return atomic_load(&fake.n_asked[opcode]);
}

static int ping(void) {
	return shmb_client_ping(client, NULL);
}

/* takes @n leases by message on "r" in one call */
static int lookup(uint32_t n, struct shmb_message_lease *ret) {
	struct shmb_lookup_spec specs[WIRE_BATCH_MAX];
	int results[WIRE_BATCH_MAX];

	for (uint32_t i = 0; i < n; ++i)
		specs[i] = (struct shmb_lookup_spec){
			.struct_size = sizeof(specs[i]),
			.name = i % 2 ? "r" : "s",
			.size = SHMB_REST,
			.access = SHMB_READ,
		};
	return shmb_client_lookup(client, specs, n, ret, results);
}

/* From here on the fake deals with nothing. Only then is there a time for calls: one that runs may be slow. */
static void hold(void) {
	fake.is_stopped = true;
	assert_int_equal(shmb_client_set_call_timeout(client, TIMEOUT_MS), 0);
}

/* the fake goes on; every answer has been read, and nothing is outstanding */
static void go_on(void) {
	assert_int_equal(shmb_client_set_call_timeout(client, -1), 0);
	fake.is_stopped = false;
	until(!client->n_calls);
	assert_null(client->calls);
}

static void the_time_to_wait_is_checked(void **state) {
	(void)state;
	assert_int_equal(shmb_client_set_call_timeout(client, -2), SHMB_E_INVALID);
	assert_int_equal(shmb_client_set_call_timeout(client, -1), 0);
	assert_int_equal(ping(), 0);
	assert_int_equal(shmb_client_set_call_timeout(client, INT32_MAX), 0);
	assert_int_equal(ping(), 0);
}

static void a_call_ends_and_the_client_goes_on(void **state) {
	(void)state;
	hold();
	assert_int_equal(ping(), SHMB_E_TIMED_OUT);
	assert_non_null(strstr(shmb_last_error(), "may have been done"));
	assert_int_equal(ping(), SHMB_E_TIMED_OUT);
	assert_int_equal(client->n_calls, 2);
	go_on();
	assert_int_equal(ping(), 0);
	assert_int_equal(asked(WIRE_OP_PING), 3);
}

/* 0 is the answer that is there already, which there is none of */
static void no_time_at_all(void **state) {
	(void)state;
	hold();
	assert_int_equal(shmb_client_set_call_timeout(client, 0), 0);
	assert_int_equal(ping(), SHMB_E_TIMED_OUT);
	go_on();
}

static void late_leases_are_given_back(void **state) {
	struct shmb_message_lease leases[WIRE_BATCH_MAX] = { { .lease = 5 } };

	(void)state;
	hold();
	assert_int_equal(lookup(1, leases), SHMB_E_TIMED_OUT);
	assert_int_equal(lookup(WIRE_BATCH_MAX, leases), SHMB_E_TIMED_OUT);
	assert_int_equal(leases[0].lease, 5);
	go_on();
	assert_int_equal(fake.granted, 1 + WIRE_BATCH_MAX);
	assert_int_equal(fake.released, fake.granted);
	assert_int_equal(asked(WIRE_OP_RELEASE), 2);
}

/* with the fd that comes with it */
static void a_late_map_is_dropped(void **state) {
	struct shmb_handle handle;
	struct shmb_lease lease;

	(void)state;
	assert_int_equal(shmb_handle_open(client, "r", &handle), 0);
	hold();
	assert_int_equal(shmb_handle_get_memory_info(client, &handle, 0, SHMB_REST, SHMB_READ, &lease),
			 SHMB_E_TIMED_OUT);
	go_on();
	assert_int_equal(asked(WIRE_OP_MAP), 1);
	assert_int_equal(client->n_mapped, 0);
	assert_int_equal(shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &lease), 0);
	assert_int_equal(shmb_lease_release(&lease), 0);
}

static void a_late_registration_is_the_brokers(void **state) {
	struct shmb_region *region = NULL;

	(void)state;
	hold();
	assert_int_equal(shmb_region_adopt(client, "mine", memory, 0, 100, NULL, &region), SHMB_E_TIMED_OUT);
	assert_null(region);
	go_on();
	assert_int_equal(asked(WIRE_OP_REGISTER), 1);
}

static void no_more_are_outstanding_than_a_broker_takes(void **state) {
	(void)state;
	hold();
	assert_int_equal(shmb_client_set_call_timeout(client, 1), 0);
	for (int i = 0; i < WIRE_OUTSTANDING_MAX; ++i) {
		assert_int_equal(ping(), SHMB_E_TIMED_OUT);
		assert_non_null(strstr(shmb_last_error(), "may have been done"));
	}
	for (int i = 0; i < 3; ++i) {
		assert_int_equal(ping(), SHMB_E_TIMED_OUT);
		assert_non_null(strstr(shmb_last_error(), "it was not asked"));
	}
	go_on();
	assert_int_equal(asked(WIRE_OP_PING), WIRE_OUTSTANDING_MAX);
	assert_int_equal(ping(), 0);
}

/* makes the socket full with requests that are given up; returns how many were sent */
static uint32_t fill(void) {
	static char name[SHMB_NAME_MAX + 1];
	const char *names[WIRE_BATCH_MAX];
	int results[WIRE_BATCH_MAX];
	uint32_t n = 0;

	memset(name, 'n', SHMB_NAME_MAX);
	for (int i = 0; i < WIRE_BATCH_MAX; ++i)
		names[i] = name;
	assert_int_equal(shmb_client_set_call_timeout(client, 1), 0);
	while (n < WIRE_OUTSTANDING_MAX) {
		assert_int_equal(shmb_client_unregister(client, names, WIRE_BATCH_MAX, 0, 0, results),
				 SHMB_E_TIMED_OUT);
		if (strstr(shmb_last_error(), "it was not asked"))
			return n;
		n++;
	}
	fail_msg("the socket takes everything");
	return 0;
}

static void a_release_is_never_lost(void **state) {
	struct shmb_message_lease leases[2];
	uint64_t id;
	uint32_t sent;
	int result;

	(void)state;
	assert_int_equal(lookup(2, leases), 0);
	hold();
	sent = fill();
	id = leases[0].lease;
	assert_int_equal(shmb_client_release(client, &id, 1, &result), SHMB_E_TIMED_OUT);
	assert_int_equal(client->n_calls, sent + 1);
	go_on();
	assert_int_equal(asked(WIRE_OP_UNREGISTER), sent);
	assert_int_equal(asked(WIRE_OP_RELEASE), 1);
	assert_int_equal(fake.released, 1);
}

static void a_notice_is_never_lost(void **state) {
	struct shmb_lease lease;

	(void)state;
	assert_int_equal(shmb_client_get_memory_info(client, "r", 0, SHMB_REST, SHMB_READ, &lease), 0);
	hold();
	(void)fill();
	fake_set(&fake, 0, 100, WIRE_STATE_RETIRING);
	/* NOTIFY is small: as many as it takes */
	for (int i = 0; i < NAMES_MAX && !client->has_missed_notice; ++i) {
		atomic_fetch_add(&fake_detail(&fake, 0)->scan, 1);
		assert_int_equal(lease.client ? shmb_lease_release(&lease) : 0, 0);
		lease_ring_again(client);
	}
	assert_true(client->has_missed_notice);
	go_on();
	until(!client->has_missed_notice && fake.notified == 100);
	assert_int_equal(atomic_load(&layout_rung(client->page)[0]), atomic_load(&fake_detail(&fake, 0)->scan) + 1);
}

/* only what could have left something with the broker is asked for again */
static void a_broker_that_ends_before_it_answers(void **state) {
	struct shmb_message_lease leases[1];
	uint32_t asked_before;

	(void)state;
	assert_int_equal(lookup(1, leases), 0);
	fake.is_silent = true;
	assert_int_equal(shmb_client_set_call_timeout(client, TIMEOUT_MS), 0);
	assert_int_equal(ping(), SHMB_E_TIMED_OUT);
	assert_int_equal(lookup(1, leases), SHMB_E_TIMED_OUT);
	assert_int_equal(shmb_client_set_call_timeout(client, -1), 0);
	until(asked(WIRE_OP_LOOKUP) == 2 && asked(WIRE_OP_PING) == 1);
	fake_die(&fake);
	fake.is_silent = false;
	asked_before = asked(WIRE_OP_LOOKUP);
	fake_come_back(&fake);
	until(!client->n_calls && !client->away);
	assert_int_equal(asked(WIRE_OP_PING), 1);
	assert_int_equal(asked(WIRE_OP_LOOKUP), asked_before + 1);
	assert_int_equal(fake.log[fake.n_log - 2].flags, WIRE_FLAG_RETRY);
	assert_int_equal(fake.granted, 2);
	assert_int_equal(fake.released, 1);
}

static void a_client_is_freed_with_calls_outstanding(void **state) {
	struct shmb_message_lease leases[1];

	(void)state;
	hold();
	assert_int_equal(ping(), SHMB_E_TIMED_OUT);
	assert_int_equal(lookup(1, leases), SHMB_E_TIMED_OUT);
}

static void *wait_for_an_event(void *data) {
	struct shmb_event event;

	*(int *)data = shmb_client_next_event(client, &event, -1);
	return NULL;
}

/* whoever reads for all may wait for ever: the others do not */
static void another_thread_reads(void **state) {
	pthread_t thread;
	int result = -1;

	(void)state;
	assert_int_equal(shmb_client_subscribe(client, SHMB_EVENT_MASK_ALL), 0);
	assert_int_equal(pthread_create(&thread, NULL, wait_for_an_event, &result), 0);
	hold();
	assert_int_equal(ping(), SHMB_E_TIMED_OUT);
	assert_int_equal(shmb_client_set_call_timeout(client, -1), 0);
	fake.n_events = 1;
	fake.is_stopped = false;
	pthread_join(thread, NULL);
	assert_int_equal(result, 0);
	go_on();
}

/* a time that the broker takes because it was told to is not its fault */
static void waiting_on_purpose_is_not_cut_short(void **state) {
	const char *name = "r";
	int64_t before = client_now();
	int result;

	(void)state;
	hold();
	assert_int_equal(shmb_client_unregister(client, &name, 1, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, 50, &result),
			 SHMB_E_TIMED_OUT);
	assert_true(client_now() - before >= 50 + TIMEOUT_MS);
	go_on();
}

#define timed(_test) cmocka_unit_test_setup_teardown(_test, start, stop)

/* a socket at which nobody accepts: first HELLO is not answered, then there is no room to wait */
static void connecting_ends(void **state) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char directory[] = "/tmp/shmb-connect-XXXXXX";
	struct shmb_client *other = NULL;
	size_t before = count_fds();
	int fd;

	(void)state;
	assert_non_null(mkdtemp(directory));
	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s/s", directory);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	assert_true(fd >= 0);
	assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	assert_int_equal(listen(fd, 0), 0);
	for (int i = 0; i < 3; i++)
		assert_int_equal(shmb_client_new_within(&other, address.sun_path, 0, 0, TIMEOUT_MS), SHMB_E_TIMED_OUT);
	assert_int_equal(shmb_client_new_within(&other, address.sun_path, 0, 0, -2), SHMB_E_INVALID);
	(void)close_fd(fd);
	assert_int_equal(shmb_client_new_within(&other, address.sun_path, 0, 0, TIMEOUT_MS), -ECONNREFUSED);
	assert_null(other);
	assert_int_equal(unlink(address.sun_path), 0);
	assert_int_equal(rmdir(directory), 0);
	assert_int_equal(count_fds(), before);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		timed(the_time_to_wait_is_checked),
		timed(a_call_ends_and_the_client_goes_on),
		timed(no_time_at_all),
		timed(late_leases_are_given_back),
		timed(a_late_map_is_dropped),
		timed(a_late_registration_is_the_brokers),
		timed(no_more_are_outstanding_than_a_broker_takes),
		timed(a_release_is_never_lost),
		timed(a_notice_is_never_lost),
		timed(a_broker_that_ends_before_it_answers),
		timed(a_client_is_freed_with_calls_outstanding),
		timed(another_thread_reads),
		timed(waiting_on_purpose_is_not_cut_short),
		cmocka_unit_test(connecting_ends),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
