/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fdstore.h"
#include "wire/fd.h"

#define VARIABLE "SHMBROKER_SUPERVISOR_STORE"
/* the first line of the file; then "FD NAME" for each entry */
#define HEADER "shmbroker fds of process %d\n"

void fdstore_deinit(FdStore *store) {
	notify_fds_deinit(&store->fds);
}

int fdstore_add(FdStore *store, const char *name, int fd) {
	if (store->fds.n >= FDSTORE_MAX) {
		(void)close_fd(fd);
		return -ENOSPC;
	}
	return notify_fds_add(&store->fds, fd, name, strlen(name));
}

void fdstore_remove(FdStore *store, const char *name) {
	size_t n = store->fds.n, kept = 0;
	NotifyFd *items = store->fds.items;

	for (size_t i = 0; i < n; ++i) {
		if (strcmp(items[i].name, name))
			items[kept++] = items[i];
		else
			(void)close_fd(items[i].fd);
	}
	if (kept < n)
		store->full = false;
	store->fds.n = kept;
}

static int set_close_on_exec(const FdStore *store, bool close_on_exec) {
	for (size_t i = 0; i < store->fds.n; ++i)
		if (fcntl(store->fds.items[i].fd, F_SETFD, close_on_exec ? FD_CLOEXEC : 0))
			return -errno;
	return 0;
}

int fdstore_save(const FdStore *store) {
	_cleanup_(closep) int fd = memfd_create("shmbroker-supervisor", 0);
	char text[16];
	int r;

	if (fd < 0 || dprintf(fd, HEADER, (int)getpid()) < 0)
		return -errno;
	for (size_t i = 0; i < store->fds.n; ++i)
		if (dprintf(fd, "%d %s\n", store->fds.items[i].fd, store->fds.items[i].name) < 0)
			return -errno;
	r = set_close_on_exec(store, false);
	(void)snprintf(text, sizeof(text), "%d", fd);
	if (!r && setenv(VARIABLE, text, 1))
		r = -errno;
	if (r) {
		(void)set_close_on_exec(store, true);
		return r;
	}
	return steal_fd(&fd);
}

void fdstore_unsave(const FdStore *store, int fd) {
	(void)unsetenv(VARIABLE);
	(void)set_close_on_exec(store, true);
	(void)close_fd(fd);
}

static int load_line(FdStore *store, char *line) {
	char *name;
	int fd = (int)strtol(line, &name, 10);

	if (*name != ' ' || fcntl(fd, F_SETFD, FD_CLOEXEC))
		return -EBADF;
	name++;
	name[strcspn(name, "\n")] = 0;
	return fdstore_add(store, name, fd);
}

int fdstore_load(FdStore *store) {
	const char *text = getenv(VARIABLE);
	char expected[sizeof(HEADER) + 16], *line = NULL;
	size_t size = 0;
	FILE *file;
	int r = 0;

	if (!text)
		return 0;
	file = fdopen(atoi(text), "re");
	(void)unsetenv(VARIABLE);
	if (!file || fseek(file, 0, SEEK_SET) || getline(&line, &size, file) < 0) {
		r = -EBADF;
	} else {
		/* a child of the one that saved has other fds under these numbers */
		(void)snprintf(expected, sizeof(expected), HEADER, (int)getpid());
		r = strcmp(line, expected) ? -ESRCH : 0;
	}
	while (!r && getline(&line, &size, file) > 0)
		r = load_line(store, line);
	free(line);
	if (file)
		(void)fclose(file);
	return r ?: 1;
}
