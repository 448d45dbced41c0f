/* SPDX-License-Identifier: Apache-2.0 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "spin.h"

static bool may_spin(int mode, uint32_t n_cpus) {
	Spin spin;

	spin_init(&spin, mode, n_cpus);
	return spin_begins(&spin);
}

static void test_who_has_cpus_to_spare_spins(void **state) {
	(void)state;
	assert_false(may_spin(SPIN_AUTO, 1));
	assert_false(may_spin(SPIN_AUTO, SPIN_CPUS_AUTO - 1));
	assert_true(may_spin(SPIN_AUTO, SPIN_CPUS_AUTO));
	assert_false(may_spin(SPIN_YES, 1));
	assert_true(may_spin(SPIN_YES, 2));
	assert_false(may_spin(SPIN_NO, 64));
	assert_true(spin_cpus() >= 1);
}

static void test_who_spins_in_vain_pauses(void **state) {
	Spin spin;
	int spun = 0;

	(void)state;
	spin_init(&spin, SPIN_YES, 2);
	/* one that finds something now and then goes on */
	for (int i = 0; i < 100; ++i) {
		assert_true(spin_begins(&spin));
		spin_ends(&spin, i % 4 == 0);
	}
	for (int i = 0; i < 720; ++i) {
		if (!spin_begins(&spin))
			continue;
		spun++;
		spin_ends(&spin, false);
	}
	assert_in_range(spun, 70, 90);
	/* and is as eager as before when it finds something again */
	while (!spin_begins(&spin))
		;
	spin_ends(&spin, true);
	for (int i = 0; i < 8; ++i) {
		assert_true(spin_begins(&spin));
		spin_ends(&spin, false);
	}
	assert_false(spin_begins(&spin));
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_who_has_cpus_to_spare_spins),
		cmocka_unit_test(test_who_spins_in_vain_pauses),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
