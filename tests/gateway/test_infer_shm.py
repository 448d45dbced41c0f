# SPDX-License-Identifier: Apache-2.0
"""Inference on shared memory, as Triton's examples use it, and what happens to a region meanwhile."""

import asyncio
import contextlib
import os
import queue

import gevent
import numpy
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from tritonclient.utils import shared_memory as shm

from conftest import DEADLINE, until
from inference import A, B, LONG_MS, Door, Memory, check_simple, leases, native, strings, wait_for_leases
from protocol_client import READ

# in ms; the first that is long enough for what is done meanwhile, on the machine of the test, decides
DELAYS = {"identity_uint16": 1000, "identity_uint32": 8000, "identity_uint64": 60000}


@pytest.fixture
def options():
    delays = ",".join(f"{model}={delay}" for model, delay in {**DELAYS, "identity_uint8": LONG_MS, "identity_fp64": 500}.items())
    return ["--allow-client-shm", "--models=all", f"--model-delay={delays}"]


@pytest.fixture(params=["http", "grpc"])
def door(request, gateway):
    one = Door(request.param, gateway)
    yield one
    one.close()


@contextlib.contextmanager
def memory(door, name, size, data=()):  # pylint: disable=redefined-outer-name
    one = Memory(door, name, size, data)
    try:
        yield one
    finally:
        one.destroy()


def read_simple(one, offset=0):
    """OUTPUT0 and OUTPUT1 are where they should be."""
    assert (one.read(offset=offset) == A + B).all()
    assert (one.read(offset=offset + 64) == A - B).all()


def simple_in(door, region_in, region_out):  # pylint: disable=redefined-outer-name
    """The inputs and outputs of `simple`, two in each region."""
    return ([door.shared_input("INPUT0", region_in, 64), door.shared_input("INPUT1", region_in, 64, 64)],
            [door.shared_output("OUTPUT0", region_out, 64), door.shared_output("OUTPUT1", region_out, 64, 64)])


def test_example_flow(door):
    """What simple_http_shm_client and simple_grpc_shm_client do."""
    door.client.unregister_system_shared_memory()
    with memory(door, "output_data", 128) as out, memory(door, "input_data", 128, [A, B]) as data:
        inputs, outputs = simple_in(door, data.name, out.name)
        result = door.client.infer("simple", inputs, outputs=outputs)
        response = result.get_output("OUTPUT0")
        shape, datatype = ((response["shape"], response["datatype"]) if door.kind == "http"
                           else (list(response.shape), response.datatype))
        assert (shape, datatype) == ([1, 16], "INT32")
        read_simple(out)
        assert door.status() == {data.name, out.name}
        door.client.unregister_system_shared_memory()
        assert door.status() == set()


def test_example_flow_of_strings(door):
    """What simple_http_shm_string_client does."""
    serialized = [serialize_byte_tensor(strings(array)).item() for array in (A, B)]
    sizes = [len(data) for data in serialized]
    with memory(door, "output_data", 1024) as out, memory(door, "input_data", sum(sizes)) as data:
        shm.set_shared_memory_region(data.handle, [numpy.array(serialized[0], dtype=object)])
        shm.set_shared_memory_region(data.handle, [numpy.array(serialized[1], dtype=object)], offset=sizes[0])
        inputs = [door.shared_input("INPUT0", data.name, sizes[0], 0, datatype="BYTES"),
                  door.shared_input("INPUT1", data.name, sizes[1], sizes[0], datatype="BYTES")]
        outputs = [door.shared_output("OUTPUT0", out.name, 512), door.shared_output("OUTPUT1", out.name, 512, 512)]
        door.client.infer("simple_string", inputs, outputs=outputs)
        for offset, expected in ((0, A + B), (512, A - B)):
            got = shm.get_contents_as_numpy(out.handle, numpy.bytes_, [1, 16], offset)
            assert [int(value) for value in got.reshape(-1)] == expected.reshape(-1).tolist()
        door.client.unregister_system_shared_memory()


def test_mixed(door):
    """One input in the request and one in memory, one output in memory and one in the reply."""
    with memory(door, "mixed", 128, [A]) as one:
        inputs = [door.input("INPUT1", B), door.shared_input("INPUT0", one.name, 64)]
        outputs = [door.output("OUTPUT1", False), door.shared_output("OUTPUT0", one.name, 64, 64)]
        result = door.client.infer("simple", inputs, outputs=outputs)
        assert (result.as_numpy("OUTPUT1") == A - B).all()
        assert (one.read(offset=64) == A + B).all()
        door.client.unregister_system_shared_memory(one.name)


def test_register_offset_counts_once(door):
    """Offsets of an inference are within what is registered; one that is not a multiple of a page is fine."""
    with memory(door, "whole", 20000) as whole:
        shm.set_shared_memory_region(whole.handle, [A, B], offset=5000)
        door.client.register_system_shared_memory("window", f"/{whole.name}", 256, offset=5000)
        inputs, outputs = simple_in(door, "window", whole.name)
        door.client.infer("simple", inputs, outputs=outputs)
        read_simple(whole)
        with door.refused("INVALID_ARGUMENT", "Invalid offset + byte size for shared memory region: 'window'"):
            door.client.infer("simple", [door.shared_input("INPUT0", "window", 64, 200), inputs[1]])
        door.client.unregister_system_shared_memory()


def test_through_one_door_and_on_by_the_other(door, gateway):
    other = Door("grpc" if door.kind == "http" else "http", gateway)
    with memory(door, "crossing", 256, [A, B]) as one:
        inputs, _ = simple_in(other, one.name, one.name)
        outputs = [other.shared_output("OUTPUT0", one.name, 64, 128), other.shared_output("OUTPUT1", one.name, 64, 192)]
        other.client.infer("simple", inputs, outputs=outputs)
        read_simple(one, 128)
        other.client.unregister_system_shared_memory(one.name)
        assert door.status() == set()
    other.close()


def test_native_regions(door, gateway):
    """Sealed memory that another client of the broker has registered is used by its name."""
    with native(gateway, "native", A.tobytes() + B.tobytes() + bytes(128)) as view:
        inputs, _ = simple_in(door, "native", "native")
        outputs = [door.shared_output("OUTPUT0", "native", 64, 128), door.shared_output("OUTPUT1", "native", 64, 192)]
        door.client.infer("simple", inputs, outputs=outputs)
        assert view[128:] == (A + B).tobytes() + (A - B).tobytes()
        assert door.status() == {"native"}
        assert leases(gateway, "native") == 0


def test_native_region_that_may_only_be_read(door, gateway):
    with native(gateway, "readable", A.tobytes() + B.tobytes(), READ):
        inputs, outputs = simple_in(door, "readable", "readable")
        assert (door.client.infer("simple", inputs).as_numpy("OUTPUT0") == A + B).all()
        with pytest.raises(InferenceServerException) as caught:
            door.client.infer("simple", inputs, outputs=outputs)
        assert caught.value.status() == ("403" if door.kind == "http" else "StatusCode.PERMISSION_DENIED")


def test_large_identity(door):
    """What does not fit into a message goes through memory, in pieces."""
    size = 24 * 1024 * 1024
    with memory(door, "large", 2 * size) as one:
        data = numpy.arange(size // 4, dtype=numpy.int32)
        shm.set_shared_memory_region(one.handle, [data])
        tensor = door.shared_input("INPUT0", one.name, size, 0, (1, size // 4))
        door.client.infer("identity_int32", [tensor], outputs=[door.shared_output("OUTPUT0", one.name, size, size)])
        assert (one.read(shape=(size // 4,), offset=size) == data).all()
        text = f"output 'OUTPUT0' has {size} bytes, more than is held for replies now; shared memory has no such limit"
        with door.refused("RESOURCE_EXHAUSTED", text):
            door.client.infer("identity_int32", [tensor])
        door.client.unregister_system_shared_memory()


def test_strings_across_windows(door):
    """BYTES in memory are counted wherever they lie."""
    array = numpy.array([[b"x" * length for length in (4090, 1, 0, 5000, 3, 4096, 8192, 7)]], dtype=object)
    data = serialize_byte_tensor(array).item()
    with memory(door, "strings", 2 * len(data)) as one:
        shm.set_shared_memory_region(one.handle, [numpy.array(data, dtype=object)])
        tensor = door.shared_input("INPUT0", one.name, len(data), 0, (1, 8), "BYTES")
        door.client.infer("identity_bytes", [tensor], outputs=[door.shared_output("OUTPUT0", one.name, len(data), len(data))])
        assert (shm.get_contents_as_numpy(one.handle, numpy.bytes_, [1, 8], len(data)) == array).all()
        tensor = door.shared_input("INPUT0", one.name, len(data), 0, (1, 9), "BYTES")
        with door.refused("INVALID_ARGUMENT", "[request id: <id_unknown>] expected 9 string elements for inference input "
                          "'INPUT0' for model 'identity_bytes', got 8"):
            door.client.infer("identity_bytes", [tensor])
        door.client.unregister_system_shared_memory()


# --- unregistering what is in use


def begin(gateway, region, n=1):
    """A request on @region, by gRPC, by which it can be cancelled; it has its lease, and those that were before it are @n - 1."""
    slow = Door("grpc", gateway)
    tensor = slow.shared_input("INPUT0", region, 64, 0, (1, 64), "UINT8")
    call = slow.client.async_infer("identity_uint8", [tensor], lambda result, error: None)
    wait_for_leases(gateway, region, n)
    return slow, call


def test_unregister_while_it_is_used(door, gateway):
    """It stays listed and usable until its last user is done, and then goes by itself."""
    with memory(door, "busy", 128, [A, B]) as one:
        first, first_call = begin(gateway, one.name)
        assert door.client.unregister_system_shared_memory(one.name) is None
        assert door.status() == {one.name}
        # a request that comes afterwards
        assert (door.client.infer("simple", simple_in(door, one.name, one.name)[0]).as_numpy("OUTPUT0") == A + B).all()
        assert door.status() == {one.name}
        with door.refused("ALREADY_EXISTS", f"shared memory region '{one.name}' already in manager"):
            door.client.register_system_shared_memory(one.name, f"/{one.name}", 128)
        first_call.cancel()
        until(lambda: door.status() == set(), door.status)
        kind = f"Unable to find shared memory region: '{one.name}'"
        with door.refused("NOT_FOUND", kind):
            door.client.infer("simple", simple_in(door, one.name, one.name)[0])
        first.close()


def test_unregister_all_while_two_requests_wait(door, gateway):
    with memory(door, "busy", 128, [A, B]) as one, memory(door, "idle", 64) as idle:
        first, first_call = begin(gateway, one.name)
        second, second_call = begin(gateway, one.name, 2)
        assert door.status() == {one.name, idle.name}
        door.client.unregister_system_shared_memory()
        assert door.status() == {one.name}
        first_call.cancel()
        until(lambda: leases(gateway, one.name) == 1, gateway.broker.regions)
        assert door.status() == {one.name}
        second_call.cancel()
        until(lambda: door.status() == set(), door.status)
        first.close()
        second.close()


def test_gone_once_the_reply_is_there(door):
    """A request that ends by itself: whatever came first, with its reply a region that was unregistered is gone."""
    with memory(door, "ending", 128, [A]) as one:
        tensor = door.shared_input("INPUT0", one.name, 64, 0, (1, 8), "FP64")
        outputs = [door.shared_output("OUTPUT0", one.name, 64, 64)]
        if door.kind == "http":
            request = door.client.async_infer("identity_fp64", [tensor], outputs=outputs)
            door.client.unregister_system_shared_memory(one.name)
            try:
                request.get_result()
                assert (one.read(offset=64) == A).all()
            except InferenceServerException as error:
                # the unregistering overtook the request
                assert str(error) == f"[404] Unable to find shared memory region: '{one.name}'"
        else:
            got = []
            door.client.async_infer("identity_fp64", [tensor], lambda result, error: got.append(error), outputs=outputs)
            door.client.unregister_system_shared_memory(one.name)
            until(lambda: got, "a reply")
            if got[0] is None:
                assert (one.read(offset=64) == A).all()
        assert door.status() == set()


# --- memory that is cut


def test_truncated_before(door):
    with memory(door, "cut", 128, [A, B]) as one:
        inputs, outputs = simple_in(door, one.name, one.name)
        one.truncate(100)
        with door.refused("INVALID_ARGUMENT", f"shared memory region '{one.name}' was truncated by its owner"):
            door.client.infer("simple", inputs)
        with door.refused("INVALID_ARGUMENT", f"shared memory region '{one.name}' was truncated by its owner"):
            door.client.infer("simple", door.pair(), outputs=outputs)
        one.truncate(0)
        with door.refused("INVALID_ARGUMENT", f"shared memory region '{one.name}' was truncated by its owner"):
            door.client.infer("simple", inputs)
        assert door.client.is_server_live()
        door.client.unregister_system_shared_memory()


@pytest.mark.parametrize("what", ["input", "output"])
def test_truncated_during_an_inference(door, gateway, what):
    """The request fails, the gateway lives. A machine on which the shortest delay is too short gets the next one."""
    for model in DELAYS:
        datatype = model.split("_")[1]
        with memory(door, model, 4096) as one:
            count = 2048 // numpy.dtype(datatype).itemsize
            if what == "input":
                inputs, outputs = [door.shared_input("INPUT0", one.name, 2048, 2048, (1, count), datatype.upper())], []
            else:
                inputs = [door.input("INPUT0", numpy.zeros((1, count), dtype=datatype), datatype.upper())]
                outputs = [door.shared_output("OUTPUT0", one.name, 2048, 2048)]
            got = []
            if door.kind == "http":
                request = door.client.async_infer(model, inputs, outputs=outputs or None)
                wait_for_leases_or_end(gateway, one.name, got)
                one.truncate(2048)
                try:
                    request.get_result()
                    got.append(None)
                except InferenceServerException as error:
                    got.append(error)
            else:
                door.client.async_infer(model, inputs, lambda result, error, got=got: got.append(error), outputs=outputs)
                wait_for_leases_or_end(gateway, one.name, got)
                one.truncate(2048)
                until(lambda got=got: got, "a reply")
            door.client.unregister_system_shared_memory()
        assert door.client.is_server_live()
        if got[0] is not None:
            assert f"shared memory region '{one.name}' was truncated by its owner" in str(got[0])
            return
    raise AssertionError("no delay was long enough")


def wait_for_leases_or_end(gateway, region, got):
    """tritonclient's asynchronous requests over HTTP only go on while gevent is waited in."""
    until(lambda: (gevent.sleep(0.001), got or leases(gateway, region))[1], gateway.broker.regions)


# --- clients of asyncio, and many requests


def test_aio(gateway):
    async def run(module, url):
        async with module.InferenceServerClient(url) as client:
            handle = shm.create_shared_memory_region("aio", f"/shmg-{os.getpid()}-aio", 256)
            try:
                shm.set_shared_memory_region(handle, [A, B])
                await client.register_system_shared_memory("aio", f"/shmg-{os.getpid()}-aio", 256)
                inputs = [module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
                outputs = [module.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
                for i in range(2):
                    inputs[i].set_shared_memory("aio", 64, 64 * i)
                    outputs[i].set_shared_memory("aio", 64, 128 + 64 * i)
                await asyncio.gather(*[client.infer("simple", inputs, outputs=outputs) for _ in range(4)])
                assert (shm.get_contents_as_numpy(handle, numpy.int32, [1, 16], 128) == A + B).all()
                assert (shm.get_contents_as_numpy(handle, numpy.int32, [1, 16], 192) == A - B).all()
                await client.unregister_system_shared_memory("aio")
            finally:
                shm.destroy_shared_memory_region(handle)

    asyncio.run(run(tritonclient.http.aio, gateway.http))
    asyncio.run(run(tritonclient.grpc.aio, gateway.grpc))


def test_without_a_broker(door, gateway):
    """Tensors in messages need none; a region that was not used before cannot be had, and can once there is a broker again."""
    with memory(door, "lost", 128, [A, B]) as one:
        gateway.broker.kill()
        check_simple(door.client.infer("simple", door.pair()))
        with pytest.raises(InferenceServerException) as caught:
            door.client.infer("simple", simple_in(door, one.name, one.name)[0])
        assert caught.value.status() == ("503" if door.kind == "http" else "StatusCode.UNAVAILABLE")
        gateway.broker.start()
        until(gateway.ready, gateway.log)
        # that broker had nowhere to keep what it knew
        if one.name not in door.status():
            door.client.register_system_shared_memory(one.name, f"/{one.name}", 128)
        check_simple(door.client.infer("simple", simple_in(door, one.name, one.name)[0]))
        door.client.unregister_system_shared_memory()


def test_stream(gateway):
    """Requests of one stream, on memory; what is refused does not end it."""
    door = Door("grpc", gateway)
    with memory(door, "stream", 256, [A, B]) as one:
        got = queue.Queue()
        inputs, _ = simple_in(door, one.name, one.name)
        outputs = [door.shared_output("OUTPUT0", one.name, 64, 128), door.shared_output("OUTPUT1", one.name, 64, 192)]
        door.client.start_stream(lambda result, error: got.put((result, error)))
        door.client.async_stream_infer("simple", inputs[:1], outputs=outputs, request_id="bad")
        for i in range(4):
            door.client.async_stream_infer("simple", inputs, outputs=outputs, request_id=str(i))
        _, error = got.get(timeout=DEADLINE)
        assert str(error) == ("[request id: bad] expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but "
                              "missing required input(s) ['INPUT1']. Please provide all required input(s).")
        answers = [got.get(timeout=DEADLINE)[0].get_response() for _ in range(4)]
        assert [answer.id for answer in answers] == list("0123")
        assert list(answers[0].raw_output_contents) == [b"", b""]
        read_simple(one, 128)
        door.client.stop_stream()
        door.client.unregister_system_shared_memory()
        assert door.status() == set()
    door.close()


def test_nothing_is_left(door, gateway):
    """Leases, fds and bytes come back, whatever came of the requests."""
    with memory(door, "again", 256, [A, B]) as one:
        inputs, outputs = simple_in(door, one.name, one.name)
        bad = [door.shared_output("OUTPUT0", one.name, 10), outputs[1]]

        def round_of_requests():
            door.client.infer("simple", inputs, outputs=outputs)
            door.client.infer("simple", inputs)
            with pytest.raises(InferenceServerException):
                door.client.infer("simple", inputs, outputs=bad)
            with pytest.raises(InferenceServerException):
                door.client.infer("simple", [inputs[0], inputs[0]])

        round_of_requests()
        before = gateway.fds()
        for _ in range(30):
            round_of_requests()
        until(lambda: gateway.fds() <= before, lambda: f"{gateway.fds()} fds, {before} before")
        assert leases(gateway, one.name) == 0
        door.client.unregister_system_shared_memory()
        assert door.status() == set()
