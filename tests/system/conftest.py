# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the system tests: every test runs on both engines of the loop."""

import pathlib
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "fakecuda"))

from broker import Broker  # noqa: E402  pylint: disable=wrong-import-position
from restart import LastingBroker  # noqa: E402  pylint: disable=wrong-import-position


@pytest.fixture(params=["io_uring", "epoll"])
def loop(request):
    """The engine."""
    return request.param


@pytest.fixture
def start(loop):
    """Starts brokers of which the test says the configuration; each is checked at the end."""
    brokers, directories = [], []

    def start_one(kind=Broker, **how):
        directories.append(tempfile.TemporaryDirectory(prefix="shmb", ignore_cleanup_errors=True))
        brokers.append(kind(pathlib.Path(directories[-1].name), loop, **how))
        return brokers[-1]

    yield start_one
    try:
        for broker in brokers:
            broker.finish()
    finally:
        for broker in brokers:
            if broker.process.poll() is None:
                broker.process.kill()
                broker.process.wait()
        for directory in directories:
            directory.cleanup()


@pytest.fixture
def broker(start):
    """A broker with the default configuration."""
    return start()


@pytest.fixture
def lasting(start):
    """One that a restart does not end, with the default configuration."""
    return start(kind=LastingBroker)
