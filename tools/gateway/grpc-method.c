/* SPDX-License-Identifier: Apache-2.0 */

/* From a call's bytes to a method, and from its response to bytes. */

#include <stdlib.h>
#include <string.h>

#include "grpc-door.h"
#include "inference.pb-c.h"

/* a table that is added here is served */
static const GrpcMethod *const tables[] = {
	grpc_server_methods,
	grpc_shm_methods,
	grpc_models_methods,
	grpc_infer_methods,
};

const GrpcMethod *grpc_method_find(const char *path) {
	for (size_t i = 0; i < sizeof(tables) / sizeof(*tables); i++) {
		for (const GrpcMethod *method = tables[i]; method->path; method++) {
			if (strcmp(method->path, path) == 0)
				return method;
		}
	}
	return NULL;
}

/*
 * What a message becomes in memory can be many times as long as the message: two bytes make a struct. All of it is
 * taken from the budget, with its size before each block.
 */
typedef union Block {
	size_t size;
	max_align_t align;
} Block;

static void *message_alloc(void *userdata, size_t size) {
	Budget *budget = userdata;
	Block *block;

	if (size > SIZE_MAX - sizeof(*block) || !budget_take(budget, size + sizeof(*block)))
		return NULL;
	block = malloc(size + sizeof(*block));
	if (!block) {
		budget_give(budget, size + sizeof(*block));
		return NULL;
	}
	block->size = size;
	return block + 1;
}

static void message_free(void *userdata, void *pointer) {
	Block *block;

	if (!pointer)
		return;
	block = (Block *)pointer - 1;
	budget_give(userdata, block->size + sizeof(*block));
	free(block);
}

static GrpcRequest *request_free(GrpcRequest *request) {
	if (request->message)
		protobuf_c_message_free_unpacked(request->message, &request->allocator);
	free(request);
	return NULL;
}

/* ends the request, and the call with it */
static void request_finish(GrpcRequest *request, int status, const char *text) {
	Grpc *grpc = request->grpc;
	GrpcCall *call = request->call;

	grpc->counters.replies[status]++;
	/* before the request goes, which the text may be of */
	grpc_call_finish(call, status, text, strlen(text));
	grpc_connection_wake(call->session);
	request_free(request);
}

/* the request cannot be given to its method */
static void request_refuse(GrpcRequest *request, Answer *answer) {
	request_finish(request, answer_code_to_grpc(answer->code), answer_text(answer));
	answer_deinit(answer);
}

/* @status is what is counted: in a stream it is not that of the call */
static void request_send(GrpcRequest *request, const ProtobufCMessage *response, int status) {
	uint8_t *bytes = grpc_call_reply(request->call, response ? protobuf_c_message_get_packed_size(response) : 0);

	if (!bytes) {
		request_finish(request, GRPC_RESOURCE_EXHAUSTED,
			       "the gateway holds as many bytes of messages as it may");
		return;
	}
	if (response)
		(void)protobuf_c_message_pack(response, bytes);
	if (!(request->method->flags & GRPC_METHOD_STREAM)) {
		request_finish(request, GRPC_OK, "");
		return;
	}
	request->grpc->counters.replies[status]++;
	grpc_call_next(request->call);
	grpc_connection_wake(request->call->session);
	request_free(request);
}

void grpc_reply(GrpcRequest *request, const ProtobufCMessage *response) {
	Inference__ModelStreamInferResponse part = INFERENCE__MODEL_STREAM_INFER_RESPONSE__INIT;

	if (request->method->flags & GRPC_METHOD_STREAM) {
		part.infer_response = (Inference__ModelInferResponse *)response;
		response = &part.base;
	}
	request_send(request, response, GRPC_OK);
}

void grpc_reply_answer(GrpcRequest *request, Answer *answer) {
	Inference__ModelStreamInferResponse part = INFERENCE__MODEL_STREAM_INFER_RESPONSE__INIT;
	int status = answer_code_to_grpc(answer->code);

	if (status == GRPC_OK) {
		/* the messages of a success without content are empty */
		request_send(request, NULL, status);
	} else if (request->method->flags & GRPC_METHOD_STREAM) {
		part.error_message = grpc_binary(answer_text(answer));
		request_send(request, &part.base, status);
	} else {
		request_finish(request, status, answer_text(answer));
	}
	answer_deinit(answer);
}

/* whether the caller may call this method; answers it if not */
static bool request_check_access(GrpcRequest *request) {
	Answer answer = {};

	if (access_check(request->grpc->access, &request->caller, request->call->authorization, &answer) != ANSWER_OK &&
	    !(request->method->flags & GRPC_METHOD_OPEN)) {
		request_refuse(request, &answer);
		return false;
	}
	answer_deinit(&answer);
	request->caller.everything = request->caller.admin && request->call->everything;
	return true;
}

static bool request_unpack(GrpcRequest *request) {
	const GrpcCall *call = request->call;
	uint64_t refused = request->grpc->budget->refused;
	Answer answer = {};

	request->message = protobuf_c_message_unpack(request->method->type, &request->allocator, call->message_size,
						     call->message);
	if (request->message)
		return true;
	request->grpc->counters.refused_messages++;
	if (request->grpc->budget->refused != refused)
		(void)answer_set(&answer, ANSWER_RESOURCE_EXHAUSTED,
				 "the gateway holds as many bytes of messages as it may");
	else
		(void)answer_set(&answer, ANSWER_INTERNAL, "the message is no %s", request->method->type->short_name);
	request_refuse(request, &answer);
	return false;
}

void grpc_request_begin(Grpc *grpc, const Caller *caller, GrpcCall *call) {
	GrpcRequest *request = calloc(1, sizeof(*request));
	static const char no_memory[] = "the gateway is out of memory";

	grpc->counters.calls++;
	if (!request) {
		grpc_call_finish(call, GRPC_RESOURCE_EXHAUSTED, no_memory, sizeof(no_memory) - 1);
		return;
	}
	*request = (GrpcRequest){
		.grpc = grpc,
		.core = grpc->core,
		.options = grpc->options,
		.method = grpc_method_find(call->path),
		.call = call,
		.caller = *caller,
		.allocator = { message_alloc, message_free, grpc->budget },
	};
	call->userdata = request;
	if (request_check_access(request) && request_unpack(request))
		request->method->call(request);
}

void grpc_request_cancel(GrpcCall *call) {
	GrpcRequest *request = call->userdata;

	request->grpc->counters.cancelled++;
	if (request->cancelled)
		request->cancelled(request);
	request_free(request);
}
