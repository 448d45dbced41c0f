# SPDX-License-Identifier: Apache-2.0
"""A program of Triton's Python client, with one import line changed, against the gateway of a broker as it is by default."""

import contextlib
import gc
import json
import os
import pathlib
import secrets
import subprocess

import numpy
import pytest
import tritonclient.grpc
import tritonclient.http
from conftest import BUILD, DEADLINE, until
from tritonclient.utils import InferenceServerException

import shmbroker
import shmbroker.triton
import shmbroker.triton.shared_memory as shm

GATEWAY = BUILD / "shmbroker-gateway"
SIZE = 64

pytestmark = pytest.mark.skipif(not GATEWAY.exists(), reason="built without the gateway")


@pytest.fixture
def gateway(daemon, tmp_path):
    """The ports of a gateway; what was registered through it is gone when the test ends."""
    ports, log_path = tmp_path / "ports", tmp_path / "log"
    shmbroker.triton.configure()
    with open(log_path, "wb") as log, subprocess.Popen(
            [GATEWAY, "--socket", daemon.socket, "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--ports-file", ports,
             "--allow-client-shm=true", "--models=simple"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, "LD_PRELOAD": ""}) as process:
        try:
            until(lambda: ports.exists() or process.poll() is not None, "the gateway listens")
            assert process.poll() is None, log_path.read_text()
            found = json.loads(ports.read_text())
            until(lambda: ready(found), "the gateway has found the broker")
            yield found
        finally:
            process.terminate()
            process.wait(DEADLINE)
    assert process.returncode == 0, log_path.read_text()
    assert shm.mapped_shared_memory_regions() == []
    shmbroker.triton.configure()
    gc.collect()


def ready(ports):
    with contextlib.suppress(OSError, InferenceServerException), \
            tritonclient.http.InferenceServerClient(f"127.0.0.1:{ports['http']['port']}") as client:
        return client.is_server_ready()


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(request):
    """Each of the client's modules."""
    return request.param


@pytest.fixture
def client(gateway, triton):
    """One that is connected."""
    port = gateway[triton.__name__.rsplit(".", 1)[-1]]["port"]
    with contextlib.closing(triton.InferenceServerClient(f"127.0.0.1:{port}")) as one:
        yield one


@pytest.fixture
def key():
    """A key that nobody else has."""
    return f"/shmb-test-{secrets.token_hex(8)}"


def listed(client):
    """Names and keys that are registered."""
    status = client.get_system_shared_memory_status()
    if isinstance(status, list):
        return {one["name"]: one["key"] for one in status}
    return {name: one.key for name, one in status.regions.items()}


def test_a_model_reads_and_writes_it(broker, triton, client, key):
    inputs = shm.create_shared_memory_region("input_data", key, 2 * SIZE)
    outputs = shm.create_shared_memory_region("output_data", key + "-output", 2 * SIZE)
    assert not pathlib.Path("/dev/shm" + key).exists()
    # nothing is registered yet
    assert listed(client) == {}
    values = [numpy.arange(16, dtype="int32"), numpy.ones(16, "int32")]
    shm.set_shared_memory_region(inputs, values)
    client.register_system_shared_memory("input_data", key, 2 * SIZE)
    client.register_system_shared_memory("output_data", key + "-output", 2 * SIZE)
    assert listed(client) == {"input_data": key, "output_data": key + "-output"}
    given, wanted = [], []
    for i in range(2):
        given.append(triton.InferInput(f"INPUT{i}", [1, 16], "INT32"))
        given[-1].set_shared_memory("input_data", SIZE, offset=i * SIZE)
        wanted.append(triton.InferRequestedOutput(f"OUTPUT{i}"))
        wanted[-1].set_shared_memory("output_data", SIZE, offset=i * SIZE)
    client.infer("simple", given, outputs=wanted)
    assert shm.get_contents_as_numpy(outputs, "int32", [16]).tolist() == (values[0] + values[1]).tolist()
    assert shm.get_contents_as_numpy(outputs, "int32", [16], SIZE).tolist() == (values[0] - values[1]).tolist()
    # it is sealed, which a broker wants by default
    flags = {one.name: one.flags for one in broker.status()}
    assert not flags["input_data"] & shmbroker.RegionFlags.UNSEALED
    client.unregister_system_shared_memory()
    assert listed(client) == {}
    shm.destroy_shared_memory_region(inputs)
    shm.destroy_shared_memory_region(outputs)


def test_sizes_are_those_of_the_region(client, key):
    handle = shm.create_shared_memory_region("name", key, SIZE)
    for size, offset in ((SIZE + 1, 0), (SIZE, 1), (1, SIZE)):
        with pytest.raises(InferenceServerException, match="failed to register shared memory region 'name': invalid args"):
            client.register_system_shared_memory("name", key, size, offset=offset)
    client.register_system_shared_memory("name", key.lstrip("/"), SIZE - 8, offset=8)
    # a name that is the key's is no other registration's
    client.register_system_shared_memory(key[1:], key, SIZE)
    assert listed(client) == {"name": key[1:], key[1:]: key}
    client.unregister_system_shared_memory()
    shm.destroy_shared_memory_region(handle)
    with pytest.raises(InferenceServerException, match=f"Unable to open shared memory region: '{key}'"):
        client.register_system_shared_memory("name", key, SIZE)


def test_what_is_registered_outlives_its_maker(broker, client, key):
    handle = shm.create_shared_memory_region("name", key, SIZE)
    client.register_system_shared_memory("name", key, SIZE)
    shm.set_shared_memory_region(handle, [numpy.arange(8)])
    shm.destroy_shared_memory_region(handle)
    # as a mapping of the server's would
    with broker.get_memory_info("name") as lease:
        assert lease.numpy(8, "int64").tolist() == list(range(8))
    client.unregister_system_shared_memory("name")


def test_a_region_for_reading_is_not_lent_for_writing(broker, client, key):
    with broker.create("shm:" + key[1:], nbytes=SIZE, read_only=True):
        with pytest.raises(InferenceServerException, match=f"Unable to open shared memory region: '{key}'"):
            client.register_system_shared_memory("name", key, SIZE)
