/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory: what a Region, a Lease, a Block and a View have in common. The type itself cannot be made. A View holds an export
 * of the Memory that it is a window of, or, where it is the view of a GPU's memory that is none of these, its owner.
 */

#include <string.h>

#include "module.h"

typedef struct View {
	Memory memory;
	Memory *of;	 /* NULL with an owner */
	PyObject *owner; /* whoever frees the memory */
} View;

void py_memory_init_bytes(Memory *memory, State *state, void *data, uint64_t size, bool read_only) {
	memory->state = state;
	memory->data = data;
	memory->size = size;
	memory->dtype = &py_dtype_bytes;
	memory->device = -1;
	memory->n_dimensions = 1;
	memory->shape = memory->inline_shape;
	memory->inline_shape[0] = (Py_ssize_t)size;
	memory->inline_shape[1] = 1;
	memory->n_exports = 0;
	memory->read_only = read_only;
	memory->closed = false;
	memory->pinned = false;
	memory->over = NULL;
}

int py_memory_set_shape(Memory *memory, const Dtype *dtype, int n, const Py_ssize_t *shape) {
	Py_ssize_t stride = dtype->size, *made = memory->inline_shape;

	if (n > 1) {
		made = PyMem_Malloc(2 * (size_t)n * sizeof(*made));
		if (!made) {
			PyErr_NoMemory();
			return -1;
		}
	}
	for (int i = n; i-- > 0;) {
		made[i] = shape[i];
		made[n + i] = stride;
		stride *= shape[i] ? shape[i] : 1;
	}
	memory->shape = made;
	memory->n_dimensions = n;
	memory->dtype = dtype;
	return 0;
}

void py_memory_deinit(Memory *memory) {
	if (memory->shape != memory->inline_shape)
		PyMem_Free(memory->shape);
}

int py_memory_export(Memory *memory) {
	if (memory->closed) {
		PyErr_SetString(PyExc_ValueError, "the memory was given back");
		return -1;
	}
	if (!memory->data) {
		PyErr_SetString(PyExc_BufferError, "there is no pointer to this memory, only copies of it can be made");
		return -1;
	}
	memory->n_exports++;
	return 0;
}

void py_memory_unexport(Memory *memory) {
	memory->n_exports--;
	if (memory_is_over(memory) && memory->over)
		memory->over(memory);
}

/* ---- the buffer protocol ---- */

/* in the order of Fortran, too: at most one dimension has more than one element */
static bool is_one_line(const Memory *memory) {
	int n = 0;

	for (int i = 0; i < memory->n_dimensions; ++i)
		n += memory->shape[i] > 1;
	return n <= 1;
}

static int check_is_of_cpu(const Memory *memory, PyObject *exception) {
	if (memory->device < 0)
		return 0;
	PyErr_SetString(exception,
			"the memory is a GPU's: DLPack and __cuda_array_interface__ know of such, the CPU does not");
	return -1;
}

static int get_buffer(PyObject *self, Py_buffer *ret, int flags) {
	Memory *memory = (Memory *)self;

	ret->obj = NULL;
	if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && !is_one_line(memory)) {
		PyErr_SetString(PyExc_BufferError, "the memory is in C order, not in Fortran's");
		return -1;
	}
	if (flags & PyBUF_WRITABLE && memory->read_only) {
		PyErr_SetString(PyExc_BufferError, "the memory is read-only");
		return -1;
	}
	if (check_is_of_cpu(memory, PyExc_BufferError) || py_memory_export(memory))
		return -1;
	ret->buf = memory->data;
	ret->obj = Py_NewRef(self);
	ret->len = (Py_ssize_t)memory->size;
	ret->readonly = memory->read_only;
	ret->itemsize = memory->dtype->size;
	ret->format = flags & PyBUF_FORMAT ? (char *)memory->dtype->format : NULL;
	ret->ndim = memory->n_dimensions;
	ret->shape = flags & PyBUF_ND ? memory->shape : NULL;
	ret->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? memory->shape + memory->n_dimensions : NULL;
	ret->suboffsets = NULL;
	ret->internal = NULL;
	return 0;
}

static void release_buffer(PyObject *self, Py_buffer *buffer) {
	(void)buffer;
	py_memory_unexport((Memory *)self);
}

/* ---- attributes ---- */

static PyObject *shape_tuple(const Memory *memory) {
	PyObject *tuple = PyTuple_New(memory->n_dimensions);

	for (int i = 0; tuple && i < memory->n_dimensions; ++i) {
		PyObject *number = PyLong_FromSsize_t(memory->shape[i]);

		if (!number || PyTuple_SetItem(tuple, i, number)) {
			Py_DECREF(tuple);
			return NULL;
		}
	}
	return tuple;
}

static PyObject *get_address(PyObject *self, void *unused) {
	Memory *memory = (Memory *)self;

	(void)unused;
	if (!memory->data || memory_is_over(memory))
		Py_RETURN_NONE;
	return PyLong_FromVoidPtr(memory->data);
}

static PyObject *get_nbytes(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLongLong(((Memory *)self)->size);
}

static PyObject *get_shape(PyObject *self, void *unused) {
	(void)unused;
	return shape_tuple((Memory *)self);
}

static PyObject *get_dtype(PyObject *self, void *unused) {
	(void)unused;
	return PyUnicode_FromString(((Memory *)self)->dtype->name);
}

static PyObject *get_read_only(PyObject *self, void *unused) {
	(void)unused;
	return PyBool_FromLong(((Memory *)self)->read_only);
}

static PyObject *get_exports(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromSsize_t(((Memory *)self)->n_exports);
}

/* version 3 of both array interfaces; @last is the one key in which they differ */
static PyObject *array_interface(Memory *memory, const char *last) {
	PyObject *shape, *ret;

	if (!memory->dtype->typestr) {
		PyErr_Format(PyExc_AttributeError, "%s has no type in the array interface", memory->dtype->name);
		return NULL;
	}
	/* whoever reads this keeps the object at most */
	if (py_memory_export(memory))
		return NULL;
	memory->pinned = true;
	py_memory_unexport(memory);
	shape = shape_tuple(memory);
	if (!shape)
		return NULL;
	ret = Py_BuildValue("{s:i,s:N,s:s,s:(NN),s:O}", "version", 3, "shape", shape, "typestr", memory->dtype->typestr,
			    "data", PyLong_FromVoidPtr(memory->data), PyBool_FromLong(memory->read_only), "strides",
			    Py_None);
	if (ret && last && PyDict_SetItemString(ret, last, Py_None))
		Py_CLEAR(ret);
	return ret;
}

static PyObject *get_array_interface(PyObject *self, void *unused) {
	(void)unused;
	if (check_is_of_cpu((Memory *)self, PyExc_AttributeError))
		return NULL;
	return array_interface((Memory *)self, NULL);
}

static PyObject *get_cuda_array_interface(PyObject *self, void *unused) {
	(void)unused;
	if (((Memory *)self)->device < 0) {
		PyErr_SetString(PyExc_AttributeError, "the memory is not a GPU's");
		return NULL;
	}
	return array_interface((Memory *)self, "stream");
}

static PyGetSetDef getters[] = {
	{ "address", get_address, NULL,
	  "Where the first byte is, an int; None without a pointer. Valid no longer than the memory is held.", NULL },
	{ "nbytes", get_nbytes, NULL, "Size in bytes.", NULL },
	{ "shape", get_shape, NULL, "Dimensions, in elements; C order.", NULL },
	{ "dtype", get_dtype, NULL, "Name of the type of elements, such as \"float32\".", NULL },
	{ "readonly", get_read_only, NULL, "Whether writing is refused.", NULL },
	{ "exports", get_exports, NULL,
	  "How many memoryviews, arrays and views look at it; those through __array_interface__ are not counted.",
	  NULL },
	{ "__array_interface__", get_array_interface, NULL,
	  "Version 3 of NumPy's array interface. Who reads it keeps the object, not an export: from then on the memory is held "
	  "until the object itself is freed, whatever release() says.",
	  NULL },
	{ "__cuda_array_interface__", get_cuda_array_interface, NULL,
	  "Version 3 of the CUDA array interface, for memory of a GPU; there is no work under way on it that a consumer would "
	  "have to wait for. Who reads it keeps the object, as with __array_interface__.",
	  NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

/* ---- views ---- */

static PyObject *view_new(Memory *of, const Dtype *dtype, int n, const Py_ssize_t *shape, uint64_t offset,
			  uint64_t size) {
	View *view;

	if (py_memory_export(of))
		return NULL;
	view = PyObject_New(View, of->state->view_type);
	if (!view) {
		py_memory_unexport(of);
		return NULL;
	}
	py_memory_init_bytes(&view->memory, of->state, (uint8_t *)of->data + offset, size, of->read_only);
	view->memory.device = of->device;
	view->owner = NULL;
	view->of = (Memory *)Py_NewRef((PyObject *)of);
	if (py_memory_set_shape(&view->memory, dtype, n, shape)) {
		Py_DECREF(view);
		return NULL;
	}
	return (PyObject *)view;
}

static void view_dealloc(PyObject *self) {
	View *view = (View *)self;
	PyTypeObject *type = Py_TYPE(self);

	if (view->of)
		py_memory_unexport(view->of);
	Py_XDECREF((PyObject *)view->of);
	Py_XDECREF(view->owner);
	py_memory_deinit(&view->memory);
	PyObject_Free(self);
	Py_DECREF(type);
}

PyObject *py_memory_of_device(PyObject *module, PyObject *const *arguments, Py_ssize_t n) {
	State *state = PyModule_GetState(module);
	uint64_t address = 0, size = 0;
	uint32_t device = 0;
	View *view;

	if (n != 4) {
		PyErr_SetString(PyExc_TypeError, "device_memory() takes owner, address, nbytes and device");
		return NULL;
	}
	if (py_argument_uint64(arguments[1], "address", &address) ||
	    py_argument_uint64(arguments[2], "nbytes", &size) || py_argument_uint32(arguments[3], "device", &device))
		return NULL;
	if (!address || size > PY_SSIZE_T_MAX || device > INT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "there is no such memory");
		return NULL;
	}
	view = PyObject_New(View, state->view_type);
	if (!view)
		return NULL;
	py_memory_init_bytes(&view->memory, state, (void *)(uintptr_t)address, size, false);
	view->memory.device = (int32_t)device;
	view->of = NULL;
	view->owner = Py_NewRef(arguments[0]);
	return (PyObject *)view;
}

static PyObject *memory_view(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "view", 0, 2, 3, { "shape", "dtype", "offset" } };
	Memory *memory = (Memory *)self;
	Py_ssize_t shape[DIMENSIONS_MAX];
	const Dtype *dtype = memory->dtype;
	uint64_t offset = 0, size;
	PyObject *values[3];
	int dimensions = 1;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_uint64(values[2], "offset", &offset))
		return NULL;
	if (values[1]) {
		dtype = py_dtype_parse(values[1]);
		if (!dtype)
			return NULL;
	}
	if (offset > memory->size) {
		PyErr_SetString(PyExc_ValueError, "the offset is beyond the memory");
		return NULL;
	}
	size = memory->size - offset;
	if (values[0]) {
		dimensions = py_shape_parse(values[0], shape);
		if (dimensions < 0 || py_shape_bytes(dtype, dimensions, shape, &size))
			return NULL;
	} else if (size % dtype->size) {
		PyErr_Format(PyExc_ValueError, "%llu bytes are no whole number of %s", (unsigned long long)size,
			     dtype->name);
		return NULL;
	} else {
		shape[0] = (Py_ssize_t)(size / dtype->size);
	}
	if (size > memory->size - offset) {
		PyErr_Format(PyExc_ValueError, "the shape has %llu bytes, the memory %llu from the offset on",
			     (unsigned long long)size, (unsigned long long)(memory->size - offset));
		return NULL;
	}
	return view_new(memory, dtype, dimensions, shape, offset, size);
}

/* numpy is asked for only here, by Python code beside this module */
static PyObject *memory_numpy(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "numpy", 0, 2, 2, { "shape", "dtype" } };
	PyObject *values[2], *module, *array = NULL;

	if (py_arguments_parse(&signature, arguments, n, keywords, values))
		return NULL;
	module = PyImport_ImportModule("shmbroker._numpy");
	if (!module)
		return NULL;
	array = PyObject_CallMethod(module, "array_of", "OOO", self, values[0] ? values[0] : Py_None,
				    values[1] ? values[1] : Py_None);
	Py_DECREF(module);
	return array;
}

static PyMethodDef methods[] = {
	{ "view", FAST(memory_view),
	  "view($self, shape=None, dtype=None, *, offset=0)\n--\n\n"
	  "A typed window of this memory, which it holds: no bytes are copied.\n\n"
	  "shape: an int or a sequence of them, in elements; by default one dimension with all that is left.\n"
	  "dtype: a name such as \"float32\", or a dtype of NumPy or PyTorch; by default that of the memory.\n"
	  "offset: in bytes.\n\n"
	  "Raises ValueError when the window is not within the memory or the memory was given back, TypeError for an unknown "
	  "dtype, BufferError where there is no pointer." },
	{ "numpy", FAST(memory_numpy),
	  "numpy($self, shape=None, dtype=None)\n--\n\n"
	  "A numpy.ndarray over this memory, which it holds: no bytes are copied. Needs NumPy.\n\n"
	  "shape: in elements; by default that of the memory, or one dimension when only dtype is given.\n"
	  "dtype: whatever numpy.dtype() takes, also structured types. bfloat16 needs ml_dtypes.\n\n"
	  "Raises ImportError without NumPy, ValueError, BufferError as view() does. The array is read-only where the memory is." },
	{ "__dlpack__", FAST(py_memory_dlpack),
	  "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
	  "A DLPack capsule, versioned when max_version is (1, 0) or later. No stream is waited for: what is shared is "
	  "ready.\n\n"
	  "Raises BufferError for read-only memory and a consumer without versions, which could not be told; for another device "
	  "than this memory's; for copy=True." },
	{ "__dlpack_device__", py_memory_dlpack_device, METH_NOARGS,
	  "__dlpack_device__($self)\n--\n\nThe device as DLPack counts them: (1, 0) for memory of the CPU, "
	  "(2, ordinal) for a GPU's." },
	{ NULL, NULL, 0, NULL },
};

int py_memory_init_type(State *state, PyObject *module) {
	static PyType_Slot slots[] = {
		{ Py_bf_getbuffer, (void *)get_buffer },
		{ Py_bf_releasebuffer, (void *)release_buffer },
		{ Py_tp_methods, methods },
		{ Py_tp_getset, getters },
		{ Py_tp_doc,
		  "Memory that Python may look at without copying: a Region, a Lease, a Block, or a View of one." },
		{ 0, NULL },
	};
	static PyType_Slot view_slots[] = {
		{ Py_tp_dealloc, (void *)view_dealloc },
		{ Py_tp_doc, "A typed window of memory, which it holds; made by view()." },
		{ 0, NULL },
	};
	static PyType_Spec spec = { "shmbroker.Memory", sizeof(Memory), 0,
				    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
				    slots };
	static PyType_Spec view_spec = { "shmbroker.View", sizeof(View), 0,
					 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, view_slots };

	state->memory_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
	if (!state->memory_type || PyModule_AddType(module, state->memory_type))
		return -1;
	state->view_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &view_spec, (PyObject *)state->memory_type);
	return !state->view_type || PyModule_AddType(module, state->view_type) ? -1 : 0;
}
