/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Registration: one REGISTER message on its way to regions.
 *
 * System memory is looked at and registered at once. A message that offers GPU memory is kept, with its fds, until what
 * validates such memory has answered for each entry (cuda.h); then all of its entries are registered together, as if it
 * had come now: names, quotas and rights are those of that moment. Such a Registration frees itself when it has
 * answered, or with what its session has asked for. Nothing of it is in the ledger meanwhile: a client that asks a new
 * broker again begins anew.
 */

#include "dispatch.h"

/* what the session waits for is not wanted any more */
void registrations_drop(Session *session);
