/* SPDX-License-Identifier: Apache-2.0 */

/*
 * check: shows that this process sees the owner's bytes. It takes a lease, and compares what its own mapping shows
 * with what read() on the file behind it returns; it then looks whether the owner maps the same file.
 */

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format.h"
#include "options.h"
#include "output.h"
#include "sha256.h"

#define CHUNK (UINT64_C(1) << 20)
#define PAGE UINT64_C(4096)
/* an owner that writes between the two looks makes a difference that a second look does not have */
#define ATTEMPTS 8

enum {
	OPTION_OFFSET = OPTION_VERB,
	OPTION_SIZE
};

static const Option options[] = {
	{ OPTION_OFFSET, "offset", "SIZE", "begin here, in the region (0)" },
	{ OPTION_SIZE, "size", "SIZE", "so many bytes (the rest)" },
	{ 'p', "pages", "N", "only N pages, spread evenly, the first and the last among them" },
	{},
};

typedef struct FileId {
	unsigned int major, minor;
	uint64_t inode; /* 0: not known */
} FileId;

typedef struct Check {
	Ctl *ctl;
	const char *name;
	uint64_t offset;
	uint64_t size;
	uint64_t pages; /* 0: all bytes */

	struct shmb_lease mapped; /* no address where the owner may truncate the memory */
	struct shmb_lease copied; /* what it gives comes from read(); not on huge pages */
	bool has_mapped;
	bool has_copied;
	struct shmb_lease *lease; /* one of them */
	bool differs;
	uint64_t differs_at;
	uint64_t checked;  /* bytes that were looked at */
	uint64_t compared; /* of them, those that were looked at in both ways */
	uint8_t *buffer;
	Sha256 sha;
	FileId file;
	char *path;
	uint32_t owner_pid;
	bool owner_known;
	bool owner_maps;
} Check;

/* ---- bytes ---- */

static bool is_zero(const uint8_t *bytes, uint64_t size) {
	return !bytes[0] && !memcmp(bytes, bytes + 1, size - 1);
}

/* in pages that are not allocated a look at the mapping would allocate them, at the owner's bill; they read as zeroes */
static bool is_same(Check *check, const uint8_t *mapped, uint64_t at, uint64_t size, uint64_t *ret_compared) {
	const uint8_t *read = check->buffer;
	uint64_t part;

	*ret_compared = 0;
	for (uint64_t i = 0; i < size; i += part) {
		part = PAGE - (uintptr_t)(mapped + i) % PAGE;
		if (part > size - i)
			part = size - i;
		if (check->lease->flags & SHMB_REGION_SPARSE && is_zero(read + i, part))
			continue;
		*ret_compared += part;
		for (uint64_t j = i; memcmp(mapped + i, read + i, part) && j < i + part; ++j) {
			if (mapped[j] == read[j])
				continue;
			check->differs_at = at + j;
			return false;
		}
	}
	return true;
}

/* 0, or a result of the library */
static int check_bytes(Check *check, uint64_t at, uint64_t size) {
	const uint8_t *mapped = check->has_mapped ? (const uint8_t *)check->mapped.address + at : NULL;
	uint64_t compared = 0;
	int r;

	for (int attempt = 0; check->has_copied && attempt < ATTEMPTS; ++attempt) {
		r = shmb_lease_copy_out(&check->copied, at, check->buffer, size);
		if (r)
			return r;
		check->differs = mapped && !is_same(check, mapped, at, size, &compared);
		if (!check->differs)
			break;
	}
	sha256_update(&check->sha, check->has_copied ? check->buffer : mapped, size);
	check->checked += size;
	check->compared += compared;
	return 0;
}

static int check_all(Check *check) {
	int r = 0;

	for (uint64_t at = 0; at < check->lease->size && !r && !check->differs; at += CHUNK) {
		uint64_t left = check->lease->size - at;

		r = check_bytes(check, at, left < CHUNK ? left : CHUNK);
	}
	return r;
}

static int check_pages(Check *check) {
	uint64_t total = (check->lease->size + PAGE - 1) / PAGE;
	uint64_t n = check->pages < total ? check->pages : total;
	int r = 0;

	for (uint64_t i = 0; i < n && !r && !check->differs; ++i) {
		uint64_t page = n > 1 ? (uint64_t)((unsigned __int128)i * (total - 1) / (n - 1)) : 0;
		uint64_t left = check->lease->size - page * PAGE;

		r = check_bytes(check, page * PAGE, left < PAGE ? left : PAGE);
	}
	return r;
}

/* ---- whose file it is ---- */

/* the file that @pid (0: this process) maps at @address, or, without one, whether it maps @ret at all */
static bool find_mapping(uint32_t pid, uintptr_t address, FileId *ret, char **ret_path) {
	char name[64], *line = NULL;
	bool found = false;
	size_t size = 0;
	FILE *maps;

	if (pid)
		snprintf(name, sizeof(name), "/proc/%" PRIu32 "/maps", pid);
	else
		snprintf(name, sizeof(name), "/proc/self/maps");
	maps = fopen(name, "re");
	if (!maps)
		return false;
	while (!found && getline(&line, &size, maps) > 0) {
		uintptr_t begin, end;
		FileId file;
		int path = 0;

		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %*s %x:%x %" SCNu64 " %n", &begin, &end, &file.major,
			   &file.minor, &file.inode, &path) < 5)
			continue;
		if (address)
			found = begin <= address && address < end;
		else
			found = file.inode == ret->inode && file.major == ret->major && file.minor == ret->minor;
		if (found && address) {
			line[strcspn(line, "\n")] = 0;
			*ret = file;
			*ret_path = ctl_must(strdup(line + path));
		}
	}
	free(line);
	fclose(maps);
	return found;
}

static bool is_readable(uint32_t pid) {
	char name[64];
	FILE *maps;
	int c;

	snprintf(name, sizeof(name), "/proc/%" PRIu32 "/maps", pid);
	maps = fopen(name, "re");
	if (!maps)
		return false;
	c = fgetc(maps);
	fclose(maps);
	return c != EOF;
}

/* what cannot be seen stays unknown: the owner may be another user, or in another pid namespace */
static void look_at_owner(Check *check) {
	struct shmb_status_filter filter = { .struct_size = sizeof(filter), .name = check->name };
	const struct shmb_status *region;
	struct shmb_status_iter *iter;

	if (!check->has_mapped || !find_mapping(0, (uintptr_t)check->mapped.address, &check->file, &check->path))
		return;
	if (shmb_status_iter_new(check->ctl->client, &filter, &iter))
		return;
	while (!shmb_status_iter_next(iter, &region) && region)
		if (region->generation == check->lease->generation)
			check->owner_pid = region->pid;
	(void)shmb_status_iter_free(iter);
	check->owner_known = check->owner_pid && check->file.inode && is_readable(check->owner_pid);
	check->owner_maps = check->owner_known && find_mapping(check->owner_pid, 0, &check->file, NULL);
}

/* ---- what is said ---- */

static const char *result_of(const Check *check) {
	return check->differs ? "differs" : check->compared ? "same" : "read";
}

static void print_json(const Check *check, const char *digest) {
	json_object *row = row_new();
	char address[32];

	snprintf(address, sizeof(address), "0x%" PRIxPTR, (uintptr_t)check->mapped.address);
	row_text(row, "name", check->name);
	row_text(row, "result", result_of(check));
	row_number(row, "generation", check->lease->generation);
	row_text(row, "address", check->has_mapped ? address : NULL);
	row_number(row, "offset", check->offset);
	row_number(row, "size", check->lease->size);
	row_number(row, "checked", check->checked);
	row_number(row, "compared", check->compared);
	row_text(row, "sha256", digest);
	row_text(row, "file", check->path && check->path[0] ? check->path : NULL);
	if (check->file.inode)
		row_number(row, "inode", check->file.inode);
	else
		row_null(row, "inode");
	row_object(row, "owner_maps", check->owner_known ? ctl_must(json_object_new_boolean(check->owner_maps)) : NULL);
	row_region_flags(row, check->lease->flags);
	json_print(row);
	json_object_put(row);
}

static void print_text(const Check *check, const char *digest) {
	char *name = format_clean(check->name, FORMAT_TERMINAL);
	char *path = format_clean(check->path ?: "", FORMAT_TERMINAL);
	char size[FORMAT_MAX];

	printf("%s: %" PRIu64 " bytes (%s), generation %" PRIu64 "\n", name, check->lease->size,
	       format_bytes(check->lease->size, size), check->lease->generation);
	if (check->has_mapped)
		printf("mapped at %p: %s, inode %" PRIu64 "\n", check->mapped.address, path, check->file.inode);
	else
		puts("not mapped, because the owner may truncate it: read in guarded copies");
	if (check->compared)
		printf("%" PRIu64 " bytes of the mapping and of the file %s\n", check->compared,
		       check->differs ? "were compared" : "are the same");
	if (check->checked > check->compared)
		printf("%" PRIu64 " bytes were read in one way only%s\n", check->checked - check->compared,
		       check->has_mapped && check->lease->flags & SHMB_REGION_SPARSE
			       ? ": they are zeroes, or not allocated"
			       : "");
	printf("sha256 %s\n", digest);
	if (check->owner_known)
		printf("process %" PRIu32 ", the owner, %s\n", check->owner_pid,
		       check->owner_maps ? "maps the same file" : "does not map this file now");
	free(path);
	free(name);
}

static int take_lease(Check *check, uint32_t access, struct shmb_lease *lease) {
	return shmb_client_get_memory_info(check->ctl->client, check->name, check->offset, check->size, access, lease);
}

/*
 * Two leases, one for each way; at least one is taken on 0. A name that is replaced between the two would make two
 * different regions of them.
 */
static int take_leases(Check *check) {
	uint8_t byte;
	int r;

	r = take_lease(check, SHMB_READ, &check->mapped);
	if (r && r != SHMB_E_UNSEALED)
		return ctl_fail(r, "%s", check->name);
	check->has_mapped = !r;
	if (check->has_mapped && check->mapped.memory_type != SHMB_MEMORY_CPU) {
		ctl_say("%s: memory of a GPU cannot be checked from here", check->name);
		return CTL_REFUSED;
	}
	r = take_lease(check, SHMB_READ | SHMB_COPY, &check->copied);
	check->has_copied = !r;
	if (!r)
		r = shmb_lease_copy_out(&check->copied, 0, &byte, 1);
	if (r == SHMB_E_UNSUPPORTED && check->has_mapped && !(check->mapped.flags & SHMB_REGION_SPARSE)) {
		if (check->has_copied)
			(void)shmb_lease_release(&check->copied);
		check->has_copied = false;
	} else if (r) {
		return ctl_fail(r, "%s", check->name);
	}
	check->lease = check->has_mapped ? &check->mapped : &check->copied;
	if (check->has_mapped && check->has_copied && check->mapped.generation != check->copied.generation) {
		ctl_say("%s: it was replaced just now", check->name);
		return CTL_REFUSED;
	}
	return 0;
}

/* a region that was revoked meanwhile is said to be so */
static int release_leases(Check *check) {
	int r = 0, q = 0;

	if (check->has_mapped)
		r = shmb_lease_release(&check->mapped);
	if (check->has_copied)
		q = shmb_lease_release(&check->copied);
	return r ?: q;
}

static int check_region(Check *check) {
	char digest[SHA256_HEX_MAX];
	int r;

	check->buffer = ctl_must(malloc(CHUNK));
	sha256_init(&check->sha);
	r = check->pages ? check_pages(check) : check_all(check);
	if (r)
		return ctl_fail(r, "%s", check->name);
	look_at_owner(check);
	sha256_final(&check->sha, digest);
	if (check->ctl->json)
		print_json(check, digest);
	else
		print_text(check, digest);
	if (!check->differs)
		return 0;
	ctl_say("%s: mapping and file differ at byte %" PRIu64 ", or somebody writes there all the time", check->name,
		check->offset + check->differs_at);
	return CTL_REFUSED;
}

static int parse(Check *check) {
	Ctl *ctl = check->ctl;
	int id;

	while ((id = options_next(ctl)) != OPTION_END) {
		switch (id) {
		case OPTION_OFFSET:
			if (format_parse_size(optarg, &check->offset))
				return ctl_usage("--offset: \"%s\" is not a number with a unit: B, K, M, G", optarg);
			break;
		case OPTION_SIZE:
			if (format_parse_size(optarg, &check->size) || !check->size)
				return ctl_usage("--size: \"%s\" is not a number with a unit: B, K, M, G", optarg);
			break;
		case 'p':
			if (format_parse_number(optarg, UINT64_MAX, &check->pages) || !check->pages)
				return ctl_usage("--pages: \"%s\" is not a number above 0", optarg);
			break;
		default:
			return CTL_USAGE;
		}
	}
	if (ctl->argc - optind != 1)
		return ctl_usage(ctl->argc > optind ? "takes one name" : "which NAME?");
	check->name = ctl->argv[optind];
	return 0;
}

static int run(Ctl *ctl) {
	Check check = { .ctl = ctl, .size = SHMB_REST };
	int r, released;

	r = parse(&check);
	if (!r)
		r = ctl_connect(ctl, 0);
	if (r)
		return r;
	r = take_leases(&check);
	if (!r)
		r = check_region(&check);
	released = release_leases(&check);
	if (released && !r)
		r = ctl_fail(released, "%s", check.name);
	free(check.buffer);
	free(check.path);
	return r;
}

const Verb verb_check = {
	.name = "check",
	.arguments = "NAME",
	.help = "maps a region, and shows that these are the owner's bytes",
	.options = options,
	.run = run,
};
