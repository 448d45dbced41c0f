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
	libbroker/wire/range.h
libwire_la_SOURCES = $(wire_sources)

# the library's objects, for the library itself and for unit tests that look inside
client_sources =

include_HEADERS += libbroker/shmbroker.h
dist_man_MANS +=
pkgconfigdir = $(libdir)/pkgconfig
pkgconfig_DATA = libbroker/libshmbroker.pc
EXTRA_DIST += \
	libbroker/libshmbroker.pc.in \
	libbroker/libshmbroker.sym
