/* SPDX-License-Identifier: Apache-2.0 */

#include <string.h>

#include "datatype.h"

static const struct {
	const char *name, *config_name;
	size_t size;
} datatypes[_DATATYPE_N] = {
	[DATATYPE_INVALID] = { "<invalid>", "TYPE_INVALID", 0 },
	[DATATYPE_BOOL] = { "BOOL", "TYPE_BOOL", 1 },
	[DATATYPE_UINT8] = { "UINT8", "TYPE_UINT8", 1 },
	[DATATYPE_UINT16] = { "UINT16", "TYPE_UINT16", 2 },
	[DATATYPE_UINT32] = { "UINT32", "TYPE_UINT32", 4 },
	[DATATYPE_UINT64] = { "UINT64", "TYPE_UINT64", 8 },
	[DATATYPE_INT8] = { "INT8", "TYPE_INT8", 1 },
	[DATATYPE_INT16] = { "INT16", "TYPE_INT16", 2 },
	[DATATYPE_INT32] = { "INT32", "TYPE_INT32", 4 },
	[DATATYPE_INT64] = { "INT64", "TYPE_INT64", 8 },
	[DATATYPE_FP16] = { "FP16", "TYPE_FP16", 2 },
	[DATATYPE_FP32] = { "FP32", "TYPE_FP32", 4 },
	[DATATYPE_FP64] = { "FP64", "TYPE_FP64", 8 },
	[DATATYPE_BYTES] = { "BYTES", "TYPE_STRING", 0 },
	[DATATYPE_BF16] = { "BF16", "TYPE_BF16", 2 },
};

const char *datatype_name(DataType type) {
	return datatypes[type].name;
}

const char *datatype_config_name(DataType type) {
	return datatypes[type].config_name;
}

DataType datatype_from_name(const char *name, size_t length) {
	DataType type;

	for (type = DATATYPE_INVALID + 1; type < _DATATYPE_N; type++)
		if (length == strlen(datatypes[type].name) && !memcmp(name, datatypes[type].name, length))
			return type;
	return DATATYPE_INVALID;
}

size_t datatype_size(DataType type) {
	return datatypes[type].size;
}

int64_t datatype_count(const int64_t *shape, size_t n_shape) {
	int64_t count = 1;
	size_t i;

	if (!n_shape)
		return 0;
	for (i = 0; i < n_shape; i++) {
		if (shape[i] == -1)
			return DATATYPE_COUNT_WILDCARD;
		if (shape[i] < 0)
			return DATATYPE_COUNT_INVALID;
		if (!shape[i])
			return 0;
		if (__builtin_mul_overflow(count, shape[i], &count))
			return DATATYPE_COUNT_TOO_MANY;
	}
	return count;
}
