/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Dashboard: the page for people at / of the HTTP door, and what it shows, as one JSON document, at /v2/shmbroker/state.
 * The page is dashboard.html, which is in the program and needs nothing from elsewhere.
 */

#include <stddef.h>

/* what stands in the page where the nonce of its style and its script belongs */
#define DASHBOARD_NONCE "@NONCE@"

extern const unsigned char dashboard_page[];
extern const size_t dashboard_page_size;
