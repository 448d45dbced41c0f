/* SPDX-License-Identifier: Apache-2.0 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway.h"

int main(int argc, char **argv) {
	Gateway gateway = {};
	Options options;
	int r;

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
