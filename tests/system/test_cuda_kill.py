# SPDX-License-Identifier: Apache-2.0
"""The broker is killed at any moment while GPU memory is registered, leased and retired by processes that go on: after each
kill it has what they were told, no more and no less, and the memory under a lease is that of its region."""

import random
import time

import pytest
from broker import ADMIN, CONSUMER, until
from cuda_programs import MIB2, READ, Failed, Lease, Region, gpus  # noqa: F401
from gpus import is_built
from protocol_client import STATE
from restart import LastingBroker

ROUNDS = 14
MOMENTS = 0.06  # seconds after the requests that the kill comes within
STRICT, FORCE = 0, 2

pytestmark = pytest.mark.skipif(not is_built(), reason="built without GPU memory")
# pylint: disable=redefined-outer-name


class Known:
    """A region as its owner and its holder know it."""

    def __init__(self, number, kind):
        self.name, self.kind, self.byte, self.size = f"r{number}", kind, number + 1, (1 + number % 3) * MIB2
        self.region, self.state, self.leases = None, STATE["ACTIVE"], []

    def is_there(self):
        """A region that is retired goes with its last lease."""
        return self.state == STATE["ACTIVE"] or self.leases


class Parties:
    """An owner and a consumer, what they are told, and what they ask for in a round."""

    def __init__(self, fake):
        self.owner, self.consumer = fake.client(), fake.client(uid=CONSUMER)
        self.known, self.n = [], 0

    def register(self):
        one = Known(self.n, random.choice(("ipc", "vmm")))
        self.n += 1
        if one.kind == "ipc":
            # a window of an allocation that is larger
            pointer = self.owner.alloc(one.size + MIB2) + 4096
            self.owner.fill(pointer, one.byte, one.size)
            self.owner.begin("export", one.name, pointer, one.size, 0)
        else:
            self.owner.begin("cuda_alloc", one.name, one.size, 0, 0)

        def done():
            one.region = Region(*map(int, self.owner.finish().split()))
            if one.kind == "vmm":
                self.owner.fill(one.region.data, one.byte, one.size)
            self.known.append(one)

        return one, done

    def retire(self):
        one = random.choice([one for one in self.known if one.state == STATE["ACTIVE"]])
        mode, state = random.choice(((STRICT, STATE["RETIRING"]), (FORCE, STATE["REVOKED"])))
        self.owner.begin("retire", one.region.id, mode, 0)

        def done():
            self.owner.finish()
            one.state = state

        return one, done

    def get(self, other):
        one = random.choice([one for one in self.known if one.state == STATE["ACTIVE"] and one is not other])
        self.consumer.begin("get", one.name, 0, 2**64 - 1, READ)

        def done():
            fields = self.consumer.finish().split()
            one.leases.append(Lease(*map(int, fields[:6]), bytes.fromhex(fields[6])))

        return done

    def release(self, other):
        one = random.choice([one for one in self.known if one.leases and one is not other])
        self.consumer.begin("release", one.leases[-1].id)

        def done():
            try:
                self.consumer.finish()
            except Failed as error:
                assert error.name == "REVOKED" and one.state == STATE["REVOKED"], error
            else:
                assert one.state != STATE["REVOKED"]
            one.leases.pop()

        return done

    def begin(self):
        """A request of each. Returns what takes their answers."""
        active = sum(one.state == STATE["ACTIVE"] for one in self.known)
        one, done = self.retire() if active > 4 or (active > 2 and random.random() < 0.4) else self.register()
        held = sum(bool(other.leases) for other in self.known if other is not one)
        others = [other for other in self.known if other.state == STATE["ACTIVE"] and other is not one]
        if held and (held > 4 or not others or random.random() < 0.4):
            return done, self.release(one)
        return (done, self.get(one)) if others else (done,)

    def is_told(self, admin):
        """Status has each region with its state, its bytes and its leases."""
        self.look_after()
        found = {entry["name"].decode(): (entry["state"], entry["size"], entry["object_size"], entry["leases"])
                 for entry in admin.status()}
        return found == {one.name: (one.state, one.size, self.allocation(one), len(one.leases))
                         for one in self.known if one.is_there()}

    def look_after(self):
        """As an event loop does: who only releases finds out by that that there is another broker."""
        self.owner.do("process")
        self.consumer.do("process")

    @staticmethod
    def allocation(one):
        return one.size + (MIB2 if one.kind == "ipc" else 0)

    def check(self, admin):
        until(lambda: self.is_told(admin), lambda: f"{[vars(one) for one in self.known if one.is_there()]} {admin.status()}")
        # what is revoked is no longer the owner's to pay
        assert admin.stats()["held_gpu_bytes"] == sum(self.allocation(one) for one in self.known
                                                      if one.is_there() and one.state != STATE["REVOKED"])
        for one in self.known:
            for lease in one.leases:
                assert self.consumer.read(lease.address) == bytes([one.byte]) * 4

    def end(self, admin):
        for one in self.known:
            for lease in one.leases:
                try:
                    self.consumer.release(lease)
                except Failed as error:
                    assert error.name == "REVOKED" and one.state == STATE["REVOKED"], error
            one.leases = []
            if one.state == STATE["ACTIVE"]:
                self.owner.do("retire", one.region.id, STRICT, 0)

        def is_over():
            self.look_after()
            return not admin.status()

        until(is_over, admin.status)
        assert not admin.stats()["held_gpu_bytes"]


@pytest.mark.parametrize("mode", ["validate", "hold"])
def test_the_broker_is_killed_at_any_moment(gpus, mode):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    random.seed(seed)
    fake = gpus(mode=mode, broker={"kind": LastingBroker})
    fake.needs_fake()
    parties, admin = Parties(fake), fake.broker.peer(ADMIN)
    for _ in range(ROUNDS):
        answers = parties.begin()
        time.sleep(random.uniform(0, MOMENTS))
        for _ in range(random.choice((1, 1, 2))):
            fake.broker.kill()
        admin.resume()
        for take in answers:
            take()
        parties.check(admin)
    parties.end(admin)
    for program in (parties.consumer, parties.owner):
        program.end()
        assert fake.balance(pid=program.pid) in ({}, {"context": 1}), fake.log(pid=program.pid)
