/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * CoreMetrics: what the core has done since the start, for whoever asks: how often each operation was called through each
 * door and what came of it, and how long the broker took. The core counts; nothing else writes.
 */

#include <stdint.h>

#include "access.h"
#include "answer.h"

/* O(OPERATION, "its name") */
#define CORE_OPERATIONS(O)                                \
	O(SYSTEM_STATUS, "system_status")                 \
	O(CUDA_STATUS, "cuda_status")                     \
	O(SYSTEM_REGISTER, "system_register")             \
	O(CUDA_REGISTER, "cuda_register")                 \
	O(SYSTEM_UNREGISTER, "system_unregister")         \
	O(CUDA_UNREGISTER, "cuda_unregister")             \
	O(SYSTEM_UNREGISTER_ALL, "system_unregister_all") \
	O(CUDA_UNREGISTER_ALL, "cuda_unregister_all")

typedef enum CoreOperation {
#define O(_operation, _name) CORE_OPERATION_##_operation,
	CORE_OPERATIONS(O)
#undef O
	CORE_OPERATIONS_N
} CoreOperation;

enum {
#define A(_code, _http, _grpc) CORE_CODE_##_code,
	ANSWER_CODES(A)
#undef A
	CORE_CODES_N
};

/* upper bounds of the buckets of a call of the broker, in microseconds; what is above them all is in one more */
#define CORE_BUCKETS(B) B(10) B(25) B(50) B(100) B(250) B(500) B(1000) B(2500) B(10000) B(100000) B(1000000)

enum {
#define B(_us) CORE_BUCKET_##_us,
	CORE_BUCKETS(B)
#undef B
	CORE_BUCKETS_N
};

typedef struct CoreMetrics {
	uint64_t calls[CORE_OPERATIONS_N][TRANSPORT_GRPC + 1][CORE_CODES_N];
	uint64_t broker_calls[CORE_BUCKETS_N + 1]; /* by the bucket that they fell in */
	uint64_t broker_ns;			   /* all of them together */
} CoreMetrics;

/* Counts an operation; returns @code. @metrics NULL counts nothing, as below. */
AnswerCode core_metrics_call(CoreMetrics *metrics, CoreOperation operation, const Caller *caller, AnswerCode code);
/* Counts a call of the broker that began at @began. */
void core_metrics_broker(CoreMetrics *metrics, uint64_t began);
/* the upper bound of bucket @i, in microseconds */
uint32_t core_metrics_bound(uint32_t i);
