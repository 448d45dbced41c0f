/* SPDX-License-Identifier: Apache-2.0 */

#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "spin.h"

#define PATH_SIZE 512

/* our group in the unified hierarchy; false where there is none */
static bool read_group(char *path, size_t size) {
	FILE *file = fopen("/proc/self/cgroup", "re");
	char line[PATH_SIZE];
	bool found = false;

	if (!file)
		return false;
	while (!found && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = 0;
		found = !strncmp(line, "0::", 3);
		if (found)
			(void)snprintf(path, size, "/sys/fs/cgroup%.400s/cpu.max", line + 3);
	}
	(void)fclose(file);
	return found;
}

/* whole CPUs of the bandwidth, at least 1; UINT32_MAX without a limit */
static uint32_t group_cpus(void) {
	unsigned long long quota, period;
	char path[PATH_SIZE];
	FILE *file;
	int n;

	file = read_group(path, sizeof(path)) ? fopen(path, "re") : NULL;
	if (!file)
		return UINT32_MAX;
	n = fscanf(file, "%llu %llu", &quota, &period);
	(void)fclose(file);
	if (n != 2 || !period)
		return UINT32_MAX;
	return quota < period ? 1 : (uint32_t)(quota / period);
}

uint32_t spin_cpus(void) {
	uint32_t allowed = 1, group = group_cpus();
	cpu_set_t set;

	if (!sched_getaffinity(0, sizeof(set), &set))
		allowed = (uint32_t)CPU_COUNT(&set);
	return allowed < group ? allowed : group;
}

void spin_init(Spin *spin, int mode, uint32_t n_cpus) {
	uint32_t needed = mode == SPIN_AUTO ? SPIN_CPUS_AUTO : 2;

	*spin = (Spin){ .ns = mode != SPIN_NO && n_cpus >= needed ? SPIN_NS : 0 };
}
