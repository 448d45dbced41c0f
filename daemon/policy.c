/* SPDX-License-Identifier: Apache-2.0 */

#include <string.h>
#include <unistd.h>

#include "broker.h"
#include "policy.h"
#include "session.h"

static bool matches(const IdList *list, const Peer *peer) {
	return config_access_matches(list, peer->uid, peer->gid, peer->groups, peer->n_groups);
}

static bool everyone_or(const IdList *list, const Peer *peer) {
	return config_id_list_is_empty(list) || matches(list, peer);
}

static bool may_admin(const Config *config, const Peer *peer) {
	/* uid 0 of a container is not root here, and a container's processes can be anybody's */
	if (peer->overflow_uid || (peer->other_pidns && !config->admin_other_pidns))
		return false;
	return !peer->uid || peer->uid == geteuid() || matches(&config->admin, peer);
}

void policy_roles(const Broker *broker, const Peer *peer, uint32_t *ret_roles, uint32_t *ret_rights) {
	const Config *config = broker->config;
	bool admin = may_admin(config, peer);

	*ret_roles = (everyone_or(&config->owner, peer) ? WIRE_ROLE_OWNER : 0) |
		     (everyone_or(&config->consumer, peer) ? WIRE_ROLE_CONSUMER : 0) | (admin ? WIRE_ROLE_ADMIN : 0);
	*ret_rights = 0;
	if (peer->overflow_uid)
		return;
	/* an administrator needs no entry to keep a region */
	if (admin || matches(&config->keep, peer))
		*ret_rights |= WIRE_RIGHT_KEEP;
	if (matches(&config->delegate, peer))
		*ret_rights |= WIRE_RIGHT_DELEGATE;
}

bool policy_accepts_unsealed(const Broker *broker, const Session *session) {
	return broker->config->unsealed || matches(&broker->config->unsealed_users, &session->peer);
}

bool policy_admits_name(const Broker *broker, uint32_t uid, const char *name, size_t size) {
	const ReservationList *list = &broker->config->reserve;
	const Reservation *longest = NULL;
	size_t longest_size = 0;

	for (size_t i = 0; i < list->n; ++i) {
		size_t prefix_size = strlen(list->items[i].prefix);

		if (prefix_size > size || prefix_size < longest_size ||
		    memcmp(list->items[i].prefix, name, prefix_size))
			continue;
		if (prefix_size == longest_size && longest && longest->uid == uid)
			continue;
		longest = &list->items[i];
		longest_size = prefix_size;
	}
	return !longest || longest->uid == uid;
}

bool policy_acl_admits(const WireAclEntry *acl, uint32_t n_acl, const Peer *peer) {
	for (uint32_t i = 0; i < n_acl; ++i) {
		if (acl[i].kind == WIRE_ACL_UID) {
			if (acl[i].id == peer->uid && !peer->overflow_uid)
				return true;
			continue;
		}
		if (acl[i].id == peer->gid)
			return true;
		for (size_t j = 0; j < peer->n_groups; ++j)
			if (acl[i].id == peer->groups[j])
				return true;
	}
	return false;
}
