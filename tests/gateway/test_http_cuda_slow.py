# SPDX-License-Identifier: Apache-2.0
"""GPU memory by handle with a broker that tries it on the fake driver: what is slow or fails there is one client's matter."""

import base64
import os
import pathlib
import signal
import sys

import pytest

from conftest import BUILD, until

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "fakecuda"))

import fakecuda  # noqa: E402  pylint: disable=wrong-import-position

HELPER = BUILD / "shmbroker-cuda-helper"
COMM = HELPER.name[:15]
OPEN = "cuIpcOpenMemHandle_v2"

pytestmark = pytest.mark.skipif(not HELPER.exists(), reason="built without GPU memory")
# pylint: disable=redefined-outer-name


@pytest.fixture
def fake(monkeypatch):
    """A machine with a fake GPU, for all that is started here."""
    one = fakecuda.Fake(DEVICES="1")
    monkeypatch.setenv("FAKECUDA_DIR", str(one.path))
    yield one
    one.close()


@pytest.fixture
def broker_config(fake):
    return (f"[cuda]\nmode = validate\nhelper = {HELPER}\nlibrary = {fake.library}\ncheck_fd = no\n"
            "start_timeout = 60min\noperation_timeout = 60min\n")


@pytest.fixture
def exporter(fake):
    """A process whose memory it is."""
    process = fakecuda.GpuProcess(fake)
    process.start()
    yield process
    process.close()


@pytest.fixture
def options(exporter):
    uuid = exporter.uuid(0).hex()
    return ["--allow-client-shm", f"--cuda-devices=GPU-{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}"]


def register(gateway, name, handle):
    return gateway.region("cuda", name, "register", {"raw_handle": {"b64": base64.b64encode(handle).decode()},
                                                     "byte_size": fakecuda.MIB2, "device_id": 0})


def handles(exporter, number):
    return [exporter.get_handle(exporter.alloc(fakecuda.MIB2)) for _ in range(number)]


def helper_of(gateway):
    """The pid of the broker's one helper."""
    pid = gateway.broker.process.pid
    (child,) = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def served(gateway, name, handle):
    """Registers as soon as what went wrong is over."""
    def is_done():
        reply = register(gateway, name, handle)
        assert reply.status in (200, 503), reply
        return reply.status == 200

    until(is_done, gateway.log)


def test_what_is_too_slow_is_not_registered_later(gateway, exporter):
    """The client got 503 for it, and the region was there all the same as soon as the driver had answered."""
    slow, good = handles(exporter, 2)
    served(gateway, "first", good)
    helper = helper_of(gateway)
    os.kill(helper, signal.SIGSTOP)
    reply = register(gateway, "x", slow)
    assert reply.status == 503 and "region 'x': it is not registered: the broker's driver took longer than 2000 ms" in reply.error
    # the broker is well, and so are those who want something else
    assert gateway.ready() and [entry["name"] for entry in gateway.status("cuda")] == ["first"] and gateway.status() == []
    os.kill(helper, signal.SIGCONT)
    # once this is done, so is what was too slow
    served(gateway, "y", good)
    assert [entry["name"] for entry in gateway.status("cuda")] == ["first", "y"]
    served(gateway, "x", slow)
    assert len(gateway.status("cuda")) == 3
    assert gateway.post("/v2/cudasharedmemory/unregister").status == 200
    until(lambda: gateway.broker.regions() == [], gateway.broker.log)


def test_a_helper_that_dies_is_not_the_broker(gateway, fake, exporter):
    """The gateway took the broker for away, and for a moment refused everybody everything."""
    (good,) = handles(exporter, 1)
    served(gateway, "first", good)
    fake.inject(f"{OPEN} abort comm={COMM}")
    reply = register(gateway, "x", good)
    assert reply.status == 503 and "region 'x': it is not registered: " in reply.error
    assert gateway.ready() and len(gateway.status("cuda")) == 1 and "the broker is away" not in gateway.log()
    fake.inject()
    served(gateway, "x", good)
    assert gateway.post("/v2/cudasharedmemory/unregister").status == 200
    until(lambda: gateway.broker.regions() == [], gateway.broker.log)
