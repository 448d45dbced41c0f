/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * FakeBroker: a thread at the other end of a real socket that answers a client as a broker does, and lets a test write
 * the registry as it likes. It has one client, and a table of regions that the test fills in; what the test and the
 * thread both change is atomic or is changed while the client asks for nothing.
 *
 * It can die and come back: registry, page and regions stay, as with a broker whose memory is held for it.
 */

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "client.h"
#include "wire/compat.h"
#include "wire/name.h"

#define FAKE_CAPACITY 8
#define FAKE_LANES 4
#define FAKE_SESSION UINT64_C(77)
#define FAKE_SESSION_INDEX 3
#define FAKE_EPOCH 5
#define FAKE_TOKEN "0123456789abcde"
#define FAKE_LOG_MAX 512

typedef struct FakeBroker FakeBroker;

typedef struct FakeRegion {
	const char *name;
	uint64_t offset; /* in the object */
	uint64_t size;
	uint64_t object;
	int fd; /* of the object, owned by the test */
	uint32_t flags;
} FakeRegion;

/* a request as it came */
typedef struct FakeRequest {
	uint64_t serial;
	uint16_t opcode;
	uint16_t flags;
	uint32_t n_fds;
	uint64_t inode; /* of the first fd */
} FakeRequest;

struct FakeBroker {
	struct shmb_client *client;
	char path[64];
	int listener;
	_Atomic int fd;
	pthread_t thread;
	uint32_t mode; /* WIRE_ATTACH_* */
	uint8_t *registry;
	uint8_t *page;
	RegistryHeader shape;
	LeasePageHeader page_shape;
	FakeRegion regions[FAKE_CAPACITY]; /* by slot */
	_Atomic uint32_t n_asked[_WIRE_OP_N];
	_Atomic uint64_t notified; /* generation of the last NOTIFY */
	WireMapRequest last_map;
	void (*before_lookup)(FakeBroker *broker, uint32_t slot);
	uint32_t n_events;	/* that come with each PING */
	uint32_t n_held;	/* PINGs that are answered together, the last one first */
	_Atomic bool holds_map; /* the next MAP is answered with the next PING; false again once it has come */
	WireMapReply held_map;
	uint64_t held_serial;
	int held_fd;

	uint64_t features;	   /* in the HELLO reply */
	_Atomic bool is_silent;	   /* requests are noted and not answered */
	_Atomic bool is_stopped;   /* what is read is dealt with later, and no more is read */
	_Atomic uint64_t granted;  /* leases by message, numbered from 1 */
	_Atomic uint64_t released; /* and how many of them were given back */
	_Atomic bool reads_late;   /* after a resume nothing is read before the client's socket is full */
	WireHelloRequest last_hello;
	uint32_t refusal;		  /* code of the next HELLOs that are refused, ... */
	_Atomic uint32_t n_refused;	  /* ... of which there are that many, */
	_Atomic uint32_t n_hung_up;	  /* before that many are met by a hang-up, */
	_Atomic uint32_t n_hung_up_later; /* and that many by one after the reply */
	_Atomic uint32_t n_resumed;	  /* replies with RESUMED */
	WireHelloReply lie;		  /* is added to the reply to a resume */
	_Atomic uint32_t n_log;
	FakeRequest log[FAKE_LOG_MAX];
};

static inline RegistryDetail *fake_detail(FakeBroker *broker, uint32_t slot) {
	return layout_details((RegistryHeader *)broker->registry) + slot;
}

static inline RegistrySlot *fake_slot(FakeBroker *broker, uint32_t slot) {
	return layout_slots((RegistryHeader *)broker->registry) + slot;
}

static inline void fake_set(FakeBroker *broker, uint32_t slot, uint64_t generation, uint32_t state) {
	atomic_store(&fake_slot(broker, slot)->word, generation ? layout_word(generation, state) : 0);
}

/* acquired less released, of all lanes */
static inline uint32_t fake_count(FakeBroker *broker, uint32_t slot) {
	return layout_lease_page_count((LeasePageHeader *)broker->page, &broker->page_shape, slot);
}

static inline uint64_t fake_lanes_used(FakeBroker *broker) {
	return atomic_load(&((LeasePageHeader *)broker->page)->lanes_used);
}

static inline int fake_file(const void *header, size_t header_size, uint64_t size, uint8_t **ret) {
	int fd = memfd_create("fake", MFD_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, (off_t)size), 0);
	*ret = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_true(*ret != MAP_FAILED);
	memcpy(*ret, header, header_size);
	return fd;
}

/* publishes @region in @slot, ACTIVE */
static inline void fake_register(FakeBroker *broker, uint32_t slot, uint64_t generation, FakeRegion region) {
	RegistryHeader *registry = (RegistryHeader *)broker->registry;
	RegistrySlot *published = fake_slot(broker, slot);
	uint64_t hash = wire_name_hash(registry->hash_seed, region.name, strlen(region.name));
	uint32_t at = (uint32_t)hash & (registry->index_size - 1);

	broker->regions[slot] = region;
	published->size = region.size;
	published->offset = region.offset;
	fake_detail(broker, slot)->object = region.object;
	published->name_length = (uint16_t)strlen(region.name);
	memcpy(published->name, region.name, layout_name_head(published->name_length));
	memcpy(fake_detail(broker, slot)->name_rest, region.name + layout_name_head(published->name_length),
	       published->name_length - layout_name_head(published->name_length));
	fake_set(broker, slot, generation, WIRE_STATE_ACTIVE);
	while (layout_index(registry)[at] && (uint32_t)layout_index(registry)[at] != slot + 1)
		at = (at + 1) & (registry->index_size - 1);
	atomic_store(&layout_index(registry)[at], hash >> 32 << 32 | (slot + 1));
}

static inline void fake_send(FakeBroker *broker, WireWriter *writer, const int *fds, size_t n_fds) {
	(void)fd_send(broker->fd, writer->buffer, wire_write_end(writer), fds, n_fds, 0);
}

static inline void fake_refuse(FakeBroker *broker, WireWriter *reply, uint32_t code) {
	((WireHeader *)reply->buffer)->flags |= WIRE_FLAG_ERROR;
	wire_write(reply, &(WireErrorReply){ .code = code }, sizeof(WireErrorReply));
	fake_send(broker, reply, NULL, 0);
}

static inline bool fake_counts_down(_Atomic uint32_t *n) {
	return atomic_load(n) > 0 && atomic_fetch_sub(n, 1);
}

/* the client has sent so much that no more is taken */
static inline void fake_wait_full(const FakeBroker *broker) {
	struct pollfd poll_fd = { .fd = broker->client->fd, .events = POLLOUT };

	while (poll(&poll_fd, 1, 0) > 0 && poll_fd.revents & POLLOUT)
		sched_yield();
}

/* false: hang up */
static inline bool fake_hello(FakeBroker *broker, WireReader *body, WireWriter *reply) {
	const WireHelloRequest *request = &broker->last_hello;
	WireHelloReply hello = {
		.version = WIRE_VERSION,
		.roles = WIRE_ROLE_CONSUMER | WIRE_ROLE_OWNER,
		.session = FAKE_SESSION,
		.token.bytes = FAKE_TOKEN,
		.epoch = FAKE_EPOCH,
		.session_index = FAKE_SESSION_INDEX,
		.features = broker->features,
	};

	(void)wire_read_hello(body, &broker->last_hello);
	if (request->session) {
		if (fake_counts_down(&broker->n_hung_up))
			return false;
		if (fake_counts_down(&broker->n_refused) || request->session != FAKE_SESSION ||
		    request->epoch != FAKE_EPOCH || request->roles != hello.roles ||
		    memcmp(request->token.bytes, FAKE_TOKEN, sizeof(FAKE_TOKEN))) {
			fake_refuse(broker, reply, broker->refusal ?: SHMB_E_INVALID);
			return false;
		}
		hello.flags = WIRE_HELLO_REPLY_RESUMED - broker->lie.flags;
		hello.session += broker->lie.session;
		hello.epoch += broker->lie.epoch;
		hello.session_index += broker->lie.session_index;
		hello.version += broker->lie.version;
		/* before a client can have read it */
		atomic_fetch_add(&broker->n_resumed, 1);
	}
	wire_write(reply, &hello, sizeof(hello));
	fake_send(broker, reply, NULL, 0);
	if (!request->session)
		return true;
	if (fake_counts_down(&broker->n_hung_up_later))
		return false;
	if (broker->reads_late)
		fake_wait_full(broker);
	return true;
}

static inline void fake_attach(FakeBroker *broker, WireWriter *reply) {
	const uint64_t seed[2] = { 1, 2 };
	WireAttachReply attach = {
		.mode = broker->mode,
		.capacity = FAKE_CAPACITY,
		.lanes = FAKE_LANES,
		.session_index = FAKE_SESSION_INDEX,
	};
	int fds[2];

	attach.registry_size = layout_registry_init(&broker->shape, FAKE_CAPACITY, 8, 1, seed);
	attach.page_size =
		layout_lease_page_init(&broker->page_shape, FAKE_CAPACITY, FAKE_LANES, broker->mode, FAKE_SESSION);
	fds[0] = fake_file(&broker->shape, sizeof(broker->shape), attach.registry_size, &broker->registry);
	fds[1] = fake_file(&broker->page_shape, sizeof(broker->page_shape), attach.page_size, &broker->page);
	layout_sessions((RegistryHeader *)broker->registry)[FAKE_SESSION_INDEX] = FAKE_SESSION;
	wire_write(reply, &attach, sizeof(attach));
	fake_send(broker, reply, fds, 2);
	(void)close(fds[0]);
	(void)close(fds[1]);
}

static inline void fake_lookup(FakeBroker *broker, WireReader *body, WireWriter *reply) {
	WireLookup entries[WIRE_BATCH_MAX];
	WireCountHead head = {};

	(void)wire_read_lookup(body, entries, &head.count);
	wire_write(reply, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; ++i) {
		WireLookupResult result = { .code = SHMB_E_NOT_FOUND };

		for (uint32_t slot = 0; slot < FAKE_CAPACITY; ++slot) {
			const char *name = broker->regions[slot].name;
			uint64_t word;

			if (!name || strlen(name) != entries[i].entry.name_length ||
			    memcmp(name, entries[i].name, entries[i].entry.name_length))
				continue;
			word = atomic_load(&fake_slot(broker, slot)->word);
			if (broker->before_lookup)
				broker->before_lookup(broker, slot);
			result = (WireLookupResult){
				.slot = slot,
				.generation = layout_word_generation(word),
				.size = broker->regions[slot].size,
				.lease = entries[i].entry.flags & WIRE_LOOKUP_NO_LEASE ? 0 : ++broker->granted,
			};
			word = atomic_load(&fake_slot(broker, slot)->word);
			if (!layout_word_grants(word))
				result.code = SHMB_E_NOT_FOUND;
		}
		wire_write(reply, &result, sizeof(result));
	}
	fake_send(broker, reply, NULL, 0);
}

static inline void fake_map(FakeBroker *broker, WireReader *body, WireWriter *reply) {
	const FakeRegion *region;
	WireMapReply map;
	size_t n_fds;

	wire_read(body, &broker->last_map, sizeof(broker->last_map));
	region = &broker->regions[broker->last_map.slot];
	map = (WireMapReply){
		.generation = broker->last_map.generation,
		.object = region->object,
		.object_size = (uint64_t)lseek(region->fd, 0, SEEK_END),
		.offset = region->offset,
		.size = region->size,
		.flags = region->flags,
		.kind = WIRE_KIND_MEMORY,
		.access = (uint8_t)broker->last_map.access,
	};
	if (broker->holds_map) {
		broker->held_map = map;
		broker->held_serial = ((WireHeader *)reply->buffer)->serial;
		broker->held_fd = region->fd;
		atomic_store(&broker->holds_map, false);
		return;
	}
	n_fds = broker->last_map.have_object != region->object || broker->last_map.flags & WIRE_MAP_WANT_FD;
	wire_write(reply, &map, sizeof(map));
	fake_send(broker, reply, &region->fd, n_fds);
}

static inline void fake_event(FakeBroker *broker, uint64_t generation) {
	uint8_t buffer[256] __attribute__((aligned(8)));
	WireEvent event = { .type = SHMB_EVENT_REGISTERED, .generation = generation, .name_length = 1 };
	WireWriter writer;

	wire_write_begin(&writer, buffer, sizeof(buffer), WIRE_OP_EVENT, WIRE_FLAG_EVENT, 0);
	wire_write(&writer, &event, sizeof(event));
	wire_write(&writer, "e", 1);
	fake_send(broker, &writer, NULL, 0);
}

static inline void fake_ping(FakeBroker *broker, const WirePing *ping, uint64_t serial) {
	uint8_t buffer[256] __attribute__((aligned(8)));
	WireWriter writer;

	for (uint32_t i = 0; i < broker->n_events; ++i)
		fake_event(broker, i + 1);
	wire_write_begin(&writer, buffer, sizeof(buffer), WIRE_OP_PING, WIRE_FLAG_REPLY, serial);
	wire_write(&writer, ping, sizeof(*ping));
	fake_send(broker, &writer, NULL, 0);
}

static inline void fake_map_late(FakeBroker *broker) {
	uint8_t buffer[256] __attribute__((aligned(8)));
	WireWriter writer;

	wire_write_begin(&writer, buffer, sizeof(buffer), WIRE_OP_MAP, WIRE_FLAG_REPLY, broker->held_serial);
	wire_write(&writer, &broker->held_map, sizeof(broker->held_map));
	fake_send(broker, &writer, &broker->held_fd, 1);
	broker->held_serial = 0;
}

/* keeps PINGs back until there are as many as are answered together */
static inline void fake_hold(FakeBroker *broker, WireReader *body, uint64_t serial) {
	static WirePing pings[WIRE_OUTSTANDING_MAX];
	static uint64_t serials[WIRE_OUTSTANDING_MAX];
	static uint32_t n;

	wire_read(body, &pings[n], sizeof(pings[n]));
	serials[n++] = serial;
	if (n < broker->n_held)
		return;
	while (n) {
		n--;
		fake_ping(broker, &pings[n], serials[n]);
	}
}

static inline void fake_release(FakeBroker *broker, WireReader *body, WireWriter *reply) {
	uint64_t leases[WIRE_BATCH_MAX];
	WireCountHead head = {};

	(void)wire_read_release(body, leases, &head.count);
	wire_write(reply, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; ++i) {
		wire_write(reply, NULL, sizeof(WireReleaseResult));
		broker->released += leases[i] && leases[i] <= broker->granted;
	}
	fake_send(broker, reply, NULL, 0);
}

static inline void fake_unregister(FakeBroker *broker, WireReader *body, WireWriter *reply) {
	WireName names[WIRE_BATCH_MAX];
	WireUnregisterRequest request;
	WireUnregisterReply head = {};

	(void)wire_read_unregister(body, &request, names);
	head.count = request.count;
	wire_write(reply, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; ++i)
		wire_write(reply, NULL, sizeof(WireUnregisterResult));
	fake_send(broker, reply, NULL, 0);
}

/* every entry is accepted, each with a generation of its own */
static inline void fake_registered(FakeBroker *broker, WireReader *body, uint32_t n_fds, WireWriter *reply) {
	WireRegister entries[WIRE_BATCH_MAX];
	WireCountHead head = {};

	(void)wire_read_register(body, n_fds, entries, &head.count);
	wire_write(reply, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; ++i)
		wire_write(reply, &(WireRegisterResult){ .slot = i, .generation = 200 + i },
			   sizeof(WireRegisterResult));
	fake_send(broker, reply, NULL, 0);
}

static inline void fake_note(FakeBroker *broker, const WireHeader *header, int *fds, const FdMessage *message) {
	uint32_t at = atomic_load(&broker->n_log);
	struct stat st = {};

	if (message->n_fds)
		(void)fstat(fds[0], &st);
	if (at < FAKE_LOG_MAX) {
		broker->log[at] = (FakeRequest){
			.serial = header->serial,
			.opcode = header->opcode,
			.flags = header->flags,
			.n_fds = (uint32_t)message->n_fds,
			.inode = st.st_ino,
		};
		atomic_store(&broker->n_log, at + 1);
	}
	for (size_t i = 0; i < message->n_fds; ++i)
		(void)close_fd(fds[i]);
	atomic_fetch_add(&broker->n_asked[header->opcode], 1);
}

/* one connection; true when it was the fake that hung up, and it is ready for another one */
static inline bool fake_serve_one(FakeBroker *broker) {
	static uint8_t buffer[WIRE_MESSAGE_MAX] __attribute__((aligned(8)));
	static uint8_t out[WIRE_MESSAGE_MAX] __attribute__((aligned(8)));
	int fds[WIRE_FDS_ROOM];
	FdMessage message;
	WireHeader header;
	WireWriter reply;
	WireReader body;
	WireNotify notify;

	while (!fd_receive(broker->fd, buffer, sizeof(buffer), 0, fds, &message) && message.size) {
		if (wire_header_read(buffer, message.size, &header) || header.opcode >= _WIRE_OP_N)
			break;
		while (broker->is_stopped)
			(void)poll(NULL, 0, 1);
		fake_note(broker, &header, fds, &message);
		body = wire_reader_body(buffer, message.size);
		wire_write_begin(&reply, out, sizeof(out), header.opcode, WIRE_FLAG_REPLY, header.serial);
		if (broker->is_silent && header.opcode != WIRE_OP_HELLO)
			continue;
		switch (header.opcode) {
		case WIRE_OP_HELLO:
			if (!fake_hello(broker, &body, &reply))
				return true;
			break;
		case WIRE_OP_ATTACH:
			fake_attach(broker, &reply);
			break;
		case WIRE_OP_REGISTER:
			fake_registered(broker, &body, (uint32_t)message.n_fds, &reply);
			break;
		case WIRE_OP_LOOKUP:
			fake_lookup(broker, &body, &reply);
			break;
		case WIRE_OP_MAP:
			fake_map(broker, &body, &reply);
			break;
		case WIRE_OP_PING:
			if (broker->held_serial)
				fake_map_late(broker);
			fake_hold(broker, &body, header.serial);
			break;
		case WIRE_OP_RELEASE:
			fake_release(broker, &body, &reply);
			break;
		case WIRE_OP_UNREGISTER:
			fake_unregister(broker, &body, &reply);
			break;
		case WIRE_OP_NOTIFY:
			wire_read(&body, &notify, sizeof(notify));
			atomic_store(&broker->notified, notify.generation);
			break;
		default:
			fake_send(broker, &reply, NULL, 0);
		}
	}
	return false;
}

static inline void *fake_serve(void *data) {
	FakeBroker *broker = data;
	bool again;

	do {
		broker->fd = accept4(broker->listener, NULL, NULL, SOCK_CLOEXEC);
		again = broker->fd >= 0 && fake_serve_one(broker);
		broker->fd = close_fd(broker->fd);
	} while (again);
	return NULL;
}

/* listens, at the path that it has, and serves until its client hangs up */
static inline void fake_come_back(FakeBroker *broker) {
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	strcpy(address.sun_path, broker->path);
	(void)unlink(broker->path);
	broker->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(broker->listener, (struct sockaddr *)&address, sizeof(address)), 0);
	assert_int_equal(listen(broker->listener, 1), 0);
	assert_int_equal(pthread_create(&broker->thread, NULL, fake_serve, broker), 0);
}

/* its connection and its listening socket end */
static inline void fake_die(FakeBroker *broker) {
	if (broker->listener < 0)
		return;
	(void)shutdown(broker->listener, SHUT_RDWR);
	(void)shutdown(broker->fd, SHUT_RDWR);
	pthread_join(broker->thread, NULL);
	broker->listener = close_fd(broker->listener);
}

/* a client of @broker, whose HELLO reply has @features and whose lease page has @mode; served until it is freed */
static inline struct shmb_client *fake_start_with(FakeBroker *broker, uint64_t features, uint32_t mode,
						  uint32_t flags) {
	*broker = (FakeBroker){ .features = features, .mode = mode, .n_held = 1 };
	snprintf(broker->path, sizeof(broker->path), "/tmp/shmb-fake-broker.%d", (int)getpid());
	fake_come_back(broker);
	assert_int_equal(shmb_client_new(&broker->client, broker->path, 0, flags), 0);
	return broker->client;
}

static inline struct shmb_client *fake_start(FakeBroker *broker, uint32_t mode, uint32_t flags) {
	return fake_start_with(broker, 0, mode, flags);
}

static inline void fake_stop(FakeBroker *broker, struct shmb_client *client) {
	assert_null(shmb_client_free(client));
	fake_die(broker);
	munmap(broker->registry, broker->shape.total_size);
	munmap(broker->page, broker->page_shape.total_size);
	(void)unlink(broker->path);
}
