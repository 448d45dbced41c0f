/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda/cause.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static const struct {
	const char *name, *text, *remedy;
	int code;
} causes[_CUDA_CAUSE_N] = {
#define CAUSE(_NAME, _code, _cause, _remedy) \
	[CUDA_CAUSE_##_NAME] = { .name = #_NAME, .text = _cause, .remedy = _remedy, .code = SHMB_E_##_code },
#include "causes.def"
#undef CAUSE
};

int cuda_cause_code(uint32_t cause) {
	return cause < _CUDA_CAUSE_N ? causes[cause].code : 0;
}

const char *cuda_cause_name(uint32_t cause) {
	return cause < _CUDA_CAUSE_N ? causes[cause].name : NULL;
}

const char *cuda_cause_text(uint32_t cause) {
	return cause < _CUDA_CAUSE_N ? causes[cause].text : NULL;
}

const char *cuda_cause_remedy(uint32_t cause) {
	return cause < _CUDA_CAUSE_N ? causes[cause].remedy : NULL;
}

int cuda_cause_write(char *why, CudaCause cause, const char *driver, ...) {
	va_list arguments;
	size_t length;

	va_start(arguments, driver);
	(void)vsnprintf(why, WIRE_TEXT_MAX, causes[cause].text, arguments);
	va_end(arguments);
	length = strlen(why);
	(void)snprintf(why + length, WIRE_TEXT_MAX - length, "%s%s%s: %s", driver ? " (" : "", driver ?: "",
		       driver ? ")" : "", causes[cause].remedy);
	return causes[cause].code;
}
