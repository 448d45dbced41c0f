/* SPDX-License-Identifier: Apache-2.0 */

#include "log.h"

#include <ctype.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <syslog.h>
#include <time.h>
#include <unistd.h>

#define LIMIT_UIDS 64 /* uids whose limits are remembered, the one unheard of longest goes first */
#define FIELDS_MAX 24
#define IDENTIFIER "shmbrokerd"

typedef struct LogLimit {
	uint32_t uid;
	uint64_t begin_ns;   /* of the interval */
	uint32_t n;	     /* lines in this interval */
	uint64_t suppressed; /* lines that were not written since the last one that was */
} LogLimit;

typedef struct Log {
	bool journal;
	bool prefix; /* "<6>", for a manager that reads stderr */
	uint64_t (*now_ns)(void);
	uint64_t suppressed;
	uint64_t dropped;
	uint64_t all_begin_ns;
	uint32_t all_n;
	size_t n_limits;
	LogLimit limits[LIMIT_UIDS];
} Log;

static const struct {
	const char *name;
	const char *id;
	const char *meaning;
	int level;
} messages[] = {
#define LOG_MESSAGE(_NAME, _id, _level, _meaning) [LOG_##_NAME] = { #_NAME, _id, _meaning, LOG_##_level },
#include "messages-log.def"
#undef LOG_MESSAGE
};

static uint64_t monotonic_ns(void) {
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* one for the process, as stderr is */
static Log the_log = { .prefix = true, .now_ns = monotonic_ns };

const char *log_message_name(LogId id) {
	return messages[id].name;
}

const char *log_message_id(LogId id) {
	return messages[id].id;
}

const char *log_message_meaning(LogId id) {
	return messages[id].meaning;
}

int log_message_level(LogId id) {
	return messages[id].level;
}

uint64_t log_suppressed_total(void) {
	return the_log.suppressed;
}

uint64_t log_dropped_total(void) {
	return the_log.dropped;
}

void log_set_clock(uint64_t (*now_ns)(void)) {
	the_log.now_ns = now_ns ?: monotonic_ns;
}

/* $JOURNAL_STREAM is "DEVICE:INODE" of what the service manager has connected; stderr may have been redirected since */
static bool stderr_is_journal(void) {
	const char *text = getenv("JOURNAL_STREAM");
	unsigned long long device, inode;
	struct stat status;
	char rest;

	return text && sscanf(text, "%llu:%llu%c", &device, &inode, &rest) == 2 && !fstat(STDERR_FILENO, &status) &&
	       status.st_dev == device && status.st_ino == inode;
}

void log_init(LogTarget target) {
	the_log.journal =
		(target == LOG_TARGET_JOURNAL || (target == LOG_TARGET_AUTO && stderr_is_journal())) && !journal_open();
	the_log.prefix = !isatty(STDERR_FILENO);
}

/* ---- limits ---- */

static LogLimit *limit_find(uint32_t uid, uint64_t now) {
	LogLimit *oldest = the_log.limits;

	for (size_t i = 0; i < the_log.n_limits; ++i) {
		LogLimit *limit = &the_log.limits[i];

		if (limit->uid == uid)
			return limit;
		if (limit->begin_ns < oldest->begin_ns)
			oldest = limit;
	}
	if (the_log.n_limits < LIMIT_UIDS)
		oldest = &the_log.limits[the_log.n_limits++];
	*oldest = (LogLimit){ .uid = uid, .begin_ns = now };
	return oldest;
}

/* may @uid write a line now? then also how many it could not */
static bool limit_admits(uint32_t uid, uint64_t *ret_suppressed) {
	uint64_t now = the_log.now_ns();
	LogLimit *limit = limit_find(uid, now);

	if (now - limit->begin_ns >= LOG_INTERVAL_NS) {
		limit->begin_ns = now;
		limit->n = 0;
	}
	if (now - the_log.all_begin_ns >= LOG_INTERVAL_NS) {
		the_log.all_begin_ns = now;
		the_log.all_n = 0;
	}
	if (limit->n >= LOG_BURST || the_log.all_n >= LOG_BURST_ALL) {
		limit->suppressed++;
		the_log.suppressed++;
		return false;
	}
	limit->n++;
	the_log.all_n++;
	*ret_suppressed = limit->suppressed;
	limit->suppressed = 0;
	return true;
}

/* ---- writing ---- */

static void write_stderr(LogId id, const char *text) {
	struct pollfd poll_fd = { .fd = STDERR_FILENO, .events = POLLOUT };
	char prefix[8] = "";
	struct iovec parts[] = {
		{ .iov_base = prefix },
		{ .iov_base = (char *)IDENTIFIER ": ", .iov_len = sizeof(IDENTIFIER ": ") - 1 },
		{ .iov_base = (char *)text, .iov_len = strlen(text) },
		{ .iov_base = (char *)"\n", .iov_len = 1 },
	};
	ssize_t r;

	if (the_log.prefix)
		parts[0].iov_len = (size_t)snprintf(prefix, sizeof(prefix), "<%d>", messages[id].level);
	/* A pipe that is writable has room for PIPE_BUF bytes, more than a line. Without a reader it would raise SIGPIPE. */
	if (poll(&poll_fd, 1, 0) <= 0 || poll_fd.revents != POLLOUT) {
		the_log.dropped++;
		return;
	}
	do {
		r = writev(STDERR_FILENO, parts, sizeof(parts) / sizeof(*parts));
	} while (r < 0 && errno == EINTR);
	if (r < 0)
		the_log.dropped++;
}

static bool write_journal(LogId id, uint32_t uid, const char *fields, const char *text) {
	char message[LOG_LINE_MAX + 16], priority[16], message_id[48], name[48], uid_field[32];
	struct iovec all[FIELDS_MAX];
	int n = 0;

	(void)snprintf(message, sizeof(message), "MESSAGE=%s", text);
	(void)snprintf(priority, sizeof(priority), "PRIORITY=%d", messages[id].level);
	(void)snprintf(message_id, sizeof(message_id), "MESSAGE_ID=%s", messages[id].id);
	(void)snprintf(name, sizeof(name), "SHMBROKER_EVENT=%s", messages[id].name);
	(void)snprintf(uid_field, sizeof(uid_field), "SHMBROKER_UID=%u", uid);
	for (char **field = (char *[]){ message, priority, message_id, name, (char *)"SYSLOG_IDENTIFIER=" IDENTIFIER,
					uid == LOG_NO_UID ? NULL : uid_field, NULL };
	     *field; ++field)
		all[n++] = (struct iovec){ .iov_base = *field, .iov_len = strlen(*field) };
	while (fields && *fields && n < FIELDS_MAX) {
		size_t length = strcspn(fields, "\n");

		if (length)
			all[n++] = (struct iovec){ .iov_base = (char *)fields, .iov_len = length };
		fields += length;
		fields += *fields == '\n';
	}
	return !journal_send(all, n);
}

void log_write(LogId id, uint32_t uid, const char *fields, const char *format, ...) {
	int saved = errno;
	char text[LOG_LINE_MAX];
	uint64_t suppressed = 0;
	size_t length;
	va_list arguments;
	int r;

	if (uid != LOG_NO_UID && !limit_admits(uid, &suppressed))
		return;
	/* %m of @format means the caller's */
	errno = saved;
	va_start(arguments, format);
	r = vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	length = r < 0 ? 0 : (size_t)r;
	/* room for the count, also behind a line that was cut */
	if (length > sizeof(text) - 48)
		length = sizeof(text) - 48;
	text[length] = 0;
	if (suppressed)
		(void)snprintf(text + length, sizeof(text) - length, " (%llu suppressed)",
			       (unsigned long long)suppressed);
	for (char *p = text; *p; ++p)
		if (iscntrl((unsigned char)*p))
			*p = '?';
	if (!the_log.journal || !write_journal(id, uid, fields, text))
		write_stderr(id, text);
	errno = saved;
}
