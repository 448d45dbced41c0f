/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The extension module _shmbroker: what its types share.
 *
 * A Memory is bytes that Python may see: a Region of an owner, a Lease of a consumer, a Block of a Pool, or a View, a typed
 * window of one of them. Whoever looks at the bytes holds an export; a Memory that was closed goes on until its last
 * export is over, and so do the pool and the connection, each of which is freed when it was closed and nobody uses it any
 * more.
 *
 * Everything here is protected by the GIL, which is released around calls of the library that may wait. Only the stable
 * ABI of Python 3.11 is used.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shmbroker.h"

#define ACL_MAX 64
#define ERRORS_MAX 128
#define DIMENSIONS_MAX 64

typedef struct Broker Broker;
typedef struct Dtype Dtype;
typedef struct Memory Memory;
typedef struct Pool Pool;
typedef struct State State;

/* an object's place in a list of borrowed ones; the member is called link */
typedef struct Link {
	struct Link *next, **at; /* at is NULL when it is in none */
} Link;

#define LINK_OBJECT(type, of) ((type *)(void *)((char *)(of)-offsetof(type, link)))

static inline void link_add(Link *link, Link **list) {
	link->next = *list;
	link->at = list;
	if (link->next)
		link->next->at = &link->next;
	*list = link;
}

/* also one that is in no list */
static inline void link_remove(Link *link) {
	if (!link->at)
		return;
	*link->at = link->next;
	if (link->next)
		link->next->at = link->at;
	link->at = NULL;
}

struct State {
	PyObject *error;	      /* the root of the exceptions */
	PyObject *errors[ERRORS_MAX]; /* by code */
	PyTypeObject *block_type;
	PyTypeObject *broker_type;
	PyTypeObject *handle_type;
	PyTypeObject *lease_type;
	PyTypeObject *memory_type;
	PyTypeObject *pool_type;
	PyTypeObject *region_type;
	PyTypeObject *status_type;
	PyTypeObject *view_type;
	Link *brokers; /* all that are connected */
};

/* __enter__() of whatever is its own context */
static inline PyObject *py_enter(PyObject *self, PyObject *unused) {
	(void)unused;
	return Py_NewRef(self);
}

/* ---- arguments.c ---- */

/* how a function that parses a Signature stands in a table of methods */
#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS

typedef struct Signature {
	const char *name;
	int n_required;	  /* of the positional ones */
	int n_positional; /* the rest by keyword only */
	int n;
	const char *parameters[16];
} Signature;

/* borrowed references in @ret, NULL where an argument was not given or is None */
int py_arguments_parse(const Signature *signature, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords,
		       PyObject **ret);
/* these leave @ret alone when @value is NULL; -1 with an exception set */
int py_argument_uint64(PyObject *value, const char *name, uint64_t *ret);
int py_argument_uint32(PyObject *value, const char *name, uint32_t *ret);
int py_argument_bool(PyObject *value, bool *ret);
/* a text without NUL, borrowed from @value */
int py_argument_text(PyObject *value, const char *name, const char **ret);
/* seconds become milliseconds, rounded up */
int py_argument_timeout(PyObject *value, int *ret);
/* the name of how a region is retired becomes SHMB_RETIRE_* */
int py_argument_mode(PyObject *value, uint32_t *ret);

/* ---- errors.c ---- */

int py_errors_init(State *state, PyObject *module);
/* raises what belongs to @result of a call of the library on this thread; returns NULL */
PyObject *py_error_raise(const State *state, int result);
/* the exception's class for a code, borrowed */
PyObject *py_error_class(const State *state, int code);
/* the same exception as py_error_raise(), as an object; NULL with another exception set */
PyObject *py_error_new(const State *state, int result, const char *text);

/* ---- dtype.c ---- */

struct Dtype {
	const char *name;
	const char *format;  /* of the buffer protocol */
	const char *typestr; /* of the array interface, NULL where it has none */
	uint8_t size;
	uint8_t dlpack_code;
};

extern const Dtype py_dtype_bytes;
/* @value: a name, or anything that has one: numpy.dtype, numpy.float32, torch.float32, float */
const Dtype *py_dtype_parse(PyObject *value);
/* an int or a sequence of them; returns how many, or -1 with an exception set */
int py_shape_parse(PyObject *value, Py_ssize_t ret[static DIMENSIONS_MAX]);
/* bytes of an array, or -1 with an exception set */
int py_shape_bytes(const Dtype *dtype, int n, const Py_ssize_t *shape, uint64_t *ret);

/* ---- memory.c ---- */

struct Memory {
	PyObject_HEAD State *state;
	void *data; /* NULL where there is no pointer */
	uint64_t size;
	const Dtype *dtype;
	int32_t device;	   /* ordinal of the GPU whose memory it is, -1 for the CPU's */
	Py_ssize_t *shape; /* then as many strides, in bytes */
	Py_ssize_t inline_shape[2];
	Py_ssize_t n_exports;
	int n_dimensions;
	bool read_only;
	bool closed; /* no new exports */
	bool pinned; /* who looks at it holds the object and no export: it goes on as long as the object */
	/* nobody looks at it any more, and nobody may; NULL where nothing is to be done then */
	void (*over)(Memory *memory);
};

int py_memory_init_type(State *state, PyObject *module);
/* one dimension of bytes */
void py_memory_init_bytes(Memory *memory, State *state, void *data, uint64_t size, bool read_only);
/* copies @shape */
int py_memory_set_shape(Memory *memory, const Dtype *dtype, int n, const Py_ssize_t *shape);
void py_memory_deinit(Memory *memory);
/* memory of a GPU that somebody else has, whom the new view holds */
PyObject *py_memory_of_device(PyObject *module, PyObject *const *arguments, Py_ssize_t n);
/* -1 with an exception set when there is nothing to look at */
int py_memory_export(Memory *memory);
void py_memory_unexport(Memory *memory);
/* nobody may look at it any more */
static inline bool memory_is_over(const Memory *memory) {
	return memory->closed && !memory->n_exports && !memory->pinned;
}

/* ---- dlpack.c ---- */

PyObject *py_memory_dlpack(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
PyObject *py_memory_dlpack_device(PyObject *self, PyObject *unused);
/* what is in a capsule that stays its owner's */
PyObject *py_dlpack_inspect(PyObject *module, PyObject *capsule);

/* ---- broker.c ---- */

struct Broker {
	PyObject_HEAD State *state;
	struct shmb_client *client; /* NULL once it is closed and unused */
	Py_ssize_t n_uses;	    /* calls that are under way, leases, regions, pools */
	bool closed;
	Link *regions; /* that are not retired */
	Link *pools;   /* that are not closed */
	Link link;     /* of the module's */
};

int py_broker_init_type(State *state, PyObject *module);
PyObject *py_broker_connect(PyObject *module, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
/* for the time before the interpreter ends: nobody waits for a broker that is away */
PyObject *py_broker_at_exit(PyObject *module, PyObject *unused);
/* a call begins; -1 with an exception set when the broker is closed */
int py_broker_use(Broker *broker);
void py_broker_unuse(Broker *broker);

/* how long the library waits before signals are looked for, in ms, of what is left of a timeout (-1 for ever) */
static inline int wait_slice(int *left) {
	int slice = *left < 0 || *left > 100 ? 100 : *left;

	if (*left > 0)
		*left -= slice;
	return slice;
}

/*
 * Evaluates @call, which sets @result, without the GIL; after py_broker_use(). A sentence that the library leaves is this
 * thread's, and still there afterwards.
 */
#define WITHOUT_GIL(call)                                     \
	do {                                                  \
		PyThreadState *_thread = PyEval_SaveThread(); \
		call;                                         \
		PyEval_RestoreThread(_thread);                \
	} while (0)

/* ---- options.c ---- */

/* how many arguments py_options_parse() and py_options_parse_memory() take */
enum {
	N_OPTIONS = 6,
	N_MEMORY_OPTIONS = 3
};

/* how a region is to be registered, with its access list */
typedef struct Options {
	struct shmb_region_options options;
	uint32_t uids[ACL_MAX];
	uint32_t gids[ACL_MAX];
} Options;

/* keep, replace, read_only, allowed_uids, allowed_gids, principal */
int py_options_parse(PyObject *const values[static N_OPTIONS], Options *ret);
/* of memory that is created, into the same: populate, huge_pages, numa_node */
int py_options_parse_memory(PyObject *const values[static N_MEMORY_OPTIONS], Options *ret);

/* ---- region.c ---- */

int py_region_init_type(State *state, PyObject *module);
PyObject *py_region_create(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
PyObject *py_region_adopt(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
PyObject *py_region_cuda(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
/* retires what the broker's client has made and not kept, without waiting for anything to be given back */
void py_regions_retire(Broker *broker);
/* what a retirement at the end of an object has to say; when the region is gone already that is nothing */
static inline int retired_at_end(int r) {
	return r == SHMB_E_STALE || r == SHMB_E_NOT_FOUND || r == SHMB_E_REVOKED ? 0 : r;
}
extern const char py_region_create_doc[], py_region_adopt_doc[], py_region_cuda_doc[];

/* ---- lease.c ---- */

int py_lease_init_types(State *state, PyObject *module);
PyObject *py_lease_get(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
PyObject *py_lease_lookup(PyObject *self, PyObject *name);
extern const char py_lease_get_doc[], py_lease_lookup_doc[];

/* ---- pool.c ---- */

struct Pool {
	PyObject_HEAD Broker *broker;
	struct shmb_pool *pool; /* NULL once it is closed and unused */
	PyObject *name;
	uint32_t n_blocks;
	uint64_t block_size;
	uint64_t generation;
	Py_ssize_t n_uses; /* calls that are under way, blocks */
	bool closed;
	bool retires; /* its region, when it is closed */
	Link link;    /* of the broker's */
};

int py_pool_init_type(State *state, PyObject *module);
PyObject *py_pool_create(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
PyObject *py_pool_open(PyObject *self, PyObject *name);
/* a call or a block ends */
void py_pool_unuse(Pool *pool);
/* closes those of a broker; what is held of them is held on */
void py_pools_close(Broker *broker);
extern const char py_pool_create_doc[], py_pool_open_doc[];

/* ---- block.c ---- */

int py_block_init_type(State *state, PyObject *module);
/* takes over a use of the pool and, with @held, the block, also when it fails */
PyObject *py_block_new(Pool *pool, const struct shmb_block *block, bool held);

/* ---- list.c ---- */

int py_list_init_types(State *state, PyObject *module);
PyObject *py_list_status(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
PyObject *py_list_clients(PyObject *self, PyObject *unused);
PyObject *py_list_stats(PyObject *self, PyObject *with_accounts);
PyObject *py_list_info(PyObject *self, PyObject *unused);
PyObject *py_list_unregister(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
PyObject *py_list_unregister_all(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords);
extern const char py_list_unregister_doc[], py_list_unregister_all_doc[];
