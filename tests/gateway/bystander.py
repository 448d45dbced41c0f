# SPDX-License-Identifier: Apache-2.0
"""A client beside those that mean harm, in a process of its own: its calls all succeed, and what they take is printed.

The times are not judged, since the others take the processor, too.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import time

from conftest import DEADLINE

# what is called, given "host:port" in argv[1]; and the calls
GRPC = """
import tritonclient.grpc
client = tritonclient.grpc.InferenceServerClient(sys.argv[1])
def call():
    assert client.is_server_live(client_timeout=60)
"""
HTTP = """
import http.client
client = http.client.HTTPConnection(sys.argv[1], timeout=60)
def call():
    client.request("GET", "/v2/systemsharedmemory/status")
    reply = client.getresponse()
    assert (reply.status, reply.read()) == (200, b"[]")
"""
CALLS = """
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
for _ in range(20):
    call()
times = []
while not ended.is_set():
    begun = time.monotonic()
    call()
    times.append((begun, time.monotonic() - begun))
    if len(times) == 200:
        print("ready", flush=True)
    ended.wait(0.002)
print(json.dumps(times))
"""


def p99(times):
    return statistics.quantiles(times, n=100)[98] if len(times) > 1 else max(times)


@contextlib.contextmanager
def beside(what, client, address):
    """One of @client, GRPC or HTTP, that has called undisturbed for a while, and goes on until the end of @what."""
    with subprocess.Popen([sys.executable, "-c", "import json, sys, threading, time\n" + client + CALLS, address],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            attacked = time.monotonic()
            yield
            output, _ = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert process.returncode == 0
    times = json.loads(output)
    calm = [took for begun, took in times if begun < attacked]
    attack = [took for begun, took in times if begun >= attacked]
    said = f"{what}: bystander p99 {p99(calm) * 1e3:.2f} ms of {len(calm)} calls before"
    if attack:
        said += f", {p99(attack) * 1e3:.2f} ms of {len(attack)} during it ({p99(attack) / p99(calm):.1f} x)"
    print(said)
