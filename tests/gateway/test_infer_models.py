# SPDX-License-Identifier: Apache-2.0
"""The reference models through both doors: what they are, every datatype, every way that a tensor can be in a message."""

import asyncio
import json
import struct
import time

import numpy
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import grpc
from conftest import DEADLINE, until
from inference import A, B, LONG_MS, Door, Memory, check_simple, infer_json, message, strings, wait_for_leases

TURN_MS = 300
NUMBERS = {
    "BOOL": numpy.bool_, "UINT8": numpy.uint8, "UINT16": numpy.uint16, "UINT32": numpy.uint32, "UINT64": numpy.uint64,
    "INT8": numpy.int8, "INT16": numpy.int16, "INT32": numpy.int32, "INT64": numpy.int64,
    "FP16": numpy.float16, "FP32": numpy.float32, "FP64": numpy.float64,
}


@pytest.fixture
def options():
    return ["--allow-client-shm", "--models=all,also_simple=simple,turns=simple",
            f"--model-delay=identity_uint8={LONG_MS},turns={TURN_MS}"]


@pytest.fixture(params=["http", "grpc"])
def door(request, gateway):
    one = Door(request.param, gateway)
    yield one
    one.close()


def sample(datatype):
    dtype = NUMBERS[datatype]
    if datatype == "BOOL":
        return numpy.array([[True, False, True], [False, False, True]])
    if datatype.startswith("FP"):
        return numpy.array([[0.5, -2.0, 1024.0], [0.1, 1e-4, 3.0]], dtype=dtype)
    info = numpy.iinfo(dtype)
    return numpy.array([[info.min, info.max, 7], [1, 0, 100]], dtype=dtype)


def test_ready(door):
    assert door.client.is_model_ready("simple")
    assert door.client.is_model_ready("simple", "1")
    assert door.client.is_model_ready("identity_bf16")


def test_unknown_models(door):
    with door.refused("INVALID_ARGUMENT", "Request for unknown model: 'nope' is not found"):
        door.client.get_model_metadata("nope")
    with door.refused("NOT_FOUND", "Request for unknown model: 'simple' version 2 is not found"):
        door.client.get_model_metadata("simple", "2")
    with door.refused("INVALID_ARGUMENT", "Request for unknown model: 'nope' is not found"):
        door.client.infer("nope", door.pair())
    if door.kind == "grpc":
        text = ("failed to get model version from specified version string 'x' (details: stol), version should be an "
                "integral value > 0")
        with door.refused("INVALID_ARGUMENT", text):
            door.client.is_model_ready("simple", "x")
        with door.refused("INVALID_ARGUMENT",
                          "invalid model version specified '-3' , version should be an integral value > 0"):
            door.client.is_model_ready("simple", "-3")
    else:
        assert not door.client.is_model_ready("nope")
        assert not door.client.is_model_ready("simple", "2")


def test_metadata(door):
    json_of = {"as_json": True} if door.kind == "grpc" else {}
    metadata = door.client.get_model_metadata("simple", **json_of)
    assert (metadata["name"], metadata["versions"]) == ("simple", ["1"])
    shapes = [(t["name"], t["datatype"], [int(d) for d in t["shape"]]) for t in metadata["inputs"] + metadata["outputs"]]
    assert shapes == [(name, "INT32", [-1, 16]) for name in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")]
    metadata = door.client.get_model_metadata("identity_bytes", "1", **json_of)
    assert [(t["name"], t["datatype"], [int(d) for d in t["shape"]]) for t in metadata["inputs"]] == [
        ("INPUT0", "BYTES", [-1, -1])]


def test_config(door):
    config = door.client.get_model_config("simple_string", **({"as_json": True} if door.kind == "grpc" else {}))
    config = config.get("config", config)
    assert (config["name"], config["max_batch_size"]) == ("simple_string", 8)
    assert [(t["name"], t["data_type"], [int(d) for d in t["dims"]]) for t in config["output"]] == [
        ("OUTPUT0", "TYPE_STRING", [16]), ("OUTPUT1", "TYPE_STRING", [16])]


def test_routes(gateway):
    assert gateway.get("/v2/models/simple/ready").body == b""
    assert gateway.get("/v2/models/simple/versions/1/config").json["backend"] == "shmbroker"
    for path, status in (("/v2/models", 404), ("/v2/models/simple/versions/x", 404),
                         ("/v2/models/simple/versions/1/infer/more", 404), ("/v2/models/simple/infer", 405)):
        assert gateway.get(path).status == status, path
    for path in ("/v2/models/simple", "/v2/models/simple/ready", "/v2/models/simple/config"):
        assert gateway.post(path).error == "Method Not Allowed"


def test_extensions(gateway):
    assert {"binary_tensor_data", "model_configuration", "classification", "statistics"} <= set(gateway.get("/v2").json["extensions"])


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("binary_output", [True, False])
def test_simple(door, binary, binary_output):
    outputs = [door.output("OUTPUT0", binary_output), door.output("OUTPUT1", binary_output)]
    result = door.client.infer("simple", door.pair(binary), outputs=outputs, request_id="seven")
    check_simple(result)
    response = result.get_response()
    assert (response["id"] if door.kind == "http" else response.id) == "seven"


def test_no_outputs_asked_for(door):
    check_simple(door.client.infer("simple", door.pair()))
    check_simple(door.client.infer("simple", door.pair(), model_version="1"))


def test_one_output(door):
    result = door.client.infer("simple", door.pair(), outputs=[door.output("OUTPUT1")])
    assert (result.as_numpy("OUTPUT1") == A - B).all()
    assert result.as_numpy("OUTPUT0") is None


def test_wrapped_integers_and_batches(door):
    a = numpy.full((8, 16), 2**31 - 1, dtype=numpy.int32)
    b = numpy.ones((8, 16), dtype=numpy.int32)
    result = door.client.infer("simple", [door.input("INPUT1", b), door.input("INPUT0", a)])
    assert (result.as_numpy("OUTPUT0") == -2**31).all()
    assert result.as_numpy("OUTPUT1").shape == (8, 16)


def test_statistics(door, gateway):
    json_of = {"as_json": True} if door.kind == "grpc" else {}
    for _ in range(3):
        two_rows = [door.input("INPUT0", numpy.concatenate([A, A])), door.input("INPUT1", numpy.concatenate([B, B]))]
        door.client.infer("simple", two_rows)
    with door.refused("INVALID_ARGUMENT", "[request id: <id_unknown>] input 'INPUT0' already exists in request"):
        door.client.infer("simple", [door.pair()[0], door.pair()[0]])
    with door.refused("INVALID_ARGUMENT", "unexpected inference output 'x' for model 'simple'"):
        door.client.infer("simple", door.pair(), outputs=[door.output("x")])
    (found,) = door.client.get_inference_statistics("simple", **json_of)["model_stats"]
    assert (found["name"], found["version"]) == ("simple", "1")
    assert (int(found["inference_count"]), int(found["execution_count"])) == (6, 3)
    assert int(found["last_inference"]) > 0
    stats = found["inference_stats"]
    assert (int(stats["success"]["count"]), int(stats["fail"]["count"])) == (3, 1)
    assert int(stats["success"]["ns"]) == int(stats["compute_infer"]["ns"]) > 0
    every = door.client.get_inference_statistics(**json_of)["model_stats"]
    assert {"simple", "identity_bytes"} < {one["name"] for one in every}
    with door.refused("INVALID_ARGUMENT", "Request for unknown model: 'nope' is not found"):
        door.client.get_inference_statistics("nope")
    assert gateway.post("/v2/models/stats").status == 405


def test_simple_int8(door):
    a = A.astype(numpy.int8)
    result = door.client.infer("simple_int8", [door.input("INPUT0", a, "INT8"), door.input("INPUT1", a + 120, "INT8")])
    assert (result.as_numpy("OUTPUT0") == (a + (a + 120)).astype(numpy.int8)).all()
    assert (result.as_numpy("OUTPUT1") == -120).all()


def test_simple_identity(door):
    result = door.client.infer("simple_identity", [door.input("INPUT0", strings(A), "BYTES")])
    assert result.as_numpy("OUTPUT0").tolist() == strings(A).tolist()


@pytest.mark.parametrize("datatype, value", [("BYTES", '"hello"'), ("INT64", "123")])
def test_nested_arrays(gateway, datatype, value):
    """Data may be nested in any way, up to a depth."""
    for depth, status in ((50, 200), (120, 400)):
        data = "[" * depth + value + "]" * depth
        body = f'{{"inputs":[{{"name":"INPUT0","datatype":"{datatype}","shape":[1,1],"data":{data}}}]}}'
        reply = infer_json(gateway, f"identity_{datatype.lower()}", body.encode())
        assert reply.status == status
        if status != 200:
            assert "JSON nesting depth exceeds maximum allowed limit (100)" in reply.error


@pytest.mark.parametrize("binary", [True, False])
def test_simple_string(door, binary):
    inputs = [door.input("INPUT0", strings(A), "BYTES", binary), door.input("INPUT1", strings(-B), "BYTES", binary)]
    outputs = [door.output("OUTPUT0", binary), door.output("OUTPUT1", binary)]
    result = door.client.infer("simple_string", inputs, outputs=outputs)
    for name, expected in (("OUTPUT0", A - B), ("OUTPUT1", A + B)):
        assert [int(value) for value in result.as_numpy(name).reshape(-1)] == expected.reshape(-1).tolist()


@pytest.mark.parametrize("bad", [b"", b"x", b" 1", b"1x", b"9" * 20, b"1" * 300])
def test_simple_string_needs_integers(door, bad):
    values = strings(A)
    values[0][5] = bad
    text = "input 'INPUT0' for model 'simple_string' has an element that is not a decimal integer"
    with door.refused("INVALID_ARGUMENT", text):
        door.client.infer("simple_string", [door.input("INPUT0", values, "BYTES"), door.input("INPUT1", strings(B), "BYTES")])


@pytest.mark.parametrize("datatype", [name for name in NUMBERS if name != "UINT8"])
def test_identity(door, datatype):
    array = sample(datatype)
    model = f"identity_{datatype.lower()}"
    binaries = [True] if door.kind == "grpc" or datatype == "FP16" else [True, False]
    for binary in binaries:
        result = door.client.infer(model, [door.input("INPUT0", array, datatype, binary)],
                                   outputs=[door.output("OUTPUT0", binary)])
        got = result.as_numpy("OUTPUT0")
        assert got.dtype == array.dtype and got.tobytes() == array.tobytes()


def test_identity_bytes(door):
    array = numpy.array([[b"", b"\xc3\xa4\n\"\\", b"x" * 5000]], dtype=object)
    result = door.client.infer("identity_bytes", [door.input("INPUT0", array, "BYTES")])
    assert result.as_numpy("OUTPUT0").tolist() == array.tolist()
    if door.kind == "http":
        result = door.client.infer("identity_bytes", [door.input("INPUT0", array, "BYTES", False)],
                                   outputs=[door.output("OUTPUT0", False)])
        assert [value.encode() for value in result.get_output("OUTPUT0")["data"]] == array.reshape(-1).tolist()


def test_empty_tensors(door):
    for datatype, dtype in (("FP32", numpy.float32), ("BYTES", object)):
        array = numpy.empty((1, 0), dtype=dtype)
        result = door.client.infer(f"identity_{datatype.lower()}", [door.input("INPUT0", array, datatype)])
        assert result.as_numpy("OUTPUT0").size == 0


def test_classification(door):
    inputs = [door.input("INPUT0", numpy.concatenate([A, -A])), door.input("INPUT1", numpy.concatenate([B, B]))]
    result = door.client.infer("simple", inputs, outputs=[door.output("OUTPUT0", class_count=2), door.output("OUTPUT1")])
    assert result.as_numpy("OUTPUT0").tolist() == [[b"16:15", b"15:14"], [b"1:0", b"0:1"]]
    assert (result.as_numpy("OUTPUT1")[0] == A[0] - B[0]).all()
    array = numpy.array([[0.25, 4, -1]], dtype=numpy.float32)
    result = door.client.infer("identity_fp32", [door.input("INPUT0", array, "FP32")],
                               outputs=[door.output("OUTPUT0", class_count=9)])
    assert result.as_numpy("OUTPUT0").tolist() == [[b"4.000000:1", b"0.250000:0", b"-1.000000:2"]]
    array = numpy.array([[2**64 - 1, 2**64 - 2, 0]], dtype=numpy.uint64)
    result = door.client.infer("identity_uint64", [door.input("INPUT0", array, "UINT64")],
                               outputs=[door.output("OUTPUT0", class_count=2)])
    assert result.as_numpy("OUTPUT0").tolist() == [[b"18446744073709551615:0", b"18446744073709551614:1"]]
    with door.refused("INVALID_ARGUMENT", "class result not available for output due to unsupported type 'BYTES'"):
        door.client.infer("identity_bytes", [door.input("INPUT0", strings(A), "BYTES")],
                          outputs=[door.output("OUTPUT0", class_count=1)])


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compression(door, coding):
    if door.kind == "http":
        how = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    else:
        how = {"compression_algorithm": coding}
    check_simple(door.client.infer("simple", door.pair(), **how))
    check_simple(door.client.infer("simple", door.pair(False), **how))


def test_response_coding_is_the_clients_choice(gateway):
    body = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}]}
    for accept, coding in (("gzip", "gzip"), ("deflate, gzip", "deflate"), ("deflate;q=0.5, gzip;q=0.7", "gzip"),
                           ("br", None), ("identity", None), ("gzip;q=0", None), ("", None)):
        reply = infer_json(gateway, "identity_int32", body, {"Accept-Encoding": accept})
        assert (reply.status, reply.headers.get("content-encoding")) == (200, coding), accept


def test_typed_contents(gateway):
    """Tensors that are fields of the message, as clients other than Triton's send them."""
    stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(gateway.grpc))
    fields = {"BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
              "INT64": "int64_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
              "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents"}
    for datatype, field in fields.items():
        array = sample(datatype)
        contents = service_pb2.InferTensorContents(**{field: array.reshape(-1).tolist()})
        request = message(f"identity_{datatype.lower()}",
                          [{"name": "INPUT0", "datatype": datatype, "shape": [2, 3], "contents": contents}])
        response = stub.ModelInfer(request, timeout=DEADLINE)
        assert response.raw_output_contents[0] == array.tobytes(), datatype
        assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == (datatype, [2, 3])
    contents = service_pb2.InferTensorContents(bytes_contents=[b"ab", b"", b"\x00\xff"])
    request = message("identity_bytes", [{"name": "INPUT0", "datatype": "BYTES", "shape": [1, 3], "contents": contents}])
    response = stub.ModelInfer(request, timeout=DEADLINE)
    assert response.raw_output_contents[0] == b"\x02\0\0\0ab\0\0\0\0\x02\0\0\0\x00\xff"


def test_raw_requests(gateway):
    """A body that is nothing but one tensor."""
    data = numpy.arange(8, dtype=numpy.float32).tobytes()
    reply = infer_json(gateway, "identity_fp32", data, {"Inference-Header-Content-Length": "0"})
    length = int(reply.headers["inference-header-content-length"])
    assert reply.body[length:] == data
    assert json.loads(reply.body[:length])["outputs"][0]["shape"] == [1, 8]


def test_json_numbers(gateway):
    def infer(datatype, data, shape):
        body = {"inputs": [{"name": "INPUT0", "datatype": datatype, "shape": shape, "data": data}]}
        return infer_json(gateway, f"identity_{datatype.lower()}", body)

    assert infer("UINT64", [[2**64 - 1, 0]], [1, 2]).json["outputs"][0]["data"] == [2**64 - 1, 0]
    assert infer("INT64", [[-2**63], [[2**63 - 1]]], [2, 1]).json["outputs"][0]["data"] == [-2**63, 2**63 - 1]
    assert infer("INT8", [300, -1], [1, 2]).json["outputs"][0]["data"] == [44, -1]
    assert infer("FP64", [0.1, 1, 1e300], [1, 3]).json["outputs"][0]["data"] == [0.1, 1, 1e300]
    assert infer("FP32", [0.1], [1, 1]).json["outputs"][0]["data"] == [float(numpy.float32(0.1))]
    assert b'"data":[1.0]' in infer("FP32", [1], [1, 1]).body
    assert infer("BOOL", [True, False], [1, 2]).json["outputs"][0]["data"] == [True, False]


def test_large_tensors(door):
    array = numpy.arange(200000, dtype=numpy.int32).reshape(1, -1)
    result = door.client.infer("identity_int32", [door.input("INPUT0", array)])
    assert (result.as_numpy("OUTPUT0") == array).all()


def test_http_aio(gateway):
    async def run():
        async with tritonclient.http.aio.InferenceServerClient(gateway.http) as client:
            assert await client.is_model_ready("simple")
            inputs = [tritonclient.http.aio.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            inputs[0].set_data_from_numpy(A)
            inputs[1].set_data_from_numpy(B, binary_data=False)
            for result in await asyncio.gather(*[client.infer("simple", inputs) for _ in range(8)]):
                check_simple(result)
            check_simple(await client.infer("simple", inputs, request_compression_algorithm="gzip",
                                            response_compression_algorithm="deflate"))

    asyncio.run(run())


def test_grpc_aio(gateway):
    async def run():
        async with tritonclient.grpc.aio.InferenceServerClient(gateway.grpc) as client:
            assert await client.is_model_ready("simple")
            inputs = [tritonclient.grpc.aio.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            inputs[0].set_data_from_numpy(A)
            inputs[1].set_data_from_numpy(B)
            for result in await asyncio.gather(*[client.infer("simple", inputs) for _ in range(8)]):
                check_simple(result)

    asyncio.run(run())


def test_a_delay_holds_up_nobody(gateway, door):
    memory = Memory(door, "delayed", 64)
    slow = Door("grpc", gateway)
    call = slow.client.async_infer("identity_uint8", [slow.shared_input("INPUT0", memory.name, 64, 0, (1, 64), "UINT8")],
                                   lambda result, error: None)
    wait_for_leases(gateway, memory.name)
    check_simple(door.client.infer("simple", door.pair()))
    assert door.client.is_server_live()
    call.cancel()
    slow.close()
    door.client.unregister_system_shared_memory(memory.name)
    memory.destroy()


def test_a_model_that_waits_takes_one_request_after_the_other(gateway):
    door = Door("grpc", gateway)
    done = []
    begun = time.monotonic()
    for _ in range(3):
        door.client.async_infer("turns", door.pair(), lambda result, error: done.append((result, error)))
    until(lambda: len(done) == 3, lambda: done)
    # with two at a time it would be two turns; the clock of the gateway's timers is some milliseconds behind
    assert time.monotonic() - begun >= 2.5 * TURN_MS / 1000
    for result, error in done:
        assert error is None
        check_simple(result)
    door.close()


def test_one_that_waited_and_left_keeps_nobody_waiting(gateway):
    door = Door("grpc", gateway)
    done = []
    calls = [door.client.async_infer("turns", door.pair(), lambda result, error: done.append(error)) for _ in range(4)]
    for call in (calls[0], calls[2]):
        call.cancel()
    until(lambda: len(done) == 4, lambda: done)
    assert sum(error is None for error in done) >= 2, done
    check_simple(door.client.infer("turns", door.pair()))
    door.close()


def test_a_model_under_another_name(door):
    check_simple(door.client.infer("also_simple", door.pair()))
    metadata = door.client.get_model_metadata("also_simple")
    assert (metadata["name"] if door.kind == "http" else metadata.name) == "also_simple"


def test_the_queue_is_full(gateway):
    """Requests that wait are bounded; which of them are refused does not matter."""
    door = Door("grpc", gateway)
    # without this, clients of one process share a connection, and the calls that it may have at a time
    alone = [("grpc.use_local_subchannel_pool", 1)]
    others = [door.module.InferenceServerClient(gateway.grpc, channel_args=alone) for _ in range(12)]
    inputs = [door.input("INPUT0", numpy.zeros((1, 1), dtype=numpy.uint8), "UINT8")]
    errors = []
    calls = [other.async_infer("identity_uint8", inputs, lambda result, error: errors.append(error))
             for other in others for _ in range(30)]
    full = "[StatusCode.UNAVAILABLE] [request id: <id_unknown>] Exceeds maximum queue size"
    until(lambda: full in map(str, list(errors)), lambda: str(errors[:3]))
    for call in calls:
        call.cancel()
    until(lambda: len(errors) == len(calls), lambda: len(errors))
    for other in others:
        other.close()

    def runs():
        try:
            check_simple(door.client.infer("simple", door.pair()))
            return True
        except InferenceServerException as error:
            assert str(error) == full
            return False

    until(runs, "room again")
    door.close()


def test_stop_answers_what_waits(gateway):
    door = Door("grpc", gateway)
    errors = []
    door.client.async_infer("identity_uint8", [door.input("INPUT0", numpy.zeros((1, 1), dtype=numpy.uint8), "UINT8")],
                            lambda result, error: errors.append(error))
    check_simple(door.client.infer("simple", door.pair()))
    gateway.stop()
    until(lambda: errors, "an answer")
    gateway.start()


def test_bytes_as_json_hold_what_their_lengths_say(gateway):
    """Elements of BYTES are counted and measured before a model sees them."""
    data = struct.pack("<I", 100) + b"short"
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1],
                                   "parameters": {"binary_data_size": len(data)}}]}).encode()
    reply = infer_json(gateway, "identity_bytes", body + data, {"Inference-Header-Content-Length": str(len(body))})
    assert reply.error == ("[request id: <id_unknown>] incomplete string data for inference input 'INPUT0' for model "
                           "'identity_bytes', expecting string of length 100 but only 5 bytes available")
