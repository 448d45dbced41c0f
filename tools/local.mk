# SPDX-License-Identifier: Apache-2.0

ctl_sources =

dist_man_MANS +=
EXTRA_DIST += tools/quickstart
