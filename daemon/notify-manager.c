/* SPDX-License-Identifier: Apache-2.0 */

/* what libsystemd reads from the environment */

#include <stdlib.h>
#include <string.h>
#include <systemd/sd-daemon.h>

#include "notify.h"
#include "wire/fd.h"

uint64_t notify_watchdog_interval_ns(void) {
	uint64_t microseconds;

	return sd_watchdog_enabled(0, &microseconds) > 0 ? microseconds * 1000 / 2 : 0;
}

int notify_manager_fds(NotifyFds *ret) {
	NotifyFds fds = {};
	char **names = NULL;
	int n = sd_listen_fds_with_names(1, &names), r = 0;

	if (n < 0)
		return n;
	for (int i = 0; i < n; ++i) {
		int fd = SD_LISTEN_FDS_START + i;

		if (r)
			(void)close_fd(fd);
		else
			r = notify_fds_add(&fds, fd, names[i], strlen(names[i]));
	}
	for (int i = 0; i < n; ++i)
		free(names[i]);
	free(names);
	if (r) {
		notify_fds_deinit(&fds);
		return r;
	}
	*ret = fds;
	return 0;
}
