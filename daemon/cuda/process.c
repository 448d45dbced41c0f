/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "wire/fd.h"

extern char **environ;

const char *cuda_process_path(const Config *config) {
	return config->cuda_helper && *config->cuda_helper ? config->cuda_helper : SHMBROKER_CUDA_HELPER;
}

/* consumes nothing; @socket is the helper's end */
static int spawn(pid_t *ret, const Config *config, const uint8_t uuid[16], int socket) {
	char device[64], library[4096];
	const char *path = cuda_process_path(config);
	char *arguments[] = { (char *)"shmbroker-cuda-helper", device, library,
			      config->cuda_bypass_mps ? NULL : (char *)"--use-mps", NULL };
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	sigset_t set;
	size_t n;
	int r;

	n = (size_t)snprintf(device, sizeof(device), "--device=GPU-");
	for (size_t i = 0; i < 16; ++i)
		n += (size_t)snprintf(device + n, sizeof(device) - n, "%02x", uuid[i]);
	(void)snprintf(library, sizeof(library), "--library=%s", config->cuda_library);
	r = posix_spawn_file_actions_init(&actions);
	if (r)
		return -r;
	r = posix_spawnattr_init(&attributes);
	if (r) {
		(void)posix_spawn_file_actions_destroy(&actions);
		return -r;
	}
	(void)sigfillset(&set);
	(void)posix_spawnattr_setsigdefault(&attributes, &set);
	(void)sigemptyset(&set);
	(void)posix_spawnattr_setsigmask(&attributes, &set);
	(void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
	r = posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDWR, 0);
	if (!r)
		r = posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
	if (!r)
		r = posix_spawn_file_actions_adddup2(&actions, socket, HELPER_FD);
	if (!r)
		r = posix_spawn(ret, path, &actions, &attributes, arguments, environ);
	(void)posix_spawnattr_destroy(&attributes);
	(void)posix_spawn_file_actions_destroy(&actions);
	return -r;
}

/* it has ended when it was waited for and has nothing more to say */
static void process_check(CudaProcess *process) {
	if (process->is_over && !process->has_conn && process->on_end)
		process->on_end(process);
}

static void process_disconnect(CudaProcess *process) {
	if (!process->has_conn)
		return;
	process->has_conn = false;
	loop_conn_unlink(&process->conn);
}

static void on_message(LoopConn *conn, LoopMessage *message) {
	CudaProcess *process = container_of(conn, CudaProcess, conn);
	HelperReply reply;

	if (message->size != sizeof(reply) || message->truncated) {
		cuda_process_kill(process);
		return;
	}
	memcpy(&reply, message->data, sizeof(reply));
	reply.text[sizeof(reply.text) - 1] = 0;
	if (reply.magic != HELPER_MAGIC || reply.cause >= UINT32_MAX / 2 || reply.n_devices > HELPER_DEVICES_MAX) {
		cuda_process_kill(process);
		return;
	}
	process->on_reply(process, &reply);
}

static void on_conn_end(LoopConn *conn, int reason, int error) {
	CudaProcess *process = container_of(conn, CudaProcess, conn);

	(void)reason;
	(void)error;
	process_disconnect(process);
	/* without its socket it is of no use, whatever it does */
	cuda_process_kill(process);
	process_check(process);
}

static void on_pidfd(LoopPoll *poll, uint32_t events) {
	CudaProcess *process = container_of(poll, CudaProcess, poll);
	int status;

	(void)events;
	if (process->is_over || waitpid(process->pid, &status, WNOHANG) != process->pid)
		return;
	process->is_over = true;
	loop_poll_unlink(&process->poll);
	loop_timer_unlink(&process->timer);
	if (WIFSIGNALED(status))
		(void)snprintf(process->how, sizeof(process->how), "was killed by signal %d", WTERMSIG(status));
	else
		(void)snprintf(process->how, sizeof(process->how), "exited with status %d", WEXITSTATUS(status));
	process_check(process);
}

static void on_patience(LoopTimer *timer) {
	CudaProcess *process = container_of(timer, CudaProcess, timer);

	cuda_process_kill(process);
	process_check(process);
}

/* consumes @fd */
static int process_link(CudaProcess *process, int fd) {
	int r;

	process->pidfd = (int)syscall(SYS_pidfd_open, process->pid, 0);
	if (process->pidfd < 0) {
		(void)close_fd(fd);
		return -errno;
	}
	process->poll = (LoopPoll){ .fd = process->pidfd, .on_ready = on_pidfd };
	process->timer.on_time = on_patience;
	process->conn = (LoopConn){ .fd = fd, .owner_uid = geteuid(), .on_message = on_message, .on_end = on_conn_end };
	list_init(&process->conn.out);
	r = loop_conn_link(process->loop, &process->conn);
	if (r)
		return r;
	process->has_conn = true;
	return loop_poll_link(process->loop, &process->poll);
}

int cuda_process_new(CudaProcess **ret, Loop *loop, const Config *config, const uint8_t uuid[16]) {
	CudaProcess *process = calloc(1, sizeof(*process));
	int sockets[2], r;

	if (!process)
		return -ENOMEM;
	process->loop = loop;
	process->pidfd = -EBADF;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0) {
		r = -errno;
		free(process);
		return r;
	}
	r = spawn(&process->pid, config, uuid, sockets[1]);
	(void)close_fd(sockets[1]);
	if (r || fcntl(sockets[0], F_SETFL, O_NONBLOCK) < 0) {
		(void)close_fd(sockets[0]);
		if (process->pid <= 0)
			return free(process), r;
	}
	r = process_link(process, sockets[0]);
	if (r) {
		cuda_process_free(process);
		return r;
	}
	*ret = process;
	return 0;
}

CudaProcess *cuda_process_free(CudaProcess *process) {
	if (!process)
		return NULL;
	process_disconnect(process);
	loop_poll_unlink(&process->poll);
	loop_timer_unlink(&process->timer);
	if (!process->is_over) {
		cuda_process_kill(process);
		(void)waitpid(process->pid, NULL, WNOHANG);
	}
	(void)close_fd(process->pidfd);
	list_remove(&process->link);
	free(process);
	return NULL;
}

int cuda_process_send(CudaProcess *process, const HelperRequest *request, int fd) {
	int fds[1] = { fd };

	if (!process->has_conn)
		return -EPIPE;
	return loop_conn_send(&process->conn, request, sizeof(*request), fds, fd >= 0, false);
}

void cuda_process_hang_up(CudaProcess *process, uint64_t ns) {
	process_disconnect(process);
	/* one that ended before its last message was seen has nobody to tell of it but the timer */
	loop_timer_set(process->loop, &process->timer, loop_now(process->loop) + (process->is_over ? 0 : ns));
}

void cuda_process_kill(CudaProcess *process) {
	/* it was not waited for, so that the number is still its */
	if (!process->is_over)
		(void)kill(process->pid, SIGKILL);
}
