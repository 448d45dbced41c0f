#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The public header is C99 and C++, alone; and the library exports what it declares, no more and no less.
set -u
build=$(cd "${top_builddir:-.}" && pwd)
. "$(dirname "$0")/files.sh"

strict="-Wall -Wextra -Wundef -Wstrict-prototypes -Werror -pedantic-errors -fsyntax-only"
source='#include <shmbroker.h>'
# shellcheck disable=SC2086  # CC and CXX may be several words, as may the flags
{
	${CC:-cc} -std=c99 $strict -Ilibbroker -x c - <<<"$source" || fail "not C99"
	if command -v ${CXX:-c++} >/dev/null; then
		${CXX:-c++} -std=c++11 ${strict/-Wstrict-prototypes /} -Ilibbroker -x c++ - <<<"$source" || fail "not C++11"
	fi
}

declared=$(sed 's|/\*.*\*/||' libbroker/shmbroker.h | grep -oE '\bshmb_[a-z_]+\(' | tr -d '(' | sort -u)
exported=$(nm -D --defined-only "$build/.libs/libshmbroker.so" | awk '$2 == "T" { sub(/@.*/, "", $3); print $3 }' | sort -u)
[ -n "$exported" ] || fail "the library exports nothing"
other=$(nm -D --defined-only "$build/.libs/libshmbroker.so" | awk '$3 !~ /^(shmb_[a-z_]+(@.*)?|SHMBROKER_[0-9]+)$/')
[ -z "$other" ] || fail "exported, and no function of the interface: $other"
while read -r mark name; do
	case $mark in
	'<') fail "declared, not exported: $name" ;;
	'>') fail "exported, not declared: $name" ;;
	esac
done < <(diff <(echo "$declared") <(echo "$exported"))
verdict
