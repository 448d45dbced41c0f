# SPDX-License-Identifier: Apache-2.0
"""GPU memory by handle over HTTP and gRPC, with a broker that relays handles: neither a driver nor a GPU is needed for that."""

import base64

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from conftest import DEADLINE, Gateway, running, until

HANDLE = base64.b64encode(bytes(range(64))).decode()
OTHER = base64.b64encode(bytes(range(100, 164))).decode()
DEVICES = "--cuda-devices=GPU-47474747-4747-4747-4747-474747474747,MIG-00112233-4455-6677-8899-aabbccddeeff"
ARGS = "failed to register shared memory region: invalid args"


@pytest.fixture
def broker_config():
    return "unsealed = accept\n[cuda]\nmode = relay\n"


@pytest.fixture
def options():
    return ["--allow-client-shm", DEVICES]


def register(gateway, name, handle=HANDLE, byte_size=4096, device_id=0):
    return gateway.region("cuda", name, "register",
                          {"raw_handle": {"b64": handle}, "byte_size": byte_size, "device_id": device_id})


def test_the_life_of_a_region(gateway, key):
    """Beside one of system memory, whose names are the same ones."""
    done = register(gateway, "b", device_id=1)
    assert (done.status, done.body) == (200, b"")
    assert register(gateway, "a", OTHER, byte_size=7).status == 200
    assert gateway.register("s", key("k", 64), 64).status == 200
    entry = {"name": "b", "device_id": 1, "byte_size": 4096}
    assert gateway.status("cuda") == [{"name": "a", "device_id": 0, "byte_size": 7}, entry]
    assert gateway.region("cuda", "b", "status").json == [entry]
    assert [one["name"] for one in gateway.status()] == ["s"]
    kinds = {one["name"]: (one["kind"], one["flags"]) for one in gateway.broker.regions()}
    assert kinds["b"][0] != kinds["s"][0] and "kept" in str(kinds["b"][1])
    reply = gateway.region("system", "b", "status")
    assert (reply.status, reply.error) == (
        404, "The region named 'b' is registered as CUDA shared memory, not system shared memory")
    # of the other kind: nothing is done
    assert gateway.region("system", "b", "unregister").status == 200
    assert gateway.post("/v2/systemsharedmemory/unregister").status == 200
    assert len(gateway.status("cuda")) == 2 and gateway.status() == []
    assert gateway.region("cuda", "b", "unregister").status == 200
    assert gateway.post("/v2/cudasharedmemory/unregister").status == 200
    assert gateway.status("cuda") == []


def test_the_names_of_both_kinds(gateway, key):
    assert register(gateway, "x").status == 200
    taken = "shared memory region 'x' already in manager"
    for reply in (register(gateway, "x"), register(gateway, "x", device_id=9), gateway.register("x", key("k", 64), 64)):
        assert (reply.status, reply.error) == (400, taken)
    assert gateway.register("y", key("y", 64), 64).status == 200
    assert register(gateway, "y").error == "shared memory region 'y' already in manager"


@pytest.mark.parametrize("how", [{"device_id": 2}, {"device_id": 2**63 - 1}, {"device_id": 2**64 - 1}, {"byte_size": 0}])
def test_what_no_driver_would_open(gateway, how):
    reply = register(gateway, "x", **how)
    assert (reply.status, reply.error) == (400, ARGS)
    assert gateway.status("cuda") == []


def test_it_outlives_the_gateway(gateway):
    assert register(gateway, "x").status == 200
    gateway.kill()
    gateway.start()
    assert gateway.status("cuda") == [{"name": "x", "device_id": 0, "byte_size": 4096}]
    assert gateway.post("/v2/cudasharedmemory/unregister").status == 200
    assert gateway.status("cuda") == []


def test_real_client(gateway):
    with tritonclient.http.InferenceServerClient(gateway.http) as client:
        assert "cuda_shared_memory" in client.get_server_metadata()["extensions"]
        client.register_cuda_shared_memory("x", base64.b64encode(bytes(range(64))), 1, 4096)
        assert client.get_cuda_shared_memory_status("x") == [{"name": "x", "device_id": 1, "byte_size": 4096}]
        with pytest.raises(InferenceServerException, match="already in manager"):
            client.register_cuda_shared_memory("x", base64.b64encode(bytes(range(64))), 1, 4096)
        client.unregister_cuda_shared_memory("x")
        assert client.get_cuda_shared_memory_status() == []


def test_real_client_over_grpc(gateway):
    """What it registers is what the other door lists."""
    with tritonclient.grpc.InferenceServerClient(gateway.grpc) as client:
        assert "cuda_shared_memory" in client.get_server_metadata().extensions
        client.register_cuda_shared_memory("x", HANDLE.encode(), 1, 4096)
        listed = client.get_cuda_shared_memory_status().regions
        assert {name: (region.name, region.device_id, region.byte_size) for name, region in listed.items()} == {"x": ("x", 1, 4096)}
        assert gateway.status("cuda") == [{"name": "x", "device_id": 1, "byte_size": 4096}]
        with pytest.raises(InferenceServerException, match="already in manager"):
            client.register_cuda_shared_memory("x", HANDLE.encode(), 1, 4096)
        for device in (2, -1):
            with pytest.raises(InferenceServerException, match=ARGS):
                client.register_cuda_shared_memory("y", HANDLE.encode(), device, 4096)
        client.unregister_system_shared_memory("x")
        assert list(client.get_cuda_shared_memory_status("x").regions) == ["x"]
        client.unregister_cuda_shared_memory("x")
        assert not client.get_cuda_shared_memory_status().regions


@pytest.mark.parametrize("options, why", [
    ([DEVICES], "GPU memory is disabled in this broker"),
    ([], "no GPU memory is registered here without --cuda-devices"),
])
def test_without_gpu_memory(options, why):
    """Clients get Triton's text; cause and remedy are in the log."""
    with running("unsealed = accept\n[cuda]\nmode = off\n", ["--allow-client-shm", *options]) as gateway:
        reply = register(gateway, "x")
        assert (reply.status, reply.error) == (400, "failed to register CUDA shared memory region: 'x', GPUs not supported")
        assert f"region x: {why}" in gateway.log()


@pytest.mark.parametrize("devices", ["GPU-1", "x", "GPU-47474747-4747-4747-4747-4747474747471", "GPU-4747474747474747474747474747474z",
                                     ",", "GPU-47474747474747474747474747474747,,"])
def test_devices_that_are_none(gateway, devices):
    other = Gateway(gateway.place, gateway.broker, f"--cuda-devices={devices}", name="other", start=False)
    other.process = gateway.place.start("shmbroker-gateway", *other.options, log=other.log_path)
    assert other.process.wait(DEADLINE) == 1
    until(lambda: "--cuda-devices is a list" in other.log(), other.log)
