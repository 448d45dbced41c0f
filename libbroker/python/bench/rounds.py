# SPDX-License-Identifier: Apache-2.0
"""Rounds of several subjects in turn, and the table of their medians; ratios are those of the medians, to the first one."""

import argparse
import json
import statistics
import time


def measure(description, found, count):
    """found: (name, function of a number of rounds) of each; count: operations in a round."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    times = {name: [] for name, _ in found}
    for _ in range(options.rounds):
        for name, function in found:
            begin = time.perf_counter_ns()
            function(10)
            times[name].append((time.perf_counter_ns() - begin) / (10 * count))
    base = statistics.median(times[found[0][0]])
    rows = [{"subject": name, "ns": round(statistics.median(values), 1),
             "ratio": round(statistics.median(values) / base, 3)} for name, values in times.items()]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['subject']:32} {row['ns']:9.1f} ns {row['ratio']:7.3f} x")
