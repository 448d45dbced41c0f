# SPDX-License-Identifier: Apache-2.0
"""Exceptions: one class for each code, with the broker's sentence."""

import re
import signal

import pytest
from conftest import TOP

import shmbroker

CODES = re.findall(r'^SHMB_ERROR\((\w+), (\d+), "(.*)"\)', (TOP / "libbroker/wire/errors.def").read_text(), re.M)


def test_every_code_has_a_class():
    assert len(CODES) > 30
    assert sorted(shmbroker.errors_by_code) == [int(code) for _, code, _ in CODES]
    for name, code, text in CODES:
        error = shmbroker.errors_by_code[int(code)]
        assert issubclass(error, shmbroker.Error) and (error.code, error.name) == (int(code), name)
        assert getattr(shmbroker, error.__name__) is error and error.__name__ in shmbroker.__all__
        assert text in error.__doc__ and error.__module__ == "shmbroker"
    assert len({error.__name__ for error in shmbroker.errors_by_code.values()}) == len(CODES)


@pytest.mark.parametrize("name,also", [("TimedOut", TimeoutError), ("OutOfBounds", IndexError), ("NotFound", LookupError),
                                       ("PermissionDenied", PermissionError), ("BadName", ValueError)])
def test_some_are_pythons_too(name, also):
    assert issubclass(getattr(shmbroker, name), also)


def test_the_brokers_sentence(broker):
    with broker.create("r", nbytes=1):
        with pytest.raises(shmbroker.AlreadyExists) as caught:
            broker.create("r", nbytes=1)
        assert caught.value.code == 7 and caught.value.name == "EXISTS" and "exists" in str(caught.value)
    with pytest.raises(shmbroker.BadName) as caught:
        broker.create("r\n", nbytes=1)
    assert str(caught.value)


def consumer_creates():
    with shmbroker.connect(roles="consumer") as one:
        one.create("s", nbytes=1)


@pytest.mark.parametrize("config", ["[quota]\nbytes = 1M\n[access]\nreserve = mine/ 12345\n"])
def test_the_sentence_is_of_the_call(broker, file):
    """What is said is not only the text that belongs to the code."""
    texts = {int(code): text for _, code, text in CODES}
    with broker.create("r", nbytes=4096), broker.get_memory_info("r") as lease:
        for error, call in {
            shmbroker.QuotaExceeded: lambda: broker.create("s", nbytes=2 << 20),
            shmbroker.PermissionDenied: consumer_creates,
            shmbroker.Reserved: lambda: broker.create("mine/s", nbytes=1),
            shmbroker.OutOfBounds: lambda: broker.adopt("s", file, nbytes=100001),
            shmbroker.AccessRefused: lambda: lease.copy_in(b"x"),
        }.items():
            with pytest.raises(error) as caught:
                call()
            assert type(caught.value) is error
            assert str(caught.value) not in ("", texts[error.code]), error


def test_the_broker_does_not_answer(broker, daemon):
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        broker.set_call_timeout(0.03)
        with pytest.raises(shmbroker.TimedOut) as caught:
            broker.ping()
        assert "does not answer" in str(caught.value)
        broker.set_call_timeout(None)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert broker.ping() > 0
    with pytest.raises(ValueError):
        broker.set_call_timeout(-1)


def test_the_broker_has_gone(broker, daemon):
    region = broker.create("r", nbytes=1)
    held = broker.get_memory_info("r")
    broker.set_resume_timeout(0)
    daemon.process.kill()
    daemon.process.wait()
    with pytest.raises((shmbroker.Again, ConnectionResetError)):
        broker.ping()
    assert memoryview(held)[0] == 0
    held.release()
    del region
