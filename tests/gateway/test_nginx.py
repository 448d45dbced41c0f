# SPDX-License-Identifier: Apache-2.0
"""TLS by nginx in front of the Unix sockets, with the configuration of conf/, and clients that speak TLS."""

import json
import os
import pathlib
import shutil
import socket
import ssl
import subprocess

import pytest

from conftest import DEADLINE, until

SNIPPET = pathlib.Path(__file__).resolve().parents[2] / "conf" / "shmbroker-gateway.nginx"
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
OPENSSL = shutil.which("openssl")
CURL = shutil.which("curl")
TRIES = 5

pytestmark = pytest.mark.skipif(not (NGINX and OPENSSL and CURL), reason="needs nginx, openssl and curl")


def openssl(*arguments):
    subprocess.run([OPENSSL, *map(str, arguments)], check=True, capture_output=True, timeout=DEADLINE)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Tls:
    """Certificates: of an authority, of the server, and of a client; and of a client of nobody."""

    def __init__(self, directory):
        self.directory = directory
        self.authority = self.path("authority.crt")
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1")
        for name in ("authority", "stranger"):
            openssl("req", "-x509", *key, "-subj", f"/CN={name}", "-keyout", self.path(f"{name}.key"), "-out",
                    self.path(f"{name}.crt"))
        self.path("names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        for name in ("server", "client"):
            openssl("req", *key[:-2], "-subj", f"/CN={name}", "-keyout", self.path(f"{name}.key"), "-out",
                    self.path(f"{name}.csr"))
            openssl("x509", "-req", "-in", self.path(f"{name}.csr"), "-CA", self.authority, "-CAkey",
                    self.path("authority.key"), "-CAcreateserial", "-days", "1", "-extfile", self.path("names"), "-out",
                    self.path(f"{name}.crt"))

    def path(self, name):
        return self.directory / name


class Nginx:
    """Runs the snippet as it is, but for paths and ports."""

    def __init__(self, gateway, tls, directory):
        self.tls, self.directory, self.process = tls, directory, None
        for _ in range(TRIES):
            self.http, self.grpc = free_port(), free_port()
            self.start(gateway)
            until(lambda: self.process.poll() is not None or self.listens(), self.log)
            if self.process.poll() is None:
                return
            # somebody else took a port meanwhile
            assert "Address already in use" in self.log(), self.log()
        raise AssertionError(self.log())

    def start(self, gateway):
        text = SNIPPET.read_text()
        for old, new in {
            "/run/shmbroker-gateway/http": gateway.ports["http"]["socket"],
            "/run/shmbroker-gateway/grpc": gateway.ports["grpc"]["socket"],
            "/etc/shmbroker/tls/server.crt": self.tls.path("server.crt"),
            "/etc/shmbroker/tls/server.key": self.tls.path("server.key"),
            "/etc/shmbroker/tls/clients.crt": self.tls.authority,
            "listen 8443 ssl": f"listen 127.0.0.1:{self.http} ssl",
            "listen 8444 ssl": f"listen 127.0.0.1:{self.grpc} ssl",
        }.items():
            assert old in text, old
            text = text.replace(old, str(new))
        (self.directory / "snippet").write_text(text)
        temporary = "".join(f"{kind}_temp_path {self.directory}/{kind};\n" for kind in
                            ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        user = "user root root;\n" if os.geteuid() == 0 else ""
        (self.directory / "nginx.conf").write_text(
            f"{user}daemon off;\nworker_processes 1;\npid {self.directory}/pid;\nerror_log {self.directory}/log;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{temporary}include {self.directory}/snippet;\n}}\n")
        (self.directory / "log").write_text("")
        self.process = subprocess.Popen(  # pylint: disable=consider-using-with
            [NGINX, "-e", self.directory / "log", "-c", self.directory / "nginx.conf"], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def listens(self):
        try:
            for port in (self.http, self.grpc):
                socket.create_connection(("127.0.0.1", port), DEADLINE).close()
            return True
        except ConnectionRefusedError:
            return False

    def log(self):
        return (self.directory / "log").read_text()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(DEADLINE)

    def curl(self, path, *arguments, certificate="client"):
        """(status, body)"""
        identity = ["--cert", self.tls.path(f"{certificate}.crt"), "--key", self.tls.path(f"{certificate}.key")]
        done = subprocess.run([CURL, "-sS", "--noproxy", "*", "--cacert", self.tls.authority, *(identity if certificate else []),
                               "-w", "\n%{http_code}", *arguments, f"https://localhost:{self.http}{path}"],
                              capture_output=True, text=True, check=False, timeout=DEADLINE)
        assert done.returncode == 0, done.stderr
        body, status = done.stdout.rsplit("\n", 1)
        return int(status), body


@pytest.fixture
def nginx(gateway, tmp_path):
    one = Nginx(gateway, Tls(tmp_path), tmp_path)
    yield one
    one.stop()


def test_curl(gateway, nginx, key):
    name = key("r", 8192)
    assert nginx.curl("/v2/health/ready") == (200, "")
    body = json.dumps({"key": name, "byte_size": 8192})
    assert nginx.curl("/v2/systemsharedmemory/region/a%2Fb/register", "-d", body) == (200, "")
    status, listed = nginx.curl("/v2/systemsharedmemory/status")
    assert status == 200 and json.loads(listed) == [{"name": "a/b", "key": name, "offset": 0, "byte_size": 8192}]
    # the page works behind it: what it loads it asks for where it came from
    status, page = nginx.curl("/")
    assert status == 200 and "<title>shmbroker</title>" in page
    assert nginx.curl("/v2/shmbroker/state")[0] == 200
    origin = f"https://localhost:{nginx.http}"
    unregister = "/v2/systemsharedmemory/region/a%2Fb/unregister"
    assert nginx.curl(unregister, "-X", "POST", "-H", "Origin: https://example.org")[0] == 403
    assert nginx.curl(unregister, "-X", "POST", "-H", f"Origin: {origin}") == (200, "")
    assert gateway.broker.regions() == []


@pytest.mark.parametrize("certificate", [None, "stranger"])
def test_who_has_no_certificate_of_the_authority_gets_nothing(nginx, certificate):
    status, body = nginx.curl("/v2/health/live", certificate=certificate)
    assert status == 400 and "nginx" in body


def test_tritonclient_over_http(nginx, key):
    client_module = pytest.importorskip("tritonclient.http")

    def context():
        made = ssl.create_default_context(cafile=str(nginx.tls.authority))
        made.load_cert_chain(nginx.tls.path("client.crt"), nginx.tls.path("client.key"))
        return made

    client = client_module.InferenceServerClient(f"localhost:{nginx.http}", ssl=True, ssl_context_factory=context)
    assert client.is_server_live() and client.is_server_ready()
    client.register_system_shared_memory("r", key("r", 4096), 4096)
    assert [region["name"] for region in client.get_system_shared_memory_status()] == ["r"]
    client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []
    client.close()


def test_tritonclient_over_grpc(nginx, key):
    client_module = pytest.importorskip("tritonclient.grpc")
    client = client_module.InferenceServerClient(
        f"localhost:{nginx.grpc}", ssl=True, root_certificates=str(nginx.tls.authority),
        private_key=str(nginx.tls.path("client.key")), certificate_chain=str(nginx.tls.path("client.crt")))
    assert client.is_server_live() and client.is_server_ready()
    client.register_system_shared_memory("r", key("r", 4096), 4096)
    assert list(client.get_system_shared_memory_status().regions) == ["r"]
    client.unregister_system_shared_memory("r")
    assert not client.get_system_shared_memory_status().regions
    client.close()
