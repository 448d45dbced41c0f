# SPDX-License-Identifier: Apache-2.0
"""20,000 regions, windows of 4,000 objects, through one broker: registered, looked up and listed while others are served."""

import os

from broker import ADMIN, CONSUMER, OWNER, uid_of, until
from protocol_client import (
    LIMIT, READ, REST, STRUCTS, Client, batch, entries, memory, name_bytes, padded, register_entry,
)

OBJECTS, WINDOWS, BATCH = 4000, 5, 60


def lookup_many(client, names):
    """LookupResults of a batch without fds."""
    items = [STRUCTS["LookupEntry"].pack(size=REST, access=READ, name_length=len(name)) + padded(name)
             for name in map(name_bytes, names)]
    _, body, _ = client.call("LOOKUP", batch(*items))
    return [entry for entry, _ in entries(body, STRUCTS["CountHead"].size, len(items), "LookupResult", "text", "handle")]


def test_20000_regions(broker):
    owner, bystander, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)

    def own(path):
        client = Client(path)
        client.hello()
        names = []
        per_message = BATCH // WINDOWS
        for first in range(0, OBJECTS, per_message):
            numbers = range(first, min(first + per_message, OBJECTS))
            fds = [memory(4096 * WINDOWS) for _ in numbers]
            chunk = [(f"frame/{number:05}/{window}", i, window) for i, number in enumerate(numbers) for window in range(WINDOWS)]
            items = [register_entry(name, 4096, offset=4096 * window, fd=i) for name, i, window in chunk]
            assert not any(result["code"] for result in client.register_many(items, fds))
            for fd in fds:
                os.close(fd)
            names += [name for name, _, _ in chunk]

        held = []
        for first in range(0, len(names), LIMIT["BATCH_MAX"]):
            results = lookup_many(client, names[first : first + LIMIT["BATCH_MAX"]])
            assert not any(result["code"] for result in results)
            held += [result["lease"] for result in results]
        stats = client.stats()
        assert (stats["regions"], stats["objects"], stats["held_leases"]) == (len(names), OBJECTS, len(names))

        # a page is bounded, in bytes and in slots, and others are answered between any two
        listed, cursor, pages = set(), 0, 0
        other = Client(path)
        other.hello()
        while True:
            request = STRUCTS["StatusRequest"].pack(cursor=cursor, uid=LIMIT["ANY_UID"])
            asked = client.send("STATUS", request)
            other.ping(pages)
            header, body, _ = client.wait(asked)
            head = STRUCTS["PageHead"].unpack(body)
            assert header["length"] <= LIMIT["MESSAGE_MAX"]
            at = STRUCTS["PageHead"].size
            for _ in range(head["count"]):
                entry, _ = next(entries(body, at, 1, "StatusEntry", "name"))
                listed.add(entry["name"].decode())
                at += entry["length"]
            pages += 1
            cursor = head["next"]
            if not cursor:
                break
        assert listed == set(names) and pages > 20
        other.close()

        for first in range(0, len(held), LIMIT["BATCH_MAX"]):
            items = [STRUCTS["ReleaseEntry"].pack(lease=lease) for lease in held[first : first + LIMIT["BATCH_MAX"]]]
            client.call("RELEASE", batch(*items))
        reply, _ = client.unregister_many(scope="SESSION", wait=True)
        return reply["gone"]

    bystander.ping()
    assert broker.run(OWNER, own, broker.socket) == OBJECTS * WINDOWS
    bystander.ping()
    until(lambda: admin.stats()["fds_closing"] == 0, "all fds are closed")
    assert admin.stats(accounts=True)["held_regions", uid_of(OWNER)] == 0
    owner.give("x")
