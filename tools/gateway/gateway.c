/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "gateway.h"
#include "log.h"

/* of what is no connection */
#define GATEWAY_FDS 64

static void door_done(void *userdata) {
	Gateway *gateway = userdata;

	if (--gateway->n_draining == 0)
		(void)event_base_loopexit(gateway->base, NULL);
}

static void on_drained(evutil_socket_t fd, short what, void *userdata) {
	Gateway *gateway = userdata;

	(void)fd;
	(void)what;
	log_write("what is still under way is given up");
	(void)event_base_loopbreak(gateway->base);
}

static void on_signal(evutil_socket_t number, short what, void *userdata) {
	const struct timeval drain = { .tv_sec = GATEWAY_DRAIN_SECONDS };
	Gateway *gateway = userdata;

	(void)what;
	if (gateway->stopping)
		return;
	gateway->stopping = true;
	log_write("stopping: %s", strsignal((int)number));
	(void)event_add(gateway->drained, &drain);
	gateway->n_draining = 1;
	if (gateway->http) {
		gateway->n_draining++;
		http_stop(gateway->http, door_done, gateway);
	}
	if (gateway->grpc) {
		gateway->n_draining++;
		grpc_stop(gateway->grpc, door_done, gateway);
	}
	door_done(gateway);
}

/* accept never runs out of fds before the caps of connections are reached, of which each of the three doors has one */
static void raise_fds(const Options *options) {
	rlim_t needed = 3 * (rlim_t)options->max_connections + GATEWAY_FDS;
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= needed)
		return;
	limit.rlim_cur = needed < limit.rlim_max ? needed : limit.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur < needed)
		log_write("RLIMIT_NOFILE is lower than --max-connections needs");
}

static int gateway_listen(Gateway *gateway) {
	const Options *options = gateway->options;
	ListenSet *set = &gateway->listening;
	int r = 0;

	set->mode = options->socket_mode;
	set->beyond_loopback = access_has_tokens(gateway->access);
	if (options->allow_http)
		r = listen_door(set, "http", options->http_address, options->http_port, options->http_socket);
	if (!r && options->allow_metrics)
		r = listen_door(set, "metrics", options->metrics_address, options->metrics_port,
				options->metrics_socket);
	if (!r && options->allow_grpc)
		r = listen_door(set, "grpc", options->grpc_address, options->grpc_port, options->grpc_socket);
	return r;
}

static int gateway_watch_signals(Gateway *gateway) {
	static const int numbers[] = { SIGTERM, SIGINT };

	for (size_t i = 0; i < 2; i++) {
		gateway->signals[i] = evsignal_new(gateway->base, numbers[i], on_signal, gateway);
		if (!gateway->signals[i] || event_add(gateway->signals[i], NULL))
			return -ENOMEM;
	}
	gateway->drained = evtimer_new(gateway->base, on_drained, gateway);
	return gateway->drained ? 0 : -ENOMEM;
}

int gateway_init(Gateway *gateway, const Options *options) {
	int r;

	gateway->options = options;
	(void)signal(SIGPIPE, SIG_IGN);
	raise_fds(options);
	r = key_opener_new(&gateway->opener, options->key_owners, options->key_prefix);
	if (r)
		return r;
	r = devices_parse(&gateway->devices, options->cuda_devices);
	if (r)
		return r;
	r = access_new(&gateway->access, options->token_file, options->allow_host);
	if (r)
		return r;
	r = gateway_listen(gateway);
	if (r)
		return r;
	gateway->base = event_base_new();
	if (!gateway->base)
		return -ENOMEM;
	r = turns_init(&gateway->turns, gateway->base);
	if (!r)
		r = gateway_watch_signals(gateway);
	if (!r)
		r = link_new(&gateway->link, gateway->base, options->socket);
	if (!r && options->models[0])
		r = models_new(&gateway->models, gateway->base, options->models, options->model_delay);
	if (r)
		return r;
	gateway->budget.limit = options->max_buffered;
	gateway->core = (Core){
		.link = gateway->link,
		.opener = gateway->opener,
		.metrics = &gateway->counted,
		.server_name = options->id,
		.uid = geteuid(),
		.devices = &gateway->devices,
		.allow_client_shm = options->allow_client_shm,
		.models = gateway->models,
	};
	if (options->allow_http)
		r = http_new(&gateway->http, gateway->base, options, gateway->access, &gateway->core, &gateway->budget,
			     &gateway->turns, &gateway->listening, "http", NULL, NULL);
	if (!r && options->allow_grpc)
		r = grpc_new(&gateway->grpc, gateway->base, options, gateway->access, &gateway->core, &gateway->budget,
			     &gateway->turns, &gateway->listening);
	if (!r && options->allow_metrics)
		r = metrics_new(&gateway->metrics, gateway);
	if (!r && options->ports_file[0])
		r = listen_write_ports(&gateway->listening, options->ports_file);
	return r;
}

int gateway_run(Gateway *gateway) {
	return event_base_dispatch(gateway->base) < 0 ? -EIO : 0;
}

void gateway_deinit(Gateway *gateway) {
	models_stop(gateway->models);
	metrics_free(gateway->metrics);
	grpc_free(gateway->grpc);
	http_free(gateway->http);
	models_free(gateway->models);
	link_free(gateway->link);
	turns_deinit(&gateway->turns);
	for (size_t i = 0; i < 2; i++) {
		if (gateway->signals[i])
			event_free(gateway->signals[i]);
	}
	if (gateway->drained)
		event_free(gateway->drained);
	if (gateway->base)
		event_base_free(gateway->base);
	listen_set_deinit(&gateway->listening);
	access_free(gateway->access);
	key_opener_free(gateway->opener);
}
