# SPDX-License-Identifier: Apache-2.0

TEST_EXTENSIONS = .sh .py
SH_LOG_COMPILER = bash
PY_LOG_COMPILER = $(PYTHON) -B
AM_TESTS_ENVIRONMENT = \
	top_srcdir='$(abs_top_srcdir)'; top_builddir='$(abs_top_builddir)'; CC='$(CC)'; CXX='$(CXX)'; \
	export top_srcdir top_builddir CC CXX;

EXTRA_DIST += \
	tests/expected-skips \
	tests/lint/files.sh \
	tests/system/real-systemd \
	tests/fuzz/corpus \
	tests/fuzz/corpus-grpc \
	tests/fuzz/corpus-http \
	tests/fuzz/fuzz.h \
	tests/fuzz/make-corpus \
	tests/fuzz/make-corpus-grpc \
	tests/fuzz/make-corpus-http \
	tests/tally.py

system_files = \
	tests/system/broker.py \
	tests/system/calls.py \
	tests/system/conftest.py \
	tests/system/cuda_programs.py \
	tests/system/fuse.py \
	tests/system/gpus.py \
	tests/system/holder.py \
	tests/system/programs.py \
	tests/system/protocol_client.py \
	tests/system/restart.py \
	tests/system/sandbox.py \
	tests/system/test_attacks.py \
	tests/system/test_bench.py \
	tests/system/test_call_timeout.py \
	tests/system/test_client.py \
	tests/system/test_cuda_attacks.py \
	tests/system/test_cuda_client.py \
	tests/system/test_cuda_helper.py \
	tests/system/test_cuda_kill.py \
	tests/system/test_cuda_relay.py \
	tests/system/test_cuda_validate.py \
	tests/system/test_ctl.py \
	tests/system/test_dlopen.py \
	tests/system/test_examples.py \
	tests/system/test_fakecuda.py \
	tests/system/test_fallbacks.py \
	tests/system/test_fuse.py \
	tests/system/test_hostile.py \
	tests/system/test_keys.py \
	tests/system/test_kill.py \
	tests/system/test_limits.py \
	tests/system/test_memory.py \
	tests/system/test_pages.py \
	tests/system/test_parked.py \
	tests/system/test_pool.py \
	tests/system/test_recovery.py \
	tests/system/test_regions.py \
	tests/system/test_restart.py \
	tests/system/test_restart_client.py \
	tests/system/test_rights.py \
	tests/system/test_scale.py \
	tests/system/test_spin.py \
	tests/system/test_supervise.py \
	tests/system/test_systemd.py \
	tests/system/test_systemd_restart.py \
	tests/system/test_upgrade.py
EXTRA_DIST += $(system_files)

python_files = \
	tests/python/conftest.py \
	tests/python/members.py \
	tests/python/requirements.txt \
	tests/python/stubtest-allowlist \
	tests/python/test_api.py \
	tests/python/test_asyncio.py \
	tests/python/test_bench.py \
	tests/python/test_errors.py \
	tests/python/test_examples.py \
	tests/python/test_lifetime.py \
	tests/python/test_model.py \
	tests/python/test_pool.py \
	tests/python/test_pool_model.py \
	tests/python/test_triton_cuda.py \
	tests/python/test_triton_faults.py \
	tests/python/test_triton_gateway.py \
	tests/python/test_triton_shared_memory.py \
	tests/python/test_zero_copy.py
EXTRA_DIST += $(python_files)

gateway_files = \
	tests/gateway/browser.py \
	tests/gateway/bystander.py \
	tests/gateway/conftest.py \
	tests/gateway/frames.py \
	tests/gateway/full_shape.proto \
	tests/gateway/inference.py \
	tests/gateway/test_dashboard.py \
	tests/gateway/test_differential.py \
	tests/gateway/test_grpc.py \
	tests/gateway/test_grpc_abuse.py \
	tests/gateway/test_http_access.py \
	tests/gateway/test_http_broker.py \
	tests/gateway/test_http_client.py \
	tests/gateway/test_http_cuda.py \
	tests/gateway/test_http_cuda_slow.py \
	tests/gateway/test_http_limits.py \
	tests/gateway/test_http_shm.py \
	tests/gateway/test_infer_models.py \
	tests/gateway/test_infer_shm.py \
	tests/gateway/test_infer_texts.py \
	tests/gateway/test_metrics.py \
	tests/gateway/test_nginx.py
EXTRA_DIST += $(gateway_files)

model_files = \
	tests/model/check \
	tests/model/lease.pml \
	tests/model/pool.pml
EXTRA_DIST += $(model_files)

EXTRA_DIST += \
	tests/restart/check \
	tests/stress/check

lint_tests = \
	tests/lint/floors.sh \
	tests/lint/format.sh \
	tests/lint/header.sh \
	tests/lint/house.sh \
	tests/lint/shell.sh \
	tests/lint/tally.sh
EXTRA_DIST += $(lint_tests)
TESTS += $(lint_tests)

# texts against the tables of the code
docs_tests = \
	tests/docs/check-bench \
	tests/docs/check-ctl \
	tests/docs/check-library \
	tests/docs/check-options \
	tests/docs/check-protocol
docs_files = \
	tests/docs/make-protocol-tables
EXTRA_DIST += $(docs_tests) $(docs_files)
TESTS += $(docs_tests)

# the gateway's, which use nothing of the daemon
gateway_unit_tests = \
	tests/fuzz/fuzz-grpc \
	tests/fuzz/fuzz-http \
	tests/unit/test-grpc-abuse \
	tests/unit/test-grpc-session \
	tests/unit/test-grpc-wire \
	tests/unit/test-turns

# programs of cmocka, and the replay of the fuzzers' inputs; each has one source, and is linked with the daemon's
# objects unless said otherwise below
if WITH_CMOCKA
unit_tests = \
	tests/unit/test-account \
	tests/unit/test-barrier \
	tests/unit/test-client-lease \
	tests/unit/test-client-resume \
	tests/unit/test-client-timeout \
	tests/unit/test-client \
	tests/unit/test-closer \
	tests/unit/test-codec \
	tests/unit/test-config \
	tests/unit/test-fd \
	tests/unit/test-layout \
	tests/unit/test-log \
	tests/unit/test-loop-sources \
	tests/unit/test-loop \
	tests/unit/test-name \
	tests/unit/test-notify \
	tests/unit/test-object \
	tests/unit/test-peer \
	tests/unit/test-pool \
	tests/unit/test-protocol \
	tests/unit/test-registry \
	tests/unit/test-spin \
	tests/unit/test-supervise \
	tests/unit/test-uuid \
	tests/fuzz/fuzz-codec
if WITH_GATEWAY
unit_tests += $(gateway_unit_tests)
endif
check_PROGRAMS += $(unit_tests)
TESTS += $(unit_tests)
endif

unit_headers = \
	tests/unit/client-broker.h \
	tests/unit/count-fds.h \
	tests/unit/fd-limit.h \
	tests/unit/grpc-fixture.h \
	tests/unit/loop-fixture.h
EXTRA_DIST += $(unit_headers)

# what the checks of documents compare texts with
check_PROGRAMS += tests/unit/wire-tables

AM_CPPFLAGS += $(CMOCKA_CFLAGS)
LDADD = libdaemon.la $(CMOCKA_LIBS)
if WITH_SYSTEMD
manager_flags = -DWITH_MANAGER=1
else
manager_flags = -DWITH_MANAGER=0
endif
tests_unit_test_notify_CPPFLAGS = $(AM_CPPFLAGS) $(manager_flags)
tests_unit_test_supervise_CPPFLAGS = $(AM_CPPFLAGS) $(manager_flags)
tests_unit_test_client_LDADD = libclient.la $(CMOCKA_LIBS)
tests_unit_test_client_lease_LDADD = libclient.la $(CMOCKA_LIBS)
tests_unit_test_client_resume_LDADD = libclient.la $(CMOCKA_LIBS)
tests_unit_test_client_timeout_LDADD = libclient.la $(CMOCKA_LIBS)
tests_unit_test_pool_LDADD = libclient.la $(CMOCKA_LIBS)

grpc_session_libs = $(NGHTTP2_LIBS) $(ZLIB_LIBS) $(CMOCKA_LIBS)
tests_fuzz_fuzz_grpc_SOURCES = tests/fuzz/fuzz-grpc.c $(grpc_session_sources)
tests_fuzz_fuzz_grpc_LDADD = $(grpc_session_libs)
tests_fuzz_fuzz_http_SOURCES = tests/fuzz/fuzz-http.c $(http_door_sources)
tests_fuzz_fuzz_http_CPPFLAGS = $(AM_CPPFLAGS) $(EVENT_CFLAGS) $(JSONC_CFLAGS)
tests_fuzz_fuzz_http_LDADD = $(EVENT_LIBS) $(JSONC_LIBS)
tests_unit_test_grpc_abuse_SOURCES = tests/unit/test-grpc-abuse.c $(grpc_session_sources)
tests_unit_test_grpc_abuse_LDADD = $(grpc_session_libs)
tests_unit_test_grpc_session_SOURCES = tests/unit/test-grpc-session.c $(grpc_session_sources)
tests_unit_test_grpc_session_LDADD = $(grpc_session_libs)
tests_unit_test_grpc_wire_SOURCES = tests/unit/test-grpc-wire.c $(grpc_session_sources)
tests_unit_test_grpc_wire_LDADD = $(grpc_session_libs)
tests_unit_test_turns_SOURCES = tests/unit/test-turns.c tools/gateway/turns.c
tests_unit_test_turns_CPPFLAGS = $(AM_CPPFLAGS) $(EVENT_CFLAGS)
tests_unit_test_turns_LDADD = $(EVENT_LIBS) $(CMOCKA_LIBS)

# the demonstration: uses what an installed library offers, nothing else
tests_demo_owner_SOURCES = tests/demo/owner.c tests/demo/frame.h
tests_demo_owner_LDADD = libshmbroker.la
tests_demo_owner_LDFLAGS = $(AM_LDFLAGS) -no-install
tests_demo_consumer_SOURCES = tests/demo/consumer.c tests/demo/frame.h
tests_demo_consumer_LDADD = libshmbroker.la
tests_demo_consumer_LDFLAGS = $(AM_LDFLAGS) -no-install

# peers that the system tests start; the library is in them, so that they run wherever they are copied to
tests_system_client_calls_LDADD = libclient.la
tests_system_client_cuda_LDADD = libclient.la
tests_system_client_memory_LDADD = libclient.la
tests_system_client_restart_LDADD = libclient.la
tests_system_client_threads_LDADD = libclient.la
tests_system_peer_LDADD = libclient.la
tests_system_pool_stress_LDADD = libclient.la
# this one loads the library
tests_system_client_dlopen_LDADD =

# the stress of leases, with acquires that make no fence, and a broker for it that makes no barriers
stress_sources = \
	tests/stress/consumer.c \
	tests/stress/owner.c \
	tests/stress/stress.c \
	tests/stress/stress.h
tests_stress_stress_SOURCES = $(stress_sources)
tests_stress_stress_LDADD = libclient.la
tests_stress_stress_unfenced_SOURCES = $(stress_sources) tests/stress/acquire-unfenced.c
tests_stress_stress_unfenced_LDADD = libclient.la
# an object of its own keeps the one of the same functions in the archive out
tests_stress_shmbrokerd_without_barrier_SOURCES = daemon/main.c tests/stress/barrier-none.c
tests_stress_shmbrokerd_without_barrier_LDADD = libdaemon.la

# the kill loop
kill_loop_sources = \
	tests/restart/checker.c \
	tests/restart/checker.h \
	tests/restart/consumer.c \
	tests/restart/engine.h \
	tests/restart/kill-loop.c \
	tests/restart/load.c \
	tests/restart/load.h \
	tests/restart/owner.c
tests_restart_kill_loop_SOURCES = $(kill_loop_sources)
tests_restart_kill_loop_LDADD = libclient.la -lm

# the systematic one, and the broker that it kills: all of it anew, with the kill points
kill_points_sources = \
	tests/restart/engine.h \
	tests/restart/kill-count.h \
	tests/restart/kill-points.c \
	tests/restart/scenario.c \
	tests/restart/scenario.h
tests_restart_kill_points_SOURCES = $(kill_points_sources)
tests_restart_kill_points_LDADD = libclient.la
tests_restart_shmbrokerd_kill_points_SOURCES = \
	$(libdaemon_la_SOURCES) \
	daemon/main.c \
	tests/restart/kill-count.h \
	tests/restart/kill-point.c
tests_restart_shmbrokerd_kill_points_CPPFLAGS = $(libdaemon_la_CPPFLAGS) -DSHMBROKER_KILL_POINTS
tests_restart_shmbrokerd_kill_points_LDADD = $(libdaemon_la_LIBADD)

test_programs = \
	tests/demo/consumer \
	tests/demo/owner \
	tests/restart/kill-loop \
	tests/restart/kill-points \
	tests/restart/shmbrokerd-kill-points \
	tests/stress/shmbrokerd-without-barrier \
	tests/stress/stress \
	tests/stress/stress-unfenced \
	tests/system/client-calls \
	tests/system/client-cuda \
	tests/system/client-dlopen \
	tests/system/client-memory \
	tests/system/client-restart \
	tests/system/client-threads \
	tests/system/peer \
	tests/system/pool-stress
check_PROGRAMS += $(test_programs)
test-programs: $(test_programs)
.PHONY: test-programs

# our declarations of the GPU's driver, against the toolkit's
EXTRA_DIST += tests/unit/cuda-driver-check.c
if WITH_CUDA_HEADER
check_LTLIBRARIES += tests/unit/libcuda-driver-check.la
tests_unit_libcuda_driver_check_la_SOURCES = tests/unit/cuda-driver-check.c
tests_unit_libcuda_driver_check_la_CPPFLAGS = $(CUDA_CPPFLAGS)
test-programs: tests/unit/libcuda-driver-check.la
endif
