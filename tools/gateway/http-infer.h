/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "http.h"
#include "models.h"

/* Runs the inference that the body of @request asks of @model, and replies, possibly later. */
void http_infer(HttpRequest *request, const Model *model);
