/* SPDX-License-Identifier: Apache-2.0 */

/* ModelReady, ModelMetadata, ModelConfig and ModelStatistics. */

#include <stdlib.h>

#include "grpc.h"
#include "inference.pb-c.h"
#include "models.h"

#define TENSORS_MAX 2 /* inputs, and outputs, of a reference model */

/* the model that the message names; NULL when the call is answered */
static const Model *find(GrpcRequest *request, ProtobufCBinaryData name, ProtobufCBinaryData version) {
	const Model *model = NULL;
	Answer answer = {};

	if (models_find(request->core->models, grpc_bytes(name), grpc_bytes(version), &model, &answer))
		grpc_reply_answer(request, &answer);
	return model;
}

static void model_ready(GrpcRequest *request) {
	const Inference__ModelReadyRequest *message = (const Inference__ModelReadyRequest *)request->message;
	Inference__ModelReadyResponse response = INFERENCE__MODEL_READY_RESPONSE__INIT;

	if (!find(request, message->name, message->version))
		return;
	response.ready = true;
	grpc_reply(request, &response.base);
}

typedef Inference__ModelMetadataResponse__TensorMetadata TensorMetadata;

typedef struct TensorsMetadata {
	TensorMetadata tensors[TENSORS_MAX], *pointers[TENSORS_MAX];
	int64_t shapes[TENSORS_MAX][2];
} TensorsMetadata;

static TensorMetadata **fill_metadata(TensorsMetadata *metadata, const ModelTensor *tensors, uint32_t n) {
	uint32_t i;

	for (i = 0; i < n; i++) {
		metadata->shapes[i][0] = -1;
		metadata->shapes[i][1] = tensors[i].dim;
		metadata->tensors[i] = (TensorMetadata)INFERENCE__MODEL_METADATA_RESPONSE__TENSOR_METADATA__INIT;
		metadata->tensors[i].name = (char *)tensors[i].name;
		metadata->tensors[i].datatype = (char *)datatype_name(tensors[i].datatype);
		metadata->tensors[i].n_shape = 2;
		metadata->tensors[i].shape = metadata->shapes[i];
		metadata->pointers[i] = &metadata->tensors[i];
	}
	return metadata->pointers;
}

static void model_metadata(GrpcRequest *request) {
	const Inference__ModelMetadataRequest *message = (const Inference__ModelMetadataRequest *)request->message;
	Inference__ModelMetadataResponse response = INFERENCE__MODEL_METADATA_RESPONSE__INIT;
	const Model *model = find(request, message->name, message->version);
	TensorsMetadata inputs, outputs;
	char *version = MODEL_VERSION;

	if (!model)
		return;
	response.name = (char *)model->name;
	response.n_versions = 1;
	response.versions = &version;
	response.platform = MODEL_PLATFORM;
	response.n_inputs = model->n_inputs;
	response.inputs = fill_metadata(&inputs, model->inputs, model->n_inputs);
	response.n_outputs = model->n_outputs;
	response.outputs = fill_metadata(&outputs, model->outputs, model->n_outputs);
	grpc_reply(request, &response.base);
}

static void model_config(GrpcRequest *request) {
	const Inference__ModelConfigRequest *message = (const Inference__ModelConfigRequest *)request->message;
	Inference__ModelConfigResponse response = INFERENCE__MODEL_CONFIG_RESPONSE__INIT;
	Inference__ModelConfig config = INFERENCE__MODEL_CONFIG__INIT;
	Inference__ModelVersionPolicy policy = INFERENCE__MODEL_VERSION_POLICY__INIT;
	Inference__ModelVersionPolicy__Latest latest = INFERENCE__MODEL_VERSION_POLICY__LATEST__INIT;
	Inference__ModelInstanceGroup group = INFERENCE__MODEL_INSTANCE_GROUP__INIT, *groups = &group;
	Inference__ModelInput inputs[TENSORS_MAX], *input_pointers[TENSORS_MAX];
	Inference__ModelOutput outputs[TENSORS_MAX], *output_pointers[TENSORS_MAX];
	const Model *model = find(request, message->name, message->version);
	uint32_t i;

	if (!model)
		return;
	for (i = 0; i < model->n_inputs; i++) {
		inputs[i] = (Inference__ModelInput)INFERENCE__MODEL_INPUT__INIT;
		inputs[i].name = (char *)model->inputs[i].name;
		inputs[i].data_type = (Inference__DataType)model->inputs[i].datatype;
		inputs[i].n_dims = 1;
		inputs[i].dims = (int64_t *)&model->inputs[i].dim;
		input_pointers[i] = &inputs[i];
	}
	for (i = 0; i < model->n_outputs; i++) {
		outputs[i] = (Inference__ModelOutput)INFERENCE__MODEL_OUTPUT__INIT;
		outputs[i].name = (char *)model->outputs[i].name;
		outputs[i].data_type = (Inference__DataType)model->outputs[i].datatype;
		outputs[i].n_dims = 1;
		outputs[i].dims = (int64_t *)&model->outputs[i].dim;
		output_pointers[i] = &outputs[i];
	}
	latest.num_versions = 1;
	policy.policy_choice_case = INFERENCE__MODEL_VERSION_POLICY__POLICY_CHOICE_LATEST;
	policy.latest = &latest;
	group.name = (char *)model->name;
	group.count = 1;
	group.kind = 2; /* KIND_CPU */
	config.name = (char *)model->name;
	config.platform = MODEL_PLATFORM;
	config.backend = MODEL_PLATFORM;
	config.version_policy = &policy;
	config.max_batch_size = (int32_t)model->max_batch_size;
	config.n_input = model->n_inputs;
	config.input = input_pointers;
	config.n_output = model->n_outputs;
	config.output = output_pointers;
	config.n_instance_group = 1;
	config.instance_group = &groups;
	response.config = &config;
	grpc_reply(request, &response.base);
}

/* one entry, with all that it points to */
typedef struct Statistics {
	Inference__ModelStatistics model;
	Inference__InferStatistics infer;
	Inference__StatisticDuration success, fail, queue, input, compute, output;
} Statistics;

static void fill_statistics(Statistics *to, const Model *model) {
	static const Inference__StatisticDuration none = INFERENCE__STATISTIC_DURATION__INIT;
	const ModelStatistics *from = model->statistics;

	to->model = (Inference__ModelStatistics)INFERENCE__MODEL_STATISTICS__INIT;
	to->infer = (Inference__InferStatistics)INFERENCE__INFER_STATISTICS__INIT;
	to->success = to->fail = to->queue = to->input = to->compute = to->output = none;
	to->success.count = to->queue.count = to->input.count = to->compute.count = to->output.count =
		from->n_succeeded;
	to->success.ns = from->succeeded_ns;
	to->fail.count = from->n_failed;
	to->fail.ns = from->failed_ns;
	to->queue.ns = from->delayed_ns;
	to->compute.ns = from->succeeded_ns - from->delayed_ns;
	to->infer.success = &to->success;
	to->infer.fail = &to->fail;
	to->infer.queue = &to->queue;
	to->infer.compute_input = &to->input;
	to->infer.compute_infer = &to->compute;
	to->infer.compute_output = &to->output;
	to->model.name = (char *)model->name;
	to->model.version = MODEL_VERSION;
	to->model.last_inference = from->last_ms;
	to->model.inference_count = from->rows;
	to->model.execution_count = from->n_succeeded;
	to->model.inference_stats = &to->infer;
}

/* an empty name stands for all models */
static void model_statistics(GrpcRequest *request) {
	const Inference__ModelStatisticsRequest *message = (const Inference__ModelStatisticsRequest *)request->message;
	const Models *models = request->core->models;
	Inference__ModelStatisticsResponse response = INFERENCE__MODEL_STATISTICS_RESPONSE__INIT;
	Inference__ModelStatistics **pointers;
	Statistics *statistics;
	const Model *model = NULL;
	Answer answer = {};
	size_t i, n = models ? models->n : 0;

	if (message->name.len) {
		model = find(request, message->name, message->version);
		if (!model)
			return;
	}
	statistics = calloc(n + 1, sizeof(*statistics));
	pointers = calloc(n + 1, sizeof(*pointers));
	for (i = 0; statistics && pointers && i < n; i++) {
		if (model && model != &models->models[i])
			continue;
		fill_statistics(&statistics[response.n_model_stats], &models->models[i]);
		pointers[response.n_model_stats] = &statistics[response.n_model_stats].model;
		response.n_model_stats++;
	}
	response.model_stats = pointers;
	if (statistics && pointers) {
		grpc_reply(request, &response.base);
	} else {
		(void)answer_no_memory(&answer);
		grpc_reply_answer(request, &answer);
	}
	free(statistics);
	free(pointers);
}

const GrpcMethod grpc_models_methods[] = {
	{ GRPC_SERVICE "ModelReady", &inference__model_ready_request__descriptor, model_ready, 0 },
	{ GRPC_SERVICE "ModelMetadata", &inference__model_metadata_request__descriptor, model_metadata, 0 },
	{ GRPC_SERVICE "ModelConfig", &inference__model_config_request__descriptor, model_config, 0 },
	{ GRPC_SERVICE "ModelStatistics", &inference__model_statistics_request__descriptor, model_statistics, 0 },
	{},
};
