# SPDX-License-Identifier: Apache-2.0
"""Real clients over HTTP, unmodified: tritonclient's in both forms, and curl."""

import asyncio
import os
import subprocess

import numpy
import pytest
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, shared_memory

from conftest import DEADLINE


@pytest.fixture
def client(gateway):
    with tritonclient.http.InferenceServerClient(gateway.http) as one:
        yield one


@pytest.fixture
def region(request):
    """Memory as tritonclient makes it."""
    name = f"{os.getpid()}-{request.node.name}"
    handle = shared_memory.create_shared_memory_region(name, f"/shmg-{name}", 4096)
    yield handle
    shared_memory.destroy_shared_memory_region(handle)


def test_health_and_metadata(client):
    assert client.is_server_live() and client.is_server_ready()
    metadata = client.get_server_metadata()
    assert metadata["name"] == "triton" and "system_shared_memory" in metadata["extensions"]


def test_the_life_of_a_region(client, region):
    """As in Triton's examples."""
    key = f"/shmg-{region._triton_shm_name}"  # pylint: disable=protected-access
    shared_memory.set_shared_memory_region(region, [numpy.arange(16, dtype=numpy.int32)])
    client.unregister_system_shared_memory()
    client.register_system_shared_memory("input_data", key, 4096)
    client.register_system_shared_memory("a window", key, 100, offset=64)
    assert client.get_system_shared_memory_status() == [
        {"name": "a window", "key": key, "offset": 64, "byte_size": 100},
        {"name": "input_data", "key": key, "offset": 0, "byte_size": 4096}]
    assert client.get_system_shared_memory_status("input_data")[0]["byte_size"] == 4096
    with pytest.raises(InferenceServerException, match="already in manager") as caught:
        client.register_system_shared_memory("input_data", key, 4096)
    assert caught.value.status() == "400"
    client.unregister_system_shared_memory("a window")
    client.unregister_system_shared_memory("not there")
    with pytest.raises(InferenceServerException) as caught:
        client.get_system_shared_memory_status("a window")
    assert str(caught.value) == "[404] Unable to find system shared memory region: 'a window'"
    client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []


def test_cuda(client):
    """Without a GPU."""
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("x")
    import base64  # pylint: disable=import-outside-toplevel
    with pytest.raises(InferenceServerException, match="GPUs not supported"):
        client.register_cuda_shared_memory("x", base64.b64encode(bytes(64)), 0, 64)
    with pytest.raises(InferenceServerException, match="must be a valid base64 encoded"):
        client.register_cuda_shared_memory("x", base64.b64encode(bytes(63)), 0, 64)


def test_disabled(gateway, region):
    gateway.stop()
    gateway.options.remove("--allow-client-shm")
    gateway.start()
    with tritonclient.http.InferenceServerClient(gateway.http) as client:
        with pytest.raises(InferenceServerException) as caught:
            client.register_system_shared_memory("x", f"/shmg-{region._triton_shm_name}", 1)  # pylint: disable=protected-access
        assert str(caught.value) == (
            "[501] Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.")
        assert client.get_system_shared_memory_status() == []


def test_asynchronous_client(gateway, region):
    """Many at once on a few connections."""
    key = f"/shmg-{region._triton_shm_name}"  # pylint: disable=protected-access

    async def use():
        async with tritonclient.http.aio.InferenceServerClient(gateway.http) as client:
            assert await client.is_server_ready()
            await asyncio.gather(*(client.register_system_shared_memory(f"r{i}", key, 16, offset=i) for i in range(100)))
            assert len(await client.get_system_shared_memory_status()) == 100
            await asyncio.gather(*(client.unregister_system_shared_memory(f"r{i}") for i in range(50)))
            assert len(await client.get_system_shared_memory_status()) == 50
            await client.unregister_system_shared_memory()
            assert await client.get_system_shared_memory_status() == []

    asyncio.run(use())


def test_curl(gateway, region):
    """At both kinds of sockets."""
    key = f"/shmg-{region._triton_shm_name}"  # pylint: disable=protected-access

    def curl(*arguments):
        return subprocess.run(["curl", "-sS", "-w", "%{http_code}", "--max-time", str(DEADLINE), *arguments], check=True,
                              capture_output=True, text=True).stdout

    base = f"http://{gateway.http}/v2/systemsharedmemory"
    assert curl("-d", f'{{"key":"{key}","byte_size":64}}', f"{base}/region/a%2Fb/register") == "200"
    assert curl("--unix-socket", gateway.http_socket, "http://localhost/v2/systemsharedmemory/status") == (
        f'[{{"name":"a/b","key":"{key}","offset":0,"byte_size":64}}]200')
    assert curl("-X", "POST", f"{base}/unregister") == "200"
    assert curl(f"{base}/status") == "[]200"
