/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Policy: what the configuration in force allows a peer.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "peer.h"
#include "wire/protocol.h"

typedef struct Broker Broker;
typedef struct Session Session;

/* roles (WIRE_ROLE_*) and rights (WIRE_RIGHT_*) of a peer */
void policy_roles(const Broker *broker, const Peer *peer, uint32_t *ret_roles, uint32_t *ret_rights);
bool policy_accepts_unsealed(const Broker *broker, const Session *session);
/* false when the name begins with a prefix that is reserved for somebody else */
bool policy_admits_name(const Broker *broker, uint32_t uid, const char *name, size_t size);
/* is @peer among the uids and gids of an access list? */
bool policy_acl_admits(const WireAclEntry *acl, uint32_t n_acl, const Peer *peer);
