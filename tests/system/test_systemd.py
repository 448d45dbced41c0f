# SPDX-License-Identifier: Apache-2.0
"""The units under a real systemd: it is booted as PID 1 of fresh namespaces, the build is installed into it, and what
an administrator does is done. Needs root because systemd does; the broker itself runs as the user shmbroker."""

import json
import os
import pathlib
import subprocess
import time

import pytest

HERE = pathlib.Path(__file__).parent
BUILD = pathlib.Path(os.environ.get("SHMBROKER_BUILDDIR", ".")).resolve()
REAL_SYSTEMD = HERE / "real-systemd"
DEADLINE = 60

HOOK = r"""
make -s -C "$BUILD" install DESTDIR="$R" >"$LOG" 2>&1
systemd-sysusers --root="$R" >>"$LOG" 2>&1
ldconfig -r "$R"
useradd -R "$R" -M -G shmbroker shmb-member >>"$LOG" 2>&1
useradd -R "$R" -M shmb-stranger >>"$LOG" 2>&1
mkdir -p "$R/etc/systemd/system/shmbroker.service.d"
printf '[Service]\nWatchdogSec=%s\nExecStart=\nExecStart=%s --loop=%s\n%s\n' \
	1min /usr/local/sbin/shmbrokerd "$LOOP" "$EXTRA" >"$R/etc/systemd/system/shmbroker.service.d/test.conf"
"""


def until(condition, what, deadline=DEADLINE):
    """Polls until @condition gives something true, and returns that."""
    end = time.monotonic() + deadline
    while True:
        got = condition()
        if got:
            return got
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline} s: {what}")
        time.sleep(0.02)


class Machine:
    """A booted guest with the build installed; everything in it runs as its root unless said otherwise."""

    def __init__(self, directory, loop):
        self.directory = directory
        self.loop = loop

    def run(self, *command, check=True):
        done = subprocess.run([REAL_SYSTEMD, "run", self.directory, *command], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=180, check=False)
        if check:
            assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}{self.journal_text()}"
        return done

    def systemctl(self, *arguments, **options):
        return self.run("systemctl", *arguments, **options)

    def show(self, name, unit="shmbroker.service"):
        return self.systemctl("show", "--value", "-p", name, unit).stdout.strip()

    def ctl(self, *arguments, user=None, check=True):
        program = "/usr/local/bin/shmbrokerctl"
        if user:
            return self.run("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", program, *arguments, check=check)
        return self.run(program, *arguments, check=check)

    def journal(self):
        done = self.run("journalctl", "-o", "json", "-u", "shmbroker.service", "--no-pager", check=False)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def journal_text(self):
        done = subprocess.run([REAL_SYSTEMD, "run", self.directory, "journalctl", "--no-pager", "-n", "40"],
                              capture_output=True, text=True, check=False)
        return done.stdout

    def fresh(self):
        """Stops everything and leaves no counter behind."""
        self.systemctl("stop", "shmbroker.service", "shmbroker.socket")
        self.systemctl("reset-failed", "shmbroker.service", "shmbroker.socket", check=False)


@pytest.fixture(scope="module", params=["io_uring", "epoll"])
def machine(request, tmp_path_factory):
    # a service may not ptrace, which the leak checker would need
    sanitized = 'S["SANITIZERS_TRUE"]=""' in (BUILD / "config.status").read_text()
    extra = "Environment=ASAN_OPTIONS=detect_leaks=0" if sanitized else ""
    scratch = tmp_path_factory.mktemp("machine")
    hook = scratch / "hook"
    hook.write_text(HOOK)
    environment = dict(os.environ, RS_HOOK=str(hook), BUILD=str(BUILD), LOG=str(scratch / "install.log"),
                       LOOP=request.param, EXTRA=extra)
    done = subprocess.run([REAL_SYSTEMD, "start"], capture_output=True, text=True, env=environment,
                          stdin=subprocess.DEVNULL, timeout=600, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    log = scratch / "install.log"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    directory = done.stdout.strip()
    try:
        yield Machine(directory, request.param)
    finally:
        subprocess.run([REAL_SYSTEMD, "stop", directory], check=True, capture_output=True, timeout=180)


@pytest.fixture(autouse=True)
def stopped(machine):
    machine.fresh()
    yield
    machine.fresh()


def test_units_verify(machine):
    for unit in ("shmbroker.service", "shmbroker.socket"):
        done = machine.run("systemd-analyze", "verify", "--man=no", f"/lib/systemd/system/{unit}", check=False)
        assert done.returncode == 0 and "shmbroker" not in done.stderr, done.stderr


def test_first_connection_starts_the_broker(machine):
    machine.systemctl("start", "shmbroker.socket")
    assert machine.show("ActiveState") == "inactive"
    machine.ctl("ping")
    assert machine.show("ActiveState") == "active"
    assert machine.show("User") == "shmbroker"
    status = machine.run("cat", f"/proc/{machine.show('MainPID')}/status").stdout
    uid = machine.run("id", "-u", "shmbroker").stdout.strip()
    assert f"\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in status
    assert "\nCapEff:\t0000000000000000\n" in status


def test_the_wanted_loop_runs(machine):
    machine.systemctl("start", "shmbroker")
    links = machine.run("bash", "-c", f"readlink /proc/{machine.show('MainPID')}/fd/*").stdout
    assert ("anon_inode:[io_uring]" in links) == (machine.loop == "io_uring")


def test_start_is_over_when_the_broker_answers(machine):
    machine.systemctl("start", "shmbroker")
    assert machine.show("ActiveState") == "active"
    assert machine.show("SubState") == "running"
    machine.ctl("ping")


def test_status_text_follows_the_regions(machine):
    machine.systemctl("start", "shmbroker")
    before = until(lambda: machine.show("StatusText"), "a first status text")
    user = "shmb-member"
    machine.run("systemd-run", "--unit=owner", f"--property=User={user}", "--collect", "/usr/local/bin/shmbrokerctl",
                "watch")
    until(lambda: machine.show("StatusText") != before, "the status text counts the new session")
    machine.systemctl("stop", "owner")
    until(lambda: machine.show("StatusText") == before, "the status text is as it was")


def test_restart_gives_a_new_process_on_the_same_socket(machine):
    machine.systemctl("start", "shmbroker")
    inode = machine.run("stat", "-c", "%i", "/run/shmbroker/shmbroker.sock").stdout
    pid = machine.show("MainPID")
    machine.systemctl("restart", "shmbroker")
    assert machine.show("MainPID") not in (pid, "0")
    assert machine.run("stat", "-c", "%i", "/run/shmbroker/shmbroker.sock").stdout == inode
    machine.ctl("ping")


def test_stop_is_orderly(machine):
    machine.systemctl("start", "shmbroker")
    machine.ctl("ping")
    machine.systemctl("stop", "shmbroker")
    assert machine.show("Result") == "success"
    assert machine.show("ExecMainStatus") == "0"
    assert machine.show("ExecMainCode") == "1"  # exited, not killed
    # the socket stays and brings it back
    assert machine.show("ActiveState", "shmbroker.socket") == "active"
    machine.ctl("ping")


def test_reload_takes_the_new_configuration(machine):
    path = "/etc/shmbroker/shmbroker.conf.d/50-test.conf"
    machine.systemctl("start", "shmbroker")
    pid = machine.show("MainPID")
    machine.ctl("ping", user="shmb-member")
    machine.run("mkdir", "-p", path.rpartition("/")[0])
    try:
        machine.run("bash", "-c", f"printf '[access]\\nowner = root\\nconsumer = root\\nadmin = root\\n' >{path}")
        machine.systemctl("reload", "shmbroker")
        until(lambda: machine.ctl("status", user="shmb-member", check=False).returncode == 1, "the new rights hold")
        assert machine.show("MainPID") == pid
        assert machine.show("ActiveState") == "active"
        machine.ctl("status")
    finally:
        machine.run("rm", path)
    machine.systemctl("reload", "shmbroker")
    until(lambda: machine.ctl("status", user="shmb-member", check=False).returncode == 0, "the old rights hold again")


def test_reload_of_a_bad_configuration_changes_nothing(machine):
    path = "/etc/shmbroker/shmbroker.conf.d/50-test.conf"
    machine.systemctl("start", "shmbroker")
    pid = machine.show("MainPID")
    machine.run("mkdir", "-p", path.rpartition("/")[0])
    try:
        machine.run("bash", "-c", f"printf '[access]\\nownerr = root\\n' >{path}")
        machine.systemctl("reload", "shmbroker")
        until(lambda: any("50-test.conf" in entry["MESSAGE"] for entry in machine.journal()), "the journal names the file")
        assert machine.show("ActiveState") == "active"
        assert machine.show("MainPID") == pid
        machine.ctl("status", user="shmb-member")
    finally:
        machine.run("rm", path)


@pytest.fixture
def watchdog(machine):
    """
    Four seconds: longer than a machine with much to do makes a broker wait for its turn. Other tests have the watchdog bite
    far later, since it would end what they look at.
    """
    path = "/etc/systemd/system/shmbroker.service.d/watchdog.conf"
    machine.run("bash", "-c", f"printf '[Service]\\nWatchdogSec=4s\\n' >{path}")
    machine.systemctl("daemon-reload")
    yield
    machine.run("rm", path)
    machine.systemctl("daemon-reload")


@pytest.mark.usefixtures("watchdog")
def test_watchdog_is_fed(machine):
    machine.systemctl("start", "shmbroker")
    pid = machine.show("MainPID")
    first = int(machine.show("WatchdogTimestampMonotonic"))
    # enough to be killed where it is not fed
    until(lambda: int(machine.show("WatchdogTimestampMonotonic")) > first + 8_000_000, "the watchdog is fed")
    assert machine.show("MainPID") == pid
    assert machine.show("NRestarts") == "0"


@pytest.mark.usefixtures("watchdog")
def test_watchdog_ends_a_broker_that_hangs(machine):
    machine.systemctl("start", "shmbroker")
    pid = machine.show("MainPID")
    machine.run("kill", "-STOP", pid)
    until(lambda: machine.show("NRestarts") == "1" and machine.show("ActiveState") == "active", "it is started anew")
    assert machine.show("MainPID") not in (pid, "0")
    machine.ctl("ping")


def test_crashes_never_take_the_socket_away(machine):
    machine.systemctl("start", "shmbroker.socket")
    for _ in range(30):
        machine.run("bash", "-c", "for ((i = 0; i < 500; i++)); do shmbrokerctl ping >/dev/null 2>&1 && break; done;"
                    "kill -KILL $(systemctl show --value -p MainPID shmbroker.service)")
    assert machine.show("ActiveState", "shmbroker.socket") == "active"
    until(lambda: machine.ctl("ping", check=False).returncode == 0, "it answers after the last crash")


def test_only_the_group_reaches_the_socket(machine):
    machine.systemctl("start", "shmbroker")
    machine.ctl("ping", user="shmb-member")
    done = machine.ctl("ping", user="shmb-stranger", check=False)
    assert done.returncode == 4, done.stderr


def test_journal_entries_have_fields_and_message_ids(machine):
    machine.systemctl("start", "shmbroker")
    machine.ctl("ping")
    pid = machine.show("MainPID")
    entries = until(lambda: [entry for entry in machine.journal() if entry.get("_PID") == pid and "MESSAGE_ID" in entry],
                    "entries of this broker with a message id")
    for entry in entries:
        assert len(entry["MESSAGE_ID"]) == 32 and int(entry["MESSAGE_ID"], 16)
        assert entry["_TRANSPORT"] == "journal"
        assert entry["PRIORITY"] in "01234567"
        assert any(key.startswith("SHMBROKER_") for key in entry), entry
    # the same event has the same id in the next process
    machine.systemctl("restart", "shmbroker")
    again = machine.show("MainPID")
    ids = {entry["MESSAGE_ID"] for entry in entries}
    until(lambda: ids & {entry.get("MESSAGE_ID") for entry in machine.journal() if entry.get("_PID") == again},
          "the next broker logs the same ids")
