/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pool: blocks of a region that many processes acquire and release among themselves. Each object has a reference of its
 * own to the library's pool, and is in use as long as calls on it are under way and blocks of it are there: a block's
 * memory is mapped as long as anybody can look at it.
 */

#include "module.h"

/* as many words of blocks are looked through with the GIL held; more take longer than to let it go */
#define SEARCH_WITH_GIL 4096

static void pool_free(Pool *pool) {
	struct shmb_pool *opened = pool->pool;

	link_remove(&pool->link);
	if (!opened)
		return;
	pool->pool = NULL;
	WITHOUT_GIL(shmb_pool_free(opened));
	py_broker_unuse(pool->broker);
}

/* a call begins; -1 with an exception set when the pool is closed */
static int pool_use(Pool *pool) {
	if (pool->closed) {
		PyErr_SetString(PyExc_ValueError, "the pool is closed");
		return -1;
	}
	pool->n_uses++;
	return 0;
}

void py_pool_unuse(Pool *pool) {
	if (!--pool->n_uses && pool->closed)
		pool_free(pool);
}

/* ---- how it comes to be ---- */

/* takes @opened over, also when it fails, and the broker's use */
static PyObject *pool_new(Broker *broker, struct shmb_pool *opened, bool retires) {
	Pool *pool = PyObject_New(Pool, broker->state->pool_type);
	PyObject *name = pool ? PyUnicode_FromString(shmb_pool_get_name(opened)) : NULL;

	if (!name) {
		if (pool) {
			PyTypeObject *type = Py_TYPE((PyObject *)pool);

			PyObject_Free(pool);
			Py_DECREF(type);
		}
		WITHOUT_GIL(shmb_pool_free(opened));
		py_broker_unuse(broker);
		return NULL;
	}
	pool->broker = (Broker *)Py_NewRef((PyObject *)broker);
	pool->pool = opened;
	pool->name = name;
	pool->n_blocks = shmb_pool_get_n_blocks(opened);
	pool->block_size = shmb_pool_get_block_size(opened);
	pool->generation = shmb_pool_get_generation(opened);
	pool->n_uses = 0;
	pool->closed = false;
	pool->retires = retires;
	link_add(&pool->link, &broker->pools);
	return (PyObject *)pool;
}

/* the object for what the library opened with result @r; takes over the broker's use */
static PyObject *pool_of(Broker *broker, int r, struct shmb_pool *opened, bool retires) {
	if (!r)
		return pool_new(broker, opened, retires);
	(void)py_error_raise(broker->state, r);
	py_broker_unuse(broker);
	return NULL;
}

const char py_pool_create_doc[] =
	"create_pool($self, name, n_blocks, block_size, alignment=64, *, keep=False, replace=False,\n"
	"            populate=False, numa_node=None, allowed_uids=None, allowed_gids=None,\n"
	"            principal=None)\n--\n\n"
	"Registers a region that is divided into blocks, which this process and all that open the pool acquire and release "
	"among themselves, without the broker.\n\n"
	"n_blocks: 1 to 1,048,576. block_size: in bytes, 1 or more. alignment: of each block, in bytes, a power of two up to "
	"4,096.\n"
	"The rest: as create() has it. Whoever may use the region may write to all of it.\n\n"
	"Raises what create() raises; Invalid for numbers that cannot be, OutOfBounds when it is more than a region can have, "
	"NotAttached without the role consumer, ForkedError.";

PyObject *py_pool_create(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	enum {
		NAME,
		N_BLOCKS,
		BLOCK_SIZE,
		ALIGNMENT,
		KEEP,
		REPLACE,
		READ_ONLY,
		UIDS,
		GIDS,
		PRINCIPAL,
		POPULATE,
		HUGE_PAGES,
		NODE,
		N
	};
	static const Signature signature = { "create_pool",
					     3,
					     4,
					     N,
					     { "name", "n_blocks", "block_size", "alignment", "keep", "replace",
					       "read_only", "allowed_uids", "allowed_gids", "principal", "populate",
					       "huge_pages", "numa_node" } };
	struct shmb_pool_options asked = { .struct_size = sizeof(asked) };
	Broker *broker = (Broker *)self;
	uint32_t n_blocks = 0;
	const char *name = NULL;
	struct shmb_pool *made;
	PyObject *values[N];
	uint64_t size = 0;
	Options options;
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_text(values[NAME], "name", &name) ||
	    py_argument_uint32(values[N_BLOCKS], "n_blocks", &n_blocks) ||
	    py_argument_uint64(values[BLOCK_SIZE], "block_size", &size) ||
	    py_argument_uint64(values[ALIGNMENT], "alignment", &asked.alignment) ||
	    py_options_parse(&values[KEEP], &options) || py_options_parse_memory(&values[POPULATE], &options) ||
	    py_broker_use(broker))
		return NULL;
	asked.region = &options.options;
	WITHOUT_GIL(r = shmb_pool_create(broker->client, name, n_blocks, size, &asked, &made));
	return pool_of(broker, r, made, !(options.options.flags & SHMB_REGION_OPT_KEEP));
}

const char py_pool_open_doc[] =
	"open_pool($self, name, /)\n--\n\n"
	"A pool that another process has created, by the name of its region.\n\n"
	"Raises what get_memory_info() raises; Invalid when the region is no pool, VersionMismatch, Stale when it was made under "
	"a broker that is no more, NotAttached without the role consumer.";

PyObject *py_pool_open(PyObject *self, PyObject *value) {
	Broker *broker = (Broker *)self;
	const char *name = NULL;
	struct shmb_pool *opened;
	int r;

	if (py_argument_text(value, "name", &name) || py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = shmb_pool_open(broker->client, name, &opened));
	return pool_of(broker, r, opened, false);
}

/* ---- blocks ---- */

/* the object for what the library found with result @r; takes over the use of the pool */
static PyObject *block_of(Pool *pool, int r, const struct shmb_block *found, bool held) {
	if (!r)
		return py_block_new(pool, found, held);
	(void)py_error_raise(pool->broker->state, r);
	py_pool_unuse(pool);
	return NULL;
}

/* one that is free, without waiting */
static int search(Pool *pool, struct shmb_block *ret) {
	int r;

	if (pool->n_blocks <= SEARCH_WITH_GIL)
		r = shmb_pool_acquire(pool->pool, 0, ret);
	else
		WITHOUT_GIL(r = shmb_pool_acquire(pool->pool, 0, ret));
	return r;
}

static PyObject *pool_acquire(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "acquire", 0, 1, 1, { "timeout" } };
	Pool *pool = (Pool *)self;
	struct shmb_block block;
	int timeout = -1, r;
	PyObject *value;

	if (py_arguments_parse(&signature, arguments, n, keywords, &value) || py_argument_timeout(value, &timeout) ||
	    pool_use(pool))
		return NULL;
	r = search(pool, &block);
	while (r == SHMB_E_TIMED_OUT && timeout) {
		WITHOUT_GIL(r = shmb_pool_acquire(pool->pool, wait_slice(&timeout), &block));
		if (r != SHMB_E_TIMED_OUT)
			break;
		if (pool->closed)
			PyErr_SetString(PyExc_ValueError, "the pool is closed");
		if (pool->closed || PyErr_CheckSignals()) {
			py_pool_unuse(pool);
			return NULL;
		}
	}
	return block_of(pool, r, &block, true);
}

static PyObject *pool_take(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "take", 2, 2, 2, { "offset", "generation" } };
	Pool *pool = (Pool *)self;
	uint32_t generation = 0;
	struct shmb_block block;
	PyObject *values[2];
	uint64_t offset = 0;
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_uint64(values[0], "offset", &offset) ||
	    py_argument_uint32(values[1], "generation", &generation) || pool_use(pool))
		return NULL;
	r = shmb_block_take(pool->pool, offset, generation, &block);
	return block_of(pool, r, &block, true);
}

static PyObject *pool_find(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "find", 2, 2, 2, { "offset", "size" } };
	Pool *pool = (Pool *)self;
	uint64_t offset = 0, size = 0;
	struct shmb_block block;
	PyObject *values[2];
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_uint64(values[0], "offset", &offset) || py_argument_uint64(values[1], "size", &size) ||
	    pool_use(pool))
		return NULL;
	r = shmb_pool_find(pool->pool, offset, size, &block);
	return block_of(pool, r, &block, false);
}

/* ---- how it ends ---- */

/* the region of what was created; the memory goes with the last block */
static int retire(Pool *pool) {
	int r = 0;

	if (pool->retires)
		WITHOUT_GIL(r = shmb_region_retire(shmb_pool_get_region(pool->pool), SHMB_RETIRE_STRICT, 0));
	return retired_at_end(r);
}

static int pool_end(Pool *pool) {
	int r;

	if (pool->closed)
		return 0;
	pool->n_uses++;
	pool->closed = true;
	link_remove(&pool->link);
	r = retire(pool);
	if (r)
		(void)py_error_raise(pool->broker->state, r);
	py_pool_unuse(pool);
	return r ? -1 : 0;
}

void py_pools_close(Broker *broker) {
	while (broker->pools) {
		PyObject *pool = Py_NewRef((PyObject *)LINK_OBJECT(Pool, broker->pools));

		/* the session ends anyway */
		if (pool_end((Pool *)pool))
			PyErr_Clear();
		Py_DECREF(pool);
	}
}

static void pool_dealloc(PyObject *self) {
	Pool *pool = (Pool *)self;
	PyTypeObject *type = Py_TYPE(self);

	/* calls and blocks hold the object: nobody uses it */
	if (!pool->closed)
		(void)retire(pool);
	pool_free(pool);
	Py_DECREF(pool->broker);
	Py_DECREF(pool->name);
	PyObject_Free(self);
	Py_DECREF(type);
}

static PyObject *pool_close(PyObject *self, PyObject *unused) {
	(void)unused;
	if (pool_end((Pool *)self))
		return NULL;
	Py_RETURN_NONE;
}

/* ---- attributes ---- */

static PyObject *get_name(PyObject *self, void *unused) {
	(void)unused;
	return Py_NewRef(((Pool *)self)->name);
}

static PyObject *get_n_blocks(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLong(((Pool *)self)->n_blocks);
}

static PyObject *get_block_size(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLongLong(((Pool *)self)->block_size);
}

static PyObject *get_generation(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLongLong(((Pool *)self)->generation);
}

static PyObject *get_free_count(PyObject *self, void *unused) {
	Pool *pool = (Pool *)self;
	uint32_t count = 0;
	PyObject *ret;
	int r;

	(void)unused;
	if (pool_use(pool))
		return NULL;
	WITHOUT_GIL(r = shmb_pool_count_free(pool->pool, &count));
	ret = r ? py_error_raise(pool->broker->state, r) : PyLong_FromUnsignedLong(count);
	py_pool_unuse(pool);
	return ret;
}

static PyObject *get_closed(PyObject *self, void *unused) {
	(void)unused;
	return PyBool_FromLong(((Pool *)self)->closed);
}

static PyGetSetDef getters[] = {
	{ "name", get_name, NULL, "The name of its region.", NULL },
	{ "n_blocks", get_n_blocks, NULL, "How many blocks it has.", NULL },
	{ "block_size", get_block_size, NULL, "Size of each block in bytes.", NULL },
	{ "generation", get_generation, NULL, "The generation of its region.", NULL },
	{ "free_count", get_free_count, NULL,
	  "How many blocks could be acquired now, those of processes that have died included.", NULL },
	{ "closed", get_closed, NULL, "Whether close() was called.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef methods[] = {
	{ "acquire", FAST(pool_acquire),
	  "acquire($self, timeout=None)\n--\n\n"
	  "A Block that nobody else holds; its bytes are what the last holder left, zeroes at first.\n\n"
	  "timeout: seconds to wait where all are held, 0 to not wait, None for ever. Who waits is not served in order; other "
	  "threads run meanwhile, and signals are heard within 100 ms. The same as a coroutine: Broker.aio.acquire().\n\n"
	  "Raises TimedOut; Retiring when the region was retired or its owner has ended, Revoked, Detached; ForkedError; "
	  "ValueError after close()." },
	{ "take", FAST(pool_take),
	  "take($self, offset, generation)\n--\n\n"
	  "The Block that its holder gave, by what its give() has returned; this process holds it from here on.\n\n"
	  "offset: in bytes, anywhere in the block.\n\n"
	  "Raises Stale when it was taken or released before, or its giver died and somebody else acquired it; PermissionDenied "
	  "when its holder has not given it; OutOfBounds where no block is; Detached, ForkedError; ValueError after close()." },
	{ "find", FAST(pool_find),
	  "find($self, offset, size)\n--\n\n"
	  "The Block in which size bytes at offset of the region are, as a request names them; whoever holds it goes on holding "
	  "it. It is to be looked at only while the holder is known to keep it, such as until it has its answer.\n\n"
	  "Raises OutOfBounds when they are not within one block, Stale when nobody holds it, ForkedError; ValueError after "
	  "close()." },
	{ "close", pool_close, METH_NOARGS,
	  "close($self)\n--\n\n"
	  "Ends it: nothing more is acquired, found or taken here, and the one that created it unregisters its region, unless it "
	  "is kept.\n\n"
	  "Blocks that are held stay valid. When the last of them is gone the memory is unmapped, and blocks that were given and "
	  "not taken become free." },
	{ "__enter__", py_enter, METH_NOARGS, "__enter__($self)\n--\n\nThe pool itself." },
	{ "__exit__", pool_close, METH_VARARGS, "__exit__($self, *exception)\n--\n\nCalls close()." },
	{ NULL, NULL, 0, NULL },
};

int py_pool_init_type(State *state, PyObject *module) {
	static PyType_Slot slots[] = {
		{ Py_tp_dealloc, (void *)pool_dealloc },
		{ Py_tp_methods, methods },
		{ Py_tp_getset, getters },
		{ Py_tp_doc,
		  "Blocks of memory that many processes acquire and release among themselves; Broker.create_pool() and "
		  "Broker.open_pool() make it.\n\n"
		  "A block is held by a connection. What a process held when it was killed comes back by itself." },
		{ 0, NULL },
	};
	static PyType_Spec spec = { "shmbroker.Pool", sizeof(Pool), 0,
				    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };

	state->pool_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
	return !state->pool_type || PyModule_AddType(module, state->pool_type) ? -1 : 0;
}
