/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What inferences put around their bodies: a compression, and the length of the JSON in front of binary tensors. */

#include "http.h"

#define HTTP_HEADER_LENGTH "Inference-Header-Content-Length"

/* Replaces a compressed body; what comes of it is bounded by --http-max-input-size, and by what may be held now. */
AnswerCode http_coding_undo(HttpRequest *request, Answer *answer);
/* How many bytes of the body are JSON; 0 when it is nothing but the bytes of one tensor. */
AnswerCode http_header_length(HttpRequest *request, size_t *ret, Answer *answer);
/* Compresses the reply's @body in the way that the client likes best, if in any, and says so in a header. */
void http_coding_apply(HttpRequest *request, struct evbuffer *body);
