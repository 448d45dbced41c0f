/* SPDX-License-Identifier: Apache-2.0 */

/* ModelInfer: what differs from HTTP in the request, and the reply as a message. */

#include <stdlib.h>
#include <string.h>

#include "classify.h"
#include "grpc.h"
#include "inference.pb-c.h"

typedef Inference__InferParameter Parameter;
typedef Inference__InferTensorContents Contents;
typedef Inference__ModelInferRequest InferRequest;
typedef Inference__ModelInferRequest__InferInputTensor InputTensor;
typedef Inference__ModelInferRequest__InferRequestedOutputTensor OutputTensor;
typedef Inference__ParametersEntry ParametersEntry;

static bool is(ProtobufCBinaryData name, const char *word) {
	return name.len == strlen(word) && !memcmp(name.data, word, name.len);
}

/* the entry @name of a map, of which the last one counts; NULL when there is none */
static const Parameter *find(ParametersEntry *const *entries, size_t n, const char *name) {
	static const Parameter unset = INFERENCE__INFER_PARAMETER__INIT;

	while (n-- > 0)
		if (is(entries[n]->key, name))
			return entries[n]->value ?: &unset;
	return NULL;
}

/* --- parameters */

static AnswerCode wrong_type(Answer *answer, const char *name, const char *expected) {
	return answer_set(answer, ANSWER_INVALID_ARG, "invalid value type for '%s' parameter, expected %s.", name,
			  expected);
}

/* what the models do not use is checked as Triton checks it */
static AnswerCode read_parameter(Answer *answer, const ParametersEntry *entry) {
	static const Parameter unset = INFERENCE__INFER_PARAMETER__INIT;
	const Parameter *value = entry->value ?: &unset;
	int choice = value->parameter_choice_case;
	bool is_int = choice == INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_INT64_PARAM,
	     is_string = choice == INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_STRING_PARAM,
	     is_bool = choice == INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_BOOL_PARAM,
	     is_double = choice == INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_DOUBLE_PARAM;

	if (is(entry->key, "sequence_id"))
		return is_int || is_string ? ANSWER_OK
					   : wrong_type(answer, "sequence_id", "int64_param or string_param");
	if (is(entry->key, "sequence_start"))
		return is_bool ? ANSWER_OK : wrong_type(answer, "sequence_start", "bool_param");
	if (is(entry->key, "sequence_end"))
		return is_bool ? ANSWER_OK : wrong_type(answer, "sequence_end", "bool_param");
	if (is(entry->key, "priority")) {
		if (is_int && value->int64_param < 0)
			return answer_set(answer, ANSWER_INVALID_ARG,
					  "invalid value for 'priority', expected value >= 0.");
		return is_int || choice == INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_UINT64_PARAM
			       ? ANSWER_OK
			       : wrong_type(answer, "priority", "int64_param or uint64_param");
	}
	if (is(entry->key, "timeout"))
		return is_int ? ANSWER_OK : wrong_type(answer, "timeout", "int64_param");
	if (entry->key.len >= 7 && !memcmp(entry->key.data, "triton_", 7)) {
		if (!is(entry->key, "triton_enable_empty_final_response"))
			return answer_set(
				answer, ANSWER_INVALID_ARG,
				"parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
				"following keys starting with 'triton_' are allowed: "
				"triton_enable_empty_final_response");
		return is_bool ? ANSWER_OK : wrong_type(answer, "triton_enable_empty_final_response", "bool_param");
	}
	if (is_int || is_bool || is_string || is_double)
		return ANSWER_OK;
	return answer_set(answer, ANSWER_INVALID_ARG,
			  "invalid value type for '%.*s' parameter, expected int64_param, bool_param, or string_param.",
			  (int)entry->key.len, entry->key.data);
}

static AnswerCode shared_without_region(Answer *answer, const char *name, const char *tensor) {
	return answer_set(answer, ANSWER_INVALID_ARG,
			  "'%s' can not be specified without 'shared_memory_region' parameter for tensor '%s'", name,
			  tensor);
}

static AnswerCode shared_wrong_type(Answer *answer, const char *name, const char *tensor, const char *expected) {
	return answer_set(answer, ANSWER_INVALID_ARG,
			  "invalid value type for '%s' parameter for tensor '%s', expected %s.", name, tensor,
			  expected);
}

/* a negative number becomes a large one, which no region has */
static AnswerCode read_shared_number(Answer *answer, ParametersEntry *const *entries, size_t n, const char *name,
				     const char *tensor, bool is_shared, bool *ret_has, uint64_t *ret) {
	const Parameter *value = find(entries, n, name);

	*ret_has = value;
	if (!value)
		return ANSWER_OK;
	if (!is_shared)
		return shared_without_region(answer, name, tensor);
	if (value->parameter_choice_case != INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_INT64_PARAM)
		return shared_wrong_type(answer, name, tensor, "int64_param");
	*ret = (uint64_t)value->int64_param;
	return ANSWER_OK;
}

/* *ret_shared says whether the tensor is in shared memory */
static AnswerCode read_shared(Infer *infer, ParametersEntry *const *entries, size_t n, const char *tensor,
			      bool *ret_shared, InferShared *ret) {
	const Parameter *region = find(entries, n, "shared_memory_region");
	Answer *answer = &infer->answer;
	bool has_offset;

	*ret = (InferShared){ 0 };
	*ret_shared = region;
	if (region && region->parameter_choice_case != INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_STRING_PARAM)
		return shared_wrong_type(answer, "shared_memory_region", tensor, "string_param");
	if (region)
		ret->region = grpc_bytes(region->string_param);
	if (read_shared_number(answer, entries, n, "shared_memory_offset", tensor, region, &has_offset, &ret->offset) ||
	    read_shared_number(answer, entries, n, "shared_memory_byte_size", tensor, region, &ret->has_byte_size,
			       &ret->byte_size))
		return answer->code;
	return region ? infer_check_shared(infer, ret, tensor) : ANSWER_OK;
}

/* --- inputs with typed contents */

/* the @n elements of @width bytes at @data as elements of @size bytes: the low bytes, little-endian */
static AnswerCode narrow(Infer *infer, InferInput *input, const void *data, size_t n, size_t width, size_t size) {
	uint8_t *bytes = malloc(n * size);
	size_t i;

	if (!bytes)
		return answer_no_memory(&infer->answer);
	for (i = 0; i < n; i++)
		memcpy(bytes + i * size, (const uint8_t *)data + i * width, size);
	tensor_memory_take(&input->memory, bytes, n * size);
	return ANSWER_OK;
}

static AnswerCode serialize(Infer *infer, InferInput *input, const Contents *contents) {
	size_t i, size = 0, at = 0;
	uint32_t length;
	uint8_t *bytes;

	for (i = 0; i < contents->n_bytes_contents; i++)
		size += sizeof(length) + contents->bytes_contents[i].len;
	bytes = malloc(size);
	if (!bytes)
		return answer_no_memory(&infer->answer);
	for (i = 0; i < contents->n_bytes_contents; i++) {
		length = (uint32_t)contents->bytes_contents[i].len;
		memcpy(bytes + at, &length, sizeof(length));
		if (length)
			memcpy(bytes + at + sizeof(length), contents->bytes_contents[i].data, length);
		at += sizeof(length) + length;
	}
	tensor_memory_take(&input->memory, bytes, size);
	return ANSWER_OK;
}

/* contents of the datatype @type are there: refuses them when the input has another one, or has bytes already */
static AnswerCode check_contents(Infer *infer, const InferInput *input, DataType type) {
	if (input->memory.size)
		return answer_set(
			&infer->answer, ANSWER_INVALID_ARG,
			"unexpected explicit tensor data for input tensor '%s' for model '%s', binary data was "
			"already supplied.",
			input->name, infer->model->name);
	if (input->datatype != type)
		return answer_set(&infer->answer, ANSWER_INVALID_ARG,
				  "unexpected explicit tensor data for input tensor '%s' for model '%s' of type '%s', "
				  "expected datatype '%s'",
				  input->name, infer->model->name, datatype_name(type), datatype_name(input->datatype));
	return ANSWER_OK;
}

/* which of three datatypes share a field the contents are meant as */
static DataType meant(const InferInput *input, DataType small, DataType middle, DataType large) {
	return input->datatype == small || input->datatype == middle ? input->datatype : large;
}

static AnswerCode read_contents(Infer *infer, InferInput *input, const Contents *contents) {
	const struct {
		const void *data;
		size_t n, width;
		DataType type;
	} fields[] = {
		{ contents->bool_contents, contents->n_bool_contents, sizeof(*contents->bool_contents), DATATYPE_BOOL },
		{ contents->int_contents, contents->n_int_contents, sizeof(*contents->int_contents),
		  meant(input, DATATYPE_INT8, DATATYPE_INT16, DATATYPE_INT32) },
		{ contents->int64_contents, contents->n_int64_contents, sizeof(*contents->int64_contents),
		  DATATYPE_INT64 },
		{ contents->uint_contents, contents->n_uint_contents, sizeof(*contents->uint_contents),
		  meant(input, DATATYPE_UINT8, DATATYPE_UINT16, DATATYPE_UINT32) },
		{ contents->uint64_contents, contents->n_uint64_contents, sizeof(*contents->uint64_contents),
		  DATATYPE_UINT64 },
		{ contents->fp32_contents, contents->n_fp32_contents, sizeof(*contents->fp32_contents), DATATYPE_FP32 },
		{ contents->fp64_contents, contents->n_fp64_contents, sizeof(*contents->fp64_contents), DATATYPE_FP64 },
	};
	size_t i;

	for (i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
		if (fields[i].n &&
		    (check_contents(infer, input, fields[i].type) ||
		     narrow(infer, input, fields[i].data, fields[i].n, fields[i].width, datatype_size(fields[i].type))))
			return infer->answer.code;
	if (contents->n_bytes_contents &&
	    (check_contents(infer, input, DATATYPE_BYTES) || serialize(infer, input, contents)))
		return infer->answer.code;
	return ANSWER_OK;
}

/* --- the request */

static AnswerCode read_input(Infer *infer, const InferRequest *request, const InputTensor *from, InferInput *input,
			     size_t *raw) {
	Answer *answer = &infer->answer;
	InferShared shared;
	bool is_shared;

	if (read_shared(infer, from->parameters, from->n_parameters, input->name, &is_shared, &shared))
		return answer->code;
	if (is_shared && from->contents)
		return answer_set(
			answer, ANSWER_INVALID_ARG,
			"unexpected 'content' provided when using shared memory for input tensor '%s' for model "
			"'%s'",
			input->name, infer->model->name);
	if (is_shared)
		return infer_input_share(infer, input, &shared);
	if (from->contents && request->n_raw_input_contents)
		return answer_set(
			answer, ANSWER_INVALID_ARG,
			"contents field must not be specified when using raw_input_contents for '%s' for model "
			"'%s'",
			input->name, infer->model->name);
	if (from->contents)
		return read_contents(infer, input, from->contents);
	if (*raw == request->n_raw_input_contents)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "unable to find data for input tensor '%s' for model '%s' in request.", input->name,
				  infer->model->name);
	tensor_memory_borrow(&input->memory, request->raw_input_contents[*raw].data,
			     request->raw_input_contents[*raw].len);
	(*raw)++;
	return ANSWER_OK;
}

static AnswerCode read_output(Infer *infer, const OutputTensor *from, InferOutput *output) {
	const Parameter *classes = find(from->parameters, from->n_parameters, "classification");
	Answer *answer = &infer->answer;
	InferShared shared;
	bool is_shared;

	if (read_shared(infer, from->parameters, from->n_parameters, output->name, &is_shared, &shared))
		return answer->code;
	if (classes && classes->parameter_choice_case != INFERENCE__INFER_PARAMETER__PARAMETER_CHOICE_INT64_PARAM)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "invalid value type for 'classification' parameter, expected int64_param");
	if (classes && classes->int64_param <= 0)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "invalid value for 'classification' parameter, expected >= 0");
	if (is_shared && classes)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "output can't set both 'shared_memory_region' and 'classification'");
	if (classes)
		output->n_classes = (uint64_t)classes->int64_param;
	return is_shared ? infer_output_share(infer, output, &shared) : ANSWER_OK;
}

/* names first, then bytes and leases, as Triton does it */
static AnswerCode read_request(Infer *infer, const InferRequest *request) {
	size_t i, raw = 0;

	if (request->id.len && infer_set_id(infer, grpc_bytes(request->id)))
		return infer->answer.code;
	for (i = 0; i < request->n_parameters; i++)
		if (read_parameter(&infer->answer, request->parameters[i]))
			return infer->answer.code;
	for (i = 0; i < request->n_inputs; i++) {
		const InputTensor *from = request->inputs[i];

		if (infer_add_input(infer, grpc_bytes(from->name),
				    datatype_from_name((const char *)from->datatype.data, from->datatype.len),
				    from->shape, from->n_shape))
			return infer->answer.code;
	}
	for (i = 0; i < request->n_outputs; i++)
		if (infer_add_output(infer, grpc_bytes(request->outputs[i]->name)))
			return infer->answer.code;
	for (i = 0; i < request->n_inputs; i++)
		if (read_input(infer, request, request->inputs[i], &infer->inputs[i], &raw))
			return infer->answer.code;
	for (i = 0; i < request->n_outputs; i++)
		if (read_output(infer, request->outputs[i], &infer->outputs[i]))
			return infer->answer.code;
	return ANSWER_OK;
}

/* --- the reply */

/* fills the arrays, which have room for all outputs; those in shared memory have an empty entry of bytes */
static AnswerCode write_outputs(Infer *infer, Inference__ModelInferResponse__InferOutputTensor *tensors,
				Inference__ModelInferResponse__InferOutputTensor **pointers, ProtobufCBinaryData *raw) {
	size_t i;

	for (i = 0; i < infer->n_outputs; i++) {
		InferOutput *output = &infer->outputs[i];

		if (output->n_classes && classify(infer, output))
			return infer->answer.code;
		tensors[i] = (Inference__ModelInferResponse__InferOutputTensor)
			INFERENCE__MODEL_INFER_RESPONSE__INFER_OUTPUT_TENSOR__INIT;
		tensors[i].name = grpc_binary(output->name);
		tensors[i].datatype = grpc_binary(datatype_name(output->datatype));
		tensors[i].n_shape = output->n_shape;
		tensors[i].shape = output->shape;
		pointers[i] = &tensors[i];
		if (output->memory.region)
			raw[i] = (ProtobufCBinaryData){ 0 };
		else
			raw[i] = (ProtobufCBinaryData){ output->size, (uint8_t *)output->memory.data };
	}
	return ANSWER_OK;
}

static void reply(GrpcRequest *request, Infer *infer) {
	Inference__ModelInferResponse response = INFERENCE__MODEL_INFER_RESPONSE__INIT;
	Inference__ModelInferResponse__InferOutputTensor tensors[INFER_TENSORS_MAX], *pointers[INFER_TENSORS_MAX];
	ProtobufCBinaryData raw[INFER_TENSORS_MAX];

	response.model_name = grpc_binary(infer->model->name);
	response.model_version = grpc_binary(MODEL_VERSION);
	response.id = grpc_binary(infer->id ?: "");
	response.n_outputs = response.n_raw_output_contents = infer->n_outputs;
	response.outputs = pointers;
	response.raw_output_contents = raw;
	if (write_outputs(infer, tensors, pointers, raw))
		grpc_reply_answer(request, &infer->answer);
	else
		grpc_reply(request, &response.base);
}

/* the leases end before the reply leaves: who has read it finds a region that was unregistered gone */
static void on_done(Infer *infer, void *userdata) {
	GrpcRequest *request = userdata;

	infer_release(infer);
	if (infer->answer.code)
		grpc_reply_answer(request, &infer->answer);
	else
		reply(request, infer);
	(void)infer_free(infer);
}

static void on_cancelled(GrpcRequest *request) {
	(void)infer_free(request->userdata);
}

static void model_infer(GrpcRequest *request) {
	const InferRequest *message = (const InferRequest *)request->message;
	const Model *model = NULL;
	Infer *infer = NULL;
	Answer answer = {};

	if (!models_find(request->core->models, grpc_bytes(message->model_name), grpc_bytes(message->model_version),
			 &model, &answer)) {
		infer = infer_new(request->core, model);
		if (!infer)
			(void)answer_no_memory(&answer);
	}
	if (!infer) {
		grpc_reply_answer(request, &answer);
		return;
	}
	request->userdata = infer;
	request->cancelled = on_cancelled;
	if (read_request(infer, message))
		on_done(infer, request);
	else
		infer_start(infer, on_done, request);
}

const GrpcMethod grpc_infer_methods[] = {
	{ GRPC_SERVICE "ModelInfer", &inference__model_infer_request__descriptor, model_infer, GRPC_METHOD_TENSORS },
	{ GRPC_SERVICE "ModelStreamInfer", &inference__model_infer_request__descriptor, model_infer,
	  GRPC_METHOD_TENSORS | GRPC_METHOD_STREAM },
	{},
};
