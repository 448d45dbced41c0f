/* SPDX-License-Identifier: Apache-2.0 */

/* Broker: a connection. shmbroker.Broker is a class of Python that is made from this one. */

#include <errno.h>
#include <string.h>

#include "module.h"

int py_broker_use(Broker *broker) {
	if (broker->closed || !broker->client) {
		PyErr_SetString(PyExc_ValueError, "the connection to the broker is closed");
		return -1;
	}
	broker->n_uses++;
	return 0;
}

static void broker_free_client(Broker *broker) {
	struct shmb_client *client = broker->client;

	broker->client = NULL;
	link_remove(&broker->link);
	if (client)
		WITHOUT_GIL(shmb_client_free(client));
}

void py_broker_unuse(Broker *broker) {
	if (!--broker->n_uses && broker->closed)
		broker_free_client(broker);
}

static int role_of(const char *name, uint32_t *ret) {
	static const struct {
		const char *name;
		uint32_t role;
	} roles[] = { { "owner", SHMB_ROLE_OWNER }, { "consumer", SHMB_ROLE_CONSUMER }, { "admin", SHMB_ROLE_ADMIN } };

	for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); ++i) {
		if (!strcmp(name, roles[i].name)) {
			*ret |= roles[i].role;
			return 0;
		}
	}
	PyErr_Format(PyExc_ValueError, "a role is \"owner\", \"consumer\" or \"admin\", not \"%s\"", name);
	return -1;
}

/* a name, a sequence of names, or the bits */
static int roles_parse(PyObject *value, uint32_t *ret) {
	const char *name = NULL;
	Py_ssize_t n;
	int r = 0;

	if (!value)
		return 0;
	if (PyIndex_Check(value))
		return py_argument_uint32(value, "roles", ret);
	if (PyUnicode_Check(value))
		return py_argument_text(value, "roles", &name) ? -1 : role_of(name, ret);
	n = PySequence_Size(value);
	for (Py_ssize_t i = 0; !r && i < n; ++i) {
		PyObject *item = PySequence_GetItem(value, i);

		r = !item || py_argument_text(item, "a role", &name) || role_of(name, ret) ? -1 : 0;
		Py_XDECREF(item);
	}
	return n < 0 ? -1 : r;
}

PyObject *py_broker_connect(PyObject *module, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "connect",
					     1,
					     2,
					     9,
					     { "type", "socket", "roles", "accept_unsealed", "populate",
					       "resume_timeout", "lease_page", "force_rmw", "cuda_context" } };
	State *state = PyModule_GetState(module);
	bool unsealed = false, populate = true, lease_page = true, rmw = false, context = false;
	uint32_t roles = 0, flags;
	struct shmb_client *client;
	PyObject *values[9], *path = NULL;
	int resume_timeout = INT32_MIN, r;
	Broker *broker;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) || roles_parse(values[2], &roles) ||
	    py_argument_bool(values[3], &unsealed) || py_argument_bool(values[4], &populate) ||
	    py_argument_timeout(values[5], &resume_timeout) || py_argument_bool(values[6], &lease_page) ||
	    py_argument_bool(values[7], &rmw) || py_argument_bool(values[8], &context))
		return NULL;
	if (!PyType_Check(values[0]) || !PyType_IsSubtype((PyTypeObject *)values[0], state->broker_type)) {
		PyErr_SetString(PyExc_TypeError, "type must be a class that is made from Broker");
		return NULL;
	}
	if (values[1] && !PyUnicode_FSConverter(values[1], &path))
		return NULL;
	flags = (unsealed ? SHMB_ACCEPT_UNSEALED : 0) | (populate ? 0 : SHMB_NO_POPULATE) |
		(lease_page ? 0 : SHMB_NO_LEASE_PAGE) | (rmw ? SHMB_FORCE_RMW : 0) | (context ? SHMB_CUDA_CONTEXT : 0);
	WITHOUT_GIL(r = shmb_client_new(&client, path ? PyBytes_AsString(path) : NULL, roles, flags));
	Py_XDECREF(path);
	if (r)
		return py_error_raise(state, r);
	if (resume_timeout != INT32_MIN)
		(void)shmb_client_set_resume_timeout(client, resume_timeout);
	broker = (Broker *)PyType_GenericAlloc((PyTypeObject *)values[0], 0);
	if (!broker) {
		WITHOUT_GIL(shmb_client_free(client));
		return NULL;
	}
	broker->state = state;
	broker->client = client;
	link_add(&broker->link, &state->brokers);
	return (PyObject *)broker;
}

PyObject *py_broker_at_exit(PyObject *module, PyObject *unused) {
	State *state = PyModule_GetState(module);

	(void)unused;
	for (Link *link = state->brokers; link; link = link->next)
		(void)shmb_client_set_resume_timeout(LINK_OBJECT(Broker, link)->client, 0);
	Py_RETURN_NONE;
}

static PyObject *broker_close(PyObject *self, PyObject *unused) {
	Broker *broker = (Broker *)self;

	(void)unused;
	if (broker->closed || !broker->client)
		Py_RETURN_NONE;
	broker->closed = true;
	broker->n_uses++;
	py_pools_close(broker);
	py_regions_retire(broker);
	py_broker_unuse(broker);
	Py_RETURN_NONE;
}

static void broker_dealloc(PyObject *self) {
	PyTypeObject *type = Py_TYPE(self);
	freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);

	/* leases, regions and calls hold the object: nobody uses it */
	broker_free_client((Broker *)self);
	free_self(self);
	Py_DECREF(type);
}

static PyObject *broker_exit(PyObject *self, PyObject *unused) {
	return broker_close(self, unused);
}

static PyObject *get_closed(PyObject *self, void *unused) {
	(void)unused;
	return PyBool_FromLong(((Broker *)self)->closed || !((Broker *)self)->client);
}

static PyObject *get_session(PyObject *self, void *unused) {
	struct shmb_client_info info = { .struct_size = sizeof(info) };
	Broker *broker = (Broker *)self;
	int r;

	(void)unused;
	if (py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = shmb_client_get_info(broker->client, &info));
	py_broker_unuse(broker);
	return r ? py_error_raise(broker->state, r) : PyLong_FromUnsignedLongLong(info.session);
}

static PyObject *broker_client_info(PyObject *self, PyObject *unused) {
	struct shmb_client_info info = { .struct_size = sizeof(info) };
	Broker *broker = (Broker *)self;
	int r;

	(void)unused;
	if (py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = shmb_client_get_info(broker->client, &info));
	py_broker_unuse(broker);
	if (r)
		return py_error_raise(broker->state, r);
	return Py_BuildValue("(KKIIIIIs)", (unsigned long long)info.session, (unsigned long long)info.epoch, info.roles,
			     info.rights, info.lease_mode, info.lanes, info.capacity, info.broker_version);
}

static PyObject *broker_ping(PyObject *self, PyObject *unused) {
	Broker *broker = (Broker *)self;
	uint64_t ns = 0;
	int r;

	(void)unused;
	if (py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = shmb_client_ping(broker->client, &ns));
	py_broker_unuse(broker);
	return r ? py_error_raise(broker->state, r) : PyFloat_FromDouble((double)ns / 1e9);
}

static PyObject *broker_fileno(PyObject *self, PyObject *unused) {
	Broker *broker = (Broker *)self;
	int fd;

	(void)unused;
	if (py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(fd = shmb_client_get_fd(broker->client));
	py_broker_unuse(broker);
	if (fd >= 0)
		return PyLong_FromLong(fd);
	/* the library says -EBADF, and in its sentence that this is a child */
	return py_error_raise(broker->state, fd == -EBADF ? SHMB_E_FORKED : fd);
}

static PyObject *broker_process(PyObject *self, PyObject *unused) {
	Broker *broker = (Broker *)self;
	int r;

	(void)unused;
	if (py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = shmb_client_process(broker->client));
	py_broker_unuse(broker);
	if (r)
		return py_error_raise(broker->state, r);
	Py_RETURN_NONE;
}

static PyObject *set_timeout(PyObject *self, PyObject *value, int (*set)(struct shmb_client *client, int timeout_ms)) {
	Broker *broker = (Broker *)self;
	int timeout = -1, r;

	if (py_argument_timeout(value == Py_None ? NULL : value, &timeout) || py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = set(broker->client, timeout));
	py_broker_unuse(broker);
	if (r)
		return py_error_raise(broker->state, r);
	Py_RETURN_NONE;
}

static PyObject *broker_set_resume_timeout(PyObject *self, PyObject *value) {
	return set_timeout(self, value, shmb_client_set_resume_timeout);
}

static PyObject *broker_set_call_timeout(PyObject *self, PyObject *value) {
	return set_timeout(self, value, shmb_client_set_call_timeout);
}

static PyObject *broker_subscribe(PyObject *self, PyObject *value) {
	Broker *broker = (Broker *)self;
	uint32_t mask = 0;
	int r;

	if (py_argument_uint32(value, "mask", &mask) || py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = shmb_client_subscribe(broker->client, mask));
	py_broker_unuse(broker);
	if (r)
		return py_error_raise(broker->state, r);
	Py_RETURN_NONE;
}

/* a tuple, None when none came; waits in slices, so that signals are heard */
static PyObject *broker_next_event(PyObject *self, PyObject *value) {
	Broker *broker = (Broker *)self;
	struct shmb_event event;
	int timeout = -1, r;

	if (py_argument_timeout(value == Py_None ? NULL : value, &timeout))
		return NULL;
	do {
		if (py_broker_use(broker))
			return NULL;
		WITHOUT_GIL(r = shmb_client_next_event(broker->client, &event, wait_slice(&timeout)));
		py_broker_unuse(broker);
		if (r == SHMB_E_TIMED_OUT && PyErr_CheckSignals())
			return NULL;
	} while (r == SHMB_E_TIMED_OUT && timeout);
	if (r == SHMB_E_TIMED_OUT)
		Py_RETURN_NONE;
	if (r)
		return py_error_raise(broker->state, r);
	return Py_BuildValue("(IIKKKKIIs)", event.type, event.slot, (unsigned long long)event.generation,
			     (unsigned long long)event.session, (unsigned long long)event.size,
			     (unsigned long long)event.count, event.pid, event.uid, event.name);
}

static PyGetSetDef getters[] = {
	{ "closed", get_closed, NULL, "Whether close() was called.", NULL },
	{ "session", get_session, NULL, "This connection's session id, which survives a restart of the broker.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef methods[] = {
	{ "close", broker_close, METH_NOARGS,
	  "close($self)\n--\n\n"
	  "Ends the session: regions that were not kept are unregistered now, their memory stays as long as somebody looks at it. "
	  "Pools are closed.\n\n"
	  "Leases and blocks that are held, and what was made from them, stay valid; the connection ends with the last of them." },
	{ "__enter__", py_enter, METH_NOARGS, "__enter__($self)\n--\n\nThe broker itself." },
	{ "__exit__", broker_exit, METH_VARARGS, "__exit__($self, *exception)\n--\n\nCalls close()." },
	{ "ping", broker_ping, METH_NOARGS,
	  "ping($self)\n--\n\nOne round trip to the broker; returns how many seconds it took." },
	{ "fileno", broker_fileno, METH_NOARGS,
	  "fileno($self)\n--\n\nA file descriptor that is readable when process() has something to do; it belongs to the broker." },
	{ "process", broker_process, METH_NOARGS,
	  "process($self)\n--\n\n"
	  "Does what is to be done on the connection, without waiting: takes events in, unmaps what is gone, finds a broker that "
	  "was started anew.\n\n"
	  "Raises ConnectionResetError when the broker has ended for good, Detached when it does not know this session." },
	{ "set_resume_timeout", broker_set_resume_timeout, METH_O,
	  "set_resume_timeout($self, seconds, /)\n--\n\nHow long calls wait for a broker that has ended; None for ever." },
	{ "set_call_timeout", broker_set_call_timeout, METH_O,
	  "set_call_timeout($self, seconds, /)\n--\n\n"
	  "How long a call waits for a broker that is there and does not answer; None for ever, as at first. Then it raises "
	  "TimedOut, and what it had asked for may have been done, or is done once the broker goes on." },
	{ "_subscribe", broker_subscribe, METH_O, "_subscribe($self, mask, /)\n--\n\nAsks for events." },
	{ "_next_event", broker_next_event, METH_O,
	  "_next_event($self, timeout, /)\n--\n\nThe next event as a tuple; None when none came within that many seconds." },
	{ "_client_info", broker_client_info, METH_NOARGS, "_client_info($self)\n--\n\nA tuple." },
	{ "create", FAST(py_region_create), py_region_create_doc },
	{ "_adopt", FAST(py_region_adopt), py_region_adopt_doc },
	{ "_cuda_region", FAST(py_region_cuda), py_region_cuda_doc },
	{ "create_pool", FAST(py_pool_create), py_pool_create_doc },
	{ "open_pool", py_pool_open, METH_O, py_pool_open_doc },
	{ "get_memory_info", FAST(py_lease_get), py_lease_get_doc },
	{ "lookup", py_lease_lookup, METH_O, py_lease_lookup_doc },
	{ "_status", FAST(py_list_status),
	  "_status($self, *, name=None, prefix=False, uid=None, states=0, holders=False)\n--\n\nAn iterator of dicts." },
	{ "_clients", py_list_clients, METH_NOARGS, "_clients($self)\n--\n\nA list of dicts." },
	{ "_stats", py_list_stats, METH_O, "_stats($self, accounts, /)\n--\n\nA list of tuples." },
	{ "_broker_info", py_list_info, METH_NOARGS, "_broker_info($self)\n--\n\nA dict." },
	{ "unregister", FAST(py_list_unregister), py_list_unregister_doc },
	{ "_unregister_all", FAST(py_list_unregister_all), py_list_unregister_all_doc },
	{ NULL, NULL, 0, NULL },
};

int py_broker_init_type(State *state, PyObject *module) {
	static PyType_Slot slots[] = {
		{ Py_tp_dealloc, (void *)broker_dealloc },
		{ Py_tp_methods, methods },
		{ Py_tp_getset, getters },
		{ Py_tp_doc, "A connection to the broker; shmbroker.connect() makes one." },
		{ 0, NULL },
	};
	static PyType_Spec spec = { "shmbroker._shmbroker.Broker", sizeof(Broker), 0,
				    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
				    slots };

	state->broker_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
	return !state->broker_type || PyModule_AddType(module, state->broker_type) ? -1 : 0;
}
