/* SPDX-License-Identifier: Apache-2.0 */

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json-tensor.h"

#define WHAT "Unable to parse 'data'"

typedef struct Reader {
	DataType datatype;
	uint8_t *data;
	uint64_t size; /* of data */
	uint64_t done;
	Answer *answer;
} Reader;

static AnswerCode too_deep(Answer *answer, const char *what) {
	return answer_set(answer, ANSWER_INVALID_ARG, "%sJSON nesting depth exceeds maximum allowed limit (%d)", what,
			  JSON_TENSOR_DEPTH_MAX);
}

/* what the strings in @data take as elements */
static AnswerCode measure_strings(struct json_object *data, int depth, uint64_t *size, Answer *answer) {
	size_t i, n;
	Bytes text;

	if (depth >= JSON_TENSOR_DEPTH_MAX)
		return too_deep(answer, "");
	if (json_object_is_type(data, json_type_array)) {
		n = json_object_array_length(data);
		for (i = 0; i < n; i++)
			if (measure_strings(json_object_array_get_idx(data, i), depth + 1, size, answer))
				return answer->code;
		return ANSWER_OK;
	}
	if (json_read_string(data, "Unable to parse JSON bytes array", &text, answer))
		return answer->code;
	*size += sizeof(uint32_t) + text.size;
	return ANSWER_OK;
}

/* whole numbers lose what their datatype has no room for, as with Triton */
static AnswerCode read_number(const Reader *reader, struct json_object *value, void *ret) {
	uint64_t number;
	double real;
	bool truth;

	switch (reader->datatype) {
	case DATATYPE_BOOL:
		if (json_read_bool(value, WHAT, &truth, reader->answer))
			return reader->answer->code;
		*(uint8_t *)ret = truth;
		return ANSWER_OK;
	case DATATYPE_FP32:
	case DATATYPE_FP64:
		if (json_read_double(value, WHAT, &real, reader->answer))
			return reader->answer->code;
		if (reader->datatype == DATATYPE_FP64)
			memcpy(ret, &real, sizeof(real));
		else
			memcpy(ret, &(float){ (float)real }, sizeof(float));
		return ANSWER_OK;
	case DATATYPE_INT8:
	case DATATYPE_INT16:
	case DATATYPE_INT32:
	case DATATYPE_INT64:
		if (json_read_int(value, WHAT, (int64_t *)&number, reader->answer))
			return reader->answer->code;
		break;
	default:
		if (json_read_uint(value, WHAT, &number, reader->answer))
			return reader->answer->code;
	}
	/* little-endian */
	memcpy(ret, &number, datatype_size(reader->datatype));
	return ANSWER_OK;
}

static AnswerCode read_element(Reader *reader, struct json_object *value) {
	size_t size = datatype_size(reader->datatype);
	uint8_t bytes[sizeof(uint64_t)] = { 0 };
	uint32_t length;
	Bytes text;

	if (reader->done >= reader->size)
		return answer_set(reader->answer, ANSWER_INTERNAL,
				  WHAT ": Shape does not match true shape of 'data' field");
	if (reader->datatype != DATATYPE_BYTES) {
		if (read_number(reader, value, bytes))
			return reader->answer->code;
		memcpy(reader->data + reader->done, bytes, size);
		reader->done += size;
		return ANSWER_OK;
	}
	if (json_read_string(value, WHAT, &text, reader->answer))
		return reader->answer->code;
	length = (uint32_t)text.size;
	memcpy(reader->data + reader->done, &length, sizeof(length));
	memcpy(reader->data + reader->done + sizeof(length), text.data, length);
	reader->done += sizeof(length) + length;
	return ANSWER_OK;
}

static AnswerCode read_elements(Reader *reader, struct json_object *data, int depth) {
	size_t i, n;

	if (depth >= JSON_TENSOR_DEPTH_MAX)
		return too_deep(reader->answer, WHAT ": ");
	if (!json_object_is_type(data, json_type_array))
		return read_element(reader, data);
	n = json_object_array_length(data);
	for (i = 0; i < n; i++)
		if (read_elements(reader, json_object_array_get_idx(data, i), depth + 1))
			return reader->answer->code;
	return ANSWER_OK;
}

static AnswerCode measure(struct json_object *data, const char *name, DataType datatype, int64_t count, uint64_t max,
			  uint64_t *ret, Answer *answer) {
	size_t size = datatype_size(datatype);

	*ret = 0;
	if (datatype == DATATYPE_BYTES) {
		if (measure_strings(data, 0, ret, answer))
			return answer->code;
	} else if (size > 1 && count > INT64_MAX / (int64_t)size)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "byte size overflow for input '%s': element count (%" PRId64
				  ") * data type size (%zu) exceeds maximum allowed size (%" PRId64 ")",
				  name, count, size, INT64_MAX);
	else
		*ret = (uint64_t)count * size;
	if (*ret > max)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "JSON input '%s' has a byte_size (%" PRIu64
				  " bytes) that exceeds the maximum allowed value of %" PRIu64
				  " bytes. Use --http-max-input-size to increase the limit.",
				  name, *ret, max);
	if (datatype == DATATYPE_FP16 || datatype == DATATYPE_BF16)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "receiving %s data via JSON is not supported. Please use the binary data format for "
				  "input %s",
				  datatype_name(datatype), name);
	if (datatype == DATATYPE_INVALID)
		return answer_set(answer, ANSWER_INVALID_ARG, "invalid datatype for input %s", name);
	return ANSWER_OK;
}

AnswerCode json_tensor_read(struct json_object *data, const char *name, DataType datatype, int64_t count, uint64_t max,
			    void **ret, uint64_t *ret_size, Answer *answer) {
	Reader reader = { .datatype = datatype, .answer = answer };

	if (measure(data, name, datatype, count, max, &reader.size, answer))
		return answer->code;
	reader.data = malloc(reader.size ? reader.size : 1);
	if (!reader.data)
		return answer_no_memory(answer);
	if (!read_elements(&reader, data, 0) && reader.done != reader.size)
		(void)answer_set(answer, ANSWER_INTERNAL,
				 "Failed to parse 'data' field: shape does not match true shape");
	if (answer->code) {
		free(reader.data);
		return answer->code;
	}
	*ret = reader.data;
	*ret_size = reader.size;
	return ANSWER_OK;
}

/* --- writing */

static AnswerCode append(struct evbuffer *to, const char *text, size_t length, Answer *answer) {
	return evbuffer_add(to, text, length) ? answer_no_memory(answer) : ANSWER_OK;
}

AnswerCode json_write_string(struct evbuffer *to, const char *text, size_t length, Answer *answer) {
	struct json_object *string = length <= INT_MAX ? json_object_new_string_len(text, (int)length) : NULL;
	const char *json = NULL;
	AnswerCode code;
	size_t size;

	if (string)
		json = json_object_to_json_string_length(
			string, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE, &size);
	code = json ? append(to, json, size, answer) : answer_no_memory(answer);
	(void)json_object_put(string);
	return code;
}

/* the shortest of the usual spellings that is read as the same number, and as no integer */
static void print_real(double value, char text[40]) {
	int digits;

	if (isnan(value))
		(void)strcpy(text, "NaN");
	else if (isinf(value))
		(void)strcpy(text, value < 0 ? "-Infinity" : "Infinity");
	else {
		for (digits = 15; digits <= 17; digits++) {
			(void)snprintf(text, 32, "%.*g", digits, value);
			if (strtod(text, NULL) == value)
				break;
		}
		if (!strpbrk(text, ".e"))
			(void)strcat(text, ".0");
	}
}

static void print_element(DataType datatype, const uint8_t *data, char text[40]) {
	uint64_t number = 0;
	double real;
	float single;
	size_t bits = 8 * datatype_size(datatype);

	switch (datatype) {
	case DATATYPE_BOOL:
		(void)strcpy(text, *data ? "true" : "false");
		return;
	case DATATYPE_FP32:
		memcpy(&single, data, sizeof(single));
		print_real(single, text);
		return;
	case DATATYPE_FP64:
		memcpy(&real, data, sizeof(real));
		print_real(real, text);
		return;
	default:
		memcpy(&number, data, datatype_size(datatype));
	}
	if (datatype >= DATATYPE_INT8 && datatype <= DATATYPE_INT64)
		/* the sign of the narrow number becomes that of the wide one */
		(void)snprintf(text, 40, "%" PRId64, (int64_t)(number << (64 - bits)) >> (64 - bits));
	else
		(void)snprintf(text, 40, "%" PRIu64, number);
}

static AnswerCode write_strings(struct evbuffer *to, const char *name, const uint8_t *data, uint64_t size,
				uint64_t count, Answer *answer) {
	uint64_t i, offset = 0;
	uint32_t length;

	for (i = 0; i < count; i++) {
		if (size - offset < sizeof(length))
			goto mismatch;
		memcpy(&length, data + offset, sizeof(length));
		offset += sizeof(length);
		if (size - offset < length)
			goto mismatch;
		if ((i && append(to, ",", 1, answer)) ||
		    json_write_string(to, (const char *)data + offset, length, answer))
			return answer->code;
		offset += length;
	}
	return ANSWER_OK;
mismatch:
	return answer_set(answer, ANSWER_INTERNAL, "output tensor shape does not match size of output for '%s'", name);
}

AnswerCode json_tensor_write(struct evbuffer *to, const char *name, DataType datatype, const void *data, uint64_t size,
			     uint64_t count, Answer *answer) {
	size_t element = datatype_size(datatype);
	char text[41];
	uint64_t i;

	if (datatype == DATATYPE_FP16 || datatype == DATATYPE_BF16)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "sending %s data via JSON is not supported. Please use the binary data format for "
				  "output",
				  datatype_name(datatype));
	if (append(to, "[", 1, answer))
		return answer->code;
	if (datatype == DATATYPE_BYTES) {
		if (write_strings(to, name, data, size, count, answer))
			return answer->code;
		return append(to, "]", 1, answer);
	}
	if (size / element != count || size % element)
		return answer_set(answer, ANSWER_INTERNAL,
				  "Failed to write 'data' field: output tensor shape does not match size of output for "
				  "'%s'",
				  name);
	for (i = 0; i < count; i++) {
		text[0] = ',';
		print_element(datatype, (const uint8_t *)data + i * element, text + 1);
		if (append(to, i ? text : text + 1, strlen(i ? text : text + 1), answer))
			return answer->code;
	}
	return append(to, "]", 1, answer);
}
