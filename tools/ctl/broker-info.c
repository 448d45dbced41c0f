/* SPDX-License-Identifier: Apache-2.0 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "broker-info.h"
#include "format.h"
#include "output.h"

static int on_info(void *userdata, const char *key, const char *value) {
	json_object *info = userdata;
	uint64_t number;

	if (!strcmp(value, "yes") || !strcmp(value, "no"))
		row_object(info, key, ctl_must(json_object_new_boolean(value[0] == 'y')));
	else if (!format_parse_number(value, UINT64_MAX, &number))
		row_number(info, key, number);
	else
		row_text(info, key, value);
	return 0;
}

int broker_info_read(Ctl *ctl, json_object **ret) {
	json_object *info = row_new();
	int r;

	r = shmb_client_each_info(ctl->client, on_info, info);
	if (r) {
		json_object_put(info);
		return ctl_fail(r, "the broker does not say what it is");
	}
	*ret = info;
	return 0;
}

static char *text_of(json_object *info, const char *key) {
	json_object *value = json_object_object_get(info, key);

	return format_clean(value ? json_object_get_string(value) : "unknown", FORMAT_TERMINAL);
}

void broker_info_print(json_object *info) {
	char *version = text_of(info, "version"), *loop = text_of(info, "loop"), *reason = text_of(info, "loop_reason");

	printf("broker %s, loop %s (%s)\n", version, loop, reason);
	free(version);
	free(loop);
	free(reason);
}
