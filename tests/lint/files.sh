# SPDX-License-Identifier: Apache-2.0
# Sourced by the checks of this directory: changes to the source tree and lists its files.
# shellcheck shell=bash

cd "${top_srcdir:-$(dirname "${BASH_SOURCE[0]}")/../..}" || exit 99

# the project's own files: git's where this is a clone, else all but what the autotools put into a tarball
files() {
	if [ -e .git ] && git -c safe.directory='*' ls-files --cached --others --exclude-standard 2>/dev/null; then
		return
	fi
	find . -type f | sed 's|^\./||' | grep -vE \
		'^(_build|_inst|build-aux|autom4te\.cache|build[^/]*)/|^(Makefile\.in|aclocal\.m4|configure|config\.[a-z]+)$|\.(l?o|l?a|so[.0-9]*)$'
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
