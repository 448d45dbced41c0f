/* SPDX-License-Identifier: Apache-2.0 */

/* What is accepted as memory, how windows share it, and what discard gives back. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "object.h"
#include "region.h"
#include "wire/compat.h"
#include "wire/fd.h"

#define SIZE 65536
#define SEALS (F_SEAL_SHRINK | F_SEAL_SEAL)

static int memfd(unsigned flags, int seals) {
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, SIZE), 0);
	if (seals)
		assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

static int check(int fd, int read_only_fd, ObjectFds *ret) {
	char why[WIRE_TEXT_MAX] = "";
	int r = object_fds_check(fd, read_only_fd, false, false, ret, why);

	if (r)
		assert_true(strlen(why) > 10);
	return r;
}

static void a_sealed_memfd_is_accepted(void **state) {
	_cleanup_(closep) int fd = memfd(0, SEALS), read_only = fd_reopen(fd, O_RDONLY);
	ObjectFds fds;

	(void)state;
	assert_int_equal(check(fd, read_only, &fds), 0);
	assert_int_equal(fds.size, SIZE);
	assert_int_equal(fds.mode, O_RDWR);
	assert_int_equal(fds.flags & ~(uint32_t)WIRE_REGION_SPARSE, 0);
	assert_false(fds.read_only_enforced);
}

static void memory_that_can_shrink_is_refused(void **state) {
	static const int too_few[] = { 0, F_SEAL_SHRINK, F_SEAL_SEAL, F_SEAL_GROW | F_SEAL_SHRINK };
	char why[WIRE_TEXT_MAX];
	ObjectFds fds;

	(void)state;
	for (size_t i = 0; i < sizeof(too_few) / sizeof(too_few[0]); ++i) {
		_cleanup_(closep) int fd = memfd(0, too_few[i]);

		assert_int_equal(check(fd, -EBADF, &fds), SHMB_E_UNSEALED);
		assert_int_equal(object_fds_check(fd, -EBADF, true, false, &fds, why), 0);
		assert_true(fds.flags & WIRE_REGION_UNSEALED);
	}
}

static void what_is_not_memory_is_refused(void **state) {
	int pair[2], sockets[2];
	ObjectFds fds;

	(void)state;
	assert_int_equal(pipe(pair), 0);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
	{
		_cleanup_(closep) int directory = open("/", O_RDONLY | O_DIRECTORY), device = open("/dev/null", O_RDWR),
				      disk = open("/proc/self/exe", O_RDONLY), path = open("/", O_PATH);
		const int bad[] = { pair[0], pair[1], sockets[0], directory, device, disk, path };

		for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); ++i)
			assert_int_equal(check(bad[i], -EBADF, &fds), SHMB_E_BAD_FD);
	}
	for (int i = 0; i < 2; ++i) {
		close(pair[i]);
		close(sockets[i]);
	}
}

static void a_write_only_fd_is_refused(void **state) {
	_cleanup_(closep) int fd = memfd(0, SEALS), write_only = fd_reopen(fd, O_WRONLY);
	ObjectFds fds;

	(void)state;
	assert_true(write_only >= 0);
	assert_int_equal(check(write_only, -EBADF, &fds), SHMB_E_BAD_FD);
}

static void the_read_only_fd_must_be_that_and_the_same_memory(void **state) {
	_cleanup_(closep) int fd = memfd(0, SEALS), other = memfd(0, SEALS);
	_cleanup_(closep) int other_read_only = fd_reopen(other, O_RDONLY), writable = fd_reopen(fd, O_RDWR);
	ObjectFds fds;

	(void)state;
	assert_int_equal(check(fd, other_read_only, &fds), SHMB_E_BAD_FD);
	assert_int_equal(check(fd, writable, &fds), SHMB_E_BAD_FD);
	assert_int_equal(check(fd, STDIN_FILENO, &fds), SHMB_E_BAD_FD);
}

static void read_only_is_enforced_by_a_seal_or_by_the_mode(void **state) {
	_cleanup_(closep) int sealed = memfd(0, SEALS | F_SEAL_FUTURE_WRITE), moded = memfd(0, SEALS);
	ObjectFds fds;

	(void)state;
	assert_int_equal(check(sealed, -EBADF, &fds), 0);
	assert_true(fds.read_only_enforced);
	assert_int_equal(fchmod(moded, 0400), 0);
	assert_int_equal(check(moded, -EBADF, &fds), 0);
	assert_true(fds.read_only_enforced);
}

static void hugetlb_needs_a_write_seal(void **state) {
	_cleanup_(closep) int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | MFD_HUGE_2MB);
	ObjectFds fds;

	(void)state;
	if (fd < 0)
		skip();
	assert_int_equal(ftruncate(fd, 2 << 20), 0);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	assert_int_equal(check(fd, -EBADF, &fds), SHMB_E_UNSEALED);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
	assert_int_equal(check(fd, -EBADF, &fds), 0);
	assert_true(fds.flags & WIRE_REGION_HUGETLB);
}

static void sparse_memory_is_marked_or_refused(void **state) {
	_cleanup_(closep) int fd = memfd(0, SEALS);
	char why[WIRE_TEXT_MAX];
	ObjectFds fds;

	(void)state;
	assert_int_equal(check(fd, -EBADF, &fds), 0);
	assert_true(fds.flags & WIRE_REGION_SPARSE);
	assert_int_equal(object_fds_check(fd, -EBADF, false, true, &fds, why), SHMB_E_SPARSE);
	assert_int_equal(fallocate(fd, 0, 0, SIZE), 0);
	assert_int_equal(object_fds_check(fd, -EBADF, false, true, &fds, why), 0);
	assert_false(fds.flags & WIRE_REGION_SPARSE);
}

typedef struct Shop {
	Accounts accounts;
	Account *account;
	Objects objects;
	Keeper keeper;
	Ledger ledger;
} Shop;

static void shop_open(Shop *shop) {
	*shop = (Shop){};
	accounts_init(&shop->accounts);
	shop->account = account_get(&shop->accounts, 1000);
	assert_int_equal(closer_new(&shop->objects.closer), 0);
	keeper_init(&shop->keeper, NULL, shop->objects.closer, NULL);
	shop->objects.keeper = &shop->keeper;
	shop->objects.ledger = &shop->ledger;
}

static void shop_close(Shop *shop) {
	assert_int_equal(shop->objects.n, 0);
	for (int i = 0; i < _ACCOUNT_RESOURCE_N; ++i)
		assert_int_equal(shop->accounts.used[i], 0);
	account_put(shop->account);
	accounts_deinit(&shop->accounts);
	closer_free(shop->objects.closer);
	table_deinit(&shop->objects.table);
}

static int get(Shop *shop, uint64_t session, ObjectFds *fds, const WireAclEntry *acl, uint32_t n_acl, Object **ret) {
	ObjectKey key = {
		.session = session, .uid = 1000, .mode = fds->mode, .device = fds->device, .inode = fds->inode
	};

	return objects_get(&shop->objects, &key, fds, shop->account, acl, n_acl, ret);
}

static void windows_share_an_object_and_principals_do_not(void **state) {
	const WireAclEntry acl = { WIRE_ACL_UID, 5 };
	Object *first, *second, *other;
	ObjectFds fds;
	Shop shop;
	int fd = memfd(0, SEALS);

	(void)state;
	shop_open(&shop);
	assert_int_equal(check(fd, -EBADF, &fds), 0);
	assert_int_equal(get(&shop, 1, &fds, NULL, 0, &first), 0);
	assert_true(fds.fd_taken);
	assert_int_equal(shop.accounts.used[ACCOUNT_BYTES], SIZE);
	assert_int_equal(get(&shop, 1, &fds, NULL, 0, &second), 0);
	assert_ptr_equal(first, second);
	assert_int_equal(shop.accounts.used[ACCOUNT_BYTES], SIZE);
	assert_int_equal(get(&shop, 1, &fds, &acl, 1, &other), OBJECT_E_ACCESS_DIFFERS);
	assert_int_equal(get(&shop, 2, &fds, &acl, 1, &other), 0);
	assert_ptr_not_equal(first, other);
	assert_int_not_equal(first->fd, other->fd);
	assert_true(first->read_only_fd >= 0);
	object_unref(first);
	object_unref(second);
	object_unref(other);
	shop_close(&shop);
}

static void memory_given_read_only_keeps_one_fd(void **state) {
	_cleanup_(closep) int fd = memfd(0, SEALS);
	int read_only = fd_reopen(fd, O_RDONLY);
	Object *object;
	ObjectFds fds;
	Shop shop;

	(void)state;
	shop_open(&shop);
	assert_int_equal(check(read_only, read_only, &fds), 0);
	assert_int_equal(get(&shop, 1, &fds, NULL, 0, &object), 0);
	assert_int_equal(object->fd, read_only);
	assert_true(object->read_only_fd < 0);
	assert_true(fds.fd_taken);
	assert_false(fds.read_only_fd_taken);
	assert_int_equal(shop.accounts.used[ACCOUNT_FDS], 1);
	object_unref(object);
	shop_close(&shop);
}

static void a_quota_refuses_and_takes_no_fd(void **state) {
	_cleanup_(closep) int fd = memfd(0, SEALS);
	Object *object;
	ObjectFds fds;
	Shop shop;

	(void)state;
	shop_open(&shop);
	shop.accounts.limits[ACCOUNT_BYTES] = SIZE - 1;
	assert_int_equal(check(fd, -EBADF, &fds), 0);
	assert_int_equal(get(&shop, 1, &fds, NULL, 0, &object), OBJECT_E_QUOTA);
	assert_false(fds.fd_taken);
	shop_close(&shop);
}

static uint64_t blocks(int fd) {
	struct stat st;

	assert_int_equal(fstat(fd, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

static void discard_spares_what_other_windows_cover(void **state) {
	_cleanup_(closep) int fd = memfd(0, SEALS);
	Region neighbour = { .offset = 5 * 4096 + 100, .size = 4096 };
	char why[WIRE_TEXT_MAX];
	Object *object;
	ObjectFds fds;
	Shop shop;

	(void)state;
	shop_open(&shop);
	assert_int_equal(fallocate(fd, 0, 0, SIZE), 0);
	assert_int_equal(check(fd, -EBADF, &fds), 0);
	fds.fd_taken = true;
	assert_int_equal(get(&shop, 1, &fds, NULL, 0, &object), 0);
	list_append(&object->regions, &neighbour.object_link);

	/* from the middle of page 0 to the middle of page 15; pages 5 and 6 are the neighbour's */
	assert_int_equal(object_discard(object, 100, SIZE - 200, why), 12 * 4096);
	assert_true(strlen(why) > 0);
	assert_int_equal(blocks(fd), 4 * 4096);
	list_remove(&neighbour.object_link);
	assert_int_equal(object_discard(object, 0, SIZE, why), SIZE);
	assert_string_equal(why, "");
	assert_int_equal(blocks(fd), 0);
	object_unref(object);
	shop_close(&shop);
}

static void discard_says_why_it_could_not(void **state) {
	_cleanup_(closep) int fd = memfd(0, SEALS | F_SEAL_WRITE);
	char why[WIRE_TEXT_MAX];
	Object *object;
	ObjectFds fds;
	Shop shop;

	(void)state;
	shop_open(&shop);
	assert_int_equal(check(fd, -EBADF, &fds), 0);
	fds.fd_taken = true;
	assert_int_equal(get(&shop, 1, &fds, NULL, 0, &object), 0);
	assert_int_equal(object_discard(object, 0, SIZE, why), 0);
	assert_non_null(strstr(why, "sealed"));
	object_unref(object);
	shop_close(&shop);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_sealed_memfd_is_accepted),
		cmocka_unit_test(memory_that_can_shrink_is_refused),
		cmocka_unit_test(what_is_not_memory_is_refused),
		cmocka_unit_test(a_write_only_fd_is_refused),
		cmocka_unit_test(the_read_only_fd_must_be_that_and_the_same_memory),
		cmocka_unit_test(read_only_is_enforced_by_a_seal_or_by_the_mode),
		cmocka_unit_test(hugetlb_needs_a_write_seal),
		cmocka_unit_test(sparse_memory_is_marked_or_refused),
		cmocka_unit_test(windows_share_an_object_and_principals_do_not),
		cmocka_unit_test(memory_given_read_only_keeps_one_fd),
		cmocka_unit_test(a_quota_refuses_and_takes_no_fd),
		cmocka_unit_test(discard_spares_what_other_windows_cover),
		cmocka_unit_test(discard_says_why_it_could_not),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
