/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The owner of the demonstration: makes a frame of 1 x 3 x 2160 x 3840 float32 in a sealed memfd, fills it,
 * registers it with the broker by its fd, and retires it at the end.
 */

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "frame.h"

int main(void) {
	struct shmb_client *client;
	struct shmb_region *region;
	uint64_t begin;
	float *frame;
	int fd;

	begin = frame_now();
	fd = memfd_create("frame", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)FRAME_SIZE) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		frame_check("memfd", -errno);
	frame = mmap(NULL, FRAME_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (frame == MAP_FAILED)
		frame_check("mmap", -errno);
	begin = frame_step("owner", "create and map", begin, "a memfd of 99,532,800 bytes, sealed against truncation");

	for (uint64_t i = 0; i < FRAME_FLOATS; i++)
		frame[i] = frame_value(i);
	begin = frame_step("owner", "fill", begin, "1 x 3 x 2160 x 3840 float32");

	frame_check("connect", shmb_client_new(&client, NULL, SHMB_ROLE_OWNER, 0));
	begin = frame_step("owner", "connect", begin, "a session");
	frame_check("register", shmb_region_adopt(client, FRAME_NAME, fd, 0, FRAME_SIZE, NULL, &region));
	(void)frame_step("owner", "register", begin, "the fd went to the broker, no byte of the frame did");

	frame_pause("registered");

	begin = frame_now();
	frame_check("retire", shmb_region_retire(region, SHMB_RETIRE_STRICT | SHMB_RETIRE_WAIT, 60000));
	(void)frame_step("owner", "retire", begin, "no lease was left: gone");
	(void)shmb_region_free(region);
	(void)shmb_client_free(client);
	(void)munmap(frame, FRAME_SIZE);
	(void)close(fd);
	return EXIT_SUCCESS;
}
