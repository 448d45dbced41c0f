/* SPDX-License-Identifier: Apache-2.0 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "count-fds.h"
#include "fd-limit.h"
#include "wire/compat.h"
#include "wire/fd.h"

static int check_fds_before(void **state) {
	static size_t before;

	before = count_fds();
	*state = &before;
	return 0;
}

static int check_fds_after(void **state) {
	return count_fds() == *(size_t *)*state ? 0 : -1;
}

static void make_pair(int pair[2]) {
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
}

static bool same_file(int a, int b) {
	struct stat sa, sb;

	assert_int_equal(fstat(a, &sa), 0);
	assert_int_equal(fstat(b, &sb), 0);
	return sa.st_dev == sb.st_dev && sa.st_ino == sb.st_ino;
}

static void test_a_message_carries_its_fds(void **state) {
	_cleanup_(closep) int memory = memfd_create("test", MFD_CLOEXEC);
	int pair[2], fds[WIRE_FDS_ROOM], two[2] = { memory, STDERR_FILENO };
	char buffer[16];
	FdMessage message;

	(void)state;
	make_pair(pair);
	assert_int_equal(fd_send(pair[0], "hello", 5, two, 2, 0), 0);
	assert_int_equal(fd_receive(pair[1], buffer, sizeof(buffer), MSG_DONTWAIT, fds, &message), 0);
	assert_int_equal(message.size, 5);
	assert_memory_equal(buffer, "hello", 5);
	assert_int_equal(message.n_fds, 2);
	assert_false(message.truncated);
	assert_false(message.fds_lost);
	assert_true(same_file(fds[0], memory));
	assert_true(fcntl(fds[0], F_GETFD) & FD_CLOEXEC);
	assert_true(fcntl(fds[1], F_GETFD) & FD_CLOEXEC);
	close_fd(fds[0]);
	close_fd(fds[1]);
	close_fd(pair[0]);
	close_fd(pair[1]);
}

static void test_as_many_fds_as_the_kernel_can_deliver(void **state) {
	int pair[2], many[WIRE_FDS_ROOM + 1], fds[WIRE_FDS_ROOM];
	char buffer[16];
	FdMessage message;

	(void)state;
	make_pair(pair);
	for (size_t i = 0; i < WIRE_FDS_ROOM + 1; i++)
		many[i] = pair[0];
	assert_int_equal(fd_send(pair[0], "x", 1, many, WIRE_FDS_ROOM + 1, 0), -EINVAL);
	assert_int_equal(fd_send(pair[0], "x", 1, many, WIRE_FDS_ROOM, 0), 0);
	assert_int_equal(fd_receive(pair[1], buffer, sizeof(buffer), MSG_DONTWAIT, fds, &message), 0);
	assert_int_equal(message.n_fds, WIRE_FDS_ROOM);
	assert_false(message.fds_lost);
	for (size_t i = 0; i < message.n_fds; i++)
		close_fd(fds[i]);
	close_fd(pair[0]);
	close_fd(pair[1]);
}

static void test_a_long_message_is_truncated_and_its_fds_arrive(void **state) {
	int pair[2], fds[WIRE_FDS_ROOM];
	char buffer[4];
	FdMessage message;

	(void)state;
	make_pair(pair);
	assert_int_equal(fd_send(pair[0], "too long", 8, &pair[0], 1, 0), 0);
	assert_int_equal(fd_receive(pair[1], buffer, sizeof(buffer), MSG_DONTWAIT | MSG_TRUNC, fds, &message), 0);
	assert_int_equal(message.size, sizeof(buffer));
	assert_true(message.truncated);
	assert_int_equal(message.n_fds, 1);
	close_fd(fds[0]);
	close_fd(pair[0]);
	close_fd(pair[1]);
}

static void test_nothing_and_the_end(void **state) {
	int pair[2], fds[WIRE_FDS_ROOM];
	char buffer[4];
	FdMessage message;

	(void)state;
	make_pair(pair);
	assert_int_equal(fd_receive(pair[1], buffer, sizeof(buffer), MSG_DONTWAIT, fds, &message), -EAGAIN);
	close_fd(pair[0]);
	assert_int_equal(fd_receive(pair[1], buffer, sizeof(buffer), MSG_DONTWAIT, fds, &message), 0);
	assert_int_equal(message.size, 0);
	assert_int_equal(message.n_fds, 0);
	/* EPIPE, not SIGPIPE */
	assert_int_equal(fd_send(pair[1], "x", 1, NULL, 0, 0), -EPIPE);
	close_fd(pair[1]);
}

static void test_a_shortage_of_fds_is_told(void **state) {
	int pair[2], fds[WIRE_FDS_ROOM], four[4];
	char buffer[4];
	FdMessage message;
	FdLimit limit;
	int r;

	(void)state;
	make_pair(pair);
	for (size_t i = 0; i < 4; i++)
		four[i] = pair[0];
	assert_int_equal(fd_send(pair[0], "x", 1, four, 4, 0), 0);
	fd_limit_begin(&limit, 2);
	r = fd_receive(pair[1], buffer, sizeof(buffer), MSG_DONTWAIT, fds, &message);
	fd_limit_end(&limit);
	assert_int_equal(r, 0);
	assert_true(message.fds_lost);
	assert_int_equal(message.n_fds, 2);
	for (size_t i = 0; i < message.n_fds; i++)
		close_fd(fds[i]);
	close_fd(pair[0]);
	close_fd(pair[1]);
}

static struct cmsghdr *add_cmsg(struct msghdr *header, struct cmsghdr *last, int level, int type, const int *fds,
				size_t n) {
	struct cmsghdr *cmsg = last ? CMSG_NXTHDR(header, last) : CMSG_FIRSTHDR(header);

	assert_non_null(cmsg);
	cmsg->cmsg_level = level;
	cmsg->cmsg_type = type;
	cmsg->cmsg_len = CMSG_LEN(n * sizeof(int));
	memcpy(CMSG_DATA(cmsg), fds, n * sizeof(int));
	return cmsg;
}

static void test_control_data_of_every_kind(void **state) {
	FdControl control = { 0 };
	struct msghdr header = { .msg_control = &control, .msg_controllen = sizeof(control) };
	int first[2] = { dup(2), dup(2) }, second[1] = { dup(2) }, pidfd[1] = { dup(2) }, other[3] = { 0, 1, 2 };
	int none[1] = { -EINVAL }, fds[WIRE_FDS_ROOM];
	struct cmsghdr *cmsg;
	FdMessage message;

	(void)state;
	cmsg = add_cmsg(&header, NULL, SOL_SOCKET, SCM_CREDENTIALS, other, 3);
	cmsg = add_cmsg(&header, cmsg, SOL_SOCKET, SCM_RIGHTS, first, 2);
	cmsg = add_cmsg(&header, cmsg, SOL_SOCKET, SCM_PIDFD, pidfd, 1);
	cmsg = add_cmsg(&header, cmsg, IPPROTO_IP, SCM_RIGHTS, other, 3);
	cmsg = add_cmsg(&header, cmsg, SOL_SOCKET, SCM_PIDFD, none, 1);
	cmsg = add_cmsg(&header, cmsg, SOL_SOCKET, SCM_RIGHTS, second, 1);
	header.msg_controllen = (size_t)((uint8_t *)cmsg - control.bytes) + CMSG_SPACE(sizeof(int));
	fd_message_parse(&header, 7, fds, &message);
	assert_int_equal(message.size, 7);
	assert_int_equal(message.n_fds, 3);
	assert_int_equal(fds[0], first[0]);
	assert_int_equal(fds[1], first[1]);
	assert_int_equal(fds[2], second[0]);
	/* the kernel's pidfd was closed, what is not SOL_SOCKET was left alone */
	assert_int_equal(fcntl(pidfd[0], F_GETFD), -1);
	for (int fd = 0; fd < 3; fd++)
		assert_true(fcntl(fd, F_GETFD) >= 0);
	for (size_t i = 0; i < message.n_fds; i++)
		close_fd(fds[i]);
}

static void test_only_memory_has_seals(void **state) {
	_cleanup_(closep) int memory = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	_cleanup_(closep) int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);

	(void)state;
	assert_int_equal(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	assert_int_equal(fd_seals(memory), F_SEAL_SHRINK);
	assert_int_equal(fd_seals(file), -EINVAL);
	assert_int_equal(fd_seals(-EBADF), -EBADF);
}

static void test_reopen_is_another_open_file(void **state) {
	_cleanup_(closep) int memory = memfd_create("test", MFD_CLOEXEC);
	_cleanup_(closep) int again = fd_reopen(memory, O_RDONLY);

	(void)state;
	assert_true(again >= 0);
	assert_true(same_file(memory, again));
	assert_int_equal(fcntl(again, F_GETFL) & O_ACCMODE, O_RDONLY);
	assert_true(fcntl(again, F_GETFD) & FD_CLOEXEC);
	assert_int_equal(fd_reopen(-1, O_RDONLY), -ENOENT);
}

#define TEST(_function) cmocka_unit_test_setup_teardown(_function, check_fds_before, check_fds_after)

int main(void) {
	const struct CMUnitTest tests[] = {
		TEST(test_a_message_carries_its_fds),
		TEST(test_as_many_fds_as_the_kernel_can_deliver),
		TEST(test_a_long_message_is_truncated_and_its_fds_arrive),
		TEST(test_nothing_and_the_end),
		TEST(test_a_shortage_of_fds_is_told),
		TEST(test_control_data_of_every_kind),
		TEST(test_only_memory_has_seals),
		TEST(test_reopen_is_another_open_file),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
