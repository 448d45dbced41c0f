/* SPDX-License-Identifier: Apache-2.0 */

#include "account.h"

#include <stdlib.h>

#include "config.h"

void accounts_init(Accounts *accounts) {
	*accounts = (Accounts){ .fair_share = true };
	list_init(&accounts->list);
	for (size_t i = 0; i < _ACCOUNT_RESOURCE_N; ++i)
		accounts->limits[i] = accounts->totals[i] = ACCOUNT_UNLIMITED;
}

void accounts_configure(Accounts *accounts, const Config *config) {
	accounts->fair_share = config->fair_share;
#define RESOURCE(_NAME, _name, _meaning) accounts->limits[ACCOUNT_##_NAME] = config->quota_##_name;
	ACCOUNT_RESOURCES(RESOURCE)
#undef RESOURCE
}

void accounts_set_total(Accounts *accounts, AccountResource resource, uint64_t total) {
	accounts->totals[resource] = total;
}

static Account *account_new(Accounts *accounts, uint32_t uid) {
	Account *account = calloc(1, sizeof(*account));

	if (!account)
		return NULL;
	account->n_refs = 1;
	account->accounts = accounts;
	account->uid = uid;
	if (!table_insert(&accounts->table, &account->table_link, table_hash(uid))) {
		free(account);
		return NULL;
	}
	list_append(&accounts->list, &account->link);
	accounts->n++;
	return account;
}

static Account *account_free(Account *account) {
	table_remove(&account->accounts->table, &account->table_link);
	list_remove(&account->link);
	account->accounts->n--;
	free(account);
	return NULL;
}

void accounts_deinit(Accounts *accounts) {
	for (ListLink *link; (link = list_first(&accounts->list));)
		account_free(container_of(link, Account, link));
	table_deinit(&accounts->table);
}

Account *account_get(Accounts *accounts, uint32_t uid) {
	table_for_each(link, &accounts->table, table_hash(uid)) {
		Account *account = container_of(link, Account, table_link);

		if (account->uid == uid) {
			account->n_refs++;
			return account;
		}
	}
	return account_new(accounts, uid);
}

Account *account_put(Account *account) {
	/* what it made us wait for is not forgotten with its last connection */
	if (account && !--account->n_refs && !account->patience_ns)
		account_free(account);
	return NULL;
}

/* written without sums, so that nothing can wrap whatever @amount is */
static int account_admits(const Account *account, AccountResource resource, uint64_t amount) {
	const Accounts *accounts = account->accounts;
	uint64_t held = account->held[resource], limit = accounts->limits[resource];
	uint64_t used = accounts->used[resource], total = accounts->totals[resource];
	uint64_t free_now = total > used ? total - used : 0;

	if (limit != ACCOUNT_UNLIMITED && (held > limit || amount > limit - held))
		return ACCOUNT_E_QUOTA;
	if (amount > free_now)
		return ACCOUNT_E_FULL;
	if (total != ACCOUNT_UNLIMITED && accounts->fair_share) {
		uint64_t share = (held + free_now) / 2;

		if (held > share || amount > share - held)
			return ACCOUNT_E_SHARE;
	}
	return 0;
}

void account_take(AccountCharge *charge, Account *account, AccountResource resource, uint64_t amount) {
	account->n_refs++;
	account->held[resource] += amount;
	account->accounts->used[resource] += amount;
	*charge = (AccountCharge){ .account = account, .resource = resource, .amount = amount };
}

int account_charge(AccountCharge *charge, Account *account, AccountResource resource, uint64_t amount) {
	int r = account_admits(account, resource, amount);

	if (r) {
		account->refused++;
		account->accounts->refused++;
		return r;
	}
	account_take(charge, account, resource, amount);
	return 0;
}

int account_charge_more(AccountCharge *charge, uint64_t amount) {
	AccountCharge more = {};
	int r = account_charge(&more, charge->account, charge->resource, amount);

	if (r)
		return r;
	charge->amount += amount;
	account_put(more.account);
	return 0;
}

void account_refund(AccountCharge *charge) {
	Account *account = charge->account;

	if (!account)
		return;
	account->held[charge->resource] -= charge->amount;
	account->accounts->used[charge->resource] -= charge->amount;
	*charge = (AccountCharge){};
	account_put(account);
}

const char *account_resource_name(AccountResource resource) {
	static const char *const names[] = {
#define RESOURCE(_NAME, _name, _meaning) [ACCOUNT_##_NAME] = #_name,
		ACCOUNT_RESOURCES(RESOURCE)
#undef RESOURCE
	};

	return names[resource];
}

const char *account_resource_meaning(AccountResource resource) {
	static const char *const meanings[] = {
#define RESOURCE(_NAME, _name, _meaning) [ACCOUNT_##_NAME] = _meaning,
		ACCOUNT_RESOURCES(RESOURCE)
#undef RESOURCE
	};

	return meanings[resource];
}
