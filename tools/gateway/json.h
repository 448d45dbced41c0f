/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * JSON of clients: json-c's objects, with the sentences that Triton's parser has for what is no JSON, and exact integers.
 * A document may be nested 200 deep; strings must be UTF-8.
 */

#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "answer.h"

#define JSON_DEPTH_MAX 200
/* bytes that a document may take once it is parsed, which can be hundreds of times its length */
#define JSON_COST_MAX ((size_t)44 * 1024 * 1024)

/*
 * Checks the @size bytes at @data. Returns true, or false with a sentence in @ret_why and the place in @ret_offset.
 * Integers above 2^64 - 1 are changed in place into the same number as a fraction, which json-c would else cut down.
 */
bool json_check(char *data, size_t size, const char **ret_why, size_t *ret_offset);
/* About as many bytes as the document, which json_check() has found good, takes once it is parsed. */
size_t json_cost(const char *data, size_t size);

/*
 * Parses them; changes them as json_check() does. ANSWER_OK with @ret, to be put (NULL for null); ANSWER_INTERNAL with
 * Triton's sentence, or ANSWER_RESOURCE_EXHAUSTED when they would cost more than @cost_max bytes.
 */
AnswerCode json_parse(char *data, size_t size, size_t cost_max, struct json_object **ret, Answer *answer);

/* The member @name of @object, borrowed, whatever @object is; false when there is none. */
bool json_member(struct json_object *object, const char *name, struct json_object **ret);
/* ANSWER_OK, or ANSWER_INTERNAL with Triton's sentence: they are of another type. The string is borrowed from @object. */
AnswerCode json_as_string(struct json_object *object, const char **ret, size_t *ret_size, Answer *answer);
AnswerCode json_as_uint64(struct json_object *object, uint64_t *ret, Answer *answer);
/* the same of a member; ANSWER_INTERNAL also when there is none */
AnswerCode json_member_as_string(struct json_object *object, const char *name, const char **ret, size_t *ret_size,
				 Answer *answer);
AnswerCode json_member_as_uint64(struct json_object *object, const char *name, uint64_t *ret, Answer *answer);
