/* SPDX-License-Identifier: Apache-2.0 */

/* The methods about the server itself, and those of grpc.health.v1. */

#include <string.h>

#include "grpc.h"
#include "inference.pb-c.h"

static void server_live(GrpcRequest *request) {
	Inference__ServerLiveResponse response = INFERENCE__SERVER_LIVE_RESPONSE__INIT;

	response.live = core_live(request->core);
	grpc_reply(request, &response.base);
}

static void server_ready(GrpcRequest *request) {
	Inference__ServerReadyResponse response = INFERENCE__SERVER_READY_RESPONSE__INIT;

	response.ready = core_ready(request->core);
	grpc_reply(request, &response.base);
}

static void server_metadata(GrpcRequest *request) {
	Inference__ServerMetadataResponse response = INFERENCE__SERVER_METADATA_RESPONSE__INIT;
	CoreMetadata metadata;

	core_metadata(request->core, &metadata);
	response.name = (char *)metadata.name;
	response.version = (char *)metadata.version;
	response.extensions = (char **)metadata.extensions;
	while (metadata.extensions[response.n_extensions])
		response.n_extensions++;
	grpc_reply(request, &response.base);
}

/* of the server as a whole, or of the one service that there is */
static void health_check(GrpcRequest *request) {
	static const char service[] = "inference.GRPCInferenceService";
	const Inference__HealthCheckRequest *message = (const Inference__HealthCheckRequest *)request->message;
	Inference__HealthCheckResponse response = INFERENCE__HEALTH_CHECK_RESPONSE__INIT;
	Answer answer = {};

	if (message->service.len > 0 && (message->service.len != sizeof(service) - 1 ||
					 memcmp(message->service.data, service, sizeof(service) - 1) != 0)) {
		(void)answer_set(&answer, ANSWER_NOT_FOUND, "unknown service");
		grpc_reply_answer(request, &answer);
		return;
	}
	response.status = core_ready(request->core) ? INFERENCE__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
						    : INFERENCE__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
	grpc_reply(request, &response.base);
}

const GrpcMethod grpc_server_methods[] = {
	{ GRPC_SERVICE "ServerLive", &inference__server_live_request__descriptor, server_live, GRPC_METHOD_OPEN },
	{ GRPC_SERVICE "ServerReady", &inference__server_ready_request__descriptor, server_ready, GRPC_METHOD_OPEN },
	{ GRPC_SERVICE "ServerMetadata", &inference__server_metadata_request__descriptor, server_metadata, 0 },
	{ "/grpc.health.v1.Health/Check", &inference__health_check_request__descriptor, health_check,
	  GRPC_METHOD_OPEN },
	{},
};
