/* SPDX-License-Identifier: Apache-2.0 */

#include <string.h>

#include "clock.h"
#include "core.h"
#include "text.h"

bool core_live(const Core *core) {
	(void)core;
	return true;
}

bool core_ready(Core *core) {
	LinkSession *session = link_get(core->link);
	uint64_t began;
	int r;

	if (!session)
		return false;
	began = clock_ns();
	r = shmb_client_ping(session->client, NULL);
	core_metrics_broker(core->metrics, began);
	(void)link_lost(core->link, r);
	return r == 0;
}

/* whether there are a broker that lets this user keep regions, and somebody who opens keys */
static bool can_register(Core *core) {
	LinkSession *session = link_get(core->link);

	return core->allow_client_shm && session && session->rights & LINK_RIGHT_KEEP &&
	       key_opener_works(core->opener) && core_ready(core);
}

void core_metadata(Core *core, CoreMetadata *ret) {
	size_t n = 0;

	*ret = (CoreMetadata){ .name = core->server_name, .version = PACKAGE_VERSION };
	if (core->models) {
		ret->extensions[n++] = "binary_tensor_data";
		ret->extensions[n++] = "model_configuration";
		ret->extensions[n++] = "classification";
		ret->extensions[n++] = "statistics";
	}
	if (can_register(core)) {
		ret->extensions[n++] = "system_shared_memory";
		if (core->devices->n)
			ret->extensions[n++] = "cuda_shared_memory";
	}
	ret->extensions[n] = NULL;
}

const char *core_name_why(Bytes name) {
	bool control;

	if (!name.size)
		return "the name is empty";
	if (name.size > CORE_NAME_MAX)
		return "the name is longer than 255 bytes";
	if (!text_is_utf8(name.data, name.size, &control))
		return "the name is not valid UTF-8";
	return control ? "the name has control characters" : NULL;
}
