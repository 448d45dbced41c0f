/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What the fuzzers share. Built without libFuzzer, each replays its corpus: what begins with y_ is to be accepted, what
 * begins with n_ refused.
 */

#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(_condition)                                                                            \
	do {                                                                                           \
		if (!(_condition)) {                                                                   \
			fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #_condition); \
			abort();                                                                       \
		}                                                                                      \
	} while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#ifndef FUZZ_LIBFUZZER

/* whether @size bytes of @data, which it may change, are accepted or not, as @wanted says */
typedef bool (*ReplayJudge)(uint8_t *data, size_t size, bool wanted);

/* @room bytes at @data take any file, and one byte more */
static bool replay_file(const char *directory, const char *name, uint8_t *data, size_t room, ReplayJudge judge) {
	bool wanted = name[0] == 'y';
	char path[4096];
	size_t size;
	FILE *file;

	(void)snprintf(path, sizeof(path), "%s/%s", directory, name);
	file = fopen(path, "rb");
	if (!file) {
		perror(path);
		return false;
	}
	size = fread(data, 1, room, file);
	if (ferror(file) || !feof(file)) {
		fprintf(stderr, "%s: not read to its end\n", path);
		(void)fclose(file);
		return false;
	}
	(void)fclose(file);
	if (!judge(data, size, wanted)) {
		fprintf(stderr, "%s: %s\n", path, wanted ? "was refused" : "was accepted");
		return false;
	}
	return true;
}

/* of the directory that is named on the command line, or of @corpus beside this file; the exit status */
static int replay_corpus(int argc, char **argv, const char *corpus, uint8_t *data, size_t room, ReplayJudge judge) {
	const char *top = getenv("srcdir");
	char directory[2048];
	struct dirent *entry;
	size_t n_yes = 0, n_no = 0, n_wrong = 0;
	DIR *dir;

	if (argc > 1)
		(void)snprintf(directory, sizeof(directory), "%s", argv[1]);
	else
		(void)snprintf(directory, sizeof(directory), "%s/tests/fuzz/%s", top ? top : ".", corpus);
	dir = opendir(directory);
	if (!dir) {
		perror(directory);
		return 1;
	}
	while ((entry = readdir(dir)) != NULL) {
		const char *name = entry->d_name;

		if (strncmp(name, "y_", 2) != 0 && strncmp(name, "n_", 2) != 0)
			continue;
		if (!replay_file(directory, name, data, room, judge))
			n_wrong++;
		else if (name[0] == 'y')
			n_yes++;
		else
			n_no++;
	}
	(void)closedir(dir);
	printf("%zu accepted, %zu refused, %zu wrong\n", n_yes, n_no, n_wrong);
	return n_wrong != 0 || n_yes == 0 || n_no == 0;
}

#endif
