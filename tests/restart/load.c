/* SPDX-License-Identifier: Apache-2.0 */

#include <dirent.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

void load_name(char ret[LOAD_NAME_SIZE], uint32_t name) {
	snprintf(ret, LOAD_NAME_SIZE, LOAD_PREFIX "%02u.%u", name / LOAD_NAMES, name % LOAD_NAMES);
}

Shared *load_map(int fd) {
	void *map = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	return map == MAP_FAILED ? NULL : map;
}

uint64_t load_now_ms(void) {
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void load_wrong(Shared *shared, const char *format, ...) {
	uint32_t i = atomic_fetch_add(&shared->n_reports, 1);
	va_list args;
	int n;

	if (i >= LOAD_REPORTS)
		return;
	n = snprintf(shared->reports[i], LOAD_TEXT, "kill %u: ", atomic_load(&shared->kills));
	va_start(args, format);
	vsnprintf(shared->reports[i] + n, LOAD_TEXT - (size_t)n, format, args);
	va_end(args);
}

struct shmb_client *load_connect(const Load *load, uint32_t roles, uint32_t flags) {
	const struct timespec pause = { .tv_nsec = 2000000 };
	uint64_t end = load_now_ms() + LOAD_STUCK_MS;
	struct shmb_client *client;
	int r;

	while ((r = shmb_client_new(&client, load->socket, roles, flags))) {
		atomic_fetch_add(&load->shared->processes[load->process].orphans, 1);
		if (load_now_ms() > end) {
			load_wrong(load->shared, "process %u cannot connect: %s", load->process, shmb_last_error());
			exit(1);
		}
		(void)nanosleep(&pause, NULL);
	}
	(void)shmb_client_set_resume_timeout(client, -1);
	return client;
}

int load_count_fds(void) {
	DIR *directory = opendir("/proc/self/fd");
	int n = 0;

	if (!directory)
		return -1;
	while (readdir(directory))
		n++;
	closedir(directory);
	return n;
}

void load_barrier(const Load *load, Seat *seat) {
	uint32_t barrier = atomic_load(&load->shared->barrier);

	if (!(barrier & 1))
		return;
	atomic_store(&seat->parked, barrier);
	while (atomic_load(&load->shared->barrier) == barrier)
		(void)syscall(SYS_futex, &load->shared->barrier, FUTEX_WAIT, barrier, NULL, NULL, 0);
	atomic_store(&seat->parked, 0);
}

bool load_is_forced(Shared *shared, uint64_t generation) {
	const Record *record = load_record(shared, generation);

	return atomic_load(&record->generation) == generation && atomic_load(&record->forced);
}

void name_begin(Name *name) {
	atomic_fetch_add(&name->version, 1);
}

void name_end(Name *name) {
	atomic_fetch_add(&name->version, 1);
}

bool name_view(Name *name, NameView *ret) {
	*ret = (NameView){
		.version = atomic_load(&name->version),
		.state = atomic_load(&name->state),
		.kept = atomic_load(&name->kept),
		.generation = atomic_load(&name->generation),
		.size = atomic_load(&name->size),
	};
	return !(ret->version & 1) && atomic_load(&name->version) == ret->version;
}

void name_set(Name *name, NameState state, bool kept, uint64_t generation, uint64_t size) {
	name_begin(name);
	atomic_store(&name->state, state);
	atomic_store(&name->kept, kept);
	atomic_store(&name->generation, generation);
	atomic_store(&name->size, size);
	name_end(name);
}
