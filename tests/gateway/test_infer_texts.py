# SPDX-License-Identifier: Apache-2.0
"""What inference refuses, with which code, in which words and in which order, at each door."""

import copy
import json

import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

import grpc
from conftest import DEADLINE
from inference import A, B, Memory, Door, infer_json, message, parameters

NOTE = ("NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each input "
        "shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
        "max_batch_size to zero. See the model configuration docs for more info on max_batch_size.")
ID = "[request id: <id_unknown>] "
DATA = {"data": [1] * 16}
RAW = A.tobytes()


@pytest.fixture
def options():
    return ["--allow-client-shm", "--models=all"]


@pytest.fixture
def region(gateway):
    """128 bytes that are registered."""
    door = Door("grpc", gateway)
    one = Memory(door, "texts", 128, [A, B])
    yield one.name
    door.client.unregister_system_shared_memory()
    one.destroy()
    door.close()


@pytest.fixture
def infer(gateway):
    """infer(request): the code and the text that a message is refused with."""
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def call(request):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(request, timeout=DEADLINE)
            return caught.value.code().name, caught.value.details()

        yield call


def http_input(name="INPUT0", **fields):
    return {"name": name, "datatype": "INT32", "shape": [1, 16], **fields}


def simple(first=None, second=None, **more):
    """A request for `simple`, with what is different from a good one."""
    return {"inputs": [http_input(**(DATA if first is None else first)),
                       http_input(**{"name": "INPUT1", **(DATA if second is None else second)})], **more}


def shared(name, **more):
    return {"parameters": {"shared_memory_region": name, **more}}


ONLY_ONE = ("Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'. But")
UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NO_SIZE = ("'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor '{}'")

# body of the request, status, text; REGION is the region's name
HTTP = {
    "no inputs": ({}, 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    "inputs": ({"inputs": 5}, 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
    "no source": (simple({}), 400, ONLY_ONE + " no field is set"),
    "two sources": (simple({**DATA, **shared("REGION")}), 400, ONLY_ONE + " set 'data' 'shared_memory_region'"),
    "three sources": (simple({**DATA, "parameters": {"binary_data_size": 1, "shared_memory_region": "REGION"}}), 400,
                      ONLY_ONE + " set 'data' 'binary_data_size' 'shared_memory_region'"),
    "name": (simple({**DATA, "name": 5}), 500, "Unable to parse 'name': attempt to access JSON non-string as string"),
    "no name": ({"inputs": [DATA]}, 500, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
    "no datatype": ({"inputs": [{"name": "INPUT0", **DATA}]}, 500,
                    "Unable to parse 'datatype': attempt to access non-existing object member 'datatype'"),
    "shape": (simple({**DATA, "shape": [2, -5]}), 500, f"Unable to parse 'shape': {UINT}"),
    "shape no array": (simple({**DATA, "shape": 16}), 500, "Unable to parse 'shape': attempt to access JSON non-array as array"),
    "data": (simple({"data": 5}), 500, "Unable to parse 'data': attempt to access JSON non-array as array"),
    "data of strings": (simple({"data": ["1"] * 16}), 500,
                        "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
    "too little data": (simple({"data": [1] * 15}), 500, "Failed to parse 'data' field: shape does not match true shape"),
    "too much data": (simple({"data": [1] * 17}), 500,
                      "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    "overflow": (simple({"data": [1], "shape": [2**4, 2**60 + 2]}), 400,
                 f"invalid shape for input 'INPUT0': shape [16,{2**60 + 2}] causes total element count to exceed maximum size "
                 f"of {2**63 - 1}"),
    "bytes overflow": (simple({"data": [1], "shape": [2**2, 2**59 + 2]}), 400,
                       f"byte size overflow for input 'INPUT0': element count ({2**61 + 8}) * data type size (4) exceeds "
                       f"maximum allowed size ({2**63 - 1})"),
    "too large": (simple({"data": [1], "shape": [1, 2**25]}), 400,
                  f"JSON input 'INPUT0' has a byte_size ({2**27} bytes) that exceeds the maximum allowed value of {2**26} "
                  "bytes. Use --http-max-input-size to increase the limit."),
    "region's type": (simple(shared(5)), 500,
                      "Unable to parse 'shared_memory_region': attempt to access JSON non-string as string"),
    "offset's type": (simple(shared("REGION", shared_memory_offset="1")), 500, f"Unable to parse 'shared_memory_offset': {UINT}"),
    "negative offset": (simple(shared("REGION", shared_memory_offset=-1)), 500,
                        f"Unable to parse 'shared_memory_offset': {UINT}"),
    "fraction": (simple(shared("REGION", shared_memory_byte_size=1.5)), 500,
                 f"Unable to parse 'shared_memory_byte_size': {UINT}"),
    "size beyond 2^64": (simple(shared("REGION", shared_memory_byte_size=2**64)), 500,
                         f"Unable to parse 'shared_memory_byte_size': {UINT}"),
    "no size": (simple(shared("REGION")), 400, NO_SIZE.format("INPUT0")),
    "unknown region": (simple(shared("nope", shared_memory_byte_size=64)), 404,
                       "Unable to find shared memory region: 'nope'"),
    "offset": (simple(shared("REGION", shared_memory_byte_size=64, shared_memory_offset=128)), 400,
               "Invalid offset for shared memory region: 'REGION'"),
    "offset 2^64 - 32": (simple(shared("REGION", shared_memory_byte_size=64, shared_memory_offset=2**64 - 32)), 400,
                         "Invalid offset for shared memory region: 'REGION'"),
    "integer overflow": (simple(shared("REGION", shared_memory_byte_size=2**64 - 32, shared_memory_offset=32)), 400,
                         f"Integer overflow detected: byte_size ({2**64 - 32}) + offset (32) exceeds maximum value "
                         f"({2**64 - 1}) for region 'REGION'"),
    "offset and size": (simple(shared("REGION", shared_memory_byte_size=64, shared_memory_offset=65)), 400,
                        "Invalid offset + byte size for shared memory region: 'REGION'"),
    "size 0": (simple(shared("REGION", shared_memory_byte_size=0)), 400,
               ID + "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 0"),
    "size": (simple(shared("REGION", shared_memory_byte_size=128)), 400,
             ID + "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 128"),
    "with an id": (simple(shared("REGION", shared_memory_byte_size=128), id="my id"), 400,
                   "[request id: my id] input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 128"),
    "id": (simple(id=5), 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
    "same input twice": (simple(second={**DATA, "name": "INPUT0"}), 400, ID + "input 'INPUT0' already exists in request"),
    "one input": ({"inputs": [http_input(**DATA)]}, 400,
                  ID + "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but missing required "
                  "input(s) ['INPUT1']. Please provide all required input(s)."),
    "empty inputs": ({"inputs": []}, 400,
                     ID + "expected 2 inputs but got 0 inputs for model 'simple'. Got input(s) [], but missing required "
                     "input(s) ['INPUT0','INPUT1']. Please provide all required input(s)."),
    "other input": (simple(second={**DATA, "name": "INPUT7"}), 400, "unexpected inference input 'INPUT7' for model 'simple'"),
    "other output": (simple(outputs=[{"name": "OUTPUT7"}]), 400, "unexpected inference output 'OUTPUT7' for model 'simple'"),
    "same output twice": (simple(outputs=[{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]), 400,
                          ID + "output 'OUTPUT0' already exists in request"),
    "other datatype": (simple({**DATA, "datatype": "INT64"}), 400,
                       ID + "inference input 'INPUT0' data-type is 'INT64', but model 'simple' expects 'INT32'"),
    "no such datatype": (simple({"data": [1] * 16, "datatype": "INT31"}), 400, "invalid datatype for input INPUT0"),
    "other shape": (simple({"data": [1] * 17, "shape": [1, 17]}), 400,
                    ID + f"unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,17]. {NOTE}"),
    "other dimensions": (simple({**DATA, "shape": [1, 1, 16]}), 400,
                         ID + f"unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,1,16]. {NOTE}"),
    "batches differ": (simple({"data": [1] * 32, "shape": [2, 16]}), 400,
                       ID + "input 'INPUT1' batch size does not match other inputs for 'simple'"),
    "batch": (simple({"data": [1] * 144, "shape": [9, 16]}, {"data": [1] * 144, "shape": [9, 16]}), 400,
              ID + "inference request batch-size must be <= 8 for 'simple'"),
    "no shape": (simple({**DATA, "shape": []}), 400,
                 ID + "input 'INPUT0' has no shape but model requires batch dimension for 'simple'"),
    "shm and class": (simple(outputs=[{"name": "OUTPUT0", **shared("REGION", classification=1)}]), 400,
                      "Output can't set both 'shared_memory_region' and 'classification'"),
    "shm and binary": (simple(outputs=[{"name": "OUTPUT0", **shared("REGION", binary_data=True)}]), 400,
                       "Output can't set both 'shared_memory_region' and 'binary_data'"),
    "binary": (simple(outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": 1}}]), 500,
               "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean"),
    "shm and binary's type": (simple(outputs=[{"name": "OUTPUT0", **shared("REGION", binary_data=1)}]), 500,
                              "Unable to set 'binary_data': attempt to access JSON non-boolean as boolean"),
    "class": (simple(outputs=[{"name": "OUTPUT0", "parameters": {"classification": -1}}]), 500,
              f"Unable to set 'classification': {UINT}"),
    "outputs": (simple(outputs={}), 500, "Unable to parse 'outputs': attempt to access JSON non-array as array"),
    "output without size": (simple(outputs=[{"name": "OUTPUT0", **shared("REGION")}]), 400, NO_SIZE.format("OUTPUT0")),
    "output of an unknown region": (simple(outputs=[{"name": "OUTPUT0", **shared("nope", shared_memory_byte_size=64)}]), 404,
                                    "Unable to find shared memory region: 'nope'"),
    "output too small": (simple(outputs=[{"name": "OUTPUT0", **shared("REGION", shared_memory_byte_size=63)}]), 500,
                         "shared memory size specified with the request for output 'OUTPUT0' (63 bytes) should be at least 64 "
                         "bytes to hold the results"),
    "inputs before outputs": (simple(shared("nope", shared_memory_byte_size=64),
                                     outputs=[{"name": "OUTPUT0", **shared("no", shared_memory_byte_size=64)}]), 404,
                              "Unable to find shared memory region: 'nope'"),
    "leases before checks": (simple({**DATA, "datatype": "INT64"},
                                    outputs=[{"name": "OUTPUT0", **shared("no", shared_memory_byte_size=64)}]), 404,
                             "Unable to find shared memory region: 'no'"),
    "reserved": (simple(parameters={"triton_x": 1}), 400,
                 "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."),
    "parameter": (simple(parameters={"mine": []}), 400,
                  "parameter 'mine' has invalid type. It should be either 'int', 'bool', or 'string'."),
    "binary_data_output": (simple(parameters={"binary_data_output": 1}), 500,
                           "Unable to parse 'binary_data_output': attempt to access JSON non-boolean as boolean"),
    "priority": (simple(parameters={"priority": -1}), 500, f"Unable to parse 'priority': {UINT}"),
    "parameters": (simple(parameters=1), 500, "failed to get request params.: attempt to get members for non-object"),
    "not JSON": (b"{", 500, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
}


@pytest.mark.parametrize("case", HTTP)
def test_http(gateway, region, case):
    body, status, text = HTTP[case]
    if not isinstance(body, bytes):
        body = json.dumps(body).replace("REGION", region).encode()
    reply = infer_json(gateway, "simple", body)
    assert (reply.status, reply.error) == (status, text.replace("REGION", region))


def test_http_extremes_are_numbers(gateway, region):
    """An offset and a size that are not asked for do not matter; nulls are no values."""
    assert infer_json(gateway, "simple", simple({**DATA, "parameters": {"shared_memory_offset": 5}})).status == 200
    assert infer_json(gateway, "simple", simple(parameters={"sequence_id": "x", "sequence_start": True, "timeout": 5})).status == 200
    body = simple(outputs=[{"name": "OUTPUT0", **shared(region, shared_memory_byte_size=64, binary_data=False)}])
    assert infer_json(gateway, "simple", body).json["outputs"] == [{"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16]}]


def binary_request(sizes, data, **headers):
    body = json.dumps({"inputs": [http_input(f"INPUT{i}", parameters={"binary_data_size": size})
                                  for i, size in enumerate(sizes)]}).encode()
    return body + data, {"Inference-Header-Content-Length": str(len(body)), **headers}


@pytest.mark.parametrize("sizes, data, text", [
    ([64, 64], RAW, "unexpected size for input 'INPUT1', expecting 64 additional bytes for model 'simple'"),
    ([64, 65], RAW * 2, "unexpected size for input 'INPUT1', expecting 1 additional bytes for model 'simple'"),
    ([64, 64], RAW * 2 + b"x", "unexpected additional input data for model 'simple'"),
    ([0, 64], RAW, ID + "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 0"),
])
def test_http_binary(gateway, sizes, data, text):
    body, headers = binary_request(sizes, data)
    reply = infer_json(gateway, "simple", body, headers)
    assert (reply.status, reply.error) == (400, text)


@pytest.mark.parametrize("value, text", [
    ("x", "Unable to parse Inference-Header-Content-Length, got: x"),
    ("99999999999", "Unable to parse Inference-Header-Content-Length, value is out of range [ -2147483648, 2147483647 ], got: "
     "99999999999"),
    ("-1", "inference header size should be in range (0, 2), got: -1"),
    ("3", "inference header size should be in range (0, 2), got: 3"),
    ("0", ID + "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'simple' model configuration"),
])
def test_http_header_length(gateway, value, text):
    reply = infer_json(gateway, "simple", b"{}", {"Inference-Header-Content-Length": value})
    assert (reply.status, reply.error) == (400, text)


def test_http_raw_input(gateway):
    reply = infer_json(gateway, "identity_bytes", b"x", {"Inference-Header-Content-Length": "0"})
    assert (reply.status, reply.error) == (
        400, ID + "For BYTE datatype raw input 'INPUT0', the model must have input shape [1]")


def test_http_codings(gateway):
    reply = infer_json(gateway, "simple", b"{}", {"Content-Encoding": "br"})
    assert (reply.status, reply.error, reply.headers["accept-encoding"]) == (501, "Unsupported compression type", "gzip, deflate")
    reply = infer_json(gateway, "simple", b"{}", {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error) == (400, "the body is not what its Content-Encoding says")
    reply = infer_json(gateway, "simple", b"", {"Content-Encoding": "gzip"})
    assert (reply.status, reply.error) == (400, "nothing to be decompressed")


def test_http_json_that_would_become_large(gateway):
    """What takes hundreds of times its length once it is parsed is refused, and what is as long and plain is not."""
    count = 2**20 // 3 - 100
    body = b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1,1],"data":[' + b",".join([b"{}"] * count) + b"]}]}"
    reply = infer_json(gateway, "identity_int32", body)
    assert (reply.status, reply.error) == (429, "the JSON has more values than are held for a request")
    count = 2**19 - 100
    body = (b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1,%d],"data":[' % count + b",".join([b"1"] * count) + b"]}]}")
    assert len(infer_json(gateway, "identity_int32", body).json["outputs"][0]["data"]) == count
    text = json.dumps('"[{,:\\' * 1000)
    body = b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1,1],"data":[' + text.encode() + b"]}]}"
    assert infer_json(gateway, "identity_bytes", body).json["outputs"][0]["data"] == [json.loads(text)]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_http_halves_are_binary(gateway, datatype):
    body = {"inputs": [{"name": "INPUT0", "datatype": datatype, "shape": [1, 1], "data": [1]}]}
    reply = infer_json(gateway, f"identity_{datatype.lower()}", body)
    assert (reply.status, reply.error) == (
        400, f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input INPUT0")
    head = {"inputs": [{"name": "INPUT0", "datatype": datatype, "shape": [1, 1], "parameters": {"binary_data_size": 2}}]}
    body = json.dumps(head).encode()
    reply = infer_json(gateway, f"identity_{datatype.lower()}", body + b"xx", {"Inference-Header-Content-Length": str(len(body))})
    assert (reply.status, reply.error) == (
        400, f"sending {datatype} data via JSON is not supported. Please use the binary data format for output")


@pytest.mark.parametrize("count, data, text", [
    (2, b"\1\0\0\0x", "expected 2 string elements for inference input 'INPUT0' for model 'identity_bytes', got 1"),
    (1, b"\1\0\0\0x\1\0\0\0y", "unexpected number of string elements 2 for inference input 'INPUT0' for model 'identity_bytes', "
     "expecting 1"),
    (2, b"\1\0\0\0xyz", "incomplete string length indicator for inference input 'INPUT0' for model 'identity_bytes', expecting 4 "
     "bytes but only 2 bytes available. Please make sure the string length indicator is in one buffer."),
    (1, b"\xff\xff\xff\xff", "incomplete string data for inference input 'INPUT0' for model 'identity_bytes', expecting string of "
     "length 4294967295 but only 0 bytes available"),
])
def test_strings(infer, count, data, text):
    request = message("identity_bytes", [{"name": "INPUT0", "datatype": "BYTES", "shape": [1, count]}], raw=[data])
    assert infer(request) == ("INVALID_ARGUMENT", ID + text)


def inputs(first=None, second=None):
    return [{"name": "INPUT0", **(first or {})}, {"name": "INPUT1", **(second or {})}]


def region_of(name, **more):
    return {"parameters": parameters(shared_memory_region=name, **more)}


CONTENTS = service_pb2.InferTensorContents(int_contents=[1] * 16)
WRONG = "invalid value type for '{}' parameter for tensor '{}', expected {}."
ALONE = "'{}' can not be specified without 'shared_memory_region' parameter for tensor 'INPUT0'"

# fields of the message, code, text
GRPC = {
    "region's type": ({"inputs": inputs(region_of(5))}, WRONG.format("shared_memory_region", "INPUT0", "string_param")),
    "offset alone": ({"inputs": inputs({"parameters": parameters(shared_memory_offset=1)})}, ALONE.format("shared_memory_offset")),
    "size alone": ({"inputs": inputs({"parameters": parameters(shared_memory_byte_size=1)})},
                   ALONE.format("shared_memory_byte_size")),
    "offset's type": ({"inputs": inputs(region_of("REGION", shared_memory_offset="1", shared_memory_byte_size=64))},
                      WRONG.format("shared_memory_offset", "INPUT0", "int64_param")),
    "unsigned offset": ({"inputs": inputs(region_of("REGION", shared_memory_offset=("uint64_param", 1),
                                                    shared_memory_byte_size=64))},
                        WRONG.format("shared_memory_offset", "INPUT0", "int64_param")),
    "size's type": ({"inputs": inputs(region_of("REGION", shared_memory_byte_size=True))},
                    WRONG.format("shared_memory_byte_size", "INPUT0", "int64_param")),
    "no size": ({"inputs": inputs(region_of("REGION"))}, NO_SIZE.format("INPUT0")),
    "contents and region": ({"inputs": inputs({**region_of("REGION", shared_memory_byte_size=64), "contents": CONTENTS})},
                            "unexpected 'content' provided when using shared memory for input tensor 'INPUT0' for model 'simple'"),
    "contents and raw": ({"inputs": inputs({"contents": CONTENTS}), "raw": [RAW]},
                         "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'simple'"),
    "no data": ({"inputs": inputs(), "raw": [RAW]},
                "unable to find data for input tensor 'INPUT1' for model 'simple' in request."),
    "contents of another type": ({"inputs": inputs({"contents": service_pb2.InferTensorContents(fp32_contents=[1])})},
                                 "unexpected explicit tensor data for input tensor 'INPUT0' for model 'simple' of type 'FP32', "
                                 "expected datatype 'INT32'"),
    "contents twice": ({"inputs": inputs({"contents": service_pb2.InferTensorContents(int_contents=[1], int64_contents=[1])})},
                       "unexpected explicit tensor data for input tensor 'INPUT0' for model 'simple', binary data was already "
                       "supplied."),
    "negative offset": ({"inputs": inputs(region_of("REGION", shared_memory_offset=-1, shared_memory_byte_size=64))},
                        "Invalid offset for shared memory region: 'REGION'"),
    "offset": ({"inputs": inputs(region_of("REGION", shared_memory_offset=128, shared_memory_byte_size=64))},
               "Invalid offset for shared memory region: 'REGION'"),
    "negative size": ({"inputs": inputs(region_of("REGION", shared_memory_offset=32, shared_memory_byte_size=-32))},
                      f"Integer overflow detected: byte_size ({2**64 - 32}) + offset (32) exceeds maximum value ({2**64 - 1}) for "
                      "region 'REGION'"),
    "offset and size": ({"inputs": inputs(region_of("REGION", shared_memory_offset=65, shared_memory_byte_size=64))},
                        "Invalid offset + byte size for shared memory region: 'REGION'"),
    "size": ({"inputs": inputs(region_of("REGION", shared_memory_byte_size=128)), "raw": [RAW]},
             ID + "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 128"),
    "output without size": ({"inputs": inputs(), "raw": [RAW, RAW], "outputs": [{"name": "OUTPUT0", **region_of("REGION")}]},
                            NO_SIZE.format("OUTPUT0")),
    "output and class": ({"inputs": inputs(), "raw": [RAW, RAW], "outputs": [
        {"name": "OUTPUT0", **region_of("REGION", shared_memory_byte_size=64, classification=1)}]},
        "output can't set both 'shared_memory_region' and 'classification'"),
    "class's type": ({"inputs": inputs(), "raw": [RAW, RAW], "outputs": [
        {"name": "OUTPUT0", "parameters": parameters(classification="1")}]},
        "invalid value type for 'classification' parameter, expected int64_param"),
    "class 0": ({"inputs": inputs(), "raw": [RAW, RAW], "outputs": [{"name": "OUTPUT0", "parameters": parameters(classification=0)}]},
                "invalid value for 'classification' parameter, expected >= 0"),
    "same output twice": ({"inputs": inputs(), "raw": [RAW, RAW], "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]},
                          ID + "output 'OUTPUT0' already exists in request"),
    "same input twice": ({"inputs": inputs(second={"name": "INPUT0"}), "raw": [RAW, RAW]},
                         ID + "input 'INPUT0' already exists in request"),
    "with an id": ({"inputs": inputs(second={"name": "INPUT0"}), "id": "77"},
                   "[request id: 77] input 'INPUT0' already exists in request"),
    "names before data": ({"inputs": inputs(region_of("nope", shared_memory_byte_size=64)),
                           "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]},
                          ID + "output 'OUTPUT0' already exists in request"),
    "one input": ({"inputs": inputs()[:1], "raw": [RAW]},
                  ID + "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but missing required "
                  "input(s) ['INPUT1']. Please provide all required input(s)."),
    "negative dimension": ({"inputs": inputs({"shape": [1, -1]}), "raw": [RAW, RAW]},
                           ID + "All input dimensions should be specified for input 'INPUT0' for model 'simple', got [1,-1]"),
    "negative batch": ({"inputs": inputs({"shape": [-1, 16]}, {"shape": [4294967295, 16]}), "raw": [RAW, RAW]},
                       ID + "inference request batch-size must be <= 8 for 'simple'"),
    "other shape": ({"inputs": inputs({"shape": [1, 17]}), "raw": [RAW, RAW]},
                    ID + f"unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,17]. {NOTE}"),
    "other datatype": ({"inputs": inputs({"datatype": "x"}), "raw": [RAW, RAW]},
                       ID + "inference input 'INPUT0' data-type is '<invalid>', but model 'simple' expects 'INT32'"),
    "other input": ({"inputs": inputs({"name": "x"}), "raw": [RAW, RAW]}, "unexpected inference input 'x' for model 'simple'"),
    "other output": ({"inputs": inputs(), "raw": [RAW, RAW], "outputs": [{"name": "x"}]},
                     "unexpected inference output 'x' for model 'simple'"),
    "sequence_id": ({"inputs": inputs(), "raw": [RAW, RAW], "parameters": parameters(sequence_id=True)},
                    "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."),
    "sequence_start": ({"inputs": inputs(), "raw": [RAW, RAW], "parameters": parameters(sequence_start=1)},
                       "invalid value type for 'sequence_start' parameter, expected bool_param."),
    "priority": ({"inputs": inputs(), "raw": [RAW, RAW], "parameters": parameters(priority=-1)},
                 "invalid value for 'priority', expected value >= 0."),
    "timeout": ({"inputs": inputs(), "raw": [RAW, RAW], "parameters": parameters(timeout="1")},
                "invalid value type for 'timeout' parameter, expected int64_param."),
    "reserved": ({"inputs": inputs(), "raw": [RAW, RAW], "parameters": parameters(triton_x=1)},
                 "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
                 "'triton_' are allowed: triton_enable_empty_final_response"),
    "parameter": ({"inputs": inputs(), "raw": [RAW, RAW], "parameters": parameters(mine=("uint64_param", 1))},
                  "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param."),
}


def renamed(tensors, region):
    """@tensors in @region."""
    tensors = copy.deepcopy(tensors)
    for tensor in tensors:
        given = tensor.get("parameters", {}).get("shared_memory_region")
        if given is not None and given.string_param == "REGION":
            given.string_param = region
    return tensors


@pytest.mark.parametrize("case", GRPC)
def test_grpc(infer, region, case):
    fields, text = GRPC[case]
    fields = {**fields, "inputs": renamed(fields["inputs"], region), "outputs": renamed(fields.get("outputs", []), region)}
    assert infer(message(**fields)) == ("INVALID_ARGUMENT", text.replace("REGION", region))


def test_grpc_regions(infer, region):
    request = message(inputs=inputs(region_of("nope", shared_memory_byte_size=64)), raw=[RAW])
    assert infer(request) == ("NOT_FOUND", "Unable to find shared memory region: 'nope'")
    request = message(inputs=inputs(), raw=[RAW, RAW], outputs=[{"name": "OUTPUT1", **region_of(region, shared_memory_byte_size=8)}])
    assert infer(request) == ("INTERNAL", "shared memory size specified with the request for output 'OUTPUT1' (8 bytes) should be "
                              "at least 64 bytes to hold the results")


def test_grpc_raw_contents_are_for_the_other_inputs(gateway, region):
    """Entries of raw_input_contents are taken in order by the inputs that are not in memory, and an output there has an empty one."""
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = message(inputs=inputs(region_of(region, shared_memory_byte_size=64)), raw=[B.tobytes()],
                          outputs=[{"name": "OUTPUT1"}, {"name": "OUTPUT0", **region_of(region, shared_memory_byte_size=64)}])
        response = stub.ModelInfer(request, timeout=DEADLINE)
        assert [output.name for output in response.outputs] == ["OUTPUT1", "OUTPUT0"]
        assert list(response.raw_output_contents) == [(A - B).tobytes(), b""]
        assert response.outputs[1].datatype == "INT32"


def test_cuda_is_refused_without_a_gpu(gateway):
    """What simple_http_cudashm_client does fails where it registers, and the region is unknown to inference."""
    door = Door("grpc", gateway)
    with pytest.raises(Exception) as caught:
        door.client.register_cuda_shared_memory("cuda", b"A" * 88, 0, 64)
    assert "register" in str(caught.value)
    with door.refused("NOT_FOUND", "Unable to find shared memory region: 'cuda'"):
        door.client.infer("simple", [door.shared_input("INPUT0", "cuda", 64), door.input("INPUT1", B)])
    door.close()


def test_no_models(place_without_models):
    """Without --models there is no inference, at either door."""
    gateway = place_without_models
    assert gateway.get("/v2/models/simple").error == "Not Found"
    assert gateway.post("/v2/models/simple/infer", b"{}").error == "Not Found"
    door = Door("grpc", gateway)
    with door.refused("INVALID_ARGUMENT", "Request for unknown model: 'simple' is not found"):
        door.client.infer("simple", door.pair())
    door.close()


@pytest.fixture
def place_without_models(gateway):
    gateway.stop()
    gateway.options.remove("--models=all")
    gateway.start()
    return gateway


@pytest.mark.parametrize("option, text", [
    ("--models=simple,nope", "--models: there is no model 'nope'"),
    ("--models=x=nope", "--models: there is no model 'nope'"),
    ("--models=all,simple=identity_bool", "--models: 'simple=identity_bool' gives a name that is empty or taken"),
    ("--models==simple", "--models: '=simple' gives a name that is empty or taken"),
    ("--model-delay=nope=1", "--model-delay: 'nope=1' is not one of the models, '=' and a number of milliseconds"),
    ("--model-delay=simple", "--model-delay: 'simple' is not one of the models, '=' and a number of milliseconds"),
    ("--model-delay=simple=1x", "--model-delay: 'simple=1x' is not one of the models, '=' and a number of milliseconds"),
])
def test_wrong_options(gateway, option, text):
    gateway.stop()
    process = gateway.place.start("shmbroker-gateway", *gateway.options, option, log=gateway.log_path)
    assert process.wait(DEADLINE) == 1
    assert text in gateway.log()
    gateway.start()
