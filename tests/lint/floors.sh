#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The floors of the house: libbroker/wire uses nothing of ours; the client library and the daemon use wire and
# themselves, never each other; tools, the Python module and the demonstration use the public header only, and the
# benchmarks, which measure the wire itself, wire too.
set -u
. "$(dirname "$0")/files.sh"

# resolve DIRECTORY INCLUDED: the path of a quoted include, or nothing when no such file is in the tree
resolve() {
	local base

	for base in "$1" libbroker libbroker/wire libbroker/client daemon .; do
		[ -f "$base/$2" ] && { echo "${base#./}/$2" | sed 's|^\./||'; return; }
	done
}

# allowed FILE: the places that a file may include from, as a regular expression
allowed() {
	case $1 in
	libbroker/wire/*) echo '^libbroker/wire/' ;;
	libbroker/client/*) echo '^libbroker/(client/|wire/|shmbroker\.h$)' ;;
	libbroker/python/*) echo '^libbroker/(python/|shmbroker\.h$)' ;;
	daemon/*) echo '^(daemon|libbroker/wire)/' ;;
	tools/bench/*) echo "^(tools/bench/|libbroker/wire/|libbroker/shmbroker\\.h$)" ;;
	tools/*) echo "^(${1%/*}/|libbroker/shmbroker\.h$)" ;;
	tests/demo/*) echo '^(tests/demo/|libbroker/shmbroker\.h$)' ;;
	*) echo . ;;
	esac
}

seen=0
while read -r file; do
	while read -r included; do
		path=$(resolve "${file%/*}" "$included")
		seen=$((seen + 1))
		if [ -z "$path" ]; then
			case $included in
			*.def | */*) fail "$file: includes $included, which is not there" ;;
			esac
		elif ! [[ $path =~ $(allowed "$file") ]]; then
			fail "$file: includes $path, from a floor that it may not use"
		fi
	done < <(sed -nE 's/^[[:space:]]*#[[:space:]]*include[[:space:]]+("([^"]+)"|<(shmbroker\.h|wire\/[^>]+|client\/[^>]+)>).*/\2\3/p' "$file")
done < <(files | grep -E '\.(c|h|def)$' | grep -E '^(libbroker|daemon|tools|tests/demo)/')
[ "$seen" -gt 0 ] || fail "no include was looked at"
verdict
