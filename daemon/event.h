/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Events: what subscribers, and holders of what goes away, are told without having asked.
 *
 * A subscriber that does not read is never disconnected for it: its events collapse into one OVERFLOW with a
 * count, sent when it has read what was queued; after that it reads the status again.
 */

#include <stdint.h>

typedef struct Broker Broker;
typedef struct Region Region;
typedef struct Session Session;

/* to subscribers; GONE and REVOKED also to everybody who has the region mapped or holds a lease by message */
void event_region(uint32_t type, Region *region);
/* JOINED, LEFT, OWNER_DIED */
void event_session(uint32_t type, const Session *subject);
void event_subscribe(Session *session, uint32_t mask);
/* end of turn: OVERFLOW to those who have caught up */
void events_turn(Broker *broker);
