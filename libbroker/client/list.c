/* SPDX-License-Identifier: Apache-2.0 */

/* Lists of the broker, page by page: regions, sessions, numbers, and what the broker is. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"

static void copy_comm(char *ret, const wire_b16 *comm) {
	memcpy(ret, comm->bytes, WIRE_COMM_SIZE);
	ret[WIRE_COMM_SIZE] = 0;
}

/* a copy that ends with NUL, in @buffer */
static const char *copy_text(char *buffer, size_t size, const char *text, size_t length) {
	length = length < size ? length : size - 1;
	memcpy(buffer, text, length);
	buffer[length] = 0;
	return buffer;
}

struct shmb_status_iter {
	struct shmb_client *client;
	WireStatusRequest request;
	char *name;
	Call call;
	WireReader body;
	uint32_t left; /* entries of this page */
	bool last;
	char name_text[SHMB_NAME_MAX + 1];
	char container[256];
	char key[SHMB_NAME_MAX + 1];
	struct shmb_holder holders[WIRE_HOLDERS_MAX];
	struct shmb_status status;
};

int shmb_status_iter_new(struct shmb_client *client, const struct shmb_status_filter *filter,
			 struct shmb_status_iter **ret) {
	struct shmb_status_filter wanted = {};
	struct shmb_status_iter *iter;

	if (client_is_foreign(client))
		return error_plain(SHMB_E_FORKED);
	if (filter && !filter->struct_size)
		return error_set(SHMB_E_INVALID, "struct_size of the filter is not set");
	if (filter)
		memcpy(&wanted, filter, filter->struct_size < sizeof(wanted) ? filter->struct_size : sizeof(wanted));
	if (wanted.name && strlen(wanted.name) > SHMB_NAME_MAX)
		return error_plain(SHMB_E_BAD_NAME);
	iter = calloc(1, sizeof(*iter));
	if (!iter)
		return error_plain(-ENOMEM);
	iter->client = client;
	iter->request.flags = wanted.with_holders ? WIRE_STATUS_HOLDERS : 0;
	iter->request.uid = wanted.uid_plus_one ? wanted.uid_plus_one - 1 : WIRE_ANY_UID;
	iter->request.states = wanted.states;
	if (wanted.name && *wanted.name) {
		iter->name = strdup(wanted.name);
		if (!iter->name) {
			free(iter);
			return error_plain(-ENOMEM);
		}
		iter->request.name_length = (uint16_t)strlen(iter->name);
		iter->request.match = wanted.prefix ? WIRE_MATCH_PREFIX : WIRE_MATCH_EXACT;
	}
	*ret = iter;
	return 0;
}

static int status_read(struct shmb_status_iter *iter) {
	struct shmb_status *status = &iter->status;
	WireStatusHolder holder;
	WireStatusEntry entry;
	const char *name, *container, *key;

	wire_read(&iter->body, &entry, sizeof(entry));
	name = wire_read_bytes(&iter->body, entry.name_length);
	container = wire_read_bytes(&iter->body, entry.container_length);
	key = wire_read_bytes(&iter->body, entry.key_length);
	if (!name || !container || !key || entry.holder_count > WIRE_HOLDERS_MAX)
		return error_plain(-EPROTO);
	for (uint32_t i = 0; i < entry.holder_count; ++i) {
		wire_read(&iter->body, &holder, sizeof(holder));
		iter->holders[i] = (struct shmb_holder){
			.session = holder.session,
			.pid = holder.pid,
			.uid = holder.uid,
			.leases = holder.leases,
			.flags = holder.flags,
		};
		copy_comm(iter->holders[i].comm, &holder.comm);
	}
	if (iter->body.bad)
		return error_plain(-EPROTO);
	*status = (struct shmb_status){
		.name = copy_text(iter->name_text, sizeof(iter->name_text), name, entry.name_length),
		.container = copy_text(iter->container, sizeof(iter->container), container, entry.container_length),
		.generation = entry.generation,
		.size = entry.size,
		.offset = entry.offset,
		.object = entry.object,
		.object_size = entry.object_size,
		.age_ns = entry.age_ns,
		.session = entry.session,
		.slot = entry.slot,
		.pid = entry.pid,
		.uid = entry.uid,
		.leases = entry.leases,
		.flags = entry.flags,
		.state = entry.state,
		.kind = entry.kind == WIRE_KIND_MEMORY ? SHMB_MEMORY_CPU : SHMB_MEMORY_CUDA,
		.access = entry.access,
		.n_holders = entry.holder_count,
		.holders_total = entry.holder_total,
		.holders = iter->holders,
		.key = copy_text(iter->key, sizeof(iter->key), key, entry.key_length),
	};
	memcpy(status->device_uuid, entry.device.bytes, sizeof(status->device_uuid));
	copy_comm(status->comm, &entry.comm);
	return 0;
}

int shmb_status_iter_next(struct shmb_status_iter *iter, const struct shmb_status **ret) {
	WirePageHead head;
	int r;

	while (!iter->left) {
		call_end(&iter->call);
		if (iter->last) {
			*ret = NULL;
			return 0;
		}
		r = call_fixed(iter->client, WIRE_OP_STATUS, &iter->request, sizeof(iter->request), iter->name,
			       &iter->call, &iter->body, &head, sizeof(head));
		if (r)
			return r;
		iter->left = head.count;
		iter->request.cursor = head.next;
		iter->last = !head.next;
	}
	r = status_read(iter);
	if (r)
		return r;
	iter->left--;
	*ret = &iter->status;
	return 0;
}

struct shmb_status_iter *shmb_status_iter_free(struct shmb_status_iter *iter) {
	if (!iter)
		return NULL;
	call_end(&iter->call);
	free(iter->name);
	free(iter);
	return NULL;
}

static int client_read_entry(WireReader *body, int (*each)(void *userdata, const struct shmb_client_status *),
			     void *userdata) {
	WireClientEntry entry;
	struct shmb_client_status status;
	char container[256];
	const char *text;

	wire_read(body, &entry, sizeof(entry));
	text = wire_read_bytes(body, entry.container_length);
	if (!text || body->bad)
		return error_plain(-EPROTO);
	status = (struct shmb_client_status){
		.container = copy_text(container, sizeof(container), text, entry.container_length),
		.session = entry.session,
		.age_ns = entry.age_ns,
		.bytes = entry.bytes,
		.pid = entry.pid,
		.uid = entry.uid,
		.gid = entry.gid,
		.roles = entry.roles,
		.rights = entry.rights,
		.regions = entry.regions,
		.maps = entry.maps,
		.leases = entry.leases,
		.unread = entry.unread,
		.flags = entry.flags,
	};
	copy_comm(status.comm, &entry.comm);
	return each(userdata, &status);
}

int shmb_client_each_client(struct shmb_client *client, int (*each)(void *userdata, const struct shmb_client_status *),
			    void *userdata) {
	WireClientsRequest request = { .uid = WIRE_ANY_UID };
	WirePageHead head;
	WireReader body;
	Call call;
	int r;

	do {
		r = call_fixed(client, WIRE_OP_CLIENTS, &request, sizeof(request), NULL, &call, &body, &head,
			       sizeof(head));
		for (uint32_t i = 0; !r && i < head.count; ++i)
			r = client_read_entry(&body, each, userdata);
		call_end(&call);
		if (!r)
			request.cursor = head.next;
	} while (!r && request.cursor);
	return r;
}

static int stat_read_entry(WireReader *body, int (*each)(void *userdata, const struct shmb_stat *), void *userdata) {
	WireStatsEntry entry;
	char name[256], help[512];
	const char *name_text, *help_text;
	struct shmb_stat stat;

	wire_read(body, &entry, sizeof(entry));
	name_text = wire_read_bytes(body, entry.name_length);
	help_text = wire_read_bytes(body, entry.help_length);
	if (!name_text || !help_text || body->bad)
		return error_plain(-EPROTO);
	stat = (struct shmb_stat){
		.name = copy_text(name, sizeof(name), name_text, entry.name_length),
		.help = copy_text(help, sizeof(help), help_text, entry.help_length),
		.value = entry.value,
		.uid = entry.uid,
		.type = entry.type,
	};
	return each(userdata, &stat);
}

int shmb_client_each_stat(struct shmb_client *client, uint32_t with_accounts,
			  int (*each)(void *userdata, const struct shmb_stat *), void *userdata) {
	WireStatsRequest request = { .flags = WIRE_STATS_HELP | (with_accounts ? WIRE_STATS_ACCOUNTS : 0) };
	WirePageHead head;
	WireReader body;
	Call call;
	int r;

	do {
		r = call_fixed(client, WIRE_OP_STATS, &request, sizeof(request), NULL, &call, &body, &head,
			       sizeof(head));
		for (uint32_t i = 0; !r && i < head.count; ++i)
			r = stat_read_entry(&body, each, userdata);
		call_end(&call);
		if (!r)
			request.cursor = head.next;
	} while (!r && request.cursor);
	return r;
}

int shmb_client_each_info(struct shmb_client *client, int (*each)(void *userdata, const char *key, const char *value),
			  void *userdata) {
	WireCountHead head;
	WireInfoEntry entry;
	WireReader body;
	char key[64], value[512];
	const char *key_text, *value_text;
	Call call;
	int r;

	r = call_fixed(client, WIRE_OP_INFO, NULL, 0, NULL, &call, &body, &head, sizeof(head));
	if (!r) {
		for (uint32_t i = 0; !r && i < head.count; ++i) {
			wire_read(&body, &entry, sizeof(entry));
			key_text = wire_read_bytes(&body, entry.key_length);
			value_text = wire_read_bytes(&body, entry.value_length);
			if (!key_text || !value_text || body.bad)
				r = error_plain(-EPROTO);
			else
				r = each(userdata, copy_text(key, sizeof(key), key_text, entry.key_length),
					 copy_text(value, sizeof(value), value_text, entry.value_length));
		}
	}
	call_end(&call);
	return r;
}
