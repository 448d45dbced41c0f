/* SPDX-License-Identifier: Apache-2.0 */

/* The membarrier calls: what a kernel offers works, what it denies is an errno and never a success. */

#include "wire/barrier.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __has_include
#if __has_include(<linux/membarrier.h>)
#include <linux/membarrier.h>
_Static_assert((int)BARRIER_QUERY == (int)MEMBARRIER_CMD_QUERY, "membarrier(2)");
_Static_assert((int)BARRIER_GLOBAL_EXPEDITED == (int)MEMBARRIER_CMD_GLOBAL_EXPEDITED, "membarrier(2)");
_Static_assert((int)BARRIER_REGISTER_GLOBAL_EXPEDITED == (int)MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED,
	       "membarrier(2)");
#endif
#endif

static void test_what_is_offered_works(void **state) {
	int commands = barrier_query();

	(void)state;
	if (commands < 0) {
		assert_true(commands == -ENOSYS || commands == -EPERM);
		assert_int_equal(barrier_register_global(), commands);
		assert_int_equal(barrier_global(), commands);
		return;
	}
	assert_int_equal(barrier_register_global(), commands & BARRIER_REGISTER_GLOBAL_EXPEDITED ? 0 : -EINVAL);
	assert_int_equal(barrier_register_global(), commands & BARRIER_REGISTER_GLOBAL_EXPEDITED ? 0 : -EINVAL);
	assert_int_equal(barrier_global(), commands & BARRIER_GLOBAL_EXPEDITED ? 0 : -EINVAL);
}

/* in a child, because a filter cannot be taken away again */
static int denied_child(void) {
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(code) / sizeof(code[0]), .filter = code };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
		return 77;
	if (barrier_query() != -EPERM || barrier_register_global() != -EPERM || barrier_global() != -EPERM)
		return 1;
	return 0;
}

static void test_denied_is_an_error(void **state) {
	int status;
	pid_t pid;

	(void)state;
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0)
		_exit(denied_child());
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	if (WEXITSTATUS(status) == 77)
		skip();
	assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_what_is_offered_works),
		cmocka_unit_test(test_denied_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
