/* SPDX-License-Identifier: Apache-2.0 */

/* Types of elements and shapes, without any library of arrays. */

#include <string.h>

#include "module.h"

enum {
	DLPACK_INT,
	DLPACK_UINT,
	DLPACK_FLOAT,
	DLPACK_BFLOAT = 4,
	DLPACK_COMPLEX,
	DLPACK_BOOL,
};

/* bfloat16 has no letter in the buffer protocol and is its bits there; 'l' is 64 bits wherever this runs */
static const Dtype dtypes[] = {
	{ "bool", "?", "|b1", 1, DLPACK_BOOL },
	{ "int8", "b", "|i1", 1, DLPACK_INT },
	{ "int16", "h", "<i2", 2, DLPACK_INT },
	{ "int32", "i", "<i4", 4, DLPACK_INT },
	{ "int64", "l", "<i8", 8, DLPACK_INT },
	{ "uint8", "B", "|u1", 1, DLPACK_UINT },
	{ "uint16", "H", "<u2", 2, DLPACK_UINT },
	{ "uint32", "I", "<u4", 4, DLPACK_UINT },
	{ "uint64", "L", "<u8", 8, DLPACK_UINT },
	{ "float16", "e", "<f2", 2, DLPACK_FLOAT },
	{ "float32", "f", "<f4", 4, DLPACK_FLOAT },
	{ "float64", "d", "<f8", 8, DLPACK_FLOAT },
	{ "bfloat16", "H", NULL, 2, DLPACK_BFLOAT },
	{ "complex64", "Zf", "<c8", 8, DLPACK_COMPLEX },
	{ "complex128", "Zd", "<c16", 16, DLPACK_COMPLEX },
};
_Static_assert(sizeof(long) == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the table says so");

static const char *const aliases[][2] = {
	{ "float", "float64" }, { "double", "float64" },     { "half", "float16" }, { "int", "int64" },
	{ "bool_", "bool" },	{ "complex", "complex128" }, { "bytes", "uint8" },
};

const Dtype py_dtype_bytes = { "uint8", "B", "|u1", 1, DLPACK_UINT };

static const Dtype *find(const char *name) {
	for (size_t i = 0; i < sizeof(aliases) / sizeof(aliases[0]); ++i)
		if (!strcmp(name, aliases[i][0]))
			name = aliases[i][1];
	for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); ++i) {
		const Dtype *dtype = &dtypes[i];

		if (!strcmp(name, dtype->name))
			return dtype;
		/* "<f4" and "f4" */
		if (dtype->typestr && (!strcmp(name, dtype->typestr) || !strcmp(name, dtype->typestr + 1)))
			return dtype;
	}
	return NULL;
}

/* a new reference to the text that names it */
static PyObject *name_of(PyObject *value) {
	PyObject *name;

	if (PyUnicode_Check(value))
		return Py_NewRef(value);
	name = PyObject_GetAttrString(value, PyType_Check(value) ? "__name__" : "name");
	if (name && PyUnicode_Check(name))
		return name;
	Py_XDECREF(name);
	PyErr_Clear();
	return PyObject_Str(value);
}

const Dtype *py_dtype_parse(PyObject *value) {
	PyObject *text = name_of(value);
	const char *name = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
	const Dtype *found = NULL;

	if (name) {
		if (!strncmp(name, "torch.", 6))
			name += 6;
		found = find(name);
		if (!found)
			PyErr_Format(
				PyExc_TypeError,
				"%R is no type of elements: bool, int8 to int64, uint8 to uint64, float16, float32, float64, "
				"bfloat16, complex64, complex128",
				value);
	}
	Py_XDECREF(text);
	return found;
}

static int dimension(PyObject *value, Py_ssize_t *ret) {
	*ret = PyNumber_AsSsize_t(value, PyExc_OverflowError);
	if (*ret == -1 && PyErr_Occurred())
		return -1;
	if (*ret < 0) {
		PyErr_SetString(PyExc_ValueError, "a dimension of the shape is negative");
		return -1;
	}
	return 0;
}

int py_shape_parse(PyObject *value, Py_ssize_t ret[static DIMENSIONS_MAX]) {
	Py_ssize_t n;
	int r = 0;

	if (PyIndex_Check(value))
		return dimension(value, ret) ? -1 : 1;
	if (!PySequence_Check(value)) {
		PyErr_Format(PyExc_TypeError, "a shape is an integer or a sequence of integers, not %R", value);
		return -1;
	}
	n = PySequence_Size(value);
	if (n > DIMENSIONS_MAX) {
		PyErr_Format(PyExc_ValueError, "a shape has at most %d dimensions", DIMENSIONS_MAX);
		return -1;
	}
	for (Py_ssize_t i = 0; !r && i < n; ++i) {
		PyObject *item = PySequence_GetItem(value, i);

		r = item ? dimension(item, &ret[i]) : -1;
		Py_XDECREF(item);
	}
	return r || n < 0 ? -1 : (int)n;
}

int py_shape_bytes(const Dtype *dtype, int n, const Py_ssize_t *shape, uint64_t *ret) {
	uint64_t size = dtype->size;

	for (int i = 0; i < n; ++i)
		if (__builtin_mul_overflow(size, (uint64_t)shape[i], &size) || size > PY_SSIZE_T_MAX) {
			/* a zero elsewhere would make it small again, and the strides still too big */
			PyErr_SetString(PyExc_ValueError, "the shape is larger than any memory");
			return -1;
		}
	*ret = size;
	return 0;
}
