# SPDX-License-Identifier: Apache-2.0

include_HEADERS += libbroker/shmbroker.h
pkgconfigdir = $(libdir)/pkgconfig
pkgconfig_DATA = libbroker/libshmbroker.pc
EXTRA_DIST += \
	libbroker/libshmbroker.pc.in \
	libbroker/libshmbroker.sym
