# SPDX-License-Identifier: Apache-2.0
"""A broker that is stopped: the library's calls end, and once it goes on nothing of them is left."""

import contextlib
import os
import signal

import pytest
from broker import ADMIN, CONSUMER, OWNER, until
from calls import DONE, Calls
from protocol_client import MODE

TIMEOUT_MS = 30


@pytest.fixture
def calls(broker):
    with Calls(broker, CONSUMER) as process:
        yield process


@contextlib.contextmanager
def stopped(broker, calls):
    """Only meanwhile do calls not wait: a broker that runs may be slow."""
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        assert calls.call("timeout", TIMEOUT_MS) == DONE
        yield
        assert calls.call("timeout", -1) == DONE
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def nothing_is_held(admin):
    return all(not entry["leases"] for entry in admin.status())


def test_calls_end_and_leave_nothing(broker, calls):
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    owner.give("r")
    assert calls.call("lookup", "r") == DONE
    fds = calls.number("fds")
    with stopped(broker, calls):
        for words in (["ping"], ["list"], ["lookup", "r"], ["lookup", "r"], ["map", "r"], ["create", "new"],
                      ["unregister", 0, MODE["STRICT"], "none"]):
            assert calls.call(*words) == "TIMED_OUT", words
    # the answers are read, and what they brought is given back: one lease was taken and answered in time
    until(lambda: calls.call("process") == DONE and [entry["leases"] for entry in admin.status(name="r", match="EXACT")] == [1],
          "only one lease")
    assert calls.number("fds") == fds
    assert calls.call("ping") == DONE
    # what was asked for was done
    assert broker.region(admin, "new") is not None
    assert calls.call("map", "new") == DONE
    assert calls.call("unmap") == DONE
    # and a call that is answered in time is as ever
    assert calls.results("unregister", 0, MODE["STRICT"], "new", "none") == [DONE, "NOT_FOUND"]


def test_many_calls_at_a_broker_that_takes_no_more(broker, calls):
    broker.peer(OWNER).give("r")
    with stopped(broker, calls):
        assert calls.results("pings", 64) == ["TIMED_OUT"] * 64
        assert calls.results("pings", 8) == ["TIMED_OUT"] * 8
        assert calls.call("lookup", "r") == "TIMED_OUT"
    assert calls.call("ping") == DONE
    assert calls.results("pings", 64) == [DONE] * 64
    assert calls.call("lookup", "r") == DONE


def test_a_broker_that_is_stopped_and_killed(lasting):
    owner, admin = lasting.peer(OWNER), lasting.peer(ADMIN)
    owner.give("r")
    with Calls(lasting, CONSUMER) as calls:
        assert calls.call("lookup", "r") == DONE
        os.kill(lasting.pid, signal.SIGSTOP)
        assert calls.call("timeout", TIMEOUT_MS) == DONE
        assert calls.call("lookup", "r") == "TIMED_OUT"
        assert calls.call("ping") == "TIMED_OUT"
        lasting.kill()
        owner.resume()
        admin.resume()
        assert calls.call("timeout", -1) == DONE
        assert calls.call("ping") == DONE
        until(lambda: calls.call("process") == DONE and [entry["leases"] for entry in admin.status()] == [1], "one lease")
        calls.end()
    until(lambda: nothing_is_held(admin), "no lease")
