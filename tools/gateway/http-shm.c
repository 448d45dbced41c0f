/* SPDX-License-Identifier: Apache-2.0 */

/* Shared memory over HTTP: paths, bodies and replies; what they mean is the core's. */

#include <limits.h>
#include <string.h>

#include "http.h"
#include "json.h"
#include "text.h"

/* what a body may cost as objects: all that its members and their texts can, and not what others make of its length */
#define BODY_COST_MAX ((size_t)2 * CORE_REQUEST_MAX)

static struct json_object *region_json(CoreKind kind, const CoreRegion *region) {
	struct json_object *object = json_object_new_object();

	json_object_object_add(object, "name", json_object_new_string(region->name));
	if (kind == CORE_SYSTEM) {
		json_object_object_add(object, "key", json_object_new_string(region->key));
		json_object_object_add(object, "offset", json_object_new_uint64(region->offset));
	} else {
		json_object_object_add(object, "device_id", json_object_new_uint64(region->device_id));
	}
	json_object_object_add(object, "byte_size", json_object_new_uint64(region->byte_size));
	return object;
}

/* The array, one region at a time: as objects they would take many times the bytes of the reply. */
static AnswerCode list_json(HttpRequest *request, CoreKind kind, const CoreRegionList *list, struct evbuffer *out,
			    Answer *answer) {
	bool fine = evbuffer_add(out, "[", 1) == 0;

	for (size_t i = 0; i < list->n && fine; i++) {
		struct json_object *object = region_json(kind, &list->regions[i]);

		fine = (i == 0 || evbuffer_add(out, ",", 1) == 0) && http_add_json(out, object) == 0;
		json_object_put(object);
		if (evbuffer_get_length(out) > http_request_room(request))
			return answer_set(answer, ANSWER_RESOURCE_EXHAUSTED,
					  "the list of all regions is more than is held for a reply now");
	}
	if (!fine || evbuffer_add(out, "]", 1))
		return answer_set(answer, ANSWER_INTERNAL, "out of memory");
	return ANSWER_OK;
}

static void handle_status(HttpRequest *request, CoreKind kind, Bytes name) {
	struct evbuffer *out = evbuffer_new();
	CoreRegionList list = {};
	Answer answer = {};
	AnswerCode code;

	if (!out)
		code = answer_set(&answer, ANSWER_INTERNAL, "out of memory");
	else
		code = core_status(request->core, &request->caller, kind, name, &list, &answer);
	if (!code)
		code = list_json(request, kind, &list, out, &answer);
	core_region_list_deinit(&list);
	if (code)
		http_reply_answer(request, &answer);
	else
		http_reply_buffer(request, 200, "application/json", out);
	if (out)
		evbuffer_free(out);
	answer_deinit(&answer);
}

static AnswerCode register_system(HttpRequest *request, Bytes name, struct json_object *body, Answer *answer) {
	struct json_object *member;
	uint64_t offset = 0, byte_size;
	Bytes key;
	AnswerCode code;

	if (!json_member(body, "key", &member))
		return answer_set(answer, ANSWER_INVALID_ARG, "Shared memory register request has no 'key' field");
	code = json_as_string(member, &key.data, &key.size, answer);
	if (!code && json_member(body, "offset", &member))
		code = json_as_uint64(member, &offset, answer);
	if (code)
		return code;
	if (!json_member(body, "byte_size", &member))
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "Shared memory register request has no 'byte_size' field");
	code = json_as_uint64(member, &byte_size, answer);
	if (code)
		return code;
	return core_system_register(request->core, &request->caller, name, key, offset, byte_size, answer);
}

static AnswerCode register_cuda(HttpRequest *request, Bytes name, struct json_object *body, Answer *answer) {
	uint8_t handle[CORE_CUDA_HANDLE_SIZE];
	struct json_object *raw_handle;
	uint64_t byte_size, device_id;
	const char *text;
	size_t size;
	AnswerCode code;

	if (!json_member(body, "raw_handle", &raw_handle))
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "Shared memory register request has no 'raw_handle' field");
	code = json_member_as_string(raw_handle, "b64", &text, &size, answer);
	if (!code)
		code = json_member_as_uint64(body, "byte_size", &byte_size, answer);
	if (!code)
		code = json_member_as_uint64(body, "device_id", &device_id, answer);
	if (code)
		return code;
	if (size > INT_MAX)
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "'raw_handle' exceeds the maximum allowed data size limit INT_MAX");
	if (text_base64(text, size, handle, sizeof(handle)) != sizeof(handle))
		return answer_set(answer, ANSWER_INVALID_ARG,
				  "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t");
	return core_cuda_register(request->core, &request->caller, name,
				  (Bytes){ (const char *)handle, sizeof(handle) },
				  device_id > INT64_MAX ? INT64_MAX : (int64_t)device_id, byte_size, answer);
}

static void handle_register(HttpRequest *request, CoreKind kind, Bytes name) {
	struct json_object *body = NULL;
	Answer answer = {};
	AnswerCode code = core_check_allowed(request->core, &answer);

	if (!code && !name.size)
		code = answer_set(&answer, ANSWER_INVALID_ARG,
				  "'region name' is necessary to register %s shared memory region",
				  kind == CORE_SYSTEM ? "system" : "cuda");
	if (!code)
		code = http_request_json(request, SIZE_MAX, BODY_COST_MAX, &body, &answer);
	if (!code) {
		if (kind == CORE_SYSTEM)
			(void)register_system(request, name, body, &answer);
		else
			(void)register_cuda(request, name, body, &answer);
	}
	http_reply_answer(request, &answer);
	json_object_put(body);
	answer_deinit(&answer);
}

static void handle_unregister(HttpRequest *request, CoreKind kind, Bytes name) {
	Answer answer = {};

	if (name.size)
		(void)core_unregister(request->core, &request->caller, kind, name, &answer);
	else
		(void)core_unregister_all(request->core, &request->caller, kind, &answer);
	http_reply_answer(request, &answer);
	answer_deinit(&answer);
}

bool http_shm_route(HttpRequest *request) {
	static const struct {
		const char *word;
		const char *method;
		void (*handle)(HttpRequest *request, CoreKind kind, Bytes name);
	} verbs[] = {
		{ "status", "GET", handle_status },
		{ "register", "POST", handle_register },
		{ "unregister", "POST", handle_unregister },
	};

	for (CoreKind kind = CORE_SYSTEM; kind <= CORE_CUDA; kind++) {
		const char *word = kind == CORE_SYSTEM ? "systemsharedmemory" : "cudasharedmemory";

		for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
			const char *const all[] = { "v2", word, verbs[i].word, NULL };
			const char *const one[] = { "v2", word, "region", "*", verbs[i].word, NULL };
			bool named = http_path_is(request, 0, one);

			if (!named && !http_path_is(request, 0, all))
				continue;
			if (http_method_is(request, verbs[i].method))
				verbs[i].handle(request, kind, named ? request->segments[3] : (Bytes){});
			return true;
		}
	}
	return false;
}
