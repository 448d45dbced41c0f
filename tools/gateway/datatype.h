/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Datatypes of tensors, as the inference protocol names them. DATATYPE_INVALID stands for a name that is none; it has
 * the size 0, as DATATYPE_BYTES has, whose elements carry their length in front (32 bits, little-endian). The values
 * are those of the enumeration DataType of ModelConfig.
 */

#include <stddef.h>
#include <stdint.h>

typedef enum DataType {
	DATATYPE_INVALID,
	DATATYPE_BOOL,
	DATATYPE_UINT8,
	DATATYPE_UINT16,
	DATATYPE_UINT32,
	DATATYPE_UINT64,
	DATATYPE_INT8,
	DATATYPE_INT16,
	DATATYPE_INT32,
	DATATYPE_INT64,
	DATATYPE_FP16,
	DATATYPE_FP32,
	DATATYPE_FP64,
	DATATYPE_BYTES,
	DATATYPE_BF16,
	_DATATYPE_N,
} DataType;

/* results of datatype_count() that are no count */
#define DATATYPE_COUNT_WILDCARD (-1) /* a dimension is -1 */
#define DATATYPE_COUNT_INVALID (-2)  /* a dimension is below -1 */
#define DATATYPE_COUNT_TOO_MANY (-3) /* more than INT64_MAX */

/* "INT32"; "<invalid>" for DATATYPE_INVALID */
const char *datatype_name(DataType type);
/* "TYPE_INT32", as ModelConfig spells it */
const char *datatype_config_name(DataType type);
DataType datatype_from_name(const char *name, size_t length);
/* bytes of an element */
size_t datatype_size(DataType type);
/*
 * Elements of a tensor of that shape, or DATATYPE_COUNT_*: whichever dimension says so first decides, a 0 ends the
 * count. A shape without dimensions has none.
 */
int64_t datatype_count(const int64_t *shape, size_t n_shape);
