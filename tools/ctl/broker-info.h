/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the broker says about itself: an object of its keys; numbers are integers, yes and no are booleans. */

#include <json-c/json.h>

#include "ctl.h"

/* 0 or an exit code, of which the reason has been said; @ret belongs to the caller */
int broker_info_read(Ctl *ctl, json_object **ret);
/* one line: the version, which loop runs and why */
void broker_info_print(json_object *info);
