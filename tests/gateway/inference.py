# SPDX-License-Identifier: Apache-2.0
"""Inference through both doors, by the unmodified tritonclient, and regions that were not registered through them."""

import contextlib
import json
import mmap
import os
import pathlib
import sys

import numpy
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from conftest import DEADLINE, until

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "system"))
from protocol_client import READ_WRITE, Client, memory, reopen  # noqa: E402  pylint: disable=wrong-import-position

HTTP_STATUS = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNIMPLEMENTED": 501, "RESOURCE_EXHAUSTED": 429}
LONG_MS = 600000
A = numpy.arange(16, dtype=numpy.int32).reshape(1, 16)
B = numpy.ones((1, 16), dtype=numpy.int32)


class Door:
    """One of the doors, with tritonclient at it."""

    def __init__(self, kind, gateway):
        self.kind = kind
        self.module = getattr(tritonclient, kind)
        limits = {"network_timeout": DEADLINE, "connection_timeout": DEADLINE} if kind == "http" else {}
        self.client = self.module.InferenceServerClient(getattr(gateway, kind), **limits)

    def input(self, name, array, datatype=None, binary=True):
        """An input in the request."""
        tensor = self.module.InferInput(name, list(array.shape), datatype or "INT32")
        if self.kind == "http":
            tensor.set_data_from_numpy(array, binary_data=binary)
        else:
            tensor.set_data_from_numpy(array)
        return tensor

    def shared_input(self, name, region, size, offset=0, shape=(1, 16), datatype="INT32"):
        """An input in a region."""
        tensor = self.module.InferInput(name, list(shape), datatype)
        tensor.set_shared_memory(region, size, offset)
        return tensor

    def output(self, name, binary=True, **how):
        """An output in the reply."""
        if self.kind == "http":
            how["binary_data"] = binary
        return self.module.InferRequestedOutput(name, **how)

    def shared_output(self, name, region, size, offset=0):
        """An output in a region."""
        tensor = self.module.InferRequestedOutput(name)
        tensor.set_shared_memory(region, size, offset)
        return tensor

    def pair(self, binary=True):
        """What `simple` takes."""
        return [self.input("INPUT0", A, binary=binary), self.input("INPUT1", B, binary=binary)]

    def status(self):
        """The names of the system regions."""
        found = self.client.get_system_shared_memory_status()
        return {region["name"] for region in found} if self.kind == "http" else set(found.regions)

    def refused(self, code, text):
        """That what is done in this context is refused with gRPC's @code, or HTTP's for it, and exactly with @text."""
        shown = f"[StatusCode.{code}]" if self.kind == "grpc" else f"[{HTTP_STATUS.get(code, 400)}]"
        return refusal(f"{shown} {text}")

    def close(self):
        self.client.close()


@contextlib.contextmanager
def refusal(text):
    with pytest.raises(InferenceServerException) as caught:
        yield
    assert str(caught.value) == text


def check_simple(result, binary=True):
    assert (result.as_numpy("OUTPUT0") == A + B).all(), binary
    assert (result.as_numpy("OUTPUT1") == A - B).all(), binary


def strings(array):
    """Decimal integers as BYTES."""
    return numpy.array([str(value).encode() for value in array.reshape(-1)], dtype=object).reshape(array.shape)


def leases(gateway, name):
    """How often the region is in use."""
    return sum(region["leases"] for region in gateway.broker.regions() if region["name"] == name)


def wait_for_leases(gateway, name, n=1):
    until(lambda: leases(gateway, name) >= n, lambda: f"{n} leases of {name}: {gateway.broker.regions()}")


class Memory:
    """POSIX shared memory of tritonclient, registered under the same name without its slash."""

    def __init__(self, door, name, size, data=()):
        self.door, self.size = door, size
        self.name = f"shmg-{os.getpid()}-{name}"
        self.handle = shm.create_shared_memory_region(self.name, f"/{self.name}", size)
        if data:
            shm.set_shared_memory_region(self.handle, list(data))
        door.client.register_system_shared_memory(self.name, f"/{self.name}", size)

    def read(self, dtype=numpy.int32, shape=(1, 16), offset=0):
        return shm.get_contents_as_numpy(self.handle, dtype, list(shape), offset)

    def truncate(self, size):
        os.truncate(f"/dev/shm/{self.name}", size)

    def destroy(self):
        shm.destroy_shared_memory_region(self.handle)


@contextlib.contextmanager
def native(gateway, name, data, access=READ_WRITE):
    """Sealed memory with @data that another client of the broker registers by its fd: a mapping of it."""
    fd = memory(len(data), fill=data)
    read_only = reopen(fd)
    with Client(gateway.broker.socket) as client, mmap.mmap(fd, len(data)) as view:
        client.hello()
        client.register(name, fd, len(data), read_only, access=access)
        yield view
        client.unregister(name, wait=True)
    os.close(fd)
    os.close(read_only)


def infer_json(gateway, model, body, headers=None):
    """A request that no client makes: @body as JSON, or bytes."""
    return gateway.post(f"/v2/models/{model}/infer", body if isinstance(body, bytes) else json.dumps(body).encode(),
                        headers=headers)


def message(model="simple", inputs=(), outputs=(), raw=(), **fields):
    """A ModelInferRequest, of which inputs and outputs are given by their fields."""
    request = service_pb2.ModelInferRequest(model_name=model, **fields)
    for given in inputs:
        request.inputs.add(**{"datatype": "INT32", "shape": [1, 16], **given})
    for given in outputs:
        request.outputs.add(**given)
    request.raw_input_contents.extend(raw)
    return request


def parameters(**given):
    """InferParameters: of a tuple the field and the value, else by the type of the value."""
    fields = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    made = {}
    for key, value in given.items():
        field, value = value if isinstance(value, tuple) else (fields[type(value)], value)
        made[key] = service_pb2.InferParameter(**{field: value})
    return made
