/* SPDX-License-Identifier: Apache-2.0 */

#include "module.h"

/* where a buffer lies; for what is adopted by its address */
static PyObject *buffer_range(PyObject *module, PyObject *object) {
	PyObject *range;
	Py_buffer buffer;

	(void)module;
	if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE))
		return NULL;
	range = Py_BuildValue("(NL)", PyLong_FromVoidPtr(buffer.buf), (long long)buffer.len);
	PyBuffer_Release(&buffer);
	return range;
}

static PyMethodDef functions[] = {
	{ "connect", FAST(py_broker_connect),
	  "connect($module, type, socket=None, *, roles=None, accept_unsealed=False, populate=True,\n"
	  "        resume_timeout=30.0, lease_page=True, force_rmw=False, cuda_context=False)\n--\n\n"
	  "A new connection, as an object of a type that is made from Broker." },
	{ "at_exit", py_broker_at_exit, METH_NOARGS,
	  "at_exit($module)\n--\n\nFrom here on no connection waits for a broker that is away." },
	{ "buffer_range", buffer_range, METH_O,
	  "buffer_range($module, object, /)\n--\n\nAddress and size in bytes of a contiguous buffer." },
	{ "device_memory", (PyCFunction)(void (*)(void))py_memory_of_device, METH_FASTCALL,
	  "device_memory($module, owner, address, nbytes, device, /)\n--\n\n"
	  "A View of memory of the GPU with that ordinal, which holds the owner of the memory." },
	{ "dlpack_inspect", py_dlpack_inspect, METH_O,
	  "dlpack_inspect($module, capsule, /)\n--\n\n"
	  "Device type and ordinal, address, size in bytes, and whether it is contiguous, of a tensor that stays in its capsule." },
	{ NULL, NULL, 0, NULL },
};

static int exec(PyObject *module) {
	State *state = PyModule_GetState(module);

	if (py_errors_init(state, module) || py_memory_init_type(state, module) || py_broker_init_type(state, module) ||
	    py_region_init_type(state, module) || py_lease_init_types(state, module) ||
	    py_pool_init_type(state, module) || py_block_init_type(state, module) || py_list_init_types(state, module))
		return -1;
	return PyModule_AddStringConstant(module, "version", SHMB_VERSION);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
	State *state = PyModule_GetState(module);

	Py_VISIT(state->error);
	for (int i = 0; i < ERRORS_MAX; ++i)
		Py_VISIT(state->errors[i]);
	Py_VISIT(state->block_type);
	Py_VISIT(state->broker_type);
	Py_VISIT(state->handle_type);
	Py_VISIT(state->lease_type);
	Py_VISIT(state->memory_type);
	Py_VISIT(state->pool_type);
	Py_VISIT(state->region_type);
	Py_VISIT(state->status_type);
	Py_VISIT(state->view_type);
	return 0;
}

/* no clear: objects that outlive the module's dictionary use its types, which hold the module */
static PyModuleDef_Slot slots[] = {
	{ Py_mod_exec, (void *)exec },
	{ 0, NULL },
};

static PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	.m_name = "shmbroker._shmbroker",
	.m_doc = "The part of shmbroker that is written in C; shmbroker has all of it that is meant to be used.",
	.m_size = sizeof(State),
	.m_methods = functions,
	.m_slots = slots,
	.m_traverse = traverse,
};

PyMODINIT_FUNC PyInit__shmbroker(void);
PyMODINIT_FUNC PyInit__shmbroker(void) {
	return PyModuleDef_Init(&definition);
}
