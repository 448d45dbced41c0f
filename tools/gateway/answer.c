/* SPDX-License-Identifier: Apache-2.0 */

#include <stdio.h>
#include <stdlib.h>

#include "answer.h"

int answer_code_to_http(AnswerCode code) {
	static const int codes[] = {
#define A(_code, _http, _grpc) [ANSWER_##_code] = _http,
		ANSWER_CODES(A)
#undef A
	};

	return codes[code];
}

int answer_code_to_grpc(AnswerCode code) {
	static const int codes[] = {
#define A(_code, _http, _grpc) [ANSWER_##_code] = _grpc,
		ANSWER_CODES(A)
#undef A
	};

	return codes[code];
}

AnswerCode answer_set(Answer *answer, AnswerCode code, const char *format, ...) {
	va_list list;

	answer_deinit(answer);
	answer->code = code;
	va_start(list, format);
	if (vasprintf(&answer->text, format, list) < 0)
		answer->text = NULL;
	va_end(list);
	return code;
}

AnswerCode answer_no_memory(Answer *answer) {
	return answer_set(answer, ANSWER_RESOURCE_EXHAUSTED, "out of memory");
}

const char *answer_text(const Answer *answer) {
	return answer->text ?: answer->code == ANSWER_OK ? "" : "out of memory";
}

void answer_deinit(Answer *answer) {
	free(answer->text);
	*answer = (Answer){};
}
