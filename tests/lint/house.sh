#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What every file keeps: a licence line, fewer than 1,000 lines, no trailing blanks, no path or host of the machine
# that it was written on, no leftovers; and every file is in the build, so that it is in a tarball.
set -u
. "$(dirname "$0")/files.sh"

# brackets keep these patterns from finding themselves
leftovers='(/hom[e]/[a-z]|/wor[k]/|/tm[p]/(bas[h]|w/)|\bTOD[O]\b|\bFIXM[E]\b|\bXX[X]\b|deb[.]debian[.]org|py[p]i[.]org|pythonhoste[d])'

listed=$(cat Makefile.am configure.ac ./*/local.mk ./*/*/local.mk)
seen=0
while read -r file; do
	seen=$((seen + 1))
	case $file in
	LICENSE | README.md | NEWS | *.bin | *.json) ;;
	*) head -n 5 "$file" | grep -q 'SPDX-License-Identifier: Apache-2\.0' || fail "$file: no SPDX line in its first lines" ;;
	esac
	case $file in
	*.bin) ;;
	*)
		lines=$(wc -l <"$file")
		[ "$file" = LICENSE ] || [ "$lines" -lt 1000 ] || fail "$file: $lines lines, split it by subject"
		if grep -nE '[[:blank:]]+$' "$file" | head -n 3 | grep .; then fail "$file: trailing blanks"; fi
		if grep -nE "$leftovers" "$file" | head -n 3 | grep .; then fail "$file: a machine's path or host, or a leftover"; fi
		;;
	esac
	case $file in
	.gitignore | .ci/run | configure.ac | Makefile.am | */local.mk) ;;
	*)
		grep -qF "${file%.c}" <<<"$listed" || grep -qE "(^|[[:space:]])${file%/*}([[:space:]]|$)" <<<"$listed" ||
			{ case $file in *.in) grep -qF "${file%.in}" <<<"$listed" ;; *) false ;; esac } ||
			fail "$file: no local.mk lists it"
		;;
	esac
done < <(files)
[ "$seen" -gt 10 ] || fail "only $seen files were looked at"
verdict
