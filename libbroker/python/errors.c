/* SPDX-License-Identifier: Apache-2.0 */

/* One class of exceptions for each code of the library, made from the library's own names of them. */

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "module.h"

/* codes whose class is not simply their name in another spelling, or is an exception that Python has too */
static const struct {
	int code;
	const char *name;
	PyObject **also;
} special[] = {
	{ SHMB_E_INVALID, NULL, &PyExc_ValueError },
	{ SHMB_E_VERSION, "VersionMismatch", NULL },
	{ SHMB_E_STATE, "BadState", NULL },
	{ SHMB_E_PERMISSION, "PermissionDenied", &PyExc_PermissionError },
	{ SHMB_E_NOT_FOUND, NULL, &PyExc_LookupError },
	{ SHMB_E_EXISTS, "AlreadyExists", NULL },
	{ SHMB_E_QUOTA, "QuotaExceeded", NULL },
	{ SHMB_E_BAD_NAME, NULL, &PyExc_ValueError },
	{ SHMB_E_OUT_OF_BOUNDS, NULL, &PyExc_IndexError },
	{ SHMB_E_ACCESS, "AccessRefused", NULL },
	{ SHMB_E_TIMED_OUT, NULL, &PyExc_TimeoutError },
	{ SHMB_E_FORKED, "ForkedError", NULL },
};

/* NOT_FOUND becomes NotFound */
static void camel_case(const char *name, char *ret, size_t size) {
	size_t n = 0;
	bool begins = true;

	for (; *name && n + 1 < size; ++name) {
		if (*name == '_') {
			begins = true;
			continue;
		}
		ret[n++] = (char)(begins ? *name : tolower((unsigned char)*name));
		begins = false;
	}
	ret[n] = 0;
}

static PyObject *class_new(const State *state, int code) {
	char name[64], qualified[80], doc[256];
	PyObject *also = NULL, *bases, *attributes, *made = NULL;

	camel_case(shmb_error_name(code), name, sizeof(name));
	for (size_t i = 0; i < sizeof(special) / sizeof(special[0]); ++i) {
		if (special[i].code != code)
			continue;
		if (special[i].name)
			snprintf(name, sizeof(name), "%s", special[i].name);
		if (special[i].also)
			also = *special[i].also;
	}
	snprintf(qualified, sizeof(qualified), "shmbroker.%s", name);
	snprintf(doc, sizeof(doc), "SHMB_E_%s: %s.", shmb_error_name(code), shmb_error_text(code));
	bases = also ? PyTuple_Pack(2, state->error, also) : PyTuple_Pack(1, state->error);
	attributes = Py_BuildValue("{s:i,s:s}", "code", code, "name", shmb_error_name(code));
	if (bases && attributes)
		made = PyErr_NewExceptionWithDoc(qualified, doc, bases, attributes);
	Py_XDECREF(bases);
	Py_XDECREF(attributes);
	return made;
}

int py_errors_init(State *state, PyObject *module) {
	PyObject *attributes = Py_BuildValue("{s:i,s:s}", "code", 0, "name", ""), *by_code, *number, *name;
	int r = 0;

	if (!attributes)
		return -1;
	state->error = PyErr_NewExceptionWithDoc(
		"shmbroker.Error",
		"What the broker or the library refuses: the root of one class for each code.\n\n"
		"code and name are those of the C library, and the text is the sentence that the "
		"broker gave. Failures of the kernel or the transport are OSError.",
		PyExc_Exception, attributes);
	Py_DECREF(attributes);
	if (!state->error || PyModule_AddObjectRef(module, "Error", state->error))
		return -1;
	by_code = PyDict_New();
	if (!by_code)
		return -1;
	for (int code = 1; !r && code < ERRORS_MAX && shmb_error_name(code); ++code) {
		state->errors[code] = class_new(state, code);
		number = PyLong_FromLong(code);
		name = state->errors[code] ? PyObject_GetAttrString(state->errors[code], "__name__") : NULL;
		if (!name || !number || PyDict_SetItem(by_code, number, state->errors[code]) ||
		    PyObject_SetAttr(module, name, state->errors[code]))
			r = -1;
		Py_XDECREF(name);
		Py_XDECREF(number);
	}
	if (!r)
		r = PyModule_AddObjectRef(module, "errors_by_code", by_code);
	Py_DECREF(by_code);
	return r;
}

PyObject *py_error_class(const State *state, int code) {
	return code > 0 && code < ERRORS_MAX && state->errors[code] ? state->errors[code] : state->error;
}

PyObject *py_error_new(const State *state, int result, const char *text) {
	PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"), *made;

	if (!message)
		return NULL;
	if (result < 0)
		made = PyObject_CallFunction(PyExc_OSError, "iO", -result, message);
	else
		made = PyObject_CallFunctionObjArgs(py_error_class(state, result), message, NULL);
	Py_DECREF(message);
	return made;
}

PyObject *py_error_raise(const State *state, int result) {
	const char *text = shmb_last_error();
	PyObject *made = py_error_new(state, result, *text ? text : shmb_error_text(result));

	if (made) {
		PyErr_SetObject((PyObject *)Py_TYPE(made), made);
		Py_DECREF(made);
	}
	return NULL;
}
