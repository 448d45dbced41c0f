/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * CudaCause: why GPU memory is refused, in a sentence that names cause and remedy; causes.def has them all.
 */

#include <stdint.h>

#include "wire/protocol.h"

typedef enum CudaCause {
	CUDA_CAUSE_NONE,
#define CAUSE(_NAME, _code, _cause, _remedy) CUDA_CAUSE_##_NAME,
#include "causes.def"
#undef CAUSE
	_CUDA_CAUSE_N,
} CudaCause;

/* SHMB_E_* of a cause, 0 for none and for numbers that are none */
int cuda_cause_code(uint32_t cause);
/* "PID_CLASH"; NULL as above */
const char *cuda_cause_name(uint32_t cause);
/* format of the cause, and the remedy */
const char *cuda_cause_text(uint32_t cause);
const char *cuda_cause_remedy(uint32_t cause);
/*
 * Writes "CAUSE[ (DRIVER)]: REMEDY" into @why, WIRE_TEXT_MAX bytes; @driver is what the driver said, NULL for nothing. A
 * text that is too long loses its end. Returns the cause's SHMB_E_*.
 */
int cuda_cause_write(char *why, CudaCause cause, const char *driver, ...);
