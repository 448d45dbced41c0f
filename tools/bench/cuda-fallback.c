/* SPDX-License-Identifier: Apache-2.0 */

#include <stdio.h>

#include "bench.h"

static int run(Bench *options) {
	(void)options;
	fputs("shmbroker-bench: cuda: nothing is measured: built without GPU memory\n", stderr);
	return 0;
}

const BenchCommand bench_cuda = {
	.name = "cuda",
	.help = "GPU memory: the first lease, cached leases, publishing, the helper",
	.run = run,
};
