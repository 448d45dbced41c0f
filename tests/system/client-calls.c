/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A client of the library that does what it is told: client-calls SOCKET. Each line of its input is a call with its
 * arguments, and is answered by a line: the call's result, and what else there is to say. It ends with its input.
 *
 *	timeout MS				of a call, resume MS that of one that meets no broker
 *	ping | fds | process | create NAME | lookup NAME | map NAME | unmap | list
 *	adopt NAME PRINCIPAL FLAGS [KEY]	8 KiB of new memory; flags SHMB_REGION_OPT_*
 *	key NAME				what the status of the region has as its key
 *	unregister PRINCIPAL MODE NAME...	the result of the call, and one for each name
 *	pings N					from as many threads at once: the result of each
 */

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shmbroker.h"

#define SIZE 8192
#define WORDS_MAX 80
#define THREADS_MAX 64

static struct shmb_client *client;
static struct shmb_lease mapped;

static unsigned count_fds(void) {
	DIR *directory = opendir("/proc/self/fd");
	unsigned n = 0;

	while (directory && readdir(directory))
		n++;
	closedir(directory);
	/* ".", ".." and the directory itself */
	return n - 3;
}

static int adopt(char **words, int n) {
	struct shmb_region_options options = {
		.struct_size = sizeof(options),
		.principal = (uint32_t)strtoul(words[2], NULL, 10),
		.flags = (uint32_t)strtoul(words[3], NULL, 10),
		.key = n > 4 ? words[4] : NULL,
	};
	int fd = memfd_create("memory", MFD_CLOEXEC | MFD_ALLOW_SEALING), r;
	struct shmb_region *region;

	if (fd < 0 || ftruncate(fd, SIZE) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL))
		return -1;
	r = shmb_region_adopt(client, words[1], fd, 0, SIZE, &options, &region);
	close(fd);
	return r;
}

static int create(const char *name) {
	struct shmb_region *region;

	return shmb_region_create(client, name, SIZE, NULL, &region);
}

static int lookup(const char *name) {
	struct shmb_lookup_spec spec = {
		.struct_size = sizeof(spec),
		.name = name,
		.size = SHMB_REST,
		.access = SHMB_READ,
	};
	struct shmb_message_lease lease;
	int result = 0, r;

	r = shmb_client_lookup(client, &spec, 1, &lease, &result);
	return r ? r : result;
}

static int key_of(const char *name, char *ret) {
	struct shmb_status_filter filter = { .struct_size = sizeof(filter), .name = name };
	struct shmb_status_iter *iter;
	const struct shmb_status *status = NULL;
	int r;

	r = shmb_status_iter_new(client, &filter, &iter);
	if (r)
		return r;
	r = shmb_status_iter_next(iter, &status);
	if (!r)
		snprintf(ret, SHMB_NAME_MAX + 1, "%s", status ? status->key : "(no region)");
	shmb_status_iter_free(iter);
	return r;
}

static int list(void) {
	struct shmb_status_iter *iter;
	const struct shmb_status *status;
	int r;

	r = shmb_status_iter_new(client, NULL, &iter);
	if (r)
		return r;
	do
		r = shmb_status_iter_next(iter, &status);
	while (!r && status);
	shmb_status_iter_free(iter);
	return r;
}

static int unregister(char **words, int n, char *ret) {
	int results[WORDS_MAX], r;

	r = shmb_client_unregister_as(client, (uint32_t)strtoul(words[1], NULL, 10), (const char *const *)&words[3],
				      (uint32_t)n - 3, (uint32_t)strtoul(words[2], NULL, 10), 0, results);
	for (int i = 0; !r && i < n - 3; ++i)
		ret += sprintf(ret, i ? " %d" : "%d", results[i]);
	return r;
}

static void *ping(void *ret) {
	*(int *)ret = shmb_client_ping(client, NULL);
	return NULL;
}

static int ping_many(unsigned n, char *ret) {
	pthread_t threads[THREADS_MAX];
	int results[THREADS_MAX];

	for (unsigned i = 0; i < n; ++i)
		if (pthread_create(&threads[i], NULL, ping, &results[i]))
			return -1;
	for (unsigned i = 0; i < n; ++i) {
		pthread_join(threads[i], NULL);
		ret += sprintf(ret, i ? " %d" : "%d", results[i]);
	}
	return 0;
}

static int run(char **words, int n, char *more) {
	const char *verb = words[0];

	if (!strcmp(verb, "ping"))
		return shmb_client_ping(client, NULL);
	if (!strcmp(verb, "fds"))
		return (int)count_fds();
	if (!strcmp(verb, "process"))
		return shmb_client_process(client);
	if (!strcmp(verb, "list"))
		return list();
	if (!strcmp(verb, "unmap"))
		return shmb_lease_release(&mapped);
	if (n > 1 && !strcmp(verb, "timeout"))
		return shmb_client_set_call_timeout(client, atoi(words[1]));
	if (n > 1 && !strcmp(verb, "resume"))
		return shmb_client_set_resume_timeout(client, atoi(words[1]));
	if (n > 1 && !strcmp(verb, "map"))
		return shmb_client_get_memory_info(client, words[1], 0, SHMB_REST, SHMB_READ, &mapped);
	if (n > 1 && !strcmp(verb, "create"))
		return create(words[1]);
	if (n > 1 && !strcmp(verb, "lookup"))
		return lookup(words[1]);
	if (n > 1 && !strcmp(verb, "key"))
		return key_of(words[1], more);
	if (n > 1 && !strcmp(verb, "pings"))
		return ping_many((unsigned)atoi(words[1]), more);
	if (n > 3 && !strcmp(verb, "adopt"))
		return adopt(words, n);
	if (n > 3 && !strcmp(verb, "unregister"))
		return unregister(words, n, more);
	exit(2);
}

int main(int argc, char **argv) {
	char *line = NULL, *words[WORDS_MAX], more[1024];
	size_t size = 0;
	int n, r;

	if (argc != 2)
		return 2;
	r = shmb_client_new(&client, argv[1], 0, SHMB_ACCEPT_UNSEALED);
	printf("%d\n", r);
	fflush(stdout);
	while (!r && getline(&line, &size, stdin) > 0) {
		n = 0;
		for (char *at = strtok(line, " \n"); at && n < WORDS_MAX; at = strtok(NULL, " \n"))
			words[n++] = at;
		more[0] = 0;
		if (n)
			printf("%d", run(words, n, more));
		printf(more[0] ? " %s\n" : "%s\n", more);
		fflush(stdout);
	}
	free(line);
	shmb_client_free(client);
	return 0;
}
