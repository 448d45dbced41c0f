/* SPDX-License-Identifier: Apache-2.0 */

/* Leases that are held: guarded copies, and the release. */

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>

#include "lease.h"
#include "map.h"
#include "wire/range.h"

/* the broker waits for the last release on this slot: one notice for each of its scans, marked once it is sent */
static __attribute__((noinline, cold)) void ring(struct shmb_client *client, uint32_t slot, uint64_t word) {
	uint32_t scan;

	/* before the number is read: whatever scan the rung word leaves the count to is a later one, and must see it */
	atomic_thread_fence(memory_order_seq_cst);
	scan = atomic_load(&client->details[slot].scan);
	if (atomic_load(&layout_rung(client->page)[slot]) == scan + 1)
		return;
	if (!atomic_load(&client->away) && !client_notify(client, slot, scan, layout_word_generation(word)))
		atomic_store(&layout_rung(client->page)[slot], scan + 1);
	else
		/* a thread that only releases is all that may ever find out; lease_ring_again() follows */
		resume_nudge(client);
}

static bool waits(uint64_t word) {
	return word && layout_word_state(word) != WIRE_STATE_ACTIVE;
}

void lease_ring_again(struct shmb_client *client) {
	uint32_t i, slot;
	uint64_t word;

	pthread_mutex_lock(&client->map_lock);
	/* downwards: what is unmapped meanwhile brings slots that were seen before, and what is mapped is told of itself */
	for (i = client->n_mapped; i-- > 0;) {
		if (i >= client->n_mapped)
			continue;
		slot = client->mapped_slots[i];
		pthread_mutex_unlock(&client->map_lock);
		word = atomic_load(&client->slots[slot].word);
		if (waits(word))
			ring(client, slot, word);
		pthread_mutex_lock(&client->map_lock);
	}
	pthread_mutex_unlock(&client->map_lock);
}

void lease_ring_missed(struct shmb_client *client) {
	struct pollfd poll_fd = { .fd = client->fd, .events = POLLOUT };

	if (!atomic_load(&client->has_missed_notice) || atomic_load(&client->away) || poll(&poll_fd, 1, 0) <= 0)
		return;
	atomic_store(&client->has_missed_notice, false);
	lease_ring_again(client);
}

/* after a release was counted; returns the word that stands in the slot */
static uint64_t look(struct shmb_client *client, uint32_t slot) {
	uint64_t now = atomic_load(&client->slots[slot].word);

	/*
	 * Whatever generation waits there is told: a count that a failed acquire takes back may have fallen on the one
	 * that came after.
	 */
	if (__builtin_expect(waits(now), 0))
		ring(client, slot, now);
	return now;
}

void lease_count_release(struct shmb_client *client, uint32_t slot) {
	lane_count_release(slot);
	(void)look(client, slot);
}

/* the slot's word is not that of a region in use */
static __attribute__((noinline)) int release_of_retired(struct shmb_client *client, uint32_t slot,
							uint64_t generation) {
	uint64_t now = look(client, slot);

	maps_settle(client);
	return now == layout_word(generation, WIRE_STATE_REVOKED) ? error_plain(SHMB_E_REVOKED) : 0;
}

static __attribute__((noinline)) int release_slowly(struct shmb_lease *lease) {
	struct shmb_client *client = lease->client;

	if (!client)
		return error_set(SHMB_E_STALE, "the lease was released before");
	if (client_is_foreign(client)) {
		lease->client = NULL;
		return error_plain(SHMB_E_FORKED);
	}
	lane_select(client);
	return shmb_lease_release(lease);
}

int shmb_lease_release(struct shmb_lease *lease) {
	struct shmb_client *client = lease->client;
	uint64_t generation = lease->generation;
	uint32_t slot = (uint32_t)lease->internal[LEASE_SLOT];

	if (__builtin_expect(!client, 0) || !lane_is_ready(client))
		return release_slowly(lease);
	lease->client = NULL;
	lease->address = NULL;
	lane_count_release(slot);
	if (__builtin_expect(atomic_load(&client->slots[slot].word) == layout_word(generation, WIRE_STATE_ACTIVE), 1))
		return 0;
	return release_of_retired(client, slot, generation);
}

static int check_held(const struct shmb_lease *lease) {
	if (!lease->client)
		return error_set(SHMB_E_STALE, "the lease was released before");
	return client_is_foreign(lease->client) ? error_plain(SHMB_E_FORKED) : 0;
}

static int check_copy(const struct shmb_lease *lease, uint64_t offset, uint64_t size, uint32_t access) {
	int r = check_held(lease);

	if (r)
		return r;
	if (access & ~lease->access)
		return error_set(SHMB_E_ACCESS, "the lease is for reading only");
	if (!range_within(offset, size, lease->size))
		return error_set(SHMB_E_OUT_OF_BOUNDS, "offset and size are not within the lease");
	if (lease->memory_type == SHMB_MEMORY_CUDA)
		return error_set(SHMB_E_UNSUPPORTED,
				 "GPU memory has no guarded copies: copy with the GPU's own functions");
	if (lease->flags & SHMB_REGION_HUGETLB && (lease->access & SHMB_COPY || lease->flags & SHMB_REGION_UNSEALED))
		return error_set(SHMB_E_UNSUPPORTED, "hugetlb memory has no guarded copies");
	return 0;
}

/* the fd behind the lease: that of a SHMB_COPY lease, or one that is asked for now */
static int copy_fd(const struct shmb_lease *lease, int *ret) {
	struct shmb_client *client = lease->client;
	uint32_t slot = (uint32_t)lease->internal[LEASE_SLOT], access = lease->access | SHMB_COPY;
	int r;

	*ret = (int)lease->internal[LEASE_FD] - 1;
	if (*ret >= 0)
		return 0;
	r = map_ensure(client, slot, lease->generation, access, 0, 0);
	if (r)
		return r;
	*ret = map_copy_fd(client, slot, lease->generation, access);
	return *ret < 0 ? error_plain(SHMB_E_STALE) : 0;
}

static int truncated(void) {
	return error_set(SHMB_E_TRUNCATED, "the owner has cut the memory");
}

/* where the lease is in its file */
static uint64_t file_offset(const struct shmb_lease *lease) {
	const MapDetail *detail = &lease->client->map_details[lease->internal[LEASE_SLOT]];

	return atomic_load(&detail->offset) + lease->internal[LEASE_OFFSET];
}

/* never touches a mapping: a page that is gone is a short read, not a signal */
static int copy_by_fd(const struct shmb_lease *lease, uint64_t offset, void *to, const void *from, uint64_t size) {
	uint64_t at = file_offset(lease) + offset, done = 0;
	struct stat st;
	int fd, r;

	r = copy_fd(lease, &fd);
	if (r)
		return r;
	/* pwrite() would let a file that was cut grow again */
	if (fstat(fd, &st) < 0)
		return error_plain(-errno);
	if (!range_within(at, size, (uint64_t)st.st_size))
		return truncated();
	while (done < size) {
		ssize_t n = to ? pread(fd, (uint8_t *)to + done, size - done, (off_t)(at + done))
			       : pwrite(fd, (const uint8_t *)from + done, size - done, (off_t)(at + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return error_plain(-errno);
		if (!n)
			return truncated();
		done += (uint64_t)n;
	}
	return 0;
}

static bool needs_guard(const struct shmb_lease *lease) {
	return !lease->address || lease->flags & SHMB_REGION_UNSEALED;
}

int shmb_lease_copy_in(struct shmb_lease *lease, uint64_t offset, const void *data, uint64_t size) {
	int r = check_copy(lease, offset, size, SHMB_WRITE);

	if (r || !size)
		return r;
	if (needs_guard(lease))
		return copy_by_fd(lease, offset, NULL, data, size);
	memcpy((uint8_t *)lease->address + offset, data, size);
	return 0;
}

int shmb_lease_copy_out(struct shmb_lease *lease, uint64_t offset, void *ret_data, uint64_t size) {
	int r = check_copy(lease, offset, size, SHMB_READ);

	if (r || !size)
		return r;
	if (needs_guard(lease))
		return copy_by_fd(lease, offset, ret_data, NULL, size);
	memcpy(ret_data, (const uint8_t *)lease->address + offset, size);
	return 0;
}

int shmb_lease_get_fd(struct shmb_lease *lease, int *ret_fd, uint64_t *ret_offset) {
	int r, fd;

	r = check_held(lease);
	if (!r)
		r = copy_fd(lease, &fd);
	if (r)
		return r;
	*ret_fd = fd;
	if (ret_offset)
		*ret_offset = file_offset(lease);
	return 0;
}
