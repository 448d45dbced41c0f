# SPDX-License-Identifier: Apache-2.0
"""shmbroker-bench: that every subcommand measures something on brokers of its own, prints what its page says, and leaves nothing.

The numbers are not looked at: --quick means that they say nothing.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

import pytest

from broker import BUILD, until
from fakecuda import Fake
from protocol_client import DEADLINE

PAGE = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench" / "shmbroker-bench.1"
# not libtool's script: signals are for the program itself
PROGRAM = next((path for path in (BUILD / ".libs/shmbroker-bench", BUILD / "shmbroker-bench") if path.exists()), None)
COMMANDS = ("lease", "rtt", "register", "scale", "death", "restart", "frame", "gateway", "cuda")
# those that have rows in this build
PARTS = {"gateway": "shmbroker-gateway", "cuda": "shmbroker-cuda-helper"}
MEASURED = [command for command in COMMANDS if command not in PARTS or (BUILD / PARTS[command]).exists()]
KEYS = {"name", "n", "placement", "threads", "unit", "median", "p99", "min", "runs", "ratio", "detail"}
UNITS = {"ns", "us", "ms", "bytes", "fds", ""}
TABLE = PAGE.parent / "readme-table"
# stands for gnuplot: the script that it gets is what the test looks at
GNUPLOT = "#!/bin/sh\nexec cat >\"$SCRIPT\"\n"

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="built without shmbroker-bench")


def environment(**more):
    return {**os.environ, "LC_ALL": "C.UTF-8", "LD_LIBRARY_PATH": str(BUILD / ".libs"), **more}


def run(*arguments, code=0, **more):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
                          timeout=10 * DEADLINE, env=environment(**more))
    assert done.returncode == code, f"{arguments}: {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def measured():
    """The rows of a subcommand, which is run once."""
    known, fake = {}, Fake(CTX_BYTES=1 << 20)
    gpu = fake.environment(LD_LIBRARY_PATH=f"{BUILD / '.libs'}:{fake.path / 'lib'}")

    def rows(command):
        if command not in known:
            known[command] = json.loads(run("--quick", "--json", command, **gpu).stdout)
        return known[command]

    yield rows
    fake.close()


@pytest.fixture
def place():
    """An empty directory for the brokers, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="shmb") as name:
        yield pathlib.Path(name)


def is_text(value):
    return isinstance(value, str) and value


def page_rows(command):
    """The names that the page has for a subcommand's rows."""
    section = re.search(rf"^\.Ss Subcommand {command}$(.*?)^\.S[sh] ", PAGE.read_text(), re.M | re.S).group(1)
    return {name for line in re.findall(r"^\.It Li (.*)$", section, re.M) for name in re.split(r" ,? ?", line)}


def plain(name):
    """A row's name without what the page says about many rows together."""
    return re.sub(r"^echo-|-(io_uring|epoll|growth)$", "", re.sub(r"-(io_uring|epoll)$", "", name))


def test_subcommands():
    commands = re.search(r"^Subcommands:\n(.*?)\n\n", run("--help").stdout, re.M | re.S).group(1)
    assert [line.split()[0] for line in commands.splitlines()] == [*COMMANDS, "all"]


@pytest.mark.parametrize("command", MEASURED)
def test_rows(measured, command):
    rows = measured(command)
    assert rows
    for row in rows:
        assert set(row) == KEYS
        assert is_text(row["name"])
        assert row["placement"] in ("hot", "uniform", None)
        assert row["detail"] is None or is_text(row["detail"])
        assert row["unit"] in UNITS
        for key in ("n", "threads", "runs"):
            assert isinstance(row[key], int) and row[key] > 0, row
        assert row["ratio"] is None or row["ratio"] > 0, row
        assert row["min"] <= row["median"] <= row["p99"], row
        # an exponent may be anything, a count of failures is 0
        assert row["min"] > 0 or not row["unit"], row
    shapes = [tuple(row[key] for key in ("name", "n", "placement", "threads", "detail")) for row in rows]
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("command", MEASURED)
def test_the_page_names_the_rows(measured, command):
    names = {row["name"] for row in measured(command)}
    assert {plain(name) for name in names} == page_rows(command)


def test_rows_of_leases(measured):
    threads = range(1, min(len(os.sched_getaffinity(0)), 2) + 1)
    rows = {(row["name"], row["n"], row["placement"], row["threads"]): row for row in measured("lease")}
    for name in ("name", "handle", "message", "baseline"):
        for n in (10, 1000):
            for placement in ("hot", "uniform"):
                for thread in threads:
                    row = rows.pop((name, n, placement, thread))
                    assert (row["ratio"] is None) == (name == "baseline"), row
    assert {name for name, *_ in rows} == {"floor"}
    assert all(row["ratio"] is None for row in rows.values())


@pytest.mark.parametrize("command, baselines", [("rtt", "echo-"), ("register", "bare-"), ("death", "bare-"),
                                                ("frame", "unix-stream"),
                                                *[("gateway", "native-")] * ("gateway" in MEASURED),
                                                *[("cuda", ("lease-memory", "open-", "publish", "register", "context"))]
                                                * ("cuda" in MEASURED)])
def test_only_baselines_have_no_ratio(measured, command, baselines):
    rows = measured(command)
    assert {row["ratio"] is None for row in rows} == {True, False}
    for row in rows:
        assert (row["ratio"] is None) == row["name"].startswith(baselines), row


def test_register_with_and_without_a_keeper(measured):
    shapes = {text: {(row["name"], row["n"], row["detail"].removesuffix(text)) for row in measured("register")
                     if row["detail"].endswith(text)} for text in (", kept: off", ", kept: on")}
    assert shapes[", kept: off"] and shapes[", kept: off"] == shapes[", kept: on"]


def test_nothing_fails_without_a_broker(measured):
    rows = {row["name"]: row for row in measured("restart")}
    failures = rows["outage-failures"]
    assert failures["p99"] == 0 and int(re.search(r"of (\d+) acquires", failures["detail"]).group(1)) > 0
    assert [name for name, row in rows.items() if row["ratio"] is not None] == ["outage-slowest"]


def test_table(measured):
    heading, *lines = run("--quick", "lease").stdout.splitlines()
    assert heading.split() == ["NAME", "N", "PLACEMENT", "THREADS", "UNIT", "MEDIAN", "P99", "MIN", "RUNS", "RATIO", "DETAIL"]
    assert [line.split()[:4] for line in lines] == [
        [row["name"], str(row["n"]), row["placement"], str(row["threads"])] for row in measured("lease")]


def test_several_subcommands_and_only_some_rows():
    rows = json.loads(run("--quick", "--json", "--only=handle", "lease", "frame").stdout)
    assert {row["name"] for row in rows} == {"handle", "baseline", "floor"}
    rows = json.loads(run("--quick", "--json", "--only", "ping-epoll", "rtt").stdout)
    assert {row["name"] for row in rows} == {"ping-epoll", "echo-ping"}
    assert "nothing-like-that" in run("--quick", "--only=nothing-like-that", "lease", code=1).stderr


def test_plot(tmp_path):
    stand_in, script, picture = tmp_path / "bin/gnuplot", tmp_path / "script", tmp_path / "it's.svg"
    stand_in.parent.mkdir()
    stand_in.write_text(GNUPLOT)
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    run("--quick", "--plot", picture, "lease", "frame", PATH=path, SCRIPT=str(script))
    text = script.read_text()
    assert f"set output '{tmp_path}/it''s.svg'\n" in text
    curves = re.findall(r"^(\$curve\d+) << END\n10 [0-9.]+\n1000 [0-9.]+\nEND$", text, re.M)
    titles = dict(re.findall(r"^(\$curve\d+) using .* title '(.*)', \\$", text, re.M))
    assert sorted(titles) == sorted(curves)
    assert {title.split(",")[0] for title in titles.values()} == {"name", "handle", "message", "baseline"}
    if shutil.which("gnuplot"):
        run("--quick", "--plot", picture, "lease", "scale")
        texts = "".join(xml.etree.ElementTree.parse(picture).getroot().itertext())
        assert "baseline, 1 thread" in texts and "status-page" in texts


def test_plot_without_gnuplot(tmp_path):
    done = run("--quick", "--plot", tmp_path / "plot.svg", "lease", code=1, PATH="/nonexistent")
    assert "gnuplot-nox" in done.stderr and not done.stdout


def test_readme_table(measured, tmp_path):
    for command in ("lease", "rtt", "register", "restart", "frame"):
        (tmp_path / f"{command}.json").write_text(json.dumps(measured(command)))
    readme, picture = tmp_path / "README.md", tmp_path / "plot.svg"
    begin, end = re.findall(r"^<!--.*-->\n", (PAGE.parents[2] / "README.md").read_text(), re.M)
    readme.write_text(f"before\n{begin}what was there\n{end}after\n")
    picture.write_text("<?xml version='1.0'?>\n<svg> \n</svg>\n")

    def write():
        return subprocess.run([sys.executable, "-B", TABLE, tmp_path, readme, picture], check=False, capture_output=True)

    for _ in range(2):
        assert write().returncode == 0
        text = readme.read_text()
        assert text.startswith(f"before\n{begin}") and text.endswith(f"{end}after\n") and "what was there" not in text
        # the last cell of a line is the command that it is from
        commands = re.findall(r"^\|.*\| `(\w+)` \|$", text, re.M)
        assert commands == ["rtt"] * 2 + ["register"] * 4 + ["restart"] * 2 + ["frame"] * 2
        assert picture.read_text().count("SPDX") == 1 and " \n" not in picture.read_text()
    readme.write_text("without marks\n")
    assert write().returncode and readme.read_text() == "without marks\n"


@pytest.mark.parametrize("arguments", [(), ("leases",), ("--quick",), ("--unknown", "lease"), ("--only",),
                                       ("--plot=x.svg", "rtt")])
def test_usage(arguments):
    done = run(*arguments, code=2)
    assert done.stderr and not done.stdout


def test_another_broker(tmp_path, place):
    missing, false = tmp_path / "missing", tmp_path / "false"
    assert str(missing) in run("--quick", "--broker", missing, "lease", code=1).stderr
    false.write_text("#!/bin/sh\necho \"will not start: $*\"\nexit 1\n")
    false.chmod(0o755)
    assert f"will not start: --config {place}/" in run("--quick", "--broker", false, "lease", code=1, TMPDIR=str(place)).stderr
    assert not list(place.iterdir())


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_over(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_brokers_end_with_it(place, number):
    # not --quick: it would be over too soon
    process = subprocess.Popen([PROGRAM, "lease"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, env=environment(TMPDIR=str(place)))
    try:
        until(lambda: list(place.glob("*/shmbroker.sock")) and children(process.pid), "a broker")
        brokers = children(process.pid)
        process.send_signal(number)
        assert process.wait(DEADLINE) == -number
        until(lambda: all(is_over(broker) for broker in brokers), "the broker's end")
    finally:
        process.kill()
        process.wait()
    # who is killed cannot clean up, but its broker takes its socket with it
    if number == signal.SIGKILL:
        until(lambda: not list(place.glob("*/shmbroker.sock")), "the socket's end")
    else:
        assert not list(place.iterdir())
