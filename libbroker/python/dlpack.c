/* SPDX-License-Identifier: Apache-2.0 */

/* DLPack: both forms of the capsule. The structs are those of the specification's ABI, version 1. */

#include <stdlib.h>

#include "module.h"

#define DLPACK_MAJOR 1
#define DLPACK_MINOR 0
#define DLPACK_READ_ONLY UINT64_C(1)
#define DEVICE_CPU 1
#define DEVICE_CUDA 2

typedef struct Tensor {
	void *data;
	struct {
		int32_t type;
		int32_t id;
	} device;
	int32_t n_dimensions;
	struct {
		uint8_t code;
		uint8_t bits;
		uint16_t lanes;
	} dtype;
	int64_t *shape;
	int64_t *strides; /* in elements */
	uint64_t byte_offset;
} Tensor;

typedef struct LegacyTensor {
	Tensor tensor;
	void *context;
	void (*deleter)(struct LegacyTensor *self);
} LegacyTensor;

typedef struct VersionedTensor {
	struct {
		uint32_t major;
		uint32_t minor;
	} version;
	void *context;
	void (*deleter)(struct VersionedTensor *self);
	uint64_t flags;
	Tensor tensor;
} VersionedTensor;

/* one of both, and what it points to; holds an export of the memory */
typedef struct Export {
	union {
		LegacyTensor legacy;
		VersionedTensor versioned;
	};
	int64_t shape[];
} Export;

/* consumers call this on any thread, with or without the GIL */
static void export_free(Export *export, Memory *memory) {
	PyGILState_STATE gil;

	/* an array that outlives the interpreter: nobody is left to count */
	if (!Py_IsInitialized())
		return;
	gil = PyGILState_Ensure();
	py_memory_unexport(memory);
	Py_DECREF(memory);
	PyMem_Free(export);
	PyGILState_Release(gil);
}

static void legacy_delete(LegacyTensor *self) {
	export_free((Export *)self, self->context);
}

static void versioned_delete(VersionedTensor *self) {
	export_free((Export *)self, self->context);
}

/* of a capsule that nobody has taken; one that was taken has another name */
static void capsule_free(PyObject *capsule) {
	LegacyTensor *legacy;
	VersionedTensor *versioned;

	if (PyCapsule_IsValid(capsule, "dltensor")) {
		legacy = PyCapsule_GetPointer(capsule, "dltensor");
		legacy->deleter(legacy);
	} else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
		versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
		versioned->deleter(versioned);
	}
}

static int32_t device_type(const Memory *memory) {
	return memory->device < 0 ? DEVICE_CPU : DEVICE_CUDA;
}

static int32_t device_id(const Memory *memory) {
	return memory->device < 0 ? 0 : memory->device;
}

static void tensor_fill(Tensor *tensor, const Memory *memory, int64_t *shape) {
	int n = memory->n_dimensions;

	*tensor = (Tensor){
		.data = memory->data,
		.device = { device_type(memory), device_id(memory) },
		.n_dimensions = n,
		.dtype = { memory->dtype->dlpack_code, (uint8_t)(8 * memory->dtype->size), 1 },
		.shape = shape,
		.strides = shape + n,
	};
	for (int i = 0; i < n; ++i) {
		shape[i] = memory->shape[i];
		shape[n + i] = memory->shape[n + i] / memory->dtype->size;
	}
}

static PyObject *export_new(Memory *memory, bool is_versioned) {
	Export *export;
	PyObject *capsule;

	if (py_memory_export(memory))
		return NULL;
	export = PyMem_Calloc(1, sizeof(*export) + 2 * (size_t)memory->n_dimensions * sizeof(export->shape[0]));
	if (!export) {
		py_memory_unexport(memory);
		return PyErr_NoMemory();
	}
	if (is_versioned) {
		export->versioned = (VersionedTensor){
			.version = { DLPACK_MAJOR, DLPACK_MINOR },
			.context = Py_NewRef((PyObject *)memory),
			.deleter = versioned_delete,
			.flags = memory->read_only ? DLPACK_READ_ONLY : 0,
		};
		tensor_fill(&export->versioned.tensor, memory, export->shape);
	} else {
		export->legacy = (LegacyTensor){ .context = Py_NewRef((PyObject *)memory), .deleter = legacy_delete };
		tensor_fill(&export->legacy.tensor, memory, export->shape);
	}
	capsule = PyCapsule_New(export, is_versioned ? "dltensor_versioned" : "dltensor", capsule_free);
	if (!capsule)
		export_free(export, memory);
	return capsule;
}

/* a pair of integers */
static int pair_parse(PyObject *value, const char *name, long ret[static 2]) {
	PyObject *item;

	if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) {
		PyErr_Format(PyExc_TypeError, "%s is a tuple of two integers", name);
		return -1;
	}
	for (int i = 0; i < 2; ++i) {
		/* devices are enums, which are integers */
		item = PyNumber_Index(PyTuple_GetItem(value, i));
		ret[i] = item ? PyLong_AsLong(item) : -1;
		Py_XDECREF(item);
		if (ret[i] == -1 && PyErr_Occurred())
			return -1;
	}
	return 0;
}

PyObject *py_memory_dlpack(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "__dlpack__", 0, 0, 4, { "stream", "max_version", "dl_device", "copy" } };
	Memory *memory = (Memory *)self;
	long version[2] = {}, device[2] = { device_type(memory), device_id(memory) };
	PyObject *values[4];
	bool copy = false;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    (values[1] && pair_parse(values[1], "max_version", version)) ||
	    (values[2] && pair_parse(values[2], "dl_device", device)) || py_argument_bool(values[3], &copy))
		return NULL;
	if (values[0] && memory->device < 0) {
		PyErr_SetString(PyExc_BufferError, "memory of the CPU has no streams");
		return NULL;
	}
	if (device[0] != device_type(memory) || device[1] != device_id(memory)) {
		PyErr_SetString(PyExc_BufferError, "the memory is of one device, and is not copied to another");
		return NULL;
	}
	if (copy) {
		PyErr_SetString(PyExc_BufferError, "the memory is shared, not copied");
		return NULL;
	}
	if (memory->read_only && version[0] < 1) {
		PyErr_SetString(PyExc_BufferError, "the memory is read-only, which only DLPack 1.0 and later can say");
		return NULL;
	}
	return export_new(memory, version[0] >= 1);
}

PyObject *py_memory_dlpack_device(PyObject *self, PyObject *unused) {
	const Memory *memory = (Memory *)self;

	(void)unused;
	return Py_BuildValue("(ii)", device_type(memory), device_id(memory));
}

/* C order; strides of dimensions that have but one place, or that nothing is in, do not matter */
static bool tensor_is_contiguous(const Tensor *tensor) {
	int64_t expected = 1;
	bool is_contiguous = true;

	for (int i = tensor->n_dimensions; tensor->strides && i-- > 0;) {
		if (!tensor->shape[i])
			return true;
		if (tensor->shape[i] != 1 && tensor->strides[i] != expected)
			is_contiguous = false;
		expected *= tensor->shape[i];
	}
	return is_contiguous;
}

PyObject *py_dlpack_inspect(PyObject *module, PyObject *capsule) {
	const Tensor *tensor;
	uint64_t size;

	(void)module;
	if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
		tensor = &((VersionedTensor *)PyCapsule_GetPointer(capsule, "dltensor_versioned"))->tensor;
	} else {
		LegacyTensor *legacy = PyCapsule_GetPointer(capsule, "dltensor");

		if (!legacy)
			return NULL;
		tensor = &legacy->tensor;
	}
	size = ((uint64_t)tensor->dtype.bits * tensor->dtype.lanes + 7) / 8;
	for (int i = 0; i < tensor->n_dimensions; ++i) {
		if (tensor->shape[i] < 0 || __builtin_mul_overflow(size, (uint64_t)tensor->shape[i], &size)) {
			PyErr_SetString(PyExc_ValueError, "that is no shape");
			return NULL;
		}
	}
	return Py_BuildValue("(iiKKO)", tensor->device.type, tensor->device.id,
			     (unsigned long long)((uintptr_t)tensor->data + tensor->byte_offset),
			     (unsigned long long)size, tensor_is_contiguous(tensor) ? Py_True : Py_False);
}
