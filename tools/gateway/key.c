/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "key.h"
#include "log.h"

#define KEY_DIRECTORY "/dev/shm"
#define KEY_NAME_MAX 255
#define KEY_OWNERS_MAX 64
#define KEY_CHILD_SECONDS 2

struct KeyOpener {
	const char *prefix;
	bool any_owner;
	size_t n_owners;
	uint32_t owners[KEY_OWNERS_MAX];
	pid_t child;	  /* 0: this process opens by itself */
	int channel;	  /* to the child; below 0: it has ended */
	uint32_t n_asked; /* the number of the last request */
};

/* Only what is safe to open and belongs to whom it should: 0, or a negative errno. */
static int check_file(const KeyOpener *opener, int fd, const char *key, uint32_t *ret_uid) {
	struct statfs fs;
	struct stat st;
	bool allowed;

	if (fstat(fd, &st) || fstatfs(fd, &fs))
		return -errno;
	if (!S_ISREG(st.st_mode) || fs.f_type != TMPFS_MAGIC) {
		log_write("key %s: refused, this is no regular file of a tmpfs", key);
		return -EINVAL;
	}
	allowed = st.st_uid == geteuid() || opener->any_owner;
	for (size_t i = 0; i < opener->n_owners; i++)
		allowed |= opener->owners[i] == st.st_uid;
	if (!allowed) {
		log_write("key %s: refused, it belongs to uid %u, this is uid %u: see --key-owners", key, st.st_uid,
			  geteuid());
		return -EACCES;
	}
	*ret_uid = st.st_uid;
	return 0;
}

/* looks before it opens, for opening a device or a FIFO has effects of its own */
static int open_file(const KeyOpener *opener, const char *key, uint32_t *ret_uid) {
	int directory, fd, r;

	directory = open(KEY_DIRECTORY, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (directory < 0)
		return -errno;
	fd = openat(directory, key, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	r = fd < 0 ? -errno : check_file(opener, fd, key, ret_uid);
	if (fd >= 0)
		(void)close(fd);
	if (!r) {
		fd = openat(directory, key, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
		r = fd < 0 ? -errno : check_file(opener, fd, key, ret_uid);
		if (r && fd >= 0)
			(void)close(fd);
	}
	(void)close(directory);
	return r ? r : fd;
}

/* ---- the child ---- */

typedef struct Request {
	uint32_t number;
	char key[KEY_NAME_MAX]; /* as long as the message reaches */
} Request;

typedef struct Reply {
	uint32_t number; /* of the request */
	int32_t result;	 /* 0, and an fd comes with it, or a negative errno */
	uint32_t uid;
} Reply;

static int send_reply(int channel, const Reply *reply, int fd) {
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = {};
	struct iovec part = { (void *)reply, sizeof(*reply) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

	if (fd >= 0) {
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		control.header = (struct cmsghdr){ CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	}
	return sendmsg(channel, &message, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static int set_capabilities(uint32_t which) {
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2] = { { .effective = which, .permitted = which } };

	(void)prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_capset, &header, data))
		return -errno;
	return 0;
}

static void child_run(const KeyOpener *opener, int channel) {
	Request request;
	ssize_t size;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	(void)prctl(PR_SET_NAME, "shmbroker-key");
	/* SIGINT of a terminal is for the gateway, which ends this one */
	(void)signal(SIGINT, SIG_IGN);
	if (set_capabilities(1U << CAP_DAC_OVERRIDE))
		_exit(EXIT_FAILURE);
	while ((size = recv(channel, &request, sizeof(request), 0)) > (ssize_t)offsetof(Request, key)) {
		Reply reply = { .number = request.number };
		char key[KEY_NAME_MAX + 1] = {};
		int fd;

		memcpy(key, request.key, (size_t)size - offsetof(Request, key));
		fd = open_file(opener, key, &reply.uid);
		reply.result = fd < 0 ? fd : 0;
		if (send_reply(channel, &reply, fd))
			break;
		if (fd >= 0)
			(void)close(fd);
	}
	_exit(EXIT_SUCCESS);
}

/* One reply, whichever request it is to. Sets @ret_fd to an fd of the caller's, or below 0. 0, or a negative errno. */
static int receive_reply(int channel, Reply *ret, int *ret_fd) {
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = {};
	struct iovec part = { ret, sizeof(*ret) };
	struct msghdr message = {
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	ssize_t size = recvmsg(channel, &message, MSG_CMSG_CLOEXEC);

	if (size < 0)
		return -errno;
	if (size != sizeof(*ret))
		return -EPIPE;
	*ret_fd = -EBADF;
	if (message.msg_controllen && control.header.cmsg_type == SCM_RIGHTS)
		memcpy(ret_fd, CMSG_DATA(&control.header), sizeof(*ret_fd));
	return 0;
}

static int ask_child(KeyOpener *opener, const char *key, uint32_t *ret_uid) {
	Request request = { .number = ++opener->n_asked };
	Reply reply;
	int fd = -EBADF, r = 0;

	if (opener->channel < 0)
		return -EPIPE;
	memcpy(request.key, key, strlen(key));
	if (send(opener->channel, &request, offsetof(Request, key) + strlen(key), MSG_NOSIGNAL) < 0)
		r = -errno;
	while (!r) {
		r = receive_reply(opener->channel, &reply, &fd);
		if (!r && reply.number == request.number) {
			*ret_uid = reply.uid;
			return reply.result ? reply.result : fd;
		}
		/* to a request that was given up: it is about another key */
		if (!r && fd >= 0)
			(void)close(fd);
	}
	if (r == -EPIPE || r == -ECONNRESET) {
		log_write(
			"the process that opens keys has ended: no key is opened before this gateway is started anew");
		(void)close(opener->channel);
		opener->channel = -EPIPE;
	}
	return r;
}

static int child_start(KeyOpener *opener) {
	const struct timeval timeout = { .tv_sec = KEY_CHILD_SECONDS };
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];
	int pair[2], r;

	if (syscall(SYS_capget, &header, data))
		return -errno;
	if (!(data[0].permitted & (1U << CAP_DAC_OVERRIDE))) {
		log_write("--key-owners needs CAP_DAC_OVERRIDE, which this process does not have");
		return -EPERM;
	}
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
		return -errno;
	(void)setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	(void)setsockopt(pair[0], SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
	opener->child = fork();
	if (opener->child < 0) {
		r = -errno;
		opener->child = 0;
		(void)close(pair[0]);
		(void)close(pair[1]);
		return r;
	}
	if (!opener->child) {
		(void)close(pair[0]);
		child_run(opener, pair[1]);
	}
	(void)close(pair[1]);
	opener->channel = pair[0];
	return set_capabilities(0);
}

/* ---- the gateway ---- */

static int parse_owners(KeyOpener *opener, const char *text) {
	if (strcmp(text, "any") == 0) {
		opener->any_owner = true;
		return 0;
	}
	while (*text) {
		unsigned long uid;
		char *end;

		errno = 0;
		uid = strtoul(text, &end, 10);
		if (errno || *text < '0' || *text > '9' || uid >= UINT32_MAX || (*end && *end != ',') ||
		    opener->n_owners == KEY_OWNERS_MAX) {
			log_write("--key-owners is a list of at most %d uids, or any", KEY_OWNERS_MAX);
			return -EINVAL;
		}
		opener->owners[opener->n_owners++] = (uint32_t)uid;
		text = end + (*end == ',');
	}
	return 0;
}

int key_opener_new(KeyOpener **ret, const char *owners, const char *prefix) {
	KeyOpener *opener;
	int r = 0;

	opener = calloc(1, sizeof(*opener));
	if (!opener)
		return -ENOMEM;
	opener->prefix = prefix;
	opener->channel = -EBADF;
	if (owners[0]) {
		r = parse_owners(opener, owners);
		if (!r)
			r = child_start(opener);
	}
	if (r) {
		key_opener_free(opener);
		return r;
	}
	*ret = opener;
	return 0;
}

KeyOpener *key_opener_free(KeyOpener *opener) {
	if (!opener)
		return NULL;
	if (opener->channel >= 0)
		(void)close(opener->channel);
	if (opener->child > 0) {
		(void)kill(opener->child, SIGTERM);
		while (waitpid(opener->child, NULL, 0) < 0 && errno == EINTR)
			;
	}
	free(opener);
	return NULL;
}

bool key_opener_works(const KeyOpener *opener) {
	return !opener->child || opener->channel >= 0;
}

int key_open(KeyOpener *opener, const Caller *caller, const char *key, int *ret_fd) {
	uint32_t uid = 0;
	int fd;

	if (!key[0] || strlen(key) > KEY_NAME_MAX || strchr(key, '/') || strcmp(key, ".") == 0 ||
	    strcmp(key, "..") == 0 || strncmp(key, opener->prefix, strlen(opener->prefix)) != 0) {
		log_write("key %s: refused, the name is not within the policy", key);
		return -EINVAL;
	}
	fd = opener->child ? ask_child(opener, key, &uid) : open_file(opener, key, &uid);
	if (fd < 0)
		return fd;
	/* who has an identity names memory of its own only */
	if (caller->is_unix && !caller->admin && caller->uid != uid) {
		log_write("key %s: refused, it belongs to uid %u, the caller is uid %u", key, uid, caller->uid);
		(void)close(fd);
		return -EACCES;
	}
	*ret_fd = fd;
	return 0;
}
