# SPDX-License-Identifier: Apache-2.0

# A libcuda.so.1 for tests, never installed. It is loaded into programs that have no sanitizers too, and has none itself.
check_LTLIBRARIES += tests/fakecuda/libcuda.la tests/fakecuda/driver-11.2/libcuda.la
fakecuda_sources = \
	tests/fakecuda/constants.def \
	tests/fakecuda/device.c \
	tests/fakecuda/fakecuda.h \
	tests/fakecuda/functions.def \
	tests/fakecuda/layouts.def \
	tests/fakecuda/memory.c \
	tests/fakecuda/state.c \
	tests/fakecuda/state.h \
	tests/fakecuda/stream.c \
	tests/fakecuda/vmm.c
fakecuda_cflags = -std=gnu11 -pthread $(WARN_CFLAGS)
# the driver's soname, and where no linker looks for it; once loaded it stays, as its socket does
fakecuda_ldflags = -pthread -shared -rpath $(abs_builddir)/tests/fakecuda -version-info 1:0:0 -Wl,-z,nodelete
tests_fakecuda_libcuda_la_SOURCES = $(fakecuda_sources)
tests_fakecuda_libcuda_la_CFLAGS = $(fakecuda_cflags)
tests_fakecuda_libcuda_la_LDFLAGS = $(fakecuda_ldflags) \
	-Wl,--version-script=$(srcdir)/tests/fakecuda/driver.sym
EXTRA_tests_fakecuda_libcuda_la_DEPENDENCIES = tests/fakecuda/driver.sym
# one that lacks what came after 11.2; one of 10.2 is built by its test
tests_fakecuda_driver_11_2_libcuda_la_SOURCES = $(fakecuda_sources)
tests_fakecuda_driver_11_2_libcuda_la_CFLAGS = $(fakecuda_cflags)
tests_fakecuda_driver_11_2_libcuda_la_LDFLAGS = $(fakecuda_ldflags) \
	-Wl,--version-script=$(srcdir)/tests/fakecuda/driver-11.2.sym
EXTRA_tests_fakecuda_driver_11_2_libcuda_la_DEPENDENCIES = tests/fakecuda/driver-11.2.sym

# where the toolkit is, its header has the last word on what the fake declares
if WITH_CUDA_HEADER
check_LTLIBRARIES += tests/fakecuda/libcheck-toolkit.la
tests_fakecuda_libcheck_toolkit_la_SOURCES = tests/fakecuda/check-toolkit.c
tests_fakecuda_libcheck_toolkit_la_CPPFLAGS = $(CUDA_CPPFLAGS)
test-programs: tests/fakecuda/libcheck-toolkit.la
endif

EXTRA_DIST += \
	tests/fakecuda/answers \
	tests/fakecuda/check-toolkit.c \
	tests/fakecuda/driver-10.2.sym \
	tests/fakecuda/driver-11.2.sym \
	tests/fakecuda/driver.sym \
	tests/fakecuda/fakecuda.py \
	tests/fakecuda/print-rules \
	tests/fakecuda/rules \
	tests/fakecuda/scenarios

test-programs: tests/fakecuda/libcuda.la tests/fakecuda/driver-11.2/libcuda.la
