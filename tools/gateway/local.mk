# SPDX-License-Identifier: Apache-2.0

if WITH_GATEWAY
sbin_PROGRAMS += shmbroker-gateway
dist_man_MANS += \
	tools/gateway/shmbroker-gateway.8
endif
gateway_sources = \
	tools/gateway/access.c \
	tools/gateway/access.h \
	tools/gateway/answer.c \
	tools/gateway/answer.h \
	tools/gateway/clock.h \
	tools/gateway/core-entry.c \
	tools/gateway/core-entry.h \
	tools/gateway/core-key.c \
	tools/gateway/core-key.h \
	tools/gateway/core-metrics.c \
	tools/gateway/core-metrics.h \
	tools/gateway/core-region.c \
	tools/gateway/core.c \
	tools/gateway/core.h \
	tools/gateway/devices.c \
	tools/gateway/devices.h \
	tools/gateway/gateway.c \
	tools/gateway/gateway.h \
	tools/gateway/dashboard.c \
	tools/gateway/dashboard.h \
	tools/gateway/grpc-door.h \
	tools/gateway/grpc-method.c \
	tools/gateway/grpc-server.c \
	tools/gateway/grpc-shm.c \
	tools/gateway/grpc.c \
	tools/gateway/grpc.h \
	tools/gateway/http-connection.c \
	tools/gateway/http-connection.h \
	tools/gateway/http-parse.c \
	tools/gateway/http-parse.h \
	tools/gateway/http-reply.c \
	tools/gateway/http-server.c \
	tools/gateway/http-shm.c \
	tools/gateway/http.c \
	tools/gateway/http.h \
	tools/gateway/json.c \
	tools/gateway/json.h \
	tools/gateway/key.c \
	tools/gateway/key.h \
	tools/gateway/link.c \
	tools/gateway/link.h \
	tools/gateway/listen.c \
	tools/gateway/listen.h \
	tools/gateway/log.c \
	tools/gateway/log.h \
	tools/gateway/main.c \
	tools/gateway/metrics.c \
	tools/gateway/metrics.h \
	tools/gateway/options.c \
	tools/gateway/options.def \
	tools/gateway/options.h \
	tools/gateway/text.c \
	tools/gateway/text.h \
	tools/gateway/turns.c \
	tools/gateway/turns.h
# the reference models, and inference
infer_sources = \
	tools/gateway/classify.c \
	tools/gateway/classify.h \
	tools/gateway/datatype.c \
	tools/gateway/datatype.h \
	tools/gateway/grpc-infer.c \
	tools/gateway/grpc-models.c \
	tools/gateway/http-coding.c \
	tools/gateway/http-coding.h \
	tools/gateway/http-infer.c \
	tools/gateway/http-infer.h \
	tools/gateway/http-models.c \
	tools/gateway/infer.c \
	tools/gateway/infer.h \
	tools/gateway/json-read.c \
	tools/gateway/json-read.h \
	tools/gateway/json-tensor.c \
	tools/gateway/json-tensor.h \
	tools/gateway/models.c \
	tools/gateway/models.h \
	tools/gateway/tensor-memory.c \
	tools/gateway/tensor-memory.h
shmbroker_gateway_SOURCES = $(gateway_sources) $(infer_sources) $(grpc_session_sources)
nodist_shmbroker_gateway_SOURCES = $(grpc_messages) tools/gateway/dashboard-page.c
shmbroker_gateway_CPPFLAGS = $(AM_CPPFLAGS) -Itools/gateway -I$(srcdir)/tools/gateway $(EVENT_CFLAGS) $(JSONC_CFLAGS) $(NGHTTP2_CFLAGS) \
	$(PROTOBUF_C_CFLAGS)
shmbroker_gateway_LDADD = libshmbroker.la $(EVENT_LIBS) $(JSONC_LIBS) $(NGHTTP2_LIBS) $(PROTOBUF_C_LIBS) $(ZLIB_LIBS)

# the gRPC session needs no socket, and the unit tests are linked with it alone; the messages are compiled from
# inference.proto
grpc_session_sources = \
	tools/gateway/budget.h \
	tools/gateway/grpc-call.c \
	tools/gateway/grpc-session-private.h \
	tools/gateway/grpc-session.c \
	tools/gateway/grpc-session.h \
	tools/gateway/grpc-wire.c \
	tools/gateway/grpc-wire.h
EXTRA_DIST += tools/gateway/inference.proto
grpc_messages = \
	tools/gateway/inference.pb-c.c \
	tools/gateway/inference.pb-c.h
CLEANFILES += $(grpc_messages)

tools/gateway/inference.pb-c.c: tools/gateway/inference.proto
	$(AM_V_GEN)$(MKDIR_P) tools/gateway && \
		$(PROTOC_C) -I$(srcdir)/tools/gateway --c_out=tools/gateway inference.proto
tools/gateway/inference.pb-c.h: tools/gateway/inference.pb-c.c
# automake learns of what includes the header only when that was compiled once
$(patsubst tools/gateway/%.c,tools/gateway/shmbroker_gateway-%.$(OBJEXT),$(filter tools/gateway/grpc-%.c,$(gateway_sources) $(infer_sources))): \
	tools/gateway/inference.pb-c.h

# the page is in the program
EXTRA_DIST += tools/gateway/dashboard.html
CLEANFILES += tools/gateway/dashboard-page.c
tools/gateway/dashboard-page.c: tools/gateway/dashboard.html
	$(AM_V_GEN)$(MKDIR_P) tools/gateway && { \
		echo '#include "dashboard.h"'; \
		echo 'const unsigned char dashboard_page[] = {'; \
		od -An -v -tx1 $(srcdir)/tools/gateway/dashboard.html | sed 's/ *\([0-9a-f][0-9a-f]\)/0x\1,/g'; \
		echo '};'; \
		echo 'const size_t dashboard_page_size = sizeof(dashboard_page);'; \
	} >$@.tmp && mv $@.tmp $@

# the HTTP door without a core behind it
http_door_sources = \
	tools/gateway/access.c \
	tools/gateway/answer.c \
	tools/gateway/http-connection.c \
	tools/gateway/http-parse.c \
	tools/gateway/http-reply.c \
	tools/gateway/http-server.c \
	tools/gateway/http-shm.c \
	tools/gateway/http.c \
	tools/gateway/json.c \
	tools/gateway/log.c \
	tools/gateway/text.c \
	tools/gateway/turns.c
