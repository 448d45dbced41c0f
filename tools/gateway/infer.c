/* SPDX-License-Identifier: Apache-2.0 */

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#include "infer.h"

#define WALK_WINDOW 4096   /* bytes of a BYTES input that are read at a time */
#define WALK_ELEMENTS 4096 /* elements that are looked at in one step */
#define IMPLICIT_BATCH                                                                                                \
	"NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to "  \
	"each input shape. If you want to specify the full shape including the batch dim in your input dims config, " \
	"try setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."

/* with the id of the request in front */
static AnswerCode refuse(Infer *infer, AnswerCode code, const char *format, ...) __attribute__((format(printf, 3, 4)));
static AnswerCode refuse(Infer *infer, AnswerCode code, const char *format, ...) {
	char *text;
	va_list arguments;
	int r;

	va_start(arguments, format);
	r = vasprintf(&text, format, arguments);
	va_end(arguments);
	if (r < 0)
		return answer_no_memory(&infer->answer);
	(void)answer_set(&infer->answer, code, "[request id: %s] %s",
			 infer->id && *infer->id ? infer->id : "<id_unknown>", text);
	free(text);
	return infer->answer.code;
}

Infer *infer_new(Core *core, const Model *model) {
	Infer *infer = calloc(1, sizeof(*infer));

	if (infer)
		*infer = (Infer){ .core = core, .model = model };
	return infer;
}

static void go_on(Infer *infer, uint32_t delay_ms);

/* waits, or begins the delay of the model */
static void take_turn(Infer *infer) {
	ModelTurn *turn = infer->model->turn;

	infer->waits = turn->computing != NULL;
	if (infer->waits) {
		TAILQ_INSERT_TAIL(&turn->waiting, infer, turn_link);
	} else {
		turn->computing = infer;
		go_on(infer, infer->model->delay_ms);
	}
}

static void give_turn_up(Infer *infer) {
	ModelTurn *turn = infer->model->turn;
	Infer *next;

	if (infer->waits)
		TAILQ_REMOVE(&turn->waiting, infer, turn_link);
	infer->waits = false;
	if (turn->computing != infer)
		return;
	turn->computing = NULL;
	next = TAILQ_FIRST(&turn->waiting);
	if (next) {
		TAILQ_REMOVE(&turn->waiting, next, turn_link);
		take_turn(next);
	}
}

static void leave(Infer *infer) {
	Models *models = infer->core->models;

	if (!infer->in_progress)
		return;
	infer->in_progress = false;
	TAILQ_REMOVE(&models->in_progress, infer, link);
	models->n_in_progress--;
	give_turn_up(infer);
}

Infer *infer_free(Infer *infer) {
	size_t i;

	if (!infer)
		return NULL;
	leave(infer);
	infer->core->models->results -= infer->results;
	if (infer->timer)
		event_free(infer->timer);
	for (i = 0; i < infer->n_inputs; i++) {
		tensor_memory_deinit(&infer->inputs[i].memory);
		free(infer->inputs[i].name);
		free(infer->inputs[i].shape);
	}
	for (i = 0; i < infer->n_outputs; i++) {
		tensor_memory_deinit(&infer->outputs[i].memory);
		free(infer->outputs[i].name);
		free(infer->outputs[i].shape);
	}
	free(infer->inputs);
	free(infer->outputs);
	free(infer->id);
	free(infer->buffer);
	answer_deinit(&infer->answer);
	(void)link_session_unref(infer->session);
	free(infer);
	return NULL;
}

static void release(TensorMemory *memory) {
	if (memory->lease.client)
		(void)shmb_lease_release(&memory->lease);
	memory->lease.client = NULL;
}

void infer_release(Infer *infer) {
	size_t i;

	for (i = 0; i < infer->n_inputs; i++)
		release(&infer->inputs[i].memory);
	for (i = 0; i < infer->n_outputs; i++)
		release(&infer->outputs[i].memory);
}

AnswerCode infer_set_id(Infer *infer, Bytes id) {
	free(infer->id);
	infer->id = bytes_copy(id);
	return infer->id ? ANSWER_OK : answer_no_memory(&infer->answer);
}

InferInput *infer_input(Infer *infer, const char *name) {
	size_t i;

	for (i = 0; i < infer->n_inputs; i++)
		if (!strcmp(infer->inputs[i].name, name))
			return &infer->inputs[i];
	return NULL;
}

InferOutput *infer_output(Infer *infer, const char *name) {
	size_t i;

	for (i = 0; i < infer->n_outputs; i++)
		if (!strcmp(infer->outputs[i].name, name))
			return &infer->outputs[i];
	return NULL;
}

static int64_t *copy_shape(const int64_t *shape, size_t n_shape) {
	int64_t *copy = malloc((n_shape ? n_shape : 1) * sizeof(*copy));

	if (copy && n_shape)
		memcpy(copy, shape, n_shape * sizeof(*copy));
	return copy;
}

AnswerCode infer_add_input(Infer *infer, Bytes name, DataType datatype, const int64_t *shape, size_t n_shape) {
	InferInput *inputs, input = { .name = bytes_copy(name), .datatype = datatype, .n_shape = n_shape };
	AnswerCode code;

	input.shape = copy_shape(shape, n_shape);
	inputs = reallocarray(infer->inputs, infer->n_inputs + 1, sizeof(*inputs));
	if (inputs)
		infer->inputs = inputs;
	if (!inputs || !input.shape || !input.name)
		code = answer_no_memory(&infer->answer);
	else if (infer_input(infer, input.name))
		code = refuse(infer, ANSWER_INVALID_ARG, "input '%s' already exists in request", input.name);
	else if (infer->n_inputs == INFER_TENSORS_MAX)
		code = refuse(infer, ANSWER_INVALID_ARG, "a request has no more than %d inputs", INFER_TENSORS_MAX);
	else {
		infer->inputs[infer->n_inputs++] = input;
		return ANSWER_OK;
	}
	free(input.name);
	free(input.shape);
	return code;
}

AnswerCode infer_add_output(Infer *infer, Bytes name) {
	InferOutput *outputs, output = { .name = bytes_copy(name) };
	AnswerCode code;

	outputs = reallocarray(infer->outputs, infer->n_outputs + 1, sizeof(*outputs));
	if (outputs)
		infer->outputs = outputs;
	if (!outputs || !output.name)
		code = answer_no_memory(&infer->answer);
	else if (infer_output(infer, output.name))
		code = refuse(infer, ANSWER_INVALID_ARG, "output '%s' already exists in request", output.name);
	else if (infer->n_outputs == INFER_TENSORS_MAX)
		code = refuse(infer, ANSWER_INVALID_ARG, "a request has no more than %d outputs", INFER_TENSORS_MAX);
	else {
		infer->outputs[infer->n_outputs++] = output;
		return ANSWER_OK;
	}
	free(output.name);
	return code;
}

/* the shape that @size bytes have as the only input of @infer's model: one row */
AnswerCode infer_add_raw_input(Infer *infer, const void *data, uint64_t size) {
	const ModelTensor *tensor = infer->model->inputs;
	int64_t shape[2] = { 1, tensor->dim };

	if (infer->model->n_inputs != 1)
		return refuse(infer, ANSWER_INVALID_ARG,
			      "Raw request must only have 1 input (found 1) to be deduced but got %" PRIu32
			      " inputs in '%s' model configuration",
			      infer->model->n_inputs, infer->model->name);
	if (tensor->datatype == DATATYPE_BYTES)
		return refuse(infer, ANSWER_INVALID_ARG,
			      "For BYTE datatype raw input '%s', the model must have input shape [1]", tensor->name);
	if (tensor->dim < 0)
		shape[1] = (int64_t)(size / datatype_size(tensor->datatype));
	if (infer_add_input(infer, BYTES(tensor->name), tensor->datatype, shape, 2))
		return infer->answer.code;
	tensor_memory_borrow(&infer->inputs[0].memory, data, size);
	return ANSWER_OK;
}

AnswerCode infer_check_shared(Infer *infer, const InferShared *shared, const char *tensor) {
	if (shared->has_byte_size)
		return ANSWER_OK;
	return answer_set(
		&infer->answer, ANSWER_INVALID_ARG,
		"'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor '%s'",
		tensor);
}

static AnswerCode share(Infer *infer, TensorMemory *memory, const InferShared *shared, bool write) {
	LinkSession *session;

	if (!infer->session) {
		session = link_get(infer->core->link);
		if (!session)
			return core_unavailable(infer->core, &infer->answer);
		infer->session = link_session_ref(session);
	}
	return tensor_memory_lease(memory, infer->core, infer->session->client, shared->region, shared->offset,
				   shared->byte_size, write, &infer->answer);
}

AnswerCode infer_input_share(Infer *infer, InferInput *input, const InferShared *shared) {
	if (infer_check_shared(infer, shared, input->name))
		return infer->answer.code;
	return share(infer, &input->memory, shared, false);
}

AnswerCode infer_output_share(Infer *infer, InferOutput *output, const InferShared *shared) {
	if (infer_check_shared(infer, shared, output->name))
		return infer->answer.code;
	return share(infer, &output->memory, shared, true);
}

AnswerCode infer_read(Infer *infer, InferInput *input, uint64_t offset, void *ret_data, uint64_t size) {
	return tensor_memory_read(&input->memory, infer->core, offset, ret_data, size, &infer->answer);
}

AnswerCode infer_write(Infer *infer, InferOutput *output, uint64_t offset, const void *data, uint64_t size) {
	return tensor_memory_write(&output->memory, infer->core, offset, data, size, &infer->answer);
}

AnswerCode infer_output_begin(Infer *infer, InferOutput *output, DataType datatype, const int64_t *shape,
			      size_t n_shape, uint64_t size) {
	void *data;

	output->shape = copy_shape(shape, n_shape);
	if (!output->shape)
		return answer_no_memory(&infer->answer);
	output->n_shape = n_shape;
	output->datatype = datatype;
	output->size = size;
	if (output->memory.region) {
		if (size <= output->memory.size)
			return ANSWER_OK;
		return answer_set(&infer->answer, ANSWER_INTERNAL,
				  "shared memory size specified with the request for output '%s' (%" PRIu64
				  " bytes) should be at least %" PRIu64 " bytes to hold the results",
				  output->name, output->memory.size, size);
	}
	if (size > INFER_RESULTS_MAX - infer->core->models->results)
		return answer_set(&infer->answer, ANSWER_RESOURCE_EXHAUSTED,
				  "output '%s' has %" PRIu64
				  " bytes, more than is held for replies now; shared memory has no such limit",
				  output->name, size);
	data = malloc(size ? size : 1);
	if (!data)
		return answer_no_memory(&infer->answer);
	tensor_memory_take(&output->memory, data, size);
	infer->results += size;
	infer->core->models->results += size;
	return ANSWER_OK;
}

AnswerCode infer_output_put(Infer *infer, InferOutput *output, const InferInput *input, const void *data,
			    uint64_t size) {
	if (!output)
		return ANSWER_OK;
	if (infer_output_begin(infer, output, input->datatype, input->shape, input->n_shape, size))
		return infer->answer.code;
	return infer_write(infer, output, 0, data, size);
}

/* --- the checks at the start, in Triton's order */

/* closes @stream, which writes to *text; NULL when it could not be written */
static char *finish_text(FILE *stream, char **text) {
	if (fclose(stream) != EOF)
		return *text;
	free(*text);
	return NULL;
}

char *infer_shape_text(const int64_t *shape, size_t n_shape) {
	char *text = NULL;
	size_t i, size;
	FILE *stream = open_memstream(&text, &size);

	if (!stream)
		return NULL;
	(void)fputc('[', stream);
	for (i = 0; i < n_shape; i++)
		(void)fprintf(stream, "%s%" PRId64, i ? "," : "", shape[i]);
	(void)fputc(']', stream);
	return finish_text(stream, &text);
}

/* Triton's sentence, with the slip in it that it makes when no input is missing */
static AnswerCode refuse_number_of_inputs(Infer *infer) {
	const Model *model = infer->model;
	bool any = false;
	char *text = NULL;
	AnswerCode code;
	size_t i, size;
	FILE *stream = open_memstream(&text, &size);

	if (!stream)
		return answer_no_memory(&infer->answer);
	(void)fprintf(stream, "expected %" PRIu32 " inputs but got %zu inputs for model '%s'. Got input(s) [",
		      model->n_inputs, infer->n_inputs, model->name);
	for (i = 0; i < infer->n_inputs; i++)
		(void)fprintf(stream, "%s'%s'", i ? "," : "", infer->inputs[i].name);
	(void)fputs("], but missing required input(s) ", stream);
	for (i = 0; i < model->n_inputs; i++)
		if (!infer_input(infer, model->inputs[i].name)) {
			(void)fprintf(stream, "%s'%s'", any ? "," : "[", model->inputs[i].name);
			any = true;
		}
	(void)fputs("]. Please provide all required input(s).", stream);
	text = finish_text(stream, &text);
	if (!text)
		return answer_no_memory(&infer->answer);
	code = refuse(infer, ANSWER_INVALID_ARG, "%s", text);
	free(text);
	return code;
}

static const ModelTensor *find_tensor(const ModelTensor *tensors, uint32_t n, const char *name) {
	uint32_t i;

	for (i = 0; i < n; i++)
		if (!strcmp(tensors[i].name, name))
			return &tensors[i];
	return NULL;
}

/* what no input decides alone; *ret_batch is the first dimension of all of them, 0 when it is 0 in all */
static AnswerCode check_request(Infer *infer, uint32_t *ret_batch) {
	const Model *model = infer->model;
	uint32_t batch = 0;
	size_t i;

	for (i = 0; i < infer->n_outputs; i++)
		if (!find_tensor(model->outputs, model->n_outputs, infer->outputs[i].name))
			return answer_set(&infer->answer, ANSWER_INVALID_ARG,
					  "unexpected inference output '%s' for model '%s'", infer->outputs[i].name,
					  model->name);
	if (infer->n_inputs != model->n_inputs)
		return refuse_number_of_inputs(infer);
	for (i = 0; i < infer->n_inputs; i++) {
		const InferInput *input = &infer->inputs[i];

		if (!find_tensor(model->inputs, model->n_inputs, input->name))
			return answer_set(&infer->answer, ANSWER_INVALID_ARG,
					  "unexpected inference input '%s' for model '%s'", input->name, model->name);
		if (!input->n_shape)
			return refuse(infer, ANSWER_INVALID_ARG,
				      "input '%s' has no shape but model requires batch dimension for '%s'",
				      input->name, model->name);
		if (!batch)
			batch = (uint32_t)input->shape[0];
		else if (input->shape[0] != batch)
			return refuse(infer, ANSWER_INVALID_ARG,
				      "input '%s' batch size does not match other inputs for '%s'", input->name,
				      model->name);
	}
	if (batch > model->max_batch_size)
		return refuse(infer, ANSWER_INVALID_ARG, "inference request batch-size must be <= %" PRIu32 " for '%s'",
			      model->max_batch_size, model->name);
	*ret_batch = batch;
	return ANSWER_OK;
}

static AnswerCode refuse_shape(Infer *infer, const InferInput *input, const ModelTensor *tensor, bool is_wildcard) {
	char *got = infer_shape_text(input->shape, input->n_shape);
	AnswerCode code;

	if (!got)
		return answer_no_memory(&infer->answer);
	if (is_wildcard)
		code = refuse(infer, ANSWER_INVALID_ARG,
			      "All input dimensions should be specified for input '%s' for model '%s', got %s",
			      input->name, infer->model->name, got);
	else
		code = refuse(infer, ANSWER_INVALID_ARG,
			      "unexpected shape for input '%s' for model '%s'. Expected [-1,%" PRId64 "], got %s. %s",
			      input->name, infer->model->name, tensor->dim, got, IMPLICIT_BATCH);
	free(got);
	return code;
}

/* elements of @input, of which the first dimension counts only when there is a batch */
static AnswerCode count_elements(Infer *infer, const InferInput *input, uint32_t batch, int64_t *ret) {
	const int64_t shape[2] = { batch, input->shape[1] }, *from = batch ? shape : shape + 1;
	bool is_bytes = input->datatype == DATATYPE_BYTES;
	int64_t count = datatype_count(from, batch ? 2 : 1);
	AnswerCode code;
	char *text;

	if (count == DATATYPE_COUNT_INVALID) {
		text = infer_shape_text(from, batch ? 2 : 1);
		if (!text)
			return answer_no_memory(&infer->answer);
		code = answer_set(&infer->answer, ANSWER_INVALID_ARG, "tensor '%s' contains an invalid dimension %s%s",
				  input->name, is_bytes ? "in shape " : "", text);
		free(text);
		return code;
	}
	if (count == DATATYPE_COUNT_TOO_MANY ||
	    (!is_bytes && count > INT64_MAX / (int64_t)datatype_size(input->datatype)))
		return answer_set(&infer->answer, ANSWER_INVALID_ARG,
				  "%s for tensor '%s' exceeds maximum size of %" PRId64,
				  is_bytes ? "element count" : "byte size", input->name, INT64_MAX);
	*ret = count;
	return ANSWER_OK;
}

/*
 * Goes on along the elements of a BYTES input, which are as many as the shape says; *ret_more when there is more to
 * see. Memory that is shared can change afterwards, so this protects no model: it answers what Triton answers.
 */
static AnswerCode walk_strings(Infer *infer, InferInput *input, int64_t expected, bool *ret_more) {
	uint64_t size = input->memory.size, offset = infer->walk.offset, from = 0, have = 0;
	int64_t n = infer->walk.n_elements, n_now = 0;
	uint8_t window[WALK_WINDOW];
	uint32_t length;

	for (; offset < size; offset += length, n_now++) {
		if (n_now == WALK_ELEMENTS) {
			infer->walk.offset = offset;
			infer->walk.n_elements = n;
			*ret_more = true;
			return ANSWER_OK;
		}
		if (size - offset < sizeof(length))
			return refuse(
				infer, ANSWER_INVALID_ARG,
				"incomplete string length indicator for inference input '%s' for model '%s', expecting "
				"%zu bytes but only %" PRIu64 " bytes available. Please make sure the string length "
				"indicator is in one buffer.",
				input->name, infer->model->name, sizeof(length), size - offset);
		if (offset < from || offset + sizeof(length) > from + have) {
			from = offset;
			have = size - offset < sizeof(window) ? size - offset : sizeof(window);
			if (infer_read(infer, input, from, window, have))
				return infer->answer.code;
		}
		memcpy(&length, window + (offset - from), sizeof(length));
		if (++n > expected)
			return refuse(infer, ANSWER_INVALID_ARG,
				      "unexpected number of string elements %" PRId64
				      " for inference input '%s' for model "
				      "'%s', expecting %" PRId64,
				      n, input->name, infer->model->name, expected);
		offset += sizeof(length);
		if (length > size - offset)
			return refuse(
				infer, ANSWER_INVALID_ARG,
				"incomplete string data for inference input '%s' for model '%s', expecting string of "
				"length %" PRIu32 " but only %" PRIu64 " bytes available",
				input->name, infer->model->name, length, size - offset);
	}
	if (n != expected)
		return refuse(infer, ANSWER_INVALID_ARG,
			      "expected %" PRId64
			      " string elements for inference input '%s' for model '%s', got %" PRId64,
			      expected, input->name, infer->model->name, n);
	infer->walk.offset = 0;
	infer->walk.n_elements = 0;
	return ANSWER_OK;
}

static AnswerCode check_input(Infer *infer, InferInput *input, bool *ret_more) {
	const Model *model = infer->model;
	const ModelTensor *tensor = find_tensor(model->inputs, model->n_inputs, input->name);
	int64_t count = 0, expected;

	if (input->datatype != tensor->datatype)
		return refuse(infer, ANSWER_INVALID_ARG,
			      "inference input '%s' data-type is '%s', but model '%s' expects '%s'", input->name,
			      datatype_name(input->datatype), model->name, datatype_name(tensor->datatype));
	if (input->n_shape != 2)
		return refuse_shape(infer, input, tensor, false);
	if (input->shape[1] == -1)
		return refuse_shape(infer, input, tensor, true);
	if (tensor->dim != -1 && tensor->dim != input->shape[1])
		return refuse_shape(infer, input, tensor, false);
	if (count_elements(infer, input, infer->batch, &count))
		return infer->answer.code;
	if (input->datatype == DATATYPE_BYTES)
		return walk_strings(infer, input, count, ret_more);
	expected = count * (int64_t)datatype_size(input->datatype);
	if (input->memory.size != (uint64_t)expected)
		return refuse(infer, ANSWER_INVALID_ARG,
			      "input byte size mismatch for input '%s' for model '%s'. Expected %" PRId64
			      ", got %" PRIu64,
			      input->name, model->name, expected, input->memory.size);
	return ANSWER_OK;
}

/* --- from the start to the end */

static uint64_t ns_since(const struct timespec *then) {
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)(now.tv_sec - then->tv_sec) * 1000000000 + (uint64_t)now.tv_nsec - (uint64_t)then->tv_nsec;
}

static void count(const Infer *infer) {
	ModelStatistics *statistics = infer->model->statistics;
	uint64_t ns = ns_since(&infer->begun);
	struct timespec now;

	(void)clock_gettime(CLOCK_REALTIME, &now);
	statistics->last_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
	if (infer->answer.code) {
		statistics->n_failed++;
		statistics->failed_ns += ns;
	} else {
		statistics->rows += infer->batch ? infer->batch : 1;
		statistics->n_succeeded++;
		statistics->succeeded_ns += ns;
		statistics->delayed_ns += (uint64_t)infer->model->delay_ms * 1000000;
	}
}

static void end(Infer *infer) {
	count(infer);
	leave(infer);
	infer->done(infer, infer->userdata);
}

/* what is left, up to where it is better to let others have the loop */
static void work(Infer *infer) {
	bool more = false;

	while (infer->checked < infer->n_inputs) {
		if (check_input(infer, &infer->inputs[infer->checked], &more))
			return end(infer);
		if (more)
			return go_on(infer, 0);
		if (++infer->checked == infer->n_inputs && infer->model->delay_ms)
			return take_turn(infer);
	}
	if (infer->model->step(infer, &more) || !more)
		end(infer);
	else
		go_on(infer, 0);
}

static void on_time(evutil_socket_t fd, short what, void *userdata) {
	(void)fd;
	(void)what;
	work(userdata);
}

static void go_on(Infer *infer, uint32_t delay_ms) {
	const struct timeval delay = { .tv_sec = delay_ms / 1000, .tv_usec = delay_ms % 1000 * 1000 };

	if (!infer->timer)
		infer->timer = evtimer_new(infer->core->models->base, on_time, infer);
	if (!infer->timer || event_add(infer->timer, &delay) < 0) {
		(void)answer_no_memory(&infer->answer);
		end(infer);
	}
}

/* a request that names no output wants all */
static AnswerCode want_all(Infer *infer) {
	const Model *model = infer->model;
	uint32_t i;

	for (i = 0; i < model->n_outputs && !infer->n_outputs_requested; i++)
		if (infer_add_output(infer, BYTES(model->outputs[i].name)))
			return infer->answer.code;
	return ANSWER_OK;
}

void infer_abort(Infer *infer) {
	(void)answer_set(&infer->answer, ANSWER_UNAVAILABLE, "the server is stopping");
	end(infer);
}

void infer_start(Infer *infer, InferDone done, void *userdata) {
	Models *models = infer->core->models;

	(void)clock_gettime(CLOCK_MONOTONIC, &infer->begun);
	infer->done = done;
	infer->userdata = userdata;
	infer->n_outputs_requested = infer->n_outputs;
	infer->in_progress = true;
	TAILQ_INSERT_TAIL(&models->in_progress, infer, link);
	if (models->n_in_progress++ >= INFER_IN_PROGRESS_MAX) {
		(void)refuse(infer, ANSWER_UNAVAILABLE, "Exceeds maximum queue size");
		end(infer);
	} else if (check_request(infer, &infer->batch) || want_all(infer))
		end(infer);
	else
		work(infer);
}
