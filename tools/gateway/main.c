/* SPDX-License-Identifier: Apache-2.0 */

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway.h"

/* large pieces of memory go back at once; glibc would keep them the sooner the larger they are */
#define KEPT_MAX (128 * 1024)

int main(int argc, char **argv) {
	Gateway gateway = {};
	Options options;
	int r;

	(void)mallopt(M_MMAP_THRESHOLD, KEPT_MAX);
	(void)mallopt(M_TRIM_THRESHOLD, KEPT_MAX);
	r = options_parse(&options, argc, argv);
	if (r != OPTIONS_RUN)
		return r;
	r = gateway_init(&gateway, &options);
	if (!r)
		r = gateway_run(&gateway);
	else
		fprintf(stderr, "shmbroker-gateway: did not start: %s\n", strerror(-r));
	gateway_deinit(&gateway);
	return r ? EXIT_FAILURE : EXIT_SUCCESS;
}
