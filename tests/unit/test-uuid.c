/* SPDX-License-Identifier: Apache-2.0 */

/* UUIDs of GPUs as text, and why GPU memory is refused as sentences. */

#include "cuda/cause.h"
#include "wire/uuid.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static const uint8_t uuid[16] = { 0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef,
				  0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10 };
static const char text[] = "GPU-01234567-89ab-cdef-fedc-ba9876543210";

static void test_format(void **state) {
	char got[WIRE_UUID_TEXT_SIZE];

	(void)state;
	wire_uuid_format(uuid, got);
	assert_string_equal(got, text);
	assert_int_equal(sizeof(text), WIRE_UUID_TEXT_SIZE);
}

static void test_parse(void **state) {
	static const char *const good[] = { text, "MIG-01234567-89ab-cdef-fedc-ba9876543210",
					    "GPU-0123456789ABCDEFfedcba9876543210" };
	static const char *const bad[] = { "",
					   "GPU-",
					   "01234567-89ab-cdef-fedc-ba9876543210",
					   "gpu-01234567-89ab-cdef-fedc-ba9876543210",
					   "GPU-01234567-89ab-cdef-fedc-ba987654321",
					   "GPU-01234567-89ab-cdef-fedc-ba98765432100",
					   "GPU-01234567-89ab-cdef-fedc-ba987654321g",
					   "GPU-01234567-89ab-cdef-fedc-ba9876543210 ",
					   "GPU-0x234567-89ab-cdef-fedc-ba9876543210" };
	uint8_t got[16];

	(void)state;
	for (size_t i = 0; i < sizeof(good) / sizeof(*good); ++i) {
		memset(got, 0, sizeof(got));
		assert_true(wire_uuid_parse(good[i], got));
		assert_memory_equal(got, uuid, sizeof(uuid));
	}
	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); ++i)
		assert_false(wire_uuid_parse(bad[i], got));
}

static void test_causes(void **state) {
	char why[WIRE_TEXT_MAX];

	(void)state;
	assert_int_equal(cuda_cause_code(CUDA_CAUSE_NONE), 0);
	assert_int_equal(cuda_cause_code(_CUDA_CAUSE_N), 0);
	assert_int_equal(cuda_cause_code(UINT32_MAX), 0);
	assert_null(cuda_cause_name(_CUDA_CAUSE_N));
	for (uint32_t cause = 1; cause < _CUDA_CAUSE_N; ++cause) {
		assert_true(cuda_cause_code(cause) > 0);
		assert_non_null(cuda_cause_name(cause));
		/* remedies have no parameters */
		assert_null(strchr(cuda_cause_remedy(cause), '%'));
		assert_true(strlen(cuda_cause_text(cause)) > 10 && strlen(cuda_cause_remedy(cause)) > 10);
	}
	assert_int_equal(cuda_cause_write(why, CUDA_CAUSE_TOO_BIG, NULL, 1ull, 2ull, 3ull), SHMB_E_OUT_OF_BOUNDS);
	assert_string_equal(
		why, "offset 1 + size 2 exceeds the allocation (3 bytes): ask cuMemGetAddressRange() for its base "
		     "and size");
	assert_int_equal(cuda_cause_write(why, CUDA_CAUSE_STUB, "cuInit: X (34)"), SHMB_E_UNSUPPORTED);
	assert_non_null(strstr(why, "not a driver (cuInit: X (34)): put"));
}

/* what does not fit is cut, with a NUL at the end */
static void test_a_long_cause(void **state) {
	char why[WIRE_TEXT_MAX + 1], name[2 * WIRE_TEXT_MAX];

	(void)state;
	memset(name, 'x', sizeof(name) - 1);
	name[sizeof(name) - 1] = 0;
	why[WIRE_TEXT_MAX] = 'e';
	(void)cuda_cause_write(why, CUDA_CAUSE_NO_DRIVER, name, name);
	assert_int_equal(strlen(why), WIRE_TEXT_MAX - 1);
	assert_int_equal(why[WIRE_TEXT_MAX], 'e');
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_format),
		cmocka_unit_test(test_parse),
		cmocka_unit_test(test_causes),
		cmocka_unit_test(test_a_long_cause),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
