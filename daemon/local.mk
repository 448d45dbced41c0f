# SPDX-License-Identifier: Apache-2.0

sbin_PROGRAMS += shmbrokerd
shmbrokerd_SOURCES = daemon/main.c
shmbrokerd_LDADD = libdaemon.la

# everything but main(), for the program and for unit tests
noinst_LTLIBRARIES += libdaemon.la
daemon_sources = \
	daemon/account.c \
	daemon/account.h \
	daemon/broker.c \
	daemon/broker.h \
	daemon/closer.c \
	daemon/closer.h \
	daemon/config-value.c \
	daemon/config-value.h \
	daemon/config.c \
	daemon/config.h \
	daemon/cuda/cause.c \
	daemon/cuda/cause.h \
	daemon/cuda/causes.def \
	daemon/cuda/cuda.c \
	daemon/cuda/cuda.h \
	daemon/cuda/gpu.c \
	daemon/cuda/gpu.h \
	daemon/cuda/helper.h \
	daemon/cuda/process.c \
	daemon/cuda/process.h \
	daemon/dispatch-consumer.c \
	daemon/dispatch-hello.c \
	daemon/dispatch-owner.c \
	daemon/dispatch-status.c \
	daemon/dispatch.c \
	daemon/dispatch.h \
	daemon/event.c \
	daemon/event.h \
	daemon/fdstore.c \
	daemon/fdstore.h \
	daemon/lease.c \
	daemon/lease.h \
	daemon/keeper.c \
	daemon/keeper.h \
	daemon/kill-point.h \
	daemon/ledger.c \
	daemon/ledger.h \
	daemon/list.h \
	daemon/listen.c \
	daemon/listen.h \
	daemon/log.c \
	daemon/log.h \
	daemon/loop-engine.h \
	daemon/loop-epoll.c \
	daemon/loop.c \
	daemon/loop.h \
	daemon/messages-log.def \
	daemon/notify.c \
	daemon/notify.h \
	daemon/object.c \
	daemon/object.h \
	daemon/options.c \
	daemon/options.def \
	daemon/options.h \
	daemon/peer.c \
	daemon/peer.h \
	daemon/policy.c \
	daemon/policy.h \
	daemon/recover.c \
	daemon/recover.h \
	daemon/region.c \
	daemon/region.h \
	daemon/registration.c \
	daemon/registration.h \
	daemon/registry.c \
	daemon/registry.h \
	daemon/retire.c \
	daemon/session.c \
	daemon/session.h \
	daemon/spin.c \
	daemon/spin.h \
	daemon/stats.c \
	daemon/stats.h \
	daemon/supervise.c \
	daemon/supervise.h \
	daemon/table.h \
	daemon/wait.c \
	daemon/wait.h
libdaemon_la_SOURCES = $(daemon_sources)
libdaemon_la_CPPFLAGS = $(AM_CPPFLAGS) $(INIH_CFLAGS) $(SYSTEMD_CFLAGS) $(URING_CFLAGS)
libdaemon_la_LIBADD = libwire.la $(INIH_LIBS) $(SYSTEMD_LIBS) $(URING_LIBS)

if WITH_SYSTEMD
libdaemon_la_SOURCES += daemon/journal.c daemon/notify-manager.c
else
libdaemon_la_SOURCES += daemon/journal-fallback.c daemon/notify-fallback.c
endif

if WITH_URING
libdaemon_la_SOURCES += daemon/loop-uring.c
else
libdaemon_la_SOURCES += daemon/loop-uring-fallback.c
endif

dist_man_MANS += \
	daemon/shmbrokerd.8
