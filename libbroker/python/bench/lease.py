#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a lease costs in Python, beside what it replaces: a dict of buffers and a memoryview, in the same run.

Needs a broker ($SHMBROKER_SOCKET) and the module on PYTHONPATH.
"""

from rounds import measure

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
    with shmbroker.connect() as broker:
        names = [f"bench/{i}" for i in range(COUNT)]
        regions = [broker.create(name, nbytes=4096) for name in names]
        measure(__doc__.splitlines()[0], subjects(broker, names), 16 * COUNT)
        del regions


if __name__ == "__main__":
    main()
