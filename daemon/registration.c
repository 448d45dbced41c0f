/* SPDX-License-Identifier: Apache-2.0 */

#include "registration.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "broker.h"
#include "log.h"
#include "region.h"
#include "session.h"
#include "wire/fd.h"

static int write_registered(Request *request, int r, const Region *region, const char *why) {
	WireRegisterResult result = {};

	if (r < 0) {
		r = SHMB_E_AGAIN;
		why = "the broker is out of memory";
	}
	if (r) {
		request->session->broker->stats.registrations_refused++;
		result.code = (uint32_t)r;
		result.text_length = request_text_length(why);
	} else {
		result.slot = region->slot;
		result.generation = region->generation;
		result.object = region->object ? region->object->id : 0;
		result.flags = region->flags;
	}
	wire_write(&request->reply, &result, sizeof(result));
	wire_write(&request->reply, why, result.text_length);
	return r;
}

/* the entries of one message; what is asked for in vain has its reason beside it */
typedef struct Entries {
	WireRegister at[WIRE_BATCH_MAX];
	Region *regions[WIRE_BATCH_MAX];
	int results[WIRE_BATCH_MAX];
	char why[WIRE_BATCH_MAX][WIRE_TEXT_MAX];
	bool is_old[WIRE_BATCH_MAX]; /* the region is of an earlier time that this was asked */
	uint32_t n;
} Entries;

/* an entry whose GPU memory is asked about */
typedef struct Check {
	CudaCheck cuda;
	struct Registration *registration;
	int result; /* once it is over */
} Check;

typedef struct Registration {
	Session *session;
	ListLink session_link;
	AccountCharge charge;
	AccountCharge charge_fds; /* of the message, until memory pays for its own */
	WireHeader header;
	uint8_t *message; /* the whole of it */
	size_t size;
	int fds[WIRE_FDS_MAX];
	size_t n_fds;
	uint32_t n_pending;
	uint32_t n_checks;
	Check checks[]; /* by entry; those of system memory are zero */
} Registration;

static bool is_cuda(const WireRegister *entry) {
	return entry->entry.kind != WIRE_KIND_MEMORY;
}

static int entry_prepare(Entries *entries, Request *request, RegisterFds *fds, Registration *registration, uint32_t i) {
	Check *check = is_cuda(&entries->at[i]) ? &registration->checks[i] : NULL;

	if (check && check->result) {
		(void)snprintf(entries->why[i], WIRE_TEXT_MAX, "%s", check->cuda.why);
		return check->result;
	}
	return region_prepare(request->session, &entries->at[i], fds, check ? &check->cuda : NULL, &entries->regions[i],
			      entries->why[i]);
}

static void entries_prepare(Entries *entries, Request *request, RegisterFds *fds, Registration *registration) {
	if (request->header.flags & WIRE_FLAG_RETRY)
		regions_find_asked(request->session, request->header.serial, entries->regions);
	for (uint32_t i = 0; i < entries->n; ++i) {
		entries->why[i][0] = 0;
		entries->results[i] = 0;
		entries->is_old[i] = request->header.flags & WIRE_FLAG_RETRY && entries->regions[i];
		if (!entries->is_old[i])
			entries->results[i] = entry_prepare(entries, request, fds, registration, i);
	}
}

/* parked as one message, before anything is published; what cannot outlive the broker is refused */
static void entries_keep(Entries *entries, Session *session) {
	Object *objects[WIRE_BATCH_MAX];
	size_t n = 0;
	int r;

	for (uint32_t i = 0; i < entries->n; ++i)
		if (!entries->results[i] && !entries->is_old[i])
			objects[n++] = entries->regions[i]->object;
	r = objects_keep(&session->broker->objects, objects, n);
	if (!r)
		return;
	for (uint32_t i = 0; i < entries->n; ++i) {
		if (entries->results[i] || entries->is_old[i] ||
		    entries->regions[i]->object->ledger_index != LEDGER_NONE)
			continue;
		region_free(entries->regions[i]);
		entries->results[i] = r == -EAGAIN ? SHMB_E_AGAIN : SHMB_E_NO_FDS;
		(void)snprintf(entries->why[i], WIRE_TEXT_MAX, "%s", keeper_why(r));
	}
}

/* prepares, keeps and publishes; @registration has the answers about GPU memory, NULL where there is none */
static void entries_register(Entries *entries, Request *request, Registration *registration) {
	Session *session = request->session;
	RegisterFds fds = { .fds = request->fds };
	WireCountHead head = { .count = entries->n };

	entries_prepare(entries, request, &fds, registration);
	entries_keep(entries, session);
	request_reply(request);
	wire_write(&request->reply, &head, sizeof(head));
	for (uint32_t i = 0; i < head.count; ++i) {
		if (!entries->results[i] && !entries->is_old[i])
			entries->results[i] = region_commit(entries->regions[i], session, &entries->at[i],
							    request->header.serial, i, entries->why[i]);
		write_registered(request, entries->results[i], entries->regions[i], entries->why[i]);
	}
	for (size_t i = 0; i < request->n_fds; ++i)
		if (fds.taken >> i & 1)
			request->fds[i] = -EBADF;
	request_send(request, NULL, 0);
}

/* ---- GPU memory ---- */

static Registration *registration_free(Registration *registration) {
	Session *session = registration->session;

	for (uint32_t i = 0; i < registration->n_checks; ++i) {
		cuda_check_cancel(&registration->checks[i].cuda);
		cuda_hold_drop(session->broker->cuda, registration->checks[i].cuda.hold);
	}
	for (size_t i = 0; i < registration->n_fds; ++i)
		closer_close(session->broker->closer, session->peer.uid, registration->fds[i]);
	list_remove(&registration->session_link);
	account_refund(&registration->charge);
	account_refund(&registration->charge_fds);
	free(registration->message);
	free(registration);
	return NULL;
}

void registrations_drop(Session *session) {
	for (ListLink *link; (link = list_first(&session->registrations));)
		registration_free(container_of(link, Registration, session_link));
}

/* takes the message's fds over, and a copy of the rest, which @request reads on from; also in vain */
static int registration_new(Registration **ret, Request *request, uint32_t n) {
	size_t size = request->header.length;
	Session *session = request->session;
	Registration *registration;
	int r;

	registration = calloc(1, sizeof(*registration) + n * sizeof(registration->checks[0]));
	if (!registration)
		return -ENOMEM;
	registration->session = session;
	registration->header = request->header;
	registration->n_checks = n;
	registration->size = size;
	list_append(&session->registrations, &registration->session_link);
	registration->message = aligned_alloc(8, wire_padded(size));
	if (!registration->message) {
		registration_free(registration);
		return -ENOMEM;
	}
	memcpy(registration->message, request->message, size);
	if (account_charge(&registration->charge, session->account, ACCOUNT_MESSAGES, 1)) {
		registration_free(registration);
		return SHMB_E_QUOTA;
	}
	r = request->n_fds ? account_charge(&registration->charge_fds, session->account, ACCOUNT_FDS, request->n_fds)
			   : 0;
	if (r) {
		registration_free(registration);
		return r == ACCOUNT_E_FULL ? SHMB_E_NO_FDS : SHMB_E_QUOTA;
	}
	for (size_t i = 0; i < request->n_fds; ++i)
		registration->fds[registration->n_fds++] = steal_fd(&request->fds[i]);
	*ret = registration;
	return 0;
}

/* all answers are there */
static void registration_finish(Registration *registration) {
	Request request = {
		.session = registration->session,
		.header = registration->header,
		.body = wire_reader_body(registration->message, registration->size),
		.fds = registration->fds,
		.n_fds = registration->n_fds,
	};
	Entries entries;

	account_refund(&registration->charge_fds);
	/* it was read before */
	if (!registration->session->dying &&
	    !wire_read_register(&request.body, (uint32_t)request.n_fds, entries.at, &entries.n))
		entries_register(&entries, &request, registration);
	registration_free(registration);
}

static void check_settle(Check *check, int result) {
	check->result = result < 0 ? SHMB_E_AGAIN : result;
	if (result < 0)
		strcpy(check->cuda.why, "the broker is out of memory");
	/* nothing that a peer says makes a refusal an acceptance */
	else if (result && !check->cuda.why[0])
		(void)snprintf(check->cuda.why, WIRE_TEXT_MAX, "%s", wire_error_text((uint32_t)result) ?: "refused");
}

static void on_checked(CudaCheck *cuda, int result) {
	Check *check = container_of(cuda, Check, cuda);
	Registration *registration = check->registration;

	check_settle(check, result);
	if (!--registration->n_pending)
		registration_finish(registration);
}

static void check_start(Registration *registration, uint32_t i, const WireRegister *request) {
	const WireRegisterEntry *entry = &request->entry;
	Check *check = &registration->checks[i];
	Session *session = registration->session;
	int r;

	check->registration = registration;
	check->cuda = (CudaCheck){
		.kind = entry->kind,
		.access = entry->access,
		.fd = entry->fd_index == WIRE_NO_FD ? -EBADF : registration->fds[entry->fd_index],
		.offset = entry->offset,
		.size = entry->size,
		.object_size = entry->object_size,
		.owner_pid = entry->owner_pid,
		.owner_pid_namespace = entry->owner_pid_namespace,
		.uid = session->peer.uid,
		.on_done = on_checked,
	};
	memcpy(check->cuda.device, entry->device.bytes, sizeof(check->cuda.device));
	if (request->handle)
		memcpy(check->cuda.handle, request->handle, entry->handle_length);
	/* nobody's helper is kept busy by what is refused anyway */
	r = region_check(session, request, check->cuda.why);
	if (!r)
		r = cuda_check_start(session->broker->cuda, &check->cuda);
	if (r == CUDA_PENDING)
		registration->n_pending++;
	else
		check_settle(check, r);
	if (r > 0 && r == SHMB_E_BAD_FD) {
		session->broker->stats.fds_refused++;
		session_log(session, LOG_PEER_FD_REFUSED, "an fd was refused: %s", check->cuda.why);
	}
}

/* nothing is finished before all have begun: the last one may be answered at once */
static int register_cuda(Request *request, uint32_t n) {
	Region *old[WIRE_BATCH_MAX] = {};
	WireRegister entries[WIRE_BATCH_MAX];
	Registration *registration;
	WireReader body;
	uint32_t count;
	int r;

	r = registration_new(&registration, request, n);
	if (r)
		return r;
	body = wire_reader_body(registration->message, registration->size);
	if (wire_read_register(&body, (uint32_t)registration->n_fds, entries, &count)) {
		registration_free(registration);
		return DISPATCH_MALFORMED;
	}
	if (request->header.flags & WIRE_FLAG_RETRY)
		regions_find_asked(request->session, request->header.serial, old);
	registration->n_pending = 1;
	for (uint32_t i = 0; i < count; ++i)
		if (is_cuda(&entries[i]) && !old[i])
			check_start(registration, i, &entries[i]);
	if (!--registration->n_pending)
		registration_finish(registration);
	return 0;
}

int dispatch_register(Request *request) {
	Session *session = request->session;
	Broker *broker = session->broker;
	bool has_cuda = false;
	Entries entries;

	if (wire_read_register(&request->body, (uint32_t)request->n_fds, entries.at, &entries.n))
		return DISPATCH_MALFORMED;
	/* fds of which one hangs in close() must not pile up */
	if (request->n_fds && broker_is_suspended(broker, session->peer.uid)) {
		if (closer_pending(broker->closer, session->peer.uid) > BROKER_SUSPENDED_FDS_MAX)
			session_disconnect(session, SHMB_E_AGAIN, "fds of this user wait for a close that hangs");
		return request_refuse(request, SHMB_E_AGAIN,
				      "an fd of this user hangs in close(): until it ends no further fd is taken");
	}
	for (uint32_t i = 0; i < entries.n; ++i)
		has_cuda |= is_cuda(&entries.at[i]);
	if (has_cuda)
		return register_cuda(request, entries.n);
	entries_register(&entries, request, NULL);
	return 0;
}
