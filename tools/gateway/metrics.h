/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Metrics: the door for /metrics, in the text format 0.0.4 of Prometheus: the broker's numbers, what the core was asked and
 * what came of it, how long the broker took, connections, and what was refused for its size or its pace. Names of regions
 * and users are never in it: what clients choose makes no time series.
 */

#include <event2/buffer.h>

typedef struct Gateway Gateway;
typedef struct Metrics Metrics;

/* Serves at the sockets of the door "metrics". Borrows @gateway, whose other doors are made already. 0 or -ENOMEM. */
int metrics_new(Metrics **ret, Gateway *gateway);
/* NULL is fine; returns NULL */
Metrics *metrics_free(Metrics *metrics);

/* Appends @value to @out as the value of a label, without its quotes: escaped. */
void metrics_escape(struct evbuffer *out, const char *value);
