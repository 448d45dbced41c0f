/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Gateway: the program as one object. Its parts are made in the order of their fields and torn down in the other order;
 * all run on the one event base, in one thread.
 */

#include <event2/event.h>
#include <stdbool.h>

#include "access.h"
#include "budget.h"
#include "core.h"
#include "devices.h"
#include "grpc.h"
#include "http.h"
#include "key.h"
#include "link.h"
#include "listen.h"
#include "metrics.h"
#include "models.h"
#include "options.h"
#include "turns.h"

/* how long a stop waits for what is under way */
#define GATEWAY_DRAIN_SECONDS 5

struct Gateway {
	const Options *options; /* borrowed */
	KeyOpener *opener;
	Devices devices;
	Access *access;
	ListenSet listening;
	struct event_base *base;
	Link *link;
	Models *models; /* NULL: none */
	CoreMetrics counted;
	Core core;
	Budget budget;
	Turns turns;
	Http *http;
	Grpc *grpc;
	Metrics *metrics;
	struct event *signals[2];
	struct event *drained; /* the end of the drain */
	uint32_t n_draining;   /* doors that have requests yet */
	bool stopping;
};

/* Binds everything, connects, and writes the ports file. {} before. 0 or a negative errno, logged. */
int gateway_init(Gateway *gateway, const Options *options);
/* Serves until SIGTERM or SIGINT, and then what is under way for GATEWAY_DRAIN_SECONDS. 0 or a negative errno. */
int gateway_run(Gateway *gateway);
/* also a half-made one */
void gateway_deinit(Gateway *gateway);
