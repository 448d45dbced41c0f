# SPDX-License-Identifier: Apache-2.0
"""No bytes are copied on the way to an array in another process."""

FRAME = (1, 3, 2160, 3840)

# the memory is what the statement in its first argument makes of the broker; prints what views of it have cost
CONSUMER = """
import resource, sys
import numpy
import shmbroker

def anonymous():
    with open("/proc/self/smaps_rollup") as rollup:
        return 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

shape = (1, 3, 2160, 3840)
broker = shmbroker.connect(populate=False)
broker.create("warm", nbytes=1).close()
anonymous(), faults()
before, pages = faults(), anonymous()
memory = eval(sys.argv[1])
frame = memory.numpy(shape, "float32")
view = faults() - before, anonymous() - pages
assert frame.ctypes.data == memory.address and not frame.flags.owndata
checked = numpy.from_dlpack(memory.view(shape, "float32"))
assert checked.ctypes.data == memory.address
assert float(frame[0, 1, 1080, 1920]) == 42.0 and float(frame[0, 2, 2159, 3839]) == 7.0
sample = faults() - before
copied_from = anonymous()
copy = frame.copy()
copied = anonymous() - copied_from
print(*view, sample, copied, frame.nbytes)
"""


def draw(frame):
    frame[...] = 1
    frame[0, 1, 1080, 1920], frame[0, 2, 2159, 3839] = 42, 7


def check(printed):
    faults, anonymous, sample, copied, nbytes = map(int, printed.split())
    assert nbytes == 99532800
    # a copy shows: it needs memory of its own
    assert copied > 0.95 * nbytes
    # a view needs a few pages for objects of Python, of the 24,300 of the frame
    assert faults < 200 and sample < 400 and anonymous < 1 << 20, (faults, sample, anonymous)


def test_a_frame_of_another_process(broker, run):
    with broker.create("frame", FRAME, "float32") as region:
        draw(region.numpy())
        check(run(CONSUMER, "broker.get_memory_info('frame')"))


def test_a_frame_that_is_handed_over(broker, run):
    with broker.create_pool("frames", 2, 99532800) as pool, pool.acquire() as block:
        draw(block.numpy(FRAME, "float32"))
        check(run(CONSUMER, "broker.open_pool('frames').take(%d, %d)" % block.give()))


def test_the_second_array_is_at_the_same_address(broker):
    with broker.create("r", 1000, "float64"):
        first, second = broker.get_memory_info("r"), broker.get_memory_info("r", 8, 800)
        assert second.address == first.address + 8
        assert second.numpy().ctypes.data == first.numpy()[8:].ctypes.data
