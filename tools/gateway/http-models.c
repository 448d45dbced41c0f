/* SPDX-License-Identifier: Apache-2.0 */

/* The routes below /v2/models: readiness, metadata, configuration, statistics, and the way to inference. */

#include <string.h>

#include "http-infer.h"

static struct json_object *text(const char *text) {
	return json_object_new_string(text);
}

static struct json_object *list(struct json_object *element) {
	struct json_object *array = json_object_new_array();

	if (element)
		(void)json_object_array_add(array, element);
	return array;
}

static void add(struct json_object *object, const char *name, struct json_object *value) {
	(void)json_object_object_add(object, name, value);
}

/* --- metadata */

static struct json_object *tensors_metadata(const ModelTensor *tensors, uint32_t n) {
	struct json_object *array = json_object_new_array(), *object, *shape;
	uint32_t i;

	for (i = 0; i < n; i++) {
		shape = list(json_object_new_int(-1));
		(void)json_object_array_add(shape, json_object_new_int64(tensors[i].dim));
		object = json_object_new_object();
		add(object, "name", text(tensors[i].name));
		add(object, "datatype", text(datatype_name(tensors[i].datatype)));
		add(object, "shape", shape);
		(void)json_object_array_add(array, object);
	}
	return array;
}

static struct json_object *metadata(const Model *model) {
	struct json_object *object = json_object_new_object();

	add(object, "name", text(model->name));
	add(object, "versions", list(text(MODEL_VERSION)));
	add(object, "platform", text(MODEL_PLATFORM));
	add(object, "inputs", tensors_metadata(model->inputs, model->n_inputs));
	add(object, "outputs", tensors_metadata(model->outputs, model->n_outputs));
	return object;
}

/* --- configuration */

static struct json_object *tensors_config(const ModelTensor *tensors, uint32_t n, bool are_inputs) {
	struct json_object *array = json_object_new_array(), *object;
	uint32_t i;

	for (i = 0; i < n; i++) {
		object = json_object_new_object();
		add(object, "name", text(tensors[i].name));
		add(object, "data_type", text(datatype_config_name(tensors[i].datatype)));
		if (are_inputs)
			add(object, "format", text("FORMAT_NONE"));
		add(object, "dims", list(json_object_new_int64(tensors[i].dim)));
		if (!are_inputs)
			add(object, "label_filename", text(""));
		add(object, "is_shape_tensor", json_object_new_boolean(false));
		if (are_inputs) {
			add(object, "allow_ragged_batch", json_object_new_boolean(false));
			add(object, "optional", json_object_new_boolean(false));
		}
		(void)json_object_array_add(array, object);
	}
	return array;
}

static struct json_object *parameters_config(const Model *model) {
	struct json_object *object = json_object_new_object(), *value = json_object_new_object();
	char number[16];

	(void)snprintf(number, sizeof(number), "%u", (unsigned)model->delay_ms);
	add(value, "string_value", text(number));
	add(object, "execute_delay_ms", value);
	return object;
}

static struct json_object *config(const Model *model) {
	struct json_object *object = json_object_new_object(), *group = json_object_new_object(),
			   *policy = json_object_new_object(), *latest = json_object_new_object();

	add(latest, "num_versions", json_object_new_int(1));
	add(policy, "latest", latest);
	add(group, "name", text(model->name));
	add(group, "kind", text("KIND_CPU"));
	add(group, "count", json_object_new_int(1));
	add(object, "name", text(model->name));
	add(object, "platform", text(MODEL_PLATFORM));
	add(object, "backend", text(MODEL_PLATFORM));
	add(object, "version_policy", policy);
	add(object, "max_batch_size", json_object_new_int64(model->max_batch_size));
	add(object, "input", tensors_config(model->inputs, model->n_inputs, true));
	add(object, "output", tensors_config(model->outputs, model->n_outputs, false));
	add(object, "instance_group", list(group));
	add(object, "parameters", parameters_config(model));
	return object;
}

/* --- statistics */

static struct json_object *duration(uint64_t count, uint64_t ns) {
	struct json_object *object = json_object_new_object();

	add(object, "count", json_object_new_uint64(count));
	add(object, "ns", json_object_new_uint64(ns));
	return object;
}

/* what is not measured apart is 0 */
static struct json_object *statistics_of(const Model *model) {
	const ModelStatistics *statistics = model->statistics;
	struct json_object *object = json_object_new_object(), *stats = json_object_new_object();
	uint64_t n = statistics->n_succeeded;

	add(stats, "success", duration(n, statistics->succeeded_ns));
	add(stats, "fail", duration(statistics->n_failed, statistics->failed_ns));
	add(stats, "queue", duration(n, statistics->delayed_ns));
	add(stats, "compute_input", duration(n, 0));
	add(stats, "compute_infer", duration(n, statistics->succeeded_ns - statistics->delayed_ns));
	add(stats, "compute_output", duration(n, 0));
	add(stats, "cache_hit", duration(0, 0));
	add(stats, "cache_miss", duration(0, 0));
	add(object, "name", text(model->name));
	add(object, "version", text(MODEL_VERSION));
	add(object, "last_inference", json_object_new_uint64(statistics->last_ms));
	add(object, "inference_count", json_object_new_uint64(statistics->rows));
	add(object, "execution_count", json_object_new_uint64(n));
	add(object, "inference_stats", stats);
	add(object, "batch_stats", list(NULL));
	return object;
}

/* of @model, or of all when that is NULL */
static struct json_object *statistics(const Models *models, const Model *model) {
	struct json_object *object = json_object_new_object(), *array = json_object_new_array();
	size_t i;

	for (i = 0; i < models->n; i++)
		if (!model || model == &models->models[i])
			(void)json_object_array_add(array, statistics_of(&models->models[i]));
	add(object, "model_stats", array);
	return object;
}

/* --- routes */

static void reply(HttpRequest *request, struct json_object *object) {
	http_reply_json(request, 200, object);
	(void)json_object_put(object);
}

static bool is(Bytes segment, const char *word) {
	return segment.size == strlen(word) && !memcmp(segment.data, word, segment.size);
}

static bool is_version(Bytes segment) {
	size_t i;

	for (i = 0; i < segment.size; i++)
		if (segment.data[i] < '0' || segment.data[i] > '9')
			return false;
	return segment.size > 0;
}

bool http_models_route(HttpRequest *request) {
	static const char *const verbs[] = { "ready", "config", "infer", "stats" };
	const Models *models = request->core->models;
	size_t at = 3, verb;
	Bytes version = BYTES("");
	const Model *model = NULL;
	Answer answer = {};

	if (!models || request->n_segments < 3 || !is(request->segments[0], "v2") ||
	    !is(request->segments[1], "models"))
		return false;
	if (request->n_segments > 4 && is(request->segments[3], "versions") && is_version(request->segments[4])) {
		version = request->segments[4];
		at = 5;
	}
	for (verb = 0; verb < 4; verb++)
		if (at + 1 == request->n_segments && is(request->segments[at], verbs[verb]))
			break;
	if (verb == 4 && at != request->n_segments)
		return false;
	if (request->n_segments == 3 && is(request->segments[2], "stats")) {
		if (http_method_is(request, "GET"))
			reply(request, statistics(models, NULL));
		return true;
	}
	if (!http_method_is(request, verb == 2 ? "POST" : "GET"))
		return true;
	if (models_find(models, request->segments[2], version, &model, &answer)) {
		http_reply_answer(request, &answer);
		answer_deinit(&answer);
		return true;
	}
	switch (verb) {
	case 0:
		http_reply_empty(request, 200);
		break;
	case 1:
		reply(request, config(model));
		break;
	case 2:
		http_infer(request, model);
		break;
	case 3:
		reply(request, statistics(models, model));
		break;
	default:
		reply(request, metadata(model));
	}
	return true;
}
