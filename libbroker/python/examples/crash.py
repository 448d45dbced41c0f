#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a producer: what others look at stays, its name and its blocks are free, and its memory returns.

Needs a broker ($SHMBROKER_SOCKET). Ends with 1 when anything does not come back.
"""

import multiprocessing
import os
import signal
import time

import shmbroker
from shmbroker import EventType, RegionState

SIZE = 256 << 20
BLOCKS = 4
HELD = 3
PATIENCE = 60


def producer(name, pool_name, pipe):
    """Registers memory, holds blocks, and does not see its end come."""
    with shmbroker.connect() as broker, broker.open_pool(pool_name) as pool:
        with broker.create(name, nbytes=SIZE, populate=True) as region:
            memoryview(region)[:5] = b"hello"
            blocks = [pool.acquire(0) for _ in range(HELD)]
            pipe.send(len(blocks))
            pipe.recv()


def shared_memory():
    """Bytes of it on this machine, and so with those of others."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        return next(1024 * int(line.split()[1]) for line in meminfo if line.startswith("Shmem:"))


def until(condition, what):
    """Polls; ends the program when it does not come to be."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"not within {PATIENCE} s: {what}")
        time.sleep(0.01)


def regions(broker, name):
    """What the broker has under that name."""
    return [f"{entry.state.name}, {entry.leases} lease{'s' * (entry.leases != 1)}" for entry in broker.status(name)]


def main():
    name = f"example/crash-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    with shmbroker.connect() as broker, broker.create_pool(name + "/pool", BLOCKS, 4096) as pool:
        pipe, theirs = context.Pipe()
        process = context.Process(target=producer, args=(name, pool.name, theirs), daemon=True)
        process.start()
        theirs.close()
        pipe.recv()
        lease = broker.get_memory_info(name)
        before = shared_memory()
        print(f"producer {process.pid}: {SIZE >> 20} MiB, and {BLOCKS - pool.free_count} of {BLOCKS} blocks")
        print(f"broker: {name} is {', '.join(regions(broker, name))}; shared memory of this machine: {before >> 20} MiB")

        broker.subscribe(EventType.OWNER_DIED)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        print(f"kill -9 {process.pid}: exit status {process.exitcode}")
        end = time.monotonic() + PATIENCE
        while True:
            event = broker.next_event(max(end - time.monotonic(), 0))
            if event is None:
                raise SystemExit("the broker has not said that the owner died")
            if event.pid == process.pid:
                break
        print(f"event: {event.type.name}, pid {event.pid}")

        until(lambda: pool.free_count == BLOCKS, "the blocks come back")
        blocks = [pool.acquire(0) for _ in range(BLOCKS)]
        print(f"pool: all {len(blocks)} blocks are acquired again, those of the dead process, too")

        until(lambda: not list(broker.status(name, states=[RegionState.ACTIVE])), "the region is retired")
        kept = bytes(memoryview(lease)[:5])
        print(f"lease: still reads {kept}; {name} is {', '.join(regions(broker, name))}")
        broker.create(name, nbytes=1).close()
        print("name: free for others")

        lease.release()
        until(lambda: not list(broker.status(name)), "the region is gone")
        until(lambda: shared_memory() < before - SIZE // 2, "the memory returns")
        print(f"released: {name} is gone; shared memory of this machine: {shared_memory() >> 20} MiB")
    return 0 if kept == b"hello" and process.exitcode == -signal.SIGKILL else 1


if __name__ == "__main__":
    raise SystemExit(main())
