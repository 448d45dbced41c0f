/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reading parsed JSON as Triton does, with the sentence of what was being done (@what, or NULL) in front of that of json.h.
 * All return ANSWER_OK or ANSWER_INTERNAL. Strings are borrowed from the object.
 */

#include "core.h"
#include "json.h"

AnswerCode json_read_string(struct json_object *value, const char *what, Bytes *ret, Answer *answer);
AnswerCode json_read_uint(struct json_object *value, const char *what, uint64_t *ret, Answer *answer);
AnswerCode json_read_int(struct json_object *value, const char *what, int64_t *ret, Answer *answer);
AnswerCode json_read_double(struct json_object *value, const char *what, double *ret, Answer *answer);
AnswerCode json_read_bool(struct json_object *value, const char *what, bool *ret, Answer *answer);

/* members that must be there */
AnswerCode json_read_member_string(struct json_object *object, const char *name, const char *what, Bytes *ret,
				   Answer *answer);
AnswerCode json_read_member_array(struct json_object *object, const char *name, const char *what,
				  struct json_object **ret, Answer *answer);
