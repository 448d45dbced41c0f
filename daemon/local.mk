# SPDX-License-Identifier: Apache-2.0

# everything but main(), for the program and for unit tests
noinst_LTLIBRARIES += libdaemon.la
daemon_sources =
libdaemon_la_SOURCES = $(daemon_sources)
libdaemon_la_CFLAGS = $(AM_CFLAGS) $(INIH_CFLAGS) $(SYSTEMD_CFLAGS) $(URING_CFLAGS)
libdaemon_la_LIBADD = libwire.la $(INIH_LIBS) $(SYSTEMD_LIBS) $(URING_LIBS)

dist_man_MANS +=
