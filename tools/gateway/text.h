/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Text: what peers write their bytes as. Pure functions over buffers that are borrowed. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Decodes base64 as Triton's decoder does: what is not of the alphabet is skipped, `=` ends it, padding is not needed.
 * Writes at most @max bytes to @ret. Returns how many there are, which may be more than @max.
 */
size_t text_base64(const char *text, size_t size, uint8_t *ret, size_t max);

/*
 * Decodes %XX. @ret has room for @size bytes. Returns whether every % is followed by two hexadecimal digits, none of which
 * say NUL; then @ret_size is set.
 */
bool text_percent_decode(const char *text, size_t size, char *ret, size_t *ret_size);

/* the length of the UTF-8 character at @text, 1 to 4, or 0 when there is none within @left bytes */
size_t text_utf8_length(const char *text, size_t left);
/* whether @text is UTF-8 as a whole; sets @ret_control to whether it has control characters (NUL, C0, DEL, C1) */
bool text_is_utf8(const char *text, size_t size, bool *ret_control);
