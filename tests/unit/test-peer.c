/* SPDX-License-Identifier: Apache-2.0 */

/* Peer: what the kernel says of a connected process, and what is made of the texts in /proc. */

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "count-fds.h"
#include "peer.h"
#include "wire/compat.h"
#include "wire/fd.h"

#define ID "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define POD "12345678-9abc-def0-1234-56789abcdef0"
#define POD_SLICE "12345678_9abc_def0_1234_56789abcdef0"

static void test_container(void **state) {
	static const struct {
		const char *cgroup;
		const char *container;
	} cases[] = {
		{ "/", "" },
		{ "", "" },
		{ "/system.slice/shmbroker.service", "" },
		{ "/system.slice/docker-" ID ".scope", "docker:0123456789ab" },
		{ "/docker/" ID, "docker:0123456789ab" },
		{ "/docker/" ID "/init.scope", "docker:0123456789ab" },
		{ "/docker", "" },
		{ "/other/" ID, "" },
		{ "/system.slice/docker-0123.scope", "" },
		{ "/system.slice/docker-" ID "0.scope", "" },
		{ "/machine.slice/libpod-" ID ".scope/container", "podman:0123456789ab" },
		{ "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" ID ".scope",
		  "podman:0123456789ab" },
		{ "/system.slice/cri-containerd-" ID ".scope", "containerd:0123456789ab" },
		{ "/crio-" ID ".scope", "cri-o:0123456789ab" },
		{ "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" POD_SLICE
		  ".slice/cri-containerd-" ID ".scope",
		  "pod:" POD },
		{ "/kubepods.slice/kubepods-pod" POD_SLICE ".slice/crio-" ID ".scope", "pod:" POD },
		{ "/kubepods/besteffort/pod" POD "/" ID, "pod:" POD },
		{ "/kubepods/besteffort", "" },
		{ "/kubepods/podnothexadecimal", "" },
		{ "/pod" POD, "" },
		/* what a container makes inside of its own cgroup does not count */
		{ "/docker/" ID "/libpod-ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff.scope",
		  "docker:0123456789ab" },
		{ "/docker/" ID "/kubepods/pod" POD, "docker:0123456789ab" },
		{ "///", "" },
	};
	char container[PEER_CONTAINER_SIZE], small[8];

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		peer_parse_container(cases[i].cgroup, container, sizeof(container));
		assert_string_equal(container, cases[i].container);
	}
	peer_parse_container("/docker/" ID, small, sizeof(small));
	assert_string_equal(small, "docker:");
}

static void test_cgroup(void **state) {
	char path[64];

	(void)state;
	assert_true(peer_parse_cgroup("0::/system.slice/x.service\n", path, sizeof(path)));
	assert_string_equal(path, "/system.slice/x.service");
	assert_true(peer_parse_cgroup("12:pids:/a\n1:name=systemd:/b\n0::/c\n", path, sizeof(path)));
	assert_string_equal(path, "/c");
	assert_true(peer_parse_cgroup("12:pids:/a\n1:name=systemd:/b\n", path, sizeof(path)));
	assert_string_equal(path, "/b");
	assert_true(peer_parse_cgroup("0::/a\x1b[31m\n", path, sizeof(path)));
	assert_string_equal(path, "/a?[31m");
	assert_false(peer_parse_cgroup("", path, sizeof(path)));
	assert_false(peer_parse_cgroup("12:pids:/a\n", path, sizeof(path)));
	assert_false(peer_parse_cgroup("0::", path, sizeof(path)));
	assert_true(peer_parse_cgroup("0::/0123456789", path, 8));
	assert_string_equal(path, "/012345");
}

static void test_start_time(void **state) {
	const char *tail = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 987654321 20 21\n";
	char text[256];

	(void)state;
	(void)snprintf(text, sizeof(text), "42 (sh)%s", tail);
	assert_int_equal(peer_parse_start_time(text), 987654321);
	/* a name that looks like the rest of the line */
	(void)snprintf(text, sizeof(text), "42 (a) S 1 2 (b) c)%s", tail);
	assert_int_equal(peer_parse_start_time(text), 987654321);
	assert_int_equal(peer_parse_start_time(""), 0);
	assert_int_equal(peer_parse_start_time("42 (sh)"), 0);
	assert_int_equal(peer_parse_start_time("42 (sh) S 1 2 3"), 0);
	assert_int_equal(peer_parse_start_time("42 sh S"), 0);
}

static void test_other_pidns(void **state) {
	(void)state;
	assert_false(peer_parse_other_pidns("Name:\tx\nNSpid:\t42\nVmPeak: 1\n"));
	assert_true(peer_parse_other_pidns("Name:\tx\nNSpid:\t42\t7\n"));
	assert_true(peer_parse_other_pidns("NSpid:\t42\t7\t1\n"));
	/* what cannot be told is not ours */
	assert_true(peer_parse_other_pidns(""));
	assert_true(peer_parse_other_pidns("Name:\tNSpid: 42\n"));
	assert_true(peer_parse_other_pidns("NSpid:\n"));
}

static void test_this_process(void **state) {
	size_t n_before = count_fds();
	gid_t groups[65536];
	int pair[2], n_groups = getgroups(65536, groups);
	FILE *file;
	Peer peer;

	(void)state;
	assert_int_equal(prctl(PR_SET_NAME, "peer\nwith (x)"), 0);
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(peer_read(pair[0], &peer), 0);
	assert_int_equal(peer.pid, getpid());
	assert_int_equal(peer.uid, geteuid());
	assert_int_equal(peer.gid, getegid());
	assert_int_equal(peer.n_groups, n_groups);
	for (int i = 0; i < n_groups; ++i)
		assert_int_equal(peer.groups[i], groups[i]);
	assert_string_equal(peer.comm, "peer?with (x)");
	assert_false(peer.exited);
	assert_true(peer.pidfd >= 0);
	assert_true(peer.start_time > 0);
	file = fopen("/proc/sys/kernel/overflowuid", "r");
	if (file) {
		unsigned uid = 0;

		assert_int_equal(fscanf(file, "%u", &uid), 1);
		assert_int_equal(peer.overflow_uid, uid == geteuid());
		(void)fclose(file);
	}
	peer_deinit(&peer);
	assert_int_equal(peer.pidfd, -EBADF);
	peer_deinit(&peer);
	(void)close(pair[0]);
	(void)close(pair[1]);
	assert_int_equal(count_fds(), n_before);
}

/* a child that connects, says so, and ends when its end of the pipe is closed */
static pid_t fork_client(const struct sockaddr_un *address, socklen_t length, int *ret_pipe) {
	int ends[2];
	pid_t pid;

	assert_int_equal(pipe(ends), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (!pid) {
		int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
		char byte;

		(void)close(ends[1]);
		if (fd < 0 || connect(fd, (const struct sockaddr *)address, length))
			_exit(1);
		_exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);
	}
	(void)close(ends[0]);
	*ret_pipe = ends[1];
	return pid;
}

static void test_dying_process(void **state) {
	size_t n_before = count_fds();
	char directory[] = "/tmp/peer-XXXXXX";
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), fd, hold, status;
	struct pollfd poll_fd;
	pid_t pid;
	Peer peer;

	(void)state;
	assert_true(listener >= 0);
	assert_non_null(mkdtemp(directory));
	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s/s", directory);
	assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
	assert_int_equal(listen(listener, 4), 0);

	/* its death is seen by the pidfd */
	pid = fork_client(&address, sizeof(address), &hold);
	fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	assert_true(fd >= 0);
	assert_int_equal(peer_read(fd, &peer), 0);
	assert_int_equal(peer.pid, pid);
	assert_false(peer.exited);
	poll_fd = (struct pollfd){ .fd = peer.pidfd, .events = POLLIN };
	assert_int_equal(poll(&poll_fd, 1, 0), 0);
	(void)close(hold);
	assert_int_equal(poll(&poll_fd, 1, 60000), 1);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	peer_deinit(&peer);
	(void)close(fd);

	/* one that was reaped before it was accepted is nobody else */
	pid = fork_client(&address, sizeof(address), &hold);
	poll_fd = (struct pollfd){ .fd = listener, .events = POLLIN };
	assert_int_equal(poll(&poll_fd, 1, 60000), 1);
	(void)close(hold);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	assert_true(fd >= 0);
	assert_int_equal(peer_read(fd, &peer), 0);
	assert_int_equal(peer.pid, pid);
	assert_true(peer.exited);
	assert_string_equal(peer.comm, "");
	assert_null(peer.cgroup);
	assert_int_equal(peer.start_time, 0);
	assert_true(peer.other_pidns);
	peer_deinit(&peer);
	(void)close(fd);
	(void)close(listener);
	(void)unlink(address.sun_path);
	(void)rmdir(directory);
	assert_int_equal(count_fds(), n_before);
}

/* a kernel that does not know SO_PEERPIDFD, and, with @no_pidfd_open, a sandbox that does not know pidfd_open either */
static void use_old_kernel(bool no_pidfd_open) {
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, no_pidfd_open ? SYS_pidfd_open : UINT32_MAX, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getsockopt, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SO_PEERPIDFD, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOPROTOOPT),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(code) / sizeof(*code), .filter = code };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		_exit(100);
}

static int read_under_old_kernel(bool no_pidfd_open) {
	pid_t pid = fork();
	int status;

	assert_true(pid >= 0);
	if (!pid) {
		struct pollfd poll_fd = { .events = POLLIN };
		int pair[2];
		Peer peer;

		use_old_kernel(no_pidfd_open);
		if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) || peer_read(pair[0], &peer))
			_exit(101);
		if (peer.exited || peer.pid != getpid() || !peer.comm[0] || !peer.start_time)
			_exit(102);
		if (peer.pidfd < 0)
			_exit(2);
		/* of a process that lives */
		poll_fd.fd = peer.pidfd;
		_exit(peer.pidfd_by_pid && poll(&poll_fd, 1, 0) == 0 ? 1 : 103);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static void test_old_kernel(void **state) {
	/* valgrind has no pidfd_open */
	int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);

	(void)state;
	assert_int_equal(read_under_old_kernel(false), fd >= 0 ? 1 : 2);
	(void)close_fd(fd);
	assert_int_equal(read_under_old_kernel(true), 2);
}

static void test_no_peer(void **state) {
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), ends[2];
	Peer peer = { .pid = 99 };

	(void)state;
	assert_true(fd >= 0);
	assert_int_equal(peer_read(fd, &peer), -ENOTCONN);
	assert_int_equal(peer.pid, 99);
	(void)close(fd);
	assert_int_equal(pipe(ends), 0);
	assert_int_equal(peer_read(ends[0], &peer), -ENOTSOCK);
	(void)close(ends[0]);
	(void)close(ends[1]);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_container),    cmocka_unit_test(test_cgroup),
		cmocka_unit_test(test_start_time),   cmocka_unit_test(test_other_pidns),
		cmocka_unit_test(test_this_process), cmocka_unit_test(test_dying_process),
		cmocka_unit_test(test_old_kernel),   cmocka_unit_test(test_no_peer),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
