/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What this process has: a test that ends with more fds or threads than it began with has leaked them. */

#include <dirent.h>

/* entries of a directory of /proc/self, and always the same few more */
static inline size_t count_entries(const char *path) {
	DIR *directory = opendir(path);
	size_t n = 0;

	assert_non_null(directory);
	while (readdir(directory))
		n++;
	(void)closedir(directory);
	return n;
}

static inline size_t count_fds(void) {
	return count_entries("/proc/self/fd");
}
