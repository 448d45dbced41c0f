# SPDX-License-Identifier: Apache-2.0
"""Other processes that have the pool p open, and do with it what a test says."""

import subprocess
import sys

# it answers each line with one; what is refused with the name of the code
PROGRAM = """
import sys
import shmbroker

broker = shmbroker.connect()
pool, blocks, over = broker.open_pool("p"), {}, {}

def acquire(timeout, fill):
    block = pool.acquire(float(timeout))
    blocks[block.index] = block
    block.numpy()[:] = int(fill)
    return block.index, block.offset, block.generation

def release(index):
    over[index] = blocks.pop(index)
    return over[index].release(), pool.free_count

def release_behind_a_view(index):
    view = memoryview(blocks[index])
    released, free = blocks[index].release(), pool.free_count
    over[index] = blocks.pop(index)
    view.release()
    return released, free, pool.free_count

def release_again(index):
    return over[index].release(),

def give(index):
    over[index] = blocks.pop(index)
    return over[index].give()

def give_and_forget(index):
    return blocks.pop(index).give()

def take(offset, generation):
    block = pool.take(offset, generation)
    blocks[block.index] = block
    return block.index, block.generation, block.numpy()[0]

def find(offset):
    block = pool.find(offset, 1)
    try:
        block.release()
    except shmbroker.PermissionDenied:
        return block.index, block.generation, block.numpy()[0]

def reopen():
    global pool
    blocks.clear(), over.clear()
    pool.close()
    pool = broker.open_pool("p")
    return pool.free_count,

print("ready", flush=True)
for line in sys.stdin:
    verb, *words = line.split()
    try:
        print(*globals()[verb](*map(int, words)), flush=True)
    except shmbroker.Error as error:
        print(error.name, flush=True)
"""


class Member:
    """A process; it ends with kill()."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)
        assert self.process.stdout.readline() == "ready\n"

    def do(self, verb, *numbers):
        """Numbers, or the name of the code with which it was refused."""
        print(verb, *numbers, file=self.process.stdin, flush=True)
        words = self.process.stdout.readline().split()
        assert words, f"the process has ended: {verb}"
        if len(words) == 1 and words[0].isupper():
            return words[0]
        return tuple({"True": True, "False": False}[word] if word in ("True", "False") else int(word) for word in words)

    def kill(self):
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()
