# SPDX-License-Identifier: Apache-2.0
"""Keys of regions: other names by which somebody knows the memory, kept, and told to those whom they concern."""

import pytest
from broker import ADMIN, CONSUMER, KEEPER, OTHER, OWNER, ROOT, uid_of
from calls import DONE, Calls
from protocol_client import ANY_UID, NUMBERS, Refused
from restart import LastingBroker
from test_ctl import Ctl

KEEP, REPLACE = (NUMBERS["REGISTER"][name] for name in ("KEEP", "REPLACE"))
LONGEST = "ü" * 127 + "k"
ACCESS = f"[access]\nadmin = {ADMIN}\nkeep = {KEEPER}\ndelegate = {OTHER}\n"
needs_users = pytest.mark.skipif(not ROOT, reason="needs root: it is about several users")


def key_of(peer, name):
    """Of the newest region of the name: one that was replaced may not be gone yet."""
    return max(peer.status(name=name, match="EXACT"), key=lambda entry: entry["generation"])["key"].decode()


def refusal(call):
    with pytest.raises(Refused) as error:
        call()
    return error.value


def test_a_region_has_the_key_that_it_was_given(broker):
    owner = broker.peer(OWNER)
    for name, key in {"none": "", "short": "/k", "blank": "a key with blanks", "long": LONGEST}.items():
        owner.give(name, key=key)
        assert key_of(owner, name) == key
    # it names nothing, and need not be unique
    owner.give("another", key="/k")
    assert key_of(owner, "another") == "/k"
    assert owner.status(name="/k", match="EXACT") == []


@pytest.mark.parametrize("key, text", [
    (b"k" * 256, "the key is longer than 255 bytes"),
    (b"\xc3(", "the key is not valid UTF-8"),
    (b"a\0b", "the key has control characters"),
    (b"a\nb", "the key has control characters"),
], ids=["too long", "not UTF-8", "NUL", "newline"])
def test_what_is_no_key_is_refused(broker, key, text):
    owner = broker.peer(OWNER)
    refused = refusal(lambda: owner.give("r", key=key))
    assert (refused.name, refused.text) == ("BAD_NAME", text)
    assert owner.status() == []
    # each entry stands alone
    owner.give("of the connection")


def test_a_key_goes_with_its_region(broker):
    owner = broker.peer(OWNER)
    owner.give("r", key="first")
    slot = owner.status(name="r", match="EXACT")[0]["slot"]
    owner.unregister("r", wait=True)
    owner.give("r")
    entry = owner.status(name="r", match="EXACT")[0]
    assert (entry["slot"], entry["key"]) == (slot, b"")
    owner.give("r", flags=REPLACE, key="second")
    assert key_of(owner, "r") == "second"


@needs_users
def test_who_is_told_a_key(start):
    broker = start(config=ACCESS, access=False)
    owner = broker.peer(OWNER)
    owner.give("r", key="/secret")
    assert {uid: key_of(broker.peer(uid), "r") for uid in (OWNER, ADMIN, OTHER, CONSUMER, KEEPER)} == {
        OWNER: "/secret", ADMIN: "/secret", OTHER: "/secret", CONSUMER: "", KEEPER: ""}
    # a delegate has to know for whom it may use it, and learns no more
    told = {uid: broker.peer(uid).status(name="r", match="EXACT")[0] for uid in (OTHER, CONSUMER)}
    assert {uid: (entry["uid"], entry["pid"]) for uid, entry in told.items()} == {OTHER: (OWNER, 0), CONSUMER: (ANY_UID, 0)}


def test_a_key_outlives_the_broker(start):
    lasting = start(kind=LastingBroker)
    owner, keeper = lasting.peer(OWNER), lasting.peer(KEEPER)
    owner.give("mine", key="mine's")
    owner.give("none")
    keeper.give("kept", flags=KEEP if ROOT else 0, key=LONGEST)
    for _ in range(2):
        lasting.kill()
        owner.resume()
        keeper.resume()
        assert [key_of(owner, "mine"), key_of(owner, "none"), key_of(keeper, "kept")] == ["mine's", "", LONGEST]
    keeper.unregister("kept", wait=True)


def test_gpu_memory_has_a_key_too(start):
    """In its message the key is behind the handle."""
    lasting = start(kind=LastingBroker, config="[cuda]\nmode = relay\n")
    owner = lasting.peer(OWNER)
    owner.give_cuda("gpu", handle=bytes(range(64)), object_size=8192, key=LONGEST)
    lasting.kill()
    owner.resume()
    assert key_of(owner, "gpu") == LONGEST
    assert owner.lookup("gpu", want_fd=True, no_lease=True)["handle"] == bytes(range(64))


def test_many_regions_with_the_longest_keys_and_names(broker):
    """More than a page of the list has room for."""
    owner = broker.peer(OWNER)
    first = "000" + "n" * 252
    owner.give(first, key="000" + "k" * 252)
    for i in range(1, 192):
        owner.again(f"{i:03}" + "n" * 252, first, key=f"{i:03}" + "k" * 252)
    found = owner.status()
    assert len(found) == 192
    assert all(entry["name"][:3] == entry["key"][:3] and len(entry["key"]) == 255 for entry in found)


def test_the_library_and_the_tool(broker):
    ctl = Ctl(broker)
    with Calls(broker, OWNER) as calls:
        assert calls.call("adopt", "r", 0, 0, "/r-key") == DONE
        assert calls.call("adopt", "without", 0, 0) == DONE
        assert calls.call("adopt", "bad", 0, 0, "k" * 256) == "BAD_NAME"
        assert [calls.key(name) for name in ("r", "without", "bad")] == ["/r-key", "", "(no region)"]
        rows = {row["name"]: row["key"] for row in ctl.json("status")["regions"]}
        assert rows == {"r": "/r-key", "without": None}
        assert "KEY" not in ctl.run("status").stdout
        assert "/r-key" in ctl.run("status", "--columns=name,key").stdout
    process = ctl.register("by the tool", "--create=4K", "--key=its key")
    try:
        (row,) = ctl.json("status", "by the tool")["regions"]
        assert (row["key"], row["uid"]) == ("its key", uid_of(OWNER))
    finally:
        process.kill()
        process.communicate()
