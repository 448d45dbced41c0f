# SPDX-License-Identifier: Apache-2.0

# the Python module: an extension of the stable ABI with the library in it, and what is Python beside it
python_sources = \
	libbroker/python/arguments.c \
	libbroker/python/broker.c \
	libbroker/python/dlpack.c \
	libbroker/python/dtype.c \
	libbroker/python/errors.c \
	libbroker/python/lease.c \
	libbroker/python/list.c \
	libbroker/python/memory.c \
	libbroker/python/module.c \
	libbroker/python/module.h \
	libbroker/python/region.c
python_package = \
	libbroker/python/shmbroker/__init__.py \
	libbroker/python/shmbroker/_aio.py \
	libbroker/python/shmbroker/_numpy.py \
	libbroker/python/shmbroker/_shmbroker.pyi \
	libbroker/python/shmbroker/_source.py \
	libbroker/python/shmbroker/_types.py \
	libbroker/python/shmbroker/py.typed

if WITH_PYTHON
shmbrokerexecdir = $(pyexecdir)/shmbroker
shmbrokerexec_LTLIBRARIES = libbroker/python/_shmbroker.la
shmbrokerpythondir = $(pyexecdir)/shmbroker
shmbrokerpython_PYTHON = $(filter %.py,$(python_package))
shmbrokerpython_DATA = $(filter-out %.py,$(python_package))

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
	cd "$(DESTDIR)$(shmbrokerexecdir)" && mv -f _shmbroker.so _shmbroker.abi3.so && rm -f _shmbroker.la _shmbroker.a

uninstall-stable-abi:
	rm -f "$(DESTDIR)$(shmbrokerexecdir)/_shmbroker.abi3.so"
	-rmdir "$(DESTDIR)$(shmbrokerexecdir)" 2>/dev/null

EXTRA_DIST += \
	$(python_package) \
	libbroker/python/pyproject.toml \
	libbroker/python/setup.py
