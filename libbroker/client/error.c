/* SPDX-License-Identifier: Apache-2.0 */

#include <stdio.h>
#include <string.h>

#include "client.h"
#include "wire/name.h"

static _Thread_local char last_error[WIRE_TEXT_MAX + 1];

int error_setn(int result, const char *text, size_t size) {
	size = size < WIRE_TEXT_MAX ? size : WIRE_TEXT_MAX;
	memcpy(last_error, text, size);
	last_error[size] = 0;
	return result;
}

int error_set(int result, const char *text) {
	return error_setn(result, text, strlen(text));
}

int error_plain(int result) {
	return result ? error_set(result, shmb_error_text(result)) : 0;
}

int error_of_name(const char *name, size_t length) {
	const char *why;
	int r = wire_name_check(name, length, &why);

	return r ? error_set(r, why) : 0;
}

const char *shmb_error_name(int code) {
	return code > 0 ? wire_error_name((uint32_t)code) : NULL;
}

const char *shmb_error_text(int result) {
	static _Thread_local char text[96];
	const char *found;

	if (!result)
		return "success";
	if (result > 0) {
		found = wire_error_text((uint32_t)result);
		return found ? found : "unknown error code";
	}
	/* the GNU form, which may or may not use the buffer */
	return strerror_r(-result, text, sizeof(text));
}

const char *shmb_last_error(void) {
	return last_error;
}
