/* SPDX-License-Identifier: Apache-2.0 */

/* Account: quotas, fair shares, and books that balance. */

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>

#include "account.h"
#include "config.h"

static int setup(void **state) {
	Accounts *accounts = calloc(1, sizeof(*accounts));

	accounts_init(accounts);
	*state = accounts;
	return 0;
}

/* every test gives everything back */
static int teardown(void **state) {
	Accounts *accounts = *state;
	int r = accounts->n || !list_is_empty(&accounts->list) || accounts->table.n;

	for (size_t i = 0; i < _ACCOUNT_RESOURCE_N; ++i)
		r |= accounts->used[i] != 0;
	accounts_deinit(accounts);
	free(accounts);
	return r;
}

static void test_lifetime(void **state) {
	Accounts *accounts = *state;
	Account *account = account_get(accounts, 7), *other = account_get(accounts, 8);
	AccountCharge charge = {};

	assert_ptr_not_equal(account, other);
	assert_ptr_equal(account_get(accounts, 7), account);
	account_put(account);
	assert_int_equal(account_charge(&charge, account, ACCOUNT_REGIONS, 3), 0);
	/* a charge keeps its account alive */
	account_put(account);
	assert_int_equal(accounts->n, 2);
	assert_ptr_equal(account_get(accounts, 7), account);
	assert_int_equal(account->held[ACCOUNT_REGIONS], 3);
	assert_int_equal(other->held[ACCOUNT_REGIONS], 0);
	account_put(account);
	account_refund(&charge);
	assert_int_equal(accounts->n, 1);
	/* a second refund takes nothing from anybody */
	account_refund(&charge);
	assert_null(account_put(other));
	assert_null(account_put(NULL));
	assert_int_equal(accounts->n, 0);
}

static void test_many_uids(void **state) {
	Accounts *accounts = *state;
	Account *all[1000];
	size_t n = 0;

	for (uint32_t i = 0; i < 1000; ++i)
		all[i] = account_get(accounts, i * 65536);
	for (uint32_t i = 0; i < 1000; ++i) {
		assert_int_equal(all[i]->uid, i * 65536);
		assert_ptr_equal(account_get(accounts, i * 65536), all[i]);
		account_put(all[i]);
	}
	list_for_each (link, &accounts->list) {
		assert_int_equal(container_of(link, Account, link)->uid, n * 65536);
		n++;
	}
	assert_int_equal(n, 1000);
	for (uint32_t i = 0; i < 1000; ++i)
		account_put(all[i]);
}

static void test_quota(void **state) {
	Accounts *accounts = *state;
	Account *account, *other;
	AccountCharge a = {}, b = {}, c = {};
	Config config = { .fair_share = true };

#define RESOURCE(_NAME, _name, _meaning) config.quota_##_name = 100 + ACCOUNT_##_NAME;
	ACCOUNT_RESOURCES(RESOURCE)
#undef RESOURCE
	accounts_configure(accounts, &config);
	for (int i = 0; i < _ACCOUNT_RESOURCE_N; ++i)
		assert_int_equal(accounts->limits[i], 100 + i);

	account = account_get(accounts, 1);
	other = account_get(accounts, 2);
	accounts->limits[ACCOUNT_MAPS] = 10;
	assert_int_equal(account_charge(&a, account, ACCOUNT_MAPS, 10), 0);
	assert_int_equal(account_charge(&b, account, ACCOUNT_MAPS, 1), ACCOUNT_E_QUOTA);
	assert_null(b.account);
	assert_int_equal(account->refused, 1);
	/* of each uid, and of each resource */
	assert_int_equal(account_charge(&b, other, ACCOUNT_MAPS, 10), 0);
	assert_int_equal(account_charge(&c, account, ACCOUNT_LEASES, 10), 0);
	assert_int_equal(accounts->used[ACCOUNT_MAPS], 20);
	account_refund(&c);

	/* a quota that was lowered below what is held takes nothing away and admits nothing */
	accounts->limits[ACCOUNT_MAPS] = 5;
	assert_int_equal(account_charge(&c, account, ACCOUNT_MAPS, 1), ACCOUNT_E_QUOTA);
	assert_int_equal(account->held[ACCOUNT_MAPS], 10);
	/* but an amount of 0 neither, while over it */
	assert_int_equal(account_charge(&c, account, ACCOUNT_MAPS, 0), ACCOUNT_E_QUOTA);
	account_refund(&a);
	account_refund(&b);
	assert_int_equal(account_charge(&c, account, ACCOUNT_MAPS, 5), 0);
	account_refund(&c);
	account_put(account);
	account_put(other);
}

static void test_no_overflow(void **state) {
	Accounts *accounts = *state;
	Account *account = account_get(accounts, 1), *other = account_get(accounts, 2);
	AccountCharge a = {}, b = {};

	assert_int_equal(account_charge(&a, account, ACCOUNT_BYTES, UINT64_MAX - 5), 0);
	assert_int_equal(account_charge(&b, account, ACCOUNT_BYTES, 6), ACCOUNT_E_FULL);
	/* neither does the sum of several uids wrap */
	assert_int_equal(account_charge(&b, other, ACCOUNT_BYTES, UINT64_MAX), ACCOUNT_E_FULL);
	assert_int_equal(account_charge(&b, other, ACCOUNT_BYTES, 5), 0);
	account_refund(&b);
	account_refund(&a);
	accounts->limits[ACCOUNT_BYTES] = 100;
	assert_int_equal(account_charge(&a, account, ACCOUNT_BYTES, 60), 0);
	assert_int_equal(account_charge(&b, account, ACCOUNT_BYTES, UINT64_MAX - 30), ACCOUNT_E_QUOTA);
	account_refund(&a);
	account_put(account);
	account_put(other);
}

/* one at a time, until it is refused; returns how many */
static size_t take_all(Account *account, AccountCharge *charges, size_t n_max, int *ret_why) {
	size_t n = 0;

	while (n < n_max && !(*ret_why = account_charge(&charges[n], account, ACCOUNT_REGIONS, 1)))
		n++;
	return n;
}

static void test_fair_share(void **state) {
	Accounts *accounts = *state;
	AccountCharge charges[8][64] = {};
	Account *users[8];
	size_t sum = 0, used, expected[] = { 32, 16, 8, 4, 2, 1, 0, 0 };
	int why;

	accounts_set_total(accounts, ACCOUNT_REGIONS, 64);
	for (uint32_t i = 0; i < 8; ++i) {
		size_t n;

		users[i] = account_get(accounts, 1000 + i);
		n = take_all(users[i], charges[i], 64, &why);
		assert_int_equal(n, expected[i]);
		assert_int_equal(why, ACCOUNT_E_SHARE);
		sum += n;
	}
	assert_int_equal(sum, 63);
	/* what one gives back is shared again: the second has 16, 33 are free */
	for (size_t i = 0; i < 64; ++i)
		account_refund(&charges[0][i]);
	assert_int_equal(take_all(users[1], charges[1] + 16, 48, &why), (16 + 33) / 2 - 16);
	/* in one piece the same as one by one */
	assert_int_equal(account_charge(&charges[0][0], users[0], ACCOUNT_REGIONS, 13), ACCOUNT_E_SHARE);
	assert_int_equal(account_charge(&charges[0][0], users[0], ACCOUNT_REGIONS, 12), 0);
	account_refund(&charges[0][0]);

	/* without fair shares only the total counts */
	accounts->fair_share = false;
	used = accounts->used[ACCOUNT_REGIONS];
	assert_true(used < 64);
	assert_int_equal(take_all(users[0], charges[0], 64, &why), 64 - used);
	assert_int_equal(why, ACCOUNT_E_FULL);
	assert_int_equal(accounts->used[ACCOUNT_REGIONS], 64);
	/* a total that shrank below what is used admits nothing and does not wrap */
	accounts_set_total(accounts, ACCOUNT_REGIONS, 10);
	assert_int_equal(account_charge(&charges[7][0], users[7], ACCOUNT_REGIONS, 1), ACCOUNT_E_FULL);
	for (size_t i = 0; i < 8; ++i) {
		for (size_t j = 0; j < 64; ++j)
			account_refund(&charges[i][j]);
		account_put(users[i]);
	}
}

static void test_names(void **state) {
	(void)state;
	assert_string_equal(account_resource_name(ACCOUNT_FDS), "fds");
	for (AccountResource i = 0; i < _ACCOUNT_RESOURCE_N; ++i)
		assert_true(*account_resource_meaning(i));
}

#define TEST(_function) cmocka_unit_test_setup_teardown(_function, setup, teardown)

int main(void) {
	const struct CMUnitTest tests[] = {
		TEST(test_lifetime),	TEST(test_many_uids),  TEST(test_quota),
		TEST(test_no_overflow), TEST(test_fair_share), cmocka_unit_test(test_names),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
