/* SPDX-License-Identifier: Apache-2.0 */

/*
 * scale, the clients: a broker with more and more connections, which have no lease pages, and one with more and more
 * consumers that have, of which some have mapped the region that is retired.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "raw.h"
#include "regions.h"
#include "scale.h"

#define WINDOW_SIZE 4096
#define WALKS 20
#define PINGS 2000
#define PINGS_QUICK 20
#define WATCHED_ROUNDS 300
#define WATCHED_ROUNDS_QUICK 3
#define RETIRE_ROUNDS 50
#define RETIRE_ROUNDS_QUICK 3
#define RETIRE_TIMEOUT_MS 30000

static const uint32_t connection_steps[] = { 10, 100, 1000, 8000 };
static const uint32_t connection_steps_quick[] = { 10, 20 };
static const uint32_t consumer_steps[] = { 10, 100, 1000 };
static const uint32_t consumer_steps_quick[] = { 4, 8 };

/* ---- connections ---- */

typedef struct Connections {
	Broker broker;
	struct shmb_client *admin;
	struct shmb_client *owner;
	int *fds;
	uint32_t n;
	uint64_t rss;
	double *samples;
	uint64_t random;
	Curve connects, pings, watched, pages;
} Connections;

static void connections_add(Connections *connections, Bench *bench, uint32_t n) {
	uint32_t before = connections->n;
	uint64_t rss;
	char detail[96];

	while (connections->n < n) {
		uint64_t begin = bench_now_ns();

		connections->fds[connections->n] = raw_connect(connections->broker.socket, SHMB_ROLE_CONSUMER);
		connections->samples[connections->n - before] = (double)(bench_now_ns() - begin) / 1000;
		connections->n++;
	}
	rss = broker_rss(&connections->broker);
	curve_sample(&connections->connects, bench, "connect", n, "us", "socket, connect and HELLO",
		     connections->samples, n - before);
	(void)snprintf(detail, sizeof(detail), "since there were %u", before);
	scale_number(bench, "rss-per-connection", n, "bytes", detail, (double)(rss - connections->rss) / (n - before));
	scale_number(bench, "connection-fds", n, "fds", "all of the broker", (double)broker_fds(&connections->broker));
	connections->rss = rss;
}

static void connections_ping(Connections *connections, Bench *bench) {
	uint8_t reply[256] __attribute__((aligned(8)));
	uint32_t n_pings = bench->quick ? PINGS_QUICK : PINGS;
	RawMessage ping;

	raw_ping(&ping);
	for (uint32_t i = 0; i < n_pings; ++i) {
		int fd = connections->fds[scale_random(&connections->random) % connections->n];
		uint64_t begin = bench_now_ns();

		(void)raw_call(fd, &ping, NULL, 0, reply, sizeof(reply));
		connections->samples[i] = (double)(bench_now_ns() - begin) / 1000;
	}
	curve_sample(&connections->pings, bench, "ping-among", connections->n, "us",
		     "one PING of a random connection, the others are idle", connections->samples, n_pings);
}

static void drain_events(struct shmb_client *client) {
	struct shmb_event event;
	int r;

	while (!(r = shmb_client_next_event(client, &event, 0)))
		;
	if (r != SHMB_E_TIMED_OUT)
		check(r, "receiving events");
}

/* one of the clients wants to know of everything; the others want nothing */
static void connections_watched(Connections *connections, Bench *bench) {
	uint32_t rounds = bench->quick ? WATCHED_ROUNDS_QUICK : WATCHED_ROUNDS;
	int fd = raw_memory(WINDOW_SIZE);

	check(shmb_client_subscribe(connections->admin, SHMB_EVENT_MASK_ALL), "subscribing");
	for (uint32_t i = 0; i < rounds; ++i) {
		struct shmb_region *region;
		uint64_t begin = bench_now_ns();

		check(shmb_region_adopt(connections->owner, "bench.watched", fd, 0, WINDOW_SIZE, NULL, &region),
		      "registering");
		connections->samples[i] = (double)(bench_now_ns() - begin) / 1000;
		check(shmb_region_retire(region, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, RETIRE_TIMEOUT_MS), "retiring");
		shmb_region_free(region);
		drain_events(connections->admin);
	}
	check(shmb_client_subscribe(connections->admin, 0), "unsubscribing");
	(void)close(fd);
	curve_sample(&connections->watched, bench, "register-among", connections->n, "us",
		     "one region, while one client watches all events", connections->samples, rounds);
}

static int count_client(void *userdata, const struct shmb_client_status *status) {
	(void)status;
	++*(uint32_t *)userdata;
	return 0;
}

static uint32_t clients_walk(struct shmb_client *client) {
	uint32_t n = 0;

	check(shmb_client_each_client(client, count_client, &n), "listing clients");
	return n;
}

/* the list of clients, page by page; the last ones are the farthest from the list's beginning */
static void connections_list(Connections *connections, Bench *bench) {
	uint64_t first = client_stat(connections->admin, "messages"),
		 second = client_stat(connections->admin, "messages");
	uint64_t n_pages, begin;
	char detail[96];

	if (clients_walk(connections->admin) != connections->n + 2)
		bench_die("not all connections are listed");
	n_pages = client_stat(connections->admin, "messages") - second - (second - first);
	for (uint32_t i = 0; i < WALKS; ++i) {
		begin = bench_now_ns();
		(void)clients_walk(connections->admin);
		connections->samples[i] = (double)(bench_now_ns() - begin) / 1000 / (double)n_pages;
	}
	(void)snprintf(detail, sizeof(detail), "a walk of %llu pages", (unsigned long long)n_pages);
	curve_sample(&connections->pages, bench, "clients-page", connections->n, "us", detail, connections->samples,
		     WALKS);
}

static void connections_close(Connections *connections, Bench *bench) {
	uint64_t begin = bench_now_ns();

	for (uint32_t i = 0; i < connections->n; ++i)
		(void)close(connections->fds[i]);
	while (client_stat(connections->admin, "sessions") > 2)
		;
	scale_number(bench, "disconnect", connections->n, "us", "all at once, until the broker has no session of them",
		     (double)(bench_now_ns() - begin) / 1000 / connections->n);
}

void scale_connections(Bench *bench) {
	Connections connections = { .random = SCALE_SEED };
	const uint32_t *steps;
	size_t n_steps;
	uint32_t max;

	steps = SCALE_STEPS(connection_steps, bench, &n_steps);
	max = steps[n_steps - 1];
	raw_need_fds(max + SCALE_CLIENT_FDS);
	connections.fds = calloc(max, sizeof(*connections.fds));
	connections.samples = calloc(max > PINGS ? max : PINGS, sizeof(*connections.samples));
	if (!connections.fds || !connections.samples)
		bench_die("out of memory");
	(void)broker_start(bench, &connections.broker, SCALE_CONFIG, "auto", 0);
	connections.admin = client_new(&connections.broker, SHMB_ROLE_CONSUMER, SHMB_NO_LEASE_PAGE);
	connections.owner = client_new(&connections.broker, SHMB_ROLE_OWNER, 0);
	connections.rss = broker_rss(&connections.broker);
	for (size_t i = 0; i < n_steps; ++i) {
		connections_add(&connections, bench, steps[i]);
		connections_ping(&connections, bench);
		connections_watched(&connections, bench);
		connections_list(&connections, bench);
	}
	connections_close(&connections, bench);
	curve_growth(&connections.connects, bench, "connect-growth");
	curve_growth(&connections.pings, bench, "ping-among-growth");
	curve_growth(&connections.watched, bench, "register-among-growth");
	curve_growth(&connections.pages, bench, "clients-page-growth");
	shmb_client_free(connections.owner);
	shmb_client_free(connections.admin);
	broker_stop(&connections.broker);
	free(connections.samples);
	free(connections.fds);
}

/* ---- retire among consumers ---- */

typedef struct Consumers {
	Broker broker;
	struct shmb_client *owner;
	struct shmb_client **attached;
	uint32_t n;
	uint32_t n_regions; /* made so far: names are not used again */
	double samples[2][RETIRE_ROUNDS];
	uint64_t pages[2]; /* read by the broker, of all rounds */
	Curve curves[2];
} Consumers;

/* retires a new region that the first @n_mappers consumers have mapped; @ret_pages are those that the broker read */
static double retire_among(Consumers *consumers, uint32_t n_mappers, uint64_t *ret_pages) {
	struct shmb_region *region;
	char name[REGION_NAME_SIZE];
	uint64_t begin, ns, pages;

	region_name(consumers->n_regions++, name);
	check(shmb_region_create(consumers->owner, name, WINDOW_SIZE, NULL, &region), name);
	for (uint32_t i = 0; i < n_mappers; ++i)
		region_acquire(consumers->attached[(uint64_t)i * consumers->n / n_mappers], name);
	pages = client_stat(consumers->owner, "pages_scanned");
	begin = bench_now_ns();
	check(shmb_region_retire(region, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, RETIRE_TIMEOUT_MS), name);
	ns = bench_now_ns() - begin;
	*ret_pages = client_stat(consumers->owner, "pages_scanned") - pages;
	shmb_region_free(region);
	return (double)ns / 1000;
}

static void consumers_retire(Consumers *consumers, Bench *bench) {
	static const char *const names[] = { "retire-among-one-mapper", "retire-among-half-mappers" };
	uint32_t n_mappers[] = { 1, consumers->n / 2 };
	uint32_t rounds = bench->quick ? RETIRE_ROUNDS_QUICK : RETIRE_ROUNDS;
	char detail[96];

	for (uint32_t round = 0; round < rounds; ++round) {
		for (size_t i = 0; i < 2; ++i) {
			uint64_t pages;

			consumers->samples[i][round] = retire_among(consumers, n_mappers[i], &pages);
			consumers->pages[i] += pages;
		}
	}
	for (size_t i = 0; i < 2; ++i) {
		(void)snprintf(detail, sizeof(detail), "strict, waited for; %u have it mapped, %.1f pages read",
			       n_mappers[i], (double)consumers->pages[i] / rounds);
		curve_sample(&consumers->curves[i], bench, names[i], consumers->n, "us", detail, consumers->samples[i],
			     rounds);
		consumers->pages[i] = 0;
	}
}

void scale_consumers(Bench *bench) {
	Consumers consumers = {};
	const uint32_t *steps;
	size_t n_steps;
	uint32_t max;

	steps = SCALE_STEPS(consumer_steps, bench, &n_steps);
	max = steps[n_steps - 1];
	raw_need_fds(3 * max + SCALE_CLIENT_FDS);
	consumers.attached = calloc(max, sizeof(struct shmb_client *));
	if (!consumers.attached)
		bench_die("out of memory");
	(void)broker_start(bench, &consumers.broker, SCALE_CONFIG, "auto", 0);
	consumers.owner = client_new(&consumers.broker, SHMB_ROLE_OWNER, 0);
	for (size_t i = 0; i < n_steps; ++i) {
		while (consumers.n < steps[i])
			consumers.attached[consumers.n++] =
				client_new(&consumers.broker, SHMB_ROLE_CONSUMER, SHMB_NO_POPULATE);
		consumers_retire(&consumers, bench);
	}
	curve_growth(&consumers.curves[0], bench, "retire-among-one-mapper-growth");
	curve_growth(&consumers.curves[1], bench, "retire-among-half-mappers-growth");
	for (uint32_t i = 0; i < consumers.n; ++i)
		shmb_client_free(consumers.attached[i]);
	shmb_client_free(consumers.owner);
	broker_stop(&consumers.broker);
	free(consumers.attached);
}
