/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * NVML, the driver's library for management, where there is one: it is asked for words in the log alone, never for what a
 * decision rests on. It may not be initialised before a fork, so that the broker cannot ask it.
 */

#include <stddef.h>
#include <stdint.h>

#define NVML_LIBRARY "libnvidia-ml.so.1"

/*
 * Writes "driver 580.65.06" into @ret, and of the GPU with @uuid how many processes compute on it, where that can be
 * told: ", 2 processes compute on the GPU". Empty when @library cannot be loaded or says nothing. NULL for NVML_LIBRARY.
 */
void nvml_describe(const char *library, const uint8_t uuid[16], char *ret, size_t size);
