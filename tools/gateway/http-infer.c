/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The models over HTTP: metadata and readiness, and inference with its tensors as JSON, as bytes behind the JSON (the binary
 * tensor extension) or in shared memory.
 */

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "classify.h"
#include "http-coding.h"
#include "http-infer.h"
#include "json-tensor.h"

typedef struct HttpInfer {
	HttpRequest *request;
	Infer *infer;
	InferForm form;	       /* of outputs of which the request does not say */
	const uint8_t *binary; /* what follows the JSON, */
	size_t n_binary;       /* and is not yet an input's */
} HttpInfer;

static void http_infer_free(HttpInfer *http) {
	(void)infer_free(http->infer);
	free(http);
}

/* --- inputs */

static AnswerCode check_sources(struct json_object *input, Answer *answer) {
	struct json_object *parameters = NULL;
	bool has_data = json_member(input, "data", NULL), has_binary, has_shared;

	(void)json_member(input, "parameters", &parameters);
	has_binary = json_member(parameters, "binary_data_size", NULL);
	has_shared = json_member(parameters, "shared_memory_region", NULL);
	if (has_data + has_binary + has_shared == 1)
		return ANSWER_OK;
	return answer_set(
		answer, ANSWER_INVALID_ARG,
		"Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
		"'shared_memory_region' in 'parameters'. But%s%s%s%s",
		has_data || has_binary || has_shared ? " set" : " no field is set", has_data ? " 'data'" : "",
		has_binary ? " 'binary_data_size'" : "", has_shared ? " 'shared_memory_region'" : "");
}

/* *ret_shared says whether it is in shared memory */
static AnswerCode read_shared(struct json_object *tensor, bool *ret_shared, InferShared *ret, Answer *answer) {
	struct json_object *parameters = NULL, *value;
	Bytes region;

	*ret = (InferShared){ 0 };
	(void)json_member(tensor, "parameters", &parameters);
	*ret_shared = json_member(parameters, "shared_memory_region", &value);
	if (*ret_shared) {
		if (json_read_string(value, "Unable to parse 'shared_memory_region'", &region, answer))
			return answer->code;
		ret->region = region;
	}
	if (json_member(parameters, "shared_memory_offset", &value) &&
	    json_read_uint(value, "Unable to parse 'shared_memory_offset'", &ret->offset, answer))
		return answer->code;
	ret->has_byte_size = json_member(parameters, "shared_memory_byte_size", &value);
	if (ret->has_byte_size)
		return json_read_uint(value, "Unable to parse 'shared_memory_byte_size'", &ret->byte_size, answer);
	return ANSWER_OK;
}

static AnswerCode take_binary(HttpInfer *http, InferInput *input, uint64_t size) {
	if (size > http->n_binary)
		return answer_set(&http->infer->answer, ANSWER_INVALID_ARG,
				  "unexpected size for input '%s', expecting %" PRIu64
				  " additional bytes for model '%s'",
				  input->name, size - http->n_binary, http->infer->model->name);
	tensor_memory_borrow(&input->memory, http->binary, size);
	http->binary += size;
	http->n_binary -= size;
	return ANSWER_OK;
}

static AnswerCode refuse_count(Infer *infer, const InferInput *input, int64_t count) {
	char *text = NULL;
	AnswerCode code;

	text = infer_shape_text(input->shape, input->n_shape);
	if (!text)
		return answer_no_memory(&infer->answer);
	if (count == DATATYPE_COUNT_INVALID)
		code = answer_set(&infer->answer, ANSWER_INVALID_ARG,
				  "invalid shape for input '%s': shape %s contains one or more invalid dimensions",
				  input->name, text);
	else
		code = answer_set(&infer->answer, ANSWER_INVALID_ARG,
				  "invalid shape for input '%s': shape %s causes total element count to exceed maximum "
				  "size of %" PRId64,
				  input->name, text, INT64_MAX);
	free(text);
	return code;
}

static AnswerCode read_data(HttpInfer *http, struct json_object *from, InferInput *input) {
	Infer *infer = http->infer;
	int64_t count = datatype_count(input->shape, input->n_shape);
	struct json_object *data;
	uint64_t size;
	void *bytes;

	if (!count)
		return ANSWER_OK;
	if (count == DATATYPE_COUNT_INVALID || count == DATATYPE_COUNT_TOO_MANY)
		return refuse_count(infer, input, count);
	if (json_read_member_array(from, "data", "Unable to parse 'data'", &data, &infer->answer) ||
	    json_tensor_read(data, input->name, input->datatype, count, http->request->options->http_max_input_size,
			     &bytes, &size, &infer->answer))
		return infer->answer.code;
	tensor_memory_take(&input->memory, bytes, size);
	return ANSWER_OK;
}

static AnswerCode read_shape(struct json_object *from, int64_t **ret, size_t *ret_n, Answer *answer) {
	struct json_object *array;
	uint64_t dim;
	size_t i, n;

	if (json_read_member_array(from, "shape", "Unable to parse 'shape'", &array, answer))
		return answer->code;
	n = json_object_array_length(array);
	*ret = calloc(n ? n : 1, sizeof(**ret));
	if (!*ret)
		return answer_no_memory(answer);
	for (i = 0; i < n; i++) {
		if (json_read_uint(json_object_array_get_idx(array, i), "Unable to parse 'shape'", &dim, answer))
			return answer->code;
		(*ret)[i] = (int64_t)dim;
	}
	*ret_n = n;
	return ANSWER_OK;
}

static AnswerCode read_input(HttpInfer *http, struct json_object *from) {
	Infer *infer = http->infer;
	Answer *answer = &infer->answer;
	struct json_object *parameters = NULL, *value;
	Bytes name, datatype;
	InferShared shared;
	InferInput *input;
	int64_t *shape = NULL;
	size_t n_shape = 0;
	uint64_t size;
	bool is_shared;

	if (check_sources(from, answer) ||
	    json_read_member_string(from, "name", "Unable to parse 'name'", &name, answer) ||
	    json_read_member_string(from, "datatype", "Unable to parse 'datatype'", &datatype, answer) ||
	    read_shape(from, &shape, &n_shape, answer) ||
	    infer_add_input(infer, name, datatype_from_name(datatype.data, datatype.size), shape, n_shape)) {
		free(shape);
		return answer->code;
	}
	free(shape);
	input = &infer->inputs[infer->n_inputs - 1];
	(void)json_member(from, "parameters", &parameters);
	if (json_member(parameters, "binary_data_size", &value)) {
		if (json_read_uint(value, "Unable to parse 'binary_data_size'", &size, answer))
			return answer->code;
		return take_binary(http, input, size);
	}
	if (read_shared(from, &is_shared, &shared, answer))
		return answer->code;
	return is_shared ? infer_input_share(infer, input, &shared) : read_data(http, from, input);
}

static AnswerCode read_inputs(HttpInfer *http, struct json_object *from) {
	Infer *infer = http->infer;
	struct json_object *array;
	size_t i, n;

	if (json_read_member_array(from, "inputs", "Unable to parse 'inputs'", &array, &infer->answer))
		return infer->answer.code;
	n = json_object_array_length(array);
	for (i = 0; i < n; i++)
		if (read_input(http, json_object_array_get_idx(array, i)))
			return infer->answer.code;
	if (http->n_binary)
		return answer_set(&infer->answer, ANSWER_INVALID_ARG, "unexpected additional input data for model '%s'",
				  infer->model->name);
	return ANSWER_OK;
}

/* --- outputs */

static AnswerCode check_output(struct json_object *parameters, Answer *answer) {
	struct json_object *value;
	bool is_binary = false;

	if (!json_member(parameters, "shared_memory_region", NULL))
		return ANSWER_OK;
	if (json_member(parameters, "classification", NULL))
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "Output can't set both 'shared_memory_region' and 'classification'");
	if (json_member(parameters, "binary_data", &value) &&
	    json_read_bool(value, "Unable to set 'binary_data'", &is_binary, answer))
		return answer->code;
	if (is_binary)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "Output can't set both 'shared_memory_region' and 'binary_data'");
	return ANSWER_OK;
}

static AnswerCode read_output(HttpInfer *http, struct json_object *from) {
	Infer *infer = http->infer;
	Answer *answer = &infer->answer;
	struct json_object *parameters = NULL, *value;
	bool is_shared, is_binary = false;
	InferShared shared;
	InferOutput *output;
	Bytes name;

	(void)json_member(from, "parameters", &parameters);
	if (check_output(parameters, answer) ||
	    json_read_member_string(from, "name", "Unable to parse 'name'", &name, answer) ||
	    infer_add_output(infer, name))
		return answer->code;
	output = &infer->outputs[infer->n_outputs - 1];
	if (json_member(parameters, "classification", &value) &&
	    json_read_uint(value, "Unable to set 'classification'", &output->n_classes, answer))
		return answer->code;
	if (read_shared(from, &is_shared, &shared, answer))
		return answer->code;
	if (is_shared)
		return infer_output_share(infer, output, &shared);
	if (json_member(parameters, "binary_data", &value) &&
	    json_read_bool(value, "Unable to parse 'binary_data'", &is_binary, answer))
		return answer->code;
	output->form = is_binary ? INFER_FORM_BINARY : INFER_FORM_JSON;
	return ANSWER_OK;
}

static AnswerCode read_outputs(HttpInfer *http, struct json_object *from) {
	Infer *infer = http->infer;
	struct json_object *array;
	size_t i, n;

	if (!json_member(from, "outputs", NULL))
		return ANSWER_OK;
	if (json_read_member_array(from, "outputs", "Unable to parse 'outputs'", &array, &infer->answer))
		return infer->answer.code;
	n = json_object_array_length(array);
	for (i = 0; i < n; i++)
		if (read_output(http, json_object_array_get_idx(array, i)))
			return infer->answer.code;
	return ANSWER_OK;
}

/* --- the request as a whole */

/* what the models do not use is checked as Triton checks it */
static AnswerCode read_parameter(HttpInfer *http, const char *name, struct json_object *value) {
	Answer *answer = &http->infer->answer;
	uint64_t number;
	bool truth;
	Bytes text;

	if (!strcmp(name, "binary_data_output")) {
		if (json_read_bool(value, "Unable to parse 'binary_data_output'", &truth, answer))
			return answer->code;
		http->form = truth ? INFER_FORM_BINARY : INFER_FORM_JSON;
	} else if (!strcmp(name, "sequence_id")) {
		if (!json_object_is_type(value, json_type_int) || json_object_get_int64(value) < 0)
			return json_read_string(value, "Unable to parse 'sequence_id'", &text, answer);
	} else if (!strcmp(name, "sequence_start"))
		return json_read_bool(value, "Unable to parse 'sequence_start'", &truth, answer);
	else if (!strcmp(name, "sequence_end"))
		return json_read_bool(value, "Unable to parse 'sequence_end'", &truth, answer);
	else if (!strcmp(name, "priority"))
		return json_read_uint(value, "Unable to parse 'priority'", &number, answer);
	else if (!strcmp(name, "timeout"))
		return json_read_uint(value, "Unable to parse 'timeout'", &number, answer);
	else if (!strncmp(name, "triton_", 7))
		return answer_set(
			answer, ANSWER_INVALID_ARG,
			"parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
			"specified.");
	else if (!value || json_object_is_type(value, json_type_array) || json_object_is_type(value, json_type_object))
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "parameter '%s' has invalid type. It should be either 'int', 'bool', or 'string'.",
				  name);
	return ANSWER_OK;
}

static AnswerCode read_parameters(HttpInfer *http, struct json_object *from) {
	Answer *answer = &http->infer->answer;
	struct json_object *parameters;

	if (!json_member(from, "parameters", &parameters))
		return ANSWER_OK;
	if (!json_object_is_type(parameters, json_type_object))
		return answer_set(answer, ANSWER_INTERNAL,
				  "failed to get request params.: attempt to get members for non-object");
	json_object_object_foreach(parameters, name, value) if (read_parameter(http, name, value)) return answer->code;
	return ANSWER_OK;
}

static AnswerCode read_json(HttpInfer *http, struct json_object *from) {
	Infer *infer = http->infer;
	struct json_object *value;
	Bytes id;

	if (json_member(from, "id", &value) &&
	    (json_read_string(value, "Unable to parse 'id'", &id, &infer->answer) || infer_set_id(infer, id)))
		return infer->answer.code;
	if (read_parameters(http, from) || read_inputs(http, from) || read_outputs(http, from))
		return infer->answer.code;
	return ANSWER_OK;
}

/* --- from the request to the reply */

/* the request, from its body */
static AnswerCode read_request(HttpInfer *http) {
	HttpRequest *request = http->request;
	Infer *infer = http->infer;
	Answer *answer = &infer->answer;
	struct json_object *json;
	size_t length;

	if (http_request_check_size(request, answer) || http_coding_undo(request, answer) ||
	    http_header_length(request, &length, answer))
		return answer->code;
	if (!length) {
		http->form = INFER_FORM_BINARY;
		http->n_binary = evbuffer_get_length(request->body);
		return infer_add_raw_input(infer, evbuffer_pullup(request->body, -1), http->n_binary);
	}
	if (length > HTTP_INFER_JSON_MAX)
		return answer_set(
			answer, ANSWER_RESOURCE_EXHAUSTED,
			"request JSON of %zu bytes is more than %d bytes: pass tensors in binary or in shared memory",
			length, HTTP_INFER_JSON_MAX);
	if (http_request_json(request, length, JSON_COST_MAX, &json, answer))
		return answer->code;
	http->n_binary = evbuffer_get_length(request->body);
	http->binary = evbuffer_pullup(request->body, -1);
	(void)read_json(http, json);
	(void)json_object_put(json);
	return answer->code;
}

/* --- the reply */

static AnswerCode write_output(HttpInfer *http, InferOutput *output, struct evbuffer *json, struct evbuffer *binary) {
	Infer *infer = http->infer;
	InferForm form = output->form == INFER_FORM_DEFAULT ? http->form : output->form;
	TensorMemory *memory = &output->memory;
	char *shape;

	if (output->n_classes && classify(infer, output))
		return infer->answer.code;
	shape = infer_shape_text(output->shape, output->n_shape);
	if (!shape)
		return answer_no_memory(&infer->answer);
	(void)evbuffer_add_printf(json, "{\"name\":\"%s\",\"datatype\":\"%s\",\"shape\":%s", output->name,
				  datatype_name(output->datatype), shape);
	free(shape);
	if (memory->region)
		;
	else if (form == INFER_FORM_BINARY) {
		(void)evbuffer_add_printf(json, ",\"parameters\":{\"binary_data_size\":%" PRIu64 "}", output->size);
		if (evbuffer_add(binary, memory->data, output->size))
			return answer_no_memory(&infer->answer);
	} else {
		(void)evbuffer_add_printf(json, ",\"data\":");
		if (json_tensor_write(json, output->name, output->datatype, memory->data, output->size,
				      (uint64_t)datatype_count(output->shape, output->n_shape), &infer->answer))
			return infer->answer.code;
	}
	(void)evbuffer_add_printf(json, "}");
	return ANSWER_OK;
}

/* the JSON of the reply, and in @binary what follows it */
static AnswerCode write_reply(HttpInfer *http, struct evbuffer *json, struct evbuffer *binary) {
	Infer *infer = http->infer;
	size_t i;

	(void)evbuffer_add_printf(json, "{");
	if (infer->id && *infer->id) {
		(void)evbuffer_add_printf(json, "\"id\":");
		if (json_write_string(json, infer->id, strlen(infer->id), &infer->answer))
			return infer->answer.code;
		(void)evbuffer_add_printf(json, ",");
	}
	(void)evbuffer_add_printf(json, "\"model_name\":\"%s\",\"model_version\":\"" MODEL_VERSION "\",\"outputs\":[",
				  infer->model->name);
	for (i = 0; i < infer->n_outputs; i++) {
		if (i)
			(void)evbuffer_add_printf(json, ",");
		if (write_output(http, &infer->outputs[i], json, binary))
			return infer->answer.code;
	}
	(void)evbuffer_add_printf(json, "]}");
	return ANSWER_OK;
}

static void send_reply(HttpInfer *http, struct evbuffer *json, struct evbuffer *binary) {
	HttpRequest *request = http->request;
	bool has_binary = evbuffer_get_length(binary) > 0;
	char length[24];

	(void)snprintf(length, sizeof(length), "%zu", evbuffer_get_length(json));
	if (has_binary)
		http_reply_header(request, HTTP_HEADER_LENGTH, length);
	(void)evbuffer_add_buffer(json, binary);
	http_coding_apply(request, json);
	http_reply_buffer(request, 200, has_binary ? "application/octet-stream" : "application/json", json);
}

/* the leases end before the reply leaves: who has read it finds a region that was unregistered gone */
static void on_done(Infer *infer, void *userdata) {
	struct evbuffer *json = evbuffer_new(), *binary = evbuffer_new();
	HttpInfer *http = userdata;

	if (!infer->answer.code && json && binary)
		(void)write_reply(http, json, binary);
	else if (!infer->answer.code)
		(void)answer_no_memory(&infer->answer);
	infer_release(infer);
	if (infer->answer.code)
		http_reply_answer(http->request, &infer->answer);
	else
		send_reply(http, json, binary);
	if (json)
		evbuffer_free(json);
	if (binary)
		evbuffer_free(binary);
	http_infer_free(http);
}

void http_infer(HttpRequest *request, const Model *model) {
	HttpInfer *http = calloc(1, sizeof(*http));
	Answer answer = {};

	if (http)
		http->infer = infer_new(request->core, model);
	if (!http || !http->infer) {
		(void)answer_no_memory(&answer);
		http_reply_answer(request, &answer);
		answer_deinit(&answer);
		free(http);
		return;
	}
	http->request = request;
	http->form = INFER_FORM_JSON;
	if (!read_request(http)) {
		infer_start(http->infer, on_done, http);
		return;
	}
	infer_release(http->infer);
	http_reply_answer(request, &http->infer->answer);
	http_infer_free(http);
}
