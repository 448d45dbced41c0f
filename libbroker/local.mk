# SPDX-License-Identifier: Apache-2.0

# the ground floor, of which library and daemon each have a copy
noinst_LTLIBRARIES += libwire.la
wire_sources = \
	libbroker/wire/barrier.c \
	libbroker/wire/barrier.h \
	libbroker/wire/codec.c \
	libbroker/wire/codec.h \
	libbroker/wire/compat.h \
	libbroker/wire/errors.def \
	libbroker/wire/fd.c \
	libbroker/wire/fd.h \
	libbroker/wire/layout.c \
	libbroker/wire/layout.h \
	libbroker/wire/messages.def \
	libbroker/wire/name.c \
	libbroker/wire/name.h \
	libbroker/wire/protocol.c \
	libbroker/wire/protocol.h \
	libbroker/wire/range.h \
	libbroker/wire/uuid.c \
	libbroker/wire/uuid.h
libwire_la_SOURCES = $(wire_sources)

# the GPU's driver as it is found at run time, for whatever may load it: the daemon may not
if WITH_CUDA
noinst_LTLIBRARIES += libcudadriver.la
libcudadriver_la_SOURCES = \
	libbroker/wire/cuda-driver.c \
	libbroker/wire/cuda-driver.def \
	libbroker/wire/cuda-driver.h
endif

# the library's objects, for the library itself and for unit tests that look inside
noinst_LTLIBRARIES += libclient.la
client_sources = \
	libbroker/client/abandon.c \
	libbroker/client/acquire.c \
	libbroker/client/block.c \
	libbroker/client/call.c \
	libbroker/client/client.c \
	libbroker/client/client.h \
	libbroker/client/cuda-client.h \
	libbroker/client/error.c \
	libbroker/client/event.c \
	libbroker/client/lane.c \
	libbroker/client/lane.h \
	libbroker/client/lease.c \
	libbroker/client/lease.h \
	libbroker/client/list.c \
	libbroker/client/map.c \
	libbroker/client/map.h \
	libbroker/client/message.c \
	libbroker/client/owner.h \
	libbroker/client/pool.c \
	libbroker/client/pool.h \
	libbroker/client/region-memory.c \
	libbroker/client/region.c \
	libbroker/client/resume.c \
	libbroker/client/unregister.c
libclient_la_SOURCES = $(client_sources)
libclient_la_LIBADD = libwire.la
if WITH_CUDA
libclient_la_SOURCES += \
	libbroker/client/cuda-context.c \
	libbroker/client/cuda-context.h \
	libbroker/client/cuda-map.c \
	libbroker/client/cuda-region.c
libclient_la_LIBADD += libcudadriver.la
else
libclient_la_SOURCES += libbroker/client/cuda-fallback.c
endif

lib_LTLIBRARIES += libshmbroker.la
libshmbroker_la_SOURCES =
libshmbroker_la_LIBADD = libclient.la
# threads that have used it call into it when they end, so it is never unloaded
libshmbroker_la_LDFLAGS = $(AM_LDFLAGS) -version-info $(SHMB_LIBRARY_VERSION) -Wl,-z,nodelete \
	-Wl,--version-script=$(srcdir)/libbroker/libshmbroker.sym
libshmbroker_la_DEPENDENCIES = libclient.la libbroker/libshmbroker.sym

include_HEADERS += libbroker/shmbroker.h
dist_man_MANS += \
	libbroker/client/libshmbroker.3 \
	libbroker/client/shmb_client_get_memory_info.3 \
	libbroker/client/shmb_client_lookup.3 \
	libbroker/client/shmb_client_new.3 \
	libbroker/client/shmb_client_subscribe.3 \
	libbroker/client/shmb_client_unregister.3 \
	libbroker/client/shmb_cuda_export.3 \
	libbroker/client/shmb_error_name.3 \
	libbroker/client/shmb_lease_copy_in.3 \
	libbroker/client/shmb_pool_create.3 \
	libbroker/client/shmb_region_create.3 \
	libbroker/client/shmb_status_iter_new.3 \
	libbroker/shmbroker.7 \
	libbroker/wire/shmbroker-protocol-messages.7 \
	libbroker/wire/shmbroker-protocol.7
pkgconfigdir = $(libdir)/pkgconfig
pkgconfig_DATA = libbroker/libshmbroker.pc
EXTRA_DIST += \
	libbroker/libshmbroker.pc.in \
	libbroker/libshmbroker.sym
# the Python module: an extension of the stable ABI with the library in it, and what is Python beside it
python_sources = \
	libbroker/python/arguments.c \
	libbroker/python/block.c \
	libbroker/python/broker.c \
	libbroker/python/dlpack.c \
	libbroker/python/dtype.c \
	libbroker/python/errors.c \
	libbroker/python/lease.c \
	libbroker/python/list.c \
	libbroker/python/memory.c \
	libbroker/python/module.c \
	libbroker/python/module.h \
	libbroker/python/options.c \
	libbroker/python/pool.c \
	libbroker/python/region.c
python_modules = \
	libbroker/python/shmbroker/__init__.py \
	libbroker/python/shmbroker/_acquire.py \
	libbroker/python/shmbroker/_aio.py \
	libbroker/python/shmbroker/_numpy.py \
	libbroker/python/shmbroker/_source.py \
	libbroker/python/shmbroker/_types.py
python_examples = \
	libbroker/python/examples/crash.py \
	libbroker/python/examples/pipeline.py \
	libbroker/python/examples/server.py \
	libbroker/python/examples/torch_consumer.py
python_triton_modules = \
	libbroker/python/shmbroker/triton/__init__.py \
	libbroker/python/shmbroker/triton/_cuda.py \
	libbroker/python/shmbroker/triton/_session.py \
	libbroker/python/shmbroker/triton/_tensor.py \
	libbroker/python/shmbroker/triton/cuda_shared_memory.py \
	libbroker/python/shmbroker/triton/shared_memory.py
python_types = \
	libbroker/python/shmbroker/_shmbroker.pyi \
	libbroker/python/shmbroker/py.typed

if WITH_PYTHON
shmbrokerpythondir = $(pyexecdir)/shmbroker
shmbrokerpython_LTLIBRARIES = libbroker/python/_shmbroker.la
shmbrokerpython_PYTHON = $(python_modules)
shmbrokertritondir = $(shmbrokerpythondir)/triton
shmbrokertriton_PYTHON = $(python_triton_modules)
shmbrokerpython_DATA = $(python_types)
pythondocdir = $(docdir)/python
pythondoc_DATA = libbroker/python/README.md
pythonexamplesdir = $(pythondocdir)/examples
pythonexamples_DATA = $(python_examples)

install_hooks += install-stable-abi
uninstall_hooks += uninstall-stable-abi
endif

# a module, and of its symbols only the one that Python looks for
libbroker_python__shmbroker_la_SOURCES = $(python_sources)
libbroker_python__shmbroker_la_CPPFLAGS = $(AM_CPPFLAGS) $(PYTHON_CPPFLAGS) -DPy_LIMITED_API=0x030B0000
libbroker_python__shmbroker_la_CFLAGS = $(AM_CFLAGS) -Wno-undef
libbroker_python__shmbroker_la_LDFLAGS = $(AM_LDFLAGS) -module -avoid-version -shared \
	-export-symbols-regex '^PyInit__shmbroker$$'
libbroker_python__shmbroker_la_LIBADD = libclient.la

# libtool has no name for the stable ABI: CPython finds _shmbroker.abi3.so only there
install-stable-abi:
	cd "$(DESTDIR)$(shmbrokerpythondir)" && mv -f _shmbroker.so _shmbroker.abi3.so && rm -f _shmbroker.la _shmbroker.a

uninstall-stable-abi:
	rm -f "$(DESTDIR)$(shmbrokerpythondir)/_shmbroker.abi3.so"
	-rmdir "$(DESTDIR)$(shmbrokertritondir)" "$(DESTDIR)$(shmbrokerpythondir)" 2>/dev/null

EXTRA_DIST += \
	$(python_examples) \
	$(python_modules) \
	$(python_triton_modules) \
	$(python_types) \
	libbroker/python/README.md \
	libbroker/python/bench/lease.py \
	libbroker/python/bench/pool.py \
	libbroker/python/bench/rounds.py \
	libbroker/python/pyproject.toml \
	libbroker/python/setup.py
