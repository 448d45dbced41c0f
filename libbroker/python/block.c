/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Block: memory of a pool. Until it is over it uses its pool, which therefore stays mapped. A block that was acquired or
 * taken is HELD, and is released when nobody looks at it any more and nobody may; one that was GIVEN is only another's to
 * take; one that was FOUND is somebody's, and is only looked at.
 */

#include "module.h"

typedef enum {
	BLOCK_HELD,
	BLOCK_GIVEN,
	BLOCK_FOUND,
	BLOCK_OVER,
} BlockState;

typedef struct Block {
	Memory memory;
	Pool *pool;
	struct shmb_block block;
	uint64_t offset;
	uint32_t index;
	uint32_t generation;
	BlockState state;
} Block;

/* what is held is released */
static int block_end(Block *block) {
	BlockState state = block->state;
	int r = 0;

	if (state == BLOCK_OVER)
		return 0;
	block->state = BLOCK_OVER;
	block->memory.data = NULL;
	if (state == BLOCK_HELD)
		r = shmb_block_release(block->pool->pool, &block->block);
	py_pool_unuse(block->pool);
	return r;
}

static void block_over(Memory *memory) {
	(void)block_end((Block *)memory);
}

static void block_dealloc(PyObject *self) {
	Block *block = (Block *)self;
	PyTypeObject *type = Py_TYPE(self);

	(void)block_end(block);
	Py_DECREF(block->pool);
	PyObject_Free(self);
	Py_DECREF(type);
}

PyObject *py_block_new(Pool *pool, const struct shmb_block *found, bool held) {
	State *state = pool->broker->state;
	struct shmb_block copy = *found;
	Block *block = PyObject_New(Block, state->block_type);

	if (!block) {
		if (held)
			(void)shmb_block_release(pool->pool, &copy);
		py_pool_unuse(pool);
		return NULL;
	}
	py_memory_init_bytes(&block->memory, state, found->address, found->size, false);
	block->memory.over = block_over;
	block->pool = (Pool *)Py_NewRef((PyObject *)pool);
	block->block = copy;
	block->offset = found->offset;
	block->index = found->index;
	block->generation = found->generation;
	block->state = held ? BLOCK_HELD : BLOCK_FOUND;
	return (PyObject *)block;
}

static PyObject *refuse(const Block *block, int code, const char *text) {
	PyErr_SetString(py_error_class(block->memory.state, code), text);
	return NULL;
}

/* -1 with an exception set unless it is this object that holds or has given it */
static int check_holds(const Block *block) {
	if (block->state == BLOCK_FOUND)
		(void)refuse(block, SHMB_E_PERMISSION,
			     "the block is held by who acquired or took it, and was only found here");
	else if (block->state == BLOCK_OVER || (block->state == BLOCK_HELD && block->memory.closed))
		(void)refuse(block, SHMB_E_STALE, "the block was released before");
	else
		return 0;
	return -1;
}

static PyObject *block_release(PyObject *self, PyObject *unused) {
	Block *block = (Block *)self;
	int r;

	(void)unused;
	if (check_holds(block))
		return NULL;
	block->memory.closed = true;
	if (!memory_is_over(&block->memory))
		Py_RETURN_FALSE;
	/* taken back, if it was not taken */
	block->state = BLOCK_HELD;
	r = block_end(block);
	if (r)
		return py_error_raise(block->memory.state, r);
	Py_RETURN_TRUE;
}

static PyObject *block_give(PyObject *self, PyObject *unused) {
	Block *block = (Block *)self;
	int r;

	(void)unused;
	if (check_holds(block))
		return NULL;
	if (block->memory.n_exports || block->memory.pinned) {
		PyErr_SetString(PyExc_BufferError,
				"arrays or views still look at the block: they go before somebody else gets it");
		return NULL;
	}
	r = shmb_block_give(block->pool->pool, &block->block);
	if (r)
		return py_error_raise(block->memory.state, r);
	block->memory.closed = true;
	block->state = BLOCK_GIVEN;
	return Py_BuildValue("(KI)", (unsigned long long)block->offset, block->generation);
}

static PyObject *block_exit(PyObject *self, PyObject *const *arguments, Py_ssize_t n) {
	Block *block = (Block *)self;
	int r = 0;

	/* given, or released before: nothing is left to do */
	if (block->memory.closed)
		Py_RETURN_NONE;
	block->memory.closed = true;
	if (memory_is_over(&block->memory))
		r = block_end(block);
	/* the exception of the block is the one to see */
	if (r && (!n || arguments[0] == Py_None))
		return py_error_raise(block->memory.state, r);
	Py_RETURN_NONE;
}

/* ---- attributes ---- */

static PyObject *get_pool(PyObject *self, void *unused) {
	(void)unused;
	return Py_NewRef((PyObject *)((Block *)self)->pool);
}

static PyObject *get_offset(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLongLong(((Block *)self)->offset);
}

static PyObject *get_index(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLong(((Block *)self)->index);
}

static PyObject *get_generation(PyObject *self, void *unused) {
	(void)unused;
	return PyLong_FromUnsignedLong(((Block *)self)->generation);
}

static PyObject *get_held(PyObject *self, void *unused) {
	(void)unused;
	return PyBool_FromLong(((Block *)self)->state == BLOCK_HELD);
}

static PyGetSetDef getters[] = {
	{ "pool", get_pool, NULL, "The pool that it is of.", NULL },
	{ "offset", get_offset, NULL,
	  "Where it begins, in bytes into the region: a request names it by this and nbytes.", NULL },
	{ "index", get_index, NULL, "0 to Pool.n_blocks - 1.", NULL },
	{ "generation", get_generation, NULL, "What tells this holding from others of the same block; 22 bits.", NULL },
	{ "held", get_held, NULL,
	  "Whether this object holds it: it was acquired or taken, and neither given nor released.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef methods[] = {
	{ "release", block_release, METH_NOARGS,
	  "release($self)\n--\n\n"
	  "Gives the block back to the pool; one that was given, if nobody has taken it.\n\n"
	  "While memoryviews, arrays or views made from it exist it stays held, so that nobody else gets what they look at; "
	  "nothing new can be made from it, and it is given back with the last of them: then the result is False, otherwise True.\n\n"
	  "Raises Stale when it was released before or, after give(), taken; PermissionDenied when it was only found, and somebody "
	  "else holds it; ForkedError." },
	{ "give", block_give, METH_NOARGS,
	  "give($self)\n--\n\n"
	  "Lets another process take it; returns (offset, generation), which it needs for Pool.take().\n\n"
	  "Until it is taken it is held, as long as this process and its pool go on; nothing new can be made from it.\n\n"
	  "Raises BufferError while memoryviews, arrays or views made from it exist; Stale when it was released or taken before; "
	  "PermissionDenied when it was only found; ForkedError." },
	{ "__enter__", py_enter, METH_NOARGS, "__enter__($self)\n--\n\nThe block itself." },
	{ "__exit__", (PyCFunction)(void (*)(void))block_exit, METH_FASTCALL,
	  "__exit__($self, *exception)\n--\n\n"
	  "Releases the block as release() does, unless it was given or released; one that was found is let go." },
	{ NULL, NULL, 0, NULL },
};

int py_block_init_type(State *state, PyObject *module) {
	static PyType_Slot slots[] = {
		{ Py_tp_dealloc, (void *)block_dealloc },
		{ Py_tp_methods, methods },
		{ Py_tp_getset, getters },
		{ Py_tp_doc,
		  "Memory of a pool; Pool.acquire(), Pool.take() and Pool.find() make it.\n\n"
		  "Supports the buffer protocol, DLPack and NumPy's array interface, writable. When the last reference to it and to "
		  "what was made from it goes it is released, unless it was given or only found." },
		{ 0, NULL },
	};
	static PyType_Spec spec = { "shmbroker.Block", sizeof(Block), 0,
				    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };

	state->block_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, (PyObject *)state->memory_type);
	return !state->block_type || PyModule_AddType(module, state->block_type) ? -1 : 0;
}
