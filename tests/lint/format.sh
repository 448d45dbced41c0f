#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The C files are as clang-format leaves them. Tables (*.def, and what is between clang-format off and on) are set by hand.
set -u
. "$(dirname "$0")/files.sh"

command -v clang-format >/dev/null || { echo "no clang-format"; exit 77; }
files | grep -E '\.[ch]$' | xargs clang-format --dry-run -Werror --ferror-limit=3
