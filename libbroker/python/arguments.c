/* SPDX-License-Identifier: Apache-2.0 */

/* Arguments of vector calls, which the stable ABI has no parser for. */

#include <limits.h>
#include <math.h>
#include <string.h>

#include "module.h"

static int find(const Signature *signature, PyObject *keyword) {
	for (int i = 0; i < signature->n; ++i)
		if (!PyUnicode_CompareWithASCIIString(keyword, signature->parameters[i]))
			return i;
	PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", signature->name, keyword);
	return -1;
}

int py_arguments_parse(const Signature *signature, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords,
		       PyObject **ret) {
	Py_ssize_t n_keywords = keywords ? PyTuple_Size(keywords) : 0;
	int at;

	if (n > signature->n_positional) {
		PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional arguments, %zd were given",
			     signature->name, signature->n_positional, n);
		return -1;
	}
	for (int i = 0; i < signature->n; ++i)
		ret[i] = i < n ? arguments[i] : NULL;
	for (Py_ssize_t i = 0; i < n_keywords; ++i) {
		at = find(signature, PyTuple_GetItem(keywords, i));
		if (at < 0)
			return -1;
		if (ret[at]) {
			PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'", signature->name,
				     signature->parameters[at]);
			return -1;
		}
		ret[at] = arguments[n + i];
	}
	for (int i = 0; i < signature->n; ++i) {
		if (i < signature->n_required && !ret[i]) {
			PyErr_Format(PyExc_TypeError, "%s() missing the argument '%s'", signature->name,
				     signature->parameters[i]);
			return -1;
		}
		if (ret[i] == Py_None && i >= signature->n_required)
			ret[i] = NULL;
	}
	return 0;
}

int py_argument_uint64(PyObject *value, const char *name, uint64_t *ret) {
	unsigned long long number;
	PyObject *index;

	if (!value)
		return 0;
	index = PyNumber_Index(value);
	if (!index)
		return -1;
	number = PyLong_AsUnsignedLongLong(index);
	Py_DECREF(index);
	if (number == (unsigned long long)-1 && PyErr_Occurred()) {
		PyErr_Clear();
		PyErr_Format(PyExc_ValueError, "%s must be an integer of 0 to 2**64 - 1", name);
		return -1;
	}
	*ret = number;
	return 0;
}

int py_argument_uint32(PyObject *value, const char *name, uint32_t *ret) {
	uint64_t number = *ret;

	if (py_argument_uint64(value, name, &number))
		return -1;
	if (number > UINT32_MAX) {
		PyErr_Format(PyExc_ValueError, "%s must be an integer of 0 to 2**32 - 1", name);
		return -1;
	}
	*ret = (uint32_t)number;
	return 0;
}

int py_argument_bool(PyObject *value, bool *ret) {
	int truth;

	if (!value)
		return 0;
	truth = PyObject_IsTrue(value);
	if (truth < 0)
		return -1;
	*ret = truth;
	return 0;
}

int py_argument_text(PyObject *value, const char *name, const char **ret) {
	const char *text;
	Py_ssize_t size;

	if (!value)
		return 0;
	if (!PyUnicode_Check(value)) {
		PyErr_Format(PyExc_TypeError, "%s must be a str", name);
		return -1;
	}
	text = PyUnicode_AsUTF8AndSize(value, &size);
	if (!text)
		return -1;
	if (strlen(text) != (size_t)size) {
		PyErr_Format(PyExc_ValueError, "%s has a NUL in it", name);
		return -1;
	}
	*ret = text;
	return 0;
}

int py_argument_timeout(PyObject *value, int *ret) {
	double seconds;

	if (!value)
		return 0;
	seconds = PyFloat_AsDouble(value);
	if (seconds == -1.0 && PyErr_Occurred())
		return -1;
	if (isnan(seconds) || seconds < 0) {
		PyErr_SetString(PyExc_ValueError, "a timeout is a number of seconds, 0 or more, or None");
		return -1;
	}
	/* more than 24 days is for ever */
	*ret = seconds * 1000 >= INT_MAX ? -1 : (int)ceil(seconds * 1000);
	return 0;
}

int py_argument_mode(PyObject *value, uint32_t *ret) {
	static const char *const names[] = {
		[SHMB_RETIRE_STRICT] = "strict",
		[SHMB_RETIRE_LAZY] = "lazy",
		[SHMB_RETIRE_FORCE] = "force",
		[SHMB_RETIRE_DISCARD] = "discard",
	};
	const char *text = NULL;

	if (!value)
		return 0;
	if (py_argument_text(value, "mode", &text))
		return -1;
	for (uint32_t i = 0; i < sizeof(names) / sizeof(names[0]); ++i) {
		if (!strcmp(text, names[i])) {
			*ret = i;
			return 0;
		}
	}
	PyErr_Format(PyExc_ValueError, "mode is \"strict\", \"lazy\", \"force\" or \"discard\", not %R", value);
	return -1;
}
