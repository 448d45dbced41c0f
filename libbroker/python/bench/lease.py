#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a lease costs in Python, beside what it replaces: a dict of buffers and a memoryview, in the same run.

Needs a broker ($SHMBROKER_SOCKET) and the module on PYTHONPATH. Rounds of all subjects are interleaved, and each
figure is the median of its rounds; ratios are those of the medians.
"""

import argparse
import json
import statistics
import time

import shmbroker

COUNT = 64


def subjects(broker, names):
    """(name, function of a number of operations) of each; the first one is what the others are compared with."""
    buffers = {name: bytearray(4096) for name in names}
    handles = [broker.lookup(name) for name in names]
    get, names = broker.get_memory_info, names * 16

    def baseline(rounds):
        for _ in range(rounds):
            for name in names:
                memoryview(buffers[name]).release()

    def lease(rounds):
        for _ in range(rounds):
            for name in names:
                get(name).release()

    def with_lease(rounds):
        for _ in range(rounds):
            for name in names:
                with get(name):
                    pass

    def view(rounds):
        for _ in range(rounds):
            for name in names:
                with memoryview(get(name)):
                    pass

    def handle(rounds):
        for _ in range(rounds):
            for one in handles * 16:
                one.get_memory_info().release()

    return [("dict + memoryview", baseline), ("get_memory_info + release", lease), ("handle + release", handle),
            ("with get_memory_info", with_lease), ("get_memory_info + memoryview", view)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with shmbroker.connect() as broker:
        names = [f"bench/{i}" for i in range(COUNT)]
        regions = [broker.create(name, nbytes=4096) for name in names]
        found = subjects(broker, names)
        times = {name: [] for name, _ in found}
        for _ in range(options.rounds):
            for name, function in found:
                begin = time.perf_counter_ns()
                function(10)
                times[name].append((time.perf_counter_ns() - begin) / (10 * 16 * COUNT))
        del regions
    base = statistics.median(times[found[0][0]])
    rows = [{"subject": name, "ns": round(statistics.median(values), 1),
             "ratio": round(statistics.median(values) / base, 2)} for name, values in times.items()]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['subject']:30} {row['ns']:8.1f} ns {row['ratio']:6.2f} x")


if __name__ == "__main__":
    main()
