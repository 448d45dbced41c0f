# SPDX-License-Identifier: Apache-2.0
"""Shared memory over HTTP: every route, code and sentence."""

import base64
import json

import pytest

RESERVED = "triton_python_backend_shm_region_"
DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
HANDLE = base64.b64encode(bytes(range(64))).decode()


def test_system_region_lives(gateway, key):
    """Register, status in both forms, unregister."""
    name = key("a", 8192)
    assert gateway.get("/v2/systemsharedmemory/status").body == b"[]"
    done = gateway.register("one", name, 4096, 128)
    assert (done.status, done.body, done.headers["content-type"]) == (200, b"", "application/json")
    entry = {"name": "one", "key": name, "offset": 128, "byte_size": 4096}
    assert gateway.get("/v2/systemsharedmemory/status").json == [entry]
    assert gateway.region("system", "one", "status").json == [entry]
    assert gateway.status("cuda") == []
    done = gateway.region("system", "one", "unregister")
    assert (done.status, done.body) == (200, b"")
    assert gateway.status() == []
    lost = gateway.region("system", "one", "status")
    assert (lost.status, lost.error) == (404, "Unable to find system shared memory region: 'one'")


def test_status_is_in_the_order_of_names(gateway, key):
    """Of their bytes, as a std::map has them."""
    name = key("a", 64)
    names = ["b", "a", "Z", "aa", "ä", "a b"]
    for one in names:
        assert gateway.register(one, name, 1).status == 200
    assert [entry["name"] for entry in gateway.status()] == sorted(names, key=str.encode)
    assert gateway.post("/v2/systemsharedmemory/unregister").status == 200
    assert gateway.status() == []


@pytest.mark.parametrize("method, path, status, text", [
    ("POST", "/v2/systemsharedmemory/status", 405, "Method Not Allowed"),
    ("POST", "/v2/systemsharedmemory/region/x/status", 405, "Method Not Allowed"),
    ("HEAD", "/v2/systemsharedmemory/status", 405, None),
    ("GET", "/v2/systemsharedmemory/register", 405, "Method Not Allowed"),
    ("GET", "/v2/systemsharedmemory/region/x/register", 405, "Method Not Allowed"),
    ("PUT", "/v2/cudasharedmemory/region/x/register", 405, "Method Not Allowed"),
    ("GET", "/v2/cudasharedmemory/unregister", 405, "Method Not Allowed"),
    ("DELETE", "/v2/cudasharedmemory/region/x/unregister", 405, "Method Not Allowed"),
    ("POST", "/v2", 405, "Method Not Allowed"),
    ("POST", "/v2/health/live", 405, "Method Not Allowed"),
    ("POST", "/v2/health/ready", 405, "Method Not Allowed"),
    ("GET", "/v2/", 404, "Not Found"),
    ("GET", "/v2/systemsharedmemory", 404, "Not Found"),
    ("GET", "/v2/systemsharedmemory/", 404, "Not Found"),
    ("GET", "/v2/systemsharedmemory/status/", 404, "Not Found"),
    ("GET", "/v2/systemsharedmemory/region/status", 404, "Not Found"),
    ("GET", "/v2/systemsharedmemory/region//status", 404, "Not Found"),
    ("POST", "/v2/systemsharedmemory/region/a/b/register", 404, "Not Found"),
    ("GET", "/v2/systemsharedmemory/nothing", 404, "Not Found"),
    ("GET", "/v2/nothingsharedmemory/status", 404, "Not Found"),
    ("GET", "/v3/systemsharedmemory/status", 404, "Not Found"),
])
def test_routes(gateway, method, path, status, text):
    """What is no route, and what is one for another method."""
    reply = gateway.request(method, path, b"" if method in ("POST", "PUT") else None)
    assert reply.status == status
    if text:
        assert reply.error == text
    else:
        assert reply.body == b""


def test_a_query_is_ignored(gateway):
    assert gateway.get("/v2/systemsharedmemory/status?a=b/c").json == []


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_a_name_is_needed(gateway, kind):
    """Before the body is looked at."""
    reply = gateway.post(f"/v2/{kind}sharedmemory/register", b"nonsense")
    assert (reply.status, reply.error) == (400, f"'region name' is necessary to register {kind} shared memory region")


BAD_JSON = [
    (b"", "The document is empty.", 0),
    (b" \n ", "The document is empty.", 3),
    (b"nonsense", "Invalid value.", 1),
    (b"x", "Invalid value.", 0),
    (b"{", "Missing a name for object member.", 1),
    (b"{1:2}", "Missing a name for object member.", 1),
    (b'{"key"}', "Missing a colon after a name of object member.", 6),
    (b'{"key":}', "Invalid value.", 7),
    (b'{"key":1', "Missing a comma or } after an object member.", 8),
    (b'{"key":1 "a":2}', "Missing a comma or } after an object member.", 9),
    (b'{"key":1,}', "Missing a name for object member.", 9),
    (b"[1,2", "Missing a comma or ] after an array element.", 4),
    (b"[1 2]", "Missing a comma or ] after an array element.", 3),
    (b"[1,]", "Invalid value.", 3),
    (b"{} {}", "The document root must not be followed by other values.", 3),
    (b'{"key":"abc', "Missing a closing quotation mark in string.", 11),
    (b'{"key":"a\\x"}', "Invalid escape character in string.", 9),
    (b'{"key":"a\\u12g4"}', "Incorrect hex digit after \\u escape in string.", 9),
    (b'{"key":"a\\ud800"}', "The surrogate pair in string is invalid.", 9),
    (b'{"key":"a\x01"}', "Invalid encoding in string.", 9),
    (b'{"key":"a\xff"}', "Invalid encoding in string.", 9),
    (b'{"key":1.}', "Miss fraction part in number.", 9),
    (b'{"key":1e}', "Miss exponent in number.", 9),
    (b'{"key":-}', "Invalid value.", 8),
    (b'{"key":tru}', "Invalid value.", 10),
    (b'{"key":01}', "Missing a comma or } after an object member.", 8),
]


@pytest.mark.parametrize("body, text, offset", BAD_JSON)
def test_what_is_no_json(gateway, body, text, offset):
    """Is the server's own fault in Triton's eyes."""
    reply = gateway.region("system", "x", "register", body)
    assert (reply.status, reply.error) == (500, f"failed to parse the request JSON buffer: {text} at {offset}")


def test_nesting_is_bounded(gateway):
    reply = gateway.region("system", "x", "register", b"[" * 60000)
    assert reply.status == 500
    assert reply.error.startswith("failed to parse the request JSON buffer: The document is nested too deeply.")


NOT_UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NOT_STRING = "attempt to access JSON non-string as string"
ARGS = "failed to register shared memory region 'x': invalid args"
NO_KEY = "Shared memory register request has no 'key' field"
NO_SIZE = "Shared memory register request has no 'byte_size' field"
SPACE = "failed to register shared memory region 'x': unable to process address spaceInvalid argument"


@pytest.mark.parametrize("body, status, text", [
    ('{}', 400, NO_KEY),
    ('[]', 400, NO_KEY),
    ('null', 400, NO_KEY),
    ('"key"', 400, NO_KEY),
    ('12', 400, NO_KEY),
    ('{"byte_size":1}', 400, NO_KEY),
    ('{"key":1,"byte_size":1}', 500, NOT_STRING),
    ('{"key":null,"byte_size":1}', 500, NOT_STRING),
    ('{"key":KEY}', 400, NO_SIZE),
    ('{"key":KEY,"byte_size":"1"}', 500, NOT_UINT),
    ('{"key":KEY,"byte_size":-1}', 500, NOT_UINT),
    ('{"key":KEY,"byte_size":1.0}', 500, NOT_UINT),
    ('{"key":KEY,"byte_size":1e2}', 500, NOT_UINT),
    ('{"key":KEY,"byte_size":true}', 500, NOT_UINT),
    ('{"key":KEY,"byte_size":null}', 500, NOT_UINT),
    ('{"key":KEY,"byte_size":18446744073709551616}', 500, NOT_UINT),
    ('{"key":KEY,"byte_size":99999999999999999999999}', 500, NOT_UINT),
    ('{"key":KEY,"offset":-1,"byte_size":1}', 500, NOT_UINT),
    ('{"key":KEY,"offset":"1"}', 500, NOT_UINT),
    ('{"key":KEY,"offset":18446744073709551616,"byte_size":1}', 500, NOT_UINT),
    ('{"key":KEY,"byte_size":8193}', 400, ARGS),
    ('{"key":KEY,"byte_size":1,"offset":8192}', 400, ARGS),
    ('{"key":KEY,"byte_size":9223372036854775807}', 400, ARGS),
    ('{"key":KEY,"byte_size":9223372036854775808}', 400, ARGS),
    ('{"key":KEY,"byte_size":18446744073709551615}', 400, ARGS),
    ('{"key":KEY,"byte_size":1,"offset":18446744073709551615}', 400, ARGS),
    ('{"key":KEY,"byte_size":18446744073709551615,"offset":18446744073709551615}', 400, ARGS),
    ('{"key":KEY,"byte_size":2,"offset":18446744073709551615}', 400, ARGS),
    ('{"key":KEY,"byte_size":0}', 400, SPACE),
    ('{"key":KEY,"byte_size":0,"offset":8192}', 400, SPACE),
    ('{"key":"","byte_size":1}', 400, "cannot register shared memory region 'x' - invalid shm key ''"),
    ('{"key":"///","byte_size":1}', 400, "cannot register shared memory region 'x' - invalid shm key '///'"),
    (f'{{"key":"{RESERVED}1","byte_size":1}}', 400,
     f"cannot register shared memory region 'x' with key '{RESERVED}1' as the key contains the reserved prefix '{RESERVED}'"),
    (f'{{"key":"//{RESERVED}1","byte_size":1}}', 400,
     f"cannot register shared memory region 'x' with key '//{RESERVED}1' as the key contains the reserved prefix '{RESERVED}'"),
    ('{"key":"/shmg-not-there","byte_size":1}', 500, "Unable to open shared memory region: '/shmg-not-there'"),
    ('{"key":"../etc/passwd","byte_size":1}', 500, "Unable to open shared memory region: '../etc/passwd'"),
    ('{"key":"..","byte_size":1}', 500, "Unable to open shared memory region: '..'"),
    (f'{{"key":"{"k" * 300}","byte_size":1}}', 500, f"Unable to open shared memory region: '{'k' * 300}'"),
])
def test_system_register_refusals(gateway, key, body, status, text):
    """Types, bounds and keys."""
    reply = gateway.region("system", "x", "register", body.replace("KEY", json.dumps(key("k", 8192))).encode())
    assert (reply.status, reply.error) == (status, text)
    assert gateway.status() == []


@pytest.mark.parametrize("body", [
    '{"key":KEY,"byte_size":8192}',
    '{"key":KEY,"byte_size":1,"offset":8191}',
    '{"byte_size":4096,"offset":4095,"key":KEY,"more":[{"a":1.5e3,"b":NaN}]}',
    ' \t\r\n{ "key" : KEY , "byte_size" : 1 } \n',
])
def test_system_register_accepts(gateway, key, body):
    """Whole regions, windows of any alignment, members that mean nothing."""
    name = key("k", 8192)
    assert gateway.region("system", "x", "register", body.replace("KEY", json.dumps(name)).encode()).status == 200
    assert [entry["key"] for entry in gateway.status()] == [name]


def test_slashes_before_a_key_do_not_count(gateway, key):
    name = key("k", 64)
    for count in range(4):
        assert gateway.register(str(count), "/" * count + name[1:], 64).status == 200
    assert [entry["key"] for entry in gateway.status()] == ["/" * count + name[1:] for count in range(4)]


def test_the_order_of_checks(gateway, key):
    """Key before name, name before memory."""
    name = key("k", 64)
    assert gateway.register("taken", name, 64).status == 200
    taken = "shared memory region 'taken' already in manager"
    for args, text in [(("/", 1), "cannot register shared memory region 'taken' - invalid shm key '/'"),
                       (("shmg-not-there", 1), taken), ((name, 65), taken), ((name, 64), taken)]:
        reply = gateway.register("taken", *args)
        assert (reply.status, reply.error) == (400, text)


@pytest.mark.parametrize("name", ["a b", "a/b", "a%b", "ä€😀", "..", ".", "+", "a?b#c", "x" * 255, "'\"\\"])
def test_names_are_decoded(gateway, key, name):
    """By segment; Triton does not decode."""
    assert gateway.register(name, key("k", 64), 64).status == 200
    assert [entry["name"] for entry in gateway.status()] == [name]
    assert gateway.region("system", name, "status").json[0]["name"] == name
    assert gateway.region("system", name, "unregister").status == 200
    assert gateway.status() == []


@pytest.mark.parametrize("raw", ["%ff%fe", "a%0ab", "a%c2%85b", "a%7f", "x" * 256, "%ed%a0%80"])
def test_poisonous_names(gateway, key, raw):
    """Do not get in, and do not harm the list."""
    name = key("k", 64)
    assert gateway.register("good", name, 64).status == 200
    body = json.dumps({"key": name, "byte_size": 64}).encode()
    for verb in ("register", "status", "unregister"):
        path = f"/v2/systemsharedmemory/region/{raw}/{verb}"
        reply = gateway.get(path) if verb == "status" else gateway.post(path, body)
        assert reply.status == 400 and reply.error.startswith("invalid shared memory region name: ")
    assert [entry["name"] for entry in gateway.status()] == ["good"]


@pytest.mark.parametrize("raw", ["a%00b", "%zz", "%4", "%", "a%"])
def test_paths_that_cannot_be_decoded(gateway, raw):
    for verb in ("status", "register"):
        reply = gateway.request("GET" if verb == "status" else "POST", f"/v2/systemsharedmemory/region/{raw}/{verb}")
        assert reply.status == 400 and "%" in reply.error


@pytest.mark.parametrize("key_text", ['"a\\u0000b"', '"a\\nb"'])
def test_keys_with_control_characters(gateway, key_text):
    reply = gateway.region("system", "x", "register", f'{{"key":{key_text},"byte_size":1}}'.encode())
    assert reply.status == 400
    assert reply.error.startswith("cannot register shared memory region 'x' - invalid shm key '")


def test_unregister_of_what_is_not_there(gateway, key):
    """Is fine, as is that of the other kind, which does nothing."""
    for kind in ("system", "cuda"):
        assert gateway.region(kind, "nothing", "unregister").status == 200
        assert gateway.post(f"/v2/{kind}sharedmemory/unregister").status == 200
    assert gateway.register("a", key("k", 64), 64).status == 200
    assert gateway.region("cuda", "a", "unregister").status == 200
    assert gateway.post("/v2/cudasharedmemory/unregister").status == 200
    assert len(gateway.status()) == 1
    reply = gateway.region("cuda", "a", "status")
    assert (reply.status, reply.error) == (
        404, "The region named 'a' is registered as system shared memory, not CUDA shared memory")
    # what the body says does not matter
    assert gateway.region("system", "a", "unregister", b"nonsense").status == 200
    assert gateway.status() == []


OBJECT = "attempt to access non-existing object member '{}'"
NOT_HANDLE = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"


@pytest.mark.parametrize("body, status, text", [
    (b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
    ({}, 400, "Shared memory register request has no 'raw_handle' field"),
    ([], 400, "Shared memory register request has no 'raw_handle' field"),
    ({"raw_handle": HANDLE, "byte_size": 1, "device_id": 0}, 500, OBJECT.format("b64")),
    ({"raw_handle": {}, "byte_size": 1, "device_id": 0}, 500, OBJECT.format("b64")),
    ({"raw_handle": {"b64": 1}, "byte_size": 1, "device_id": 0}, 500, NOT_STRING),
    ({"raw_handle": {"b64": HANDLE}}, 500, OBJECT.format("byte_size")),
    ({"raw_handle": {"b64": HANDLE}, "device_id": 0}, 500, OBJECT.format("byte_size")),
    ({"raw_handle": {"b64": HANDLE}, "byte_size": 1}, 500, OBJECT.format("device_id")),
    ({"raw_handle": {"b64": HANDLE}, "byte_size": "1", "device_id": 0}, 500, NOT_UINT),
    ({"raw_handle": {"b64": HANDLE}, "byte_size": 1, "device_id": -1}, 500, NOT_UINT),
    ({"raw_handle": {"b64": ""}, "byte_size": 1, "device_id": 0}, 400, NOT_HANDLE),
    ({"raw_handle": {"b64": "!"}, "byte_size": 1, "device_id": 0}, 400, NOT_HANDLE),
    ({"raw_handle": {"b64": base64.b64encode(bytes(63)).decode()}, "byte_size": 1, "device_id": 0}, 400, NOT_HANDLE),
    ({"raw_handle": {"b64": base64.b64encode(bytes(65)).decode()}, "byte_size": 1, "device_id": 0}, 400, NOT_HANDLE),
    # the order: a type error comes before the handle
    ({"raw_handle": {"b64": "!"}, "byte_size": 1, "device_id": "0"}, 500, NOT_UINT),
])
def test_cuda_register_refusals(gateway, body, status, text):
    reply = gateway.region("cuda", "x", "register", body)
    assert (reply.status, reply.error) == (status, text)
    assert gateway.status("cuda") == []


@pytest.mark.parametrize("handle", [HANDLE, HANDLE.rstrip("="), HANDLE[:72] + "\n" + HANDLE[72:] + "\n", f"  {HANDLE}"])
def test_cuda_without_gpus(gateway, handle):
    """A handle of the right length, however it is written, gets as far as the GPU that is not there."""
    reply = gateway.region("cuda", "x", "register", {"raw_handle": {"b64": handle}, "byte_size": 1, "device_id": 0})
    assert (reply.status, reply.error) == (400, "failed to register CUDA shared memory region: 'x', GPUs not supported")


def test_cuda_and_system_share_their_names(gateway, key):
    assert gateway.register("x", key("k", 64), 64).status == 200
    reply = gateway.region("cuda", "x", "register", {"raw_handle": {"b64": HANDLE}, "byte_size": 1, "device_id": 0})
    assert (reply.status, reply.error) == (400, "shared memory region 'x' already in manager")


class TestDisabled:
    """--allow-client-shm is off by default."""

    @pytest.fixture
    def options(self):
        return []

    def test_registers_nothing(self, gateway, key):
        body = {"key": key("k", 64), "byte_size": 64}
        for kind in ("system", "cuda"):
            for path in (f"/v2/{kind}sharedmemory/region/x/register", f"/v2/{kind}sharedmemory/register",
                         f"/v2/{kind}sharedmemory/region/x/unregister", f"/v2/{kind}sharedmemory/unregister"):
                for sent in (body, b"", b"nonsense"):
                    reply = gateway.post(path, sent)
                    assert (reply.status, reply.error) == (501, DISABLED)
            assert gateway.status(kind) == []
        assert gateway.get("/v2").json["extensions"] == []

    def test_status_stays_open(self, gateway):
        reply = gateway.region("cuda", "x", "status")
        assert (reply.status, reply.error) == (404, "Unable to find cuda shared memory region: 'x'")


def test_metadata_tells_the_truth(gateway):
    reply = gateway.get("/v2").json
    assert reply["name"] == "triton" and reply["version"]
    assert "system_shared_memory" in reply["extensions"]
    assert "cuda_shared_memory" not in reply["extensions"]


def test_health(gateway):
    for path in ("/v2/health/live", "/v2/health/ready"):
        reply = gateway.get(path)
        assert (reply.status, reply.body) == (200, b"")
