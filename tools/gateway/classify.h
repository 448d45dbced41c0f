/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Classification: instead of a tensor, for each row of the batch its largest elements, as strings "VALUE:INDEX".
 */

#include "infer.h"

/*
 * Turns the result @output, which is in the reply and whose .n_classes is not 0, into BYTES [rows, classes]. Refuses
 * datatypes that have no order.
 */
AnswerCode classify(Infer *infer, InferOutput *output);
