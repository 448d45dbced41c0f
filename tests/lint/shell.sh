#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Scripts pass shellcheck.
set -u
. "$(dirname "$0")/files.sh"

command -v shellcheck >/dev/null || { echo "no shellcheck"; exit 77; }
files | while read -r file; do
	head -n 1 "$file" | grep -qaE '^#!.*\b(ba)?sh\b' && echo "$file"
done | xargs shellcheck -x --source-path=SCRIPTDIR
