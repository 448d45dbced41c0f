/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdio.h>

/*
 * Goes once through everything that makes the broker write to its ledger, its registry or its holder, and writes to
 * @out what it was told and what there is in between: nothing in it depends on when, or on whether the broker was
 * killed meanwhile. Nothing is left at the end. Returns false when it could not go on, with the reason in @out.
 * With @gpu it is the same with memory of a GPU of the fake driver, by fd and by handle.
 */
bool scenario_run(const char *socket, FILE *out, bool gpu);
