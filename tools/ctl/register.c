/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format.h"
#include "live.h"
#include "options.h"
#include "output.h"

#define ALLOWED_MAX 32

enum {
	OPTION_FD_FROM = OPTION_VERB,
	OPTION_CREATE,
	OPTION_OFFSET,
	OPTION_SIZE,
	OPTION_KEEP,
	OPTION_FOREGROUND,
	OPTION_READ_ONLY,
	OPTION_REPLACE,
	OPTION_POPULATE,
	OPTION_HUGE,
	OPTION_NUMA,
	OPTION_UID,
	OPTION_GID,
	OPTION_KEY,
};

static const Option options[] = {
	{ OPTION_FD_FROM, "fd-from", "FILE", "the memory behind this file" },
	{ OPTION_CREATE, "create", "SIZE", "new memory, zeroed and sealed" },
	{ OPTION_OFFSET, "offset", "SIZE", "with --fd-from: where the region begins (0)" },
	{ OPTION_SIZE, "size", "SIZE", "with --fd-from: its size (the rest of the file)" },
	{ OPTION_KEEP, "keep", NULL, "the region stays when this program ends; needs the right keep" },
	{ OPTION_FOREGROUND, "foreground", NULL, "stay until SIGINT or SIGTERM, as is done without --keep" },
	{ OPTION_READ_ONLY, "read-only", NULL, "consumers may not write" },
	{ OPTION_REPLACE, "replace", NULL, "take the name over from a region of one's own" },
	{ OPTION_POPULATE, "populate", NULL, "with --create: allocate every page now" },
	{ OPTION_HUGE, "huge-pages", "SIZE", "with --create: pages of 2M or 1G" },
	{ OPTION_NUMA, "numa-node", "N", "with --create: memory of this node" },
	{ OPTION_UID, "allow-uid", "UID", "only for this user; may be given again" },
	{ OPTION_GID, "allow-gid", "GID", "only for this group; may be given again" },
	{ OPTION_KEY, "key", "KEY", "another name by which somebody knows this memory, for status" },
	{},
};

typedef struct Register {
	Ctl *ctl;
	const char *name;
	const char *file;
	bool create;
	bool windowed;
	bool has_size;
	bool foreground;
	bool create_only; /* an option that is for --create only was given */
	uint64_t offset;
	uint64_t size;
	uint32_t uids[ALLOWED_MAX];
	uint32_t gids[ALLOWED_MAX];
	struct shmb_region_options options;
	struct shmb_region *region;
	uint64_t last_ended; /* generation of the last region that was said to have ended */
} Register;

static bool is_kept(const Register *reg) {
	return reg->options.flags & SHMB_REGION_OPT_KEEP;
}

static bool stays(const Register *reg) {
	return reg->foreground || !is_kept(reg);
}

/* a pipe or a device that is named by mistake must not make open() wait */
static int open_file(const Register *reg) {
	int flags = O_CLOEXEC | O_NONBLOCK | O_NOCTTY, fd = -1;

	if (!(reg->options.flags & SHMB_REGION_OPT_READ_ONLY))
		fd = open(reg->file, O_RDWR | flags);
	if (fd < 0)
		fd = open(reg->file, O_RDONLY | flags);
	return fd < 0 ? -errno : fd;
}

static int adopt(Register *reg) {
	struct stat st;
	int fd, r;

	fd = open_file(reg);
	if (fd < 0) {
		ctl_say("%s: %s", reg->file, strerror(-fd));
		return CTL_REFUSED;
	}
	if (!reg->has_size) {
		if (fstat(fd, &st) < 0 || (uint64_t)st.st_size <= reg->offset) {
			ctl_say("%s: nothing is at this offset", reg->file);
			(void)close(fd);
			return CTL_REFUSED;
		}
		reg->size = (uint64_t)st.st_size - reg->offset;
	}
	r = shmb_region_adopt(reg->ctl->client, reg->name, fd, reg->offset, reg->size, &reg->options, &reg->region);
	(void)close(fd);
	return r ? ctl_fail(r, "%s", reg->name) : 0;
}

static int create(Register *reg) {
	int r;

	r = shmb_region_create(reg->ctl->client, reg->name, reg->size, &reg->options, &reg->region);
	return r ? ctl_fail(r, "%s", reg->name) : 0;
}

static void print_region(const Register *reg) {
	char size[FORMAT_MAX], *name;
	json_object *row;

	if (!reg->ctl->json) {
		name = format_clean(reg->name, FORMAT_TERMINAL);
		printf("%s is registered: %s, generation %" PRIu64 "%s\n", name,
		       format_bytes(shmb_region_get_size(reg->region), size), shmb_region_get_generation(reg->region),
		       is_kept(reg) ? ", kept" : "");
		free(name);
	} else {
		row = row_new();
		row_text(row, "name", reg->name);
		row_number(row, "size", shmb_region_get_size(reg->region));
		row_number(row, "offset", reg->offset);
		row_number(row, "generation", shmb_region_get_generation(reg->region));
		row_region_flags(row, shmb_region_get_flags(reg->region));
		json_print_line(row);
		json_object_put(row);
	}
	fflush(stdout);
}

static void on_event(void *userdata, const struct shmb_event *event) {
	Register *reg = userdata;

	if ((event->type == SHMB_EVENT_GONE || event->type == SHMB_EVENT_REVOKED) && !strcmp(event->name, reg->name))
		reg->last_ended = event->generation;
}

/* before it is registered, so that nothing is missed */
static int listen_for_end(Register *reg) {
	int r;

	shmb_client_set_event_callback(reg->ctl->client, on_event, reg);
	r = shmb_client_subscribe(reg->ctl->client, 1 << SHMB_EVENT_GONE | 1 << SHMB_EVENT_REVOKED);
	return r ? ctl_fail(r, "events") : 0;
}

static int own(Register *reg) {
	int r = 0;

	ctl_say(is_kept(reg) ? "staying until SIGINT or SIGTERM; the region is kept"
			     : "this process owns the region, it ends with SIGINT or SIGTERM; --keep would keep it");
	while (!r) {
		if (reg->last_ended == shmb_region_get_generation(reg->region)) {
			ctl_say("the region was retired by somebody else");
			return CTL_REFUSED;
		}
		r = live_wait(shmb_client_get_fd(reg->ctl->client), -1);
		if (r == LIVE_STOP)
			return 0;
		if (r < 0)
			return ctl_fail(r, "waiting");
		r = shmb_client_process(reg->ctl->client);
	}
	return ctl_fail(r, "the broker is gone, and with it the region");
}

/* ---- options ---- */

static int parse_size(const char *option, const char *text, uint64_t *ret) {
	switch (format_parse_size(text, ret)) {
	case 0:
		return 0;
	case -ERANGE:
		return ctl_usage("--%s: \"%s\" is too large", option, text);
	default:
		return ctl_usage("--%s: \"%s\" is not a number with a unit: B, K, M, G", option, text);
	}
}

static int parse_allowed(const char *option, const char *text, uint32_t *ids, uint32_t *n) {
	uint64_t id;

	if (format_parse_number(text, UINT32_MAX - 1, &id))
		return ctl_usage("--%s: \"%s\" is not a numeric id", option, text);
	if (*n == ALLOWED_MAX)
		return ctl_usage("--%s: at most %d", option, ALLOWED_MAX);
	ids[(*n)++] = (uint32_t)id;
	return 0;
}

static int parse_huge(Register *reg, const char *text) {
	if (!strcmp(text, "2M"))
		reg->options.huge_pages = SHMB_HUGE_2M;
	else if (!strcmp(text, "1G"))
		reg->options.huge_pages = SHMB_HUGE_1G;
	else
		return ctl_usage("--huge-pages: 2M or 1G, not \"%s\"", text);
	reg->create_only = true;
	return 0;
}

static int parse_numa(Register *reg, const char *text) {
	uint64_t node;

	if (format_parse_number(text, INT32_MAX - 1, &node))
		return ctl_usage("--numa-node: \"%s\" is not a number", text);
	reg->options.numa_node = (int32_t)node + 1;
	reg->create_only = true;
	return 0;
}

static int take(Register *reg, int id) {
	struct shmb_region_options *to = &reg->options;

	switch (id) {
	case OPTION_FD_FROM:
		reg->file = optarg;
		return 0;
	case OPTION_CREATE:
		reg->create = true;
		return parse_size("create", optarg, &reg->size);
	case OPTION_OFFSET:
		reg->windowed = true;
		return parse_size("offset", optarg, &reg->offset);
	case OPTION_SIZE:
		reg->windowed = reg->has_size = true;
		return parse_size("size", optarg, &reg->size);
	case OPTION_KEEP:
		to->flags |= SHMB_REGION_OPT_KEEP;
		return 0;
	case OPTION_FOREGROUND:
		reg->foreground = true;
		return 0;
	case OPTION_READ_ONLY:
		to->flags |= SHMB_REGION_OPT_READ_ONLY;
		return 0;
	case OPTION_REPLACE:
		to->flags |= SHMB_REGION_OPT_REPLACE;
		return 0;
	case OPTION_POPULATE:
		to->flags |= SHMB_REGION_OPT_POPULATE;
		reg->create_only = true;
		return 0;
	case OPTION_HUGE:
		return parse_huge(reg, optarg);
	case OPTION_NUMA:
		return parse_numa(reg, optarg);
	case OPTION_UID:
		return parse_allowed("allow-uid", optarg, reg->uids, &to->n_allowed_uids);
	case OPTION_GID:
		return parse_allowed("allow-gid", optarg, reg->gids, &to->n_allowed_gids);
	case OPTION_KEY:
		to->key = optarg;
		return 0;
	default:
		return CTL_USAGE;
	}
}

static int parse(Register *reg) {
	Ctl *ctl = reg->ctl;
	int id, r;

	while ((id = options_next(ctl)) != OPTION_END) {
		r = take(reg, id);
		if (r)
			return r;
	}
	if (ctl->argc - optind != 1)
		return ctl_usage(ctl->argc > optind ? "takes one name" : "under which NAME?");
	reg->name = ctl->argv[optind];
	if (reg->create == (reg->file != NULL))
		return ctl_usage("either --create=SIZE or --fd-from=FILE");
	if (reg->create && reg->windowed)
		return ctl_usage("--offset and --size go with --fd-from");
	if (reg->file && reg->create_only)
		return ctl_usage("--populate, --huge-pages and --numa-node go with --create");
	if (!reg->size && (reg->create || reg->has_size))
		return ctl_usage("a region has at least one byte");
	return 0;
}

static int run(Ctl *ctl) {
	Register reg = { .ctl = ctl, .options.struct_size = sizeof(reg.options) };
	int r;

	r = parse(&reg);
	if (r)
		return r;
	reg.options.allowed_uids = reg.uids;
	reg.options.allowed_gids = reg.gids;
	if (stays(&reg)) {
		r = live_init();
		if (r)
			return ctl_fail(r, "signals");
	}
	r = ctl_connect(ctl, SHMB_NO_LEASE_PAGE);
	if (!r && stays(&reg))
		r = listen_for_end(&reg);
	if (!r)
		r = reg.create ? create(&reg) : adopt(&reg);
	if (!r) {
		print_region(&reg);
		if (stays(&reg))
			r = own(&reg);
	}
	(void)shmb_region_free(reg.region);
	return r;
}

const Verb verb_register = {
	.name = "register",
	.arguments = "NAME --create=SIZE | --fd-from=FILE",
	.help = "registers a region",
	.options = options,
	.run = run,
};
