/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config-value.h"
#include "loop.h"
#include "options.h"

#define WATCHDOG_NS UINT64_C(10000000000)
#define WATCHDOG_MAX_NS UINT64_C(3600000000000)

static void print_help(void) {
	puts("Usage: shmbrokerd [OPTION...]\n"
	     "\n"
	     "Owns the shared-memory registrations of this host.\n"
	     "\n"
	     "  --loop=auto|io_uring|epoll  the engine of the loop; the two latter insist\n"
	     "  --socket=PATH               listen here, whatever the configuration says\n"
	     "  --config=FILE               read this file alone\n"
	     "  --config-root=DIR           look for the configuration below DIR\n"
	     "  --supervise                 run the broker as a child, start it again, keep its memory\n"
	     "  --watchdog=TIME             with --supervise: end a broker that is silent for so long, 0: never\n"
	     "  --check-config              read the configuration, say what is wrong, and exit\n"
	     "  --dump-options              print every option of the configuration with its default\n"
	     "  --version                   print the version and exit\n"
	     "  -h, --help                  print this and exit\n"
	     "\n"
	     "shmbrokerd(8), shmbroker.conf(5)");
}

int options_parse(Options *ret, int argc, char **argv) {
	enum {
		OPTION_LOOP = 256,
		OPTION_SOCKET,
		OPTION_CONFIG,
		OPTION_ROOT,
		OPTION_SUPERVISE,
		OPTION_WATCHDOG,
		OPTION_CHECK,
		OPTION_DUMP,
		OPTION_VERSION
	};
	static const struct option options[] = {
		{ "loop", required_argument, NULL, OPTION_LOOP },
		{ "socket", required_argument, NULL, OPTION_SOCKET },
		{ "config", required_argument, NULL, OPTION_CONFIG },
		{ "config-root", required_argument, NULL, OPTION_ROOT },
		{ "supervise", no_argument, NULL, OPTION_SUPERVISE },
		{ "watchdog", required_argument, NULL, OPTION_WATCHDOG },
		{ "check-config", no_argument, NULL, OPTION_CHECK },
		{ "dump-options", no_argument, NULL, OPTION_DUMP },
		{ "version", no_argument, NULL, OPTION_VERSION },
		{ "help", no_argument, NULL, 'h' },
		{},
	};
	char why[CONFIG_WHY_MAX];
	int c;

	*ret = (Options){ .loop = -1, .watchdog_ns = WATCHDOG_NS };
	while ((c = getopt_long(argc, argv, "h", options, NULL)) >= 0) {
		switch (c) {
		case OPTION_LOOP:
			ret->loop = config_parse_loop(optarg);
			if (ret->loop < 0) {
				fprintf(stderr, "shmbrokerd: --loop is auto, io_uring or epoll, not \"%s\"\n", optarg);
				return OPTIONS_USAGE;
			}
			break;
		case OPTION_SOCKET:
			ret->socket = optarg;
			break;
		case OPTION_CONFIG:
			ret->paths.file = optarg;
			break;
		case OPTION_ROOT:
			ret->paths.root = optarg;
			break;
		case OPTION_SUPERVISE:
			/* the child's arguments are those without this one */
			if (ret->supervise) {
				fprintf(stderr, "shmbrokerd: --supervise was given twice\n");
				return OPTIONS_USAGE;
			}
			ret->supervise = argv[optind - 1];
			break;
		case OPTION_WATCHDOG:
			if (config_value_duration(optarg, 0, WATCHDOG_MAX_NS, &ret->watchdog_ns, why)) {
				fprintf(stderr, "shmbrokerd: --watchdog: %s\n", why);
				return OPTIONS_USAGE;
			}
			break;
		case OPTION_CHECK:
			ret->check_config = true;
			break;
		case OPTION_DUMP:
			config_dump_options(stdout);
			return EXIT_SUCCESS;
		case OPTION_VERSION:
			puts("shmbrokerd " PACKAGE_VERSION);
			return EXIT_SUCCESS;
		case 'h':
			print_help();
			return EXIT_SUCCESS;
		default:
			return OPTIONS_USAGE;
		}
	}
	if (optind < argc) {
		fprintf(stderr, "shmbrokerd: takes no argument \"%s\"\n", argv[optind]);
		return OPTIONS_USAGE;
	}
	return OPTIONS_RUN;
}

int options_apply(const Options *options, Config *config) {
	char **items, *path;

	if (!options->socket)
		return 0;
	items = calloc(1, sizeof(*items));
	path = strdup(options->socket);
	if (!items || !path) {
		free(items);
		free(path);
		return -ENOMEM;
	}
	for (size_t i = 0; i < config->sockets.n; ++i)
		free(config->sockets.items[i]);
	free(config->sockets.items);
	items[0] = path;
	config->sockets.items = items;
	config->sockets.n = 1;
	return 0;
}
