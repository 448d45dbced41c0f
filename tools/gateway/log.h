/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The log: lines on the standard error, which the service manager stamps. Bytes that are not printable ASCII are replaced,
 * so that no peer writes lines of its own; no more than a few dozen lines a second, and a count of what was left out.
 */

void log_write(const char *format, ...) __attribute__((format(printf, 1, 2)));
