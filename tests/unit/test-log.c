/* SPDX-License-Identifier: Apache-2.0 */

/* Log: stable ids, lines that stay lines, limits per uid, and a reader that never makes us wait. */

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <syslog.h>
#include <unistd.h>

#include "log.h"

typedef struct Capture {
	int saved; /* stderr of the test */
	int pipe[2];
	char text[65536];
} Capture;

static uint64_t clock_ns;

static uint64_t test_clock(void) {
	return clock_ns;
}

static void capture_begin(Capture *capture) {
	assert_int_equal(pipe2(capture->pipe, O_CLOEXEC), 0);
	assert_int_equal(fcntl(capture->pipe[0], F_SETFL, O_NONBLOCK), 0);
	capture->saved = dup(STDERR_FILENO);
	assert_true(capture->saved >= 0);
	assert_int_equal(dup2(capture->pipe[1], STDERR_FILENO), STDERR_FILENO);
	log_init(LOG_TARGET_AUTO);
}

static void capture_end(Capture *capture) {
	size_t n = 0;
	ssize_t r;

	assert_int_equal(dup2(capture->saved, STDERR_FILENO), STDERR_FILENO);
	(void)close(capture->saved);
	(void)close(capture->pipe[1]);
	while ((r = read(capture->pipe[0], capture->text + n, sizeof(capture->text) - 1 - n)) > 0)
		n += (size_t)r;
	capture->text[n] = 0;
	(void)close(capture->pipe[0]);
}

static size_t count_lines(const char *text) {
	size_t n = 0;

	for (; *text; ++text)
		n += *text == '\n';
	return n;
}

static int setup(void **state) {
	*state = calloc(1, sizeof(Capture));
	/* each test starts in another interval, so that none meets the limits of the one before */
	clock_ns += 100 * LOG_INTERVAL_NS;
	log_set_clock(test_clock);
	(void)unsetenv("JOURNAL_STREAM");
	return 0;
}

static int teardown(void **state) {
	free(*state);
	log_set_clock(NULL);
	return 0;
}

static void test_ids(void **state) {
	(void)state;
	for (LogId i = 0; i < _LOG_ID_N; ++i) {
		const char *id = log_message_id(i);

		assert_int_equal(strlen(id), 32);
		assert_int_equal(strspn(id, "0123456789abcdef"), 32);
		assert_true(*log_message_name(i) && *log_message_meaning(i));
		assert_in_range(log_message_level(i), LOG_ERR, LOG_INFO);
		for (LogId j = 0; j < i; ++j)
			assert_string_not_equal(id, log_message_id(j));
	}
	/* what others match on never changes */
	assert_string_equal(log_message_id(LOG_REVOKED), "f1550c55f406404983f94c9376890909");
}

static void test_line(void **state) {
	Capture *capture = *state;

	capture_begin(capture);
	errno = ENOENT;
	log_write(LOG_CONFIG_ERROR, LOG_NO_UID, "A=b\nC=d", "%s %d: %m", "line", 7);
	assert_int_equal(errno, ENOENT);
	log_write(LOG_READY, LOG_NO_UID, NULL, "two\nlines \x1b[31m");
	capture_end(capture);
	assert_string_equal(capture->text, "<3>shmbrokerd: line 7: No such file or directory\n"
					   "<6>shmbrokerd: two?lines ?[31m\n");
}

static void test_long_line(void **state) {
	Capture *capture = *state;

	capture_begin(capture);
	log_write(LOG_READY, LOG_NO_UID, NULL, "%05000d", 0);
	capture_end(capture);
	assert_int_equal(count_lines(capture->text), 1);
	assert_true(strlen(capture->text) > LOG_LINE_MAX / 2 && strlen(capture->text) < LOG_LINE_MAX + 32);
}

static void test_limit(void **state) {
	Capture *capture = *state;
	uint64_t suppressed = log_suppressed_total();

	capture_begin(capture);
	for (int i = 0; i < LOG_BURST + 5; ++i)
		log_write(LOG_PEER_PROTOCOL, 7, NULL, "seven %d", i);
	/* another one has its own limit, and the broker none */
	log_write(LOG_PEER_PROTOCOL, 8, NULL, "eight");
	for (int i = 0; i < 3 * LOG_BURST; ++i)
		log_write(LOG_READY, LOG_NO_UID, NULL, "own");
	capture_end(capture);
	assert_int_equal(count_lines(capture->text), LOG_BURST + 1 + 3 * LOG_BURST);
	assert_non_null(strstr(capture->text, "seven 9\n"));
	assert_null(strstr(capture->text, "seven 10"));
	assert_non_null(strstr(capture->text, "eight\n"));
	assert_int_equal(log_suppressed_total() - suppressed, 5);

	/* not yet */
	clock_ns += LOG_INTERVAL_NS - 1;
	capture_begin(capture);
	log_write(LOG_PEER_PROTOCOL, 7, NULL, "early");
	capture_end(capture);
	assert_string_equal(capture->text, "");
	/* the next one that passes says how many there were, once */
	clock_ns += 1;
	capture_begin(capture);
	log_write(LOG_PEER_PROTOCOL, 7, NULL, "again");
	log_write(LOG_PEER_PROTOCOL, 7, NULL, "and again");
	log_write(LOG_PEER_PROTOCOL, 8, NULL, "eight");
	capture_end(capture);
	assert_string_equal(capture->text, "<4>shmbrokerd: again (6 suppressed)\n"
					   "<4>shmbrokerd: and again\n"
					   "<4>shmbrokerd: eight\n");
	assert_int_equal(log_suppressed_total() - suppressed, 6);
}

static void test_limit_of_all(void **state) {
	Capture *capture = *state;

	/* somebody with many uids */
	capture_begin(capture);
	for (uint32_t uid = 0; uid < 2 * LOG_BURST_ALL; ++uid)
		log_write(LOG_PEER_PROTOCOL, 100000 + uid, NULL, "x");
	log_write(LOG_READY, LOG_NO_UID, NULL, "own");
	capture_end(capture);
	assert_int_equal(count_lines(capture->text), LOG_BURST_ALL + 1);
	clock_ns += LOG_INTERVAL_NS;
	capture_begin(capture);
	log_write(LOG_PEER_PROTOCOL, 1, NULL, "again");
	capture_end(capture);
	assert_int_equal(count_lines(capture->text), 1);
}

static void test_full_pipe(void **state) {
	Capture *capture = *state;
	uint64_t dropped = log_dropped_total();
	size_t lines;

	/* nobody reads; this would hang if writing waited */
	capture_begin(capture);
	(void)fcntl(capture->pipe[1], F_SETPIPE_SZ, 4096);
	for (int i = 0; i < 200; ++i)
		log_write(LOG_READY, LOG_NO_UID, NULL, "%0100d", i);
	capture_end(capture);
	lines = count_lines(capture->text);
	assert_in_range(lines, 1, 199);
	assert_int_equal(log_dropped_total() - dropped, 200 - lines);
}

static void test_no_reader(void **state) {
	uint64_t dropped = log_dropped_total();
	int saved = dup(STDERR_FILENO), ends[2];

	(void)state;
	/* no stderr, and a pipe whose reader is gone, which would be SIGPIPE */
	(void)close(STDERR_FILENO);
	log_init(LOG_TARGET_AUTO);
	log_write(LOG_READY, LOG_NO_UID, NULL, "nobody is there");
	assert_int_equal(dup2(saved, STDERR_FILENO), STDERR_FILENO);
	assert_int_equal(pipe(ends), 0);
	(void)close(ends[0]);
	assert_int_equal(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
	(void)close(ends[1]);
	log_init(LOG_TARGET_AUTO);
	log_write(LOG_READY, LOG_NO_UID, NULL, "nobody is there");
	assert_int_equal(dup2(saved, STDERR_FILENO), STDERR_FILENO);
	(void)close(saved);
	assert_int_equal(log_dropped_total() - dropped, 2);
}

static void test_other_journal_stream(void **state) {
	Capture *capture = *state;
	struct stat status;
	char text[64];

	/* of a stderr that was redirected since: another inode, a bad text */
	assert_int_equal(stat("/", &status), 0);
	(void)snprintf(text, sizeof(text), "%llu:%llu", (unsigned long long)status.st_dev,
		       (unsigned long long)status.st_ino);
	for (const char **value = (const char *[]){ text, "1", "", "1:2x", "nonsense", NULL }; *value; ++value) {
		(void)setenv("JOURNAL_STREAM", *value, 1);
		capture_begin(capture);
		log_write(LOG_READY, LOG_NO_UID, NULL, "here");
		capture_end(capture);
		assert_string_equal(capture->text, "<6>shmbrokerd: here\n");
	}
}

#define TEST(_function) cmocka_unit_test_setup_teardown(_function, setup, teardown)

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_ids), TEST(test_line),	  TEST(test_long_line), TEST(test_limit),
		TEST(test_limit_of_all),    TEST(test_full_pipe), TEST(test_no_reader), TEST(test_other_journal_stream),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
