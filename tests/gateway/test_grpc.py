# SPDX-License-Identifier: Apache-2.0
"""The gRPC door with real clients: tritonclient, its asyncio form, and grpcio with messages of their full shape."""

import asyncio
import base64
import os
import pathlib
import queue
import signal
import subprocess
import sys

# the test forks, and nothing of gRPC is used in the child
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc  # noqa: E402  pylint: disable=wrong-import-position
import numpy as np  # noqa: E402  pylint: disable=wrong-import-position
import pytest  # noqa: E402  pylint: disable=wrong-import-position
import tritonclient.grpc  # noqa: E402  pylint: disable=wrong-import-position
import tritonclient.grpc.aio  # noqa: E402  pylint: disable=wrong-import-position
from conftest import CLIENT, DEADLINE, GATEWAY, OTHER, ROOT, running, until  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402  pylint: disable=wrong-import-position

SERVICE = "/inference.GRPCInferenceService/"
RESERVED = "triton_python_backend_shm_region_"
DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
HANDLE = bytes(range(64))
TOKEN, ADMIN_TOKEN = "sixteen-characters-or-more", "another-one-for-the-admin"


@pytest.fixture(name="shape", scope="session")
def full_shape(tmp_path_factory):
    """The module of full_shape.proto."""
    out = tmp_path_factory.mktemp("proto")
    here = pathlib.Path(__file__).parent
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{here}", f"--python_out={out}", "full_shape.proto"],
                   check=True, timeout=DEADLINE)
    sys.path.insert(0, str(out))
    try:
        import full_shape_pb2  # pylint: disable=import-outside-toplevel,import-error
    finally:
        sys.path.remove(str(out))
    return full_shape_pb2


@pytest.fixture
def client(gateway):
    """tritonclient's, over TCP."""
    with tritonclient.grpc.InferenceServerClient(gateway.grpc) as one:
        yield one


class Stub:
    """grpcio with messages of full_shape.proto: stub.call(METHOD, request, TYPE OF THE RESPONSE)."""

    def __init__(self, shape, target, **how):
        self.shape = shape
        self.channel = grpc.insecure_channel(target, **how)

    def method(self, path, response):
        """A call that can be made; @response a type, or None for bytes as they are."""
        return self.channel.unary_unary(path if path.startswith("/") else SERVICE + path, lambda request: (
            request if isinstance(request, bytes) else request.SerializeToString()),
            response.FromString if response else lambda data: data)

    def call(self, path, request=b"", response=None, **how):
        return self.method(path, response)(request, timeout=DEADLINE, wait_for_ready=True, **how)

    def error(self, path, request=b"", **how):
        """(code, text) of a call that is refused."""
        with pytest.raises(grpc.RpcError) as caught:
            self.call(path, request, **how)
        return caught.value.code(), caught.value.details()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()


@pytest.fixture
def stub(gateway, shape):
    with Stub(shape, gateway.grpc) as one:
        yield one


def refused(function, *arguments, **how):
    """(status, text) of a call of tritonclient that is refused."""
    with pytest.raises(InferenceServerException) as caught:
        function(*arguments, **how)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def field(number, data):
    """A field of bytes, shorter than 2 MiB, as it is on the wire."""
    size, length = len(data), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def system_register(name, key, byte_size=1):
    """A request to register, as bytes, whatever the name is."""
    assert byte_size < 128
    return field(1, name) + field(2, key) + b"\x20" + bytes([byte_size])


# --- the server


def test_server(gateway, client):
    assert client.is_server_live() and client.is_server_ready()
    metadata = client.get_server_metadata(as_json=True)
    assert metadata == {key: value for key, value in gateway.get("/v2").json.items() if value}
    assert metadata["name"] == "triton"
    assert "system_shared_memory" in metadata["extensions"]


def test_unix_socket(gateway, key):
    """tritonclient's gRPC client takes such an address, too."""
    with tritonclient.grpc.InferenceServerClient(f"unix:{gateway.ports['grpc']['socket']}") as client:
        assert client.is_server_ready()
        client.register_system_shared_memory("one", key("a", 64), 64)
        assert list(client.get_system_shared_memory_status().regions) == ["one"]
        client.unregister_system_shared_memory("one")


def test_health(stub, shape):
    """That of grpc.health.v1."""
    for service in ("", "inference.GRPCInferenceService"):
        request = shape.HealthRequest(service=service)
        assert stub.call("/grpc.health.v1.Health/Check", request, shape.HealthResponse).status == 1
    request = shape.HealthRequest(service="nothing")
    assert stub.error("/grpc.health.v1.Health/Check", request) == (grpc.StatusCode.NOT_FOUND, "unknown service")
    assert stub.error("/grpc.health.v1.Health/Watch")[0] == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", ["RepositoryIndex", "TraceSetting", "LogSettings", "serverlive", "", "ServerLive/"])
def test_unknown_methods(stub, method):
    assert stub.error(method) == (grpc.StatusCode.UNIMPLEMENTED, f"there is no method {SERVICE}{method}")
    assert stub.error("/other/ServerLive")[0] == grpc.StatusCode.UNIMPLEMENTED


def test_what_is_no_message(stub):
    for method in ("SystemSharedMemoryRegister", "CudaSharedMemoryStatus", "ServerLive"):
        code, text = stub.error(method, b"\x0a\xff")
        assert code == grpc.StatusCode.INTERNAL
        assert text == f"the message is no {method}Request"


# --- shared memory


def test_system_region_lives(gateway, client, key):
    """Register, status in both forms and through both doors, unregister."""
    name = key("a", 8192)
    assert client.get_system_shared_memory_status(as_json=True) == {}
    assert client.register_system_shared_memory("one", name, 4096, offset=128) is None
    region = client.get_system_shared_memory_status("one").regions["one"]
    assert (region.name, region.key, region.offset, region.byte_size) == ("one", name, 128, 4096)
    assert client.get_system_shared_memory_status() == client.get_system_shared_memory_status("one")
    assert gateway.status() == [{"name": "one", "key": name, "offset": 128, "byte_size": 4096}]
    assert not client.get_cuda_shared_memory_status().regions

    # what the other door registered is listed, and unregistered, here
    assert gateway.register("two", name, 64).status == 200
    assert set(client.get_system_shared_memory_status().regions) == {"one", "two"}
    client.unregister_system_shared_memory("two")
    assert [entry["name"] for entry in gateway.status()] == ["one"]
    client.unregister_system_shared_memory()
    assert gateway.status() == []


def test_system_texts(client, key):
    name = key("a", 4096)
    client.register_system_shared_memory("taken", name, 64)
    register = client.register_system_shared_memory
    for arguments, want in {
        ("taken", name, 64): ("ALREADY_EXISTS", "shared memory region 'taken' already in manager"),
        ("x", "", 64): ("INVALID_ARGUMENT", "cannot register shared memory region 'x' - invalid shm key ''"),
        ("x", "///", 64): ("INVALID_ARGUMENT", "cannot register shared memory region 'x' - invalid shm key '///'"),
        ("x", f"//{RESERVED}1", 64): (
            "INVALID_ARGUMENT", f"cannot register shared memory region 'x' with key '//{RESERVED}1' as the key contains the "
            f"reserved prefix '{RESERVED}'"),
        ("x", "/shmg-nothing", 64): ("INTERNAL", "Unable to open shared memory region: '/shmg-nothing'"),
        ("x", name, 4097): ("INVALID_ARGUMENT", "failed to register shared memory region 'x': invalid args"),
        ("x", name, 1, 4096): ("INVALID_ARGUMENT", "failed to register shared memory region 'x': invalid args"),
        ("x", name, 1, 2**64 - 1): ("INVALID_ARGUMENT", "failed to register shared memory region 'x': invalid args"),
        ("x", name, 2**64 - 1, 1): ("INVALID_ARGUMENT", "failed to register shared memory region 'x': invalid args"),
        ("", name, 64): ("INVALID_ARGUMENT", "'region name' is necessary to register system shared memory region"),
    }.items():
        assert refused(register, *arguments) == want, arguments
    # the keys are looked at first, also of a name that is taken
    assert refused(register, "taken", "/", 1)[0] == "INVALID_ARGUMENT"

    status = client.get_system_shared_memory_status
    assert refused(status, "x") == ("NOT_FOUND", "Unable to find system shared memory region: 'x'")
    assert refused(client.get_cuda_shared_memory_status, "x") == (
        "NOT_FOUND", "Unable to find cuda shared memory region: 'x'")
    assert refused(client.get_cuda_shared_memory_status, "taken") == (
        "NOT_FOUND", "The region named 'taken' is registered as system shared memory, not CUDA shared memory")
    # unknown names, and those of the other kind, are unregistered with success, and nothing happens
    client.unregister_system_shared_memory("x")
    client.unregister_cuda_shared_memory("taken")
    client.unregister_cuda_shared_memory()
    assert list(status().regions) == ["taken"]
    client.unregister_system_shared_memory("taken")


def test_a_region_needs_a_size(client, key):
    """Triton refuses it on one of its doors, too; see shmbroker-gateway(8)."""
    assert refused(client.register_system_shared_memory, "x", key("a", 64), 0)[0] == "INVALID_ARGUMENT"


def test_unaligned_offset(client, key):
    name = key("a", 8192)
    client.register_system_shared_memory("one", name, 100, offset=4001)
    region = client.get_system_shared_memory_status("one").regions["one"]
    assert (region.offset, region.byte_size) == (4001, 100)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 128])
def test_a_cuda_handle_has_64_bytes(client, stub, shape, size):
    """Triton reads 64 whatever was sent. Its text comes before that of an empty name."""
    want = "INVALID_ARGUMENT", "failed to register shared memory region: invalid args"
    handle = base64.b64encode(bytes(size))
    assert refused(client.register_cuda_shared_memory, "x", handle, 0, 64) == want
    assert refused(client.register_cuda_shared_memory, "", handle, 0, 64) == want
    request = shape.CudaRegister(name="x", raw_handle=bytes(size), device_id=-1, byte_size=2**64 - 1)
    assert stub.error("CudaSharedMemoryRegister", request) == (grpc.StatusCode.INVALID_ARGUMENT, want[1])


def test_cuda_names(client):
    """With a handle of the right length, the name is what is looked at."""
    handle = base64.b64encode(HANDLE)
    assert refused(client.register_cuda_shared_memory, "", handle, 0, 64) == (
        "INVALID_ARGUMENT", "'region name' is necessary to register cuda shared memory region")


class TestDisabled:
    """Without --allow-client-shm."""

    @pytest.fixture
    def options(self):
        return []

    def test_only_status(self, client):
        handle = base64.b64encode(HANDLE)
        for call in ((client.register_system_shared_memory, "x", "/x", 1), (client.unregister_system_shared_memory, "x"),
                     (client.unregister_system_shared_memory,), (client.register_cuda_shared_memory, "x", handle, 0, 1),
                     (client.unregister_cuda_shared_memory, "x"), (client.unregister_cuda_shared_memory,)):
            assert refused(*call) == ("UNIMPLEMENTED", DISABLED), call
        assert not client.get_system_shared_memory_status().regions
        assert not client.get_cuda_shared_memory_status().regions
        assert refused(client.get_system_shared_memory_status, "x")[0] == "NOT_FOUND"
        assert "system_shared_memory" not in client.get_server_metadata().extensions


# --- names that break others


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a\0b", b"\0", b"a\nb", b"\x7f", b"\xc2\x80", b"\xed\xa0\x80", b"\xc0\x80",
                                  b"a" * 256, b"\xc3\xa9" * 128, b"a" * 60000])
def test_bad_names_poison_nothing(client, stub, key, name):
    """They are refused wherever they come, and no status of anybody breaks on them."""
    memory = key("a", 64).encode()
    client.register_system_shared_memory("a", memory.decode(), 64)
    code, text = stub.error("SystemSharedMemoryRegister", system_register(name, memory))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert text.encode().decode("utf-8", "strict")
    assert stub.error("SystemSharedMemoryStatus", field(1, name))[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert list(client.get_system_shared_memory_status().regions) == ["a"]
    # the NUL does not make it the name before it
    with pytest.raises(grpc.RpcError):
        stub.call("SystemSharedMemoryUnregister", field(1, name + b"\0"))
    assert list(client.get_system_shared_memory_status().regions) == ["a"]


@pytest.mark.parametrize("memory", [b"\xff\xfe", b"/a\0b", b"/../etc/passwd", b"a/b", b"/.", b"/..", b"k" * 300])
def test_bad_keys(client, stub, memory):
    code, _ = stub.error("SystemSharedMemoryRegister", system_register(b"x", memory))
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    assert not client.get_system_shared_memory_status().regions


@pytest.mark.parametrize("name", ["a b", "a/b", "ä", "🎉", "%41", "..", "b" * 255])
def test_good_names(gateway, client, key, name):
    """Both doors name the same region."""
    client.register_system_shared_memory(name, key("a", 64), 64)
    assert list(client.get_system_shared_memory_status(name).regions) == [name]
    assert gateway.region("system", name, "status").json[0]["name"] == name
    assert refused(client.register_system_shared_memory, name, key("b", 64), 64) == (
        "ALREADY_EXISTS", f"shared memory region '{name}' already in manager")
    client.unregister_system_shared_memory(name)
    assert gateway.status() == []


# --- other clients


def test_full_shape(stub, shape, key):
    """Every message is what a client's own code makes of it."""
    name = key("a", 4096)
    assert stub.call("ServerLive", shape.Empty(), shape.Live).live
    assert stub.call("ServerReady", shape.Empty(), shape.Ready).ready
    assert stub.call("ServerMetadata", shape.Empty(), shape.Metadata).name == "triton"
    request = shape.SystemRegion(name="é", key=name, offset=5, byte_size=50)
    assert stub.call("SystemSharedMemoryRegister", request) == b""
    status = stub.call("SystemSharedMemoryStatus", shape.Name(name="é"), shape.SystemStatus)
    assert dict(status.regions) == {"é": request}
    assert stub.call("SystemSharedMemoryStatus", shape.Empty(), shape.SystemStatus) == status
    assert not stub.call("CudaSharedMemoryStatus", shape.Name(), shape.CudaStatus).regions
    assert stub.call("SystemSharedMemoryUnregister", shape.Name(name="é")) == b""
    assert stub.call("CudaSharedMemoryUnregister", shape.Name()) == b""
    assert stub.call("SystemSharedMemoryStatus", shape.Name()) == b""


def test_status_of_many(client, shape, stub, key):
    """More than one window of flow control, and more than one frame."""
    name = key("a", 64)
    names = {f"{i:04}-{'n' * 100}" for i in range(500)}
    for one in names:
        client.register_system_shared_memory(one, name, 64)
    assert set(stub.call("SystemSharedMemoryStatus", response=shape.SystemStatus).regions) == names
    client.unregister_system_shared_memory()


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(gateway, shape, key, compression):
    name = key("a", 64)
    with Stub(shape, gateway.grpc, compression=compression) as stub:
        request = shape.SystemRegion(name="n" * 200, key=name, byte_size=64)
        stub.call("SystemSharedMemoryRegister", request)
        status = stub.call("SystemSharedMemoryStatus", request, shape.SystemStatus)
        assert dict(status.regions) == {"n" * 200: request}
        stub.call("SystemSharedMemoryUnregister", shape.Name(name="n" * 200))
        # what is short in this form, and long in the other
        code, text = stub.error("SystemSharedMemoryStatus", shape.Name(name="n" * (1 << 20)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text.startswith("Received message larger than max")


def test_too_long_a_message(stub, shape):
    for _ in range(3):
        code, text = stub.error("SystemSharedMemoryStatus", shape.Name(name="n" * (8 << 20)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text == f"Received message larger than max ({(8 << 20) + 5} vs. 65536)"
        assert stub.call("ServerLive", response=shape.Live).live


def test_too_much_metadata(stub, shape):
    metadata = [(f"x-{i}", "v" * 1000) for i in range(20)]
    code, _ = stub.error("ServerLive", metadata=metadata)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.call("ServerLive", response=shape.Live, metadata=metadata[:10]).live


def test_many_calls_at_once(stub, shape):
    """200 on one connection, which takes 32 at a time."""
    method = stub.method("ServerReady", shape.Ready)
    calls = [method.future(shape.Empty(), timeout=DEADLINE) for _ in range(200)]
    assert all(call.result().ready for call in calls)


def test_asyncio(gateway, key):
    async def main():
        client = tritonclient.grpc.aio.InferenceServerClient(gateway.grpc)
        assert await client.is_server_live() and await client.is_server_ready()
        await asyncio.gather(*(client.register_system_shared_memory(f"r{i}", name, 64) for i in range(50)))
        assert len((await client.get_system_shared_memory_status()).regions) == 50
        with pytest.raises(InferenceServerException) as caught:
            await client.get_system_shared_memory_status("x")
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        await client.unregister_system_shared_memory()
        assert not (await client.get_system_shared_memory_status()).regions
        await client.close()

    name = key("a", 64)
    asyncio.run(main())


def test_keepalive(gateway):
    """A client that pings without calls keeps its connection."""
    options = tritonclient.grpc.KeepAliveOptions(keepalive_time_ms=10000, keepalive_permit_without_calls=True,
                                                 http2_max_pings_without_data=0)
    with tritonclient.grpc.InferenceServerClient(gateway.grpc, keepalive_options=options) as client:
        assert client.is_server_live()


# --- streams


class TestStream:
    """ModelStreamInfer, as tritonclient uses it."""

    @pytest.fixture
    def options(self):
        return ["--allow-client-shm", "--models=all", "--grpc-max-input-size=100000"]

    @staticmethod
    def inputs(values):
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, len(values)], "INT32")
        tensor.set_data_from_numpy(np.array([values], dtype=np.int32))
        return [tensor]

    def test_many(self, gateway, client):
        """One after the other, in order, errors among them."""
        got = queue.Queue()
        client.start_stream(lambda result, error: got.put((result, error)))
        for i in range(200):
            model = "identity_int32" if i % 10 else "nothing"
            client.async_stream_infer(model, self.inputs([i] * (1 + i)), request_id=str(i))
        for i in range(200):
            result, error = got.get(timeout=DEADLINE)
            if i % 10:
                assert error is None
                assert result.get_response().id == str(i)
                assert result.as_numpy("OUTPUT0").tolist() == [[i] * (1 + i)]
            else:
                assert "nothing" in error.message()
        client.stop_stream()
        assert got.empty()

    def test_shared_memory(self, client, key):
        name = key("a", 8192)
        with open(f"/dev/shm{name}", "r+b") as memory:
            memory.write(np.arange(16, dtype=np.int32).tobytes())
        client.register_system_shared_memory("one", name, 8192)
        got = queue.Queue()
        client.start_stream(lambda result, error: got.put((result, error)))
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 16], "INT32")
        tensor.set_shared_memory("one", 64)
        output = tritonclient.grpc.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("one", 64, 4096)
        client.async_stream_infer("identity_int32", [tensor], outputs=[output])
        assert got.get(timeout=DEADLINE)[1] is None
        client.stop_stream()
        with open(f"/dev/shm{name}", "rb") as memory:
            memory.seek(4096)
            assert memory.read(64) == np.arange(16, dtype=np.int32).tobytes()
        client.unregister_system_shared_memory()

    def test_given_up(self, gateway, client):
        """What is under way when the client goes harms nothing, and a message that is too long ends the stream."""
        for _ in range(5):
            client.start_stream(lambda result, error: None)
            for i in range(20):
                client.async_stream_infer("identity_int32", self.inputs([i] * 5000))
            client.stop_stream(cancel_requests=True)
        got = queue.Queue()
        client.start_stream(lambda result, error: got.put(error))
        client.async_stream_infer("identity_int32", self.inputs([0] * 30000))
        assert got.get(timeout=DEADLINE).status() == "StatusCode.RESOURCE_EXHAUSTED"
        client.stop_stream()
        assert gateway.ready()

    def test_asyncio(self, gateway):
        async def main():
            client = tritonclient.grpc.aio.InferenceServerClient(gateway.grpc)

            async def requests():
                for i in range(10):
                    yield {"model_name": "identity_int32", "inputs": self.inputs([i])}

            results = [result.as_numpy("OUTPUT0").tolist() async for result, error in client.stream_infer(requests())]
            await client.close()
            return results

        assert asyncio.run(main()) == [[[i]] for i in range(10)]


# --- time


def test_deadline_of_client(gateway, client):
    """The broker stands still, and the gateway waits for it; the client does not."""
    assert client.is_server_ready()
    os.kill(gateway.broker.process.pid, signal.SIGSTOP)
    try:
        status, _ = refused(client.get_system_shared_memory_status, client_timeout=0.2)
        assert status == "DEADLINE_EXCEEDED"
        # without a deadline it hears what is wrong
        status, text = refused(client.get_system_shared_memory_status)
        assert status == "UNAVAILABLE" and text
        assert client.is_server_live()
    finally:
        os.kill(gateway.broker.process.pid, signal.SIGCONT)
    until(client.is_server_ready, gateway.log)
    assert not client.get_system_shared_memory_status().regions


def test_cancel(gateway, stub, shape):
    """Calls that are given up, in whatever state they are, harm nothing."""
    method = stub.method("SystemSharedMemoryStatus", shape.SystemStatus)
    for _ in range(150):
        method.future(shape.Empty(), timeout=DEADLINE).cancel()
        assert stub.call("ServerLive", response=shape.Live).live
    assert gateway.process.poll() is None


def test_broker_away(gateway, client):
    """The reason is said, and the next broker is found."""
    gateway.broker.kill()
    until(lambda: not client.is_server_ready(), gateway.log)
    assert client.is_server_live()
    for call in ((client.get_system_shared_memory_status,), (client.register_system_shared_memory, "x", "/x", 1),
                 (client.unregister_system_shared_memory,)):
        status, text = refused(*call)
        assert status == "UNAVAILABLE" and text.startswith("the broker "), (call, text)
    gateway.broker.start()
    until(client.is_server_ready, gateway.log)
    assert not client.get_system_shared_memory_status().regions


def test_stop_with_connections(gateway, client, stub, shape):
    """SIGTERM ends it at once when there is nothing under way."""
    assert client.is_server_live() and stub.call("ServerLive", response=shape.Live).live
    gateway.stop()
    assert "given up" not in gateway.log()
    gateway.start()


# --- who may


class TestTokens:
    """With credentials."""

    @pytest.fixture
    def options(self, tmp_path):
        tokens = tmp_path / "tokens"
        tokens.write_text(f"# two of them\n{TOKEN}\nadmin {ADMIN_TOKEN}\n")
        return ["--allow-client-shm", "--token-file", tokens]

    @pytest.mark.parametrize("headers", [
        None, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"Bearer {TOKEN[:-1]}"}, {"authorization": "Basic !"}, {"authorization": "x" * 5000}])
    def test_refused(self, gateway, client, headers):
        assert client.is_server_live(headers=headers) and client.is_server_ready(headers=headers)
        for call in (client.get_server_metadata, client.get_system_shared_memory_status, client.unregister_system_shared_memory):
            status, text = refused(call, headers=headers)
            assert status == "UNAUTHENTICATED" and text
        # at the Unix socket, who calls is known
        with tritonclient.grpc.InferenceServerClient(f"unix:{gateway.ports['grpc']['socket']}") as local:
            local.unregister_system_shared_memory()

    @pytest.mark.parametrize("authorization", [
        f"Bearer {TOKEN}", f"Bearer {ADMIN_TOKEN}", "Basic " + base64.b64encode(f"user:{TOKEN}".encode()).decode()])
    def test_accepted(self, client, key, authorization):
        headers = {"authorization": authorization}
        client.register_system_shared_memory("one", key("a", 64), 64, headers=headers)
        assert list(client.get_system_shared_memory_status(headers=headers).regions) == ["one"]
        client.unregister_system_shared_memory(headers=headers)


    def test_native_regions_are_an_administrators(self, gateway, client):
        """And only where everything is asked for by name, or in so many words."""
        def headers(token, **more):
            return {"authorization": f"Bearer {token}", **more}

        everything = {"shmbroker-scope": "everything"}
        assert gateway.broker.ctl("register", "--create=4K", "--keep", "native").returncode == 0
        listed = client.get_system_shared_memory_status(headers=headers(TOKEN)).regions
        assert [(region.name, region.key) for region in listed.values()] == [("native", "shmbroker:native")]
        text = "cannot unregister shared memory region 'native': it was registered natively, and is not the caller's"
        assert refused(client.unregister_system_shared_memory, "native", headers=headers(TOKEN)) == ("PERMISSION_DENIED", text)
        for who in (headers(TOKEN, **everything), headers(ADMIN_TOKEN)):
            client.unregister_system_shared_memory(headers=who)
            assert len(client.get_system_shared_memory_status(headers=who).regions) == 1
        client.unregister_system_shared_memory(headers=headers(ADMIN_TOKEN, **everything))
        assert not client.get_system_shared_memory_status(headers=headers(TOKEN)).regions


@pytest.mark.skipif(not ROOT, reason="needs root, to be somebody else")
def test_a_unix_peer_names_only_its_own(key):
    """The confused deputy: what the gateway could open for its own uid, another uid cannot have opened."""
    script = """if True:
        import sys, tritonclient.grpc
        with tritonclient.grpc.InferenceServerClient("unix:" + sys.argv[1]) as client:
            try:
                client.register_system_shared_memory("x", sys.argv[2], 64)
                print("fine")
            except Exception as error:
                print(error)
    """

    def register(uid, name):
        done = subprocess.run([sys.executable, "-c", script, path, name], check=True, capture_output=True, text=True,
                              user=uid, group=uid, extra_groups=[], timeout=DEADLINE)
        return done.stdout.strip()

    config = f"unsealed = accept\n[access]\nkeep = {GATEWAY}\n"
    with running(config, ("--allow-client-shm", "--socket-mode=0666"), uids=(None, GATEWAY)) as gateway:
        path = gateway.ports["grpc"]["socket"]
        own = key("own", 64, uid=GATEWAY)
        assert register(OTHER, own) == f"[StatusCode.INTERNAL] Unable to open shared memory region: '{own}'"
        other = key("other", 64, uid=CLIENT, mode=0o666)
        assert register(OTHER, other) == f"[StatusCode.INTERNAL] Unable to open shared memory region: '{other}'"
        assert register(GATEWAY, own) == "fine"
