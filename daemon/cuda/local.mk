# SPDX-License-Identifier: Apache-2.0

# the one program of the broker that loads libcuda, which needs nothing to be built
helper_sources = \
	daemon/cuda/cause.c \
	daemon/cuda/cause.h \
	daemon/cuda/causes.def \
	daemon/cuda/helper.h \
	daemon/cuda/main.c \
	daemon/cuda/nvml.c \
	daemon/cuda/nvml.h \
	daemon/cuda/validate.c \
	daemon/cuda/validate.h
helper_page = daemon/cuda/shmbroker-cuda-helper.8
EXTRA_DIST += $(helper_sources) $(helper_page)
if WITH_CUDA
pkglibexec_PROGRAMS += shmbroker-cuda-helper
shmbroker_cuda_helper_SOURCES = $(helper_sources)
shmbroker_cuda_helper_LDADD = libcudadriver.la libwire.la
man_MANS += $(helper_page)
endif
