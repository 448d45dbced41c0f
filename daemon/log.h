/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Log: lines for the administrator, each one of a message in messages-log.def with a stable id.
 *
 * They go to the journal with structured fields when stderr is the journal, else to stderr. Writing never fails and
 * never waits for a slow reader: what cannot be taken at once is dropped and counted. Lines that a peer can cause
 * are limited per uid; the next one that passes says how many were suppressed.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define LOG_NO_UID UINT32_MAX /* not caused by a peer, never limited */
#define LOG_BURST 10	      /* lines for each uid ... */
#define LOG_BURST_ALL 200     /* ... and for all uids together */
#define LOG_INTERVAL_NS UINT64_C(5000000000)
#define LOG_LINE_MAX 2048 /* bytes of a line, longer ones are cut */

typedef enum LogId {
#define LOG_MESSAGE(_NAME, _id, _level, _meaning) LOG_##_NAME,
#include "messages-log.def"
#undef LOG_MESSAGE
	_LOG_ID_N,
} LogId;

typedef enum LogTarget {
	LOG_TARGET_AUTO, /* the journal if stderr is connected to it */
	LOG_TARGET_STDERR,
	LOG_TARGET_JOURNAL,
} LogTarget;

/* Chooses the target. Before, and where there is no journal, lines go to stderr. */
void log_init(LogTarget target);
/*
 * Writes a line. @uid is that of the peer which caused it, or LOG_NO_UID. @fields are further fields for the journal,
 * "KEY=value" each, separated by newlines, or NULL; the level, the id and SHMBROKER_UID are added. Control characters
 * of the text are replaced, those of the fields are the caller's business.
 */
void log_write(LogId id, uint32_t uid, const char *fields, const char *format, ...)
	__attribute__((__format__(__printf__, 4, 5)));
/* lines that were not written because their uid had too many */
uint64_t log_suppressed_total(void);
/* lines that nobody took */
uint64_t log_dropped_total(void);

const char *log_message_name(LogId id);
/* 32 hexadecimal digits */
const char *log_message_id(LogId id);
const char *log_message_meaning(LogId id);
int log_message_level(LogId id);

/* for tests: the clock of the limit, in nanoseconds; NULL for CLOCK_MONOTONIC */
void log_set_clock(uint64_t (*now_ns)(void));

/* journal.c, or journal-fallback.c: sends fields to the journal. Returns 0, -EAGAIN when it is busy, or -errno. */
int journal_open(void);
int journal_send(const struct iovec *fields, int n_fields);
