/* SPDX-License-Identifier: Apache-2.0 */

#include "peer.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "wire/compat.h"
#include "wire/fd.h"
#include "wire/name.h"
#include "wire/protocol.h"

#define PROC_FILE_MAX 16384
#define GROUPS_MAX 65536 /* NGROUPS_MAX of Linux */
#define OVERFLOW_UID 65534

/* reads what is there at once, up to @size - 1 bytes, as a string */
static bool read_text(const char *path, char *buffer, size_t size) {
	_cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
	size_t n = 0;

	if (fd < 0)
		return false;
	while (n < size - 1) {
		ssize_t r = read(fd, buffer + n, size - 1 - n);

		if (r < 0 && errno == EINTR)
			continue;
		if (r < 0)
			return false;
		if (!r)
			break;
		n += (size_t)r;
	}
	buffer[n] = 0;
	return n > 0;
}

static bool read_proc(pid_t pid, const char *file, char *buffer, size_t size) {
	char path[64];

	(void)snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, file);
	return read_text(path, buffer, size);
}

/*
 * @n bytes of @text, cut to @size and harmless on a terminal: what is not UTF-8 without control characters, by the
 * rules for names, keeps its ASCII only
 */
static void copy_text(char *buffer, size_t size, const char *text, size_t n) {
	const char *why;
	bool harmless;

	if (n > size - 1)
		n = size - 1;
	harmless = n <= WIRE_NAME_MAX && !wire_name_check(text, n, &why);
	for (size_t i = 0; i < n; ++i)
		buffer[i] = harmless || (text[i] >= ' ' && text[i] <= '~') ? text[i] : '?';
	buffer[n] = 0;
}

/* ---- texts of /proc ---- */

/* the rest of the first line that begins with @key, or NULL */
static const char *find_line(const char *text, const char *key) {
	size_t n = strlen(key);

	while (text) {
		if (!strncmp(text, key, n))
			return text + n;
		text = strchr(text, '\n');
		if (text)
			text++;
	}
	return NULL;
}

bool peer_parse_cgroup(const char *text, char *buffer, size_t size) {
	const char *path = find_line(text, "0::");

	/* a host with the old hierarchies only */
	if (!path) {
		path = strstr(text, ":name=systemd:");
		if (path)
			path += strlen(":name=systemd:");
	}
	if (!path || *path != '/')
		return false;
	copy_text(buffer, size, path, strcspn(path, "\n"));
	return true;
}

uint64_t peer_parse_start_time(const char *text) {
	/* the name before the last parenthesis may hold blanks and parentheses */
	const char *at = strrchr(text, ')');
	char *end;
	uint64_t value;

	if (!at)
		return 0;
	at++;
	for (int field = 3; field <= 22; ++field) {
		if (*at != ' ')
			return 0;
		at++;
		if (field < 22)
			at += strcspn(at, " ");
	}
	if (!isdigit((unsigned char)*at))
		return 0;
	errno = 0;
	value = strtoull(at, &end, 10);
	return errno || *end != ' ' ? 0 : value;
}

bool peer_parse_other_pidns(const char *text) {
	const char *at = find_line(text, "NSpid:");
	size_t n = 0;

	if (!at)
		return true;
	for (;;) {
		at += strspn(at, " \t");
		if (!isdigit((unsigned char)*at))
			break;
		at += strspn(at, "0123456789");
		n++;
	}
	return n != 1;
}

static bool is_container_id(const char *text, size_t n) {
	for (size_t i = 0; i < n; ++i)
		if (!isdigit((unsigned char)text[i]) && !(text[i] >= 'a' && text[i] <= 'f'))
			return false;
	return n == 64;
}

/* the uid of a pod in a component "kubepods-burstable-podUID.slice" or "podUID"; with '_' for '-' in the first */
static size_t find_pod(const char *component, size_t n, const char **ret) {
	const char *end = component + n, *at = NULL;
	size_t length;

	for (const char *p = component; p + 3 <= end; ++p)
		if (!strncmp(p, "pod", 3) && (p == component || p[-1] == '-'))
			at = p + 3;
	if (!at)
		return 0;
	length = (size_t)(end - at);
	if (length > 6 && !strncmp(end - 6, ".slice", 6))
		length -= 6;
	for (size_t i = 0; i < length; ++i)
		if (!isxdigit((unsigned char)at[i]) && at[i] != '-' && at[i] != '_')
			return 0;
	*ret = at;
	return length <= 36 ? length : 0;
}

static bool find_container(const char *component, size_t n, char *buffer, size_t size) {
	static const struct {
		const char *prefix;
		const char *kind;
	} scopes[] = {
		{ "docker-", "docker" },
		{ "cri-containerd-", "containerd" },
		{ "crio-", "cri-o" },
		{ "libpod-", "podman" },
	};

	for (size_t i = 0; i < sizeof(scopes) / sizeof(*scopes); ++i) {
		size_t skip = strlen(scopes[i].prefix), length = n;

		if (n <= skip || strncmp(component, scopes[i].prefix, skip))
			continue;
		length -= skip;
		if (length > 6 && !strncmp(component + n - 6, ".scope", 6))
			length -= 6;
		if (!is_container_id(component + skip, length))
			continue;
		(void)snprintf(buffer, size, "%s:%.12s", scopes[i].kind, component + skip);
		return true;
	}
	return false;
}

void peer_parse_container(const char *cgroup, char *buffer, size_t size) {
	const char *parent = "";
	size_t parent_n = 0;
	bool pods = false;

	buffer[0] = 0;
	for (const char *at = cgroup; *at;) {
		size_t n = strcspn(at, "/");
		const char *pod;
		size_t pod_n;

		if (n >= 8 && !strncmp(at, "kubepods", 8))
			pods = true;
		pod_n = pods ? find_pod(at, n, &pod) : 0;
		if (pod_n) {
			(void)snprintf(buffer, size, "pod:%.*s", (int)pod_n, pod);
			for (char *p = buffer; *p; ++p)
				*p = *p == '_' ? '-' : *p;
			return;
		}
		if (find_container(at, n, buffer, size))
			return;
		/* Docker without systemd: /docker/ID */
		if (is_container_id(at, n) && parent_n == 6 && !strncmp(parent, "docker", 6)) {
			(void)snprintf(buffer, size, "docker:%.12s", at);
			return;
		}
		parent = at;
		parent_n = n;
		at += n;
		at += *at == '/';
	}
}

/* ---- at accept ---- */

bool peer_is_overflow_uid(uint32_t uid) {
	static uint32_t overflow_uid;
	char text[32];

	if (!overflow_uid)
		overflow_uid = read_text("/proc/sys/kernel/overflowuid", text, sizeof(text))
				       ? (uint32_t)strtoul(text, NULL, 10)
				       : OVERFLOW_UID;
	return uid == overflow_uid;
}

static int read_groups(int fd, Peer *peer) {
	socklen_t size = 64 * sizeof(gid_t);

	for (;;) {
		_cleanup_(freep) uint32_t *groups = malloc(size ?: sizeof(gid_t));
		socklen_t room = size;

		if (!groups)
			return -ENOMEM;
		if (!getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups, &size)) {
			peer->n_groups = size / sizeof(gid_t);
			peer->groups = steal_ptr(groups);
			return 0;
		}
		/* on ERANGE the kernel says how much it needs */
		if (errno != ERANGE || size <= room || size > GROUPS_MAX * sizeof(gid_t))
			return 0;
	}
}

static void read_pidfd(int fd, Peer *peer) {
	int pidfd;
	socklen_t size = sizeof(pidfd);

	if (!getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size)) {
		peer->pidfd = pidfd;
		return;
	}
	/* A kernel that knows the option says ESRCH, at first EINVAL, when the process has been reaped: its pid may be another's. */
	if (errno == ESRCH || errno == EINVAL) {
		peer->exited = true;
		return;
	}
	if (peer->pid <= 0)
		return;
	pidfd = (int)syscall(SYS_pidfd_open, peer->pid, 0);
	if (pidfd >= 0) {
		peer->pidfd = pidfd;
		peer->pidfd_by_pid = true;
	} else if (errno == ESRCH) {
		peer->exited = true;
	}
}

static bool has_exited(const Peer *peer) {
	struct pollfd poll_fd = { .fd = peer->pidfd, .events = POLLIN };

	return peer->pidfd >= 0 && poll(&poll_fd, 1, 0) > 0 && poll_fd.revents & POLLIN;
}

static int read_attribution(Peer *peer) {
	_cleanup_(freep) char *text = malloc(PROC_FILE_MAX);
	_cleanup_(freep) char *cgroup = malloc(PROC_FILE_MAX);
	char comm[PEER_COMM_SIZE] = "";
	uint64_t start_time = 0;
	bool has_cgroup = false, other_pidns = true;

	if (!text || !cgroup)
		return -ENOMEM;
	/* a name may hold newlines itself; only the last one is not its own */
	if (read_proc(peer->pid, "comm", text, PROC_FILE_MAX))
		copy_text(comm, sizeof(comm), text, strlen(text) - 1);
	if (read_proc(peer->pid, "stat", text, PROC_FILE_MAX))
		start_time = peer_parse_start_time(text);
	if (read_proc(peer->pid, "status", text, PROC_FILE_MAX))
		other_pidns = peer_parse_other_pidns(text);
	if (read_proc(peer->pid, "cgroup", text, PROC_FILE_MAX))
		has_cgroup = peer_parse_cgroup(text, cgroup, PROC_FILE_MAX);

	if (has_exited(peer)) {
		peer->exited = true;
		return 0;
	}
	memcpy(peer->comm, comm, sizeof(comm));
	peer->start_time = start_time;
	peer->other_pidns = other_pidns;
	if (has_cgroup) {
		peer_parse_container(cgroup, peer->container, sizeof(peer->container));
		peer->cgroup = strdup(cgroup);
		if (!peer->cgroup)
			return -ENOMEM;
	}
	return 0;
}

int peer_read(int fd, Peer *ret) {
	_cleanup_(peer_deinit) Peer peer = { .pidfd = -EBADF, .other_pidns = true };
	struct ucred credentials;
	socklen_t size = sizeof(credentials);
	int r;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size))
		return -errno;
	/* an unconnected socket has credentials of nobody */
	if (credentials.uid == (uid_t)-1)
		return -ENOTCONN;
	peer.pid = credentials.pid;
	peer.uid = credentials.uid;
	peer.gid = credentials.gid;
	peer.overflow_uid = peer_is_overflow_uid(peer.uid);
	r = read_groups(fd, &peer);
	if (r)
		return r;
	read_pidfd(fd, &peer);
	if (peer.pid > 0 && !peer.exited) {
		r = read_attribution(&peer);
		if (r)
			return r;
	}
	*ret = peer;
	peer = (Peer){ .pidfd = -EBADF };
	return 0;
}

int peer_open(pid_t pid, uint64_t start_time) {
	_cleanup_(freep) char *text = malloc(PROC_FILE_MAX);
	_cleanup_(closep) int fd = -EBADF;

	if (!text)
		return -ENOMEM;
	if (pid <= 0 || !start_time)
		return -EBADF;
	fd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (fd < 0)
		return -errno;
	/* the number may be another process's by now */
	if (!read_proc(pid, "stat", text, PROC_FILE_MAX) || peer_parse_start_time(text) != start_time)
		return -ESRCH;
	return steal_fd(&fd);
}

void peer_deinit(Peer *peer) {
	peer->pidfd = close_fd(peer->pidfd);
	free(peer->groups);
	free(peer->cgroup);
	peer->groups = NULL;
	peer->n_groups = 0;
	peer->cgroup = NULL;
}
