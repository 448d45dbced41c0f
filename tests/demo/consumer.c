/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The consumer of the demonstration: gets the owner's frame by name, compares every byte of it where it is, and
 * gives the lease back.
 */

#include "frame.h"

int main(void) {
	struct shmb_client *client;
	struct shmb_lease lease;
	uint64_t begin, differ = 0;
	const unsigned char *bytes;

	begin = frame_now();
	frame_check("connect", shmb_client_new(&client, NULL, SHMB_ROLE_CONSUMER, 0));
	begin = frame_step("consumer", "connect", begin, "a session, the table of regions and a lease page");

	frame_check("GetMemoryInfo", shmb_client_get_memory_info(client, FRAME_NAME, 0, SHMB_REST, SHMB_READ, &lease));
	begin = frame_step("consumer", "GetMemoryInfo, first", begin, "asked the broker, mapped read-only");
	if (lease.size != FRAME_SIZE || lease.memory_type != SHMB_MEMORY_CPU) {
		fprintf(stderr, "the lease has %" PRIu64 " bytes\n", lease.size);
		return EXIT_FAILURE;
	}

	bytes = lease.address;
	for (uint64_t i = 0; i < FRAME_FLOATS; i++) {
		float want = frame_value(i);

		if (memcmp(bytes + i * sizeof(want), &want, sizeof(want)))
			differ++;
	}
	if (differ) {
		fprintf(stderr, "%" PRIu64 " of %" PRIu64 " values differ\n", differ, FRAME_FLOATS);
		return EXIT_FAILURE;
	}
	(void)frame_step("consumer", "check", begin, "99,532,800 bytes compared in place, all as the owner wrote them");

	frame_pause("leased");

	begin = frame_now();
	frame_check("release", shmb_lease_release(&lease));
	begin = frame_step("consumer", "release", begin, "a decrement");
	frame_check("GetMemoryInfo", shmb_client_get_memory_info(client, FRAME_NAME, 0, SHMB_REST, SHMB_READ, &lease));
	begin = frame_step("consumer", "GetMemoryInfo, again", begin, "through the lease page, no system call");
	frame_check("release", shmb_lease_release(&lease));
	(void)frame_step("consumer", "release", begin, "a decrement");
	(void)shmb_client_free(client);
	return EXIT_SUCCESS;
}
