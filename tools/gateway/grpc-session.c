/* SPDX-License-Identifier: Apache-2.0 */

#include "grpc-session-private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
	OUTPUT_ENOUGH = 16384,	/* gathered before it is sent */
	OUTPUT_QUEUE_MAX = 256, /* frames that wait for a peer that does not read */
	OUTBOUND_ACKS_MAX = 1000,
	SETTINGS_MAX = 32,
};

const GrpcLimits grpc_limits_default = {
	.connection_bytes = 1 << 20,
	.share_bytes = BUDGET_SHARE,
	.library_bytes = 1 << 20,
	.streams = 32,
	.metadata_bytes = 16384,
	.preface_ms = 10000,
	.request_ms = 10000,
	.idle_ms = 300000,
	.resets = { .burst = 200, .rate = 100 },
	.nuisances = { .burst = 1000, .rate = 200 },
};

/* --- what is bounded */

bool grpc_session_charge(GrpcSession *session, size_t size) {
	Budget *budget = session->budget;
	uint64_t room = budget_room(budget, budget->limit / 4, session->held, session->limits->share_bytes);

	if (!budget_take_of(budget, room, size))
		return false;
	session->held += size;
	return true;
}

void grpc_session_refund(GrpcSession *session, size_t size) {
	budget_give(session->budget, size);
	session->held -= size;
}

/* takes a token; false when there is none */
static bool bucket_take(Bucket *bucket, GrpcRate rate, uint64_t now) {
	uint64_t full = (uint64_t)rate.burst * 1000;

	bucket->thousandths += (now - bucket->filled) * rate.rate;
	bucket->filled = now;
	if (bucket->thousandths > full)
		bucket->thousandths = full;
	if (bucket->thousandths < 1000)
		return false;
	bucket->thousandths -= 1000;
	return true;
}

/* nghttp2's memory, with its size before each block */
typedef union Block {
	size_t size;
	max_align_t align;
} Block;

static void *library_realloc(void *pointer, size_t size, void *userdata) {
	GrpcSession *session = userdata;
	Block *block = pointer ? (Block *)pointer - 1 : NULL;
	size_t old = block ? block->size : 0;

	if (size > session->limits->library_bytes - (session->library_bytes - old))
		return NULL;
	block = realloc(block, sizeof(*block) + size);
	if (!block)
		return NULL;
	block->size = size;
	session->library_bytes += size - old;
	return block + 1;
}

static void *library_malloc(size_t size, void *userdata) {
	return library_realloc(NULL, size, userdata);
}

static void *library_calloc(size_t n, size_t size, void *userdata) {
	void *pointer;

	if (size > 0 && n > SIZE_MAX / 2 / size)
		return NULL;
	pointer = library_realloc(NULL, n * size, userdata);
	if (pointer)
		memset(pointer, 0, n * size);
	return pointer;
}

static void library_free(void *pointer, void *userdata) {
	GrpcSession *session = userdata;
	Block *block;

	if (!pointer)
		return;
	block = (Block *)pointer - 1;
	session->library_bytes -= block->size;
	free(block);
}

/* the client asks for more work than it has any use for */
static void calm_down(GrpcSession *session) {
	if (session->ending)
		return;
	(void)nghttp2_session_terminate_session(session->http2, NGHTTP2_ENHANCE_YOUR_CALM);
	session->ending = true;
}

/* --- callbacks of nghttp2; what they must not do, and what calls handlers, is left to grpc_session_run() */

static GrpcCall *call_of(nghttp2_session *http2, int32_t stream) {
	return stream == 0 ? NULL : nghttp2_session_get_stream_user_data(http2, stream);
}

static int on_begin_frame(nghttp2_session *http2, const nghttp2_frame_hd *head, void *userdata) {
	GrpcSession *session = userdata;
	bool nuisance;

	(void)http2;
	switch (head->type) {
	case NGHTTP2_DATA:
		nuisance = head->length == 0 && !(head->flags & NGHTTP2_FLAG_END_STREAM);
		break;
	case NGHTTP2_HEADERS:
	case NGHTTP2_CONTINUATION:
	case NGHTTP2_WINDOW_UPDATE:
		nuisance = false;
		break;
	case NGHTTP2_RST_STREAM:
		nuisance = false;
		if (!bucket_take(&session->resets, session->limits->resets, session->now))
			calm_down(session);
		break;
	default:
		nuisance = true;
	}
	if (nuisance && !bucket_take(&session->nuisances, session->limits->nuisances, session->now))
		calm_down(session);
	return 0;
}

static int on_begin_headers(nghttp2_session *http2, const nghttp2_frame *frame, void *userdata) {
	GrpcSession *session = userdata;
	GrpcCall *call;

	if (frame->headers.cat != NGHTTP2_HCAT_REQUEST)
		return 0;
	call = grpc_call_new(session, frame->hd.stream_id);
	if (!call)
		return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
	(void)nghttp2_session_set_stream_user_data(http2, frame->hd.stream_id, call);
	return 0;
}

static int on_header(nghttp2_session *http2, const nghttp2_frame *frame, const uint8_t *name, size_t name_size,
		     const uint8_t *value, size_t value_size, uint8_t flags, void *userdata) {
	GrpcSession *session = userdata;
	GrpcCall *call = call_of(http2, frame->hd.stream_id);
	size_t size = name_size + value_size + 32;

	(void)flags;
	/* trailers have nothing that we read, and a call may have been given up before its headers were all there */
	if (!call || frame->headers.cat != NGHTTP2_HCAT_REQUEST || call->state != GRPC_CALL_RECEIVING)
		return 0;
	call->metadata_size += (uint32_t)size;
	if (call->metadata_size > session->limits->metadata_bytes) {
		/* somewhat too much is answered, once it is all read; a bomb is not read, nor looked at */
		return call->metadata_size > 4 * session->limits->metadata_bytes ? NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
										 : 0;
	}
	grpc_call_take_field(call, (const char *)name, name_size, (const char *)value, value_size);
	return 0;
}

static int on_frame(nghttp2_session *http2, const nghttp2_frame *frame, void *userdata) {
	GrpcSession *session = userdata;
	GrpcCall *call;

	if (frame->hd.type == NGHTTP2_SETTINGS)
		session->preface_until = UINT64_MAX;
	if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA)
		return 0;
	call = call_of(http2, frame->hd.stream_id);
	if (!call)
		return 0;
	if (frame->hd.type == NGHTTP2_HEADERS && frame->headers.cat == NGHTTP2_HCAT_REQUEST)
		grpc_call_end_headers(call);
	if (frame->hd.flags & NGHTTP2_FLAG_END_STREAM)
		grpc_call_end_request(call);
	return 0;
}

static int on_data(nghttp2_session *http2, uint8_t flags, int32_t stream, const uint8_t *data, size_t size,
		   void *userdata) {
	GrpcCall *call = call_of(http2, stream);

	(void)flags;
	(void)userdata;
	(void)nghttp2_session_consume_connection(http2, size);
	if (!call) {
		(void)nghttp2_session_consume_stream(http2, stream, size);
		return 0;
	}
	call->unconsumed += size;
	grpc_call_take(call, data, size);
	grpc_call_consume(call);
	return 0;
}

static int on_stream_close(nghttp2_session *http2, int32_t stream, uint32_t error, void *userdata) {
	GrpcSession *session = userdata;
	GrpcCall *call = call_of(http2, stream);

	(void)error;
	if (!call)
		return 0;
	if (call->state == GRPC_CALL_HANDLED)
		session->handler->cancel(session->userdata, call);
	grpc_call_free(call);
	return 0;
}

static int on_frame_sent(nghttp2_session *http2, const nghttp2_frame *frame, void *userdata) {
	GrpcSession *session = userdata;
	int32_t stream = frame->hd.stream_id;
	GrpcCall *call;

	if (frame->hd.type == NGHTTP2_RST_STREAM && frame->rst_stream.error_code != NGHTTP2_NO_ERROR &&
	    !bucket_take(&session->resets, session->limits->resets, session->now))
		calm_down(session);
	if ((frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) ||
	    !(frame->hd.flags & NGHTTP2_FLAG_END_STREAM))
		return 0;
	/* answered before the request was all there: without this, a client goes on sending the rest of it */
	call = call_of(http2, stream);
	if (call && !call->request_complete)
		(void)nghttp2_submit_rst_stream(http2, NGHTTP2_FLAG_NONE, stream, NGHTTP2_NO_ERROR);
	return 0;
}

/* --- the session */

/* the first call that is to be handed over, NULL when there is none */
static GrpcCall *session_ready(const GrpcSession *session) {
	if (session->held_out >= session->limits->connection_bytes)
		return NULL;
	for (GrpcCall *call = session->first; call; call = call->next)
		if (grpc_call_is_ready(call))
			return call;
	return NULL;
}

static int make_http2(GrpcSession *session) {
	nghttp2_mem memory = {
		.mem_user_data = session,
		.malloc = library_malloc,
		.free = library_free,
		.calloc = library_calloc,
		.realloc = library_realloc,
	};
	nghttp2_session_callbacks *callbacks = NULL;
	nghttp2_option *option = NULL;
	int r = -ENOMEM;

	if (nghttp2_session_callbacks_new(&callbacks) != 0 || nghttp2_option_new(&option) != 0)
		goto out;
	nghttp2_session_callbacks_set_on_begin_frame_callback(callbacks, on_begin_frame);
	nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, on_begin_headers);
	nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
	nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, on_frame);
	nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
	nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_stream_close);
	nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, on_frame_sent);
	nghttp2_option_set_no_auto_window_update(option, 1);
	nghttp2_option_set_no_closed_streams(option, 1);
	nghttp2_option_set_max_outbound_ack(option, OUTBOUND_ACKS_MAX);
	nghttp2_option_set_max_settings(option, SETTINGS_MAX);
#ifdef HAVE_NGHTTP2_OPTION_SET_STREAM_RESET_RATE_LIMIT
	nghttp2_option_set_stream_reset_rate_limit(option, session->limits->resets.burst, session->limits->resets.rate);
#endif
	if (nghttp2_session_server_new3(&session->http2, callbacks, session, option, &memory) == 0)
		r = 0;
out:
	nghttp2_session_callbacks_del(callbacks);
	nghttp2_option_del(option);
	return r;
}

int grpc_session_new(GrpcSession **ret, const GrpcLimits *limits, Budget *budget, const GrpcHandler *handler,
		     void *userdata, uint64_t now) {
	const nghttp2_settings_entry settings[] = {
		{ NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, limits->streams },
		{ NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, GRPC_WINDOW },
		{ NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, limits->metadata_bytes },
	};
	GrpcSession *session = calloc(1, sizeof(*session));

	if (!session)
		return -ENOMEM;
	session->limits = limits;
	session->budget = budget;
	session->handler = handler;
	session->userdata = userdata;
	session->now = now;
	session->preface_until = now + limits->preface_ms;
	session->idle_since = now;
	session->resets = (Bucket){ (uint64_t)limits->resets.burst * 1000, now };
	session->nuisances = (Bucket){ (uint64_t)limits->nuisances.burst * 1000, now };
	if (make_http2(session) != 0 || nghttp2_submit_settings(session->http2, NGHTTP2_FLAG_NONE, settings,
								sizeof(settings) / sizeof(*settings)) != 0) {
		grpc_session_free(session);
		return -ENOMEM;
	}
	*ret = session;
	return 0;
}

GrpcSession *grpc_session_free(GrpcSession *session) {
	if (!session)
		return NULL;
	while (session->first) {
		GrpcCall *call = session->first;

		if (call->state == GRPC_CALL_HANDLED)
			session->handler->cancel(session->userdata, call);
		grpc_call_free(call);
	}
	if (session->http2)
		nghttp2_session_del(session->http2);
	free(session->output);
	free(session);
	return NULL;
}

bool grpc_session_receive(GrpcSession *session, const uint8_t *data, size_t size, uint64_t now) {
	ssize_t n;

	session->now = now;
	while (size > 0 && !session->ending) {
		n = nghttp2_session_mem_recv(session->http2, data, size);
		/* a flood, no HTTP/2 at all, or no memory: there is no way on */
		if (n < 0)
			session->ending = true;
		else {
			data += n;
			size -= (size_t)n;
		}
	}
	grpc_session_grant(session);
	return !session->ending;
}

/* gathers frames; false when there is no memory for them */
static bool session_gather(GrpcSession *session) {
	const uint8_t *data;
	ssize_t n;

	if (session->output_sent > 0) {
		session->output_size -= session->output_sent;
		memmove(session->output, session->output + session->output_sent, session->output_size);
		session->output_sent = 0;
	}
	while (session->output_size < OUTPUT_ENOUGH) {
		n = nghttp2_session_mem_send(session->http2, &data);
		if (n <= 0)
			return n == 0;
		if (session->output_size == 0)
			session->output_since = session->now;
		if (session->output_size + (size_t)n > session->output_capacity) {
			size_t capacity = session->output_size + (size_t)n;
			uint8_t *larger = realloc(session->output, capacity);

			if (!larger)
				return false;
			session->output = larger;
			session->output_capacity = capacity;
		}
		memcpy(session->output + session->output_size, data, (size_t)n);
		session->output_size += (size_t)n;
	}
	return true;
}

bool grpc_session_output(GrpcSession *session, const uint8_t **ret, size_t *ret_size) {
	if (!session_gather(session))
		session->ending = true;
	*ret = session->output;
	*ret_size = session->output_size;
	if (session->output_size > 0)
		return true;
	/* an idle connection costs no buffer */
	free(session->output);
	session->output = NULL;
	session->output_capacity = 0;
	*ret = NULL;
	return !session->ending &&
	       (nghttp2_session_want_read(session->http2) || nghttp2_session_want_write(session->http2));
}

void grpc_session_sent(GrpcSession *session, size_t size, uint64_t now) {
	session->now = now;
	session->output_sent += size;
	session->output_since = now;
	/* what was sent of replies makes room for the next calls */
	for (GrpcCall *call = session->first; call; call = call->next)
		if (call->out && call->out_sent == call->out_size)
			grpc_call_sent(call);
	grpc_session_grant(session);
}

bool grpc_session_is_ready(const GrpcSession *session) {
	return session_ready(session) != NULL;
}

bool grpc_session_run(GrpcSession *session, uint64_t now) {
	GrpcCall *call = session_ready(session);

	if (!call)
		return false;
	session->now = now;
	if (call->prefix[0] != 1 || grpc_call_inflate(call)) {
		call->state = GRPC_CALL_HANDLED;
		call->patience = UINT64_MAX;
		session->handler->call(session->userdata, call);
	}
	grpc_session_grant(session);
	return true;
}

bool grpc_session_wants_input(const GrpcSession *session) {
	return !session->ending && session->output_size - session->output_sent < OUTPUT_ENOUGH &&
	       nghttp2_session_get_outbound_queue_size(session->http2) < OUTPUT_QUEUE_MAX;
}

static uint64_t session_idle_until(const GrpcSession *session) {
	return session->n_calls == 0 ? session->idle_since + session->limits->idle_ms : UINT64_MAX;
}

static uint64_t session_output_until(const GrpcSession *session) {
	return session->output_size > session->output_sent ? session->output_since + session->limits->request_ms
							   : UINT64_MAX;
}

static uint64_t earlier(uint64_t a, uint64_t b) {
	return a < b ? a : b;
}

uint64_t grpc_session_deadline(const GrpcSession *session) {
	uint64_t until = session_output_until(session);

	/* what is left to do is to send what is there */
	if (session->ending)
		return until;
	until = earlier(until, earlier(session->preface_until, session_idle_until(session)));
	for (const GrpcCall *call = session->first; call; call = call->next)
		until = earlier(until, earlier(call->deadline, call->patience));
	return until;
}

bool grpc_session_tick(GrpcSession *session, uint64_t now) {
	session->now = now;
	if (now >= session->preface_until || now >= session_output_until(session)) {
		session->ending = true;
		return false;
	}
	if (session->ending)
		return true;
	for (GrpcCall *call = session->first; call; call = call->next) {
		if (now < earlier(call->deadline, call->patience))
			continue;
		if (call->state == GRPC_CALL_FINISHED) {
			/* a client that does not read its reply */
			call->patience = UINT64_MAX;
			(void)nghttp2_submit_rst_stream(session->http2, NGHTTP2_FLAG_NONE, call->stream,
							NGHTTP2_CANCEL);
		} else if (now >= call->deadline) {
			grpc_call_abort(call, GRPC_DEADLINE_EXCEEDED, "Deadline Exceeded");
		} else if (call->is_stream && call->prefix_size == 0) {
			grpc_call_abort(call, GRPC_UNAVAILABLE, "the stream was not used for long");
		} else {
			grpc_call_abort(call, GRPC_DEADLINE_EXCEEDED, "the request took too long to arrive");
		}
	}
	if (now >= session_idle_until(session)) {
		(void)nghttp2_session_terminate_session(session->http2, NGHTTP2_NO_ERROR);
		session->ending = true;
	}
	grpc_session_grant(session);
	return true;
}

void grpc_session_shutdown(GrpcSession *session) {
	for (GrpcCall *call = session->first; call; call = call->next)
		if (call->is_stream && call->state == GRPC_CALL_RECEIVING)
			grpc_call_abort(call, GRPC_UNAVAILABLE, "the gateway is stopping");
	(void)nghttp2_submit_goaway(session->http2, NGHTTP2_FLAG_NONE,
				    nghttp2_session_get_last_proc_stream_id(session->http2), NGHTTP2_NO_ERROR, NULL, 0);
}

size_t grpc_session_calls(const GrpcSession *session) {
	size_t n = 0;

	for (const GrpcCall *call = session->first; call; call = call->next)
		n += !call->is_stream || call->state != GRPC_CALL_RECEIVING || call->prefix_size > 0 || call->out;
	return n;
}

void *grpc_session_userdata(const GrpcSession *session) {
	return session->userdata;
}
