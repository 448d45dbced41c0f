/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kill_point() of the broker that the systematic loop kills. The file whose path is in SHMBROKER_KILL_POINTS is mapped
 * by all brokers that follow each other and by the program that counts on them: what was counted goes on.
 */

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kill-point.h"
#include "kill-count.h"

static KillCount *count;

static __attribute__((constructor)) void open_count(void) {
	const char *path = getenv("SHMBROKER_KILL_POINTS");
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	void *map;

	if (fd < 0)
		return;
	map = mmap(NULL, sizeof(*count), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map != MAP_FAILED)
		count = map;
	(void)close(fd);
}

void kill_point(void) {
	uint64_t n;

	if (!count)
		return;
	n = atomic_fetch_add(&count->passed, 1) + 1;
	for (int i = 0; i < KILL_COUNT_MAX; ++i) {
		if (n != atomic_load(&count->kill_at[i]))
			continue;
		atomic_fetch_add(&count->kills, 1);
		(void)raise(SIGKILL);
	}
}
