/* SPDX-License-Identifier: Apache-2.0 */

/*
 * register: what the broker adds to taking fds.
 *
 * A shape is one REGISTER message: so many fds of memory of one size, each or each pair of which is a region. It goes
 * to a broker of each engine and to a bare server that receives the same message, asks each fd for its seals and its
 * size, closes it and answers with as many bytes as the broker. Brokers with "kept: on" are supervised, and park the
 * fds outside their process before they reply. All share one CPU, as in rtt. A sample is nanoseconds
 * a message. Between the measured times regions are retired and the broker's closes waited for; a PING before the
 * next message finds both sides asleep and leaves them awake, as one bare message after the other does.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench.h"
#include "raw.h"
#include "wire/fd.h"

#define ROUNDS 200
#define ROUNDS_QUICK 3
#define SAMPLE_NS 200000
#define N_SIZES 3
#define N_ENGINES 2
#define MESSAGES_MAX 16
#define KIB UINT64_C(1024)

typedef struct Configuration Configuration;
typedef struct Kind Kind;
typedef struct Shape Shape;
typedef struct Target Target;
typedef struct Registration Registration;
typedef struct Register Register;

/* what the brokers under test differ in, besides their engine */
struct Configuration {
	const char *text; /* in the rows */
	bool is_kept;	  /* supervised: fds are parked outside the broker before it replies */
};

static const Configuration configurations[] = {
	{ .text = "kept: off" },
	{ .text = "kept: on", .is_kept = true },
};

#define CONFIG "shared_uid = yes\nfair_share = no\n"

#define N_CONFIGURATIONS (sizeof(configurations) / sizeof(configurations[0]))

/* which fds a region has */
struct Kind {
	const char *name;
	const char *text;
	bool writable;
	bool companion;
};

static const Kind kinds[] = {
	{ "pair", "each with its read-only fd", true, true }, /* as the client library does */
	{ "read-only", "fds opened read-only", false, false },
	{ "alone", "without read-only fds", true, false },
};

#define N_KINDS (sizeof(kinds) / sizeof(kinds[0]))

static const struct {
	uint64_t bytes;
	const char *text;
} sizes[N_SIZES] = {
	{ 4 * KIB, "4 KiB" },
	{ KIB * KIB, "1 MiB" },
	{ KIB * KIB * KIB, "1 GiB" },
};

/* fds of a message; 1: of one region */
static const struct {
	uint32_t n_fds;
	uint32_t n_messages;
} batches[] = { { 1, MESSAGES_MAX }, { 16, 4 }, { 64, 1 } };

#define N_BATCHES (sizeof(batches) / sizeof(batches[0]))
#define N_SHAPES (N_KINDS * N_SIZES * N_BATCHES)
#define N_TARGETS (N_CONFIGURATIONS * N_ENGINES)

/* messages that differ in names and memory alone and are sent one after the other */
struct Shape {
	const Kind *kind;
	size_t size;
	uint32_t n_regions; /* a message */
	uint32_t n_fds;
	uint32_t n_messages;
	RawMessage *messages;
	int fds[MESSAGES_MAX][WIRE_FDS_MAX]; /* borrowed */
};

struct Target {
	const Configuration *configuration;
	const char *engine;
	Broker broker;
	int socket;
};

/* the data of a case */
struct Registration {
	const Shape *shape;
	const RawMessage *retire; /* NULL for the bare server */
	const RawMessage *ping;
	int socket;
};

struct Register {
	int writable[N_SIZES][WIRE_FDS_MAX];
	int read_only[N_SIZES][WIRE_FDS_MAX];
	Shape shapes[N_SHAPES];
	RawMessage retire;
	RawMessage ping;
	RawServer bare;
	Target targets[N_TARGETS];
	size_t n_targets;
	Registration registrations[N_SHAPES * (N_TARGETS + 1)];
	BenchCase cases[N_SHAPES * (N_TARGETS + 1)];
	size_t n_cases;
};

/* ---- the bare server ---- */

static void serve(const int *fds, size_t n) {
	static uint8_t buffer[WIRE_MESSAGE_MAX] __attribute__((aligned(8)));
	const WireHeader *header = (const WireHeader *)buffer;
	int received[WIRE_FDS_ROOM];
	FdMessage message;
	struct stat st;

	(void)n;
	while (!fd_receive(fds[0], buffer, sizeof(buffer), 0, received, &message) && message.size >= sizeof(*header)) {
		for (size_t i = 0; i < message.n_fds; ++i) {
			if (fd_seals(received[i]) < 0 || fstat(received[i], &st) < 0)
				return;
			(void)close(received[i]);
		}
		if (send(fds[0], buffer, header->serial, MSG_NOSIGNAL) < 0)
			return;
	}
}

/* ---- the measured side ---- */

static void registration_retire(const Registration *registration, uint32_t n_messages) {
	const Shape *shape = registration->shape;
	const WireUnregisterReply *gone;
	uint8_t reply[sizeof(WireHeader) + sizeof(*gone)] __attribute__((aligned(8)));

	(void)raw_call(registration->socket, registration->retire, NULL, 0, reply, sizeof(reply));
	gone = (const WireUnregisterReply *)(const void *)(reply + sizeof(WireHeader));
	if (gone->gone != shape->n_regions * n_messages)
		bench_die("register: %u of %u regions are gone", gone->gone, shape->n_regions * n_messages);
	raw_wait_closed(registration->socket);
	(void)raw_call(registration->socket, registration->ping, NULL, 0, reply, sizeof(reply));
}

static uint64_t registration_send(const Registration *registration, uint32_t n_messages) {
	const Shape *shape = registration->shape;
	uint8_t reply[RAW_MESSAGE_MAX] __attribute__((aligned(8)));
	uint64_t begin = bench_now_ns(), ns;

	for (uint32_t i = 0; i < n_messages; ++i) {
		const RawMessage *request = &shape->messages[i];
		ssize_t size;
		int r;

		r = fd_send(registration->socket, request->bytes, request->size, shape->fds[i], shape->n_fds, 0);
		if (r)
			bench_die("register: sending: %s", strerror(-r));
		size = recv(registration->socket, reply, sizeof(reply), MSG_TRUNC);
		if (size != (ssize_t)request->reply_size)
			bench_die("register: a reply of %zd bytes, not %zu", size, request->reply_size);
	}
	ns = bench_now_ns() - begin;
	if (registration->retire) {
		(void)raw_check_results(reply, shape->messages[0].reply_size, sizeof(WireRegisterResult),
					shape->n_regions);
		registration_retire(registration, n_messages);
	}
	return ns;
}

static uint64_t registration_run(void *data, uint64_t count) {
	const Registration *registration = data;
	uint64_t ns = 0;

	/* the case before has left nothing of ours in the caches */
	(void)registration_send(registration, 1);
	for (uint64_t done = 0; done < count;) {
		uint32_t max = registration->shape->n_messages, n = count - done < max ? (uint32_t)(count - done) : max;

		ns += registration_send(registration, n);
		done += n;
	}
	return ns;
}

/* ---- the whole ---- */

static void register_make_memory(Register *bench) {
	for (size_t i = 0; i < N_SIZES; ++i) {
		for (size_t j = 0; j < WIRE_FDS_MAX; ++j) {
			bench->writable[i][j] = raw_memory(sizes[i].bytes);
			bench->read_only[i][j] = raw_reopen(bench->writable[i][j]);
		}
	}
}

static void shape_make_message(Shape *shape, const Register *bench, uint32_t message) {
	bool companion = shape->kind->companion;
	uint32_t first = message * shape->n_regions, n_fds = 0;
	int *fds = shape->fds[message];
	RawRegion regions[WIRE_BATCH_MAX];

	for (uint32_t i = 0; i < shape->n_regions; ++i) {
		regions[i] = (RawRegion){
			.size = sizes[shape->size].bytes,
			.access = WIRE_ACCESS_READ | (shape->kind->writable ? WIRE_ACCESS_WRITE : 0),
			.fd_index = (uint16_t)n_fds,
			.read_only_fd_index = companion ? (uint16_t)(n_fds + 1) : WIRE_NO_FD,
		};
		fds[n_fds++] = shape->kind->writable ? bench->writable[shape->size][first + i]
						     : bench->read_only[shape->size][first + i];
		if (companion)
			fds[n_fds++] = bench->read_only[shape->size][first + i];
	}
	raw_register(&shape->messages[message], regions, first, shape->n_regions);
}

static void register_make_shape(const Register *bench, Shape *ret, const Kind *kind, size_t size, size_t batch) {
	uint32_t per_region = kind->companion ? 2 : 1, n = batches[batch].n_fds;

	*ret = (Shape){
		.kind = kind,
		.size = size,
		.n_regions = n > per_region ? n / per_region : 1,
		.n_fds = n > per_region ? n : per_region,
		.n_messages = batches[batch].n_messages,
		.messages = malloc(batches[batch].n_messages * sizeof(*ret->messages)),
	};
	if (!ret->messages)
		bench_die("out of memory");
	for (uint32_t i = 0; i < ret->n_messages; ++i)
		shape_make_message(ret, bench, i);
}

static void register_make_shapes(Register *bench) {
	Shape *shape = bench->shapes;

	for (size_t i = 0; i < N_KINDS; ++i)
		for (size_t j = 0; j < N_SIZES; ++j)
			for (size_t k = 0; k < N_BATCHES; ++k)
				register_make_shape(bench, shape++, &kinds[i], j, k);
}

static void register_add_target(Register *bench, Bench *options, const Configuration *configuration,
				const char *engine) {
	Target *target = &bench->targets[bench->n_targets];

	target->configuration = configuration;
	target->engine = engine;
	if (!(configuration->is_kept ? broker_start_supervised : broker_start)(options, &target->broker, CONFIG, engine,
									       0))
		return;
	bench->n_targets++;
	target->socket = raw_connect(target->broker.socket, WIRE_ROLE_OWNER);
}

static void register_add_case(Register *bench, const Shape *shape, const Target *target, int baseline) {
	BenchCase *new = &bench->cases[bench->n_cases];
	Registration *registration = &bench->registrations[bench->n_cases++];

	*registration = (Registration){
		.shape = shape,
		.retire = target ? &bench->retire : NULL,
		.ping = &bench->ping,
		.socket = target ? target->socket : bench->bare.fds[0],
	};
	*new = (BenchCase){
		.row = { .n = shape->n_fds, .threads = 1, .unit = "ns" },
		.run = registration_run,
		.data = registration,
		.baseline = baseline,
		.sample_ns = SAMPLE_NS,
	};
	if (target)
		(void)snprintf(new->row.name, sizeof(new->row.name), "register-%s-%s", shape->kind->name,
			       target->engine);
	else
		(void)snprintf(new->row.name, sizeof(new->row.name), "bare-%s", shape->kind->name);
	(void)snprintf(new->row.detail, sizeof(new->row.detail), "%s, %u region%s, %s%s%s", sizes[shape->size].text,
		       shape->n_regions, shape->n_regions > 1 ? "s" : "", shape->kind->text, target ? ", " : "",
		       target ? target->configuration->text : "");
}

static void register_add_cases(Register *bench) {
	for (size_t i = 0; i < N_SHAPES; ++i) {
		int baseline = (int)bench->n_cases;

		register_add_case(bench, &bench->shapes[i], NULL, -1);
		for (size_t j = 0; j < bench->n_targets; ++j)
			register_add_case(bench, &bench->shapes[i], &bench->targets[j], baseline);
	}
}

static void register_free(Register *bench) {
	for (size_t i = 0; i < bench->n_targets; ++i) {
		(void)close(bench->targets[i].socket);
		broker_stop(&bench->targets[i].broker);
	}
	raw_server_stop(&bench->bare);
	for (size_t i = 0; i < N_SHAPES; ++i)
		free(bench->shapes[i].messages);
	for (size_t i = 0; i < N_SIZES; ++i) {
		for (size_t j = 0; j < WIRE_FDS_MAX; ++j) {
			(void)close(bench->writable[i][j]);
			(void)close(bench->read_only[i][j]);
		}
	}
	free(bench);
}

static int register_run(Bench *options) {
	Register *bench = calloc(1, sizeof(*bench));

	if (!bench)
		bench_die("out of memory");
	raw_need_fds(N_SIZES * WIRE_FDS_MAX * 2 + 64);
	if (!bench_pin(0))
		bench_die("this thread cannot be bound to a CPU");
	raw_server_start(&bench->bare, 1, serve);
	register_make_memory(bench);
	register_make_shapes(bench);
	raw_unregister_all(&bench->retire);
	raw_ping(&bench->ping);
	for (size_t i = 0; i < N_CONFIGURATIONS; ++i) {
		register_add_target(bench, options, &configurations[i], "io_uring");
		register_add_target(bench, options, &configurations[i], "epoll");
	}
	register_add_cases(bench);
	bench_measure(options, bench->cases, bench->n_cases, options->quick ? ROUNDS_QUICK : ROUNDS);
	register_free(bench);
	return 0;
}

const BenchCommand bench_register = {
	.name = "register",
	.help = "REGISTER of one fd and of batches against the bare cost of the same message",
	.run = register_run,
};
