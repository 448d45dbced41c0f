/* SPDX-License-Identifier: Apache-2.0 */

/* Looking around, and retiring regions by name. */

#include <string.h>

#include "module.h"

typedef struct Status {
	PyObject_HEAD Broker *broker;
	struct shmb_status_iter *iter;
	bool busy; /* some thread waits for its next page */
} Status;

static PyObject *holder_dict(const struct shmb_holder *holder) {
	return Py_BuildValue("{s:K,s:I,s:I,s:I,s:I,s:s}", "session", (unsigned long long)holder->session, "pid",
			     holder->pid, "uid", holder->uid, "leases", holder->leases, "flags", holder->flags, "comm",
			     holder->comm);
}

static PyObject *status_dict(const struct shmb_status *status) {
	PyObject *holders = PyList_New(0), *holder;

	for (uint32_t i = 0; holders && i < status->n_holders; ++i) {
		holder = holder_dict(&status->holders[i]);
		if (!holder || PyList_Append(holders, holder))
			Py_CLEAR(holders);
		Py_XDECREF(holder);
	}
	if (!holders)
		return NULL;
	return Py_BuildValue(
		"{s:s,s:s,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:I,s:I,s:I,s:I,s:I,s:i,s:i,s:i,s:s,s:I,s:N,s:s}", "name",
		status->name, "container", status->container, "generation", (unsigned long long)status->generation,
		"nbytes", (unsigned long long)status->size, "offset", (unsigned long long)status->offset, "object",
		(unsigned long long)status->object, "object_nbytes", (unsigned long long)status->object_size, "age_ns",
		(unsigned long long)status->age_ns, "session", (unsigned long long)status->session, "slot",
		status->slot, "pid", status->pid, "uid", status->uid, "leases", status->leases, "flags", status->flags,
		"state", status->state, "kind", status->kind, "access", status->access, "comm", status->comm,
		"holders_total", status->holders_total, "holders", holders, "key", status->key);
}

PyObject *py_list_status(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "_status", 0, 0, 5, { "name", "prefix", "uid", "states", "holders" } };
	struct shmb_status_filter filter = { .struct_size = sizeof(filter) };
	bool prefix = false, holders = false;
	Broker *broker = (Broker *)self;
	struct shmb_status_iter *iter;
	PyObject *values[5];
	uint32_t uid = UINT32_MAX;
	Status *status;
	int r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_text(values[0], "name", &filter.name) || py_argument_bool(values[1], &prefix) ||
	    py_argument_uint32(values[2], "uid", &uid) || py_argument_uint32(values[3], "states", &filter.states) ||
	    py_argument_bool(values[4], &holders) || py_broker_use(broker))
		return NULL;
	filter.prefix = prefix;
	filter.with_holders = holders;
	filter.uid_plus_one = uid + 1;
	r = shmb_status_iter_new(broker->client, &filter, &iter);
	if (r) {
		py_broker_unuse(broker);
		return py_error_raise(broker->state, r);
	}
	status = PyObject_New(Status, broker->state->status_type);
	if (!status) {
		shmb_status_iter_free(iter);
		py_broker_unuse(broker);
		return NULL;
	}
	status->broker = (Broker *)Py_NewRef(self);
	status->iter = iter;
	status->busy = false;
	return (PyObject *)status;
}

static void status_end(Status *status) {
	if (!status->iter)
		return;
	status->iter = shmb_status_iter_free(status->iter);
	py_broker_unuse(status->broker);
}

static PyObject *status_next(PyObject *self) {
	Status *status = (Status *)self;
	const struct shmb_status *entry = NULL;
	PyObject *ret;
	int r;

	if (status->busy) {
		PyErr_SetString(PyExc_RuntimeError, "another thread uses this iterator");
		return NULL;
	}
	if (!status->iter)
		return NULL;
	status->busy = true;
	WITHOUT_GIL(r = shmb_status_iter_next(status->iter, &entry));
	ret = r ? py_error_raise(status->broker->state, r) : entry ? status_dict(entry) : NULL;
	if (r || !entry)
		status_end(status);
	status->busy = false;
	return ret;
}

static void status_dealloc(PyObject *self) {
	Status *status = (Status *)self;
	PyTypeObject *type = Py_TYPE(self);

	status_end(status);
	Py_DECREF(status->broker);
	PyObject_Free(self);
	Py_DECREF(type);
}

/* ---- lists that the library hands over one by one, on a thread that has let the GIL go ---- */

typedef struct Collector {
	PyThreadState *thread;
	PyObject *list;
} Collector;

static int collect(Collector *collector, PyObject *item) {
	int r = item ? PyList_Append(collector->list, item) : -1;

	Py_XDECREF(item);
	collector->thread = PyEval_SaveThread();
	/* whatever ends the call; the exception is set */
	return r ? SHMB_E_INVALID : 0;
}

static int each_client(void *userdata, const struct shmb_client_status *client) {
	Collector *collector = userdata;

	PyEval_RestoreThread(collector->thread);
	return collect(collector,
		       Py_BuildValue("{s:s,s:K,s:K,s:K,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:s}", "container",
				     client->container, "session", (unsigned long long)client->session, "age_ns",
				     (unsigned long long)client->age_ns, "nbytes", (unsigned long long)client->bytes,
				     "pid", client->pid, "uid", client->uid, "gid", client->gid, "roles", client->roles,
				     "rights", client->rights, "regions", client->regions, "maps", client->maps,
				     "leases", client->leases, "unread", client->unread, "flags", client->flags, "comm",
				     client->comm));
}

static int each_stat(void *userdata, const struct shmb_stat *stat) {
	Collector *collector = userdata;

	PyEval_RestoreThread(collector->thread);
	return collect(collector, Py_BuildValue("(ssKII)", stat->name, stat->help, (unsigned long long)stat->value,
						stat->uid, stat->type));
}

static int each_info(void *userdata, const char *key, const char *value) {
	Collector *collector = userdata;

	PyEval_RestoreThread(collector->thread);
	return collect(collector, Py_BuildValue("(ss)", key, value));
}

static PyObject *collected(Broker *broker, Collector *collector, int r) {
	py_broker_unuse(broker);
	if (!r)
		return collector->list;
	Py_DECREF(collector->list);
	return PyErr_Occurred() ? NULL : py_error_raise(broker->state, r);
}

#define COLLECT(broker, collector, call)                          \
	do {                                                      \
		int _r;                                           \
		(collector).list = PyList_New(0);                 \
		if (!(collector).list || py_broker_use(broker)) { \
			Py_XDECREF((collector).list);             \
			return NULL;                              \
		}                                                 \
		(collector).thread = PyEval_SaveThread();         \
		_r = (call);                                      \
		PyEval_RestoreThread((collector).thread);         \
		return collected(broker, &(collector), _r);       \
	} while (0)

PyObject *py_list_clients(PyObject *self, PyObject *unused) {
	Broker *broker = (Broker *)self;
	Collector collector;

	(void)unused;
	COLLECT(broker, collector, shmb_client_each_client(broker->client, each_client, &collector));
}

PyObject *py_list_stats(PyObject *self, PyObject *with_accounts) {
	Broker *broker = (Broker *)self;
	bool accounts = false;
	Collector collector;

	if (py_argument_bool(with_accounts, &accounts))
		return NULL;
	COLLECT(broker, collector, shmb_client_each_stat(broker->client, accounts, each_stat, &collector));
}

PyObject *py_list_info(PyObject *self, PyObject *unused) {
	Broker *broker = (Broker *)self;
	Collector collector;

	(void)unused;
	COLLECT(broker, collector, shmb_client_each_info(broker->client, each_info, &collector));
}

/* ---- retiring by name ---- */

const char py_list_unregister_doc[] =
	"unregister($self, names, mode='strict', *, wait=False, timeout=None)\n--\n\n"
	"Retires regions by name, one's own or as admin anybody's; mode, wait and timeout (seconds) are those of "
	"Region.retire().\n\n"
	"names: a name, for which this returns None or raises; or a sequence of names, for which it returns a list with None or "
	"the exception for each.\n\n"
	"Raises NotFound, PermissionDenied, BadName, TimedOut, Again.";

/* borrowed texts of @names, which must live as long; free with PyMem_Free() */
static const char **texts_of(PyObject *names, Py_ssize_t n) {
	const char **texts = PyMem_Calloc((size_t)n + 1, sizeof(*texts));

	if (!texts)
		PyErr_NoMemory();
	for (Py_ssize_t i = 0; texts && i < n; ++i) {
		if (py_argument_text(PyTuple_GetItem(names, i), "a name", &texts[i])) {
			PyMem_Free(texts);
			return NULL;
		}
	}
	return texts;
}

static PyObject *results_list(const State *state, const int *results, Py_ssize_t n) {
	PyObject *list = PyList_New(0), *item;

	for (Py_ssize_t i = 0; list && i < n; ++i) {
		item = results[i] ? py_error_new(state, results[i], shmb_error_text(results[i])) : Py_NewRef(Py_None);
		if (!item || PyList_Append(list, item))
			Py_CLEAR(list);
		Py_XDECREF(item);
	}
	return list;
}

static PyObject *unregister_all_of(Broker *broker, PyObject *names, uint32_t mode, int timeout) {
	Py_ssize_t n = PyTuple_Size(names);
	const char **texts = texts_of(names, n);
	int *results = texts ? PyMem_Calloc((size_t)n + 1, sizeof(*results)) : NULL, r;
	PyObject *ret = NULL;

	if (results && !py_broker_use(broker)) {
		WITHOUT_GIL(r = shmb_client_unregister(broker->client, texts, (uint32_t)n, mode, timeout, results));
		py_broker_unuse(broker);
		ret = r ? py_error_raise(broker->state, r) : results_list(broker->state, results, n);
	}
	PyMem_Free(results);
	PyMem_Free(texts);
	return ret;
}

PyObject *py_list_unregister(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "unregister", 1, 2, 4, { "names", "mode", "wait", "timeout" } };
	Broker *broker = (Broker *)self;
	uint32_t mode = SHMB_RETIRE_STRICT;
	PyObject *values[4], *names, *ret;
	const char *name = NULL;
	bool wait = false;
	int timeout = -1, r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) || py_argument_mode(values[1], &mode) ||
	    py_argument_bool(values[2], &wait) || py_argument_timeout(values[3], &timeout))
		return NULL;
	mode |= wait ? SHMB_RETIRE_WAIT : 0;
	if (PyUnicode_Check(values[0])) {
		if (py_argument_text(values[0], "names", &name) || py_broker_use(broker))
			return NULL;
		WITHOUT_GIL(r = shmb_client_unregister(broker->client, &name, 1, mode, timeout, NULL));
		py_broker_unuse(broker);
		if (r)
			return py_error_raise(broker->state, r);
		Py_RETURN_NONE;
	}
	names = PySequence_Tuple(values[0]);
	if (!names)
		return NULL;
	ret = unregister_all_of(broker, names, mode, timeout);
	Py_DECREF(names);
	return ret;
}

const char py_list_unregister_all_doc[] =
	"_unregister_all($self, scope='session', mode='strict', *, wait=False, timeout=None)\n--\n\n"
	"Retires all regions of this session (\"session\"), of this user (\"uid\"), or of everybody (\"everyone\", for admins).\n\n"
	"Returns (gone, draining, discarded): how many regions are gone, how many wait for leases, and how many bytes "
	"mode=\"discard\" gave back. Raises PermissionDenied, TimedOut, Again.";

PyObject *py_list_unregister_all(PyObject *self, PyObject *const *arguments, Py_ssize_t n, PyObject *keywords) {
	static const Signature signature = { "unregister_all", 0, 2, 4, { "scope", "mode", "wait", "timeout" } };
	static const char *const scopes[] = {
		[SHMB_ALL_SESSION] = "session",
		[SHMB_ALL_UID] = "uid",
		[SHMB_ALL_EVERYONE] = "everyone",
	};
	struct shmb_retired retired = { .struct_size = sizeof(retired) };
	uint32_t mode = SHMB_RETIRE_STRICT, scope = SHMB_ALL_SESSION;
	Broker *broker = (Broker *)self;
	const char *text = "session";
	PyObject *values[4];
	bool wait = false;
	int timeout = -1, r;

	if (py_arguments_parse(&signature, arguments, n, keywords, values) ||
	    py_argument_text(values[0], "scope", &text) || py_argument_mode(values[1], &mode) ||
	    py_argument_bool(values[2], &wait) || py_argument_timeout(values[3], &timeout))
		return NULL;
	while (scope < sizeof(scopes) / sizeof(scopes[0]) && strcmp(text, scopes[scope]))
		scope++;
	if (scope == sizeof(scopes) / sizeof(scopes[0])) {
		PyErr_Format(PyExc_ValueError, "scope is \"session\", \"uid\" or \"everyone\", not %R", values[0]);
		return NULL;
	}
	if (py_broker_use(broker))
		return NULL;
	WITHOUT_GIL(r = shmb_client_unregister_all(broker->client, scope, mode | (wait ? SHMB_RETIRE_WAIT : 0), timeout,
						   &retired));
	py_broker_unuse(broker);
	if (r)
		return py_error_raise(broker->state, r);
	return Py_BuildValue("(IIK)", retired.gone, retired.draining, (unsigned long long)retired.discarded);
}

int py_list_init_types(State *state, PyObject *module) {
	static PyType_Slot slots[] = {
		{ Py_tp_dealloc, (void *)status_dealloc },
		{ Py_tp_iter, (void *)PyObject_SelfIter },
		{ Py_tp_iternext, (void *)status_next },
		{ Py_tp_doc, "The broker's regions, page by page." },
		{ 0, NULL },
	};
	static PyType_Spec spec = { "shmbroker._shmbroker.StatusIterator", sizeof(Status), 0,
				    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };

	state->status_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
	return state->status_type ? 0 : -1;
}
