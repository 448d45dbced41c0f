/* SPDX-License-Identifier: Apache-2.0 */

/*
 * shmbroker-cuda-helper: tries GPU memory for shmbrokerd, one process for each GPU. It is the only one of our programs
 * besides those of the clients that loads libcuda, and it sees no client: only a socket to the broker.
 */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda/validate.h"
#include "wire/fd.h"
#include "wire/uuid.h"

enum {
	EXIT_USAGE = 2,
};

typedef struct Options {
	const char *library;
	const char *nvml;
	uint8_t device[16];
	bool has_device;
	bool bypass_mps;
} Options;

static const char usage[] = "shmbroker-cuda-helper --device=UUID [--library=FILE] [--nvml=FILE] [--use-mps]\n"
			    "shmbroker-cuda-helper --causes\n"
			    "\n"
			    "Tries GPU memory for shmbrokerd, which starts it and talks to it on fd 3.\n"
			    "\n"
			    "  --device=UUID   the GPU, as GPU-... or MIG-...\n"
			    "  --library=FILE  the driver's library, libcuda.so.1\n"
			    "  --nvml=FILE     the driver's library for management, libnvidia-ml.so.1\n"
			    "  --use-mps       be a client of the MPS server if there is one\n"
			    "  --causes        print why GPU memory may be refused: name, code, cause, remedy\n"
			    "  --help          print this\n"
			    "  --version       print the version\n";

static void print_causes(void) {
	for (uint32_t cause = 1; cause < _CUDA_CAUSE_N; ++cause)
		printf("%s\t%s\t%s\t%s\n", cuda_cause_name(cause), wire_error_name((uint32_t)cuda_cause_code(cause)),
		       cuda_cause_text(cause), cuda_cause_remedy(cause));
}

/* Returns -1 to go on, or the exit status. */
static int parse(Options *ret, int argc, char **argv) {
	static const struct option options[] = {
		{ "causes", no_argument, NULL, 'c' },	  { "device", required_argument, NULL, 'd' },
		{ "help", no_argument, NULL, 'h' },	  { "library", required_argument, NULL, 'l' },
		{ "nvml", required_argument, NULL, 'n' }, { "use-mps", no_argument, NULL, 'm' },
		{ "version", no_argument, NULL, 'V' },	  {},
	};

	*ret = (Options){ .library = CUDA_LIBRARY, .bypass_mps = true };
	for (int option; (option = getopt_long(argc, argv, "hV", options, NULL)) >= 0;) {
		switch (option) {
		case 'c':
			print_causes();
			return EXIT_SUCCESS;
		case 'd':
			ret->has_device = wire_uuid_parse(optarg, ret->device);
			if (!ret->has_device) {
				fprintf(stderr, "shmbroker-cuda-helper: %s is no UUID of a GPU\n", optarg);
				return EXIT_USAGE;
			}
			break;
		case 'h':
			fputs(usage, stdout);
			return EXIT_SUCCESS;
		case 'l':
			ret->library = optarg;
			break;
		case 'n':
			ret->nvml = optarg;
			break;
		case 'm':
			ret->bypass_mps = false;
			break;
		case 'V':
			puts("shmbroker-cuda-helper " PACKAGE_VERSION);
			return EXIT_SUCCESS;
		default:
			return EXIT_USAGE;
		}
	}
	if (!ret->has_device || optind < argc) {
		fputs(usage, stderr);
		return EXIT_USAGE;
	}
	return -1;
}

/* nothing of the broker's is left but the socket; what hangs in the driver goes with the broker all the same */
static int confine(void) {
	struct rlimit none = { 0, 0 };
	int type;
	socklen_t size = sizeof(type);

	if (getsockopt(HELPER_FD, SOL_SOCKET, SO_TYPE, &type, &size) < 0 || type != SOCK_SEQPACKET) {
		fputs("shmbroker-cuda-helper: fd 3 is not the broker's socket; shmbrokerd starts this program\n",
		      stderr);
		return -EINVAL;
	}
	(void)syscall(SYS_close_range, HELPER_FD + 1, ~0U, 0);
	(void)fcntl(HELPER_FD, F_SETFD, FD_CLOEXEC);
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	(void)prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	(void)setrlimit(RLIMIT_CORE, &none);
	return 0;
}

static int answer(const HelperReply *reply) {
	int r;

	do
		r = fd_send(HELPER_FD, reply, sizeof(*reply), NULL, 0, 0);
	while (r == -EINTR);
	return r;
}

/* Returns 0 when the broker has hung up. */
static int serve(Validator *validator) {
	for (;;) {
		_cleanup_(closep) int fd = -EBADF;
		int fds[WIRE_FDS_ROOM];
		HelperRequest request;
		HelperReply reply;
		FdMessage message;
		int r;

		do
			r = fd_receive(HELPER_FD, &request, sizeof(request), 0, fds, &message);
		while (r == -EINTR);
		if (r < 0)
			return r;
		if (!message.size)
			return 0;
		for (size_t i = 0; i < message.n_fds; ++i) {
			if (!i)
				fd = fds[i];
			else
				(void)close_fd(fds[i]);
		}
		if (message.size != sizeof(request) || message.truncated || request.magic != HELPER_MAGIC ||
		    !request.serial || request.operation < HELPER_CHECK_IPC || request.operation > HELPER_DROP ||
		    (request.operation == HELPER_CHECK_VMM) != (fd >= 0))
			return -EBADMSG;
		validator_handle(validator, &request, fd, &reply);
		if (request.operation != HELPER_DROP && answer(&reply))
			return 0;
		if (reply.is_last)
			return 0;
	}
}

int main(int argc, char **argv) {
	Validator validator;
	HelperReply reply;
	Options options;
	int r;

	r = parse(&options, argc, argv);
	if (r >= 0)
		return r;
	if (confine())
		return EXIT_USAGE;
	r = validator_init(&validator, options.library, options.nvml, options.device, options.bypass_mps, &reply)
		    ? -ENODEV
		    : 0;
	if (answer(&reply) || r)
		return EXIT_SUCCESS;
	r = serve(&validator);
	validator_deinit(&validator);
	if (r)
		fprintf(stderr, "shmbroker-cuda-helper: %s\n", strerror(-r));
	return r ? EXIT_FAILURE : EXIT_SUCCESS;
}
