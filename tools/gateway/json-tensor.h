/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Tensors as JSON arrays, in Triton's way of reading and writing each datatype. */

#include <event2/buffer.h>

#include "datatype.h"
#include "json-read.h"

#define JSON_TENSOR_DEPTH_MAX 100

/*
 * The elements of @data, whose arrays may be nested in any way, as @count elements of @datatype. No more than @max bytes.
 * On success *ret is allocated and has *ret_size bytes.
 */
AnswerCode json_tensor_read(struct json_object *data, const char *name, DataType datatype, int64_t count, uint64_t max,
			    void **ret, uint64_t *ret_size, Answer *answer);
/* appends @count elements of @datatype, of which there are @size bytes at @data, as one flat array */
AnswerCode json_tensor_write(struct evbuffer *to, const char *name, DataType datatype, const void *data, uint64_t size,
			     uint64_t count, Answer *answer);
/* appends a string with its quotes; bytes that are no UTF-8 stay as they are */
AnswerCode json_write_string(struct evbuffer *to, const char *text, size_t length, Answer *answer);
