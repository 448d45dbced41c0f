/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An owner and consumer in C for test_kill.py: peer SOCKET NAME FD. It registers NAME, holds the region "theirs", and
 * writes into the memory of FD which step it is at and whether it holds a lease; the test stops it at its system calls.
 */

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "shmbroker.h"

/* the order is that of test_kill.py */
enum {
	STEP_START,
	STEP_CONNECT,
	STEP_MAP,
	STEP_CREATE,
	STEP_LOOKUP,
	STEP_STATUS,
	STEP_SUBSCRIBE,
	STEP_RETIRE,
	STEP_RELEASE,
	STEP_FREE,
};

/* shared with the test */
static volatile uint8_t *seen;

static void step(uint8_t number) {
	seen[0] = number;
}

static void check(int result) {
	if (result)
		exit(1);
}

int main(int argc, char **argv) {
	struct shmb_lookup_spec spec = {
		.struct_size = sizeof(spec), .name = "theirs", .size = SHMB_REST, .access = SHMB_READ
	};
	struct shmb_message_lease by_message;
	const struct shmb_status *status;
	struct shmb_status_iter *iter;
	struct shmb_client *client;
	struct shmb_region *region;
	struct shmb_lease lease;
	int result;

	if (argc != 4)
		return 2;
	seen = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[3]), 0);
	if (seen == MAP_FAILED)
		return 2;

	step(STEP_CONNECT);
	check(shmb_client_new(&client, argv[1], SHMB_ROLE_OWNER | SHMB_ROLE_CONSUMER, 0));
	step(STEP_MAP);
	check(shmb_client_get_memory_info(client, "theirs", 0, SHMB_REST, SHMB_READ, &lease));
	seen[1] = 1;
	step(STEP_CREATE);
	check(shmb_region_create(client, argv[2], 8192, NULL, &region));
	step(STEP_LOOKUP);
	check(shmb_client_lookup(client, &spec, 1, &by_message, &result));
	check(result);
	step(STEP_STATUS);
	check(shmb_status_iter_new(client, NULL, &iter));
	do
		check(shmb_status_iter_next(iter, &status));
	while (status);
	shmb_status_iter_free(iter);
	step(STEP_SUBSCRIBE);
	check(shmb_client_subscribe(client, SHMB_EVENT_MASK_ALL));
	step(STEP_RETIRE);
	check(shmb_region_retire(region, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, -1));
	step(STEP_RELEASE);
	check(shmb_client_release(client, &by_message.lease, 1, &result));
	check(result);
	seen[1] = 0;
	check(shmb_lease_release(&lease));
	step(STEP_FREE);
	shmb_region_free(region);
	shmb_client_free(client);
	return 0;
}
