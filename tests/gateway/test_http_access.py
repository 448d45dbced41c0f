# SPDX-License-Identifier: Apache-2.0
"""Who may call over HTTP, and whose memory and regions are whose."""

import base64
import contextlib
import os
import signal
import stat
import tempfile
import types

import pytest

from conftest import BROKER, CLIENT, DEADLINE, GATEWAY, OTHER, ROOT, SHM, Gateway, Place, Broker, running, until

TOKEN, ADMIN = "correct-horse-battery", "staple-of-the-administrator"
needs_root = pytest.mark.skipif(not ROOT, reason="needs root, for several uids")


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def basic(token, user="anybody"):
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{token}".encode()).decode()}


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# for the tests\n\n{TOKEN}\nadmin {ADMIN}\n")
    path.chmod(0o600)
    return path


class TestTokens:
    """With --token-file a request over TCP needs a credential."""

    @pytest.fixture
    def options(self, token_file):
        return ["--allow-client-shm", "--token-file", token_file]

    def test_is_needed(self, gateway):
        reply = gateway.get("/v2")
        assert reply.status == 401 and reply.headers["www-authenticate"].startswith("Basic ")
        assert "credential" in reply.error

    @pytest.mark.parametrize("headers", [
        bearer(TOKEN), basic(TOKEN), basic(TOKEN, ""), {"Authorization": f"bearer  {TOKEN}"}, bearer(ADMIN),
        {"aUTHORIZATION": f"BASIC {basic(TOKEN)['Authorization'][6:]}"},
    ])
    def test_is_taken(self, gateway, headers):
        assert gateway.get("/v2", headers=headers).status == 200

    @pytest.mark.parametrize("headers", [
        bearer(""), bearer(TOKEN[:-1]), bearer(TOKEN + "x"), bearer(TOKEN.upper()), bearer("x" * 5000), basic("x" * 3000),
        basic(TOKEN[1:]), {"Authorization": TOKEN}, {"Authorization": "Basic !"}, {"Authorization": "Basic"},
        {"Authorization": f"Digest {TOKEN}"}, {"Authorization": ""}, bearer("# for the tests"),
    ])
    def test_is_refused(self, gateway, headers):
        for path in ("/v2", "/v2/nothing"):
            assert gateway.get(path, headers=headers).status == 401

    def test_health_is_for_everybody(self, gateway):
        assert gateway.get("/v2/health/live").status == 200
        assert gateway.get("/v2/health/ready").status == 200

    def test_a_body_is_not_awaited(self, gateway):
        """A large body of nobody is not held."""
        with gateway.connect() as connection:
            connection.sendall(b"POST /v2/systemsharedmemory/region/x/register HTTP/1.1\r\nHost: localhost\r\n"
                               b"Content-Length: 1000000\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")

    def test_not_at_a_unix_socket(self, gateway):
        """There a client is its user; a wrong token is wrong all the same."""
        assert gateway.get("/v2", unix=True).status == 200
        assert gateway.get("/v2", unix=True, headers=bearer(TOKEN)).status == 200
        assert gateway.get("/v2", unix=True, headers=bearer("wrong" * 5)).status == 401


def fails(place, broker, *options):
    """Starts a gateway that must not start, and returns what it says."""
    gateway = Gateway(place, broker, *options, start=False)
    gateway.process = place.start("shmbroker-gateway", *gateway.options, log=gateway.log_path)
    assert gateway.process.wait(DEADLINE) == 1, gateway.log()
    assert not gateway.ports_file.exists()
    return gateway.log()


@pytest.fixture
def place_and_broker():
    place = Place()
    broker = Broker(place, "unsealed = accept\n")
    yield place, broker
    broker.stop()


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_a_credential_is_needed(place_and_broker, address):
    assert "--token-file" in fails(*place_and_broker, f"--http-address={address}")


@pytest.mark.parametrize("content", ["", "# nothing\n", "short\n", "with a blank in it\n", "x" * 300 + "\n"])
def test_token_files_that_are_none(place_and_broker, tmp_path, content):
    (tmp_path / "t").write_text(content)
    assert "did not start" in fails(*place_and_broker, "--token-file", tmp_path / "t")


def test_token_file_that_is_not_there(place_and_broker, tmp_path):
    assert "did not start" in fails(*place_and_broker, "--token-file", tmp_path / "t")


def test_with_a_credential_anything_is_listened_at(token_file):
    with running(options=["--http-address=0.0.0.0", "--allow-client-shm", "--token-file", token_file]) as one:
        assert one.get("/v2", headers=bearer(TOKEN)).status == 200


@pytest.mark.parametrize("host, status", [
    ("localhost", 200), ("LOCALHOST:1", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("evil.example", 403), ("", 403),
    ("localhost.evil.example", 403), ("127.0.0.1.evil.example:80", 403), ("[::2]", 403), ("[::1", 403),
    ("[::1].evil.example", 403), ("localhost:evil.example", 403), ("127.0.0.1:80.evil.example", 403), ("localhost:", 200),
])
def test_host(gateway, host, status):
    """A page whose name was bound to loopback gets nothing."""
    assert gateway.get("/v2", headers={"Host": host}).status == status
    assert gateway.get("/v2", headers={"Host": host}, unix=True).status == 200


class TestHosts:
    """--allow-host."""

    @pytest.fixture
    def options(self):
        return ["--allow-client-shm", "--allow-host=node7,node7.example"]

    def test_are_added(self, gateway):
        for host, status in [("node7:8000", 200), ("NODE7.example", 200), ("node", 403), ("node7,node7.example", 403),
                             ("localhost", 200)]:
            assert gateway.get("/v2", headers={"Host": host}).status == status


def test_origin(gateway):
    """Pages of other sites change nothing."""
    path = "/v2/systemsharedmemory/unregister"
    assert gateway.post(path, headers={"Host": "localhost:1", "Origin": "http://localhost:1"}).status == 200
    assert gateway.post(path, headers={"Host": "localhost:1", "Origin": "https://localhost:1"}).status == 200
    for origin in ("http://evil.example", "null", "http://localhost:2", "http://localhost", "localhost:1", ""):
        reply = gateway.post(path, headers={"Host": "localhost:1", "Origin": origin})
        assert reply.status == 403 and "other sites" in reply.error


def test_unix_socket(gateway, key):
    """Is for its user and group, and the same door."""
    mode = os.stat(gateway.http_socket).st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o660
    assert gateway.register("a", key("k", 64), 64, unix=True).status == 200
    assert [entry["name"] for entry in gateway.status()] == ["a"]
    assert gateway.region("system", "a", "unregister", unix=True).status == 200


def test_a_socket_in_use_is_left_alone(gateway):
    """A second gateway does not take the path over."""
    other = Gateway(gateway.place, gateway.broker, "--http-socket", gateway.http_socket, name="other", start=False)
    other.process = gateway.place.start("shmbroker-gateway", *other.options, log=other.log_path)
    assert other.process.wait(DEADLINE) == 1
    assert gateway.get("/v2", unix=True).status == 200


class TestKeys:
    """What is opened as POSIX shared memory."""

    def test_no_links(self, gateway, key):
        """However innocent their target."""
        name = key("target", 64)
        link = SHM / f"shmg-{os.getpid()}-link"
        link.symlink_to(SHM / name[1:])
        try:
            reply = gateway.register("x", link.name, 64)
        finally:
            link.unlink()
        assert (reply.status, reply.error) == (500, f"Unable to open shared memory region: '{link.name}'")

    @pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
    def test_only_regular_files(self, gateway, make):
        path = SHM / f"shmg-{os.getpid()}-other"
        make(path)
        try:
            reply = gateway.register("x", path.name, 64)
        finally:
            path.rmdir() if path.is_dir() else path.unlink()  # pylint: disable=expression-not-assigned
        assert reply.status == 500
        assert "no regular file" in gateway.log()

    def test_no_fd_is_left(self, gateway, key):
        """Whatever was refused, or done."""
        name = key("k", 64)
        for round_ in range(20):
            if round_ == 1:
                before = gateway.fds()
            assert gateway.register("x", name, 65).status == 400
            assert gateway.register("x", name, 0).status == 400
            assert gateway.register("x", "shmg-none", 64).status == 500
            assert gateway.register("x", name, 64).status == 200
            assert gateway.register("x", name, 64).status == 400
            assert gateway.region("system", "x", "unregister").status == 200
        until(lambda: gateway.fds() <= before, lambda: f"{gateway.fds()} fds, {before} before")

    @needs_root
    def test_of_another_uid_are_not_opened(self, gateway, key):
        """The log says why, the client does not learn it."""
        name = key("k", 64, uid=OTHER, mode=0o666)
        reply = gateway.register("x", name, 64)
        assert (reply.status, reply.error) == (500, f"Unable to open shared memory region: '{name}'")
        assert f"it belongs to uid {OTHER}, this is uid 0" in gateway.log()


class TestPrefix:
    """--key-prefix."""

    @pytest.fixture
    def options(self):
        return ["--allow-client-shm", f"--key-prefix=shmg-{os.getpid()}-yes"]

    def test_narrows(self, gateway, key):
        assert gateway.register("a", key("yes", 64), 64).status == 200
        no = key("no", 64)
        reply = gateway.register("b", no, 64)
        assert (reply.status, reply.error) == (500, f"Unable to open shared memory region: '{no}'")


# --- with uids of their own

POLICY = f"unsealed_users = {GATEWAY}\n[access]\nkeep = {GATEWAY}\n"
DELEGATE = f"{POLICY}delegate = {GATEWAY}\n"


def as_uid(uid, call):
    """What @call, of a client that is forked under @uid, returned."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            reply = call()
            os.write(theirs, f"{reply.status} {reply.error if reply.body else ''}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as said:
        text = said.read()
    os.waitpid(pid, 0)
    status, _, error = text.partition(" ")
    return int(status), error


def secret(file):
    """The name of @file, in which the tokens are, for the gateway only."""
    file.write(f"{TOKEN}\nadmin {ADMIN}\n")
    file.flush()
    os.chown(file.name, GATEWAY, GATEWAY)
    return file.name


def children(gateway):
    """The pids of what it has started."""
    pid = gateway.process.pid
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


@contextlib.contextmanager
def parties(config, *options):
    """The broker, the gateway and clients under uids of their own."""
    opens = any("--key-owners" in option for option in options)
    with running(config, ["--allow-client-shm", "--socket-mode=0666", *options], (BROKER, GATEWAY),
                 "dac_override" if opens else None) as one:
        yield one


@needs_root
class TestUids:
    """Who owns what, where several users are."""

    def test_the_gateway_keeps_regions_of_its_own(self, key):
        """Nothing but keep and unsealed_users is needed."""
        with parties(POLICY) as gateway:
            assert gateway.register("a", key("k", 64, uid=GATEWAY), 64).status == 200
            entry, = gateway.broker.regions()
            assert entry["uid"] == GATEWAY and entry["state"] == "active"
            assert as_uid(CLIENT, lambda: gateway.region("system", "a", "unregister"))[0] == 200

    def test_clients_are_their_users(self, key):
        """At a Unix socket, where the gateway is a delegate: memory, regions and rights are the client's."""
        with parties(DELEGATE, f"--key-owners={CLIENT},{OTHER}") as gateway:
            mine, others = key("mine", 64, uid=CLIENT), key("others", 64, uid=OTHER)
            done = as_uid(CLIENT, lambda: gateway.register("a", others, 64, unix=True))
            assert done == (500, f"Unable to open shared memory region: '{others}'")
            assert f"it belongs to uid {OTHER}, the caller is uid {CLIENT}" in gateway.log()
            assert as_uid(CLIENT, lambda: gateway.register("a", mine, 64, unix=True)) == (200, "")
            assert [entry["uid"] for entry in gateway.broker.regions()] == [CLIENT]
            status, text = as_uid(OTHER, lambda: gateway.region("system", "a", "unregister", unix=True))
            assert (status, text) == (403, "cannot unregister shared memory region 'a': it belongs to another user")
            # all means: all of one's own
            assert as_uid(OTHER, lambda: gateway.post("/v2/systemsharedmemory/unregister", unix=True)) == (200, "")
            assert gateway.post("/v2/systemsharedmemory/unregister").status == 200
            assert len(gateway.status()) == 1
            assert as_uid(CLIENT, lambda: gateway.region("system", "a", "unregister", unix=True)) == (200, "")
            assert gateway.status() == []

    def test_key_owners(self, key):
        """Memory that only its owner may open is opened for those that are named."""
        with parties(POLICY, f"--key-owners={CLIENT}") as gateway:
            mine, others = key("mine", 64, uid=CLIENT), key("others", 64, uid=OTHER, mode=0o666)
            assert gateway.register("a", mine, 64).status == 200
            reply = gateway.register("b", others, 64)
            assert (reply.status, reply.error) == (500, f"Unable to open shared memory region: '{others}'")
            assert f"it belongs to uid {OTHER}" in gateway.log()

    def test_a_key_that_is_opened_late_is_no_other_keys(self, key):
        """The opener answers a request that was given up; the next one is about another memory."""
        with parties(POLICY, f"--key-owners={CLIENT}") as gateway:
            large, small = key("large", 8192, uid=CLIENT), key("small", 64, uid=CLIENT)
            opener, = children(gateway)
            os.kill(opener, signal.SIGSTOP)
            try:
                reply = gateway.register("a", large, 8192)
            finally:
                os.kill(opener, signal.SIGCONT)
            assert (reply.status, reply.error) == (500, f"Unable to open shared memory region: '{large}'")
            reply = gateway.register("b", small, 8192)
            assert (reply.status, reply.error) == (400, "failed to register shared memory region 'b': invalid args")
            assert gateway.register("c", small, 64).status == 200
            assert gateway.register("d", large, 8192).status == 200

    def test_without_its_opener(self, key):
        """The gateway does not say any more that it registers memory."""
        with parties(POLICY, f"--key-owners={CLIENT}") as gateway:
            name = key("k", 64, uid=CLIENT)
            assert "system_shared_memory" in gateway.get("/v2").json["extensions"]
            opener, = children(gateway)
            os.kill(opener, signal.SIGKILL)
            for _ in range(2):
                reply = gateway.register("a", name, 64)
                assert (reply.status, reply.error) == (500, f"Unable to open shared memory region: '{name}'")
            assert gateway.log().count("has ended") == 1
            assert "system_shared_memory" not in gateway.get("/v2").json["extensions"]
            assert gateway.status() == []

    def test_a_gateway_that_may_keep_nothing_says_so(self):
        """What cannot be registered is no extension."""
        with parties(f"unsealed_users = {GATEWAY}\n[access]\nkeep = {OTHER}\n") as gateway:
            assert "system_shared_memory" not in gateway.get("/v2").json["extensions"]

    def test_keys_of_others_are_not_told(self, key):
        """Neither to another user, nor to who has no name; through no door, and not by the dashboard."""
        def keys(gateway, **how):
            entry, = gateway.status(**how)
            named, = gateway.region("system", entry["name"], "status", **how).json
            shown, = gateway.get("/v2/shmbroker/state", **how).json["regions"]
            assert named == entry and (shown["key"] or "") == entry["key"]
            return types.SimpleNamespace(status=200, body=entry["key"], error=entry["key"])

        with parties(DELEGATE, f"--key-owners={CLIENT},{OTHER}") as gateway:
            mine = key("mine", 64, uid=CLIENT)
            assert as_uid(CLIENT, lambda: gateway.register("a", mine, 64, unix=True)) == (200, "")
            assert as_uid(CLIENT, lambda: keys(gateway, unix=True)) == (200, mine)
            assert as_uid(OTHER, lambda: keys(gateway, unix=True)) == (200, "")
            assert as_uid(OTHER, lambda: keys(gateway)) == (200, "")
            # root is an administrator
            assert keys(gateway, unix=True).error == mine

    def test_the_memory_of_a_key_is_its_users(self):
        """A key that is a region of the broker is its user's, as one that is a file is; the gateway acts for that user."""
        with parties(DELEGATE) as gateway:
            owner = gateway.place.start("shmbrokerctl", "-s", gateway.broker.socket, "register", "shm:mine", "--create=4096B",
                                        uid=CLIENT, log=gateway.directory / "owner")
            until(lambda: owner.poll() is not None or gateway.broker.regions(), "the owner")
            others = as_uid(OTHER, lambda: gateway.register("a", "/mine", 4096, unix=True))
            assert others == (500, "Unable to open shared memory region: '/mine'")
            assert as_uid(CLIENT, lambda: gateway.register("a", "/mine", 4096, unix=True)) == (200, "")
            assert {entry["name"]: entry["uid"] for entry in gateway.broker.regions()} == {"a": CLIENT, "shm:mine": CLIENT}
            owner.terminate()
            assert owner.wait(DEADLINE) == 0

    def test_an_administrator_unregisters_regions_of_others(self, key):
        """By name and all, at a Unix socket and with a token; who is none leaves them alone."""
        with tempfile.NamedTemporaryFile("w") as tokens, \
             parties(DELEGATE, f"--key-owners={CLIENT},{OTHER}", f"--token-file={secret(tokens)}") as gateway:
            memory = {uid: key(str(uid), 64, uid=uid) for uid in (CLIENT, OTHER)}
            for how in ({"unix": True}, {"headers": bearer(ADMIN)}):
                for uid, name in memory.items():
                    assert as_uid(uid, lambda key=name: gateway.register(f"of {key}", key, 64, unix=True)) == (200, "")
                assert gateway.post("/v2/systemsharedmemory/unregister", headers=bearer(TOKEN)).status == 200
                assert gateway.region("system", f"of {name}", "unregister", headers=bearer(TOKEN)).status == 403
                assert len(gateway.status(**how)) == 2
                assert gateway.region("system", f"of {name}", "unregister", **how).status == 200
                assert [entry["name"] for entry in gateway.status(**how)] == [f"of {memory[CLIENT]}"]
                assert gateway.post("/v2/systemsharedmemory/unregister", **how).status == 200
                assert gateway.status(**how) == []

    def test_the_opener_has_one_capability(self):
        """And the gateway none."""
        with parties(POLICY, f"--key-owners={CLIENT}") as gateway:
            pids = [gateway.process.pid]
            pids += children(gateway)
            capabilities = []
            for pid in pids:
                fields = dict(line.split(":\t") for line in open(f"/proc/{pid}/status", encoding="ascii").read().splitlines()
                              if ":\t" in line)
                capabilities.append([fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs")])
            none, dac_override = f"{0:016x}", f"{1 << 1:016x}"
            assert capabilities == [[none, none, none, none, "1"], [none, dac_override, dac_override, none, "1"]]

    def test_the_brokers_policy(self, key):
        """Is what a client is told about."""
        name = key("k", 64, uid=GATEWAY)
        for config, word in [(f"[access]\nkeep = {GATEWAY}\n", "unsealed"), (f"unsealed_users = {GATEWAY}\n", "keep"),
                             (f"{POLICY}owner = {OTHER}\n", "")]:
            with parties(config) as gateway:
                reply = gateway.register("a", name, 64)
                assert reply.status == 403 and reply.error.startswith("failed to register shared memory region 'a': "), reply
                assert word in reply.error

    def test_quotas(self, key):
        """Are 429, and leave what is there."""
        with parties(f"{POLICY}[quota]\nregions = 2\n") as gateway:
            name = key("k", 64, uid=GATEWAY)
            assert gateway.register("a", name, 64).status == 200
            assert gateway.register("b", name, 64).status == 200
            reply = gateway.register("c", name, 64)
            assert reply.status == 429 and reply.error.startswith("failed to register shared memory region 'c': ")
            assert len(gateway.status()) == 2
