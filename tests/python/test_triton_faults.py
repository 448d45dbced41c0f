# SPDX-License-Identifier: Apache-2.0
"""What is known to be wrong with tritonclient.utils.shared_memory is not so with the drop-in; and what it has beside it."""

import ctypes
import gc
import mmap
import os
import secrets
import signal
import subprocess
import sys
import threading

import numpy
import pytest
from conftest import check_growth, until

import shmbroker
import shmbroker.triton
import shmbroker.triton.shared_memory as shm

CYCLES = 10000
ROOM = (4 << 20) if "libasan" in os.environ.get("LD_PRELOAD", "") else (1 << 20)


@pytest.fixture(autouse=True)
def connection(daemon):
    """To the broker of the test, and none when it ends."""
    shmbroker.triton.configure()
    yield
    left = shm.mapped_shared_memory_regions()
    shmbroker.triton.configure()
    gc.collect()
    assert left == []


@pytest.fixture
def key():
    """A key that nobody else has."""
    return f"shmb-test-{secrets.token_hex(8)}"


@pytest.fixture
def region(key):
    """64 bytes."""
    handle = shm.create_shared_memory_region("name", key, 64)
    yield handle
    shm.destroy_shared_memory_region(handle)


def names(broker):
    return {one.name for one in broker.status()}


# ---- whose it is ----

ATTACH = """
import sys, numpy
import shmbroker.triton.shared_memory as shm
handle = shm.create_shared_memory_region("peer", sys.argv[1], 64)
assert shm.get_contents_as_numpy(handle, numpy.int64, [8]).tolist() == list(range(8))
if sys.argv[2] == "destroy":
    shm.destroy_shared_memory_region(handle)
elif sys.argv[2] == "kill":
    import os, signal
    print("killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["destroy", "exit", "kill"])
def test_the_end_of_another_process_leaves_it(broker, region, key, run, end):
    shm.set_shared_memory_region(region, [numpy.arange(8)])
    if end == "kill":
        done = subprocess.run([sys.executable, "-c", ATTACH, key, end], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (-signal.SIGKILL, "killed\n"), done.stderr
    else:
        run(ATTACH, key, end)
    assert names(broker) == {f"shm:{key}"}
    # whoever comes next finds the same
    run(ATTACH, key, "exit")


MAKE = """
import sys, numpy
import shmbroker.triton.shared_memory as shm
handle = shm.create_shared_memory_region("name", sys.argv[1], 1 << 20)
shm.set_shared_memory_region(handle, [numpy.arange(8)])
print("made", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


def test_memory_of_a_process_that_was_killed_comes_back(broker, key):
    with subprocess.Popen([sys.executable, "-c", MAKE, key, "wait"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as maker:
        assert maker.stdout.readline() == b"made\n"
        [status] = broker.status()
        assert (status.name, status.nbytes, status.pid) == (f"shm:{key}", 1 << 20, maker.pid)
        handle = shm.create_shared_memory_region("name", key, 1 << 20)
        maker.kill()
        maker.wait()
    # who has it keeps it, nobody finds it
    until(lambda: [one.state for one in broker.status()] == [shmbroker.RegionState.RETIRING], "it retires")
    assert shm.get_contents_as_numpy(handle, numpy.int64, [8]).tolist() == list(range(8))
    fresh = shm.create_shared_memory_region("name", key, 64, create_only=True)
    shm.destroy_shared_memory_region(handle)
    until(lambda: len(list(broker.status())) == 1, "it is gone")
    shm.destroy_shared_memory_region(fresh)
    assert not os.path.exists(f"/dev/shm/{key}")


def test_the_end_of_its_maker_says_nothing(broker, key, run):
    assert run(MAKE, key, "exit") == "made\n"
    until(lambda: not names(broker), "it is gone")


def test_a_handle_that_is_destroyed_twice_takes_nothing_away(broker, region, key):
    other = shm.create_shared_memory_region("name", key, 64)
    for _ in range(3):
        shm.destroy_shared_memory_region(other)
    assert shm.mapped_shared_memory_regions() == [key]
    assert names(broker) == {f"shm:{key}"}


FORK = """
import os, sys, numpy
import shmbroker.triton.shared_memory as shm
key = sys.argv[1]
handle = shm.create_shared_memory_region("name", key, 64)
shm.set_shared_memory_region(handle, [numpy.arange(8)])
child = os.fork()
if not child:
    # it looks at what it inherited, has its own connection, and unregisters nothing
    shm.set_shared_memory_region(handle, [numpy.arange(8)[::-1].copy()])
    assert shm.mapped_shared_memory_regions() == [key]
    own = shm.create_shared_memory_region("own", key + "-own", 64, create_only=True)
    same = shm.create_shared_memory_region("same", key, 64)
    assert shm.get_contents_as_numpy(same, int, [8])[0] == 7
    for one in (own, same, handle):
        shm.destroy_shared_memory_region(one)
    assert shm.mapped_shared_memory_regions() == []
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert shm.get_contents_as_numpy(handle, int, [8]).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
again = shm.create_shared_memory_region("again", key, 64)
assert shm.get_contents_as_numpy(again, int, [8])[0] == 7
shm.destroy_shared_memory_region(handle)
shm.destroy_shared_memory_region(again)
"""


def test_a_fork_destroys_nothing_of_its_parent(broker, key, run):
    assert run(FORK, key) == ""
    until(lambda: not names(broker), "all is gone")


# ---- no copies, no leaks ----

def address(array):
    return array.__array_interface__["data"][0]


def test_views_are_the_memory(broker, region, key):
    base = shm.as_numpy_view(region, numpy.uint8, [64])
    for offset in (0, 8, 60):
        for function in (shm.as_numpy_view, shm.get_contents_as_numpy):
            assert address(function(region, numpy.float32, [1], offset)) == address(base) + offset
    base[:] = numpy.arange(64)
    with broker.get_memory_info(region.region_name) as lease:
        assert bytes(lease) == bytes(range(64))
    with pytest.raises(TypeError):
        shm.as_numpy_view(region, numpy.object_, [1])
    with pytest.raises(TypeError):
        shm.as_numpy_view(region, numpy.uint8, [65])
    del base


def test_views_outlive_the_handle(broker, key):
    handle = shm.create_shared_memory_region("name", key, 1 << 20)
    other = shm.create_shared_memory_region("name", key, 1 << 20)
    arrays = [shm.get_contents_as_numpy(one, numpy.int64, [1 << 17]) for one in (handle, other)]
    arrays.append(shm.as_numpy_view(handle, numpy.int64, [8], 64))
    view = handle._mpsm_handle.buf[8:16]
    arrays[0][:] = numpy.arange(1 << 17)
    shm.destroy_shared_memory_region(handle)
    shm.destroy_shared_memory_region(other)
    fresh = shm.create_shared_memory_region("name", key, 1 << 20, create_only=True)
    assert arrays[0][-1] == arrays[1][-1] == (1 << 17) - 1 and arrays[2][0] == 8 and view[0] == 1
    assert not shm.get_contents_as_numpy(fresh, numpy.int64, [1 << 17]).any()
    shm.destroy_shared_memory_region(fresh)
    with pytest.raises(ValueError):
        shm.as_numpy_view(handle, numpy.int64, [1])
    arrays.clear()
    del view
    until(lambda: not names(broker), "all is gone")


def test_pointers_are_not_read_from_shared_memory(region):
    region._mpsm_handle.buf[:] = b"\x02\0\0\0ab" + bytes(58)
    # the original takes the bytes for addresses
    for datatype in ("O", object, numpy.object_, numpy.dtype(object)):
        assert shm.get_contents_as_numpy(region, datatype, [1]).tolist() == [b"ab"]
    with pytest.raises(TypeError):
        shm.get_contents_as_numpy(region, numpy.dtype([("a", object)]), [1])
    with pytest.raises(shm.SharedMemoryException):
        shm.set_shared_memory_region(region, [numpy.zeros(1, numpy.dtype([("a", object)]))])


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def cycle(key):
    handle = shm.create_shared_memory_region("name", key, 4096)
    other = shm.create_shared_memory_region("name", key, 4096)
    shm.set_shared_memory_region(handle, [numpy.arange(8)])
    assert shm.get_contents_as_numpy(other, numpy.int64, [8])[7] == 7
    other.fileno()
    shm.destroy_shared_memory_region(handle)
    shm.destroy_shared_memory_region(other)


def test_nothing_leaks(broker, key):
    for _ in range(CYCLES // 10):
        cycle(key)
    fds = descriptors()

    def work():
        for _ in range(CYCLES):
            cycle(key)
        # the closing of the last ones may be under way
        until(lambda: descriptors() <= fds + 4, "fds are closed")

    check_growth(work, ROOM)
    until(lambda: not names(broker), "all is gone")


# ---- file descriptors ----

def test_the_file_of_a_handle(region, key):
    other = shm.create_shared_memory_region("name", key, 64)
    shm.set_shared_memory_region(region, [numpy.arange(8)])
    files = [os.fstat(one.fileno()) for one in (region, other)]
    assert os.path.samestat(*files) and files[0].st_size >= 64
    for one in (region, other):
        with mmap.mmap(one.fileno(), 64) as mapped:
            assert mapped[8] == 1
            mapped[8] = 5
            assert shm.get_contents_as_numpy(region, numpy.int64, [2])[1] == 5
            mapped[8] = 1
        # nobody can cut it off
        with pytest.raises(PermissionError):
            os.ftruncate(one.fileno(), 1)
    shm.destroy_shared_memory_region(other)
    with pytest.raises(ValueError):
        other.fileno()
    assert (region.nbytes, region.region_name) == (64, f"shm:{key}")


# ---- keys and the broker's names ----

def test_a_key_of_a_native_region(broker):
    with broker.create("frame", 16, "float32") as made:
        handle = shm.create_shared_memory_region("name", "/shmbroker.frame", 64)
        shm.set_shared_memory_region(handle, [numpy.arange(16, dtype="float32")])
        assert made.numpy().tolist() == list(range(16))
        shm.destroy_shared_memory_region(handle)
        assert names(broker) == {"frame"}
    handle = shm.create_shared_memory_region("name", "shmbroker.other", 64)
    assert names(broker) == {"other"}
    shm.destroy_shared_memory_region(handle)


def test_keys_of_all_letters(broker):
    handle = shm.create_shared_memory_region("name", "/Gr\u00f6\u00dfe \u732b", 64)
    assert names(broker) == {"shm:Gr\u00f6\u00dfe \u732b"}
    shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("how", ["configure", "environment"])
@pytest.mark.parametrize("uids, gids", [(None, None), ([os.getuid() + 1], [7, 8])])
def test_it_is_this_users_and_those_named(key, uids, gids, how, monkeypatch):
    if how == "configure":
        # which the environment does not add to
        monkeypatch.setenv("SHMBROKER_TRITON_ALLOWED_UIDS", "77" if uids else "")
        shmbroker.triton.configure(allowed_uids=uids, allowed_gids=gids)
    else:
        monkeypatch.setenv("SHMBROKER_TRITON_ALLOWED_UIDS", ",".join(["root", *map(str, uids or ())]))
        monkeypatch.setenv("SHMBROKER_TRITON_ALLOWED_GIDS", " ".join(map(str, gids or ())))
        uids = [0, *(uids or ())]
    handle = shm.create_shared_memory_region("name", key, 64)

    def adopt(**allowed):
        # the list belongs to the memory: another one is refused
        shmbroker.triton._session.call(lambda broker: broker.adopt("window", handle.fileno(), **allowed)).close()

    adopt(allowed_uids=sorted({os.getuid(), *(uids or ())}), allowed_gids=gids or ())
    for other in ({}, {"allowed_uids": [os.getuid()], "allowed_gids": [9]}):
        with pytest.raises(shmbroker.AccessDiffers):
            adopt(**other)
    shm.destroy_shared_memory_region(handle)


def test_what_went_wrong_is_the_cause(broker, key, monkeypatch):
    with broker.create(f"shm:{key}", nbytes=64):
        with pytest.raises(shm.SharedMemoryException) as caught:
            shm.create_shared_memory_region("name", key, 64, create_only=True)
    assert isinstance(caught.value.__cause__, shmbroker.AlreadyExists)
    shmbroker.triton.configure(socket="/nowhere/at/all")
    with pytest.raises(shm.SharedMemoryException) as caught:
        shm.create_shared_memory_region("name", key, 64)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    monkeypatch.setenv("SHMBROKER_TRITON_BACKING", "paper")
    with pytest.raises((ValueError, shm.SharedMemoryException)):
        shm.create_shared_memory_region("name", key, 64)
    with pytest.raises(ValueError):
        shmbroker.triton.configure(backing="paper")
    monkeypatch.delenv("SHMBROKER_TRITON_BACKING")
    shmbroker.triton.configure()
    monkeypatch.setenv("SHMBROKER_TRITON_ALLOWED_UIDS", "nosuchuser")
    with pytest.raises(shm.SharedMemoryException) as caught:
        shm.create_shared_memory_region("name", key, 64)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "SHMBROKER_TRITON_ALLOWED_UIDS" in str(caught.value.__cause__) and "nosuchuser" in str(caught.value.__cause__)


def test_many_threads(broker, key):
    errors = []

    def work(number):
        try:
            for i in range(50):
                shared = shm.create_shared_memory_region("name", key, 64)
                own = shm.create_shared_memory_region("name", f"{key}-{number}", 64, create_only=True)
                shm.set_shared_memory_region(own, [numpy.full(8, number)])
                shm.set_shared_memory_region(shared, [numpy.full(1, i)], offset=8 * number)
                assert shm.get_contents_as_numpy(own, int, [8]).tolist() == [number] * 8
                assert shm.get_contents_as_numpy(shared, int, [1], 8 * number)[0] == i
                assert key in shm.mapped_shared_memory_regions()
                shm.destroy_shared_memory_region(own)
                shm.destroy_shared_memory_region(shared)
        except BaseException as error:  # pylint: disable=broad-except
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    until(lambda: not names(broker), "all is gone")


def test_a_broker_that_was_started_anew(daemon, key):
    handle = shm.create_shared_memory_region("name", key, 64)
    shm.set_shared_memory_region(handle, [numpy.arange(8)])
    daemon.process.kill()
    daemon.process.wait()
    os.unlink(daemon.socket)
    daemon.start()
    # the memory is there, nobody finds it: who asks for it gets other memory
    assert shm.get_contents_as_numpy(handle, int, [8])[7] == 7
    fresh = shm.create_shared_memory_region("name", f"{key}-fresh", 64)
    shm.destroy_shared_memory_region(handle)
    shm.destroy_shared_memory_region(fresh)


# ---- objects of /dev/shm ----

@pytest.fixture
def posix():
    """Regions are objects of /dev/shm."""
    shmbroker.triton.configure(backing="posix")


def test_posix_objects_are_refused_by_default(posix, broker, key):
    with pytest.raises(shm.SharedMemoryException) as caught:
        shm.create_shared_memory_region("name", key, 64)
    assert isinstance(caught.value.__cause__, shmbroker.Unsealed)
    assert not os.path.exists(f"/dev/shm/{key}") and not names(broker)


@pytest.mark.parametrize("config", ["unsealed = accept"])
class TestPosix:
    """With a broker that accepts them."""

    def test_a_life(self, posix, broker, key, run):
        handle = shm.create_shared_memory_region("name", "/" + key, 64)
        shm.set_shared_memory_region(handle, [numpy.arange(8)])
        status = os.stat(f"/dev/shm/{key}")
        assert (status.st_mode & 0o777, status.st_size) == (0o600, 64)
        with open(f"/dev/shm/{key}", "rb") as file:
            assert file.read() == numpy.arange(8).tobytes()
        run("import shmbroker.triton as t; t.configure(backing='posix')\n" + ATTACH, key, "exit")
        assert os.path.samestat(os.stat(f"/dev/shm/{key}"), os.fstat(handle.fileno()))
        with pytest.raises(shm.SharedMemoryException):
            shm.create_shared_memory_region("name", key, 64, create_only=True)
        shm.destroy_shared_memory_region(handle)
        assert not os.path.exists(f"/dev/shm/{key}") and not names(broker)

    def test_what_others_have_made_is_never_removed(self, posix, broker, key, run):
        path = f"/dev/shm/{key}"
        try:
            with open(path, "wb") as file:
                file.write(numpy.arange(8).tobytes())
            run("import shmbroker.triton as t; t.configure(backing='posix')\n" + ATTACH, key, "exit")
            handle = shm.create_shared_memory_region("name", key, 64)
            assert shm.get_contents_as_numpy(handle, int, [8]).tolist() == list(range(8))
            shm.set_shared_memory_region(handle, [numpy.full(1, 9)])
            shm.destroy_shared_memory_region(handle)
            with open(path, "rb") as file:
                assert file.read(1) == b"\x09"
        finally:
            os.unlink(path)

    def test_it_is_removed_at_the_end_of_its_maker(self, posix, broker, key, run):
        run("import shmbroker.triton as t; t.configure(backing='posix')\n" + MAKE, key, "exit")
        assert not os.path.exists(f"/dev/shm/{key}")
        until(lambda: not names(broker), "it is gone")

    def test_the_original_shares_it(self, posix, key, run):
        handle = shm.create_shared_memory_region("name", key, 64)
        shm.set_shared_memory_region(handle, [numpy.arange(8)])
        done = subprocess.run([sys.executable, "-c", ATTACH.replace("shmbroker.triton", "tritonclient.utils"), key, "kill"],
                              capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (-signal.SIGKILL, "killed\n"), done.stderr
        # its resource_tracker removes the name, which is no fault of ours, and none for us
        until(lambda: not os.path.exists(f"/dev/shm/{key}"), "the original has removed the name")
        shm.destroy_shared_memory_region(handle)


def test_ctypes_sees_what_numpy_sees(region):
    array = shm.as_numpy_view(region, numpy.uint8, [64])
    array[:] = 7
    assert ctypes.string_at(address(array), 64) == b"\x07" * 64
    del array
