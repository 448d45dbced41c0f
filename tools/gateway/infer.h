/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Infer: one inference, from the request as an encoder has parsed it to the tensors of the reply.
 *
 * An encoder makes it, says the request's id, adds each input with its bytes and then each requested output with where it
 * is to go, in the order of the request, and starts it. Leases are taken as inputs and outputs are added, and are held
 * until infer_free(). The checks that all doors share, with Triton's texts, are here: those of names as they are added,
 * those of shapes and bytes at the start. Whatever step answers something other than OK is the last: the encoder renders
 * the answer and frees.
 *
 * Everything happens on the loop's thread, in bounded pieces: an inference that waits, or copies much, holds up no other.
 */

#include <event2/event.h>
#include <time.h>

#include "models.h"
#include "tensor-memory.h"

#define INFER_TENSORS_MAX 64	  /* inputs, and outputs, of a request */
#define INFER_IN_PROGRESS_MAX 256 /* inferences that were started and have not ended */
#define INFER_RESULTS_MAX \
	((uint64_t)16 * 1024 * 1024) /* bytes of outputs that are not in shared memory, of all of them */

typedef struct InferInput InferInput;
typedef struct InferOutput InferOutput;

/* calls back once, with infer->answer set; @infer is still the encoder's, which frees it */
typedef void (*InferDone)(Infer *infer, void *userdata);

/* how an output goes into the reply; an encoder that knows but one way ignores it */
typedef enum InferForm {
	INFER_FORM_DEFAULT,
	INFER_FORM_JSON,
	INFER_FORM_BINARY,
} InferForm;

struct InferInput {
	char *name;
	DataType datatype;
	int64_t *shape;
	size_t n_shape;
	TensorMemory memory;
};

struct InferOutput {
	char *name;
	InferForm form;
	uint64_t n_classes; /* 0: the tensor itself */
	/*
	 * Of the result, from infer_output_begin() on. Where .memory is in a region the reply has no bytes, and
	 * .memory.size is what the request said of the room there.
	 */
	DataType datatype;
	int64_t *shape;
	size_t n_shape;
	uint64_t size; /* bytes */
	TensorMemory memory;
};

struct Infer {
	const Model *model;
	Core *core;	      /* borrowed */
	LinkSession *session; /* of the leases, counted; NULL until the first */
	Answer answer;	      /* what became of it; every function here that returns a code has set it */
	char *id;	      /* NULL: none */
	InferInput *inputs;
	size_t n_inputs;
	InferOutput *outputs; /* all of the model's once it has started, when none was requested */
	size_t n_outputs;

	/* of infer.c */
	struct event *timer;
	InferDone done;
	void *userdata;
	uint64_t position; /* of the model: what of the work is done */
	void *buffer;	   /* of the model; freed with the inference */
	uint64_t results;  /* bytes of outputs that go into the reply */
	size_t n_outputs_requested;
	size_t checked; /* inputs that were */
	uint32_t batch; /* rows of all inputs */
	struct {
		uint64_t offset;    /* of the next element in a BYTES input */
		int64_t n_elements; /* that were seen */
	} walk;
	bool in_progress;
	bool waits; /* for its turn at the model */
	struct timespec begun;
	TAILQ_ENTRY(Infer) link; /* of those in progress */
	TAILQ_ENTRY(Infer) turn_link;
};

/* An inference by @model, which is one of @core->models; both are borrowed. NULL when there is no memory. */
Infer *infer_new(Core *core, const Model *model);
/* ends it where it is, gives its leases back; NULL is fine; always returns NULL */
Infer *infer_free(Infer *infer);

/* gives the leases back before that, once nothing is read or written any more */
void infer_release(Infer *infer);

AnswerCode infer_set_id(Infer *infer, Bytes id);
/* the input is the last of .inputs, until the next one is added; its bytes are to be set */
AnswerCode infer_add_input(Infer *infer, Bytes name, DataType datatype, const int64_t *shape, size_t n_shape);
/* one input of @size bytes (borrowed) that is described by the model */
AnswerCode infer_add_raw_input(Infer *infer, const void *data, uint64_t size);
/* the output is the last of .outputs, until the next one is added, and goes into the reply if nothing else is said */
AnswerCode infer_add_output(Infer *infer, Bytes name);

/* the parameters of a tensor in shared memory, as an encoder found them */
typedef struct InferShared {
	Bytes region;
	uint64_t offset;
	uint64_t byte_size;
	bool has_byte_size;
} InferShared;
/* refuses a region without a size, on both doors */
AnswerCode infer_check_shared(Infer *infer, const InferShared *shared, const char *tensor);
/* takes the lease */
AnswerCode infer_input_share(Infer *infer, InferInput *input, const InferShared *shared);
AnswerCode infer_output_share(Infer *infer, InferOutput *output, const InferShared *shared);

/* Checks and runs: @done is called once, possibly before this returns, unless infer_free() comes first. */
void infer_start(Infer *infer, InferDone done, void *userdata);
/* ends it now, as unavailable, and calls @done */
void infer_abort(Infer *infer);

/* a shape in Triton's texts, as "[1,16]", to be freed; NULL without memory */
char *infer_shape_text(const int64_t *shape, size_t n_shape);

/* --- for models */

InferInput *infer_input(Infer *infer, const char *name);
/* NULL: it was not requested */
InferOutput *infer_output(Infer *infer, const char *name);
/* tensor_memory_read() and _write() */
AnswerCode infer_read(Infer *infer, InferInput *input, uint64_t offset, void *ret_data, uint64_t size);
AnswerCode infer_write(Infer *infer, InferOutput *output, uint64_t offset, const void *data, uint64_t size);
/* makes room for a result of @size bytes, in the region or in the reply; Triton's text when the region's is too small */
AnswerCode infer_output_begin(Infer *infer, InferOutput *output, DataType datatype, const int64_t *shape,
			      size_t n_shape, uint64_t size);
/* infer_output_begin() with the tensor of @input, and all of the bytes at once; nothing is done for NULL */
AnswerCode infer_output_put(Infer *infer, InferOutput *output, const InferInput *input, const void *data,
			    uint64_t size);
