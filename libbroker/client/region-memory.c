/* SPDX-License-Identifier: Apache-2.0 */

/* Memory that the library makes for a region: of which pages, on which node, and sealed against its own owner. */

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "owner.h"
#include "wire/compat.h"

#ifndef MPOL_BIND
#define MPOL_BIND 2
#endif

static int create_memfd(const char *name, uint64_t size, const struct shmb_region_options *options) {
	unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	char label[64];
	int fd;

	snprintf(label, sizeof(label), "shmbroker:%.40s", name);
	if (options->huge_pages)
		flags |= MFD_HUGETLB | (options->huge_pages == SHMB_HUGE_2M ? MFD_HUGE_2MB : MFD_HUGE_1GB);
	/* Linux 6.3; older kernels do not know it */
	fd = memfd_create(label, flags | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(label, flags);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)size) < 0) {
		int r = -errno;

		(void)close(fd);
		return r;
	}
	return fd;
}

static int bind_node(void *memory, uint64_t size, int32_t node) {
	unsigned long mask[REGION_NODES_MAX / (8 * sizeof(unsigned long)) + 1] = {};

	mask[(size_t)node / (8 * sizeof(mask[0]))] |= 1UL << ((size_t)node % (8 * sizeof(mask[0])));
	return syscall(SYS_mbind, memory, size, MPOL_BIND, mask, (unsigned long)REGION_NODES_MAX + 1, 0) < 0 ? -errno
													     : 0;
}

/* bytes that the machine could still give; UINT64_MAX when it does not say */
static uint64_t memory_available(void) {
	uint64_t kib, available = UINT64_MAX;
	char line[128];
	FILE *file = fopen("/proc/meminfo", "re");

	if (!file)
		return UINT64_MAX;
	while (available == UINT64_MAX && fgets(line, sizeof(line), file))
		if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
			available = kib * 1024;
	(void)fclose(file);
	return available;
}

/* a shortage is an error here, not a signal later */
static int allocate(struct shmb_region *region, const struct shmb_region_options *options) {
	int r;

	if (options->numa_node) {
		r = bind_node(region->mapped, region->mapped_size, options->numa_node - 1);
		if (r)
			return r;
	}
	if (!(options->flags & SHMB_REGION_OPT_POPULATE))
		return 0;
	/* the kernel would rather kill somebody than refuse; huge pages come from a pool and are refused */
	if (!options->huge_pages && region->mapped_size > memory_available())
		return -ENOMEM;
	if (!options->numa_node && !fallocate(region->file->fd, 0, 0, (off_t)region->mapped_size) &&
	    options->huge_pages)
		return 0;
	if (madvise(region->mapped, region->mapped_size, MADV_POPULATE_WRITE) < 0)
		return errno == EFAULT ? -ENOMEM : errno == EINVAL ? 0 : -errno;
	return 0;
}

static int seal(struct shmb_region *region, const struct shmb_region_options *options) {
	int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

	/* our own mapping stays writable; nobody gets another one (Linux 5.1) */
	if (options->flags & SHMB_REGION_OPT_READ_ONLY || options->huge_pages)
		seals |= F_SEAL_FUTURE_WRITE;
	if (options->flags & SHMB_REGION_OPT_READ_ONLY && fchmod(region->file->fd, 0400) < 0)
		return -errno;
	return fcntl(region->file->fd, F_ADD_SEALS, seals) < 0 ? -errno : 0;
}

int region_make_memory(struct shmb_region *region, const struct shmb_region_options *options) {
	uint64_t page = options->huge_pages ? UINT64_C(1) << options->huge_pages : (uint64_t)getpagesize(), padded;
	void *mapped;
	int r;

	if (__builtin_add_overflow(region->size, page - 1, &padded) || padded > INT64_MAX)
		return -ENOMEM;
	region->mapped_size = padded / page * page;
	r = create_memfd(region->name, region->mapped_size, options);
	if (r < 0)
		return r;
	region->file->fd = r;
	mapped = mmap(NULL, region->mapped_size, PROT_READ | PROT_WRITE, MAP_SHARED, region->file->fd, 0);
	if (mapped == MAP_FAILED)
		return -errno;
	region->mapped = mapped;
	return allocate(region, options) ?: seal(region, options);
}
