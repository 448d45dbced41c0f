/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Models: the reference models, which show what a server does with the broker's memory and let clients run end to end.
 *
 *   simple          INPUT0, INPUT1 INT32 [n,16] -> OUTPUT0 their sums, OUTPUT1 their differences
 *   simple_string   the same on decimal integers in BYTES
 *   simple_int8     the same as simple on INT8
 *   simple_identity INPUT0 BYTES [n,m] -> OUTPUT0, a copy
 *   identity_TYPE   INPUT0 [n,m] of one datatype -> OUTPUT0, a copy; identity_bool to identity_bf16, identity_bytes
 *
 * Each has the one version 1. Which of them there are, under which names, and how long each waits before it computes, is
 * said at start and does not change. A model that waits has one instance, as Triton's have: it takes its requests one
 * after the other.
 */

#include <event2/event.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "core.h"
#include "datatype.h"

#define MODEL_PLATFORM "shmbroker"
#define MODEL_VERSION "1"

typedef struct Infer Infer;
typedef struct Model Model;
typedef struct ModelTensor ModelTensor;
typedef struct Models Models;

struct ModelTensor {
	const char *name;
	DataType datatype;
	int64_t dim; /* -1: any; the batch's dimension is in front of it */
};

/* since the start; times in ns */
typedef struct ModelStatistics {
	uint64_t last_ms; /* of the epoch: when the last inference ended */
	uint64_t rows;	  /* that were inferred */
	uint64_t n_succeeded, succeeded_ns;
	uint64_t n_failed, failed_ns;
	uint64_t delayed_ns; /* of succeeded_ns: what was waited first */
} ModelStatistics;

/* whose turn it is at a model that waits */
typedef struct ModelTurn {
	Infer *computing;
	TAILQ_HEAD(, Infer) waiting;
} ModelTurn;

struct Model {
	const char *name;
	char *alias; /* the same when it was given on the command line, then owned */
	uint32_t max_batch_size;
	uint32_t n_inputs, n_outputs;
	const ModelTensor *inputs, *outputs;
	/*
	 * Does a bounded piece of the work on @infer, of which the inputs are checked; *ret_more says that it is to be
	 * called again. What it refuses (infer->answer is set) ends the
	 * inference.
	 */
	AnswerCode (*step)(Infer *infer, bool *ret_more);
	uint32_t delay_ms; /* before the first step */
	ModelStatistics *statistics;
	ModelTurn *turn;
};

struct Models {
	struct event_base *base; /* the loop on which they compute; borrowed */
	/* of infer.c: what was started and has not ended, and the bytes of outputs that go into replies */
	TAILQ_HEAD(, Infer) in_progress;
	uint32_t n_in_progress;
	uint64_t results;

	ModelStatistics *statistics; /* of each */
	ModelTurn *turns;	     /* of each */
	size_t n;
	Model models[];
};

/*
 * @list is words with commas between them: names, "all", and NAME=MODEL for a model under another name. @delays is "" or
 * "NAME=MS,...". What is wrong with them is logged.
 * Returns 0, -EINVAL, -ENOMEM.
 */
int models_new(Models **ret, struct event_base *base, const char *list, const char *delays);
/* Ends what is in progress with UNAVAILABLE. NULL is fine. */
void models_stop(Models *models);
/* After models_stop(). NULL is fine; always returns NULL. */
Models *models_free(Models *models);
/*
 * The model of that name, in that version: decimal, or empty for any. Triton's texts when there is none. @models may be
 * NULL.
 */
AnswerCode models_find(const Models *models, Bytes name, Bytes version, const Model **ret, Answer *answer);
