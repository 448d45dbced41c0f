/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "raw.h"
#include "wire/compat.h"
#include "wire/fd.h"

#define CLOSE_POLL_NS 20000
#define CLOSE_DEADLINE_NS UINT64_C(60000000000)

/* ---- connections ---- */

static void message_begin(WireWriter *writer, RawMessage *ret, uint16_t opcode, size_t reply_size) {
	ret->reply_size = sizeof(WireHeader) + reply_size;
	wire_write_begin(writer, ret->bytes, sizeof(ret->bytes), opcode, 0, ret->reply_size);
}

static void message_end(WireWriter *writer, RawMessage *ret) {
	ret->size = wire_write_end(writer);
	if (!ret->size)
		bench_die("a message of more than %d bytes", RAW_MESSAGE_MAX);
}

int raw_connect(const char *socket_path, uint32_t roles) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	WireHelloRequest hello = { .version = WIRE_VERSION, .roles = roles };
	WireWriter writer;
	RawMessage request;
	uint8_t reply[1024] __attribute__((aligned(8)));
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0)
		bench_die("socket: %s", strerror(errno));
	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", socket_path);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
		bench_die("%s: %s", socket_path, strerror(errno));
	message_begin(&writer, &request, WIRE_OP_HELLO, 0);
	wire_write(&writer, &hello, sizeof(hello));
	message_end(&writer, &request);
	(void)raw_call(fd, &request, NULL, 0, reply, sizeof(reply));
	return fd;
}

size_t raw_call(int socket, const RawMessage *request, const int *fds, size_t n_fds, void *reply, size_t capacity) {
	const WireHeader *header = reply;
	ssize_t size;
	int r;

	r = fd_send(socket, request->bytes, request->size, fds, n_fds, 0);
	if (r)
		bench_die("sending to the broker: %s", strerror(-r));
	size = recv(socket, reply, capacity, MSG_TRUNC);
	if (size < 0)
		bench_die("receiving from the broker: %s", strerror(errno));
	if ((size_t)size < sizeof(*header))
		bench_die("the broker has ended the connection");
	if (header->flags & WIRE_FLAG_ERROR)
		bench_die("%s was refused: %s", wire_opcode_name(header->opcode),
			  wire_error_name(((const WireErrorReply *)(header + 1))->code) ?: "by an unknown code");
	return (size_t)size;
}

const void *raw_check_results(const void *reply, size_t size, size_t result_size, uint32_t n) {
	const WireHeader *header = reply;
	const WireCountHead *head = (const WireCountHead *)(header + 1);
	const uint8_t *results = (const uint8_t *)(head + 1);

	if (size < sizeof(*header) + sizeof(*head) || head->count != n)
		bench_die("%s was not answered with %u results", wire_opcode_name(header->opcode), n);
	for (uint32_t i = 0; i < n; ++i) {
		uint32_t code;

		memcpy(&code, results + i * result_size, sizeof(code));
		if (code)
			bench_die("%s, entry %u of %u: %s", wire_opcode_name(header->opcode), i, n,
				  wire_error_text(code) ?: "refused");
	}
	if (size != sizeof(*header) + sizeof(*head) + n * result_size)
		bench_die("%s was answered with %zu bytes", wire_opcode_name(header->opcode), size);
	return results;
}

/* ---- messages ---- */

static void raw_name(uint32_t index, char name[RAW_NAME_LENGTH + 1]) {
	(void)snprintf(name, RAW_NAME_LENGTH + 1, "bench.region-%07u", index % 10000000);
}

void raw_ping(RawMessage *ret) {
	WireWriter writer;
	WirePing ping = { .payload = 1 };

	message_begin(&writer, ret, WIRE_OP_PING, sizeof(ping));
	wire_write(&writer, &ping, sizeof(ping));
	message_end(&writer, ret);
}

void raw_lookup(RawMessage *ret, uint32_t n, uint16_t flags) {
	WireCountHead head = { .count = n };
	WireWriter writer;
	char name[RAW_NAME_LENGTH + 1];

	message_begin(&writer, ret, WIRE_OP_LOOKUP, sizeof(head) + n * sizeof(WireLookupResult));
	wire_write(&writer, &head, sizeof(head));
	for (uint32_t i = 0; i < n; ++i) {
		WireLookupEntry entry = {
			.size = WIRE_REST,
			.access = WIRE_ACCESS_READ,
			.flags = flags,
			.name_length = RAW_NAME_LENGTH,
		};

		raw_name(i, name);
		wire_write(&writer, &entry, sizeof(entry));
		wire_write(&writer, name, RAW_NAME_LENGTH);
	}
	message_end(&writer, ret);
}

void raw_release(RawMessage *ret, const uint64_t *leases, uint32_t n) {
	WireCountHead head = { .count = n };
	WireWriter writer;

	message_begin(&writer, ret, WIRE_OP_RELEASE, sizeof(head) + n * sizeof(WireReleaseResult));
	wire_write(&writer, &head, sizeof(head));
	wire_write(&writer, leases, n * sizeof(*leases));
	message_end(&writer, ret);
}

void raw_register(RawMessage *ret, const RawRegion *regions, uint32_t first, uint32_t n) {
	WireCountHead head = { .count = n };
	WireWriter writer;
	char name[RAW_NAME_LENGTH + 1];

	message_begin(&writer, ret, WIRE_OP_REGISTER, sizeof(head) + n * sizeof(WireRegisterResult));
	wire_write(&writer, &head, sizeof(head));
	for (uint32_t i = 0; i < n; ++i) {
		WireRegisterEntry entry = {
			.kind = WIRE_KIND_MEMORY,
			.access = regions[i].access,
			.fd_index = regions[i].fd_index,
			.read_only_fd_index = regions[i].read_only_fd_index,
			.offset = regions[i].offset,
			.size = regions[i].size,
			.name_length = RAW_NAME_LENGTH,
			.principal = WIRE_ANY_UID,
		};

		raw_name(first + i, name);
		wire_write(&writer, &entry, sizeof(entry));
		wire_write(&writer, name, RAW_NAME_LENGTH);
	}
	message_end(&writer, ret);
}

void raw_unregister_all(RawMessage *ret) {
	WireUnregisterRequest request = { .scope = WIRE_SCOPE_SESSION,
					  .mode = WIRE_MODE_STRICT,
					  .principal = WIRE_ANY_UID };
	WireWriter writer;

	message_begin(&writer, ret, WIRE_OP_UNREGISTER, sizeof(WireUnregisterReply));
	wire_write(&writer, &request, sizeof(request));
	message_end(&writer, ret);
}

/* ---- what the broker has still to close ---- */

static uint64_t read_stat(int socket, const char *wanted) {
	_cleanup_(freep) uint8_t *reply = malloc(WIRE_MESSAGE_MAX);
	WireStatsRequest stats = {};
	WireWriter writer;
	RawMessage request;
	size_t size;

	if (!reply)
		bench_die("out of memory");
	do {
		WireReader body;
		WirePageHead head;

		message_begin(&writer, &request, WIRE_OP_STATS, 0);
		wire_write(&writer, &stats, sizeof(stats));
		message_end(&writer, &request);
		size = raw_call(socket, &request, NULL, 0, reply, WIRE_MESSAGE_MAX);
		body = wire_reader_body(reply, size);
		wire_read(&body, &head, sizeof(head));
		for (uint32_t i = 0; i < head.count; ++i) {
			WireStatsEntry entry;
			const char *name;

			wire_read(&body, &entry, sizeof(entry));
			name = wire_read_bytes(&body, entry.name_length);
			(void)wire_read_bytes(&body, entry.help_length);
			if (name && entry.name_length == strlen(wanted) && !memcmp(name, wanted, entry.name_length))
				return entry.value;
		}
		stats.cursor = head.next;
	} while (stats.cursor);
	bench_die("the broker has no number %s", wanted);
}

void raw_wait_closed(int socket) {
	uint64_t deadline = bench_now_ns() + CLOSE_DEADLINE_NS;

	while (read_stat(socket, "fds_closing")) {
		struct timespec ts = { .tv_nsec = CLOSE_POLL_NS };

		if (bench_now_ns() > deadline)
			bench_die("the broker does not close its fds");
		(void)nanosleep(&ts, NULL);
	}
}

/* ---- memory ---- */

int raw_memory(uint64_t size) {
	int fd = memfd_create("bench", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, (off_t)size) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		bench_die("making memory: %s", strerror(errno));
	return fd;
}

int raw_reopen(int fd) {
	int r = fd_reopen(fd, O_RDONLY);

	if (r < 0)
		bench_die("opening memory read-only: %s", strerror(-r));
	return r;
}

/* ---- servers ---- */

static int compare_fds(const void *a, const void *b) {
	return *(const int *)a - *(const int *)b;
}

/* else it would hold the connections of everybody else open */
static void close_others(const int *fds, size_t n) {
	_cleanup_(freep) int *sorted = malloc(n * sizeof(*fds));
	unsigned int next = STDERR_FILENO + 1;

	if (!sorted)
		bench_die("out of memory");
	memcpy(sorted, fds, n * sizeof(*fds));
	qsort(sorted, n, sizeof(*sorted), compare_fds);
	for (size_t i = 0; i < n; ++i) {
		unsigned int fd = (unsigned int)sorted[i];

		if (fd > next)
			(void)close_range(next, fd - 1, 0);
		next = fd + 1;
	}
	(void)close_range(next, UINT32_MAX, 0);
}

void raw_server_start(RawServer *ret, size_t n, void (*serve)(const int *fds, size_t n)) {
	_cleanup_(freep) int *theirs = malloc(n * sizeof(*theirs));
	pid_t parent = getpid();

	*ret = (RawServer){ .n = n, .fds = malloc(n * sizeof(*ret->fds)) };
	if (!ret->fds || !theirs)
		bench_die("out of memory");
	for (size_t i = 0; i < n; ++i) {
		int pair[2];

		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
			bench_die("socketpair: %s", strerror(errno));
		ret->fds[i] = pair[0];
		theirs[i] = pair[1];
	}
	ret->pid = fork();
	if (ret->pid < 0)
		bench_die("fork: %s", strerror(errno));
	if (!ret->pid) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(1);
		close_others(theirs, n);
		serve(theirs, n);
		_exit(0);
	}
	for (size_t i = 0; i < n; ++i)
		(void)close(theirs[i]);
}

void raw_server_stop(RawServer *server) {
	for (size_t i = 0; i < server->n; ++i)
		(void)close(server->fds[i]);
	free(server->fds);
	if (server->pid > 0)
		(void)waitpid(server->pid, NULL, 0);
	*server = (RawServer){};
}

void raw_need_fds(uint64_t n) {
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		bench_die("getrlimit: %s", strerror(errno));
	limit.rlim_cur = limit.rlim_max;
	(void)setrlimit(RLIMIT_NOFILE, &limit);
	if (limit.rlim_cur < n)
		bench_die("%llu fds are needed, %llu allowed (ulimit -Hn)", (unsigned long long)n,
			  (unsigned long long)limit.rlim_cur);
}
