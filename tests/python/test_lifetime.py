# SPDX-License-Identifier: Apache-2.0
"""Leaks, the interpreter's end, threads, forks."""

import os
import signal
import subprocess
import sys
import threading

import numpy
import pytest
from conftest import DEADLINE, check_growth, until

import shmbroker

ITERATIONS = 100000
# less than 8 bytes an iteration, or than one object a round trip; AddressSanitizer keeps what is freed for a while, and
# gives 32 bytes or more for 8
ROOM = (2 << 20) if "libasan" in os.environ.get("LD_PRELOAD", "") else (512 << 10)


def refused(function, *args, **how):
    with pytest.raises(shmbroker.Error):
        function(*args, **how)


def find_own(pool):
    with pool.acquire() as block:
        pool.find(block.offset, 1).numpy()


def give_twice(pool):
    block = pool.acquire()
    pool.take(*block.give()).release()
    block.release()


CASES = {
    "lease": lambda broker, region: broker.get_memory_info("r").release(),
    "options": lambda broker, region: broker.get_memory_info("r", offset=8, nbytes=16, write=True).release(),
    "dropped": lambda broker, region: broker.get_memory_info("r"),
    "handle": lambda broker, region: broker.lookup("r").get_memory_info(),
    "memoryview": lambda broker, region: memoryview(broker.get_memory_info("r"))[3],
    "view": lambda broker, region: broker.get_memory_info("r").view((2, 2, 4), "float32").view(4).shape,
    "numpy": lambda broker, region: broker.get_memory_info("r").numpy((4, 4), "float32"),
    "dlpack": lambda broker, region: numpy.from_dlpack(broker.get_memory_info("r")),
    "capsule": lambda broker, region: broker.get_memory_info("r").__dlpack__(max_version=(1, 0)),
    "interface": lambda broker, region: broker.get_memory_info("r").__array_interface__,
    "attributes": lambda broker, region: (region.name, region.shape, region.flags, region.dtype, region.fd, region.address),
    "copy": lambda broker, region: broker.get_memory_info("r", write=True).copy_in(b"x"),
    "bytes": lambda broker, region: broker.get_memory_info("r").copy_out(nbytes=10),
    "refused": lambda broker, region: refused(broker.get_memory_info, "r", 1 << 40),
}
BLOCKS = {
    "block": lambda broker, pool: pool.acquire().release(),
    "block with": lambda broker, pool: pool.acquire(0).__enter__().__exit__(None, None, None),
    "block dropped": lambda broker, pool: (pool.acquire().numpy(), pool.acquire().view(4, "uint16"), pool.acquire()),
    "block dlpack": lambda broker, pool: numpy.from_dlpack(pool.acquire()),
    "block given": lambda broker, pool: pool.take(*pool.acquire().give()),
    "block found": lambda broker, pool: find_own(pool),
    "block refused": lambda broker, pool: (refused(pool.find, 0, 1), refused(pool.take, 0, 1), refused(give_twice, pool)),
    "no block": lambda broker, pool: refused(lambda: [pool.acquire(0) for _ in range(5)]),
    "pool attributes": lambda broker, pool: (pool.name, pool.n_blocks, pool.block_size, pool.generation, pool.free_count),
}
# each of these is a round trip, or several
ASKING = {
    "not found": lambda broker, region: refused(broker.get_memory_info, "no"),
    "region": lambda broker, region: broker.create("other", 3, "int16").close(),
    "status": lambda broker, region: list(broker.status(holders=True)),
    "clients": lambda broker, region: (broker.clients(), broker.stats(True), broker.broker_info(), broker.info),
    "pool": lambda broker, region: broker.create_pool("other", 3, 16).acquire().numpy(),
    "pool refused": lambda broker, region: refused(broker.open_pool, "r"),
    "unregister": lambda broker, region: broker.unregister(["a", "b"]),
    "connect": lambda broker, region: shmbroker.connect().close(),
}


@pytest.mark.parametrize("case", [*CASES, *BLOCKS, *ASKING])
def test_nothing_leaks(broker, case):
    function = {**CASES, **BLOCKS, **ASKING}[case]
    count = ITERATIONS // 50 if case in ASKING else ITERATIONS
    with broker.create("r", 16, "float32") as region, broker.create_pool("pool", 4, 64) as pool:
        subject = pool if case in BLOCKS else region
        watched = (region, broker, pool, shmbroker.NotFound, shmbroker.Lease, shmbroker.View, shmbroker.Region,
                   shmbroker.Pool, shmbroker.Block, None)

        def work(times=count):
            for _ in range(times):
                function(broker, subject)

        work(count // 10)
        references = [sys.getrefcount(one) for one in watched]
        check_growth(work, ROOM)
        grown = [sys.getrefcount(one) - before for one, before in zip(watched, references)]
        assert max(grown) < count // 100, grown
        assert region.exports == 0 and pool.free_count == 4


EXITS = {
    "globals": "lease = broker.get_memory_info('r'); array = lease.numpy(); view = memoryview(region)",
    "dlpack": "array = numpy.from_dlpack(broker.get_memory_info('r')); other = numpy.from_dlpack(region)",
    "cycle": "cycle = [broker.get_memory_info('r').numpy()]; cycle.append(cycle)",
    "builtins": "import builtins; builtins.kept = broker.get_memory_info('r').numpy(); del broker",
    "module": "sys.modules['kept'] = broker.get_memory_info('r').numpy(); del sys.modules['shmbroker'], shmbroker",
    "closed": "array = broker.get_memory_info('r').numpy(); broker.close()",
    "thread-local": "local = threading.local(); local.array = broker.get_memory_info('r').numpy()",
    "daemon threads": """
def loop():
    while True:
        with broker.get_memory_info('r') as lease:
            lease.numpy()[0]
        started.set()
started = threading.Event()
for _ in range(4):
    threading.Thread(target=loop, daemon=True).start()
started.wait()
""",
    "daemon thread that waits": """
lease = broker.get_memory_info('r')
threading.Thread(target=broker.next_event, daemon=True).start()
threading.Thread(target=lambda: region.retire(wait=True), daemon=True).start()
while not [entry for entry in broker.status() if entry.state == shmbroker.RegionState.RETIRING]:
    pass
""",
    "finalizer": """
class Late:
    def __del__(self):
        self.lease.release(), self.array[0], self.array.tolist()
late = Late()
late.lease = broker.get_memory_info('r')
late.array = late.lease.numpy()
""",
    "blocks": "block, array, given = pool.acquire(), pool.acquire().numpy(), pool.acquire(); given.give()",
    "block in builtins": "import builtins; builtins.kept = pool.acquire().numpy(); pool.close(); del broker, pool",
    "block in a module": "sys.modules['kept'] = pool.acquire(); del sys.modules['shmbroker'], shmbroker, pool",
    "pools of a closed broker": "array = pool.acquire().numpy(); broker.close()",
    "block dlpack": "array = numpy.from_dlpack(pool.acquire()); del pool",
    "daemon threads that acquire": """
def loop():
    while True:
        with pool.acquire() as block:
            block.numpy()[0] = 1
        started.set()
started = threading.Event()
for _ in range(6):
    threading.Thread(target=loop, daemon=True).start()
started.wait()
""",
    "coroutines that wait": """
import asyncio
async def main():
    for _ in range(4):
        blocks.append(pool.acquire())
    asyncio.create_task(broker.aio.acquire(pool))
    await asyncio.sleep(0)
blocks = []
asyncio.run(main())
""",
    "exit": "lease = broker.get_memory_info('r'); view = memoryview(lease); sys.exit(0)",
}


@pytest.mark.parametrize("case", EXITS)
def test_the_interpreter_ends(run, case):
    run("import sys, threading, numpy, shmbroker\nbroker = shmbroker.connect()\n"
        f"region = broker.create('r', nbytes=4096)\npool = broker.create_pool('p', 4, 4096)\nbroker.subscribe()\n"
        f"{EXITS[case]}")


def test_an_exit_without_a_broker_does_not_wait(run):
    assert run("""
import os, signal, time, shmbroker
broker = shmbroker.connect()
region = broker.create("r", nbytes=1)
os.kill(int(broker.broker_info()["pid"]), signal.SIGKILL)
print("ok")
""").strip() == "ok"


def test_threads(broker):
    """Many threads over one connection, each with a region of its own and one of all."""
    failures = []

    def work(number):
        try:
            for i in range(200):
                with broker.create(f"own/{number}", 64, "int32") as region:
                    region.numpy()[:] = number + i
                    with broker.get_memory_info(f"own/{number}") as lease, broker.get_memory_info("all") as shared:
                        assert (lease.numpy(dtype="int32") == number + i).all()
                        assert bytes(shared) == b"all" * 100
        except BaseException as error:  # pylint: disable=broad-except
            failures.append(error)

    with broker.create("all", nbytes=300) as region:
        memoryview(region)[:] = b"all" * 100
        threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        (entry,) = broker.status()
        assert entry.leases == 0


def test_others_run_while_one_waits(broker):
    """Retirement waits for a lease that another thread gives back."""
    region, lease = broker.create("r", nbytes=1), broker.get_memory_info("r")
    done = []
    waiter = threading.Thread(target=lambda: done.append(region.retire(wait=True, timeout=60)))
    waiter.start()
    while not list(broker.status(states=[shmbroker.RegionState.RETIRING])):
        assert waiter.is_alive()
    assert not done
    lease.release()
    waiter.join()
    assert done == [None]
    region.close()


WAITS = {
    "ping": lambda broker, region, lease: broker.ping(),
    "create": lambda broker, region, lease: broker.create("s", nbytes=1),
    "create_pool": lambda broker, region, lease: broker.create_pool("s", 1, 1),
    "adopt": lambda broker, region, lease: broker.adopt("s", region.fd),
    "get_memory_info": lambda broker, region, lease: broker.get_memory_info("r"),
    "lookup": lambda broker, region, lease: broker.lookup("r"),
    "open_pool": lambda broker, region, lease: broker.open_pool("p"),
    "fileno": lambda broker, region, lease: lease.fileno(),
    "retire": lambda broker, region, lease: region.retire(),
    "close": lambda broker, region, lease: region.close(),
    "unregister": lambda broker, region, lease: broker.unregister(["r"]),
    "unregister_all": lambda broker, region, lease: broker.unregister_all(),
    "subscribe": lambda broker, region, lease: broker.subscribe(),
    "status": lambda broker, region, lease: list(broker.status()),
    "clients": lambda broker, region, lease: broker.clients(),
    "stats": lambda broker, region, lease: broker.stats(),
    "broker_info": lambda broker, region, lease: broker.broker_info(),
}


@pytest.mark.parametrize("case", WAITS)
def test_others_run_while_the_broker_is_asked(daemon, case):
    """Only another thread makes the broker answer; a call that keeps that one from running ends with TimedOut."""
    with shmbroker.connect(daemon.socket) as other, other.create_pool("p", 1, 1), shmbroker.connect(daemon.socket) as broker:
        region = broker.create("r", nbytes=4096)
        lease = broker.get_memory_info("r", write=True)
        broker.set_call_timeout(DEADLINE)
        calls, results = threading.Event(), []

        def ask():
            calls.set()
            try:
                results.append(WAITS[case](broker, region, lease))
            except shmbroker.Error as error:
                results.append(error)

        daemon.process.send_signal(signal.SIGSTOP)
        try:
            asker = threading.Thread(target=ask)
            asker.start()
            calls.wait()
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        asker.join()
        assert not isinstance(results[0], shmbroker.Error), results
        results.clear()
        del lease, region


def test_close_while_others_call(daemon):
    broker = shmbroker.connect(daemon.socket)
    waiter = threading.Thread(target=lambda: pytest.raises(ValueError, broker.next_event))
    waiter.start()
    broker.ping()
    broker.close()
    waiter.join(30)
    assert not waiter.is_alive()


def test_fork(run):
    assert run("""
import os, shmbroker
broker = shmbroker.connect()
region = broker.create("r", nbytes=4096)
memoryview(region)[:3] = b"abc"
lease = broker.get_memory_info("r")
view = memoryview(lease)
pid = os.fork()
if not pid:
    failed = 0
    assert bytes(view[:3]) == b"abc"
    for call in (lambda: broker.get_memory_info("r"), lambda: broker.create("s", nbytes=1), broker.ping, broker.process,
                 broker.fileno, lambda: broker.lookup("r"), lambda: list(broker.status()), region.retire,
                 broker.next_event, broker.clients):
        try:
            call()
        except shmbroker.ForkedError:
            failed += 1
    view.release()
    try:
        lease.release()
    except shmbroker.ForkedError:
        failed += 1
    del region, lease
    with shmbroker.connect() as own, own.get_memory_info("r") as again:
        assert bytes(memoryview(again)[:3]) == b"abc"
    broker.close()
    os._exit(failed)
_, status = os.waitpid(pid, 0)
(entry,) = broker.status()
print(os.waitstatus_to_exitcode(status), entry.leases, bytes(view[:3]), broker.ping() > 0)
""").strip() == "11 1 b'abc' True"


def test_a_killed_owner_leaves_the_lease(broker):
    """The memory of an owner that is killed stays as long as the lease, and the name is free."""
    owner = subprocess.Popen([sys.executable, "-c", "import shmbroker\nb = shmbroker.connect()\n"
                              "r = b.create('r', nbytes=4096)\nmemoryview(r)[:3] = b'abc'\nprint(flush=True)\ninput()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    owner.stdout.readline()
    view = memoryview(broker.get_memory_info("r"))
    owner.kill()
    owner.communicate()
    until(lambda: not list(broker.status(states=[shmbroker.RegionState.ACTIVE])), "the broker has noticed")
    broker.create("r", nbytes=1).close()
    assert bytes(view[:3]) == b"abc"
