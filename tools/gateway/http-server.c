/* SPDX-License-Identifier: Apache-2.0 */

#include "http.h"

static void reply_metadata(HttpRequest *request) {
	struct json_object *object = json_object_new_object(), *extensions = json_object_new_array();
	CoreMetadata metadata;

	core_metadata(request->core, &metadata);
	for (size_t i = 0; metadata.extensions[i]; i++)
		json_object_array_add(extensions, json_object_new_string(metadata.extensions[i]));
	json_object_object_add(object, "name", json_object_new_string(metadata.name));
	json_object_object_add(object, "version", json_object_new_string(metadata.version));
	json_object_object_add(object, "extensions", extensions);
	http_reply_json(request, 200, object);
	json_object_put(object);
}

bool http_server_route(HttpRequest *request) {
	static const char *const live[] = { "v2", "health", "live", NULL };
	static const char *const ready[] = { "v2", "health", "ready", NULL };
	static const char *const metadata[] = { "v2", NULL };

	if (http_path_is(request, 0, live)) {
		if (http_method_is(request, "GET"))
			http_reply_empty(request, core_live(request->core) ? 200 : 400);
	} else if (http_path_is(request, 0, ready)) {
		if (http_method_is(request, "GET"))
			http_reply_empty(request, core_ready(request->core) ? 200 : 400);
	} else if (http_path_is(request, 0, metadata)) {
		if (http_method_is(request, "GET"))
			reply_metadata(request);
	} else {
		return false;
	}
	return true;
}
