/* SPDX-License-Identifier: Apache-2.0 */

#include "core-metrics.h"

#include "clock.h"

static const uint32_t bounds[] = {
#define B(_us) _us,
	CORE_BUCKETS(B)
#undef B
};

AnswerCode core_metrics_call(CoreMetrics *metrics, CoreOperation operation, const Caller *caller, AnswerCode code) {
	if (metrics)
		metrics->calls[operation][caller->transport][code]++;
	return code;
}

void core_metrics_broker(CoreMetrics *metrics, uint64_t began) {
	uint64_t ns = clock_ns() - began;
	uint32_t i = 0;

	if (!metrics)
		return;
	while (i < CORE_BUCKETS_N && ns > (uint64_t)bounds[i] * 1000)
		i++;
	metrics->broker_calls[i]++;
	metrics->broker_ns += ns;
}

uint32_t core_metrics_bound(uint32_t i) {
	return bounds[i];
}
