/* SPDX-License-Identifier: Apache-2.0 */

/*
 * frame: a 4K frame of float32 from one process to another.
 *
 * The owner has written the frame where it keeps it; what is measured begins with telling the consumer and ends when
 * the owner has the consumer's answer, which is the sum of one value of each page: nobody can answer without the
 * frame, each of which has other values.
 *
 *	shm          one byte over a socket; the consumer takes a lease on the region, reads, and gives it back
 *	unix-stream  the bytes through a Unix stream socket into the consumer's buffer
 *	http         the bytes as the body of a POST over a kept-alive connection on loopback, the answer in its reply
 *
 * Buffers and mappings are made, and their pages touched, before the first sample; the sockets have the sizes that the
 * system gives. The consumer is another process on another CPU, if there is one.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "http.h"
#include "regions.h"

#define ROUNDS 40
#define ROUNDS_QUICK 3
#define REGION_NAME "bench.frame"
#define CHANNELS 3
#define VALUES (UINT64_C(3) * 2160 * 3840)
#define VALUES_QUICK (UINT64_C(3) * 216 * 384)
#define READY_BYTE 'f'

typedef struct Channel Channel;
typedef struct Consumer Consumer;
typedef struct Frame Frame;

enum {
	CHANNEL_SHM,
	CHANNEL_STREAM,
	CHANNEL_HTTP
};

struct Frame {
	float *values;
	uint64_t size;
	uint64_t step; /* values a page */
	uint32_t number;
	int fds[CHANNELS];
	pid_t consumer;
};

/* the data of a case */
struct Channel {
	Frame *frame;
	int fd;
};

struct Consumer {
	struct shmb_client *client;
	float *buffer;
	uint64_t size;
	int fds[CHANNELS];
};

static double sum_pages(const float *values, uint64_t size) {
	uint64_t step = (uint64_t)getpagesize() / sizeof(*values);
	double sum = 0;

	for (uint64_t i = 0; i < size / sizeof(*values); i += step)
		sum += *(const volatile float *)&values[i];
	return sum;
}

/* ---- sockets ---- */

static int listen_loopback(struct sockaddr_in *ret) {
	socklen_t length = sizeof(*ret);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	*ret = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	if (fd < 0 || bind(fd, (struct sockaddr *)ret, sizeof(*ret)) < 0 || listen(fd, 1) < 0 ||
	    getsockname(fd, (struct sockaddr *)ret, &length) < 0)
		bench_die("listening on loopback: %s", strerror(errno));
	return fd;
}

/* both ends of a TCP connection */
static void tcp_pair(int ret[2]) {
	struct sockaddr_in address;
	int listener = listen_loopback(&address), on = 1;

	ret[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (ret[0] < 0 || connect(ret[0], (struct sockaddr *)&address, sizeof(address)) < 0)
		bench_die("connecting on loopback: %s", strerror(errno));
	ret[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	if (ret[1] < 0)
		bench_die("accepting on loopback: %s", strerror(errno));
	(void)close(listener);
	(void)setsockopt(ret[0], IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	(void)setsockopt(ret[1], IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

/* ---- the consumer ---- */

static bool consume_shm(const Consumer *consumer, int fd) {
	struct shmb_lease lease;
	uint8_t byte;
	double sum;

	if (!http_receive_all(fd, &byte, sizeof(byte)))
		return false;
	check(shmb_client_get_memory_info(consumer->client, REGION_NAME, 0, SHMB_REST, SHMB_READ, &lease), REGION_NAME);
	sum = sum_pages(lease.address, lease.size);
	check(shmb_lease_release(&lease), REGION_NAME);
	http_send_all(fd, &sum, sizeof(sum), NULL, 0);
	return true;
}

static bool consume_stream(const Consumer *consumer, int fd) {
	double sum;

	if (!http_receive_all(fd, consumer->buffer, consumer->size))
		return false;
	sum = sum_pages(consumer->buffer, consumer->size);
	http_send_all(fd, &sum, sizeof(sum), NULL, 0);
	return true;
}

static bool consume_http(const Consumer *consumer, int fd) {
	char head[HTTP_HEAD_MAX], reply[256], text[64];
	size_t size, head_size = http_receive_head(fd, head, &size);
	uint64_t length;
	int n;

	if (!head_size)
		return false;
	if (strncmp(head, "POST /frame HTTP/1.1\r\n", 22))
		bench_die("not a POST of a frame: %.40s", head);
	length = http_content_length(head);
	if (length != consumer->size || !http_receive_body(fd, head, head_size, size, consumer->buffer, length))
		bench_die("a body that is no frame");
	(void)snprintf(text, sizeof(text), "%.17g", sum_pages(consumer->buffer, consumer->size));
	n = snprintf(reply, sizeof(reply),
		     "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %zu\r\n\r\n%s", strlen(text),
		     text);
	http_send_all(fd, reply, (size_t)n, NULL, 0);
	return true;
}

static bool (*const consume[CHANNELS])(const Consumer *consumer, int fd) = {
	[CHANNEL_SHM] = consume_shm,
	[CHANNEL_STREAM] = consume_stream,
	[CHANNEL_HTTP] = consume_http,
};

static void consumer_run(Consumer *consumer) {
	struct pollfd polls[CHANNELS];

	for (size_t i = 0; i < CHANNELS; ++i)
		polls[i] = (struct pollfd){ .fd = consumer->fds[i], .events = POLLIN };
	for (;;) {
		if (poll(polls, CHANNELS, -1) < 0 && errno != EINTR)
			bench_die("poll: %s", strerror(errno));
		for (size_t i = 0; i < CHANNELS; ++i)
			if (polls[i].revents && !consume[i](consumer, polls[i].fd))
				return;
	}
}

static float *memory_new(uint64_t size) {
	float *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (memory == MAP_FAILED)
		bench_die("%llu bytes of memory: %s", (unsigned long long)size, strerror(errno));
	return memory;
}

static _Noreturn void consumer_main(const Broker *broker, uint64_t size, const int fds[CHANNELS]) {
	Consumer consumer = { .size = size };

	(void)bench_pin(bench_n_cpus() > 1 ? 1 : 0);
	memcpy(consumer.fds, fds, sizeof(consumer.fds));
	consumer.client = client_new(broker, SHMB_ROLE_CONSUMER, 0);
	consumer.buffer = memory_new(size);
	consumer_run(&consumer);
	_exit(0);
}

/* ---- the owner ---- */

/* other values than before, in each page; returns their sum */
static double frame_draw(Frame *frame) {
	double sum = 0;

	frame->number++;
	for (uint64_t i = 0, page = 0; i < frame->size / sizeof(float); i += frame->step, ++page) {
		frame->values[i] = (float)((frame->number * 31 + page) % 8191);
		sum += frame->values[i];
	}
	return sum;
}

static void check_sum(double sum, double wanted, const char *channel) {
	if (sum < wanted || sum > wanted)
		bench_die("%s: the consumer has seen another frame", channel);
}

static uint64_t shm_run(void *data, uint64_t count) {
	const Channel *channel = data;
	uint64_t ns = 0, begin;

	for (uint64_t i = 0; i < count; ++i) {
		double wanted = frame_draw(channel->frame), sum;

		begin = bench_now_ns();
		http_send_all(channel->fd, &(char){ READY_BYTE }, 1, NULL, 0);
		if (!http_receive_all(channel->fd, &sum, sizeof(sum)))
			bench_die("shm: the consumer is gone");
		ns += bench_now_ns() - begin;
		check_sum(sum, wanted, "shm");
	}
	return ns;
}

static uint64_t stream_run(void *data, uint64_t count) {
	const Channel *channel = data;
	uint64_t ns = 0, begin;

	for (uint64_t i = 0; i < count; ++i) {
		double wanted = frame_draw(channel->frame), sum;

		begin = bench_now_ns();
		http_send_all(channel->fd, channel->frame->values, channel->frame->size, NULL, 0);
		if (!http_receive_all(channel->fd, &sum, sizeof(sum)))
			bench_die("unix-stream: the consumer is gone");
		ns += bench_now_ns() - begin;
		check_sum(sum, wanted, "unix-stream");
	}
	return ns;
}

static double http_post(int fd, const Frame *frame) {
	char head[HTTP_HEAD_MAX], body[64] = "";
	size_t size, head_size;
	uint64_t length;
	int n;

	n = snprintf(head, sizeof(head),
		     "POST /frame HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
		     "Content-Length: %llu\r\n\r\n",
		     (unsigned long long)frame->size);
	http_send_all(fd, head, (size_t)n, frame->values, frame->size);
	head_size = http_receive_head(fd, head, &size);
	if (!head_size || strncmp(head, "HTTP/1.1 200 ", 13))
		bench_die("http: not 200: %.40s", head_size ? head : "the end of the connection");
	length = http_content_length(head);
	if (length >= sizeof(body) || !http_receive_body(fd, head, head_size, size, body, length))
		bench_die("http: a reply of %llu bytes", (unsigned long long)length);
	return strtod(body, NULL);
}

static uint64_t http_run(void *data, uint64_t count) {
	const Channel *channel = data;
	uint64_t ns = 0, begin;

	for (uint64_t i = 0; i < count; ++i) {
		double wanted = frame_draw(channel->frame), sum;

		begin = bench_now_ns();
		sum = http_post(channel->fd, channel->frame);
		ns += bench_now_ns() - begin;
		check_sum(sum, wanted, "http");
	}
	return ns;
}

/* ---- the whole ---- */

static void frame_start_consumer(Frame *frame, const Broker *broker) {
	int pairs[CHANNELS][2], theirs[CHANNELS];
	pid_t parent = getpid();

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pairs[CHANNEL_SHM]) < 0 ||
	    socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pairs[CHANNEL_STREAM]) < 0)
		bench_die("socketpair: %s", strerror(errno));
	tcp_pair(pairs[CHANNEL_HTTP]);
	frame->consumer = fork();
	if (frame->consumer < 0)
		bench_die("fork: %s", strerror(errno));
	if (!frame->consumer) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(1);
		for (size_t i = 0; i < CHANNELS; ++i) {
			(void)close(pairs[i][0]);
			theirs[i] = pairs[i][1];
		}
		consumer_main(broker, frame->size, theirs);
	}
	for (size_t i = 0; i < CHANNELS; ++i) {
		(void)close(pairs[i][1]);
		frame->fds[i] = pairs[i][0];
	}
}

static void frame_measure(Frame *frame, Bench *bench) {
	static uint64_t (*const runs[CHANNELS])(void *data, uint64_t count) = {
		[CHANNEL_SHM] = shm_run,
		[CHANNEL_STREAM] = stream_run,
		[CHANNEL_HTTP] = http_run,
	};
	static const char *const names[CHANNELS] = { "shm", "unix-stream", "http" };
	static const char *const texts[CHANNELS] = {
		"a byte over a socket, then a lease",
		"into the consumer's buffer",
		"the body of a POST on loopback, kept alive",
	};
	BenchCase cases[CHANNELS];
	Channel channels[CHANNELS];

	for (size_t i = 0; i < CHANNELS; ++i) {
		channels[i] = (Channel){ .frame = frame, .fd = frame->fds[i] };
		cases[i] = (BenchCase){
			.row = { .n = frame->size, .threads = 1, .unit = "ms" },
			.run = runs[i],
			.data = &channels[i],
			.baseline = i == CHANNEL_STREAM ? -1 : CHANNEL_STREAM,
			.sample_ns = UINT64_MAX,
		};
		(void)snprintf(cases[i].row.name, sizeof(cases[i].row.name), "%s", names[i]);
		(void)snprintf(cases[i].row.detail, sizeof(cases[i].row.detail), "%s frame of float32, %s",
			       bench->quick ? "1x3x216x384" : "1x3x2160x3840", texts[i]);
		/* the first frame maps and grows what the others find */
		(void)runs[i](&channels[i], 1);
	}
	bench_measure(bench, cases, CHANNELS, bench->quick ? ROUNDS_QUICK : ROUNDS);
}

static int frame_run(Bench *bench) {
	struct shmb_region_options options = {
		.struct_size = sizeof(options),
		.flags = SHMB_REGION_OPT_POPULATE,
	};
	Frame frame = { .step = (uint64_t)getpagesize() / sizeof(float) };
	struct shmb_client *owner;
	struct shmb_region *region;
	Broker broker;
	int status;

	frame.size = (bench->quick ? VALUES_QUICK : VALUES) * sizeof(float);
	(void)broker_start(bench, &broker, "shared_uid = yes\nfair_share = no\n", "auto", -1);
	frame_start_consumer(&frame, &broker);
	(void)bench_pin(0);
	owner = client_new(&broker, SHMB_ROLE_OWNER, 0);
	check(shmb_region_create(owner, REGION_NAME, frame.size, &options, &region), REGION_NAME);
	frame.values = shmb_region_get_data(region);
	frame_measure(&frame, bench);
	for (size_t i = 0; i < CHANNELS; ++i)
		(void)close(frame.fds[i]);
	if (waitpid(frame.consumer, &status, 0) < 0 || status)
		bench_die("the consumer has failed");
	shmb_region_free(region);
	shmb_client_free(owner);
	broker_stop(&broker);
	return 0;
}

const BenchCommand bench_frame = {
	.name = "frame",
	.help = "a 4K frame from owner to consumer, against a Unix stream socket and an HTTP body",
	.run = frame_run,
};
