/* SPDX-License-Identifier: Apache-2.0 */

/*
 * rtt: what the broker adds to a message that goes there and back.
 *
 * A shape is a request and a number of connections, on each of which it is sent once before the replies are received.
 * Every shape is measured through a broker of each engine and through a bare server that answers the same bytes with
 * as many as the broker: recv and send of a blocking socket for one connection, epoll_wait, recv and send for
 * more. All of them share one CPU: who sleeps on different CPUs measures how fast this machine wakes them up.
 * A sample is nanoseconds a message. Leases are given back between the measured times.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bench.h"
#include "raw.h"
#include "wire/fd.h"

#define ROUNDS 300
#define ROUNDS_QUICK 3
#define SAMPLE_NS 300000
#define CONNECTIONS_MAX 512
#define CONNECTIONS_QUICK 8
#define EPOLL_EVENTS 256
#define REGIONS WIRE_BATCH_MAX
#define REGION_SIZE 4096
#define LEASES_HELD 64
#define N_ENGINES 2

typedef struct Shape Shape;
typedef struct Trip Trip;
typedef struct Engine Engine;
typedef struct Rtt Rtt;

struct Shape {
	const char *name;
	uint32_t connections;
	uint32_t batch; /* lookups a message, 0: it is a PING */
	uint16_t flags; /* of the lookups */
	bool by_batch;	/* the row's n */
	bool owner;	/* a session that may register, too, from which the broker receives in another way */
};

static const Shape shapes[] = {
	{ .name = "ping", .connections = 1 },
	{ .name = "ping", .connections = 8 },
	{ .name = "ping", .connections = 64 },
	{ .name = "ping", .connections = 512 },
	{ .name = "ping-owner", .connections = 1, .owner = true },
	{ .name = "lookup", .connections = 1, .batch = 1 },
	{ .name = "lookup", .connections = 8, .batch = 1 },
	{ .name = "lookup", .connections = 64, .batch = 1 },
	{ .name = "lookup", .connections = 512, .batch = 1 },
	{ .name = "lookup-owner", .connections = 1, .batch = 1, .owner = true },
	{ .name = "resolve", .connections = 1, .batch = 1, .flags = WIRE_LOOKUP_NO_LEASE },
	{ .name = "lookup-batch", .connections = 1, .batch = 1, .by_batch = true },
	{ .name = "lookup-batch", .connections = 1, .batch = 16, .by_batch = true },
	{ .name = "lookup-batch", .connections = 1, .batch = 64, .by_batch = true },
	{ .name = "resolve-batch", .connections = 1, .batch = 64, .by_batch = true, .flags = WIRE_LOOKUP_NO_LEASE },
};

#define N_SHAPES (sizeof(shapes) / sizeof(shapes[0]))

/* one way of a shape: the data of a case */
struct Trip {
	const Shape *shape;
	const RawMessage *request;
	const int *fds;	    /* one a connection */
	bool leases;	    /* replies bring leases, which go back */
	uint32_t at_a_time; /* rounds over all connections that are measured in one go */
	uint8_t *replies;   /* of all these rounds */
};

struct Engine {
	const char *name;
	Broker broker;
	int owner; /* whose regions are looked up */
	int all_roles;
	int *consumers;
};

struct Rtt {
	uint32_t n_connections;
	Engine engines[N_ENGINES];
	size_t n_engines;
	RawServer blocking;
	RawServer polling;
	RawMessage requests[N_SHAPES];
	Trip trips[N_SHAPES * (N_ENGINES + 1)];
	BenchCase cases[N_SHAPES * (N_ENGINES + 1)];
	size_t n_cases;
	uint8_t *replies;
};

/* ---- the bare servers ---- */

/* false when the connection is over */
static bool answer(int fd, uint8_t *buffer) {
	const WireHeader *header = (const WireHeader *)buffer;
	ssize_t size = recv(fd, buffer, WIRE_MESSAGE_MAX, 0);

	return size >= (ssize_t)sizeof(*header) && send(fd, buffer, header->serial, MSG_NOSIGNAL) >= 0;
}

static void serve_blocking(const int *fds, size_t n) {
	static uint8_t buffer[WIRE_MESSAGE_MAX] __attribute__((aligned(8)));

	(void)n;
	while (answer(fds[0], buffer))
		;
}

static void serve_polling(const int *fds, size_t n) {
	static uint8_t buffer[WIRE_MESSAGE_MAX] __attribute__((aligned(8)));
	struct epoll_event events[EPOLL_EVENTS];
	int epoll = epoll_create1(EPOLL_CLOEXEC);

	for (size_t i = 0; i < n; ++i) {
		struct epoll_event event = { .events = EPOLLIN, .data.fd = fds[i] };

		if (epoll_ctl(epoll, EPOLL_CTL_ADD, fds[i], &event) < 0)
			return;
	}
	while (n) {
		int n_events = epoll_wait(epoll, events, EPOLL_EVENTS, -1);

		if (n_events < 0 && errno != EINTR)
			return;
		for (int i = 0; i < n_events; ++i) {
			if (answer(events[i].data.fd, buffer))
				continue;
			(void)close(events[i].data.fd);
			n--;
		}
	}
}

/* ---- the measured side ---- */

static uint8_t *trip_reply(const Trip *trip, uint32_t i) {
	return trip->replies + i * trip->request->reply_size;
}

static void trip_round(const Trip *trip, uint32_t round) {
	uint32_t n = trip->shape->connections;
	const RawMessage *request = trip->request;

	for (uint32_t i = 0; i < n; ++i)
		if (send(trip->fds[i], request->bytes, request->size, MSG_NOSIGNAL) < 0)
			bench_die("%s: send: %s", trip->shape->name, strerror(errno));
	for (uint32_t i = 0; i < n; ++i) {
		ssize_t size = recv(trip->fds[i], trip_reply(trip, round * n + i), request->reply_size, MSG_TRUNC);

		if (size != (ssize_t)request->reply_size)
			bench_die("%s: a reply of %zd bytes, not %zu", trip->shape->name, size, request->reply_size);
	}
}

static void release(int fd, const uint64_t *leases, uint32_t n) {
	uint8_t reply[sizeof(WireHeader) + sizeof(WireCountHead) + WIRE_BATCH_MAX * sizeof(WireReleaseResult)]
		__attribute__((aligned(8)));
	RawMessage request;
	size_t size;

	raw_release(&request, leases, n);
	size = raw_call(fd, &request, NULL, 0, reply, sizeof(reply));
	(void)raw_check_results(reply, size, sizeof(WireReleaseResult), n);
}

static void trip_release(const Trip *trip, uint32_t n_rounds) {
	uint32_t n = trip->shape->connections, n_leases;
	uint64_t leases[WIRE_BATCH_MAX];

	for (uint32_t i = 0; i < n; ++i) {
		n_leases = 0;
		for (uint32_t round = 0; round < n_rounds; ++round) {
			const WireLookupResult *results =
				raw_check_results(trip_reply(trip, round * n + i), trip->request->reply_size,
						  sizeof(*results), trip->shape->batch);

			for (uint32_t j = 0; j < trip->shape->batch; ++j)
				leases[n_leases++] = results[j].lease;
		}
		release(trip->fds[i], leases, n_leases);
	}
}

static uint64_t trip_rounds(const Trip *trip, uint32_t n) {
	uint64_t begin = bench_now_ns(), ns;

	for (uint32_t i = 0; i < n; ++i)
		trip_round(trip, i);
	ns = bench_now_ns() - begin;
	if (trip->leases)
		trip_release(trip, n);
	return ns;
}

static uint64_t trip_run(void *data, uint64_t count) {
	const Trip *trip = data;
	uint32_t n = trip->shape->connections;
	uint64_t rounds = (count + n - 1) / n, ns = 0;

	/* the case before has left nothing of ours in the caches */
	(void)trip_rounds(trip, trip->at_a_time);
	for (uint64_t done = 0; done < rounds;) {
		uint32_t go = rounds - done < trip->at_a_time ? (uint32_t)(rounds - done) : trip->at_a_time;

		ns += trip_rounds(trip, go);
		done += go;
	}
	return ns * count / (rounds * n);
}

/* ---- the whole ---- */

static void engine_register(Engine *engine) {
	int rw = raw_memory((uint64_t)REGIONS * REGION_SIZE), read_only = raw_reopen(rw);
	uint8_t reply[RAW_MESSAGE_MAX] __attribute__((aligned(8)));
	RawRegion regions[REGIONS];
	RawMessage request;
	size_t size;

	for (uint32_t i = 0; i < REGIONS; ++i)
		regions[i] = (RawRegion){
			.offset = (uint64_t)i * REGION_SIZE,
			.size = REGION_SIZE,
			.access = WIRE_ACCESS_READ | WIRE_ACCESS_WRITE,
			.fd_index = 0,
			.read_only_fd_index = 1,
		};
	raw_register(&request, regions, 0, REGIONS);
	size = raw_call(engine->owner, &request, (int[]){ rw, read_only }, 2, reply, sizeof(reply));
	(void)raw_check_results(reply, size, sizeof(WireRegisterResult), REGIONS);
	(void)close(rw);
	(void)close(read_only);
}

static void rtt_add_engine(Rtt *rtt, Bench *bench, const char *name) {
	Engine *engine = &rtt->engines[rtt->n_engines];

	engine->name = name;
	if (!broker_start(bench, &engine->broker, "shared_uid = yes\nfair_share = no\n", name, 0))
		return;
	rtt->n_engines++;
	engine->owner = raw_connect(engine->broker.socket, WIRE_ROLE_OWNER);
	engine_register(engine);
	engine->all_roles = raw_connect(engine->broker.socket, WIRE_ROLE_OWNER | WIRE_ROLE_CONSUMER);
	engine->consumers = calloc(rtt->n_connections, sizeof(*engine->consumers));
	if (!engine->consumers)
		bench_die("out of memory");
	for (uint32_t i = 0; i < rtt->n_connections; ++i)
		engine->consumers[i] = raw_connect(engine->broker.socket, WIRE_ROLE_CONSUMER);
}

static void shape_request(const Shape *shape, RawMessage *ret) {
	if (shape->batch)
		raw_lookup(ret, shape->batch, shape->flags);
	else
		raw_ping(ret);
}

static void shape_describe(const Shape *shape, char *ret, size_t size) {
	int n = snprintf(ret, size, "%u connection%s%s", shape->connections, shape->connections > 1 ? "s" : "",
			 shape->owner ? " of an owner" : "");

	if (shape->batch)
		(void)snprintf(ret + n, size - (size_t)n, ", %u lookup%s a message, %s", shape->batch,
			       shape->batch > 1 ? "s" : "",
			       shape->flags & WIRE_LOOKUP_NO_LEASE ? "no leases"
								   : "leases given back outside of the time");
}

static void rtt_add_case(Rtt *rtt, size_t i, const Engine *engine, int baseline) {
	const Shape *shape = &shapes[i];
	BenchCase *new = &rtt->cases[rtt->n_cases];
	Trip *trip = &rtt->trips[rtt->n_cases++];
	uint32_t at_once = shape->connections > 1 ? 1 : LEASES_HELD / (shape->batch ?: 1);

	*trip = (Trip){
		.shape = shape,
		.request = &rtt->requests[i],
		.leases = engine && shape->batch && !(shape->flags & WIRE_LOOKUP_NO_LEASE),
		.at_a_time = at_once,
		.replies = rtt->replies,
	};
	if (!engine)
		trip->fds = shape->connections > 1 ? rtt->polling.fds : rtt->blocking.fds;
	else
		trip->fds = shape->owner ? &engine->all_roles : engine->consumers;
	*new = (BenchCase){
		.row = {
			.n = shape->by_batch ? shape->batch : shape->connections,
			.threads = 1,
			.unit = "ns",
		},
		.run = trip_run,
		.data = trip,
		.baseline = baseline,
		.sample_ns = SAMPLE_NS,
	};
	if (engine)
		(void)snprintf(new->row.name, sizeof(new->row.name), "%s-%s", shape->name, engine->name);
	else
		(void)snprintf(new->row.name, sizeof(new->row.name), "echo-%s", shape->name);
	shape_describe(shape, new->row.detail, sizeof(new->row.detail));
}

static void rtt_add_cases(Rtt *rtt) {
	size_t room = 0;

	for (size_t i = 0; i < N_SHAPES; ++i) {
		size_t replies = shapes[i].connections > 1 ? shapes[i].connections : LEASES_HELD;

		shape_request(&shapes[i], &rtt->requests[i]);
		if (replies * rtt->requests[i].reply_size > room)
			room = replies * rtt->requests[i].reply_size;
	}
	rtt->replies = malloc(room);
	if (!rtt->replies)
		bench_die("out of memory");
	for (size_t i = 0; i < N_SHAPES; ++i) {
		int baseline = (int)rtt->n_cases;

		if (shapes[i].connections > rtt->n_connections)
			continue;
		rtt_add_case(rtt, i, NULL, -1);
		for (size_t j = 0; j < rtt->n_engines; ++j)
			rtt_add_case(rtt, i, &rtt->engines[j], baseline);
	}
}

static void rtt_free(Rtt *rtt) {
	for (size_t i = 0; i < rtt->n_engines; ++i) {
		Engine *engine = &rtt->engines[i];

		for (uint32_t j = 0; j < rtt->n_connections; ++j)
			(void)close(engine->consumers[j]);
		free(engine->consumers);
		(void)close(engine->all_roles);
		(void)close(engine->owner);
		broker_stop(&engine->broker);
	}
	raw_server_stop(&rtt->polling);
	raw_server_stop(&rtt->blocking);
	free(rtt->replies);
	free(rtt);
}

static int rtt_run(Bench *bench) {
	Rtt *rtt = calloc(1, sizeof(*rtt));

	if (!rtt)
		bench_die("out of memory");
	rtt->n_connections = bench->quick ? CONNECTIONS_QUICK : CONNECTIONS_MAX;
	raw_need_fds((N_ENGINES + 1) * rtt->n_connections + 64);
	if (!bench_pin(0))
		bench_die("this thread cannot be bound to a CPU");
	raw_server_start(&rtt->blocking, 1, serve_blocking);
	raw_server_start(&rtt->polling, rtt->n_connections, serve_polling);
	rtt_add_engine(rtt, bench, "io_uring");
	rtt_add_engine(rtt, bench, "epoll");
	rtt_add_cases(rtt);
	bench_measure(bench, rtt->cases, rtt->n_cases, bench->quick ? ROUNDS_QUICK : ROUNDS);
	rtt_free(rtt);
	return 0;
}

const BenchCommand bench_rtt = {
	.name = "rtt",
	.help = "PING and LOOKUP through each engine of the loop against a bare echo of the same size",
	.run = rtt_run,
};
