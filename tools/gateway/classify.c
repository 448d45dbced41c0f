/* SPDX-License-Identifier: Apache-2.0 */

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "classify.h"

#define ELEMENTS_MAX 1000000 /* of a row; Triton's limit */
#define TEXT_MAX 400	     /* of "VALUE:INDEX": a double has up to 309 digits in front of its point */

typedef struct Entry {
	long double value; /* has room for every 64-bit integer */
	uint64_t index;
} Entry;

static bool is_real(DataType datatype) {
	return datatype == DATATYPE_FP32 || datatype == DATATYPE_FP64;
}

static long double read_value(DataType datatype, const uint8_t *data) {
	size_t bits = 8 * datatype_size(datatype);
	uint64_t number = 0;
	float single;
	double real;

	memcpy(&number, data, datatype_size(datatype));
	if (datatype == DATATYPE_FP32) {
		memcpy(&single, data, sizeof(single));
		return single;
	}
	if (datatype == DATATYPE_FP64) {
		memcpy(&real, data, sizeof(real));
		return real;
	}
	if (datatype >= DATATYPE_INT8 && datatype <= DATATYPE_INT64)
		return (int64_t)(number << (64 - bits)) >> (64 - bits);
	return number;
}

/* the largest first, of equal ones the one in front; what is no number comes last */
static int compare(const void *a, const void *b) {
	const Entry *one = a, *other = b;
	long double left = isnan(one->value) ? -INFINITY : one->value,
		    right = isnan(other->value) ? -INFINITY : other->value;

	if (left != right)
		return left > right ? -1 : 1;
	return one->index < other->index ? -1 : one->index > other->index;
}

/* writes the first @n_classes of the @n elements of a row */
static void write_row(FILE *stream, DataType datatype, const uint8_t *data, Entry *entries, uint64_t n,
		      uint64_t n_classes) {
	char text[TEXT_MAX];
	uint32_t length;
	uint64_t i;

	for (i = 0; i < n; i++)
		entries[i] = (Entry){ read_value(datatype, data + i * datatype_size(datatype)), i };
	qsort(entries, n, sizeof(*entries), compare);
	for (i = 0; i < n_classes; i++) {
		length = (uint32_t)snprintf(text, sizeof(text), is_real(datatype) ? "%Lf:%" PRIu64 : "%.0Lf:%" PRIu64,
					    entries[i].value, entries[i].index);
		(void)fwrite(&length, sizeof(length), 1, stream);
		(void)fwrite(text, 1, length, stream);
	}
}

AnswerCode classify(Infer *infer, InferOutput *output) {
	size_t element = datatype_size(output->datatype);
	uint64_t rows = (uint64_t)output->shape[0], n, n_classes, i;
	Entry *entries;
	char *text = NULL;
	size_t size;
	FILE *stream;

	if (!element || output->datatype == DATATYPE_BOOL || output->datatype == DATATYPE_FP16 ||
	    output->datatype == DATATYPE_BF16)
		return answer_set(&infer->answer, ANSWER_INVALID_ARG,
				  "class result not available for output due to unsupported type '%s'",
				  datatype_name(output->datatype));
	n = rows ? output->size / element / rows : 0;
	if (n > ELEMENTS_MAX)
		return answer_set(&infer->answer, ANSWER_INVALID_ARG, "classification output tensor too large");
	n_classes = output->n_classes < n ? output->n_classes : n;
	entries = malloc((n ? n : 1) * sizeof(*entries));
	stream = open_memstream(&text, &size);
	for (i = 0; entries && stream && i < rows; i++)
		write_row(stream, output->datatype, (const uint8_t *)output->memory.data + i * n * element, entries, n,
			  n_classes);
	free(entries);
	if (!stream || fclose(stream) == EOF || !entries) {
		free(text);
		return answer_no_memory(&infer->answer);
	}
	tensor_memory_deinit(&output->memory);
	tensor_memory_take(&output->memory, text, size);
	output->datatype = DATATYPE_BYTES;
	output->size = size;
	output->n_shape = 2;
	output->shape[1] = (int64_t)n_classes;
	return ANSWER_OK;
}
