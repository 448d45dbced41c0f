# SPDX-License-Identifier: Apache-2.0
"""shmbrokerctl against a real broker: what each verb prints, to a person and as JSON, and with which code it exits."""

import fcntl
import hashlib
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import time

import jsonschema
import pytest

from broker import ADMIN, BUILD, CONSUMER, KEEPER, OWNER, ROOT, become, uid_of, until
from protocol_client import DEADLINE

SCHEMAS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "ctl" / "schemas"
COMPLETION = SCHEMAS.parent / "shmbrokerctl.bash-completion"
# not libtool's script, which would hide the names that the program is called by
PROGRAM = next(path for path in (BUILD / ".libs/shmbrokerctl", BUILD / "shmbrokerctl") if path.exists())
REGISTER = ("register", "--json")


class Ctl:
    """shmbrokerctl under the uid of an owner or what a call says, and the processes that a test leaves behind."""

    def __init__(self, broker=None):
        self.broker = broker
        self.environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "LC_ALL")}
        self.environment.update(TERM="xterm", LC_ALL="C.UTF-8", LD_LIBRARY_PATH=str(BUILD / ".libs"),
                                SHMBROKER_SOCKET=str(broker.socket if broker else "/nonexistent/socket"))
        self.processes = []

    def run(self, *arguments, code=0, text=True, uid=OWNER, **options):
        done = subprocess.run([PROGRAM, *arguments], capture_output="stdout" not in options, text=text, check=False,
                              stdin=subprocess.DEVNULL, timeout=3 * DEADLINE, env=self.environment,
                              preexec_fn=lambda: become(uid), **options)
        assert done.returncode == code, f"{arguments}: {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
        return done

    def json(self, verb, *arguments, **how):
        return valid(verb, json.loads(self.run(verb, "--json", *arguments, **how).stdout))

    def start(self, *arguments, program=PROGRAM, uid=OWNER, stderr=subprocess.DEVNULL, **options):
        process = subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=stderr, text=True, env=self.environment,
                                   preexec_fn=lambda: become(uid), **options)
        self.processes.append(process)
        return process

    def register(self, name, *arguments, **options):
        """`register` in the foreground; returns when the region is there."""
        process = self.start(*REGISTER, name, *arguments, **options)
        process.region = valid("register", json.loads(process.stdout.readline()))
        return process

    def hold(self, name):
        """A consumer with a lease through its page, on a region that was given by a peer."""
        holder = self.broker.peer(CONSUMER)
        region = self.broker.region(holder, name)
        holder.page_attach()
        holder.page_map(region["slot"], region["generation"])
        assert holder.page_do("acquire", region["slot"], region["generation"])
        return holder

    def regions(self, *arguments, **how):
        return self.json("status", *arguments, **how)["regions"]

    def region(self, name, **how):
        found = [r for r in self.regions(**how) if r["name"] == name]
        assert len(found) == 1, found
        return found[0]

    def on_terminal(self, *arguments, answer=None, enough=None, code=0, env=None, uid=OWNER):
        """
        Runs it on a terminal of its own, optionally with an answer to its question, and ends it when what it printed is
        enough; returns what it printed.
        """
        pid, terminal = pty.fork()
        if pid == 0:
            become(uid)
            os.execve(PROGRAM, [str(PROGRAM), *arguments], {**self.environment, **(env or {})})
        printed = b""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            try:
                got = os.read(terminal, 4096)
            except OSError:
                break
            if not got:
                break
            printed += got
            if answer and b"? [y/N] " in printed:
                os.write(terminal, answer)
                answer = None
            if enough and enough(printed):
                os.kill(pid, signal.SIGTERM)
                enough = None
        else:
            os.kill(pid, signal.SIGKILL)
        os.close(terminal)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == code, f"{arguments}: {status}, not {code}\n{printed}"
        return printed

    def end(self):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(name="ctl")
def ctl_fixture(broker):
    ctl = Ctl(broker)
    yield ctl
    ctl.end()


def valid(verb, document):
    schema = json.loads((SCHEMAS / f"{verb}.schema.json").read_text())
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    validator(schema).validate(document)
    return document


def sealed(content):
    """The fd of a memfd with @content that nobody can truncate."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


# ---- the command line

@pytest.mark.parametrize("arguments", [
    [], ["frobnicate"], ["status", "--frobnicate"], ["status", "a", "b"], ["status", "--sort=colour"],
    ["status", "--columns=name,colour"], ["status", "--prefix"], ["status", "--watch=5"], ["ping", "x"],
    ["ping", "-c0"], ["ping", "-c", "-1"], ["ping", "-i5"], ["clients", "x"], ["stats", "--format=xml"],
    ["stats", "--json", "--format=openmetrics"], ["watch", "--events=never"], ["watch", "-n0"],
    ["register"], ["register", "a"], ["register", "a", "b", "--create=1K"], ["register", "a", "--create=1024"],
    ["register", "a", "--create=0"], ["register", "a", "--create=16777216T"], ["register", "a", "--create=20000000000G"],
    ["register", "a", "--create=1K", "--fd-from=/dev/null"], ["register", "a", "--create=1K", "--offset=1K"],
    ["register", "a", "--fd-from=/dev/null", "--populate"], ["register", "a", "--create=1K", "--huge-pages=4K"],
    ["register", "a", "--create=1K", "--allow-uid=root"],
    ["unregister"], ["unregister", "a", "--all"], ["unregister", "a", "--mine"], ["unregister", "a", "--lazy", "--force"],
    ["unregister", "a", "--wait=1"], ["check"], ["check", "a", "b"], ["check", "a", "--pages=0"], ["ping", "--timeout=1"],
])
def test_usage(arguments):
    done = Ctl().run(*arguments, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith("shmbrokerctl")


@pytest.mark.parametrize("verb", ["", "status", "watch", "register", "unregister", "clients", "stats", "ping", "check"])
def test_help_needs_no_broker(verb):
    done = Ctl().run(*filter(None, [verb]), "--help")
    assert done.stdout.startswith(f"Usage: shmbrokerctl {verb}".rstrip())
    assert "--socket=PATH" in done.stdout


def test_version():
    assert re.fullmatch(r"shmbrokerctl \d+\.\d+\.\d+\n", Ctl().run("--version").stdout)


@pytest.mark.parametrize("verb", [["status"], ["watch"], ["register", "a", "--create=1K"], ["unregister", "a"],
                                  ["unregister", "--all", "--yes"], ["clients"], ["stats"], ["ping"], ["check", "a"]])
def test_unreachable_broker(verb):
    ctl = Ctl()
    assert "no broker at /nonexistent/socket" in ctl.run(*verb, code=4).stderr
    assert "no broker at /nonexistent/other" in ctl.run(*verb, "--socket", "/nonexistent/other", code=4).stderr
    ctl.run("--socket", "/dev/null", *verb, code=4)


def test_names_that_are_not_there(ctl):
    for verb in "status", "check", "unregister":
        assert "nobody" in ctl.run(verb, "nobody", code=3).stderr


def test_timeout_where_the_broker_does_not_answer(ctl, broker):
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        assert "timed out" in ctl.run("ping", "--timeout=100ms", code=5).stderr
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    ctl.run("ping", "--timeout=20s")


def test_failed_write_is_a_failure(ctl):
    with open("/dev/full", "w", encoding="utf-8") as full:
        for verb in "status", "stats", "clients", "ping":
            ctl.run(verb, code=1, stdout=full, stderr=subprocess.DEVNULL)


# ---- status

def test_status_without_regions(ctl):
    document = ctl.json("status")
    assert document["regions"] == []
    assert document["broker"]["loop_reason"]
    text = ctl.run("status").stdout
    assert text.splitlines()[0].split()[:3] == ["NAME", "KIND", "SIZE"]
    assert f"loop {document['broker']['loop']} ({document['broker']['loop_reason']})" in text


def test_status_of_a_region(ctl):
    content = os.urandom(10000)
    fd = sealed(content)
    owner = ctl.register("frame", f"--fd-from=/proc/self/fd/{fd}", "--offset=100B", "--size=8K", "--read-only", pass_fds=[fd])
    os.close(fd)
    region = ctl.region("frame")
    expected = {"name": "frame", "kind": "cpu", "size": 8192, "offset": 100, "state": "active", "pid": owner.pid,
                "uid": uid_of(OWNER), "comm": "shmbrokerctl", "leases": 0, "holders": [], "object_size": 10000,
                "access": ["read"], "generation": owner.region["generation"]}
    assert {key: region[key] for key in expected} == expected
    assert 0 < region["age"] < 3600 * 10**9
    row = ctl.run("status", "frame", "--columns=name,size,offset,state,pid", "--no-headings").stdout
    assert row.split() == ["frame", "8K", "100B", "active", str(owner.pid)]


def test_status_of_gpu_memory(start):
    ctl = Ctl(start(config="[cuda]\nmode = relay\n"))
    owner = ctl.broker.peer(OWNER)
    owner.give_cuda("kv", size=4096, handle=b"h" * 64, offset=512, object_size=1 << 21, device=bytes(range(16)))
    owner.give("memory")
    ctl.hold("kv")
    region = ctl.region("kv")
    expected = {"kind": "cuda", "size": 4096, "offset": 512, "object_size": 1 << 21, "leases": 1, "flags": ["unvalidated"],
                "device": "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"}
    assert {key: region[key] for key in expected} == expected
    assert (ctl.region("memory")["kind"], ctl.region("memory")["device"]) == ("cpu", None)
    ctl.run("unregister", "--force", "kv")
    region = ctl.region("kv")
    assert (region["state"], region["object_size"], region["leases"]) == ("revoked", 1 << 21, 1)
    assert region["device"] == expected["device"]


def test_status_of_one_name_and_of_a_prefix(ctl):
    for name in "cam/1", "cam/2", "other":
        ctl.register(name, "--create=4K")
    assert [r["name"] for r in ctl.regions("cam/1")] == ["cam/1"]
    assert [r["name"] for r in ctl.regions("--prefix", "cam/")] == ["cam/1", "cam/2"]
    assert ctl.regions("--prefix", "nothing") == []


def test_status_is_sorted(ctl):
    for name, size in ("b", "1M"), ("a", "4K"), ("c", "64K"):
        ctl.register(name, f"--create={size}")
    assert [r["name"] for r in ctl.regions()] == ["a", "b", "c"]
    assert [r["name"] for r in ctl.regions("--sort=size")] == ["a", "c", "b"]
    assert [r["name"] for r in ctl.regions("--sort=size", "--reverse")] == ["b", "c", "a"]
    table = ctl.run("status", "--sort=size", "-r", "--columns=name,size", "--no-headings").stdout
    assert table.split() == ["b", "1M", "c", "64K", "a", "4K"]


def test_numbers_are_exact(ctl):
    given = ctl.broker.peer(OWNER).give("exact")
    assert given["generation"] > 2**53
    assert ctl.region("exact")["generation"] == given["generation"]


def test_status_names_holders(ctl):
    ctl.broker.peer(OWNER).give("held")
    first, second = ctl.hold("held"), ctl.hold("held")
    region = ctl.region("held")
    assert region["leases"] == 2 and region["holders_total"] == 2
    assert {(h["pid"], h["uid"], h["leases"]) for h in region["holders"]} == {(p.pid, p.uid, 1) for p in (first, second)}
    shown = ctl.run("status", "held", "--columns=holders", "--no-headings").stdout
    assert f"[{first.pid}]:1" in shown and f"[{second.pid}]:1" in shown
    first.kill()
    until(lambda: [h["pid"] for h in ctl.region("held")["holders"]] == [second.pid], "the dead holder is no holder")


def test_names_do_not_reach_the_terminal_raw(ctl):
    # the name of the program would turn red what follows, the name of the region would turn its direction
    program = os.fsencode(ctl.broker.socket.parent) + b"/\x1b[31m\x9b\xff\x07"
    os.symlink(os.fsencode(PROGRAM.resolve()), program)
    ctl.register("a\u202eb", "--create=4K", program=program)
    for verb in "status", "clients":
        text = ctl.run(verb, text=False).stdout
        assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", text)
        assert b"[31m" in text
        text.decode()
        ctl.run(verb, "--json", text=False).stdout.decode()
    assert r"a\xe2\x80\xaeb" in ctl.run("status").stdout
    assert "[31m" in ctl.region("a\u202eb")["comm"]


def test_what_is_hidden(ctl):
    owner = ctl.register("seen", "--create=4K")
    ctl.hold("seen")
    region = ctl.region("seen", uid=CONSUMER)
    # without root all parties are one user, from whom nothing is hidden
    hidden = uid_of(OWNER) != uid_of(CONSUMER)
    assert (region["pid"], region["uid"]) == ((None, None) if hidden else (owner.pid, uid_of(OWNER)))
    assert (region["holders"] == [], region["holders_total"], region["leases"]) == (hidden, 1, 1)
    assert (region["comm"] is None) == hidden
    region = ctl.region("seen", uid=ADMIN)
    assert (region["pid"], region["uid"], len(region["holders"])) == (owner.pid, uid_of(OWNER), 1)


def test_colour_on_a_terminal_only(ctl):
    ctl.register("green", "--create=4K")
    assert "\x1b" not in ctl.run("status").stdout
    assert b"\x1b[32m" in ctl.on_terminal("status")
    assert b"\x1b" not in ctl.on_terminal("status", env={"NO_COLOR": "1"})
    assert b"\x1b[32m" in ctl.on_terminal("status", env={"NO_COLOR": ""})
    assert b"\x1b" not in ctl.on_terminal("status", "--json")


def test_status_watch_shows_changes(ctl):
    # its own time is longer than the test may take: only the event brings the second list
    watch = ctl.start("status", "--watch=10min", "--json")
    assert valid("status", json.loads(watch.stdout.readline()))["regions"] == []
    ctl.register("new", "--create=4K")
    names = []
    while names != ["new"]:
        names = [r["name"] for r in json.loads(watch.stdout.readline())["regions"]]
    watch.send_signal(signal.SIGTERM)
    assert watch.wait(DEADLINE) == 0


def test_status_watch_clears_a_terminal_only(ctl):
    ctl.on_terminal("status", "--watch=10ms", enough=lambda printed: printed.count(b"\x1b[H\x1b[2J") > 1)
    watch = ctl.start("status", "--watch=10ms")
    lists = [watch.stdout.readline() for _ in range(6)]
    assert [line[:9] for line in lists] == 2 * ["NAME  KIN", "0 regions", "\n"]


# ---- register and unregister

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_register_owns_until_it_ends(ctl, number):
    owner = ctl.register("mine", "--create=4K", "--foreground")
    assert owner.region["size"] == 4096
    assert ctl.region("mine")["pid"] == owner.pid
    owner.send_signal(number)
    assert owner.wait(DEADLINE) == (-number if number == signal.SIGKILL else 0)
    until(lambda: not ctl.regions(), "the region ends with its owner")


def test_register_ends_with_the_broker(ctl, broker):
    owner, watch = ctl.register("mine", "--create=4K"), start_watch(ctl)
    broker.process.kill()
    broker.process.wait()
    # there is nothing left to check
    broker.finished = True
    assert owner.wait(DEADLINE) == 4
    assert watch.wait(DEADLINE) == 4


def test_register_keep(ctl):
    done = ctl.json("register", "kept", "--create=64K", "--keep", uid=KEEPER)
    assert "kept" in done["flags"]
    region = ctl.region("kept", uid=KEEPER)
    assert "kept" in region["flags"] and region["pid"] is None and region["uid"] == uid_of(KEEPER)
    assert ctl.json("unregister", "kept", "--wait=20s", uid=KEEPER) == {"regions": [{"name": "kept", "result": "gone", "message": None}]}
    assert ctl.regions() == []


def test_register_says_what_is_refused(ctl):
    assert "not a memfd" in ctl.run("register", "a", f"--fd-from={__file__}", code=1).stderr
    assert "No such file" in ctl.run("register", "a", "--fd-from=/nonexistent/file", code=1).stderr
    ctl.register("a", "--create=4K")
    assert "already exists" in ctl.run("register", "a", "--create=4K", code=1).stderr
    ctl.run("register", "a\nb", "--create=4K", code=1)
    assert len(ctl.regions()) == 1


def test_unregister_of_several_names(ctl):
    ctl.register("one", "--create=4K")
    ctl.register("two", "--create=4K")
    document = ctl.json("unregister", "one", "nothing", "two", code=3)
    assert [(r["name"], r["result"]) for r in document["regions"]] == [("one", "retired"), ("nothing", "not_found"), ("two", "retired")]
    assert ctl.regions() == []


def test_unregister_of_a_held_region(ctl):
    ctl.broker.peer(OWNER).give("held")
    holder = ctl.hold("held")
    assert "held" in ctl.run("unregister", "held", "--lazy", "--wait=50ms", code=5).stderr
    assert ctl.region("held")["state"] == "lazy"
    ctl.run("unregister", "held")
    assert ctl.region("held")["state"] == "retiring"
    holder.kill()
    until(lambda: not ctl.regions(), "the last lease is over")


def test_unregister_force(ctl):
    ctl.broker.peer(OWNER).give("held")
    holder = ctl.hold("held")
    ctl.run("unregister", "held", "--force")
    assert ctl.region("held")["state"] == "revoked"
    assert [h["pid"] for h in ctl.region("held")["holders"]] == [holder.pid]


def test_unregister_all_is_asked_for(ctl):
    for name in "a", "b":
        ctl.register(name, "--create=4K")
    assert "--yes" in ctl.run("unregister", "--all", code=2).stderr
    assert b"Retire 2 regions (8K) of this user?" in ctl.on_terminal("unregister", "--all", "--mine", answer=b"\n", code=1)
    assert b"of all users?" in ctl.on_terminal("unregister", "--all", answer=b"no\n", code=1)
    ctl.on_terminal("unregister", "--all", answer=b"\x04", code=1)
    assert len(ctl.regions()) == 2
    ctl.on_terminal("unregister", "--all", "--mine", answer=b"y\n")
    assert ctl.regions() == []
    ctl.register("c", "--create=4K")
    if uid_of(OWNER) != uid_of(ADMIN):
        assert "admin" in ctl.run("unregister", "--all", "--yes", code=1).stderr
        assert len(ctl.regions()) == 1
    assert ctl.json("unregister", "--all", "--yes", "--wait", uid=ADMIN) == {"gone": 1, "draining": 0, "discarded": 0}


def test_unregister_all_waits(ctl):
    ctl.broker.peer(OWNER).give("held")
    ctl.hold("held")
    ctl.run("unregister", "--all", "--yes", "--mine", "--wait=50ms", code=5)
    assert ctl.json("unregister", "--all", "--yes", "--mine")["draining"] == 1


def test_discard_gives_pages_back(ctl):
    ctl.register("big", "--create=1M", "--populate")
    assert ctl.json("unregister", "--all", "--mine", "--yes", "--discard")["discarded"] == 1 << 20


# ---- watch, clients, stats, ping

def read_events(watch, n):
    return [valid("watch", json.loads(watch.stdout.readline())) for _ in range(n)]


def start_watch(ctl, *arguments):
    """Returns when it has subscribed."""
    watch = ctl.start("watch", *arguments, stderr=subprocess.PIPE)
    assert "watching" in watch.stderr.readline()
    return watch


def test_watch_prints_events(ctl):
    watch = start_watch(ctl, "--json", "--events=registered,retiring,gone", "-n3")
    owner = ctl.register("seen", "--create=12K")
    owner.kill()
    events = read_events(watch, 3)
    assert [e["event"] for e in events] == ["registered", "retiring", "gone"]
    for event in events:
        assert (event["name"], event["generation"], event["size"]) == ("seen", owner.region["generation"], 12288)
        assert (event["pid"], event["uid"]) == (owner.pid, uid_of(OWNER))
    assert watch.wait(DEADLINE) == 0


def test_watch_ends_on_a_signal(ctl):
    watch = start_watch(ctl)
    watch.send_signal(signal.SIGINT)
    assert watch.wait(DEADLINE) == 0


def test_watch_text(ctl):
    watch = start_watch(ctl, "--events=joined", "-n1")
    ctl.run("ping")
    assert watch.wait(DEADLINE) == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} joined +session=\d+ pid=\d+ uid=\d+\n", watch.stdout.read())


def test_clients(ctl):
    owner = ctl.register("mine", "--create=12K")
    holder = ctl.hold("mine")
    clients = {c["pid"]: c for c in ctl.json("clients", uid=ADMIN)["clients"]}
    assert clients[owner.pid]["regions"] == 1 and clients[owner.pid]["bytes"] == 12288
    assert clients[owner.pid]["uid"] == uid_of(OWNER)
    assert clients[holder.pid]["leases"] == 1 and clients[holder.pid]["maps"] == 1 and "attached" in clients[holder.pid]["flags"]
    assert ctl.run("clients", "--sort=regions", "-r", "--columns=pid,bytes", "--no-headings").stdout.split()[:2] == [str(owner.pid), "12K"]


def test_stats(ctl):
    ctl.register("counted", "--create=12K")
    stats = {(s["name"], s["uid"]): s for s in ctl.json("stats", "--accounts")["stats"]}
    assert stats["regions", None]["value"] == 1
    assert stats["held_bytes", uid_of(OWNER)]["value"] == 12288
    assert all(s["uid"] is None for s in ctl.json("stats")["stats"])
    assert ctl.json("stats", "--format=json").keys() == {"stats"}


def test_stats_in_openmetrics(ctl):
    ctl.register("unnamed", "--create=12K")
    text = ctl.run("stats", "--format=openmetrics", "--accounts").stdout
    assert text.endswith("\n# EOF\n") and "unnamed" not in text
    types, current = {}, None
    for line in text.splitlines()[:-1]:
        if line.startswith("# TYPE "):
            current, kind = line.split()[2:]
            assert current not in types, f"{current} twice"
            types[current] = kind
        elif line.startswith("# HELP "):
            assert line.split()[2] == current
        else:
            name, labels, value = re.fullmatch(r"([a-z0-9_]+)(\{.*\})? (\d+)", line).groups()
            suffix = {"counter": "_total", "gauge": "", "info": "_info"}[types[current]]
            assert name == current + suffix, line
            assert name.startswith("shmbroker_")
            if "account_" in name:
                assert re.fullmatch(r'\{uid="\d+"\}', labels), line
            elif types[current] != "info":
                assert labels is None, line
    assert set(types.values()) == {"counter", "gauge", "info"}
    assert "shmbroker_regions 1\n" in text
    assert f'shmbroker_account_held_bytes{{uid="{uid_of(OWNER)}"}} 12288\n' in text


def test_ping(ctl):
    document = ctl.json("ping", "-c3", "--interval=1ms")
    times = [p["time"] for p in document["pings"]]
    assert [p["sequence"] for p in document["pings"]] == [1, 2, 3]
    assert (document["min"], document["mean"], document["max"]) == (min(times), sum(times) // 3, max(times))
    assert re.fullmatch(r"1: [\d.]+(ns|us|ms|s)\n", ctl.run("ping").stdout)


# ---- check

def test_check_sees_the_bytes_of_the_owner(ctl):
    content = os.urandom(3 * (1 << 20) + 12345)
    fd = sealed(content)
    owner = ctl.register("frame", f"--fd-from=/proc/self/fd/{fd}", pass_fds=[fd])
    os.close(fd)
    done = ctl.json("check", "frame")
    assert done["sha256"] == hashlib.sha256(content).hexdigest()
    assert done["result"] == "same" and done["size"] == done["checked"] == done["compared"] == len(content)
    assert done["generation"] == owner.region["generation"] and done["address"] and "memfd" in done["file"]
    part = ctl.json("check", "frame", "--offset=4097B", "--size=10001B")
    assert part["sha256"] == hashlib.sha256(content[4097:14098]).hexdigest() and part["compared"] == 10001
    pages = ctl.json("check", "frame", "--pages=2")
    assert pages["sha256"] == hashlib.sha256(content[:4096] + content[len(content) // 4096 * 4096:]).hexdigest()
    assert hashlib.sha256(content).hexdigest() in ctl.run("check", "frame").stdout
    ctl.run("check", "frame", "--offset=1G", code=1)


def test_check_allocates_nothing(ctl):
    size = 64 << 20
    fd = sealed(b"x")
    os.truncate(f"/proc/self/fd/{fd}", size)
    ctl.register("sparse", f"--fd-from=/proc/self/fd/{fd}", pass_fds=[fd])
    done = ctl.json("check", "sparse")
    assert done["result"] == "same" and done["checked"] == size and done["compared"] == 4096
    assert done["sha256"] == hashlib.sha256(b"x" + bytes(size - 1)).hexdigest()
    assert os.fstat(fd).st_blocks * 512 == 4096
    os.close(fd)


def test_check_of_what_may_be_truncated(start):
    ctl = Ctl(start(config="unsealed = accept"))
    content = os.urandom(12345)
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.write(fd, content)
    try:
        ctl.register("loose", f"--fd-from=/proc/self/fd/{fd}", pass_fds=[fd])
        assert "unsealed" in ctl.region("loose")["flags"]
        done = ctl.json("check", "loose")
        assert (done["result"], done["address"], done["checked"], done["compared"]) == ("read", None, 12345, 0)
        assert done["sha256"] == hashlib.sha256(content).hexdigest()
        os.truncate(f"/proc/self/fd/{fd}", 100)
        assert "cut" in ctl.run("check", "loose", code=1).stderr
    finally:
        ctl.end()
        os.close(fd)


def test_check_finds_the_owner(ctl):
    owner = ctl.broker.peer(OWNER)
    for name in ("mapped", "not mapped"):
        owner.give(name)
    owner.keep_mapped("mapped")
    # only root may look at what another user's process maps
    assert ctl.json("check", "mapped", uid=0)["owner_maps"] is True
    assert ctl.json("check", "not mapped", uid=0)["owner_maps"] is False
    if ROOT:
        assert ctl.json("check", "mapped", uid=CONSUMER)["owner_maps"] is None


# ---- completion

def test_completion_of_region_names(ctl):
    ctl.register("a region", "--create=4K")
    ctl.register("another", "--create=4K")
    script = '. "$1"; COMP_WORDS=("$2" unregister a) COMP_CWORD=2; _shmbrokerctl; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script, "bash", COMPLETION, PROGRAM], capture_output=True, text=True,
                          check=True, env=ctl.environment, preexec_fn=lambda: become(OWNER))
    assert done.stdout.splitlines() == ["a\\ region", "another"]


@pytest.mark.parametrize("how", [[], ["--lazy"], ["--force"]])
def test_register_ends_when_its_region_is_retired_by_another(ctl, how):
    process = ctl.start("register", "r", "--create=4K", "--json", stderr=subprocess.PIPE)
    json.loads(process.stdout.readline())
    ctl.run("unregister", "r", "--wait", *how)
    assert process.wait(DEADLINE) == 1
    assert "retired by somebody else" in process.stderr.read()
