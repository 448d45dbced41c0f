/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Answer: what became of a request, for both doors: one of Triton's codes, or of the few that it lacks, and the sentence
 * that the client sees. The doors only translate the code. {} is the answer "fine"; answer_deinit() frees the sentence.
 */

#include <stdarg.h>
#include <stddef.h>

/* A(code, HTTP status, gRPC status) */
#define ANSWER_CODES(A)              \
	A(OK, 200, 0)                \
	A(UNKNOWN, 400, 2)           \
	A(INTERNAL, 500, 13)         \
	A(NOT_FOUND, 404, 5)         \
	A(INVALID_ARG, 400, 3)       \
	A(UNAVAILABLE, 503, 14)      \
	A(UNSUPPORTED, 501, 12)      \
	A(ALREADY_EXISTS, 400, 6)    \
	A(CANCELLED, 400, 1)         \
	A(PERMISSION_DENIED, 403, 7) \
	A(UNAUTHENTICATED, 401, 16)  \
	A(RESOURCE_EXHAUSTED, 429, 8)

typedef enum AnswerCode {
#define A(_code, _http, _grpc) ANSWER_##_code,
	ANSWER_CODES(A)
#undef A
} AnswerCode;

typedef struct Answer {
	AnswerCode code;
	char *text; /* owned; NULL with ANSWER_OK, and where memory was short */
} Answer;

int answer_code_to_http(AnswerCode code);
int answer_code_to_grpc(AnswerCode code);

/* Sets code and sentence, whatever was there before. Always returns @code. */
AnswerCode answer_set(Answer *answer, AnswerCode code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The same for the one thing that is always the same. */
AnswerCode answer_no_memory(Answer *answer);
/* never NULL */
const char *answer_text(const Answer *answer);
/* Frees the sentence and says "fine" again. */
void answer_deinit(Answer *answer);
