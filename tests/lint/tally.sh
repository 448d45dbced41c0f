#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# tests/tally.py counts what ran, and fails for what failed, ran not at all, or was skipped without a listed reason.
set -u
. "$(dirname "$0")/files.sh"

command -v python3 >/dev/null || { echo "no Python"; exit 77; }
dir=$(mktemp -d) || exit 99
trap 'rm -rf "$dir"' EXIT
printf '# a comment\ng:known* a reason\n' >"$dir/skips"

# group PARTS: begins a group without results
group() {
	rm -rf "$dir/results"
	mkdir -p "$dir/results/g/unit/tests"
	echo "$1" >"$dir/results/g/parts"
}

# program NAME RESULT LINE...: what automake's driver leaves of a test program
program() {
	local at=$dir/results/g/unit/$1

	printf ':test-result: %s\n:global-test-result: %s\n' "$2" "$2" >"$at.trs"
	shift 2
	printf '%s\n' "$@" >"$at.log"
}

system() {
	printf '<testsuites><testsuite>%s</testsuite></testsuites>' "$1" >"$dir/results/g/system.xml"
}

# expect WHAT STATUS LAST-LINE
expect() {
	local status=0

	output=$(python3 -B tests/tally.py --expected "$dir/skips" "$dir/results" g 2>&1) || status=$?
	if [ "$status" != "$2" ] || [ "$(tail -n 1 <<<"$output")" != "$3" ]; then
		fail "$1: exit status $status
$output"
	fi
}

group "steps"
expect "a group that ran nothing" 1 "0 passed, 1 failed, 0 skipped"
printf 'pass\tone\nfail\ttwo\n' >"$dir/results/g/steps"
expect "a step that failed" 1 "1 passed, 1 failed, 0 skipped"
printf 'pass\tone\t\nfail\ttwo\tits reason\n' >"$dir/results/g/steps"
expect "a step that failed and says why" 1 "1 passed, 1 failed, 0 skipped"
grep -q '^FAILED: g:two: its reason$' <<<"$output" || fail "the reason is not told: $output"

group "steps unit"
printf 'pass\tone\n' >"$dir/results/g/steps"
expect "a part that ran nothing" 1 "1 passed, 1 failed, 0 skipped"
program a PASS "[       OK ] test_a" "[       OK ] test_b on uring"
expect "cases are counted one by one" 0 "3 passed, 0 failed, 0 skipped"
program b FAIL "[       OK ] test_a" "[  FAILED  ] test_b" "[  FAILED  ] 1 test(s), listed below:" "[  FAILED  ] test_b"
expect "a case that failed" 1 "4 passed, 1 failed, 0 skipped"
program b FAIL "[       OK ] test_a" "[ RUN      ] test_b"
expect "a program that crashed" 1 "4 passed, 1 failed, 0 skipped"
program b SKIP "not here"
expect "a program that was skipped for no listed reason" 1 "3 passed, 1 failed, 0 skipped"

group "unit"
program known SKIP "not here"
expect "a listed skip alone is nothing that ran" 1 "0 passed, 1 failed, 1 skipped"
program a PASS
expect "a listed skip" 0 "1 passed, 0 failed, 1 skipped"

group "system"
expect "no file of results" 1 "0 passed, 1 failed, 0 skipped"
system '<testcase classname="t" name="a"/><testcase classname="t" name="b"><failure/></testcase>'
expect "a system test that failed" 1 "1 passed, 1 failed, 0 skipped"
system '<testcase classname="t" name="a"/><testcase classname="t" name="b"><error/></testcase>'
expect "a system test with an error" 1 "1 passed, 1 failed, 0 skipped"
system '<testcase classname="t" name="a"/><testcase classname="t" name="b"><skipped message="m"/></testcase>'
expect "a system test that was skipped for no listed reason" 1 "1 passed, 1 failed, 0 skipped"
system '<testcase classname="known" name="a"><skipped message="m"/></testcase><testcase classname="t" name="b"/>'
expect "a system test whose skip is listed" 0 "1 passed, 0 failed, 1 skipped"
verdict
