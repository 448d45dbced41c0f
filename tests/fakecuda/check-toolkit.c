/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compiles when what the fake driver declares for itself is what the toolkit's cuda.h declares. It makes no code: it is
 * built where configure finds cuda.h.
 */

/* declares the older versions of functions too, under their exported names */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define CONSTANT(_name, _value) _Static_assert((_name) == (_value), #_name);
#include "constants.def"
#undef CONSTANT

#define FUNCTION(_name, _base, _since, _parameters) \
	_Static_assert(__builtin_types_compatible_p(__typeof__(&_name), CUresult(*) _parameters), #_name);
#include "functions.def"
#undef FUNCTION

#define LAYOUT(_type, _size) _Static_assert(sizeof(_type) == (_size), #_type);
#define MEMBER(_type, _member, _offset) _Static_assert(offsetof(_type, _member) == (_offset), #_type "." #_member);
#include <stddef.h>
#include "layouts.def"
