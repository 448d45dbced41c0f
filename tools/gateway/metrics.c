/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "gateway.h"
#include "metrics.h"

#define CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"
#define PREFIX "shmbroker_gateway_"

struct Metrics {
	Gateway *gateway;
	Http *http;
};

void metrics_escape(struct evbuffer *out, const char *value) {
	while (*value) {
		size_t plain = strcspn(value, "\\\"\n");

		(void)evbuffer_add(out, value, plain);
		value += plain;
		if (*value)
			(void)evbuffer_add_printf(out, "\\%c", *value == '\n' ? 'n' : *value);
		value += *value != 0;
	}
}

static void head(struct evbuffer *out, const char *name, const char *type, const char *help) {
	(void)evbuffer_add_printf(out, "# HELP %s ", name);
	/* in a help text a quote is nothing special; that it is escaped does no harm, but none has one */
	metrics_escape(out, help);
	(void)evbuffer_add_printf(out, "\n# TYPE %s %s\n", name, type);
}

static void number(struct evbuffer *out, const char *name, const char *type, const char *help, uint64_t value) {
	head(out, name, type, help);
	(void)evbuffer_add_printf(out, "%s %" PRIu64 "\n", name, value);
}

/* ---- the broker ---- */

static int add_stat(void *userdata, const struct shmb_stat *stat) {
	bool is_counter = stat->type == 1;
	char name[128];

	if (stat->uid != SHMB_ANY_UID)
		return 0;
	(void)snprintf(name, sizeof(name), "shmbroker_%s%s", stat->name, is_counter ? "_total" : "");
	number(userdata, name, is_counter ? "counter" : "gauge", stat->help, stat->value);
	return 0;
}

static void add_broker(struct evbuffer *out, Core *core) {
	struct evbuffer *stats = evbuffer_new();
	LinkSession *session = link_get(core->link);
	uint64_t began = clock_ns();
	int r = session && stats ? shmb_client_each_stat(session->client, 0, add_stat, stats) : -ENOTCONN;

	if (session && stats)
		core_metrics_broker(core->metrics, began);
	if (session && r)
		(void)link_lost(core->link, r);
	number(out, PREFIX "broker_up", "gauge", "whether the broker has answered just now", r == 0);
	/* all of them or none */
	if (!r)
		(void)evbuffer_add_buffer(out, stats);
	if (stats)
		evbuffer_free(stats);
}

/* ---- the core ---- */

static void add_calls(struct evbuffer *out, const CoreMetrics *counted) {
	static const char *const operations[] = {
#define O(_operation, _name) _name,
		CORE_OPERATIONS(O)
#undef O
	};
	static const char *const codes[] = {
#define A(_code, _http, _grpc) #_code,
		ANSWER_CODES(A)
#undef A
	};
	static const char *const doors[] = { [TRANSPORT_HTTP] = "http", [TRANSPORT_GRPC] = "grpc" };

	head(out, PREFIX "operations_total", "counter", "operations on regions, by door and by what was answered");
	for (size_t operation = 0; operation < CORE_OPERATIONS_N; operation++) {
		for (size_t door = 0; door < sizeof(doors) / sizeof(doors[0]); door++) {
			for (size_t code = 0; code < CORE_CODES_N; code++) {
				uint64_t n = counted->calls[operation][door][code];

				if (n || code == ANSWER_OK)
					(void)evbuffer_add_printf(out,
								  PREFIX "operations_total{operation=\"%s\","
									 "door=\"%s\",code=\"%s\"} %" PRIu64 "\n",
								  operations[operation], doors[door], codes[code], n);
			}
		}
	}
}

static void add_latency(struct evbuffer *out, const CoreMetrics *counted) {
	uint64_t n = 0;

	head(out, PREFIX "broker_call_seconds", "histogram", "how long calls of the broker took");
	for (uint32_t i = 0; i < CORE_BUCKETS_N; i++) {
		uint32_t us = core_metrics_bound(i);

		n += counted->broker_calls[i];
		(void)evbuffer_add_printf(out, PREFIX "broker_call_seconds_bucket{le=\"%g\"} %" PRIu64 "\n", us / 1e6,
					  n);
	}
	n += counted->broker_calls[CORE_BUCKETS_N];
	(void)evbuffer_add_printf(out,
				  PREFIX "broker_call_seconds_bucket{le=\"+Inf\"} %" PRIu64 "\n" PREFIX
					 "broker_call_seconds_sum %" PRIu64 ".%09" PRIu64 "\n" PREFIX
					 "broker_call_seconds_count %" PRIu64 "\n",
				  n, counted->broker_ns / 1000000000, counted->broker_ns % 1000000000, n);
}

/* ---- the doors ---- */

/* one number of each door that there is */
static void add_doors(struct evbuffer *out, const char *name, const char *type, const char *help,
		      const Gateway *gateway, uint64_t http, uint64_t grpc) {
	head(out, name, type, help);
	if (gateway->http)
		(void)evbuffer_add_printf(out, "%s{door=\"http\"} %" PRIu64 "\n", name, http);
	if (gateway->grpc)
		(void)evbuffer_add_printf(out, "%s{door=\"grpc\"} %" PRIu64 "\n", name, grpc);
}

static void add_replies(struct evbuffer *out, const HttpCounters *http, const GrpcCounters *grpc) {
	head(out, PREFIX "http_replies_total", "counter", "HTTP replies, by the first digit of their status");
	for (int i = 1; i < 6; i++)
		(void)evbuffer_add_printf(out, PREFIX "http_replies_total{status=\"%dxx\"} %" PRIu64 "\n", i,
					  http->replies[i]);
	head(out, PREFIX "grpc_replies_total", "counter", "replies to gRPC calls, by status");
	for (size_t i = 0; i < sizeof(grpc->replies) / sizeof(grpc->replies[0]); i++)
		(void)evbuffer_add_printf(out, PREFIX "grpc_replies_total{status=\"%zu\"} %" PRIu64 "\n", i,
					  grpc->replies[i]);
}

static void add_gateway(struct evbuffer *out, const Gateway *gateway) {
	static const HttpCounters no_http;
	static const GrpcCounters no_grpc;
	const HttpCounters *http = gateway->http ? http_counters(gateway->http) : &no_http;
	const GrpcCounters *grpc = gateway->grpc ? grpc_counters(gateway->grpc) : &no_grpc;

	add_doors(out, PREFIX "connections", "gauge", "open connections", gateway,
		  gateway->http ? http_n_connections(gateway->http) : 0,
		  gateway->grpc ? grpc_n_connections(gateway->grpc) : 0);
	add_doors(out, PREFIX "requests_total", "counter", "requests that came", gateway, http->requests, grpc->calls);
	add_replies(out, http, grpc);
	add_doors(out, PREFIX "connection_cap_hits_total", "counter",
		  "connections that came when there were as many as there may be", gateway, http->cap_hits,
		  grpc->cap_hits);
	add_doors(out, PREFIX "refused_messages_total", "counter", "requests that were malformed or too large", gateway,
		  http->refused_heads, grpc->refused_messages);
	number(out, PREFIX "slow_connections_total", "counter", "HTTP connections that were closed for being too slow",
	       http->timed_out);
	number(out, PREFIX "cancelled_calls_total", "counter", "gRPC calls that were cancelled", grpc->cancelled);
	number(out, PREFIX "buffered_bytes", "gauge", "bytes of requests and replies that are held now",
	       gateway->budget.used);
	number(out, PREFIX "buffered_bytes_limit", "gauge", "how many may be held", gateway->budget.limit);
	number(out, PREFIX "buffer_refusals_total", "counter", "how often that did not suffice",
	       gateway->budget.refused);
}

static void add_info(struct evbuffer *out) {
	head(out, PREFIX "info", "gauge", "which program this is");
	(void)evbuffer_add_printf(out, PREFIX "info{version=\"");
	metrics_escape(out, PACKAGE_VERSION);
	(void)evbuffer_add_printf(out, "\"} 1\n");
}

static bool metrics_route(HttpRequest *request) {
	static const char *const path[] = { "metrics", NULL };
	const Metrics *metrics = http_userdata(request->http);
	struct evbuffer *out;

	if (!http_path_is(request, 0, path))
		return false;
	if (!http_method_is(request, "GET"))
		return true;
	out = evbuffer_new();
	if (!out) {
		http_reply_empty(request, 500);
		return true;
	}
	add_info(out);
	add_broker(out, &metrics->gateway->core);
	add_calls(out, &metrics->gateway->counted);
	add_latency(out, &metrics->gateway->counted);
	add_gateway(out, metrics->gateway);
	http_reply_header(request, "Cache-Control", "no-store");
	http_reply_buffer(request, 200, CONTENT_TYPE, out);
	evbuffer_free(out);
	return true;
}

int metrics_new(Metrics **ret, Gateway *gateway) {
	static HttpRoute *const routes[] = { metrics_route, NULL };
	Metrics *metrics = calloc(1, sizeof(*metrics));
	int r;

	if (!metrics)
		return -ENOMEM;
	metrics->gateway = gateway;
	r = http_new(&metrics->http, gateway->base, gateway->options, gateway->access, &gateway->core, &gateway->budget,
		     &gateway->turns, &gateway->listening, "metrics", routes, metrics);
	if (r) {
		free(metrics);
		return r;
	}
	*ret = metrics;
	return 0;
}

Metrics *metrics_free(Metrics *metrics) {
	if (metrics)
		http_free(metrics->http);
	free(metrics);
	return NULL;
}
