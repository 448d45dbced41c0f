/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The library against a broker that lies: it says so, or that the connection is over, and neither crashes nor leaks an
 * fd. The broker is a thread at the other end of a real socket, which answers by a script.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "client.h"
#include "count-fds.h"
#include "wire/compat.h"

#define CAPACITY 64
#define LANES 4
#define SESSION 77

typedef struct Liar Liar;

/* what is wrong with the answers */
struct Liar {
	const char *name;
	int expected;	     /* of shmb_client_new() with the role consumer */
	size_t cut;	     /* bytes missing at the end of the HELLO reply */
	size_t extra;	     /* bytes too many */
	uint32_t length_lie; /* added to the header's length */
	bool other_serial;   /* answers something that was not asked, then hangs up */
	bool hang_up;
	bool error_without_code;
	uint16_t version_length;
	uint32_t attach_fds;
	uint64_t registry_lie; /* added to the size in the reply */
	uint32_t capacity_lie;
	uint32_t lanes_lie;
	uint32_t session_index;
	bool zero_registry;
	bool junk_first; /* events that are none, before every reply */
};

typedef struct Server {
	const Liar *liar;
	int listener;
	char path[64];
	pthread_t thread;
} Server;

static int shared_file(uint64_t size) {
	int fd = memfd_create("test", MFD_CLOEXEC);

	if (fd >= 0 && ftruncate(fd, (off_t)size) < 0)
		abort();
	return fd;
}

static void server_send(int fd, uint16_t opcode, uint16_t flags, uint64_t serial, const void *body, size_t size,
			uint32_t lie, const int *fds, size_t n_fds) {
	uint8_t buffer[1024] __attribute__((aligned(8)));
	WireWriter writer;

	wire_write_begin(&writer, buffer, sizeof(buffer), opcode, flags, serial);
	memcpy(buffer + sizeof(WireHeader), body, size);
	((WireHeader *)buffer)->length = (uint32_t)(sizeof(WireHeader) + size) + lie;
	(void)fd_send(fd, buffer, sizeof(WireHeader) + size, fds, n_fds, 0);
}

static void answer_hello(const Liar *liar, int fd, uint64_t serial) {
	uint8_t body[sizeof(WireHelloReply) + 64] = {};
	WireHelloReply *reply = (WireHelloReply *)body;

	*reply = (WireHelloReply){
		.version = WIRE_VERSION,
		.roles = WIRE_ROLE_CONSUMER,
		.session = SESSION,
		.version_length = liar->version_length,
	};
	if (liar->error_without_code)
		server_send(fd, WIRE_OP_HELLO, WIRE_FLAG_REPLY | WIRE_FLAG_ERROR, serial, &(WireErrorReply){},
			    sizeof(WireErrorReply), 0, NULL, 0);
	else
		server_send(fd, WIRE_OP_HELLO, WIRE_FLAG_REPLY, serial + liar->other_serial, body,
			    sizeof(WireHelloReply) - liar->cut + liar->extra, liar->length_lie, NULL, 0);
}

static void answer_attach(const Liar *liar, int fd, uint64_t serial) {
	const uint64_t seed[2] = { 1, 2 };
	RegistryHeader registry;
	LeasePageHeader page;
	WireAttachReply reply = { .mode = WIRE_ATTACH_RMW };
	int fds[2];

	reply.registry_size = layout_registry_init(&registry, CAPACITY, 16, 1, seed);
	reply.page_size = layout_lease_page_init(&page, CAPACITY, LANES, WIRE_ATTACH_RMW, SESSION);
	registry.state = LAYOUT_OPEN;
	fds[0] = shared_file(reply.registry_size);
	fds[1] = shared_file(reply.page_size);
	if (!liar->zero_registry && pwrite(fds[0], &registry, sizeof(registry), 0) < 0)
		abort();
	if (pwrite(fds[1], &page, sizeof(page), 0) < 0 ||
	    pwrite(fds[0], &(uint64_t){ SESSION }, 8, (off_t)registry.sessions_offset) < 0)
		abort();
	reply.registry_size += liar->registry_lie;
	reply.capacity = CAPACITY + liar->capacity_lie;
	reply.lanes = LANES + liar->lanes_lie;
	reply.session_index = liar->session_index;
	server_send(fd, WIRE_OP_ATTACH, WIRE_FLAG_REPLY, serial, &reply, sizeof(reply), 0, fds, liar->attach_fds);
	(void)close(fds[0]);
	(void)close(fds[1]);
}

static void *serve(void *userdata) {
	Server *server = userdata;
	const Liar *liar = server->liar;
	uint8_t buffer[WIRE_MESSAGE_MAX] __attribute__((aligned(8)));
	int fd = accept4(server->listener, NULL, NULL, SOCK_CLOEXEC), fds[WIRE_FDS_ROOM];
	FdMessage message;
	WireHeader header;

	while (!fd_receive(fd, buffer, sizeof(buffer), 0, fds, &message) && message.size) {
		for (size_t i = 0; i < message.n_fds; ++i)
			(void)close(fds[i]);
		memcpy(&header, buffer, sizeof(header));
		if (liar->hang_up)
			break;
		if (liar->junk_first)
			server_send(fd, WIRE_OP_EVENT, WIRE_FLAG_EVENT, 0, "not an event....", 16, 0, NULL, 0);
		if (header.opcode == WIRE_OP_HELLO)
			answer_hello(liar, fd, header.serial);
		else if (header.opcode == WIRE_OP_ATTACH)
			answer_attach(liar, fd, header.serial);
		else
			/* everything else is answered by a head that promises what does not come */
			server_send(fd, header.opcode, WIRE_FLAG_REPLY, header.serial,
				    &(WirePageHead){ .next = 7, .count = 1000 }, sizeof(WirePageHead), 0, NULL, 0);
		if (liar->other_serial)
			break;
	}
	(void)close(fd);
	return NULL;
}

static void server_start(Server *server, const Liar *liar) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	server->liar = liar;
	snprintf(server->path, sizeof(server->path), "/tmp/shmb-test-client.%d", (int)getpid());
	strcpy(address.sun_path, server->path);
	(void)unlink(server->path);
	server->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(server->listener, (struct sockaddr *)&address, sizeof(address)), 0);
	assert_int_equal(listen(server->listener, 4), 0);
	assert_int_equal(pthread_create(&server->thread, NULL, serve, server), 0);
}

static void server_stop(Server *server) {
	pthread_join(server->thread, NULL);
	(void)close(server->listener);
	(void)unlink(server->path);
}

static int nothing(void *userdata, const struct shmb_client_status *client) {
	(void)userdata;
	(void)client;
	return 0;
}

static int no_number(void *userdata, const struct shmb_stat *stat) {
	(void)userdata;
	(void)stat;
	return 0;
}

/* a broker whose HELLO and ATTACH are right, and nothing after that */
static void use(struct shmb_client *client) {
	struct shmb_lookup_spec spec = { .struct_size = sizeof(spec), .name = "r", .size = 1, .access = SHMB_READ };
	struct shmb_message_lease message_lease;
	struct shmb_status_iter *iter;
	const struct shmb_status *status;
	struct shmb_region *region;
	struct shmb_lease lease;
	struct shmb_handle handle = { .slot = 3, .generation = 5 };
	int result;

	assert_int_equal(shmb_client_ping(client, NULL), -EPROTO);
	assert_int_equal(shmb_client_get_memory_info(client, "r", 0, 1, SHMB_READ, &lease), -EPROTO);
	assert_int_equal(shmb_handle_get_memory_info(client, &handle, 0, 1, SHMB_READ, &lease), SHMB_E_STALE);
	handle.slot = 1000000;
	assert_int_equal(shmb_handle_get_memory_info(client, &handle, 0, 1, SHMB_READ, &lease), SHMB_E_STALE);
	assert_int_equal(shmb_client_lookup(client, &spec, 1, &message_lease, &result), -EPROTO);
	assert_int_equal(shmb_client_release(client, &(uint64_t){ 1 }, 1, &result), -EPROTO);
	assert_int_equal(shmb_region_create(client, "r", 1, NULL, &region), -EPROTO);
	assert_int_equal(shmb_client_unregister(client, &spec.name, 1, SHMB_RETIRE_STRICT, 0, NULL), -EPROTO);
	assert_int_equal(shmb_client_each_client(client, nothing, NULL), -EPROTO);
	assert_int_equal(shmb_client_each_stat(client, 1, no_number, NULL), -EPROTO);
	assert_int_equal(shmb_status_iter_new(client, NULL, &iter), 0);
	assert_int_equal(shmb_status_iter_next(iter, &status), -EPROTO);
	shmb_status_iter_free(iter);
	assert_int_equal(shmb_client_process(client), 0);
}

static const Liar liars[] = {
	{ "an honest one, so far", 0, .attach_fds = 2 },
	{ "events that are none", 0, .attach_fds = 2, .junk_first = true },
	{ "HELLO is cut", -EPROTO, .cut = 8, .attach_fds = 2 },
	{ "HELLO is too long", -EPROTO, .extra = 8, .attach_fds = 2 },
	{ "HELLO's version text is not there", -EPROTO, .version_length = 1000, .attach_fds = 2 },
	{ "the length lies", -EPROTO, .length_lie = 8, .attach_fds = 2 },
	{ "another serial, and the end", -ECONNRESET, .other_serial = true },
	{ "the end", -ECONNRESET, .hang_up = true },
	{ "an error without a code", -EPROTO, .error_without_code = true },
	{ "ATTACH without fds", -EPROTO, .attach_fds = 0 },
	{ "ATTACH with one fd", -EPROTO, .attach_fds = 1 },
	{ "a registry that is smaller than it says", -EPROTO, .attach_fds = 2, .registry_lie = 4096 },
	{ "a capacity that is not the registry's", -EPROTO, .attach_fds = 2, .capacity_lie = 64 },
	{ "a capacity beyond all bounds", -EPROTO, .attach_fds = 2, .capacity_lie = UINT32_C(1) << 30 },
	{ "more lanes than the page has", -EPROTO, .attach_fds = 2, .lanes_lie = 4 },
	{ "lanes beyond all bounds", -EPROTO, .attach_fds = 2, .lanes_lie = 1000 },
	{ "an index beyond the session table", -EPROTO, .attach_fds = 2, .session_index = 1000 },
	{ "a registry of zeroes", -EPROTO, .attach_fds = 2, .zero_registry = true },
};

static void a_broker_that_lies_is_found_out(void **state) {
	size_t before = count_fds();

	(void)state;
	for (size_t i = 0; i < sizeof(liars) / sizeof(liars[0]); ++i) {
		struct shmb_client *client = NULL;
		Server server;
		int r;

		server_start(&server, &liars[i]);
		r = shmb_client_new(&client, server.path, SHMB_ROLE_CONSUMER, 0);
		if (r != liars[i].expected)
			fail_msg("%s: %d (%s), not %d", liars[i].name, r, shmb_last_error(), liars[i].expected);
		if (!r)
			use(client);
		shmb_client_free(client);
		server_stop(&server);
		assert_int_equal(count_fds(), before);
	}
}

static void where_nobody_listens_it_says_so(void **state) {
	struct shmb_client *client = NULL;

	(void)state;
	assert_int_equal(shmb_client_new(&client, "/nonexistent/socket", 0, 0), -ENOENT);
	assert_null(client);
	assert_non_null(strstr(shmb_last_error(), "/nonexistent/socket: No such file"));
	assert_null(shmb_client_free(NULL));
	assert_null(shmb_region_free(NULL));
	assert_null(shmb_status_iter_free(NULL));
}

static void every_code_has_a_name_and_a_sentence(void **state) {
	(void)state;
	for (int code = 1; code < _WIRE_E_N; ++code) {
		assert_non_null(shmb_error_name(code));
		assert_true(strlen(shmb_error_text(code)) > 3);
	}
	assert_null(shmb_error_name(_WIRE_E_N));
	assert_null(shmb_error_name(-ENOENT));
	assert_string_equal(shmb_error_text(-ENOENT), strerror(ENOENT));
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_broker_that_lies_is_found_out),
		cmocka_unit_test(where_nobody_listens_it_says_so),
		cmocka_unit_test(every_code_has_a_name_and_a_sentence),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
