/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Peer: who is at the other end of a connection, as the kernel says it at accept.
 *
 * Rights follow from uid, gid and groups only. The rest is attribution: it is read from /proc, may be missing, and
 * texts are made harmless (no control characters), since the peer chooses them. What /proc said is kept only if the
 * process still lived afterwards, so that it is never another process's that got the same pid.
 * The object is plain data that may be moved; it owns the pidfd, the groups and the cgroup text.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct Peer Peer;

#define PEER_COMM_SIZE 17 /* TASK_COMM_LEN is 16, its NUL included */
#define PEER_CONTAINER_SIZE 64

struct Peer {
	pid_t pid; /* 0 when the process is in no pid namespace that we can see */
	uint32_t uid;
	uint32_t gid;
	uint32_t *groups; /* supplementary groups */
	size_t n_groups;
	int pidfd;	     /* -EBADF when there is none: then only hang-up tells that the peer is gone */
	bool pidfd_by_pid;   /* made by pidfd_open(), not by the kernel at connect (before Linux 6.5) */
	bool exited;	     /* the process is gone already, whoever else may hold its socket */
	bool overflow_uid;   /* a uid that this user namespace cannot express: many users may share it */
	bool other_pidns;    /* in another pid namespace than ours, or that cannot be told */
	uint64_t start_time; /* of the process, clock ticks since boot; 0 when not known */
	char comm[PEER_COMM_SIZE];
	char *cgroup;			     /* NULL when not known */
	char container[PEER_CONTAINER_SIZE]; /* see peer_parse_container(), "" for none */
};

/*
 * Reads the credentials of the process that connected @fd. Borrows @fd. Returns 0, or -errno when there are no
 * credentials (-ENOTCONN, -ENOPROTOOPT) or no memory; all else may be missing in @ret. (SO_PEERGROUPS Linux 4.13,
 * SO_PEERPIDFD 6.5, pidfd_open 5.3)
 */
int peer_read(int fd, Peer *ret);
/* Is this the uid that stands for all uids which this user namespace cannot express? */
bool peer_is_overflow_uid(uint32_t uid);
void peer_deinit(Peer *peer);
/*
 * A pidfd of the process @pid if it is the one that began at @start_time (clock ticks since boot). Returns it, -ESRCH
 * when that one is gone, -EBADF when the two do not say which one, or -errno. (pidfd_open Linux 5.3)
 */
int peer_open(pid_t pid, uint64_t start_time);

/*
 * Says in which container a cgroup path is: "docker:0123456789ab" (also containerd, cri-o, podman), "pod:UID" below
 * kubepods, "" for none. The outermost component counts: inside of it a container names cgroups as it likes.
 */
void peer_parse_container(const char *cgroup, char *buffer, size_t size);
/*
 * Parse the texts of /proc/PID/{cgroup,stat,status}. The cgroup's path is put into @buffer (NUL-terminated, cut) and
 * false is returned when there is none; the start time is 0 when it is not there; true means nested (or unreadable).
 */
bool peer_parse_cgroup(const char *text, char *buffer, size_t size);
uint64_t peer_parse_start_time(const char *text);
bool peer_parse_other_pidns(const char *text);
