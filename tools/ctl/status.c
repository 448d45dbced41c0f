/* SPDX-License-Identifier: Apache-2.0 */

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "broker-info.h"
#include "format.h"
#include "live.h"
#include "options.h"
#include "output.h"

#define INTERVAL_NS UINT64_C(1000000000)
/* changes that come together are shown together */
#define SETTLE_MS 50
#define LINES_AROUND 4

static const Column columns[] = {
	{ "name", COLUMN_TEXT, false },
	{ "kind", COLUMN_TEXT, false },
	{ "size", COLUMN_BYTES, false },
	{ "offset", COLUMN_BYTES, false },
	{ "state", COLUMN_STATE, false },
	{ "generation", COLUMN_NUMBER, false },
	{ "uid", COLUMN_NUMBER, false },
	{ "pid", COLUMN_NUMBER, false },
	{ "comm", COLUMN_TEXT, false },
	{ "container", COLUMN_TEXT, false },
	{ "age", COLUMN_DURATION, false },
	{ "leases", COLUMN_NUMBER, false },
	{ "holders", COLUMN_HOLDERS, false },
	{ "flags", COLUMN_WORDS, false },
	{ "access", COLUMN_WORDS, true },
	{ "holders_total", COLUMN_NUMBER, true },
	{ "object", COLUMN_NUMBER, true },
	{ "object_size", COLUMN_BYTES, true },
	{ "session", COLUMN_NUMBER, true },
	{ "slot", COLUMN_NUMBER, true },
	{ "device", COLUMN_TEXT, true }, /* null for system memory */
	{ "key", COLUMN_TEXT, true },	 /* null when there is none, or it is not this user's to see */
	{},
};

enum {
	OPTION_WATCH = OPTION_VERB,
	OPTION_PREFIX
};

static const Option options[] = {
	{ OPTION_WATCH, "watch", "[=DURATION]", "stay, and show changes, at least this often (1s)" },
	{ OPTION_PREFIX, "prefix", NULL, "all regions whose name begins with NAME" },
	OPTIONS_TABLE,
	{},
};

typedef struct Status {
	Ctl *ctl;
	struct shmb_status_filter filter;
	bool watch;
	int interval; /* ms */
	Table table;
	json_object *broker;
	uint64_t n;
	uint64_t bytes;
} Status;

static json_object *holders_row(const struct shmb_status *status) {
	static const char *const words[] = { "page", "message", "detached" };
	json_object *holders = ctl_must(json_object_new_array());

	for (uint32_t i = 0; i < status->n_holders; ++i) {
		const struct shmb_holder *holder = &status->holders[i];
		json_object *row = row_new();

		row_identity(row, holder->pid, holder->uid);
		row_text(row, "comm", holder->comm);
		row_number(row, "leases", holder->leases);
		row_number(row, "session", holder->session);
		row_words(row, "flags", holder->flags, words, ARRAY_N(words));
		if (json_object_array_add(holders, row) < 0)
			ctl_must(NULL);
	}
	return holders;
}

static json_object *region_row(const struct shmb_status *status) {
	json_object *row = row_new();
	char device[FORMAT_DEVICE_SIZE];
	const char *container = status->container && status->container[0] ? status->container : NULL;

	row_text(row, "name", status->name);
	row_text(row, "kind", name_of_kind(status->kind));
	row_number(row, "size", status->size);
	row_number(row, "offset", status->offset);
	row_text(row, "state", name_of_state(status->state));
	row_number(row, "generation", status->generation);
	row_identity(row, status->pid, status->uid);
	row_text(row, "comm", status->comm[0] ? status->comm : NULL);
	row_text(row, "container", container);
	row_number(row, "age", status->age_ns);
	row_number(row, "leases", status->leases);
	row_object(row, "holders", holders_row(status));
	row_region_flags(row, status->flags);
	row_access(row, status->access);
	row_number(row, "holders_total", status->holders_total);
	row_number(row, "object", status->object);
	row_number(row, "object_size", status->object_size);
	row_number(row, "session", status->session);
	row_number(row, "slot", status->slot);
	row_text(row, "device", status->kind == SHMB_MEMORY_CUDA ? format_device(device, status->device_uuid) : NULL);
	row_text(row, "key", status->key[0] ? status->key : NULL);
	return row;
}

static int read_regions(Status *status) {
	struct shmb_status_iter *iter;
	const struct shmb_status *region;
	int r;

	table_clear(&status->table);
	status->n = status->bytes = 0;
	r = shmb_status_iter_new(status->ctl->client, &status->filter, &iter);
	while (!r) {
		r = shmb_status_iter_next(iter, &region);
		if (r || !region) {
			iter = shmb_status_iter_free(iter);
			break;
		}
		table_add(&status->table, region_row(region));
		status->n++;
		status->bytes += region->size;
	}
	if (r)
		return ctl_fail(r, "the regions cannot be listed");
	table_sort(&status->table);
	return 0;
}

static void print_json(Status *status) {
	json_object *document = row_new();

	row_object(document, "broker", json_object_get(status->broker));
	row_object(document, "regions", json_object_get(status->table.rows));
	if (status->watch)
		json_print_line(document);
	else
		json_print(document);
	json_object_put(document);
}

static void print_table(Status *status) {
	struct winsize size;
	char buffer[FORMAT_MAX];
	size_t max = 0;

	if (status->watch && output_is_terminal()) {
		if (!ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) && size.ws_row > LINES_AROUND)
			max = size.ws_row - LINES_AROUND;
		fputs("\033[H\033[2J", stdout);
	}
	table_print(&status->table, max);
	if (max && status->n > max)
		printf("... and %" PRIu64 " more\n", status->n - max);
	if (status->table.headings) {
		printf("%" PRIu64 " region%s, %s; ", status->n, status->n == 1 ? "" : "s",
		       format_bytes(status->bytes, buffer));
		broker_info_print(status->broker);
	}
	if (status->watch && !output_is_terminal())
		putchar('\n');
	fflush(stdout);
}

static int show(Status *status) {
	int r = read_regions(status);

	if (r)
		return r;
	if (!status->watch && status->filter.name && !status->filter.prefix && !status->n)
		return ctl_code(SHMB_E_NOT_FOUND);
	if (status->ctl->json)
		print_json(status);
	else
		print_table(status);
	return 0;
}

/* takes what has come; 0 without events, 1 with some, or a negative errno or refusal */
static int take_events(Status *status, bool *ret_some) {
	struct shmb_event event;
	int r;

	*ret_some = false;
	while (!(r = shmb_client_next_event(status->ctl->client, &event, 0)))
		*ret_some = true;
	return r == SHMB_E_TIMED_OUT ? 0 : r;
}

/* until there is something to show; LIVE_*, or a negative errno or a refusal in @ret_result */
static int wait_for_change(Status *status, int *ret_result) {
	uint64_t end = live_now_ns() + (uint64_t)status->interval * 1000000;
	bool some;

	for (;;) {
		uint64_t now = live_now_ns();
		int r;

		*ret_result = take_events(status, &some);
		if (*ret_result)
			return LIVE_STOP;
		if (some)
			return live_wait(-1, SETTLE_MS);
		if (now >= end)
			return LIVE_TIME;
		r = live_wait(shmb_client_get_fd(status->ctl->client), (int)((end - now + 999999) / 1000000));
		if (r == LIVE_STOP || r < 0)
			return r;
	}
}

static int watch(Status *status) {
	int r, result;

	r = shmb_client_subscribe(status->ctl->client, SHMB_EVENT_MASK_ALL);
	if (r)
		return ctl_fail(r, "events");
	while (!live_stopped() && !ferror(stdout)) {
		r = show(status);
		if (r)
			return r;
		r = wait_for_change(status, &result);
		if (r < 0)
			return ctl_fail(r, "waiting");
		if (result)
			return ctl_fail(result, "events");
		if (r == LIVE_STOP)
			break;
		json_object_put(status->broker);
		status->broker = NULL;
		r = broker_info_read(status->ctl, &status->broker);
		if (r)
			return r;
	}
	return 0;
}

static int parse_interval(Status *status, const char *text) {
	uint64_t ns = INTERVAL_NS;

	status->watch = true;
	if (text && (format_parse_duration(text, &ns) || !ns || ns / 1000000 > INT32_MAX))
		return ctl_usage("--watch: \"%s\" is not a duration with ms, s or min", text);
	status->interval = (int)(ns / 1000000);
	return 0;
}

static int parse(Status *status) {
	Ctl *ctl = status->ctl;
	int id, r = 0;

	while (!r && (id = options_next(ctl)) != OPTION_END) {
		switch (id) {
		case OPTION_WATCH:
			r = parse_interval(status, optarg);
			break;
		case OPTION_PREFIX:
			status->filter.prefix = 1;
			break;
		default:
			r = table_option(&status->table, id, optarg);
		}
	}
	if (r)
		return r;
	if (ctl->argc - optind > 1)
		return ctl_usage("takes one name, not also \"%s\"", ctl->argv[optind + 1]);
	status->filter.name = ctl->argv[optind];
	if (status->filter.prefix && !status->filter.name)
		return ctl_usage("--prefix needs a NAME");
	return 0;
}

static int run(Ctl *ctl) {
	Status status = { .ctl = ctl,
			  .filter = { .struct_size = sizeof(struct shmb_status_filter), .with_holders = 1 } };
	int r;

	table_init(&status.table, columns, "name");
	r = parse(&status);
	if (!r && status.watch) {
		r = live_init();
		if (r)
			r = ctl_fail(r, "signals");
	}
	if (!r)
		r = ctl_connect(ctl, SHMB_NO_LEASE_PAGE);
	if (!r)
		r = broker_info_read(ctl, &status.broker);
	if (!r)
		r = status.watch ? watch(&status) : show(&status);
	if (r == CTL_NOT_FOUND)
		ctl_say("no region \"%s\"", status.filter.name);
	json_object_put(status.broker);
	table_deinit(&status.table);
	return r;
}

const Verb verb_status = {
	.name = "status",
	.arguments = "[NAME]",
	.help = "lists regions, whose they are, and who holds them",
	.options = options,
	.columns = columns,
	.run = run,
};
