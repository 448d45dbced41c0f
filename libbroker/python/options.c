/* SPDX-License-Identifier: Apache-2.0 */

/* How a region is to be registered, as arguments of Python say it. */

#include <string.h>

#include "module.h"

/* ids of an access list, into @ret[0..*n) */
static int acl_parse(PyObject *value, const char *name, uint32_t ret[static ACL_MAX], uint32_t *n) {
	Py_ssize_t count;
	int r = 0;

	if (!value)
		return 0;
	if (PyUnicode_Check(value) || !PySequence_Check(value)) {
		PyErr_Format(PyExc_TypeError, "%s is a sequence of integers", name);
		return -1;
	}
	count = PySequence_Size(value);
	if (count < 0)
		return -1;
	if (count > ACL_MAX) {
		PyErr_Format(PyExc_ValueError, "%s has at most %d entries", name, ACL_MAX);
		return -1;
	}
	for (Py_ssize_t i = 0; !r && i < count; ++i) {
		PyObject *item = PySequence_GetItem(value, i);

		r = item ? py_argument_uint32(item, name, &ret[i]) : -1;
		Py_XDECREF(item);
	}
	*n = (uint32_t)count;
	return r;
}

static int huge_parse(PyObject *value, uint32_t *ret) {
	const char *text = NULL;

	if (!value || value == Py_False)
		return 0;
	if (PyUnicode_Check(value)) {
		if (py_argument_text(value, "huge_pages", &text))
			return -1;
		if (!strcmp(text, "2M") || !strcmp(text, "1G")) {
			*ret = *text == '2' ? SHMB_HUGE_2M : SHMB_HUGE_1G;
			return 0;
		}
	}
	PyErr_Format(PyExc_ValueError, "huge_pages is \"2M\", \"1G\" or None, not %R", value);
	return -1;
}

int py_options_parse(PyObject *const values[static N_OPTIONS], Options *ret) {
	struct shmb_region_options *options = &ret->options;
	bool keep = false, replace = false, read_only = false;
	uint64_t principal = UINT64_MAX;

	*options = (struct shmb_region_options){ .struct_size = sizeof(*options) };
	if (py_argument_bool(values[0], &keep) || py_argument_bool(values[1], &replace) ||
	    py_argument_bool(values[2], &read_only) ||
	    acl_parse(values[3], "allowed_uids", ret->uids, &options->n_allowed_uids) ||
	    acl_parse(values[4], "allowed_gids", ret->gids, &options->n_allowed_gids) ||
	    py_argument_uint64(values[5], "principal", &principal))
		return -1;
	options->flags = (keep ? SHMB_REGION_OPT_KEEP : 0) | (replace ? SHMB_REGION_OPT_REPLACE : 0) |
			 (read_only ? SHMB_REGION_OPT_READ_ONLY : 0);
	options->allowed_uids = ret->uids;
	options->allowed_gids = ret->gids;
	if (principal != UINT64_MAX && principal >= UINT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "principal is a uid");
		return -1;
	}
	options->principal = principal == UINT64_MAX ? 0 : (uint32_t)principal + 1;
	return 0;
}

int py_options_parse_memory(PyObject *const values[static N_MEMORY_OPTIONS], Options *ret) {
	uint32_t node = UINT32_MAX;
	bool populate = false;

	if (py_argument_bool(values[0], &populate) || huge_parse(values[1], &ret->options.huge_pages) ||
	    py_argument_uint32(values[2], "numa_node", &node))
		return -1;
	ret->options.flags |= populate ? SHMB_REGION_OPT_POPULATE : 0;
	ret->options.numa_node = node == UINT32_MAX ? 0 : node < INT32_MAX ? (int32_t)node + 1 : INT32_MAX;
	return 0;
}
