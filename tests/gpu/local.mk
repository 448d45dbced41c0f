# SPDX-License-Identifier: Apache-2.0

# what needs a real GPU; without one it is skipped, and counted as that
gpu_tests = tests/gpu/check
EXTRA_DIST += \
	$(gpu_tests) \
	tests/gpu/experiments.py
if WITH_CUDA
TESTS += $(gpu_tests)
endif
