/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Scale: what the parts of `shmbroker-bench scale` share. Each part has a broker of its own, takes its samples at
 * growing sizes, and leaves out rows that --only does not name.
 */

#include "bench.h"

#define SCALE_STEPS_MAX 8
#define SCALE_CLIENT_FDS 20 /* what else a part has open */
#define SCALE_CONFIG                          \
	"shared_uid = yes\nfair_share = no\n" \
	"[quota]\nsessions = unlimited\nregions = unlimited\nmaps = unlimited\nleases = unlimited\nfds = unlimited\n"

/* the medians of one row over the sizes */
typedef struct Curve {
	double x[SCALE_STEPS_MAX];
	double y[SCALE_STEPS_MAX];
	size_t n;
} Curve;

/* the sizes of a part, of which there is a shorter list for --quick */
#define SCALE_STEPS(_name, _bench, _ret_n)                                                             \
	((_bench)->quick ? (*(_ret_n) = sizeof(_name##_quick) / sizeof(*_name##_quick), _name##_quick) \
			 : (*(_ret_n) = sizeof(_name) / sizeof(*_name), _name))

/* adds the median of @samples, which it sorts, and a row of them */
void curve_sample(Curve *curve, Bench *bench, const char *name, uint64_t n, const char *unit, const char *detail,
		  double *samples, size_t n_samples);
/* the row of the exponent by which a curve grows */
void curve_growth(const Curve *curve, Bench *bench, const char *name);
/* a row of one number, which does not vary */
void scale_number(Bench *bench, const char *name, uint64_t n, const char *unit, const char *detail, double value);
/* whether there is to be any of the rows with these names, which spaces separate */
bool scale_wants(const Bench *bench, const char *names);
/* any number; the same ones in each run. @state is not 0. */
uint64_t scale_random(uint64_t *state);
#define SCALE_SEED UINT64_C(88172645463325252)

/* connections without lease pages, then consumers with them: scale-clients.c */
void scale_connections(Bench *bench);
void scale_consumers(Bench *bench);
