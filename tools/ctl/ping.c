/* SPDX-License-Identifier: Apache-2.0 */

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>

#include "format.h"
#include "live.h"
#include "options.h"
#include "output.h"

static const Option options[] = {
	{ 'c', "count", "N", "so many times (1)" },
	{ 'i', "interval", "DURATION", "time between two (1s)" },
	{},
};

typedef struct Ping {
	Ctl *ctl;
	uint64_t count;
	int interval; /* ms */
	uint64_t sent;
	uint64_t min, max, sum; /* ns */
	json_object *pings;
} Ping;

static int ping_once(Ping *ping) {
	char buffer[FORMAT_MAX];
	json_object *row;
	uint64_t ns;
	int r;

	r = shmb_client_ping(ping->ctl->client, &ns);
	if (r)
		return ctl_fail(r, "ping");
	if (!ping->sent || ns < ping->min)
		ping->min = ns;
	if (ns > ping->max)
		ping->max = ns;
	ping->sum += ns;
	ping->sent++;
	if (!ping->ctl->json) {
		printf("%" PRIu64 ": %s\n", ping->sent, format_duration(ns, buffer));
		fflush(stdout);
		return 0;
	}
	row = row_new();
	row_number(row, "sequence", ping->sent);
	row_number(row, "time", ns);
	if (json_object_array_add(ping->pings, row) < 0)
		ctl_must(NULL);
	return 0;
}

static void print_summary(Ping *ping) {
	char min[FORMAT_MAX], mean[FORMAT_MAX], max[FORMAT_MAX];
	json_object *document;

	if (ping->ctl->json) {
		document = row_new();
		row_object(document, "pings", json_object_get(ping->pings));
		row_number(document, "min", ping->min);
		row_number(document, "mean", ping->sum / ping->sent);
		row_number(document, "max", ping->max);
		json_print(document);
		json_object_put(document);
	} else if (ping->sent > 1) {
		printf("%" PRIu64 " times: least %s, mean %s, most %s\n", ping->sent, format_duration(ping->min, min),
		       format_duration(ping->sum / ping->sent, mean), format_duration(ping->max, max));
	}
}

static int ping_all(Ping *ping) {
	int r;

	for (;;) {
		r = ping_once(ping);
		if (r)
			return r;
		if (ping->sent == ping->count)
			break;
		r = live_wait(-1, ping->interval);
		if (r < 0)
			return ctl_fail(r, "waiting");
		if (r == LIVE_STOP)
			break;
	}
	print_summary(ping);
	return 0;
}

static int parse(Ping *ping) {
	Ctl *ctl = ping->ctl;
	uint64_t ns;
	int id;

	while ((id = options_next(ctl)) != OPTION_END) {
		switch (id) {
		case 'c':
			if (format_parse_number(optarg, UINT32_MAX, &ping->count) || !ping->count)
				return ctl_usage("--count: \"%s\" is not a number above 0", optarg);
			break;
		case 'i':
			if (format_parse_duration(optarg, &ns) || ns / 1000000 > INT32_MAX)
				return ctl_usage("--interval: \"%s\" is not a duration with ms, s or min", optarg);
			ping->interval = (int)(ns / 1000000);
			break;
		default:
			return CTL_USAGE;
		}
	}
	if (ctl->argv[optind])
		return ctl_usage("takes no argument \"%s\"", ctl->argv[optind]);
	return 0;
}

static int run(Ctl *ctl) {
	Ping ping = { .ctl = ctl, .count = 1, .interval = 1000 };
	int r;

	r = parse(&ping);
	if (r)
		return r;
	if (ping.count > 1) {
		r = live_init();
		if (r)
			return ctl_fail(r, "signals");
	}
	r = ctl_connect(ctl, SHMB_NO_LEASE_PAGE);
	if (r)
		return r;
	ping.pings = ctl_must(json_object_new_array());
	r = ping_all(&ping);
	json_object_put(ping.pings);
	return r;
}

const Verb verb_ping = {
	.name = "ping",
	.arguments = "",
	.help = "asks whether the broker answers, and how fast",
	.options = options,
	.run = run,
};
