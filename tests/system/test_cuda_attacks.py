# SPDX-License-Identifier: Apache-2.0
"""What attacks on the broker's side of GPU memory have found, each named after what broke."""

import os
import pathlib
import signal

import pytest
from broker import ADMIN, CONSUMER, OTHER, OWNER, ROOT, until
from gpus import because, end_helpers, helpers_of, is_built, make_machine, the_helper
from protocol_client import E, LIMIT, STRUCTS, Client, batch, cuda_entry, memory, register_entry
from test_cuda_helper import HELPER_COMM

pytestmark = pytest.mark.skipif(not is_built(), reason="built without GPU memory")
needs_users = pytest.mark.skipif(not ROOT, reason="needs root: it is about several users")
NO_GPU = b"\x11" * 16


@pytest.fixture
def there(start):
    machine = make_machine(start)
    machine.needs_fake()
    yield machine
    machine.close()


@needs_users
def test_fds_of_registrations_that_wait_are_paid_for(start, there):
    """While a helper was busy, each message that waited kept up to 64 fds of which nobody's account knew."""
    there.start_broker = lambda **how: start(nofile=1000, **how)
    there.inject(f"cuInit hang comm={HELPER_COMM}")
    broker = there.broker(start_timeout="60min")
    bystander, admin = broker.peer(OTHER), broker.peer(ADMIN)
    fds = [memory() for _ in range(LIMIT["FDS_MAX"] - 1)]
    items = [register_entry(f"m{i}", 8192, fd=i) for i in range(len(fds))] + [cuda_entry("gpu", 8192, b"h" * 64)]
    before = admin.stats()["held_fds"]
    with Client(broker.socket) as attacker:
        attacker.hello()
        for _ in range(20):
            attacker.send("REGISTER", batch(*items), fds)
            attacker.ping()
            until(lambda: admin.stats()["fds_closing"] == 0, admin.stats)
        waiting = admin.stats()["held_messages"]
        assert 0 < waiting < 20
        assert admin.stats()["held_fds"] - before >= waiting * len(fds)
        refusals = [STRUCTS["ErrorReply"].unpack(body)["code"] for _, body, _ in attacker.late.values()]
        assert len(refusals) == 20 - waiting and set(refusals) <= {E["QUOTA"], E["NO_FDS"]}
        bystander.give("served")
        broker.peer(CONSUMER).lookup("served", no_lease=True)
    for fd in fds:
        os.close(fd)
    until(lambda: admin.stats()["held_messages"] == 0, admin.stats)
    assert "Too many open files" not in broker.log()
    bystander.unregister("served")
    there.inject()
    end_helpers(broker)


def test_uuids_that_are_none_do_not_use_up_the_helpers(there):
    """Each UUID had a helper that started at once: sixteen that named no GPU left none for those that do."""
    there.inject(f"cuInit delay=1000 comm={HELPER_COMM}")
    broker = there.broker(start_timeout="60min", operation_timeout="60min")
    attacker, owner, admin = there.peer(broker, OTHER), there.peer(broker, OWNER), broker.peer(ADMIN)
    attacker.start("register_many", [cuda_entry(f"x{i}", 8192, b"h" * 64, device=bytes([i + 1]) * 16) for i in range(24)], [])
    until(lambda: admin.stats()["held_messages"] or "GPU memory is refused" in broker.log(), admin.stats)
    owner.offer_ipc("good")
    results = attacker.finish()
    assert {result["text"].decode().split(" ", 1)[1][:24] for result in results} == {"is not a GPU that this b"}
    # one that looked, and one that works
    assert len(there.log("cuInit", comm=HELPER_COMM)) < 6
    end_helpers(broker)


def test_uuids_that_are_none_keep_no_gpu_out(there):
    """Beyond 32 that waited, the first memory of a GPU that is one was refused until a helper had answered."""
    there.inject(f"cuInit delay=1000 comm={HELPER_COMM}")
    broker = there.broker(start_timeout="60min", operation_timeout="60min")
    attacker, owner, admin = there.peer(broker, OTHER), there.peer(broker, OWNER), broker.peer(ADMIN)
    n = LIMIT["BATCH_MAX"]
    attacker.start("register_many", [cuda_entry(f"x{i}", 8192, b"h" * 64, device=bytes([i + 1]) * 16) for i in range(n)], [])
    until(lambda: admin.stats()["held_messages"] or "GPU memory is refused" in broker.log(), admin.stats)
    owner.offer_ipc("good")
    assert {result["text"].decode().split(" ", 1)[1][:24] for result in attacker.finish()} == {"is not a GPU that this b"}
    assert len(there.log("cuInit", comm=HELPER_COMM)) < 6
    end_helpers(broker)


def test_a_session_that_ends_while_it_waits_leaves_nothing(there):
    """Whatever waits for a helper that looks for another GPU goes with who asked for it."""
    there.inject(f"cuInit hang comm={HELPER_COMM}")
    broker = there.broker(start_timeout="60min")
    first, other, admin = there.peer(broker, OWNER), there.peer(broker, OTHER), broker.peer(ADMIN)
    first.start("register_cuda", "x", 8192, b"h" * 64, device=NO_GPU)
    the_helper(broker)
    other.start("register_many", [cuda_entry(f"x{i}", 8192, b"h" * 64, device=bytes([i + 32]) * 16) for i in range(8)], [])
    until(lambda: admin.stats()["held_messages"] == 2, admin.stats)
    other.kill()
    until(lambda: admin.stats()["held_messages"] == 1, admin.stats)
    first.kill()
    until(lambda: admin.stats()["held_messages"] == 0, admin.stats)
    there.inject()
    end_helpers(broker)


def test_those_that_wait_go_on_when_the_helper_that_looks_dies(there):
    """A GPU that no helper has seen waits for what the helper of another such GPU finds, and not for ever."""
    there.inject(f"cuInit hang comm={HELPER_COMM}")
    broker = there.broker(start_timeout="60min")
    other, owner, admin = there.peer(broker, OTHER), there.peer(broker, OWNER), broker.peer(ADMIN)
    other.start("register_cuda", "x", 8192, b"h" * 64, device=NO_GPU)
    helper = the_helper(broker)
    owner.start("offer_ipc", "good")
    until(lambda: admin.stats()["held_messages"] == 2, admin.stats)
    assert helpers_of(broker) == [helper]
    # one that has not come to cuInit() yet would find that it works
    os.kill(helper, signal.SIGSTOP)
    stat = pathlib.Path(f"/proc/{helper}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", stat.read_text)
    there.inject()
    os.kill(helper, signal.SIGKILL)
    owner.finish()
    with because("DIED", "was killed by signal 9"):
        other.finish()
    end_helpers(broker)
