# SPDX-License-Identifier: Apache-2.0

if WITH_GATEWAY
sbin_PROGRAMS += shmbroker-gateway
dist_man_MANS += \
	tools/gateway/shmbroker-gateway.8
endif
gateway_sources = \
	tools/gateway/budget.h \
	tools/gateway/access.c \
	tools/gateway/access.h \
	tools/gateway/answer.c \
	tools/gateway/answer.h \
	tools/gateway/core-region.c \
	tools/gateway/core.c \
	tools/gateway/core.h \
	tools/gateway/gateway.c \
	tools/gateway/gateway.h \
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
	tools/gateway/options.c \
	tools/gateway/options.def \
	tools/gateway/options.h \
	tools/gateway/text.c \
	tools/gateway/text.h
shmbroker_gateway_SOURCES = $(gateway_sources)
shmbroker_gateway_CPPFLAGS = $(AM_CPPFLAGS) $(EVENT_CFLAGS) $(JSONC_CFLAGS)
shmbroker_gateway_LDADD = libshmbroker.la $(EVENT_LIBS) $(JSONC_LIBS)
