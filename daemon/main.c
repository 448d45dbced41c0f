/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "broker.h"
#include "log.h"
#include "options.h"
#include "supervise.h"

int main(int argc, char **argv) {
	Options options;
	Config *config;
	Broker *broker;
	char *error = NULL;
	int r;

	r = options_parse(&options, argc, argv);
	if (r != OPTIONS_RUN)
		return r;
	if (options.supervise && !options.check_config)
		return supervisor_run(&options, argc, argv);
	log_init(LOG_TARGET_AUTO);
	r = config_load(&config, &options.paths, &error);
	if (r) {
		log_write(LOG_CONFIG_ERROR, LOG_NO_UID, NULL, "%s", error ?: strerror(r < 0 ? -r : EINVAL));
		free(error);
		return OPTIONS_BAD_CONFIG;
	}
	if (options.check_config) {
		puts("the configuration is valid");
		config_free(config);
		return EXIT_SUCCESS;
	}
	r = options_apply(&options, config);
	if (r) {
		config_free(config);
		return EXIT_FAILURE;
	}
	r = broker_new(&broker, config, &options.paths, options.loop);
	if (r)
		return EXIT_FAILURE;
	r = broker_run(broker);
	broker_free(broker);
	return r ? EXIT_FAILURE : EXIT_SUCCESS;
}
