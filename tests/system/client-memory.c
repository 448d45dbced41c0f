/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An owner and a consumer in C for test_memory.py: client-memory SOCKET CASE. It makes memory in the way that its case
 * says, and looks at it as a consumer would. It ends with 0 when all came true, else it says what did not.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shmbroker.h"

#define HUGE (UINT64_C(2) << 20)
#define SIZE UINT64_C(100000)

#define check(is_true) check_that(is_true, #is_true, __LINE__)
#define check_result(call, expected) check_code(call, expected, #call, __LINE__)

static struct shmb_client *owner, *consumer;

static void check_that(int is_true, const char *what, int line) {
	if (is_true)
		return;
	printf("line %d: not %s: %s\n", line, what, shmb_last_error());
	exit(1);
}

static void check_code(int result, int expected, const char *what, int line) {
	if (result == expected)
		return;
	printf("line %d: %s is %d (%s), not %d\n", line, what, result, result ? shmb_last_error() : "", expected);
	exit(1);
}

static void make(const char *name, uint64_t size, struct shmb_region_options options, struct shmb_region **ret) {
	options.struct_size = sizeof(options);
	check_result(shmb_region_create(owner, name, size, &options, ret), 0);
	check((uintptr_t)shmb_region_get_data(*ret) % 64 == 0);
	check(shmb_region_get_size(*ret) == size);
	memcpy(shmb_region_get_data(*ret), name, strlen(name) + 1);
}

/* a consumer sees what the owner wrote */
static void see(const char *name, uint32_t access, struct shmb_lease *ret) {
	check_result(shmb_client_get_memory_info(consumer, name, 0, SHMB_REST, access, ret), 0);
	check(!strcmp(ret->address, name));
}

static void default_memory_is_sealed_and_shared(void) {
	struct shmb_region *region;
	struct shmb_lease lease;
	char copy[16];

	make("plain", SIZE, (struct shmb_region_options){}, &region);
	check(shmb_region_get_flags(region) == SHMB_REGION_SPARSE);
	check(ftruncate(shmb_region_get_fd(region), 0) < 0 && errno == EPERM);
	see("plain", SHMB_READ | SHMB_WRITE, &lease);
	check_result(shmb_lease_copy_in(&lease, 8, "written", 8), 0);
	check(!strcmp((char *)shmb_region_get_data(region) + 8, "written"));
	check_result(shmb_lease_copy_out(&lease, 8, copy, 8), 0);
	check(!strcmp(copy, "written"));
	check_result(shmb_lease_copy_in(&lease, SIZE - 4, copy, 8), SHMB_E_OUT_OF_BOUNDS);
	check_result(shmb_lease_release(&lease), 0);
	shmb_region_free(region);
}

static void read_only_memory_cannot_be_written(void) {
	struct shmb_region *region;
	struct shmb_lease lease;
	int fd;
	char path[64];

	make("readable", SIZE, (struct shmb_region_options){ .flags = SHMB_REGION_OPT_READ_ONLY }, &region);
	check(!(shmb_region_get_flags(region) & SHMB_REGION_READ_ONLY_ADVISORY));
	check_result(shmb_client_get_memory_info(consumer, "readable", 0, 8, SHMB_READ | SHMB_WRITE, &lease),
		     SHMB_E_ACCESS);
	see("readable", SHMB_READ, &lease);
	/* what the kernel says to whoever tries all the same */
	check(mprotect(lease.address, 4096, PROT_READ | PROT_WRITE) < 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", shmb_region_get_fd(region));
	fd = open(path, O_RDWR);
	check(fd < 0 || mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
	strcpy((char *)shmb_region_get_data(region) + 64, "the owner still writes");
	check(!strcmp((char *)lease.address + 64, "the owner still writes"));
	check_result(shmb_lease_release(&lease), 0);
	shmb_region_free(region);
}

static void populated_memory_is_allocated(void) {
	struct shmb_region *region;
	struct stat st;

	make("populated", SIZE, (struct shmb_region_options){ .flags = SHMB_REGION_OPT_POPULATE }, &region);
	check(!fstat(shmb_region_get_fd(region), &st) && (uint64_t)st.st_blocks * 512 >= SIZE);
	check(!(shmb_region_get_flags(region) & SHMB_REGION_SPARSE));
	shmb_region_free(region);
}

static void more_memory_than_there_is_is_an_error_at_creation(void) {
	struct shmb_region_options options = { .struct_size = sizeof(options), .flags = SHMB_REGION_OPT_POPULATE };
	struct shmb_region *region;
	FILE *file = fopen("/proc/self/oom_score_adj", "w");

	/* should the library fail in this, nobody else pays for it */
	check(file && fputs("1000", file) >= 0 && !fclose(file));
	check_result(shmb_region_create(owner, "too big", UINT64_C(16) << 40, &options, &region), -ENOMEM);
}

static void only_owners_register(void) {
	struct shmb_region *region;

	check_result(shmb_region_create(consumer, "not mine to make", 1, NULL, &region), SHMB_E_PERMISSION);
}

static void memory_is_bound_to_a_node(void) {
	struct shmb_region_options options = { .struct_size = sizeof(options),
					       .numa_node = 1,
					       .flags = SHMB_REGION_OPT_POPULATE };
	struct shmb_region *region;

	make("node 0", SIZE, options, &region);
	shmb_region_free(region);
	options.numa_node = 1000;
	check(shmb_region_create(owner, "no such node", SIZE, &options, &region) < 0);
	options.numa_node = -1;
	check_result(shmb_region_create(owner, "no node at all", SIZE, &options, &region), SHMB_E_INVALID);
}

static void huge_pages_are_shared(void) {
	struct shmb_region *region;
	struct shmb_lease lease;

	make("huge", HUGE + 1, (struct shmb_region_options){ .huge_pages = SHMB_HUGE_2M }, &region);
	check(shmb_region_get_flags(region) & SHMB_REGION_HUGETLB);
	check(!(shmb_region_get_flags(region) & SHMB_REGION_UNSEALED));
	see("huge", SHMB_READ, &lease);
	check(lease.size == HUGE + 1);
	check_result(shmb_lease_release(&lease), 0);
	check_result(shmb_client_get_memory_info(consumer, "huge", 0, 8, SHMB_READ | SHMB_COPY, &lease), 0);
	check_result(shmb_lease_copy_out(&lease, 0, (char[8]){}, 8), SHMB_E_UNSUPPORTED);
	check_result(shmb_lease_release(&lease), 0);
	shmb_region_free(region);
}

static void too_few_huge_pages_are_an_error_at_creation(void) {
	struct shmb_region_options options = { .struct_size = sizeof(options), .huge_pages = SHMB_HUGE_2M };
	struct shmb_region *region;

	check_result(shmb_region_create(owner, "too huge", 100000 * HUGE, &options, &region), -ENOMEM);
	check_result(shmb_client_unregister(owner, (const char *const[]){ "too huge" }, 1, SHMB_RETIRE_STRICT, 0, NULL),
		     SHMB_E_NOT_FOUND);
}

static void windows_have_one_mapping(void) {
	struct shmb_region_spec specs[64] = {};
	struct shmb_lease leases[64];
	char names[64][24];
	int results[64], fd;

	fd = memfd_create("windows", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	check(fd >= 0 && !ftruncate(fd, 64 * 1000) && !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL));
	for (int i = 0; i < 64; ++i) {
		snprintf(names[i], sizeof(names[i]), "window %d", i);
		check(pwrite(fd, names[i], sizeof(names[i]), i * 1000) == sizeof(names[i]));
		specs[i] = (struct shmb_region_spec){
			.struct_size = sizeof(specs[i]),
			.name = names[i],
			.fd = fd,
			.offset = (uint64_t)i * 1000,
			.size = 1000,
		};
	}
	specs[13].size = 100000;
	check_result(shmb_region_adopt_many(owner, specs, 64, results), 0);
	for (int i = 0; i < 64; ++i)
		check(results[i] == (i == 13 ? SHMB_E_OUT_OF_BOUNDS : 0));
	for (int i = 0; i < 64; ++i) {
		if (i == 13)
			continue;
		see(names[i], SHMB_READ, &leases[i]);
		/* windows of one mapping are as far apart as they are in the file */
		check((char *)leases[i].address == (char *)leases[0].address + i * 1000);
	}
	for (int i = 0; i < 64; ++i)
		if (i != 13)
			check_result(shmb_lease_release(&leases[i]), 0);
	for (int i = 0; i < 64; ++i)
		shmb_region_free(specs[i].region);
	(void)close(fd);
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{ "default", default_memory_is_sealed_and_shared },
	{ "read-only", read_only_memory_cannot_be_written },
	{ "populate", populated_memory_is_allocated },
	{ "shortage", more_memory_than_there_is_is_an_error_at_creation },
	{ "role", only_owners_register },
	{ "numa", memory_is_bound_to_a_node },
	{ "huge", huge_pages_are_shared },
	{ "huge-shortage", too_few_huge_pages_are_an_error_at_creation },
	{ "windows", windows_have_one_mapping },
};

int main(int argc, char **argv) {
	check(argc == 3);
	check_result(shmb_client_new(&owner, argv[1], SHMB_ROLE_OWNER, 0), 0);
	check_result(shmb_client_new(&consumer, argv[1], SHMB_ROLE_CONSUMER, 0), 0);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); ++i) {
		if (strcmp(argv[2], cases[i].name))
			continue;
		cases[i].run();
		shmb_client_free(consumer);
		shmb_client_free(owner);
		return 0;
	}
	printf("no such case: %s\n", argv[2]);
	return 2;
}
