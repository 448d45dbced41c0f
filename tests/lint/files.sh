# SPDX-License-Identifier: Apache-2.0
# Sourced by the checks of this directory: changes to the source tree and lists its files.
# shellcheck shell=bash

cd "${top_srcdir:-$(dirname "${BASH_SOURCE[0]}")/../..}" || exit 99

# where somebody builds below the source tree; a line that is in no file's name when there is none
build_directories() {
	find . -mindepth 2 -maxdepth 3 -name config.status -printf '%P\n' | sed 's|config.status$||'
	echo '//'
}

# the project's own files: git's where this is a clone, in a tarball what the build lists
files() {
	local word

	if [ -e .git ] && git -c safe.directory='*' ls-files --cached --others --exclude-standard 2>/dev/null |
			grep -v -F -f <(build_directories); then
		return
	fi
	cat Makefile.am ./*/local.mk ./*/*/local.mk | tr -s '\\[:space:]' '\n' | grep -E '^[a-z]+/' | sort -u | while read -r word; do
		if [ -d "$word" ]; then
			find "$word" -type f
		elif [ -f "$word" ]; then
			echo "$word"
		elif [ -f "$word.c" ]; then
			echo "$word.c"
		fi
	done
}

# fail TEXT: says it; verdict ends the check with failure when there was any
failures=0
fail() {
	echo "$1"
	failures=$((failures + 1))
}

verdict() {
	[ "$failures" = 0 ] || { echo "$failures found"; exit 1; }
	exit 0
}
