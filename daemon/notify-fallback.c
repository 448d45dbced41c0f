/* SPDX-License-Identifier: Apache-2.0 */

/* built without libsystemd: no service manager hands fds over; a supervisor's watchdog works */

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "notify.h"

/* a decimal number that is all of the variable; false when it is not set */
static bool read_number(const char *variable, unsigned long long *ret) {
	const char *text = getenv(variable);
	char *end;

	if (!text || *text < '0' || *text > '9')
		return false;
	errno = 0;
	*ret = strtoull(text, &end, 10);
	return !errno && !*end;
}

uint64_t notify_watchdog_interval_ns(void) {
	unsigned long long microseconds, pid;

	if (!read_number("WATCHDOG_USEC", &microseconds) || microseconds > UINT64_MAX / 1000)
		return 0;
	if (getenv("WATCHDOG_PID") && (!read_number("WATCHDOG_PID", &pid) || pid != (unsigned long long)getpid()))
		return 0;
	return microseconds * 1000 / 2;
}

int notify_manager_fds(NotifyFds *ret) {
	*ret = (NotifyFds){};
	return 0;
}
