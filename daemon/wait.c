/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "broker.h"
#include "region.h"
#include "session.h"
#include "wait.h"

static void wait_entry_free(WaitEntry *entry) {
	list_remove(&entry->region_link);
	list_remove(&entry->wait_link);
	free(entry);
}

int wait_new(Wait **ret, Session *session, uint64_t serial) {
	Wait *wait;

	if (session->n_waits >= WIRE_OUTSTANDING_MAX)
		return SHMB_E_BUSY;
	wait = calloc(1, sizeof(*wait));
	if (!wait)
		return -ENOMEM;
	list_init(&wait->entries);
	wait->session = session;
	wait->serial = serial;
	if (account_charge(&wait->charge, session->account, ACCOUNT_MESSAGES, 1)) {
		free(wait);
		return SHMB_E_QUOTA;
	}
	list_append(&session->waits, &wait->session_link);
	session->n_waits++;
	*ret = wait;
	return 0;
}

Wait *wait_free(Wait *wait) {
	if (!wait)
		return NULL;
	for (ListLink *link; (link = list_first(&wait->entries));)
		wait_entry_free(container_of(link, WaitEntry, wait_link));
	loop_timer_unlink(&wait->timer);
	list_remove(&wait->session_link);
	wait->session->n_waits--;
	account_refund(&wait->charge);
	free(wait);
	return NULL;
}

int wait_add(Wait *wait, Region *region, uint32_t index) {
	WaitEntry *entry = calloc(1, sizeof(*entry));

	if (!entry)
		return -ENOMEM;
	entry->wait = wait;
	entry->index = index;
	list_append(&region->waits, &entry->region_link);
	list_append(&wait->entries, &entry->wait_link);
	wait->reply.draining++;
	return 0;
}

static void wait_answer(Wait *wait) {
	Session *session = wait->session;
	WireWriter writer;
	size_t size;

	wire_write_begin(&writer, session->broker->reply, WIRE_MESSAGE_MAX, WIRE_OP_UNREGISTER, WIRE_FLAG_REPLY,
			 wait->serial);
	wire_write(&writer, &wait->reply, sizeof(wait->reply));
	for (uint32_t i = 0; i < wait->reply.count; ++i) {
		wait->results[i].text_length = (uint16_t)strlen(wait->texts[i]);
		wire_write(&writer, &wait->results[i], sizeof(wait->results[i]));
		wire_write(&writer, wait->texts[i], wait->results[i].text_length);
	}
	size = wire_write_end(&writer);
	wait_free(wait);
	session_send(session, session->broker->reply, size, NULL, 0);
}

static void on_timeout(LoopTimer *timer) {
	Wait *wait = container_of(timer, Wait, timer);
	Session *session = wait->session;

	if (!wait->by_name) {
		session_error(session, WIRE_OP_UNREGISTER, wait->serial, SHMB_E_TIMED_OUT,
			      "timed out: regions are still held, and go with their last lease");
		wait_free(wait);
		return;
	}
	list_for_each (link, &wait->entries) {
		WaitEntry *entry = container_of(link, WaitEntry, wait_link);

		wait->results[entry->index].code = SHMB_E_TIMED_OUT;
		strcpy(wait->texts[entry->index], "timed out: it is still held, and goes with its last lease");
	}
	wait_answer(wait);
}

void wait_start(Wait *wait, uint32_t timeout_ms) {
	Loop *loop = wait->session->broker->loop;

	wait->started = true;
	if (list_is_empty(&wait->entries) || !timeout_ms) {
		wait_answer(wait);
		return;
	}
	if (timeout_ms == WIRE_FOREVER)
		return;
	wait->timer.on_time = on_timeout;
	loop_timer_set(loop, &wait->timer, loop_now(loop) + (uint64_t)timeout_ms * 1000000);
}

void waits_region_gone(Region *region) {
	for (ListLink *link; (link = list_first(&region->waits));) {
		WaitEntry *entry = container_of(link, WaitEntry, region_link);
		Wait *wait = entry->wait;

		if (entry->index != UINT32_MAX)
			wait->results[entry->index].state = WIRE_UNREGISTERED_GONE;
		wait->reply.gone++;
		wait->reply.draining--;
		wait_entry_free(entry);
		if (wait->started && list_is_empty(&wait->entries))
			wait_answer(wait);
	}
}
