/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The UUID of a GPU as text, "GPU-01234567-89ab-cdef-0123-456789abcdef", as the driver's own tools write it. Those of
 * MIG instances are written MIG-... there; what they are cannot be told from the 16 bytes.
 */

#include <stdbool.h>
#include <stdint.h>

#define WIRE_UUID_TEXT_SIZE 41

void wire_uuid_format(const uint8_t uuid[16], char ret[WIRE_UUID_TEXT_SIZE]);
/* Reads GPU-... or MIG-..., with or without the dashes between the digits. False when it is none. */
bool wire_uuid_parse(const char *text, uint8_t ret[16]);
