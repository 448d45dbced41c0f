/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Lease and Handle. The common case, a region that is mapped already, is a call of the library that asks nobody, and
 * is made with the GIL held: to let it go would hand it to whoever waits for it.
 */

#include <string.h>

#include "module.h"

/* larger copies are made without the GIL */
#define COPY_WITH_GIL 4096

typedef struct Lease {
	Memory memory;
	Broker *broker;
	struct shmb_lease lease;
	bool held;
	uint64_t generation;
} Lease;

typedef struct Handle {
	PyObject_HEAD Broker *broker;
	PyObject *name;
	struct shmb_handle handle;
} Handle;

static int give_back(Lease *lease) {
	int r;

	if (!lease->held)
		return 0;
	lease->held = false;
	lease->memory.data = NULL;
	r = shmb_lease_release(&lease->lease);
	py_broker_unuse(lease->broker);
	return r;
}

static void lease_over(Memory *memory) {
	(void)give_back((Lease *)memory);
}

static void lease_dealloc(PyObject *self) {
	Lease *lease = (Lease *)self;
	PyTypeObject *type = Py_TYPE(self);

	(void)give_back(lease);
	Py_DECREF(lease->broker);
	PyObject_Free(self);
	Py_DECREF(type);
}

static int ask(struct shmb_client *client, const char *name, const struct shmb_handle *handle, uint64_t offset,
	       uint64_t size, uint32_t access, struct shmb_lease *ret) {
	return name ? shmb_client_get_memory_info(client, name, offset, size, access, ret)
		    : shmb_handle_get_memory_info(client, handle, offset, size, access, ret);
}

static PyObject *lease_new(Broker *broker, const char *name, const struct shmb_handle *handle, uint64_t offset,
			   uint64_t size, uint32_t access) {
	struct shmb_lease held;
	Lease *lease;
	int r;

	if (py_broker_use(broker))
		return NULL;
	r = ask(broker->client, name, handle, offset, size, access | SHMB_NO_WAIT, &held);
	if (r == SHMB_E_AGAIN)
		WITHOUT_GIL(r = ask(broker->client, name, handle, offset, size, access, &held));
	if (r) {
		py_broker_unuse(broker);
		return py_error_raise(broker->state, r);
	}
	lease = PyObject_New(Lease, broker->state->lease_type);
	if (!lease) {
		(void)shmb_lease_release(&held);
		py_broker_unuse(broker);
		return NULL;
	}
	py_memory_init_bytes(&lease->memory, broker->state, held.address, held.size, !(held.access & SHMB_WRITE));
	lease->memory.device = held.memory_type == SHMB_MEMORY_CUDA ? held.device : -1;
	lease->memory.over = lease_over;
	lease->broker = (Broker *)Py_NewRef((PyObject *)broker);
	lease->lease = held;
	lease->held = true;
	lease->generation = held.generation;
	return (PyObject *)lease;
}

/* offset, nbytes, write, copy */
static int window_parse(PyObject *const values[static 4], uint64_t *ret_offset, uint64_t *ret_size,
			uint32_t *ret_access) {
	bool write = false, copy = false;

	*ret_offset = 0;
	*ret_size = SHMB_REST;
	if (py_argument_uint64(values[0], "offset", ret_offset) || py_argument_uint64(values[1], "nbytes", ret_size) ||
	    py_argument_bool(values[2], &write) || py_argument_bool(values[3], &copy))
		return -1;
	*ret_access = SHMB_READ | (write ? SHMB_WRITE : 0) | (copy ? SHMB_COPY : 0);
	return 0;
}

const char py_lease_get_doc[] =
	"get_memory_info($self, name, offset=0, nbytes=None, *, write=False, copy=False)\n--\n\n"
	"A lease on memory of a region: it cannot go away before release().\n\n"
	"offset, nbytes: in bytes; None is the rest. write: the memory may be written.\n"
	"copy: no pointer, only copy_in() and copy_out(), which also work on memory that its owner may truncate.\n\n"
	"The first use of a region asks the broker and maps it; from then on there is no system call.\n\n"
	"Raises NotFound, OutOfBounds, AccessRefused, PermissionDenied, NoReadOnlyFd, Unsealed, Retiring, Revoked, "
	"QuotaExceeded, Detached, Again while the broker is away and the region is not mapped, ForkedError; OSError.";

PyObject *py_lease_get(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = {
		"get_memory_info", 1, 3, 5, { "name", "offset", "nbytes", "write", "copy" }
	};
	uint64_t offset = 0, size = SHMB_REST;
	uint32_t access = SHMB_READ;
	const char *name = NULL;
	PyObject *values[5];

	if (n == 1 && !keywords) {
		if (py_argument_text(arguments[0], "name", &name))
			return NULL;
	} else if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
		   py_argument_text(values[0], "name", &name) || window_parse(&values[1], &offset, &size, &access)) {
		return NULL;
	}
	return lease_new((Broker *)self, name, NULL, offset, size, access);
}

/* ---- methods of a lease ---- */

static PyObject *lease_release(PyObject *self, PyObject *unused) {
	Lease *lease = (Lease *)self;
	int r;

	(void)unused;
	lease->memory.closed = true;
	if (!memory_is_over(&lease->memory))
		Py_RETURN_FALSE;
	r = give_back(lease);
	if (r)
		return py_error_raise(lease->memory.state, r);
	Py_RETURN_TRUE;
}

static PyObject *lease_exit(PyObject *self, PyObject *const *arguments, Py_ssize_t n) {
	PyObject *released = lease_release(self, NULL);

	/* the exception of the block is the one to see */
	if (!released && n > 0 && arguments[0] != Py_None)
		PyErr_Clear();
	else if (!released)
		return NULL;
	Py_XDECREF(released);
	Py_RETURN_NONE;
}

static int check_held(Lease *lease) {
	if (lease->held && !lease->memory.closed)
		return 0;
	PyErr_SetString(PyExc_ValueError, "the memory was given back");
	return -1;
}

static int copy(Lease *lease, uint64_t offset, void *to, const void *from, uint64_t size) {
	int r;

	/* it stays held meanwhile */
	lease->memory.n_exports++;
#define COPY                                                           \
	(r = to ? shmb_lease_copy_out(&lease->lease, offset, to, size) \
		: shmb_lease_copy_in(&lease->lease, offset, from, size))
	if (size <= COPY_WITH_GIL && lease->memory.data)
		COPY;
	else
		WITHOUT_GIL(COPY);
#undef COPY
	if (r)
		(void)py_error_raise(lease->memory.state, r);
	py_memory_unexport(&lease->memory);
	return r ? -1 : 0;
}

static PyObject *lease_copy_in(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "copy_in", 1, 2, 2, { "data", "offset" } };
	Lease *lease = (Lease *)self;
	PyObject *values[2];
	uint64_t offset = 0;
	Py_buffer data;
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_uint64(values[1], "offset", &offset) || check_held(lease) ||
	    PyObject_GetBuffer(values[0], &data, PyBUF_SIMPLE))
		return NULL;
	r = copy(lease, offset, NULL, data.buf, (uint64_t)data.len);
	PyBuffer_Release(&data);
	if (r)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *lease_copy_out(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "copy_out", 0, 2, 3, { "offset", "nbytes", "into" } };
	Lease *lease = (Lease *)self;
	uint64_t offset = 0, size;
	PyObject *values[3], *bytes;
	Py_buffer into;
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_uint64(values[0], "offset", &offset) || check_held(lease))
		return NULL;
	size = offset < lease->memory.size ? lease->memory.size - offset : 0;
	if (py_argument_uint64(values[1], "nbytes", &size))
		return NULL;
	if (!values[2]) {
		/* what is out of bounds would only be memory that is not had */
		if (size > lease->memory.size)
			return PyErr_SetString(py_error_class(lease->memory.state, SHMB_E_OUT_OF_BOUNDS),
					       "offset and size are not within the lease"),
			       NULL;
		bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
		if (bytes && copy(lease, offset, PyBytes_AsString(bytes), NULL, size))
			Py_CLEAR(bytes);
		return bytes;
	}
	if (PyObject_GetBuffer(values[2], &into, PyBUF_WRITABLE))
		return NULL;
	if (!values[1] || size > (uint64_t)into.len)
		size = (uint64_t)into.len;
	r = copy(lease, offset, into.buf, NULL, size);
	PyBuffer_Release(&into);
	return r ? NULL : PyLong_FromUnsignedLongLong(size);
}

static PyObject *lease_file(Lease *lease, bool wants_offset) {
	uint64_t offset = 0;
	int fd = -1, r;

	if (check_held(lease))
		return NULL;
	/* it stays held meanwhile */
	lease->memory.n_exports++;
	WITHOUT_GIL(r = shmb_lease_get_fd(&lease->lease, &fd, &offset));
	if (r)
		(void)py_error_raise(lease->memory.state, r);
	py_memory_unexport(&lease->memory);
	if (r)
		return NULL;
	return wants_offset ? PyLong_FromUnsignedLongLong(offset) : PyLong_FromLong(fd);
}

static PyObject *lease_fileno(PyObject *self, PyObject *unused) {
	(void)unused;
	return lease_file((Lease *)self, false);
}

static PyObject *get_file_offset(PyObject *self, void *unused) {
	(void)unused;
	return lease_file((Lease *)self, true);
}

/* ---- GPUs ---- */

static PyObject *lease_release_after(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "release_after", 0, 1, 1, { "stream" } };
	Lease *lease = (Lease *)self;
	uint64_t stream = 0;
	PyObject *values[1];
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_uint64(values[0], "stream", &stream) || check_held(lease))
		return NULL;
	if (lease->memory.n_exports) {
		PyErr_SetString(PyExc_BufferError, "memoryviews, arrays or views that were made from it exist");
		return NULL;
	}
	/* nothing is made from it meanwhile */
	lease->memory.closed = true;
	lease->memory.n_exports++;
	WITHOUT_GIL(r = shmb_lease_release_after(&lease->lease, (void *)(uintptr_t)stream));
	if (r) {
		lease->memory.closed = false;
		(void)py_error_raise(lease->memory.state, r);
	} else {
		lease->held = false;
		lease->memory.data = NULL;
		py_broker_unuse(lease->broker);
	}
	py_memory_unexport(&lease->memory);
	return r ? NULL : Py_NewRef(Py_None);
}

static PyObject *lease_pin(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "pin", 0, 1, 1, { "device" } };
	Lease *lease = (Lease *)self;
	void *pointer = NULL;
	uint64_t device = 0;
	PyObject *values[1];
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_uint64(values[0], "device", &device) || check_held(lease))
		return NULL;
	if (device > INT32_MAX)
		return PyErr_SetString(PyExc_ValueError, "device is an ordinal"), NULL;
	/* it stays held meanwhile */
	lease->memory.n_exports++;
	WITHOUT_GIL(r = shmb_lease_pin(&lease->lease, (int32_t)device, &pointer));
	if (r)
		(void)py_error_raise(lease->memory.state, r);
	py_memory_unexport(&lease->memory);
	return r ? NULL : PyLong_FromVoidPtr(pointer);
}

static PyObject *get_device_uuid(PyObject *self, void *unused) {
	const Lease *lease = (Lease *)self;

	(void)unused;
	if (lease->lease.memory_type != SHMB_MEMORY_CUDA)
		Py_RETURN_NONE;
	return PyBytes_FromStringAndSize((const char *)lease->lease.device_uuid, sizeof(lease->lease.device_uuid));
}

/* ---- attributes ---- */

static PyObject *get_memory_type(PyObject *self, void *unused) {
	(void)unused;
	return PyUnicode_FromString(((Lease *)self)->lease.memory_type == SHMB_MEMORY_CUDA ? "cuda" : "cpu");
}

static PyObject *get_device(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromLong(((Lease *)self)->lease.device);
}

static PyObject *get_generation(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLongLong(((Lease *)self)->generation);
}

static PyObject *get_flags(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLong(((Lease *)self)->lease.flags);
}

static PyObject *get_released(PyObject *self, void *unused) {
	(void)unused;
	return PyBool_FromLong(!((Lease *)self)->held);
}

static PyGetSetDef getters[] = {
	{ "memory_type", get_memory_type, NULL, "\"cpu\" or \"cuda\".", NULL },
	{ "device", get_device, NULL, "Ordinal of the device in this process, -1 for the CPU.", NULL },
	{ "device_uuid", get_device_uuid, NULL, "The 16 bytes that name the device everywhere, None for the CPU.",
	  NULL },
	{ "generation", get_generation, NULL, "The generation of the region that the lease is on.", NULL },
	{ "flags", get_flags, NULL, "SHMB_REGION_* of the C library, as RegionFlags has them.", NULL },
	{ "file_offset", get_file_offset, NULL, "Where in the file of fileno() the first byte is.", NULL },
	{ "released", get_released, NULL, "Whether it was given back to the broker.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef methods[] = {
	{ "release", lease_release, METH_NOARGS,
	  "release($self)\n--\n\n"
	  "Gives the lease back, once; later calls do nothing more.\n\n"
	  "While memoryviews, arrays or views made from it exist nothing new can be made from it, and it is given back with the "
	  "last of them: then the result is False, otherwise True. Raises Revoked when the region was revoked meanwhile." },
	{ "release_after", FAST(lease_release_after),
	  "release_after($self, stream=None)\n--\n\n"
	  "Gives the lease back when all that a stream has been given is done, without waiting: for work on the memory that "
	  "still runs. Nothing can be made from it any more; the connection's close() waits for the stream.\n\n"
	  "stream: the address of a CUstream or cudaStream_t; None is the default stream.\n\n"
	  "Raises BufferError while memoryviews, arrays or views made from it exist, Unsupported without a GPU's driver, "
	  "BadState without a CUDA context; ValueError after release()." },
	{ "pin", FAST(lease_pin),
	  "pin($self, device=0)\n--\n\n"
	  "Page-locks the memory of the CPU behind the lease for a GPU, so that copies are fast: all of it, once, until this "
	  "process unmaps it. Returns its address for the device.\n\n"
	  "Raises Invalid for memory of a GPU, Sparse, InUse when the process has page-locked a part by itself, Unsupported, "
	  "BadState without a CUDA context; ValueError after release()." },
	{ "copy_in", FAST(lease_copy_in),
	  "copy_in($self, data, offset=0)\n--\n\n"
	  "Writes the bytes of a contiguous buffer at an offset in bytes; never SIGBUS.\n\n"
	  "Raises OutOfBounds, AccessRefused on a lease for reading, Truncated when the owner has cut the memory, Unsupported "
	  "for hugetlb without a pointer; ValueError after release()." },
	{ "copy_out", FAST(lease_copy_out),
	  "copy_out($self, offset=0, nbytes=None, *, into=None)\n--\n\n"
	  "Reads bytes, by default all from the offset on; never SIGBUS.\n\n"
	  "Returns bytes; with into, a writable contiguous buffer, how many bytes were copied there: its size, or nbytes if that "
	  "is less. Raises as copy_in() does." },
	{ "fileno", lease_fileno, METH_NOARGS,
	  "fileno($self)\n--\n\n"
	  "A file descriptor of the memory, writable with write=True; it belongs to the lease. The broker is asked once.\n\n"
	  "Raises what get_memory_info() does; ValueError after release()." },
	{ "__enter__", py_enter, METH_NOARGS, "__enter__($self)\n--\n\nThe lease itself." },
	{ "__exit__", (PyCFunction)(void (*)(void))lease_exit, METH_FASTCALL,
	  "__exit__($self, *exception)\n--\n\nCalls release()." },
	{ NULL, NULL, 0, NULL },
};

/* ---- handles ---- */

const char py_lease_lookup_doc[] =
	"lookup($self, name, /)\n--\n\n"
	"Resolves a name once: a Handle for hot loops, which names this generation of the region.\n\n"
	"Raises NotFound, BadName, PermissionDenied, Retiring, Again, ForkedError.";

PyObject *py_lease_lookup(PyObject *self, PyObject *value) {
	Broker *broker = (Broker *)self;
	const char *name = NULL;
	Handle *handle;
	struct shmb_handle opened;
	int r;

	if (py_argument_text(value, "name", &name) || py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = shmb_handle_open(broker->client, name, &opened));
	py_broker_unuse(broker);
	if (r)
		return py_error_raise(broker->state, r);
	handle = PyObject_New(Handle, broker->state->handle_type);
	if (!handle)
		return NULL;
	handle->broker = (Broker *)Py_NewRef(self);
	handle->name = Py_NewRef(value);
	handle->handle = opened;
	return (PyObject *)handle;
}

static void handle_dealloc(PyObject *self) {
	Handle *handle = (Handle *)self;
	PyTypeObject *type = Py_TYPE(self);

	Py_DECREF(handle->broker);
	Py_DECREF(handle->name);
	PyObject_Free(self);
	Py_DECREF(type);
}

static PyObject *handle_get(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "get_memory_info", 0, 2, 4, { "offset", "nbytes", "write", "copy" } };
	Handle *handle = (Handle *)self;
	uint64_t offset = 0, size = SHMB_REST;
	uint32_t access = SHMB_READ;
	PyObject *values[4];

	if ((n || keywords) && (py_arguments_parse(&signature, arguments, n, keywords, values) ||
				window_parse(values, &offset, &size, &access)))
		return NULL;
	return lease_new(handle->broker, NULL, &handle->handle, offset, size, access);
}

static PyObject *handle_name(PyObject *self, void *unused) {
	(void)unused;
	return Py_NewRef(((Handle *)self)->name);
}

static PyObject *handle_nbytes(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLongLong(((Handle *)self)->handle.size);
}

static PyObject *handle_generation(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLongLong(((Handle *)self)->handle.generation);
}

static PyGetSetDef handle_getters[] = {
	{ "name", handle_name, NULL, "The name that was looked up.", NULL },
	{ "nbytes", handle_nbytes, NULL, "Size of the region in bytes.", NULL },
	{ "generation", handle_generation, NULL, "The generation that it names.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef handle_methods[] = {
	{ "get_memory_info", FAST(handle_get),
	  "get_memory_info($self, offset=0, nbytes=None, *, write=False, copy=False)\n--\n\n"
	  "A lease, as Broker.get_memory_info() gives it, without looking for the name.\n\n"
	  "Raises Stale when that generation is over: look the name up again." },
	{ NULL, NULL, 0, NULL },
};

int py_lease_init_types(State *state, PyObject *module) {
	static PyType_Slot slots[] = {
		{ Py_tp_dealloc, (void *)lease_dealloc },
		{ Py_tp_methods, methods },
		{ Py_tp_getset, getters },
		{ Py_tp_doc,
		  "Memory of a region that cannot go away before it is given back.\n\n"
		  "Supports the buffer protocol, DLPack and NumPy's array interface, read-only unless write=True was said. "
		  "It lives as long as the last memoryview, array or view that was made from it." },
		{ 0, NULL },
	};
	static PyType_Slot handle_slots[] = {
		{ Py_tp_dealloc, (void *)handle_dealloc },
		{ Py_tp_methods, handle_methods },
		{ Py_tp_getset, handle_getters },
		{ Py_tp_doc, "A name that was resolved once; Broker.lookup() makes it." },
		{ 0, NULL },
	};
	static PyType_Spec spec = { "shmbroker.Lease", sizeof(Lease), 0,
				    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };
	static PyType_Spec handle_spec = { "shmbroker.Handle", sizeof(Handle), 0,
					   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, handle_slots };

	state->lease_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, (PyObject *)state->memory_type);
	if (!state->lease_type || PyModule_AddType(module, state->lease_type))
		return -1;
	state->handle_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &handle_spec, NULL);
	return !state->handle_type || PyModule_AddType(module, state->handle_type) ? -1 : 0;
}
