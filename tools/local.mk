# SPDX-License-Identifier: Apache-2.0

bin_PROGRAMS += shmbrokerctl
ctl_sources = \
	tools/ctl/broker-info.c \
	tools/ctl/broker-info.h \
	tools/ctl/check.c \
	tools/ctl/clients.c \
	tools/ctl/ctl.h \
	tools/ctl/format.c \
	tools/ctl/format.h \
	tools/ctl/live.c \
	tools/ctl/live.h \
	tools/ctl/main.c \
	tools/ctl/options.c \
	tools/ctl/options.h \
	tools/ctl/output.c \
	tools/ctl/output.h \
	tools/ctl/ping.c \
	tools/ctl/register.c \
	tools/ctl/sha256.c \
	tools/ctl/sha256.h \
	tools/ctl/stats.c \
	tools/ctl/status.c \
	tools/ctl/unregister.c \
	tools/ctl/watch.c
shmbrokerctl_SOURCES = $(ctl_sources)
shmbrokerctl_CPPFLAGS = $(AM_CPPFLAGS) $(SMARTCOLS_CFLAGS) $(JSONC_CFLAGS)
shmbrokerctl_LDADD = libshmbroker.la $(SMARTCOLS_LIBS) $(JSONC_LIBS)
dist_man_MANS += \
	tools/ctl/shmbrokerctl.1

# measures the library as it is installed, and sends messages of its own
if WITH_BENCH
bin_PROGRAMS += shmbroker-bench
endif
bench_sources = \
	tools/bench/baseline.cc \
	tools/bench/baseline.h \
	tools/bench/bench.h \
	tools/bench/broker.c \
	tools/bench/death.c \
	tools/bench/frame.c \
	tools/bench/gateway.c \
	tools/bench/grpc.c \
	tools/bench/grpc.h \
	tools/bench/http.c \
	tools/bench/http.h \
	tools/bench/lease.c \
	tools/bench/main.c \
	tools/bench/measure.c \
	tools/bench/plot.c \
	tools/bench/raw.c \
	tools/bench/raw.h \
	tools/bench/regions.c \
	tools/bench/regions.h \
	tools/bench/register.c \
	tools/bench/restart-consumer.c \
	tools/bench/restart.c \
	tools/bench/restart.h \
	tools/bench/rows.c \
	tools/bench/rtt.c \
	tools/bench/scale-clients.c \
	tools/bench/scale.c \
	tools/bench/scale.h \
	tools/bench/team.c \
	tools/bench/team.h
shmbroker_bench_SOURCES = $(bench_sources)
shmbroker_bench_CPPFLAGS = $(AM_CPPFLAGS) $(SMARTCOLS_CFLAGS) $(JSONC_CFLAGS)
shmbroker_bench_LDADD = libshmbroker.la libwire.la $(SMARTCOLS_LIBS) $(JSONC_LIBS) -lm
if WITH_CUDA
shmbroker_bench_SOURCES += tools/bench/cuda.c
shmbroker_bench_LDADD += libcudadriver.la libwire.la
else
shmbroker_bench_SOURCES += tools/bench/cuda-fallback.c
endif
if WITH_BENCH
dist_man_MANS += \
	tools/bench/shmbroker-bench.1
endif

# what --json prints
schemasdir = $(pkgdatadir)/schemas
schemas_DATA = \
	tools/ctl/schemas/check.schema.json \
	tools/ctl/schemas/clients.schema.json \
	tools/ctl/schemas/ping.schema.json \
	tools/ctl/schemas/register.schema.json \
	tools/ctl/schemas/stats.schema.json \
	tools/ctl/schemas/status.schema.json \
	tools/ctl/schemas/unregister.schema.json \
	tools/ctl/schemas/watch.schema.json
EXTRA_DIST += $(schemas_DATA)

EXTRA_DIST += \
	tools/bench/lease.svg \
	tools/bench/readme-table \
	tools/ctl/shmbrokerctl.bash-completion \
	tools/quickstart

install_hooks += install-completion
uninstall_hooks += uninstall-completion

install-completion:
	$(MKDIR_P) "$(DESTDIR)$(completionsdir)"
	$(INSTALL_DATA) $(srcdir)/tools/ctl/shmbrokerctl.bash-completion "$(DESTDIR)$(completionsdir)/shmbrokerctl"

uninstall-completion:
	rm -f "$(DESTDIR)$(completionsdir)/shmbrokerctl"
