/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the reference models compute, and the table of them. A model reads its inputs with tensor_memory_read() and writes
 * results with infer_output_*(): that is all that it takes to compute on shared memory.
 */

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "infer.h"
#include "log.h"

#define ELEMENTS 16 /* of a row of simple and simple_string */
#define BATCH_MAX 8 /* rows */
#define ELEMENTS_MAX (ELEMENTS * BATCH_MAX)
#define IDENTITY_BATCH_MAX 64
#define DIGITS_MAX 20			      /* of a 64-bit integer, with its sign */
#define CHUNK_SIZE ((size_t)64 * 1024)	      /* bytes that an identity copies at a time, */
#define STEP_SIZE ((uint64_t)4 * 1024 * 1024) /* and in one step */

/* --- simple, simple_int8 */

static AnswerCode simple_step(Infer *infer, bool *ret_more) {
	InferInput *inputs[2] = { infer_input(infer, "INPUT0"), infer_input(infer, "INPUT1") };
	int32_t values[2][ELEMENTS_MAX], sums[ELEMENTS_MAX], differences[ELEMENTS_MAX];
	uint64_t size = inputs[0]->memory.size, n = size / sizeof(values[0][0]), i;

	(void)ret_more;
	for (i = 0; i < 2; i++) {
		if (infer_read(infer, inputs[i], 0, values[i], size))
			return infer->answer.code;
	}
	for (i = 0; i < n; i++) {
		sums[i] = (int32_t)((uint32_t)values[0][i] + (uint32_t)values[1][i]);
		differences[i] = (int32_t)((uint32_t)values[0][i] - (uint32_t)values[1][i]);
	}
	if (infer_output_put(infer, infer_output(infer, "OUTPUT0"), inputs[0], sums, size))
		return infer->answer.code;
	return infer_output_put(infer, infer_output(infer, "OUTPUT1"), inputs[0], differences, size);
}

static AnswerCode simple_int8_step(Infer *infer, bool *ret_more) {
	InferInput *inputs[2] = { infer_input(infer, "INPUT0"), infer_input(infer, "INPUT1") };
	uint8_t values[2][ELEMENTS_MAX], sums[ELEMENTS_MAX], differences[ELEMENTS_MAX];
	uint64_t size = inputs[0]->memory.size, i;

	(void)ret_more;
	for (i = 0; i < 2; i++) {
		if (infer_read(infer, inputs[i], 0, values[i], size))
			return infer->answer.code;
	}
	for (i = 0; i < size; i++) {
		sums[i] = (uint8_t)(values[0][i] + values[1][i]);
		differences[i] = (uint8_t)(values[0][i] - values[1][i]);
	}
	if (infer_output_put(infer, infer_output(infer, "OUTPUT0"), inputs[0], sums, size))
		return infer->answer.code;
	return infer_output_put(infer, infer_output(infer, "OUTPUT1"), inputs[0], differences, size);
}

/* --- simple_string */

/*
 * The integers of @input. Its elements were counted, but whoever shares the memory can have written to it since: every
 * length is looked at here again.
 */
static AnswerCode read_integers(Infer *infer, InferInput *input, int64_t *values, size_t *ret_n) {
	uint64_t offset = 0, left;
	char text[DIGITS_MAX + 1], *end;
	uint32_t length;
	size_t n;

	for (n = 0; n < ELEMENTS_MAX && offset < input->memory.size; n++) {
		left = input->memory.size - offset;
		length = UINT32_MAX;
		if (left >= sizeof(length)) {
			if (infer_read(infer, input, offset, &length, sizeof(length)))
				return infer->answer.code;
			offset += sizeof(length);
			left -= sizeof(length);
		}
		if (!length || length > DIGITS_MAX || length > left)
			goto no_integer;
		if (infer_read(infer, input, offset, text, length))
			return infer->answer.code;
		offset += length;
		text[length] = 0;
		errno = 0;
		values[n] = strtoll(text, &end, 10);
		if (errno || end != text + length || text[0] == ' ' || (text[0] >= '\t' && text[0] <= '\r'))
			goto no_integer;
	}
	*ret_n = n;
	return ANSWER_OK;
no_integer:
	return answer_set(&infer->answer, ANSWER_INVALID_ARG,
			  "input '%s' for model '%s' has an element that is not a decimal integer", input->name,
			  infer->model->name);
}

/* returns the size */
static size_t write_integers(uint8_t *data, const int64_t *values, size_t n) {
	char text[DIGITS_MAX + 1];
	size_t i, size = 0;
	uint32_t length;

	for (i = 0; i < n; i++) {
		length = (uint32_t)snprintf(text, sizeof(text), "%" PRId64, values[i]);
		memcpy(data + size, &length, sizeof(length));
		memcpy(data + size + sizeof(length), text, length);
		size += sizeof(length) + length;
	}
	return size;
}

static AnswerCode simple_string_step(Infer *infer, bool *ret_more) {
	InferInput *inputs[2] = { infer_input(infer, "INPUT0"), infer_input(infer, "INPUT1") };
	int64_t values[2][ELEMENTS_MAX], sums[ELEMENTS_MAX], differences[ELEMENTS_MAX];
	uint8_t data[ELEMENTS_MAX * (sizeof(uint32_t) + DIGITS_MAX)];
	size_t i, n[2];

	(void)ret_more;
	for (i = 0; i < 2; i++) {
		if (read_integers(infer, inputs[i], values[i], &n[i]))
			return infer->answer.code;
	}
	if (n[0] != n[1])
		return answer_set(&infer->answer, ANSWER_INVALID_ARG,
				  "inputs of model '%s' have different numbers of elements", infer->model->name);
	for (i = 0; i < n[0]; i++) {
		sums[i] = (int64_t)((uint64_t)values[0][i] + (uint64_t)values[1][i]);
		differences[i] = (int64_t)((uint64_t)values[0][i] - (uint64_t)values[1][i]);
	}
	if (infer_output_put(infer, infer_output(infer, "OUTPUT0"), inputs[0], data, write_integers(data, sums, n[0])))
		return infer->answer.code;
	return infer_output_put(infer, infer_output(infer, "OUTPUT1"), inputs[0], data,
				write_integers(data, differences, n[0]));
}

/* --- identity_*, simple_identity */

static AnswerCode identity_step(Infer *infer, bool *ret_more) {
	InferInput *input = infer_input(infer, "INPUT0");
	InferOutput *output = infer_output(infer, "OUTPUT0");
	uint64_t size = input->memory.size, end, chunk;

	if (!infer->buffer) {
		infer->buffer = malloc(CHUNK_SIZE);
		if (!infer->buffer)
			return answer_no_memory(&infer->answer);
		if (infer_output_begin(infer, output, input->datatype, input->shape, input->n_shape, size))
			return infer->answer.code;
	}
	end = size - infer->position > STEP_SIZE ? infer->position + STEP_SIZE : size;
	while (infer->position < end) {
		chunk = end - infer->position < CHUNK_SIZE ? end - infer->position : CHUNK_SIZE;
		if (infer_read(infer, input, infer->position, infer->buffer, chunk) ||
		    infer_write(infer, output, infer->position, infer->buffer, chunk))
			return infer->answer.code;
		infer->position += chunk;
	}
	*ret_more = infer->position < size;
	return ANSWER_OK;
}

/* --- the table */

#define ADD_SUB(name_, step_, datatype_)                                                                               \
	{                                                                                                              \
		.name = name_, .max_batch_size = BATCH_MAX, .n_inputs = 2, .n_outputs = 2, .step = step_,              \
		.inputs =                                                                                              \
			(const ModelTensor[]){ { "INPUT0", datatype_, ELEMENTS }, { "INPUT1", datatype_, ELEMENTS } }, \
		.outputs = (const ModelTensor[]){ { "OUTPUT0", datatype_, ELEMENTS },                                  \
						  { "OUTPUT1", datatype_, ELEMENTS } },                                \
	}
#define IDENTITY(name_, datatype_, max_)                                                                     \
	{                                                                                                    \
		.name = name_, .max_batch_size = max_, .n_inputs = 1, .n_outputs = 1, .step = identity_step, \
		.inputs = (const ModelTensor[]){ { "INPUT0", datatype_, -1 } },                              \
		.outputs = (const ModelTensor[]){ { "OUTPUT0", datatype_, -1 } },                            \
	}

static const Model all_models[] = {
	ADD_SUB("simple", simple_step, DATATYPE_INT32),
	ADD_SUB("simple_string", simple_string_step, DATATYPE_BYTES),
	ADD_SUB("simple_int8", simple_int8_step, DATATYPE_INT8),
	IDENTITY("simple_identity", DATATYPE_BYTES, BATCH_MAX),
	IDENTITY("identity_bool", DATATYPE_BOOL, IDENTITY_BATCH_MAX),
	IDENTITY("identity_uint8", DATATYPE_UINT8, IDENTITY_BATCH_MAX),
	IDENTITY("identity_uint16", DATATYPE_UINT16, IDENTITY_BATCH_MAX),
	IDENTITY("identity_uint32", DATATYPE_UINT32, IDENTITY_BATCH_MAX),
	IDENTITY("identity_uint64", DATATYPE_UINT64, IDENTITY_BATCH_MAX),
	IDENTITY("identity_int8", DATATYPE_INT8, IDENTITY_BATCH_MAX),
	IDENTITY("identity_int16", DATATYPE_INT16, IDENTITY_BATCH_MAX),
	IDENTITY("identity_int32", DATATYPE_INT32, IDENTITY_BATCH_MAX),
	IDENTITY("identity_int64", DATATYPE_INT64, IDENTITY_BATCH_MAX),
	IDENTITY("identity_fp16", DATATYPE_FP16, IDENTITY_BATCH_MAX),
	IDENTITY("identity_fp32", DATATYPE_FP32, IDENTITY_BATCH_MAX),
	IDENTITY("identity_fp64", DATATYPE_FP64, IDENTITY_BATCH_MAX),
	IDENTITY("identity_bf16", DATATYPE_BF16, IDENTITY_BATCH_MAX),
	IDENTITY("identity_bytes", DATATYPE_BYTES, IDENTITY_BATCH_MAX),
};
#define N_ALL (sizeof(all_models) / sizeof(all_models[0]))

static bool is_named(const Model *model, const char *name, size_t length) {
	return strlen(model->name) == length && !memcmp(model->name, name, length);
}

static Model *find(const Models *models, const char *name, size_t length) {
	size_t i;

	for (i = 0; models && i < models->n; i++)
		if (is_named(&models->models[i], name, length))
			return (Model *)&models->models[i];
	return NULL;
}

/* @alias is consumed; NULL for the name that it has */
static void add_model(Models *models, const Model *model, char *alias) {
	Model *added = &models->models[models->n];

	*added = *model;
	if (alias)
		added->name = added->alias = alias;
	added->statistics = &models->statistics[models->n];
	added->turn = &models->turns[models->n];
	TAILQ_INIT(&added->turn->waiting);
	models->n++;
}

/* @word is "NAME", "NAME=MODEL" or "all" */
static int add(Models *models, const char *word, size_t length) {
	const char *equals = memchr(word, '=', length), *name = equals ? equals + 1 : word;
	size_t i, name_length = length - (size_t)(name - word);
	bool all = length == strlen("all") && !memcmp(word, "all", length), found = all;
	char *alias = NULL;

	if (equals && (equals == word || find(models, word, (size_t)(equals - word)))) {
		log_write("--models: '%.*s' gives a name that is empty or taken", (int)length, word);
		return -EINVAL;
	}
	for (i = 0; i < N_ALL; i++) {
		if (!all && !is_named(&all_models[i], name, name_length))
			continue;
		found = true;
		if (!equals && find(models, all_models[i].name, strlen(all_models[i].name)))
			continue;
		if (equals) {
			alias = strndup(word, (size_t)(equals - word));
			if (!alias)
				return -ENOMEM;
		}
		add_model(models, &all_models[i], alias);
	}
	if (found)
		return 0;
	log_write("--models: there is no model '%.*s'", (int)name_length, name);
	return -EINVAL;
}

/* @setting is "NAME=MS" */
static int set_delay(Models *models, const char *setting, size_t length) {
	const char *equals = memchr(setting, '=', length);
	Model *model = equals ? find(models, setting, (size_t)(equals - setting)) : NULL;
	unsigned long delay = ULONG_MAX;
	char *end = NULL;

	errno = 0;
	if (model && equals[1] >= '0' && equals[1] <= '9')
		delay = strtoul(equals + 1, &end, 10);
	if (errno || delay > INT_MAX || end != setting + length) {
		log_write("--model-delay: '%.*s' is not one of the models, '=' and a number of milliseconds",
			  (int)length, setting);
		return -EINVAL;
	}
	model->delay_ms = (uint32_t)delay;
	return 0;
}

/* calls @each with what stands between the commas of @list */
static int each_word(Models *models, const char *list, int (*each)(Models *, const char *, size_t)) {
	const char *end;
	int r = 0;

	for (; *list && !r; list = *end ? end + 1 : end) {
		end = strchrnul(list, ',');
		r = each(models, list, (size_t)(end - list));
	}
	return r;
}

int models_new(Models **ret, struct event_base *base, const char *list, const char *delays) {
	size_t most = N_ALL + 1; /* of each word another one */
	const char *at;
	Models *models;
	int r;

	for (at = list; *at; at++)
		most += *at == ',';
	models = calloc(1, sizeof(*models) + most * sizeof(models->models[0]));
	if (!models)
		return -ENOMEM;
	models->base = base;
	TAILQ_INIT(&models->in_progress);
	models->statistics = calloc(most, sizeof(*models->statistics));
	models->turns = calloc(most, sizeof(*models->turns));
	r = models->statistics && models->turns ? each_word(models, list, add) : -ENOMEM;
	if (!r)
		r = each_word(models, delays, set_delay);
	if (r) {
		(void)models_free(models);
		return r;
	}
	*ret = models;
	return 0;
}

void models_stop(Models *models) {
	while (models && !TAILQ_EMPTY(&models->in_progress))
		infer_abort(TAILQ_FIRST(&models->in_progress));
}

Models *models_free(Models *models) {
	size_t i;

	if (!models)
		return NULL;
	for (i = 0; i < models->n; i++)
		free(models->models[i].alias);
	free(models->statistics);
	free(models->turns);
	free(models);
	return NULL;
}

/* @text as Triton reads it: what begins with a decimal number is that number */
static AnswerCode read_version(const char *text, int64_t *ret, Answer *answer) {
	char *end;

	if (!*text) {
		*ret = -1;
		return ANSWER_OK;
	}
	errno = 0;
	*ret = strtol(text, &end, 10);
	if (end == text || errno)
		return answer_set(
			answer, ANSWER_INVALID_ARG,
			"failed to get model version from specified version string '%s' (details: stol), version "
			"should be an integral value > 0",
			text);
	if (*ret < 0)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "invalid model version specified '%s' , version should be an integral value > 0",
				  text);
	return ANSWER_OK;
}

AnswerCode models_find(const Models *models, Bytes name, Bytes version, const Model **ret, Answer *answer) {
	char *version_text = bytes_copy(version);
	const Model *model;
	int64_t number = -1;
	AnswerCode code;

	if (!version_text)
		return answer_no_memory(answer);
	code = read_version(version_text, &number, answer);
	free(version_text);
	if (code)
		return code;
	model = find(models, name.data, name.size);
	if (!model)
		return answer_set(answer, ANSWER_INVALID_ARG, "Request for unknown model: '%.*s' is not found",
				  (int)name.size, name.data);
	if (number != -1 && number != atoi(MODEL_VERSION))
		return answer_set(answer, ANSWER_NOT_FOUND,
				  "Request for unknown model: '%s' version %" PRId64 " is not found", model->name,
				  number);
	*ret = model;
	return ANSWER_OK;
}
