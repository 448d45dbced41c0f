# SPDX-License-Identifier: Apache-2.0
"""The door for metrics: what Prometheus reads there, and that its own checker has nothing to say about it."""

import http.client
import re
import shutil
import socket
import subprocess

import pytest

from conftest import DEADLINE, until

PROMTOOL = shutil.which("promtool")
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')
OPERATION = "shmbroker_gateway_operations_total"
PREFIX = "shmbroker_gateway_"


def request(gateway, path="/metrics", method="GET", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.ports["metrics"]["port"], timeout=DEADLINE)
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def scrape(gateway):
    response, text = request(gateway)
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    return text


def samples(text):
    """{(name, labels): value}, labels as a frozenset of pairs; every line must be one, or HELP or TYPE of what follows."""
    found, described = {}, {}
    for line in text.splitlines():
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            assert word in ("HELP", "TYPE") and (name, word) not in described
            described[name, word] = rest
            continue
        name, labels, value = SAMPLE.fullmatch(line).groups()
        family = re.sub("_(bucket|sum|count)$", "", name) if name not in {n for n, _ in described} else name
        assert (family, "HELP") in described and (family, "TYPE") in described, line
        pairs = frozenset(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', labels or ""))
        assert (name, pairs) not in found, line
        found[name, pairs] = float(value)
    return found


def of(found, name, **labels):
    return found[PREFIX + name, frozenset(labels.items())]


@pytest.mark.skipif(not PROMTOOL, reason="needs promtool")
def test_the_checker_of_prometheus_has_nothing_to_say(gateway, key):
    gateway.register("r", key("r", 4096), 4096)
    gateway.get("/nothing")
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=scrape(gateway), text=True, capture_output=True, check=False,
                          timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_operations_are_counted_by_door_and_code(gateway, key):
    before = samples(scrape(gateway))
    assert of(before, "operations_total", operation="system_register", door="http", code="OK") == 0
    name = 'a "name" of\\ours'
    assert gateway.register(name, key("r", 4096), 4096).status == 200
    assert gateway.register(name, key("s", 4096), 4096).status == 400
    assert gateway.region("system", "none", "status").status == 404
    gateway.status()
    gateway.region("system", name, "unregister")
    text = scrape(gateway)
    found = samples(text)
    for operation, code, n in (("system_register", "OK", 1), ("system_register", "ALREADY_EXISTS", 1),
                               ("system_status", "NOT_FOUND", 1), ("system_status", "OK", 1), ("system_unregister", "OK", 1),
                               ("cuda_status", "OK", 0)):
        assert of(found, "operations_total", operation=operation, door="http", code=code) == n, (operation, code)
    assert of(found, "requests_total", door="http") >= of(before, "requests_total", door="http") + 5
    # what clients choose makes no time series
    assert "ours" not in text
    labels = {label for _, pairs in found for label, _ in pairs}
    assert labels == {"operation", "door", "code", "le", "status", "version"}


def test_the_latency_of_the_broker_is_a_histogram(gateway):
    gateway.status()
    found = samples(scrape(gateway))
    buckets = sorted((float(dict(pairs)["le"]), value) for (name, pairs), value in found.items()
                     if name == PREFIX + "broker_call_seconds_bucket")
    values = [value for _, value in buckets]
    assert values == sorted(values) and buckets[-1][0] == float("inf")
    assert values[-1] == of(found, "broker_call_seconds_count") >= 2
    assert of(found, "broker_call_seconds_sum") > 0


def test_the_numbers_of_the_broker(gateway, key):
    gateway.register("r", key("r", 4096), 4096)
    found = samples(scrape(gateway))
    assert found["shmbroker_regions", frozenset()] == 1
    assert found["shmbroker_registrations_total", frozenset()] == 1
    assert of(found, "broker_up") == 1
    assert of(found, "info", version=gateway.get("/v2").json["version"]) == 1


def test_without_a_broker_the_rest_is_there(gateway):
    gateway.broker.kill()
    found = until(lambda: (lambda now: now if not of(now, "broker_up") else None)(samples(scrape(gateway))), "the end")
    assert not any(name.startswith("shmbroker_") and not name.startswith(PREFIX) for name, _ in found)
    gateway.broker.start()
    until(lambda: of(samples(scrape(gateway)), "broker_up"), gateway.log)


def test_connections_and_abuse_are_seen(gateway):
    with socket.create_connection(("127.0.0.1", gateway.http_port), DEADLINE) as connection:
        until(lambda: of(samples(scrape(gateway)), "connections", door="http") == 1, "the connection")
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
    found = samples(scrape(gateway))
    assert of(found, "refused_messages_total", door="http") == 1
    until(lambda: of(samples(scrape(gateway)), "connections", door="http") == 0, "its end")


def test_unix_socket(gateway):
    """The same door."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE)
        connection.connect(gateway.ports["metrics"]["socket"])
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        said = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, text = said.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ") and PREFIX + "broker_up" in text


def test_there_is_nothing_else_at_this_door(gateway):
    for method, path, status in (("GET", "/", 404), ("GET", "/v2/health/live", 404), ("GET", "/metrics/", 404),
                                 ("POST", "/metrics", 405), ("GET", "/metrics?x=1", 200)):
        assert request(gateway, path, method)[0].status == status, (method, path)
    # and not at the other one
    assert gateway.get("/metrics").status == 404


class TestAccess:
    """The same as at the other doors."""

    @pytest.fixture
    def options(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("correct-horse-battery\n")
        return ["--token-file", path]

    def test_a_credential_is_needed(self, gateway):
        assert request(gateway)[0].status == 401
        assert request(gateway, headers={"Authorization": "Bearer correct-horse-battery"})[0].status == 200

    def test_a_strange_host_is_refused(self, gateway):
        assert request(gateway, headers={"Host": "example.org"})[0].status == 403


class TestOff:
    @pytest.fixture
    def options(self):
        return ["--allow-metrics=false"]

    def test_no_door(self, gateway):
        assert "metrics" not in gateway.ports
