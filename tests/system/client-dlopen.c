/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A program that loads the library while it runs, as Python does, for test_dlopen.py: client-dlopen SOCKET LIBRARY.
 * Its threads are older than the library, so what the library keeps for each thread must find room in them; they take
 * and release leases, and outlive it. Ends with 0 when all went as it must, else says what did not.
 */

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shmbroker.h"

#define THREADS 4
#define ROUNDS 20000
#define LOADS 3

#define check(is_true) check_that(is_true, #is_true, __LINE__)

/* what is used of the library */
typedef struct Library {
	void *loaded;
	__typeof__(&shmb_client_new) client_new;
	__typeof__(&shmb_client_free) client_free;
	__typeof__(&shmb_region_create) region_create;
	__typeof__(&shmb_region_get_data) region_get_data;
	__typeof__(&shmb_region_retire) region_retire;
	__typeof__(&shmb_region_free) region_free;
	__typeof__(&shmb_client_get_memory_info) get_by_name;
	__typeof__(&shmb_handle_open) handle_open;
	__typeof__(&shmb_handle_get_memory_info) get_by_handle;
	__typeof__(&shmb_lease_release) lease_release;
} Library;

static Library library;
static struct shmb_client *client;
static pthread_barrier_t step; /* threads and main() go on together */

static void check_that(int is_true, const char *what, int line) {
	if (is_true)
		return;
	printf("line %d: not %s\n", line, what);
	exit(1);
}

static void *find(const char *name) {
	void *found = dlsym(library.loaded, name);

	check_that(!!found, name, __LINE__);
	return found;
}

static void load(const char *path) {
	library.loaded = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library.loaded)
		check_that(0, dlerror(), __LINE__);
	library.client_new = find("shmb_client_new");
	library.client_free = find("shmb_client_free");
	library.region_create = find("shmb_region_create");
	library.region_get_data = find("shmb_region_get_data");
	library.region_retire = find("shmb_region_retire");
	library.region_free = find("shmb_region_free");
	library.get_by_name = find("shmb_client_get_memory_info");
	library.handle_open = find("shmb_handle_open");
	library.get_by_handle = find("shmb_handle_get_memory_info");
	library.lease_release = find("shmb_lease_release");
}

static void *use(void *data) {
	struct shmb_handle handle;
	struct shmb_lease lease;

	for (int i = 0; i < LOADS; ++i) {
		pthread_barrier_wait(&step);
		check(!library.handle_open(client, "r", &handle));
		for (int j = 0; j < ROUNDS; ++j) {
			if (j & 1)
				check(!library.get_by_handle(client, &handle, 0, SHMB_REST, SHMB_READ, &lease));
			else
				check(!library.get_by_name(client, "r", 0, SHMB_REST, SHMB_READ, &lease));
			check(!memcmp(lease.address, "content", 7));
			check(!library.lease_release(&lease));
		}
		pthread_barrier_wait(&step);
	}
	/* the library is closed */
	pthread_barrier_wait(&step);
	return data;
}

static void check_fork(void) {
	pid_t pid = fork();
	int status;

	if (!pid)
		_exit(0);
	check(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
}

int main(int argc, char **argv) {
	pthread_t threads[THREADS];
	struct shmb_region *region;

	if (argc != 3)
		return 2;
	check(!pthread_barrier_init(&step, NULL, THREADS + 1));
	for (int i = 0; i < THREADS; ++i)
		check(!pthread_create(&threads[i], NULL, use, NULL));
	for (int i = 0; i < LOADS; ++i) {
		load(argv[2]);
		check(!library.client_new(&client, argv[1], SHMB_ROLE_OWNER | SHMB_ROLE_CONSUMER, 0));
		check(!library.region_create(client, "r", 4096, NULL, &region));
		memcpy(library.region_get_data(region), "content", 7);
		pthread_barrier_wait(&step);
		pthread_barrier_wait(&step);
		/* every lease was counted, or it would wait */
		check(!library.region_retire(region, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, 60000));
		library.region_free(region);
		library.client_free(client);
		check(!dlclose(library.loaded));
		check_fork();
	}
	/* threads that have used it end after it */
	pthread_barrier_wait(&step);
	for (int i = 0; i < THREADS; ++i)
		check(!pthread_join(threads[i], NULL));
	return 0;
}
