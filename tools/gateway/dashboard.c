/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "dashboard.h"
#include "http.h"

/* more are not shown: a list is to be looked at, and must not keep the loop from its other work */
#define REGIONS_MAX 2000
#define NONCE_SIZE 16

/* ---- the page ---- */

static bool make_nonce(char ret[static 2 * NONCE_SIZE + 1]) {
	unsigned char bytes[NONCE_SIZE];

	if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes))
		return false;
	for (size_t i = 0; i < sizeof(bytes); i++)
		(void)sprintf(ret + 2 * i, "%02x", bytes[i]);
	return true;
}

static void add_page(struct evbuffer *out, const char *nonce) {
	const unsigned char *at = dashboard_page, *end = at + dashboard_page_size;

	while (at < end) {
		const unsigned char *mark =
			memmem(at, (size_t)(end - at), DASHBOARD_NONCE, sizeof(DASHBOARD_NONCE) - 1);

		(void)evbuffer_add(out, at, (size_t)((mark ?: end) - at));
		if (!mark)
			return;
		(void)evbuffer_add(out, nonce, strlen(nonce));
		at = mark + sizeof(DASHBOARD_NONCE) - 1;
	}
}

static void reply_page(HttpRequest *request) {
	char nonce[2 * NONCE_SIZE + 1], policy[512];
	struct evbuffer *out = evbuffer_new();

	if (!out || !make_nonce(nonce)) {
		http_reply_empty(request, 500);
	} else {
		/* nothing is loaded, nothing is sent but to where the page came from, and nobody frames it */
		(void)snprintf(policy, sizeof(policy),
			       "default-src 'none'; script-src 'nonce-%s'; style-src 'nonce-%s'; connect-src 'self'; "
			       "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
			       nonce, nonce);
		http_reply_header(request, "Content-Security-Policy", policy);
		http_reply_header(request, "X-Frame-Options", "DENY");
		http_reply_header(request, "Referrer-Policy", "no-referrer");
		http_reply_header(request, "Cache-Control", "no-store");
		add_page(out, nonce);
		http_reply_buffer(request, 200, "text/html; charset=utf-8", out);
	}
	if (out)
		evbuffer_free(out);
}

/* ---- what it shows ---- */

static void put_text(struct json_object *object, const char *name, const char *value) {
	json_object_object_add(object, name, value ? json_object_new_string(value) : NULL);
}

static void put_number(struct json_object *object, const char *name, uint64_t value) {
	json_object_object_add(object, name, json_object_new_uint64(value));
}

/* exact in a browser too, whose numbers are not */
static void put_id(struct json_object *object, const char *name, uint64_t value) {
	char text[24];

	(void)snprintf(text, sizeof(text), "%" PRIu64, value);
	put_text(object, name, text);
}

/* what the document is made of, and for whom */
typedef struct State {
	const HttpRequest *request;
	struct json_object *document;
	struct json_object *stats, *accounts, *clients, *regions; /* of it */
} State;

/* as the broker tells its own clients: what another user's processes are is for administrators, whatever the gateway is told */
static bool sees(const State *state, uint32_t uid) {
	return state->request->caller.admin || uid == state->request->caller.uid;
}

/* an owner or holder, or nulls where that is not shown to the gateway or to its caller */
static void put_process(const State *state, struct json_object *object, uint32_t uid, uint32_t pid, const char *comm) {
	bool shown = uid != SHMB_ANY_UID && sees(state, uid);

	json_object_object_add(object, "uid", shown ? json_object_new_uint64(uid) : NULL);
	json_object_object_add(object, "pid", shown && pid ? json_object_new_uint64(pid) : NULL);
	put_text(object, "comm", shown && comm[0] ? comm : NULL);
}

static const char *state_word(uint32_t state) {
	static const char *const words[] = {
		[SHMB_STATE_REVOKED] = "revoked",
		[SHMB_STATE_ACTIVE] = "active",
		[SHMB_STATE_LAZY] = "lazy",
		[SHMB_STATE_RETIRING] = "retiring",
	};

	return state < sizeof(words) / sizeof(words[0]) ? words[state] : "unknown";
}

static struct json_object *region_new(const State *state, const struct shmb_status *status) {
	const HttpRequest *request = state->request;
	struct json_object *region = json_object_new_object(), *holders = json_object_new_array();

	put_text(region, "name", status->name);
	put_text(region, "key",
		 status->key[0] && core_shows_key(request->core, &request->caller, status->uid) ? status->key : NULL);
	put_text(region, "kind", status->kind == SHMB_MEMORY_CPU ? "system" : "cuda");
	put_text(region, "state", state_word(status->state));
	put_number(region, "size", status->size);
	put_number(region, "offset", status->offset);
	put_id(region, "generation", status->generation);
	put_number(region, "age_ms", status->age_ns / 1000000);
	put_process(state, region, status->uid, status->pid, status->comm);
	put_text(region, "container", status->container[0] && sees(state, status->uid) ? status->container : NULL);
	put_number(region, "leases", status->leases);
	json_object_object_add(region, "writable", json_object_new_boolean(status->access & SHMB_WRITE));
	json_object_object_add(region, "kept", json_object_new_boolean(status->flags & SHMB_REGION_KEPT));
	json_object_object_add(region, "unsealed", json_object_new_boolean(status->flags & SHMB_REGION_UNSEALED));
	json_object_object_add(region, "sparse", json_object_new_boolean(status->flags & SHMB_REGION_SPARSE));
	json_object_object_add(region, "may_unregister",
			       json_object_new_boolean(core_may_unregister(request->core, &request->caller, status)));
	for (uint32_t i = 0; i < status->n_holders && sees(state, status->uid); i++) {
		struct json_object *holder = json_object_new_object();

		put_process(state, holder, status->holders[i].uid, status->holders[i].pid, status->holders[i].comm);
		put_number(holder, "leases", status->holders[i].leases);
		json_object_array_add(holders, holder);
	}
	json_object_object_add(region, "holders", holders);
	return region;
}

static int add_regions(const State *state, struct shmb_client *client) {
	struct shmb_status_filter filter = { .struct_size = sizeof(filter), .with_holders = 1 };
	const struct shmb_status *status = NULL;
	struct shmb_status_iter *iter;
	size_t n = 0;
	int r;

	r = shmb_status_iter_new(client, &filter, &iter);
	if (r)
		return r;
	while (!(r = shmb_status_iter_next(iter, &status)) && status && n++ < REGIONS_MAX)
		json_object_array_add(state->regions, region_new(state, status));
	json_object_object_add(state->document, "truncated", json_object_new_boolean(status != NULL));
	shmb_status_iter_free(iter);
	return r;
}

static int add_client(void *userdata, const struct shmb_client_status *status) {
	const State *state = userdata;
	struct json_object *client;

	if (!sees(state, status->uid))
		return 0;
	client = json_object_new_object();
	put_id(client, "session", status->session);
	put_process(state, client, status->uid, status->pid, status->comm);
	put_text(client, "container", status->container[0] ? status->container : NULL);
	put_number(client, "age_ms", status->age_ns / 1000000);
	put_number(client, "regions", status->regions);
	put_number(client, "bytes", status->bytes);
	put_number(client, "leases", status->leases);
	json_object_array_add(state->clients, client);
	return 0;
}

static int add_stat(void *userdata, const struct shmb_stat *stat) {
	const State *state = userdata;
	struct json_object *account;
	char uid[16];

	if (stat->uid == SHMB_ANY_UID) {
		put_number(state->stats, stat->name, stat->value);
		return 0;
	}
	if (!sees(state, stat->uid))
		return 0;
	(void)snprintf(uid, sizeof(uid), "%" PRIu32, stat->uid);
	if (!json_object_object_get_ex(state->accounts, uid, &account)) {
		account = json_object_new_object();
		json_object_object_add(state->accounts, uid, account);
	}
	put_number(account, stat->name, stat->value);
	return 0;
}

static int add_info(void *userdata, const char *key, const char *value) {
	put_text(userdata, key, value);
	return 0;
}

static struct json_object *put_new(struct json_object *document, const char *name, struct json_object *value) {
	json_object_object_add(document, name, value);
	return value;
}

static int add_broker(State *state, struct shmb_client *client) {
	struct json_object *document = state->document;
	int r;

	state->stats = put_new(document, "stats", json_object_new_object());
	state->accounts = put_new(document, "accounts", json_object_new_object());
	state->clients = put_new(document, "clients", json_object_new_array());
	state->regions = put_new(document, "regions", json_object_new_array());
	r = shmb_client_each_info(client, add_info, put_new(document, "info", json_object_new_object()));
	if (!r)
		r = shmb_client_each_stat(client, 1, add_stat, state);
	if (!r)
		r = shmb_client_each_client(client, add_client, state);
	if (!r)
		r = add_regions(state, client);
	return r;
}

static void reply_state(HttpRequest *request) {
	LinkSession *session = link_get(request->core->link);
	State state = { .request = request };
	Answer answer = {};
	int r;

	if (!session) {
		(void)core_unavailable(request->core, &answer);
	} else {
		state.document = json_object_new_object();
		put_text(state.document, "version", PACKAGE_VERSION);
		json_object_object_add(state.document, "allow_client_shm",
				       json_object_new_boolean(request->core->allow_client_shm));
		r = add_broker(&state, session->client);
		if (r)
			(void)core_broker_refused(request->core, r, (Bytes){}, &answer);
		else
			http_reply_header(request, "Cache-Control", "no-store");
		if (!r)
			http_reply_json(request, 200, state.document);
		json_object_put(state.document);
		if (!r)
			return;
	}
	http_reply_answer(request, &answer);
	answer_deinit(&answer);
}

bool dashboard_route(HttpRequest *request) {
	static const char *const state[] = { "v2", "shmbroker", "state", NULL };
	bool is_page = request->n_segments == 1 && !request->segments[0].size;

	if (!is_page && !http_path_is(request, 0, state))
		return false;
	if (http_method_is(request, "GET"))
		(is_page ? reply_page : reply_state)(request);
	return true;
}
