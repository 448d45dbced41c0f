/* SPDX-License-Identifier: Apache-2.0 */

#include <stdlib.h>

#include "json-read.h"

static AnswerCode refuse(Answer *answer, const char *what, const char *text) {
	return answer_set(answer, ANSWER_INTERNAL, "%s%s%s", what ?: "", what ? ": " : "", text);
}

/* puts @what in front of what @answer says */
static AnswerCode prefix(Answer *answer, const char *what) {
	char *text = answer->text;
	AnswerCode code = answer->code;

	if (!what || !text)
		return code;
	answer->text = NULL;
	(void)answer_set(answer, code, "%s: %s", what, text);
	free(text);
	return code;
}

AnswerCode json_read_string(struct json_object *value, const char *what, Bytes *ret, Answer *answer) {
	return json_as_string(value, &ret->data, &ret->size, answer) ? prefix(answer, what) : ANSWER_OK;
}

AnswerCode json_read_uint(struct json_object *value, const char *what, uint64_t *ret, Answer *answer) {
	return json_as_uint64(value, ret, answer) ? prefix(answer, what) : ANSWER_OK;
}

AnswerCode json_read_int(struct json_object *value, const char *what, int64_t *ret, Answer *answer) {
	/* json-c cuts what is too large down to INT64_MAX */
	if (!json_object_is_type(value, json_type_int) ||
	    (json_object_get_int64(value) >= 0 && json_object_get_uint64(value) > INT64_MAX))
		return refuse(answer, what, "attempt to access JSON non-signed-integer as signed-integer");
	*ret = json_object_get_int64(value);
	return ANSWER_OK;
}

AnswerCode json_read_double(struct json_object *value, const char *what, double *ret, Answer *answer) {
	if (!json_object_is_type(value, json_type_int) && !json_object_is_type(value, json_type_double))
		return refuse(answer, what, "attempt to access JSON non-number as double");
	*ret = json_object_get_double(value);
	return ANSWER_OK;
}

AnswerCode json_read_bool(struct json_object *value, const char *what, bool *ret, Answer *answer) {
	if (!json_object_is_type(value, json_type_boolean))
		return refuse(answer, what, "attempt to access JSON non-boolean as boolean");
	*ret = json_object_get_boolean(value);
	return ANSWER_OK;
}

AnswerCode json_read_member_string(struct json_object *object, const char *name, const char *what, Bytes *ret,
				   Answer *answer) {
	return json_member_as_string(object, name, &ret->data, &ret->size, answer) ? prefix(answer, what) : ANSWER_OK;
}

AnswerCode json_read_member_array(struct json_object *object, const char *name, const char *what,
				  struct json_object **ret, Answer *answer) {
	struct json_object *value;

	if (!json_member(object, name, &value)) {
		(void)answer_set(answer, ANSWER_INTERNAL, "attempt to access non-existing object member '%s'", name);
		return prefix(answer, what);
	}
	if (!json_object_is_type(value, json_type_array))
		return refuse(answer, what, "attempt to access JSON non-array as array");
	*ret = value;
	return ANSWER_OK;
}
