/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "map.h"
#include "wire/barrier.h"

#define DEFAULT_SOCKET "/run/shmbroker/shmbroker.sock"
#define CONNECT_TRIES 50
#define CONNECT_WAIT_NS 20000000
#define STREAM_STEP_MS 1
#define STREAM_WAIT_MS 10000

/* of connect(), which waits for room in the backlog; 0 is for ever */
static void set_connect_timeout(int fd, int ms) {
	struct timeval timeout = { .tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000 };

	(void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
}

/* a socket unit that restarts is away for some milliseconds */
static int client_connect(struct shmb_client *client, const char *path, int timeout_ms) {
	struct sockaddr_un *address = &client->resume.address;
	struct timespec wait = { .tv_nsec = CONNECT_WAIT_NS };
	char text[sizeof(address->sun_path) + 128];
	int64_t until;
	int r = 0;

	if (!path)
		path = secure_getenv("SHMBROKER_SOCKET");
	if (!path || !*path)
		path = DEFAULT_SOCKET;
	if (strlen(path) >= sizeof(address->sun_path))
		return error_plain(-ENAMETOOLONG);
	address->sun_family = AF_UNIX;
	strcpy(address->sun_path, path);
	client->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (client->fd < 0)
		return error_plain(-errno);
	if (timeout_ms >= 0)
		set_connect_timeout(client->fd, timeout_ms ? timeout_ms : 1);
	until = client_now() + timeout_ms;
	for (int i = 0; i < CONNECT_TRIES; ++i) {
		if (!connect(client->fd, (struct sockaddr *)address, sizeof(*address))) {
			set_connect_timeout(client->fd, 0);
			return 0;
		}
		r = -errno;
		if (r == -EINTR)
			continue;
		if (r != -ECONNREFUSED && r != -EAGAIN)
			break;
		if (timeout_ms >= 0 && client_now() >= until) {
			r = r == -EAGAIN ? SHMB_E_TIMED_OUT : r;
			break;
		}
		(void)nanosleep(&wait, NULL);
	}
	(void)snprintf(text, sizeof(text), "no broker at %s: %s%s", path, shmb_error_text(r),
		       r == -EACCES ? ": is this user in the group of the socket?" : "");
	return error_set(r, text);
}

static int client_hello(struct shmb_client *client, uint32_t roles) {
	WireHelloRequest request = {
		.version = WIRE_VERSION,
		.roles = roles,
		.features = WIRE_FEATURE_LEASE_PAGE | WIRE_FEATURE_EVENTS | WIRE_FEATURE_RESUME,
		.flags = client->flags & SHMB_ACCEPT_UNSEALED ? WIRE_HELLO_ACCEPT_UNSEALED : 0,
	};
	WireHelloReply reply;
	WireReader body;
	const char *version;
	Call call;
	int r;

	r = call_fixed(client, WIRE_OP_HELLO, &request, sizeof(request), NULL, &call, &body, &reply, sizeof(reply));
	if (!r) {
		version = wire_read_bytes(&body, reply.version_length);
		if (!wire_reader_end(&body) || reply.version != WIRE_VERSION || !reply.session) {
			r = error_plain(-EPROTO);
		} else {
			client->session = reply.session;
			client->epoch = reply.epoch;
			client->roles = reply.roles;
			client->rights = reply.rights;
			client->resume.session_index = reply.session_index;
			client->resume.possible = reply.features & WIRE_FEATURE_RESUME;
			memcpy(client->token, reply.token.bytes, sizeof(client->token));
			snprintf(client->broker_version, sizeof(client->broker_version), "%.*s",
				 (int)reply.version_length, version);
		}
	}
	call_end(&call);
	return r;
}

static int map_shared(int fd, uint64_t size, int protection, void **ret) {
	struct stat st;

	if (fstat(fd, &st) < 0)
		return -errno;
	if ((uint64_t)st.st_size != size || size < LAYOUT_PAGE)
		return -EPROTO;
	*ret = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
	return *ret == MAP_FAILED ? -errno : 0;
}

/* takes over what ATTACH gave; the headers are checked against the files' sizes before anything follows them */
static int client_map_shared(struct shmb_client *client, const WireAttachReply *reply, const int *fds) {
	void *registry, *page, *maps;
	int r;

	r = map_shared(fds[0], reply->registry_size, PROT_READ, &registry);
	if (r)
		return r;
	r = map_shared(fds[1], reply->page_size, PROT_READ | PROT_WRITE, &page);
	if (r) {
		munmap(registry, reply->registry_size);
		return r;
	}
	maps = mmap(NULL, maps_size(reply->capacity), PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	r = maps == MAP_FAILED ? -errno : 0;
	if (!r &&
	    (layout_registry_check(registry, reply->registry_size) || layout_lease_page_check(page, reply->page_size) ||
	     ((RegistryHeader *)registry)->capacity != reply->capacity ||
	     ((LeasePageHeader *)page)->capacity != reply->capacity ||
	     ((LeasePageHeader *)page)->lanes != reply->lanes || ((LeasePageHeader *)page)->mode != reply->mode ||
	     reply->session_index >= ((RegistryHeader *)registry)->session_capacity))
		r = -EPROTO;
	if (r) {
		munmap(registry, reply->registry_size);
		munmap(page, reply->page_size);
		if (maps != MAP_FAILED)
			munmap(maps, maps_size(reply->capacity));
		return r;
	}
	/* a child must not count in our page */
	(void)madvise(page, reply->page_size, MADV_DONTFORK);
	client->registry = registry;
	client->registry_size = reply->registry_size;
	client->page_size = reply->page_size;
	client->maps = maps;
	client->map_details = (MapDetail *)(client->maps + reply->capacity);
	client->capacity = reply->capacity;
	client->slots = layout_slots(registry);
	client->details = layout_details(registry);
	client->index = layout_index(registry);
	client->index_mask = client->registry->index_size - 1;
	atomic_store(&client->session_word, &layout_sessions(registry)[reply->session_index]);
	memcpy(client->hash_seed, client->registry->hash_seed, sizeof(client->hash_seed));
	client->lanes = reply->lanes;
	client->mode = reply->mode;
	client->page = page;
	return 0;
}

static int client_attach(struct shmb_client *client) {
	bool asymmetric = !(client->flags & SHMB_FORCE_RMW) && !barrier_register_global();
	WireAttachRequest request = { .mode = asymmetric ? WIRE_ATTACH_ASYMMETRIC : WIRE_ATTACH_RMW };
	WireAttachReply reply;
	WireReader body;
	Call call;
	int r;

	r = call_fixed(client, WIRE_OP_ATTACH, &request, sizeof(request), NULL, &call, &body, &reply, sizeof(reply));
	if (!r) {
		if (!wire_reader_end(&body) || call.n_fds != 2 || reply.lanes < 2 || reply.lanes > LAYOUT_LANES_MAX ||
		    reply.capacity > LAYOUT_CAPACITY_MAX || (reply.mode == WIRE_ATTACH_ASYMMETRIC && !asymmetric))
			r = error_plain(-EPROTO);
		else
			r = error_plain(client_map_shared(client, &reply, call.fds));
	}
	call_end(&call);
	return r;
}

static int client_init(struct shmb_client *client) {
	pthread_condattr_t attributes;

	client->fd = -EBADF;
	client->call_timeout_ms = -1;
	client->events_tail = &client->events;
	client->receive = aligned_alloc(64, WIRE_MESSAGE_MAX);
	if (!client->receive)
		return error_plain(-ENOMEM);
	pthread_mutex_init(&client->io_lock, NULL);
	pthread_mutex_init(&client->map_lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&client->io_changed, &attributes);
	pthread_condattr_destroy(&attributes);
	resume_init(client);
	client_list_add(client);
	return 0;
}

int shmb_client_new(struct shmb_client **ret, const char *socket_path, uint32_t roles, uint32_t flags) {
	return shmb_client_new_within(ret, socket_path, roles, flags, -1);
}

int shmb_client_new_within(struct shmb_client **ret, const char *socket_path, uint32_t roles, uint32_t flags,
			   int timeout_ms) {
	struct shmb_client *client;
	int r;

	if (flags & ~(uint32_t)(SHMB_ACCEPT_UNSEALED | SHMB_NO_POPULATE | SHMB_FORCE_RMW | SHMB_NO_LEASE_PAGE |
				SHMB_CUDA_CONTEXT))
		return error_set(SHMB_E_INVALID, "unknown flags");
	if (timeout_ms < -1)
		return error_set(SHMB_E_INVALID, "a timeout is -1 or a number of milliseconds");
	client = calloc(1, sizeof(*client));
	if (!client)
		return error_plain(-ENOMEM);
	client->flags = flags;
	r = client_init(client);
	if (r) {
		free(client);
		return r;
	}
	client->call_timeout_ms = timeout_ms;
	r = client_connect(client, socket_path, timeout_ms);
	if (!r)
		r = client_hello(client, roles);
	if (!r && client->roles & SHMB_ROLE_CONSUMER && !(flags & SHMB_NO_LEASE_PAGE))
		r = client_attach(client);
	if (r) {
		shmb_client_free(client);
		return r;
	}
	*ret = client;
	return 0;
}

/* false when a stream still has a lease: one whose context broke never gives it back */
static bool wait_for_streams(struct shmb_client *client) {
	struct timespec step = { .tv_nsec = STREAM_STEP_MS * 1000000 };

	for (uint32_t ms = 0; atomic_load(&client->n_later); ms += STREAM_STEP_MS) {
		if (ms >= STREAM_WAIT_MS)
			return false;
		(void)nanosleep(&step, NULL);
	}
	return true;
}

struct shmb_client *shmb_client_free(struct shmb_client *client) {
	if (!client)
		return NULL;
	/* better it stays than that it is missed by a stream */
	if (!client_is_foreign(client) && !wait_for_streams(client))
		return NULL;
	/* the connection is the parent's: a child only forgets what it inherited */
	if (!client_is_foreign(client))
		client_list_remove(client);
	resume_deinit(client);
	(void)close_fd(client->fd);
	maps_free(client);
	if (client->page && !client_is_foreign(client))
		munmap(client->page, client->page_size);
	if (client->registry)
		munmap((void *)client->registry, client->registry_size);
	for (Call *call = client->calls, *next; call; call = next) {
		next = call->next;
		free(call);
	}
	for (EventNode *node = client->events, *next; node; node = next) {
		next = node->next;
		free(node);
	}
	free(client->receive);
	if (!client_is_foreign(client)) {
		pthread_cond_destroy(&client->io_changed);
		pthread_mutex_destroy(&client->io_lock);
		pthread_mutex_destroy(&client->map_lock);
	}
	free(client);
	return NULL;
}

int shmb_client_get_info(struct shmb_client *client, struct shmb_client_info *ret) {
	struct shmb_client_info info = {
		.session = client->session,
		.epoch = client->epoch,
		.roles = client->roles,
		.lease_mode = client->mode,
		.lanes = client->lanes,
		.capacity = client->capacity,
	};
	size_t size = ret->struct_size < sizeof(info) ? ret->struct_size : sizeof(info);

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (size < sizeof(info.struct_size))
		return error_set(SHMB_E_INVALID, "struct_size is not set");
	/* another broker may follow this one */
	pthread_mutex_lock(&client->io_lock);
	info.rights = client->rights;
	memcpy(info.broker_version, client->broker_version, sizeof(info.broker_version));
	pthread_mutex_unlock(&client->io_lock);
	info.struct_size = ret->struct_size;
	memcpy(ret, &info, size);
	return 0;
}

int shmb_client_process(struct shmb_client *client) {
	int r;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	do {
		r = client_read(client, 0);
	} while (!r);
	client_settle(client);
	return r == -ETIMEDOUT ? 0 : client_error(client, r);
}

int shmb_client_set_call_timeout(struct shmb_client *client, int timeout_ms) {
	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (timeout_ms < -1)
		return error_set(SHMB_E_INVALID, "a time to wait is -1 for ever, or 0 and more milliseconds");
	atomic_store(&client->call_timeout_ms, timeout_ms);
	return 0;
}

int shmb_client_ping(struct shmb_client *client, uint64_t *ret_ns) {
	WirePing ping, reply;
	struct timespec before, after;
	WireReader body;
	Call call;
	int r;

	clock_gettime(CLOCK_MONOTONIC, &before);
	ping.payload = client->session ^ (uint64_t)before.tv_nsec;
	r = call_fixed(client, WIRE_OP_PING, &ping, sizeof(ping), NULL, &call, &body, &reply, sizeof(reply));
	clock_gettime(CLOCK_MONOTONIC, &after);
	if (!r && (!wire_reader_end(&body) || reply.payload != ping.payload))
		r = error_plain(-EPROTO);
	call_end(&call);
	if (!r && ret_ns)
		*ret_ns = (uint64_t)(after.tv_sec - before.tv_sec) * 1000000000 + (uint64_t)after.tv_nsec -
			  (uint64_t)before.tv_nsec;
	return r;
}
