/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Accounts: what each uid holds, against its quotas and its fair share.
 *
 * An AccountCharge is embedded in the object that it pays for, and refunded when that object goes; a zeroed one
 * holds nothing. An Account exists while somebody refers to it: account_get() and every charge that is held.
 *
 * Resources with a total (accounts_set_total()) are shared fairly: a uid may hold at most half of what it holds and
 * what is free together, so that the first one to come leaves half, the next a quarter, and nobody takes all.
 * Invariant: the sum of all accounts' holdings of a resource is Accounts.used, and no sum ever wraps.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "list.h"
#include "table.h"

typedef struct Account Account;
typedef struct AccountCharge AccountCharge;
typedef struct Accounts Accounts;
typedef struct Config Config;

#define ACCOUNT_UNLIMITED UINT64_MAX

/* RESOURCE(NAME, name, "meaning"); `name` is also the key in [quota] */
#define ACCOUNT_RESOURCES(RESOURCE)                                                                \
	RESOURCE(SESSIONS, sessions, "connections and detached sessions")                          \
	RESOURCE(REGIONS, regions, "registered regions")                                           \
	RESOURCE(BYTES, bytes, "bytes of memory behind regions, each object once")                 \
	RESOURCE(GPU_BYTES, gpu_bytes, "bytes of GPU memory behind regions, each allocation once") \
	RESOURCE(MAPS, maps, "generations given to consumers")                                     \
	RESOURCE(LEASES, leases, "leases by message")                                              \
	RESOURCE(MESSAGES, messages, "requests that wait for their answer")                        \
	RESOURCE(FDS, fds, "file descriptors that the broker keeps")                               \
	RESOURCE(REVOKED, revoked, "revoked regions that are still held")

typedef enum AccountResource {
#define RESOURCE(_NAME, _name, _meaning) ACCOUNT_##_NAME,
	ACCOUNT_RESOURCES(RESOURCE)
#undef RESOURCE
	_ACCOUNT_RESOURCE_N,
} AccountResource;

enum {
	_ACCOUNT_E_SUCCESS,
	ACCOUNT_E_QUOTA, /* the uid's quota */
	ACCOUNT_E_SHARE, /* more than half of what remains */
	ACCOUNT_E_FULL,	 /* the total is used up */
};

struct AccountCharge {
	Account *account; /* NULL when nothing is charged; a reference */
	AccountResource resource;
	uint64_t amount;
};

struct Account {
	unsigned long n_refs;
	Accounts *accounts;
	uint32_t uid;
	TableLink table_link;
	ListLink link;
	uint64_t held[_ACCOUNT_RESOURCE_N];
	uint64_t refused;     /* charges that were refused since the account was made */
	uint32_t n_away;      /* sessions that may come back by a connection for which there need not be room */
	uint32_t n_overdrawn; /* connections that may be such a one */
	uint64_t patience_ns; /* CLOCK_MONOTONIC: until then no page of this uid is looked at, see session.c */
};

struct Accounts {
	Table table;
	List list; /* Account.link */
	size_t n;
	bool fair_share;
	uint64_t limits[_ACCOUNT_RESOURCE_N]; /* of each uid */
	uint64_t totals[_ACCOUNT_RESOURCE_N]; /* of all together */
	uint64_t used[_ACCOUNT_RESOURCE_N];
	uint64_t refused;
};

/* No quotas, no totals, fair shares. */
void accounts_init(Accounts *accounts);
/* Every charge must have been refunded and every reference put. */
void accounts_deinit(Accounts *accounts);
/* Takes the quotas over from @config, for charges from here on; what is held stays. */
void accounts_configure(Accounts *accounts, const Config *config);
/* Makes @resource one of @total, shared fairly; ACCOUNT_UNLIMITED for one without an end. */
void accounts_set_total(Accounts *accounts, AccountResource resource, uint64_t total);

/* Finds or makes the account of @uid and gives a reference. NULL without memory. */
Account *account_get(Accounts *accounts, uint32_t uid);
/* Gives the reference back. NULL is ignored. Returns NULL. */
Account *account_put(Account *account);

/*
 * Charges @amount to @account. @charge must hold nothing. Returns 0, or ACCOUNT_E_QUOTA, ACCOUNT_E_SHARE or
 * ACCOUNT_E_FULL, and then @charge still holds nothing.
 */
int account_charge(AccountCharge *charge, Account *account, AccountResource resource, uint64_t amount);
/* Charges @amount on top of what @charge, which must hold something, holds. Returns the same. */
int account_charge_more(AccountCharge *charge, uint64_t amount);
/* Charges whatever the limits say: it was admitted before the broker was restarted. */
void account_take(AccountCharge *charge, Account *account, AccountResource resource, uint64_t amount);
/* Gives back what @charge holds; a second time does nothing. */
void account_refund(AccountCharge *charge);

/* the key in [quota], and the meaning in words */
const char *account_resource_name(AccountResource resource);
const char *account_resource_meaning(AccountResource resource);
