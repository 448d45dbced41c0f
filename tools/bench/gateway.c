/* SPDX-License-Identifier: Apache-2.0 */

/*
 * gateway: what the doors of shmbroker-gateway cost over the broker's own socket.
 *
 * One broker has 100 regions. The same is done natively, through the client library, and over kept-alive connections on
 * loopback to the gateway's doors for HTTP and gRPC, with as little on this side as that takes: status of one region by its
 * name and of all, and registering a region by the name of POSIX shared memory and unregistering it. All processes share one
 * CPU. A sample is microseconds an operation.
 */

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <json-c/json.h>
#include <libgen.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "grpc.h"
#include "http.h"
#include "regions.h"

#define ROUNDS 100
#define ROUNDS_QUICK 3
#define SAMPLE_NS 5000000
#define N_REGIONS 100
#define REGION_SIZE 4096
#define EXTRA "bench.extra"
#define SERVICE "/inference.GRPCInferenceService/SystemSharedMemory"
#define BODY_MAX 65536
#define START_DEADLINE_NS UINT64_C(60000000000)
#define N_OPERATIONS 3
#define N_DOORS 3

typedef struct GatewayBench GatewayBench;

/* one region by its name, all regions, a region that comes and goes */
enum {
	STATUS_ONE,
	STATUS_ALL,
	REGISTER
};

/* the data of a case */
typedef struct Call {
	GatewayBench *bench;
	int operation;
} Call;

struct GatewayBench {
	Broker broker;
	pid_t gateway;
	struct shmb_client *client;
	Regions regions;
	int http;
	GrpcClient grpc;
	char key[64];		    /* of POSIX shared memory, with its slash */
	char one[REGION_NAME_SIZE]; /* name of a region */
	Call calls[N_DOORS * N_OPERATIONS];
	BenchCase cases[N_DOORS * N_OPERATIONS];
};

/* ---- the gateway ---- */

/* beside the broker, or in $PATH; the caller frees it. NULL where there is none. */
static char *find_gateway(const Bench *options) {
	char *copy = strdup(options->broker_path), *path = NULL;

	if (!copy || asprintf(&path, "%s/shmbroker-gateway", dirname(copy)) < 0)
		bench_die("out of memory");
	free(copy);
	if (!access(path, X_OK))
		return path;
	free(path);
	return bench_find_program("shmbroker-gateway");
}

_Noreturn static void become_gateway(const char *program, const Broker *broker, const char *ports, pid_t parent) {
	int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

	(void)prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (getppid() != parent || null < 0 || dup2(null, STDERR_FILENO) < 0)
		_exit(1);
	(void)execl(program, "shmbroker-gateway", "--socket", broker->socket, "--http-port=0", "--grpc-port=0",
		    "--allow-metrics=false", "--allow-client-shm", "--ports-file", ports, (char *)NULL);
	_exit(1);
}

static int port_of(struct json_object *ports, const char *door) {
	struct json_object *object, *port;

	if (!json_object_object_get_ex(ports, door, &object) || !json_object_object_get_ex(object, "port", &port))
		bench_die("the gateway does not say where it listens for %s", door);
	return json_object_get_int(port);
}

static int connect_to(int port) {
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
		.sin_port = htons((uint16_t)port),
	};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;

	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ||
	    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) < 0)
		bench_die("connecting with the gateway: %s", strerror(errno));
	return fd;
}

/* waits for the file that says where it listens */
static void connect_doors(GatewayBench *bench, const char *path) {
	uint64_t deadline = bench_now_ns() + START_DEADLINE_NS;
	struct json_object *ports;

	while (access(path, F_OK)) {
		if (waitpid(bench->gateway, NULL, WNOHANG) || bench_now_ns() > deadline)
			bench_die("the gateway does not start");
		(void)poll(NULL, 0, 1);
	}
	ports = json_object_from_file(path);
	(void)unlink(path);
	if (!ports)
		bench_die("%s is no JSON", path);
	bench->http = connect_to(port_of(ports, "http"));
	grpc_client_init(&bench->grpc, connect_to(port_of(ports, "grpc")));
	json_object_put(ports);
}

static void gateway_start(GatewayBench *bench, const char *program) {
	char directory[] = "/tmp/shmbroker-bench.XXXXXX", path[sizeof(directory) + 8];
	pid_t parent = getpid();

	if (!mkdtemp(directory))
		bench_die("%s: %s", directory, strerror(errno));
	(void)snprintf(path, sizeof(path), "%s/ports", directory);
	fflush(NULL);
	bench->gateway = fork();
	if (bench->gateway < 0)
		bench_die("fork: %s", strerror(errno));
	if (!bench->gateway)
		become_gateway(program, &bench->broker, path, parent);
	connect_doors(bench, path);
	(void)rmdir(directory);
}

/* ---- HTTP ---- */

static void http_call(GatewayBench *bench, const char *method, const char *path, const char *body) {
	char request[512], head[HTTP_HEAD_MAX];
	static char reply[BODY_MAX];
	size_t size, head_size;
	uint64_t length;
	int n;

	n = snprintf(request, sizeof(request), "%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %zu\r\n\r\n%s",
		     method, path, strlen(body), body);
	http_send_all(bench->http, request, (size_t)n, NULL, 0);
	head_size = http_receive_head(bench->http, head, &size);
	if (!head_size)
		bench_die("%s: the gateway hung up", path);
	length = http_content_length(head);
	if (length >= sizeof(reply) || !http_receive_body(bench->http, head, head_size, size, reply, length))
		bench_die("%s: a body of %" PRIu64 " bytes", path, length);
	reply[length] = 0;
	if (strncmp(head, "HTTP/1.1 200 ", 13))
		bench_die("%s: %.12s: %s", path, head, reply);
}

static void http_do(GatewayBench *bench, int operation) {
	char path[128], body[160];

	switch (operation) {
	case STATUS_ONE:
		(void)snprintf(path, sizeof(path), "/v2/systemsharedmemory/region/%s/status", bench->one);
		http_call(bench, "GET", path, "");
		break;
	case STATUS_ALL:
		http_call(bench, "GET", "/v2/systemsharedmemory/status", "");
		break;
	default:
		(void)snprintf(body, sizeof(body), "{\"key\":\"%s\",\"offset\":0,\"byte_size\":%d}", bench->key,
			       REGION_SIZE);
		http_call(bench, "POST", "/v2/systemsharedmemory/region/" EXTRA "/register", body);
		http_call(bench, "POST", "/v2/systemsharedmemory/region/" EXTRA "/unregister", "");
		break;
	}
}

/* ---- gRPC ---- */

static void grpc_do(GatewayBench *bench, int operation) {
	uint8_t message[256], *end = message;

	switch (operation) {
	case STATUS_ONE:
		end = grpc_put_text(message, 1, bench->one);
		(void)grpc_client_call(&bench->grpc, SERVICE "Status", message, (size_t)(end - message));
		break;
	case STATUS_ALL:
		(void)grpc_client_call(&bench->grpc, SERVICE "Status", message, 0);
		break;
	default:
		end = grpc_put_text(message, 1, EXTRA);
		end = grpc_put_text(end, 2, bench->key);
		end = grpc_put_number(end, 4, REGION_SIZE);
		(void)grpc_client_call(&bench->grpc, SERVICE "Register", message, (size_t)(end - message));
		end = grpc_put_text(message, 1, EXTRA);
		(void)grpc_client_call(&bench->grpc, SERVICE "Unregister", message, (size_t)(end - message));
		break;
	}
}

/* ---- natively ---- */

static uint32_t native_status(GatewayBench *bench, const char *name) {
	struct shmb_status_filter filter = { .struct_size = sizeof(filter), .name = name };
	const struct shmb_status *status;
	struct shmb_status_iter *iter;
	uint32_t n = 0;

	check(shmb_status_iter_new(bench->client, &filter, &iter), "status");
	for (;; n++) {
		check(shmb_status_iter_next(iter, &status), "status");
		if (!status)
			break;
	}
	shmb_status_iter_free(iter);
	return n;
}

static void native_do(GatewayBench *bench, int operation) {
	struct shmb_region_options options = {
		.struct_size = sizeof(options),
		.flags = SHMB_REGION_OPT_KEEP,
		.key = bench->key,
	};
	struct shmb_region *region;
	const char *name = EXTRA;
	int fd;

	switch (operation) {
	case STATUS_ONE:
		if (native_status(bench, bench->one) != 1)
			bench_die("%s is not there", bench->one);
		break;
	case STATUS_ALL:
		if (native_status(bench, NULL) != N_REGIONS)
			bench_die("there are not %d regions", N_REGIONS);
		break;
	default:
		fd = shm_open(bench->key, O_RDWR | O_CLOEXEC, 0);
		if (fd < 0)
			bench_die("%s: %s", bench->key, strerror(errno));
		check(shmb_region_adopt(bench->client, name, fd, 0, REGION_SIZE, &options, &region), "registering");
		(void)close(fd);
		shmb_region_free(region);
		check(shmb_client_unregister(bench->client, &name, 1, SHMB_RETIRE_LAZY, 0, NULL), "unregistering");
		break;
	}
}

/* ---- the whole ---- */

static uint64_t run_native(void *data, uint64_t count) {
	const Call *call = data;
	uint64_t begin = bench_now_ns();

	for (uint64_t i = 0; i < count; ++i)
		native_do(call->bench, call->operation);
	return bench_now_ns() - begin;
}

static uint64_t run_http(void *data, uint64_t count) {
	const Call *call = data;
	uint64_t begin = bench_now_ns();

	for (uint64_t i = 0; i < count; ++i)
		http_do(call->bench, call->operation);
	return bench_now_ns() - begin;
}

static uint64_t run_grpc(void *data, uint64_t count) {
	const Call *call = data;
	uint64_t begin = bench_now_ns();

	for (uint64_t i = 0; i < count; ++i)
		grpc_do(call->bench, call->operation);
	return bench_now_ns() - begin;
}

static void make_cases(GatewayBench *bench) {
	static const struct {
		const char *name;
		uint64_t (*run)(void *data, uint64_t count);
	} doors[N_DOORS] = { { "native", run_native }, { "http", run_http }, { "grpc", run_grpc } };
	static const struct {
		const char *name;
		uint64_t n;
		const char *detail;
	} operations[N_OPERATIONS] = {
		[STATUS_ONE] = { "status", 1, "one region, by its name" },
		[STATUS_ALL] = { "status", N_REGIONS, "all regions" },
		[REGISTER] = { "register", 1, "registered and unregistered" },
	};

	for (size_t i = 0; i < N_OPERATIONS; ++i) {
		for (size_t door = 0; door < N_DOORS; ++door) {
			size_t at = i * N_DOORS + door;
			BenchCase *new = &bench->cases[at];

			bench->calls[at] = (Call){ .bench = bench, .operation = (int)i };
			*new = (BenchCase){
				.row = { .n = operations[i].n, .threads = 1, .unit = "us" },
				.run = doors[door].run,
				.data = &bench->calls[at],
				.baseline = door ? (int)(i * N_DOORS) : -1,
				.sample_ns = SAMPLE_NS,
			};
			(void)snprintf(new->row.name, sizeof(new->row.name), "%s-%s", doors[door].name,
				       operations[i].name);
			(void)snprintf(new->row.detail, sizeof(new->row.detail), "%s", operations[i].detail);
		}
	}
}

/* of the process that made it, also when it ends in the middle */
static char memory_key[64];
static pid_t memory_maker;

static void remove_memory(void) {
	if (getpid() == memory_maker)
		(void)shm_unlink(memory_key);
}

static void make_memory(GatewayBench *bench) {
	int fd;

	memory_maker = getpid();
	(void)snprintf(memory_key, sizeof(memory_key), "/shmbroker-bench-%d", (int)memory_maker);
	memcpy(bench->key, memory_key, sizeof(bench->key));
	(void)atexit(remove_memory);
	fd = shm_open(bench->key, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, REGION_SIZE) < 0)
		bench_die("%s: %s", bench->key, strerror(errno));
	(void)close(fd);
}

static int gateway_run(Bench *options) {
	GatewayBench *bench = calloc(1, sizeof(*bench));
	char *program = find_gateway(options);
	int status = 0;

	if (!bench)
		bench_die("out of memory");
	if (!program) {
		fprintf(stderr, "shmbroker-bench: without shmbroker-gateway its doors are not measured\n");
		free(bench);
		return 0;
	}
	if (!bench_pin(0))
		bench_die("this thread cannot be bound to a CPU");
	make_memory(bench);
	if (!broker_start(options, &bench->broker, "unsealed = accept\n", "auto", 0))
		bench_die("the broker does not start");
	bench->client = client_new(&bench->broker, 0, 0);
	regions_init(&bench->regions, bench->client, REGION_SIZE, REGION_SIZE);
	for (uint32_t n = 0; n < N_REGIONS; n += N_REGIONS / 2)
		(void)regions_add(&bench->regions, N_REGIONS / 2);
	region_name(0, bench->one);
	gateway_start(bench, program);
	free(program);
	make_cases(bench);
	bench_measure(options, bench->cases, N_DOORS * N_OPERATIONS, options->quick ? ROUNDS_QUICK : ROUNDS);

	remove_memory();
	(void)close(bench->http);
	(void)close(bench->grpc.fd);
	(void)kill(bench->gateway, SIGTERM);
	while (waitpid(bench->gateway, &status, 0) < 0 && errno == EINTR)
		;
	if (status)
		bench_die("the gateway ended with status %d", status);
	regions_deinit(&bench->regions);
	(void)shmb_client_free(bench->client);
	broker_stop(&bench->broker);
	free(bench);
	return 0;
}

const BenchCommand bench_gateway = {
	.name = "gateway",
	.help = "status and register through the doors of shmbroker-gateway against the library",
	.run = gateway_run,
};
