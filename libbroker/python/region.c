/* SPDX-License-Identifier: Apache-2.0 */

/* Region: memory that this process has registered. */

#include <fcntl.h>

#include "module.h"

typedef struct Region {
	Memory memory;
	Broker *broker;
	struct shmb_region *region; /* NULL once it is freed */
	uint64_t generation;
	uint32_t flags;
	bool kept;
	bool retired;
	Link link; /* of the broker's, until it is retired */
} Region;

/* unmaps; what was neither retired nor kept is retired now */
static void region_over(Memory *memory) {
	Region *region = (Region *)memory;
	struct shmb_region *owned = region->region;
	Broker *broker = region->broker;

	link_remove(&region->link);
	if (!owned)
		return;
	region->region = NULL;
	memory->data = NULL;
	WITHOUT_GIL(shmb_region_free(owned));
	py_broker_unuse(broker);
}

static void region_dealloc(PyObject *self) {
	Region *region = (Region *)self;
	PyTypeObject *type = Py_TYPE(self);

	region_over(&region->memory);
	Py_DECREF(region->broker);
	py_memory_deinit(&region->memory);
	PyObject_Free(self);
	Py_DECREF(type);
}

/* ---- how it comes to be ---- */

typedef struct Layout {
	const Dtype *dtype;
	int n; /* dimensions, -1 for as many elements as there are */
	Py_ssize_t shape[DIMENSIONS_MAX];
	uint64_t size; /* 0 when it is not said */
} Layout;

/* shape, dtype, nbytes */
static int layout_parse(PyObject *const values[static 3], Layout *ret) {
	uint64_t asked = 0;

	*ret = (Layout){ .dtype = &py_dtype_bytes, .n = -1 };
	if (values[1]) {
		ret->dtype = py_dtype_parse(values[1]);
		if (!ret->dtype)
			return -1;
	}
	if (py_argument_uint64(values[2], "nbytes", &asked))
		return -1;
	if (values[0]) {
		ret->n = py_shape_parse(values[0], ret->shape);
		if (ret->n < 0 || py_shape_bytes(ret->dtype, ret->n, ret->shape, &ret->size))
			return -1;
		if (!ret->size) {
			PyErr_SetString(PyExc_ValueError, "the shape has no elements");
			return -1;
		}
		if (values[2] && asked < ret->size) {
			PyErr_SetString(PyExc_ValueError, "nbytes is less than the shape has");
			return -1;
		}
	}
	if (values[2])
		ret->size = asked;
	if (ret->size > PY_SSIZE_T_MAX) {
		PyErr_SetString(PyExc_ValueError, "nbytes is larger than any memory");
		return -1;
	}
	return 0;
}

static bool is_writable(int fd) {
	int seals = fcntl(fd, F_GET_SEALS);

	return (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR &&
	       (seals < 0 || !(seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)));
}

/* takes @owned over, also when it fails, and the broker's use; @device as Memory has it */
static PyObject *region_new(Broker *broker, struct shmb_region *owned, Layout *layout, const Options *options,
			    int32_t device) {
	Region *region = PyObject_New(Region, broker->state->region_type);
	uint64_t size = shmb_region_get_size(owned);
	void *data;

	WITHOUT_GIL(data = shmb_region_get_data(owned));
	if (!region) {
		WITHOUT_GIL(shmb_region_free(owned));
		py_broker_unuse(broker);
		return NULL;
	}
	py_memory_init_bytes(&region->memory, broker->state, data, size,
			     data && device < 0 && !is_writable(shmb_region_get_fd(owned)));
	region->memory.device = device;
	region->memory.over = region_over;
	region->broker = (Broker *)Py_NewRef((PyObject *)broker);
	region->region = owned;
	region->generation = shmb_region_get_generation(owned);
	region->flags = shmb_region_get_flags(owned);
	region->kept = options->options.flags & SHMB_REGION_OPT_KEEP;
	region->retired = false;
	link_add(&region->link, &broker->regions);
	if (layout->n < 0) {
		layout->n = 1;
		layout->shape[0] = (Py_ssize_t)(size / layout->dtype->size);
	}
	/* the bytes that a shape leaves over are not seen; nbytes says how many there are to see */
	if (py_shape_bytes(layout->dtype, layout->n, layout->shape, &region->memory.size) ||
	    py_memory_set_shape(&region->memory, layout->dtype, layout->n, layout->shape)) {
		Py_DECREF((PyObject *)region);
		return NULL;
	}
	return (PyObject *)region;
}

/* what every way to make a region is told */
typedef struct Asked {
	const char *name;
	Layout layout;
	Options options;
} Asked;

/* the parameters of Asked beside the name, which follow each other in a signature */
#define ASKED_PARAMETERS \
	"shape", "dtype", "nbytes", "keep", "replace", "read_only", "allowed_uids", "allowed_gids", "principal", "key"
enum {
	ASKED_SHAPE,
	ASKED_DTYPE,
	ASKED_NBYTES,
	ASKED_OPTIONS,
	ASKED_KEY = ASKED_OPTIONS + N_OPTIONS,
	N_ASKED,
};

static int asked_parse(PyObject *name, PyObject *const values[static N_ASKED], Asked *ret) {
	ret->name = NULL;
	if (py_argument_text(name, "name", &ret->name) || layout_parse(values, &ret->layout) ||
	    py_options_parse(&values[ASKED_OPTIONS], &ret->options) ||
	    py_argument_text(values[ASKED_KEY], "key", &ret->options.options.key))
		return -1;
	return 0;
}

/* nbytes or a shape was given */
static int check_size(PyObject *const values[static N_ASKED], const char *function) {
	if (values[ASKED_SHAPE] || values[ASKED_NBYTES])
		return 0;
	PyErr_Format(PyExc_TypeError, "%s() needs a shape or nbytes", function);
	return -1;
}

/* the object for what the library made with result @r; takes over the broker's use */
static PyObject *region_of(Broker *broker, int r, struct shmb_region *owned, Asked *asked, int32_t device) {
	if (!r)
		return region_new(broker, owned, &asked->layout, &asked->options, device);
	(void)py_error_raise(broker->state, r);
	py_broker_unuse(broker);
	return NULL;
}

const char py_region_create_doc[] =
	"create($self, name, shape=None, dtype=None, *, nbytes=None, keep=False, replace=False,\n"
	"       read_only=False, populate=False, huge_pages=None, numa_node=None, allowed_uids=None,\n"
	"       allowed_gids=None, principal=None, key=None)\n--\n\n"
	"Creates zeroed, sealed memory, maps it 64-byte aligned, and registers it under a name.\n\n"
	"shape: in elements, an int or a sequence; dtype: of elements, \"uint8\" by default. nbytes: instead of a shape, or more "
	"than it needs.\n"
	"keep: outlives this session (needs the right). replace: takes the name over from one's own older region.\n"
	"read_only: consumers may not write. populate: every page is allocated now.\n"
	"huge_pages: \"2M\" or \"1G\", the size is rounded up. numa_node: where pages come from.\n"
	"allowed_uids, allowed_gids: who may use it, at most 64 together; none of both: everybody.\n"
	"principal: the uid that a delegate acts for. key: another name by which somebody knows this memory, for status.\n\n"
	"Raises AlreadyExists, BadName, QuotaExceeded, NoSlots, NoFds, PermissionDenied, Reserved; OSError when the machine is "
	"short of memory or fds; ValueError, TypeError.";

PyObject *py_region_create(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	enum {
		NAME,
		ASKED,
		MEMORY = ASKED + N_ASKED,
		N = MEMORY + N_MEMORY_OPTIONS
	};
	static const Signature signature = {
		"create", 1, 3, N, { "name", ASKED_PARAMETERS, "populate", "huge_pages", "numa_node" }
	};
	Broker *broker = (Broker *)self;
	struct shmb_region *owned;
	PyObject *values[N];
	Asked asked;
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    asked_parse(values[NAME], &values[ASKED], &asked) ||
	    py_options_parse_memory(&values[MEMORY], &asked.options) || check_size(&values[ASKED], "create") ||
	    py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(
		r = shmb_region_create(broker->client, asked.name, asked.layout.size, &asked.options.options, &owned));
	return region_of(broker, r, owned, &asked, -1);
}

const char py_region_adopt_doc[] =
	"_adopt($self, name, fd, shape=None, dtype=None, *, nbytes=None, offset=0, keep=False,\n"
	"       replace=False, read_only=False, allowed_uids=None, allowed_gids=None, principal=None,\n"
	"       key=None)\n--\n\n"
	"Registers memory that exists, by its fd, which is borrowed.";

PyObject *py_region_adopt(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	enum {
		NAME,
		FD,
		ASKED,
		OFFSET = ASKED + N_ASKED,
		N
	};
	static const Signature signature = { "adopt", 2, 4, N, { "name", "fd", ASKED_PARAMETERS, "offset" } };
	Broker *broker = (Broker *)self;
	struct shmb_region *owned;
	uint64_t offset = 0;
	PyObject *values[N];
	Asked asked;
	long fd;
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    asked_parse(values[NAME], &values[ASKED], &asked) || py_argument_uint64(values[OFFSET], "offset", &offset))
		return NULL;
	fd = PyLong_AsLong(values[FD]);
	if (fd == -1 && PyErr_Occurred())
		return NULL;
	if (fd < 0 || fd > INT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "that is no file descriptor");
		return NULL;
	}
	if (py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = shmb_region_adopt(broker->client, asked.name, (int)fd, offset, asked.layout.size,
					  &asked.options.options, &owned));
	return region_of(broker, r, owned, &asked, -1);
}

const char py_region_cuda_doc[] =
	"_cuda_region($self, name, address, shape=None, dtype=None, *, nbytes=None, keep=False, replace=False,\n"
	"             read_only=False, allowed_uids=None, allowed_gids=None, principal=None, key=None, device=0,\n"
	"             unpublished=False)\n--\n\n"
	"Offers memory at an address of a GPU, or, with the address 0, memory that is allocated.";

PyObject *py_region_cuda(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	enum {
		NAME,
		ADDRESS,
		ASKED,
		DEVICE = ASKED + N_ASKED,
		UNPUBLISHED,
		N
	};
	static const Signature signature = {
		"_cuda_region", 2, 4, N, { "name", "address", ASKED_PARAMETERS, "device", "unpublished" }
	};
	Broker *broker = (Broker *)self;
	struct shmb_region *owned;
	bool unpublished = false;
	uint64_t address = 0;
	uint32_t device = 0;
	PyObject *values[N];
	Asked asked;
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    asked_parse(values[NAME], &values[ASKED], &asked) ||
	    py_argument_uint64(values[ADDRESS], "address", &address) ||
	    py_argument_uint32(values[DEVICE], "device", &device) ||
	    py_argument_bool(values[UNPUBLISHED], &unpublished) ||
	    check_size(&values[ASKED], address ? "cuda_export" : "cuda_alloc"))
		return NULL;
	if (device > INT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "device is an ordinal");
		return NULL;
	}
	asked.options.options.flags |= unpublished ? SHMB_REGION_OPT_UNPUBLISHED : 0;
	if (py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = address ? shmb_cuda_export(broker->client, asked.name, (const void *)(uintptr_t)address,
						   asked.layout.size, &asked.options.options, &owned)
				: shmb_cuda_alloc(broker->client, asked.name, asked.layout.size, (int32_t)device,
						  &asked.options.options, &owned));
	return region_of(broker, r, owned, &asked, (int32_t)device);
}

/* ---- how it ends ---- */

static int retire(Region *region, uint32_t mode, int timeout) {
	int r;

	/* it stays while this waits, whatever other threads do */
	region->memory.n_exports++;
	WITHOUT_GIL(r = shmb_region_retire(region->region, mode, timeout));
	if ((!r || r == SHMB_E_TIMED_OUT) && (mode & 3) != SHMB_RETIRE_LAZY) {
		region->retired = true;
		link_remove(&region->link);
	}
	return r;
}

static int check_registered(const Region *region) {
	if (region->region && !region->retired)
		return 0;
	PyErr_SetString(py_error_class(region->memory.state, SHMB_E_STALE), "the region was retired before");
	return -1;
}

static PyObject *region_retire(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "retire", 0, 1, 3, { "mode", "wait", "timeout" } };
	Region *region = (Region *)self;
	uint32_t mode = SHMB_RETIRE_STRICT;
	PyObject *values[3];
	bool wait = false;
	int timeout = -1, r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) || py_argument_mode(values[0], &mode) ||
	    py_argument_bool(values[1], &wait) || py_argument_timeout(values[2], &timeout))
		return NULL;
	if (check_registered(region))
		return NULL;
	r = retire(region, mode | (wait ? SHMB_RETIRE_WAIT : 0), timeout);
	if (r)
		(void)py_error_raise(region->memory.state, r);
	py_memory_unexport(&region->memory);
	return r ? NULL : Py_NewRef(Py_None);
}

/* the memory goes with the last that looks at it; the name and the broker's part of it go now */
static int region_end(Region *region) {
	int r = 0;

	if (region->memory.closed || !region->region)
		return 0;
	region->memory.n_exports++;
	if (!region->kept && !region->retired) {
		r = retire(region, SHMB_RETIRE_STRICT, 0);
		region->memory.n_exports--;
	}
	link_remove(&region->link);
	r = retired_at_end(r);
	if (r)
		(void)py_error_raise(region->memory.state, r);
	region->memory.closed = true;
	py_memory_unexport(&region->memory);
	return r ? -1 : 0;
}

void py_regions_retire(Broker *broker) {
	while (broker->regions) {
		Region *region = LINK_OBJECT(Region, broker->regions);

		Py_INCREF((PyObject *)region);
		/* the session ends anyway */
		if (region_end(region))
			PyErr_Clear();
		link_remove(&region->link);
		Py_DECREF((PyObject *)region);
	}
}

static PyObject *region_close(PyObject *self, PyObject *unused) {
	(void)unused;
	if (region_end((Region *)self))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *region_publish(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "publish", 0, 1, 1, { "stream" } };
	Region *region = (Region *)self;
	uint64_t stream = 0;
	PyObject *values[1];
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_uint64(values[0], "stream", &stream))
		return NULL;
	if (check_registered(region))
		return NULL;
	region->memory.n_exports++;
	WITHOUT_GIL(r = shmb_cuda_publish(region->region, (void *)(uintptr_t)stream));
	if (r)
		(void)py_error_raise(region->memory.state, r);
	else
		region->generation = shmb_region_get_generation(region->region);
	py_memory_unexport(&region->memory);
	return r ? NULL : Py_NewRef(Py_None);
}

/* ---- attributes ---- */

static PyObject *get_name(PyObject *self, void *unused) {
	Region *region = (Region *)self;

	(void)unused;
	if (!region->region)
		Py_RETURN_NONE;
	return PyUnicode_FromString(shmb_region_get_name(region->region));
}

static PyObject *get_generation(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLongLong(((Region *)self)->generation);
}

static PyObject *get_flags(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLong(((Region *)self)->flags);
}

static PyObject *get_fd(PyObject *self, void *unused) {
	Region *region = (Region *)self;

	(void)unused;
	return PyLong_FromLong(region->region ? shmb_region_get_fd(region->region) : -1);
}

static PyObject *get_retired(PyObject *self, void *unused) {
	Region *region = (Region *)self;

	(void)unused;
	return PyBool_FromLong(region->retired || !region->region);
}

static PyObject *region_fileno(PyObject *self, PyObject *unused) {
	(void)unused;
	return get_fd(self, NULL);
}

static PyGetSetDef getters[] = {
	{ "name", get_name, NULL, "The name; None once the region was closed and nobody looks at it.", NULL },
	{ "generation", get_generation, NULL, "What tells this region from others of the same name.", NULL },
	{ "flags", get_flags, NULL, "SHMB_REGION_* of the C library, as RegionFlags has them.", NULL },
	{ "fd", get_fd, NULL, "The file descriptor of the memory, which belongs to the region; -1 once it is closed.",
	  NULL },
	{ "retired", get_retired, NULL, "Whether it was retired through this object (but for \"lazy\").", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef methods[] = {
	{ "retire", FAST(region_retire),
	  "retire($self, mode=\'strict\', *, wait=False, timeout=None)\n--\n\n"
	  "Unregisters the region; the owner's own mapping stays until close().\n\n"
	  "mode: \"strict\" grants no new leases and frees the name at once; \"lazy\" stays usable until the last lease is over; "
	  "\"force\" revokes now; \"discard\" revokes and gives whole pages back to the system.\n"
	  "wait: return when it is gone, within timeout seconds. Other threads run meanwhile; signals are not heard.\n\n"
	  "Raises TimedOut, Stale when it was retired before, NotFound, Again while the broker is away." },
	{ "publish", (PyCFunction)(void (*)(void))region_publish, METH_FASTCALL | METH_KEYWORDS,
	  "publish($self, stream=None)\n--\n\n"
	  "Of a GPU's memory: waits until all that a stream has been given is done, and registers the region if it was made with "
	  "unpublished=True.\n\n"
	  "stream: the address of a CUstream or cudaStream_t; None is the default stream.\n\n"
	  "Raises Invalid for memory of the CPU, and what creating the region may raise." },
	{ "close", region_close, METH_NOARGS,
	  "close($self)\n--\n\n"
	  "Unregisters the region if it was not retired and not kept, and unmaps it when nobody looks at it any more." },
	{ "fileno", region_fileno, METH_NOARGS, "fileno($self)\n--\n\nThe same as fd." },
	{ "__enter__", py_enter, METH_NOARGS, "__enter__($self)\n--\n\nThe region itself." },
	{ "__exit__", region_close, METH_VARARGS, "__exit__($self, *exception)\n--\n\nCalls close()." },
	{ NULL, NULL, 0, NULL },
};

int py_region_init_type(State *state, PyObject *module) {
	static PyType_Slot slots[] = {
		{ Py_tp_dealloc, (void *)region_dealloc },
		{ Py_tp_methods, methods },
		{ Py_tp_getset, getters },
		{ Py_tp_doc,
		  "Memory that this process has registered; Broker.create() and Broker.adopt() make it.\n\n"
		  "Supports the buffer protocol, DLPack and NumPy's array interface, writable where its fd is. When the "
		  "last reference goes it is closed; with \"with\", at the end of the block also when that raises." },
		{ 0, NULL },
	};
	static PyType_Spec spec = { "shmbroker.Region", sizeof(Region), 0,
				    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };

	state->region_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, (PyObject *)state->memory_type);
	return !state->region_type || PyModule_AddType(module, state->region_type) ? -1 : 0;
}
