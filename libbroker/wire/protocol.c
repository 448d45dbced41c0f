/* SPDX-License-Identifier: Apache-2.0 */

#include "protocol.h"

const char *wire_opcode_name(uint32_t opcode) {
	switch (opcode) {
#define W(_name, _value, _text) \
	case WIRE_OP_##_name:   \
		return #_name;
		WIRE_OPCODES(W)
#undef W
	default:
		return NULL;
	}
}

const char *wire_error_name(uint32_t code) {
	switch (code) {
#define SHMB_ERROR(_name, _value, _text) \
	case WIRE_E_##_name:             \
		return #_name;
#include "errors.def"
#undef SHMB_ERROR
	default:
		return NULL;
	}
}

const char *wire_error_text(uint32_t code) {
	switch (code) {
#define SHMB_ERROR(_name, _value, _text) \
	case WIRE_E_##_name:             \
		return _text;
#include "errors.def"
#undef SHMB_ERROR
	default:
		return NULL;
	}
}
