#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a block of a pool costs in Python, beside what is built without one: numbers of blocks in a queue of processes.

Needs a broker ($SHMBROKER_SOCKET) and the module on PYTHONPATH.
"""

import multiprocessing

from rounds import measure

import shmbroker

BLOCKS = 16
COUNT = 100


def subjects(pool, queue):
    """(name, function of a number of rounds) of each; all of one process, so that nobody waits."""

    def baseline(rounds):
        for _ in range(rounds * COUNT):
            queue.put(queue.get())

    def block(rounds):
        for _ in range(rounds * COUNT):
            pool.acquire().release()

    def with_block(rounds):
        for _ in range(rounds * COUNT):
            with pool.acquire():
                pass

    def view(rounds):
        for _ in range(rounds * COUNT):
            with pool.acquire() as held, memoryview(held):
                pass

    def handed_over(rounds):
        for _ in range(rounds * COUNT):
            pool.take(*pool.acquire().give()).release()

    return [("multiprocessing.SimpleQueue", baseline), ("acquire + release", block), ("with acquire", with_block),
            ("with acquire, memoryview", view), ("acquire, give, take, release", handed_over)]


def main():
    queue = multiprocessing.SimpleQueue()
    for number in range(BLOCKS):
        queue.put(number)
    with shmbroker.connect() as broker, broker.create_pool("bench/pool", BLOCKS, 4096) as pool:
        measure(__doc__.splitlines()[0], subjects(pool, queue), COUNT)


if __name__ == "__main__":
    main()
