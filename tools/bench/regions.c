/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "raw.h"
#include "regions.h"

typedef struct WantedStat {
	const char *name;
	uint64_t value;
	bool found;
} WantedStat;

void check(int r, const char *what) {
	const char *text = shmb_last_error();

	if (r)
		bench_die("%s: %s%s%s", what, shmb_error_text(r), *text ? ": " : "", text);
}

struct shmb_client *client_new(const Broker *broker, uint32_t roles, uint32_t flags) {
	struct shmb_client *client;

	check(shmb_client_new(&client, broker->socket, roles, flags), "connecting");
	return client;
}

static int take_stat(void *userdata, const struct shmb_stat *stat) {
	WantedStat *wanted = userdata;

	if (stat->uid == SHMB_ANY_UID && !strcmp(stat->name, wanted->name)) {
		wanted->value = stat->value;
		wanted->found = true;
	}
	return 0;
}

uint64_t client_stat(struct shmb_client *client, const char *name) {
	WantedStat wanted = { .name = name };

	check(shmb_client_each_stat(client, 0, take_stat, &wanted), "reading the broker's numbers");
	if (!wanted.found)
		bench_die("the broker has no number %s", name);
	return wanted.value;
}

void region_name(uint32_t number, char ret[REGION_NAME_SIZE]) {
	(void)snprintf(ret, REGION_NAME_SIZE, "bench.region-%07u", number);
}

void regions_init(Regions *ret, struct shmb_client *owner, uint64_t size, uint64_t stride) {
	*ret = (Regions){ .owner = owner, .size = size, .stride = stride };
}

static void regions_reserve(Regions *regions, uint32_t n) {
	uint32_t capacity = regions->capacity ?: REGIONS_AT_ONCE;

	while (capacity < regions->n + n)
		capacity *= 2;
	if (capacity == regions->capacity)
		return;
	regions->regions = realloc(regions->regions, capacity * sizeof(*regions->regions));
	if (!regions->regions)
		bench_die("out of memory");
	regions->capacity = capacity;
}

uint64_t regions_add(Regions *regions, uint32_t n) {
	uint64_t size = (n - 1) * regions->stride + regions->size, begin, ns;
	char names[REGIONS_AT_ONCE][REGION_NAME_SIZE];
	struct shmb_region_spec specs[REGIONS_AT_ONCE];
	int results[REGIONS_AT_ONCE], fd = raw_memory(size);

	/* memory without pages is looked at again by every STATUS */
	if (fallocate(fd, 0, 0, (off_t)size) < 0)
		bench_die("%llu bytes of memory: %s", (unsigned long long)size, strerror(errno));
	for (uint32_t i = 0; i < n; ++i) {
		region_name(regions->n + i, names[i]);
		specs[i] = (struct shmb_region_spec){
			.struct_size = sizeof(specs[i]),
			.name = names[i],
			.fd = fd,
			.offset = i * regions->stride,
			.size = regions->size,
		};
	}
	begin = bench_now_ns();
	check(shmb_region_adopt_many(regions->owner, specs, n, results), "registering");
	ns = bench_now_ns() - begin;
	(void)close(fd);
	regions_reserve(regions, n);
	for (uint32_t i = 0; i < n; ++i) {
		check(results[i], names[i]);
		regions->regions[regions->n++] = specs[i].region;
	}
	return ns;
}

void regions_deinit(Regions *regions) {
	for (uint32_t i = 0; i < regions->n; ++i)
		shmb_region_free(regions->regions[i]);
	free(regions->regions);
	*regions = (Regions){};
}

void region_acquire(struct shmb_client *client, const char *name) {
	struct shmb_lease lease;

	check(shmb_client_get_memory_info(client, name, 0, SHMB_REST, SHMB_READ, &lease), name);
	check(shmb_lease_release(&lease), name);
}
