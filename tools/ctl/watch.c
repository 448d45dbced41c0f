/* SPDX-License-Identifier: Apache-2.0 */

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "format.h"
#include "live.h"
#include "options.h"
#include "output.h"

static const char *const event_names[] = {
	[SHMB_EVENT_REGISTERED] = "registered",
	[SHMB_EVENT_RETIRING] = "retiring",
	[SHMB_EVENT_GONE] = "gone",
	[SHMB_EVENT_REVOKED] = "revoked",
	[SHMB_EVENT_OWNER_DIED] = "owner_died",
	[SHMB_EVENT_JOINED] = "joined",
	[SHMB_EVENT_LEFT] = "left",
	[SHMB_EVENT_OVERFLOW] = "overflow",
};

enum {
	OPTION_EVENTS = OPTION_VERB
};

static const Option options[] = {
	{ 'n', "count", "N", "end after N events" },
	{ OPTION_EVENTS, "events", "LIST", "only these events, separated by commas" },
	{},
};

typedef struct Watch {
	Ctl *ctl;
	uint32_t mask;
	uint64_t count; /* 0: no end */
} Watch;

static uint64_t now_real_ns(void) {
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static const char *event_name(const struct shmb_event *event) {
	return event->type < ARRAY_N(event_names) ? event_names[event->type] : "unknown";
}

static bool is_of_region(const struct shmb_event *event) {
	return event->type != SHMB_EVENT_JOINED && event->type != SHMB_EVENT_LEFT && event->type != SHMB_EVENT_OVERFLOW;
}

static void print_json(const struct shmb_event *event) {
	json_object *row = row_new();

	row_number(row, "time", now_real_ns());
	row_text(row, "event", event_name(event));
	if (is_of_region(event)) {
		row_text(row, "name", event->name);
		row_number(row, "generation", event->generation);
		row_number(row, "size", event->size);
		row_number(row, "slot", event->slot);
	}
	if (event->type == SHMB_EVENT_OVERFLOW) {
		row_number(row, "count", event->count);
	} else {
		row_number(row, "session", event->session);
		row_identity(row, event->pid, event->uid);
	}
	json_print_line(row);
	json_object_put(row);
}

static void print_text(const struct shmb_event *event) {
	char time[FORMAT_MAX], size[FORMAT_MAX], *name = format_clean(event->name, FORMAT_TERMINAL);

	printf("%s %-10s", format_time(now_real_ns(), time), event_name(event));
	if (is_of_region(event))
		printf(" %s generation=%" PRIu64 " size=%s", name, event->generation, format_bytes(event->size, size));
	if (event->type == SHMB_EVENT_OVERFLOW) {
		printf(" %" PRIu64 " events were dropped: read the status again", event->count);
	} else {
		printf(" session=%" PRIu64, event->session);
		if (event->pid)
			printf(" pid=%u", event->pid);
		if (event->uid != SHMB_ANY_UID)
			printf(" uid=%u", event->uid);
	}
	putchar('\n');
	fflush(stdout);
	free(name);
}

static int follow(Watch *watch) {
	struct shmb_client *client = watch->ctl->client;
	struct shmb_event event;
	uint64_t n = 0;
	int r;

	r = shmb_client_subscribe(client, watch->mask);
	if (r)
		return ctl_fail(r, "events");
	ctl_say("watching until SIGINT or SIGTERM");
	while (!live_stopped() && !ferror(stdout)) {
		r = shmb_client_next_event(client, &event, 0);
		if (!r) {
			if (watch->ctl->json)
				print_json(&event);
			else
				print_text(&event);
			if (++n == watch->count)
				return 0;
			continue;
		}
		if (r != SHMB_E_TIMED_OUT)
			return ctl_fail(r, "events");
		r = live_wait(shmb_client_get_fd(client), -1);
		if (r < 0)
			return ctl_fail(r, "waiting");
	}
	return 0;
}

static int parse_events(Watch *watch, const char *list) {
	char *names = ctl_must(strdup(list)), *rest = names, *name;
	int r = 0;

	/* what was dropped is always told */
	watch->mask = 1u << SHMB_EVENT_OVERFLOW;
	while (!r && (name = strsep(&rest, ","))) {
		size_t i = 0;

		while (i < ARRAY_N(event_names) && strcmp(event_names[i], name))
			++i;
		if (i == ARRAY_N(event_names))
			r = ctl_usage("no event \"%s\"; there are registered, retiring, gone, revoked, owner_died, "
				      "joined, left and overflow",
				      name);
		else
			watch->mask |= 1u << i;
	}
	free(names);
	return r;
}

static int parse(Watch *watch) {
	Ctl *ctl = watch->ctl;
	int id, r = 0;

	while (!r && (id = options_next(ctl)) != OPTION_END) {
		switch (id) {
		case 'n':
			if (format_parse_number(optarg, UINT64_MAX, &watch->count) || !watch->count)
				r = ctl_usage("--count: \"%s\" is not a number above 0", optarg);
			break;
		case OPTION_EVENTS:
			r = parse_events(watch, optarg);
			break;
		default:
			r = CTL_USAGE;
		}
	}
	if (!r && ctl->argv[optind])
		r = ctl_usage("takes no argument \"%s\"", ctl->argv[optind]);
	return r;
}

static int run(Ctl *ctl) {
	Watch watch = { .ctl = ctl, .mask = SHMB_EVENT_MASK_ALL };
	int r;

	r = parse(&watch);
	if (r)
		return r;
	r = live_init();
	if (r)
		return ctl_fail(r, "signals");
	r = ctl_connect(ctl, SHMB_NO_LEASE_PAGE);
	return r ?: follow(&watch);
}

const Verb verb_watch = {
	.name = "watch",
	.arguments = "",
	.help = "prints what happens, one event a line",
	.options = options,
	.run = run,
};
