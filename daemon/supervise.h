/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Supervisor: the parent of `shmbrokerd --supervise`, which is what a service manager is elsewhere. It runs the broker
 * as its child, starts it again whenever it ends, and keeps the file descriptors that the child stores by the
 * messages of notify.h. It has nothing to do with clients and reads none of their bytes.
 *
 * The child has one end of a SOCK_SEQPACKET socketpair, named by SHMBROKER_SUPERVISOR_FD and _PID. At its start it
 * gets each kept fd as one message "FDNAME=name\n", then "FDEND=1". After that its messages are read: READY=1,
 * RELOADING=1, STATUS=, WATCHDOG=1, FDSTORE=1 and FDSTOREREMOVE=1 with FDNAME=, BARRIER=1.
 */

#include "options.h"

/*
 * Runs until SIGTERM or SIGINT, or until the first broker ends with an error before it was ready. Returns the exit
 * status of the process, which is that of the last broker. @options were parsed from @argv.
 */
int supervisor_run(const Options *options, int argc, char **argv);
