# SPDX-License-Identifier: Apache-2.0
"""An fd on a FUSE file whose server never answers: one fstat or close of it would hang whoever does that for ever."""

import os
import pathlib
import tempfile

import pytest
from broker import ADMIN, CONSUMER, OTHER, OWNER, ROOT, until
from fuse import Mount
from protocol_client import READ, Refused


@pytest.fixture
def mount():
    """The mount; it is ended before the broker's teardown, which waits for what hangs."""
    if not ROOT:
        pytest.skip("needs root: it mounts a file system")
    # where other uids reach it
    with tempfile.TemporaryDirectory(prefix="shmb") as place:
        os.chmod(place, 0o755)
        directory = pathlib.Path(place) / "m"
        directory.mkdir()
        mounted = Mount(directory)
        yield mounted
        mounted.end()


def test_fd_of_a_file_system_that_never_answers(broker, mount):
    """A bystander is served, the uid's next fds are refused, nothing hangs; when the server has gone all is well again."""
    hostile, owner, consumer, admin = (broker.peer(uid) for uid in (OTHER, OWNER, CONSUMER, ADMIN))
    hostile.open("f", f"{mount.directory}/f")
    mount.be_silent()
    with pytest.raises(Refused, match="^BAD_FD:"):
        hostile.again("x", "f", size=1, access=READ)
    until(lambda: admin.stats()["uids_suspended"] == 1, "the close that hangs is noticed")
    for i in range(20):
        with pytest.raises(Refused, match="^AGAIN:"):
            hostile.give(f"hostile{i}")
        owner.give(f"r{i}")
        consumer.lookup(f"r{i}")
        owner.unregister(f"r{i}", mode="FORCE")
        hostile.ping()
    assert admin.stats()["fds_closing"] >= 1
    assert f"from uid {OTHER} hangs" in broker.log() and "/sys/fs/fuse/connections/" in broker.log()
    mount.end()
    until(lambda: admin.stats()["uids_suspended"] == 0, "the close that hung has ended")
    hostile.give("good")
