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
	tests/tally.py

system_files =
EXTRA_DIST += $(system_files)

lint_tests = \
	tests/lint/floors.sh \
	tests/lint/house.sh \
	tests/lint/shell.sh
EXTRA_DIST += $(lint_tests)
TESTS += $(lint_tests)

unit_tests =
