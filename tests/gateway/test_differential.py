# SPDX-License-Identifier: Apache-2.0
"""The same operations through the broker's socket, over HTTP and over gRPC leave the same state, whoever looks.

Each way has a broker and a gateway of its own, and a fourth pair gets each operation by a way of chance. The operations
are random; the seed is printed, and SHMBROKER_SEED is for others than those of every run.
"""

import contextlib
import os
import pathlib
import random
import sys

import pytest

from conftest import SHM, running

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "system"))
from protocol_client import (  # noqa: E402  pylint: disable=wrong-import-position
    NUMBERS, REGION, STATE, Client, Refused, register_entry,
)

grpc_client = pytest.importorskip("tritonclient.grpc")

KEEP = NUMBERS["REGISTER"]["KEEP"]
NAMES = ["a", "b/c", "ü 'quoted\"", "d%41", "e" * 255]
SIZES = [4096, 8192, 20000]
SEEDS = [int(seed) for seed in os.environ.get("SHMBROKER_SEED", "1 2 3").split()]
STEPS = 120
LISTED = STATE["ACTIVE"], STATE["LAZY"]
DONE = "done"


class Native:
    """By the protocol itself, as the gateway does it."""

    def __init__(self, gateway):
        self.client = Client(gateway.broker.socket)
        self.client.hello()

    def register(self, name, key, offset, size):
        path = SHM / key.lstrip("/")
        try:
            fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC), os.open(path, os.O_RDONLY | os.O_CLOEXEC)]
        except FileNotFoundError:
            # the order of the gateway's checks: the name comes first
            return "exists" if self.listed(name) else "no key"
        try:
            item = register_entry(name, size, offset, read_only_fd=1, flags=KEEP, key=key)
            (result,) = self.client.register_many([item], fds)
            return {0: DONE, 7: "exists", 14: "bounds"}[result["code"]]
        finally:
            for fd in fds:
                os.close(fd)

    def listed(self, name):
        return [e for e in self.client.status(name=name, match="EXACT") if e["state"] in LISTED]

    def unregister(self, name):
        # this user may, but a gateway does not do it for those who come by TCP
        if any(not entry["key"] for entry in self.listed(name)):
            return "native"
        try:
            self.client.unregister(name, mode="LAZY")
        except Refused as refused:
            assert refused.name == "NOT_FOUND"
        return DONE

    def unregister_all(self):
        for entry in self.client.status():
            if entry["key"] and entry["state"] in LISTED:
                self.unregister(entry["name"])
        return DONE

    def view(self):
        """What a native client sees: of each region what a client of a gateway sees too, and the rest."""
        return {
            e["name"].decode(): ((e["key"].decode(), e["offset"], e["size"]) if e["key"] else (f"shmbroker:{e['name'].decode()}", 0, e["size"]),
                                 (e["state"], e["leases"], e["flags"] & REGION["KEPT"], e["access"]))
            for e in self.client.status() if e["state"] in LISTED}

    def close(self):
        self.client.close()


def kind_of(text):
    for words, kind in (("already in manager", "exists"), ("Unable to open", "no key"), ("invalid args", "bounds"),
                        ("was registered natively", "native")):
        if words in text:
            return kind
    return text


class Http:
    def __init__(self, gateway):
        self.gateway, self.said = gateway, None

    def _done(self, reply):
        self.said = None if reply.status == 200 else reply.error
        return DONE if reply.status == 200 else kind_of(reply.error)

    def register(self, name, key, offset, size):
        return self._done(self.gateway.register(name, key, size, offset))

    def unregister(self, name):
        return self._done(self.gateway.region("system", name, "unregister"))

    def unregister_all(self):
        return self._done(self.gateway.post("/v2/systemsharedmemory/unregister"))

    def view(self):
        return {e["name"]: (e["key"], e["offset"], e["byte_size"]) for e in self.gateway.status()}

    def close(self):
        pass


class Grpc:
    def __init__(self, gateway):
        self.client, self.said = grpc_client.InferenceServerClient(gateway.grpc), None

    def _done(self, call, *arguments):
        self.said = None
        try:
            call(*arguments)
            return DONE
        except grpc_client.InferenceServerException as error:
            self.said = error.message()
            return kind_of(self.said)

    def register(self, name, key, offset, size):
        return self._done(self.client.register_system_shared_memory, name, key, size, offset)

    def unregister(self, name):
        return self._done(self.client.unregister_system_shared_memory, name)

    def unregister_all(self):
        return self._done(self.client.unregister_system_shared_memory)

    def view(self):
        return {name: (e.key, e.offset, e.byte_size)
                for name, e in self.client.get_system_shared_memory_status().regions.items()}

    def close(self):
        self.client.close()


class World:
    """A broker, a gateway, and a client of each kind; and a consumer who holds leases."""

    def __init__(self, gateway):
        self.ways = {"native": Native(gateway), "http": Http(gateway), "grpc": Grpc(gateway)}
        self.consumer, self.held = Client(gateway.broker.socket), []
        self.consumer.hello()
        self.owner = Client(gateway.broker.socket)
        self.owner.hello()

    def hold(self, name):
        """A lease, which keeps what is retired lazily."""
        try:
            self.held.append(self.consumer.lookup(name)["lease"])
            return DONE
        except Refused as refused:
            return refused.name

    def let_go(self, index):
        if self.held:
            self.consumer.release(self.held.pop(index % len(self.held)))
        return len(self.held)

    def disown(self, name):
        """Its owner retires it."""
        try:
            if any(not entry["key"] for entry in self.owner.status(name=name, match="EXACT")):
                self.owner.unregister(name, mode="LAZY")
            return DONE
        except Refused as refused:
            return refused.name

    def own(self, name, path, size):
        """A region without a key, of a session, as native programs have them."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.owner.register(name, fd, size)
            return DONE
        except Refused as refused:
            return refused.name
        finally:
            os.close(fd)

    def views(self):
        """What each sees; that it is the same is checked here."""
        seen = {way: client.view() for way, client in self.ways.items()}
        shown = {name: of_all for name, (of_all, _) in seen["native"].items()}
        assert seen["http"] == shown
        assert seen["grpc"] == shown
        return seen["native"]

    def close(self):
        for client in (*self.ways.values(), self.consumer, self.owner):
            client.close()


@pytest.fixture
def worlds():
    """{how operations get there: World}"""
    with contextlib.ExitStack() as stack:
        # no process is started once there are clients, whose threads do not like it
        gateways = {way: stack.enter_context(running()) for way in ("native", "http", "grpc", "any")}
        made = {way: World(gateway) for way, gateway in gateways.items()}
        for world in made.values():
            stack.callback(world.close)
        yield made


def next_step(chance, keys):
    """(what, arguments): the names are few, so that they meet."""
    name = chance.choice(NAMES)
    which = chance.random()
    if which < 0.45:
        key, size = chance.choice(keys + [("/shmg-there-is-none", 4096)])
        offset = chance.choice([0, 0, 1, 64, 4096, size, 2**64 - 1])
        return "register", (name, key, offset, chance.choice([1, 100, 4096, max(1, size - offset), size + 1]))
    if which < 0.65:
        return "unregister", (name,)
    if which < 0.69:
        return "unregister_all", ()
    if which < 0.82:
        return "hold", (name,)
    if which < 0.95:
        return "let_go", (chance.randrange(8),)
    if which < 0.98:
        return "own", (name, SHM / keys[0][0][1:], 4096)
    return "disown", (name,)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_operations_leave_the_same_state(worlds, key, seed):
    print("seed", seed)
    chance = random.Random(seed)
    keys = [(key(f"k{i}", size), size) for i, size in enumerate(SIZES)]
    seen = set()
    for step in range(STEPS):
        what, arguments = next_step(chance, keys)
        by_chance = chance.choice(["native", "http", "grpc"])
        results = {}
        for way, world in worlds.items():
            client = world.ways[by_chance if way == "any" else way]
            results[way] = getattr(world if hasattr(world, what) else client, what)(*arguments)
        where = f"seed {seed}, step {step}: {what}{arguments}"
        assert len(set(results.values())) == 1, (where, results)
        # with the same words, too
        assert worlds["http"].ways["http"].said == worlds["grpc"].ways["grpc"].said, where
        views = {way: world.views() for way, world in worlds.items()}
        for way in ("http", "grpc", "any"):
            assert views[way] == views["native"], (where, way)
        seen.add((what, results["native"]))
    # all that can happen to a registration has happened
    assert {("register", DONE), ("register", "exists"), ("register", "bounds"), ("register", "no key"), ("hold", DONE),
            ("hold", "NOT_FOUND"), ("unregister", DONE), ("unregister_all", DONE)} <= seen, seen
