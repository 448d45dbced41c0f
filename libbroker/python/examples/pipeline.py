#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A camera, a server and its two workers: frames are in a pool, and only their names are sent.

The camera acquires a block, draws a frame into it and gives it away. The server sends the name of the block on to one of
its workers, which takes it, looks for the bright square that is somewhere in the frame, releases the block and answers.

Needs NumPy and a broker ($SHMBROKER_SOCKET). Ends with 1 when a square was not found where the camera has drawn it.
"""

import argparse
import multiprocessing
import os
import pickle
import time
from multiprocessing.connection import wait

import numpy

import shmbroker

SHAPE = HEIGHT, WIDTH, _ = (1080, 1920, 3)
SIDE = 40
BLOCKS = 4
WORKERS = 2


def place(number):
    """Where the square is in a frame."""
    return number * 37 % (HEIGHT - SIDE), number * 91 % (WIDTH - SIDE)


def draw(frame, number):
    """Every byte of a frame."""
    top, left = place(number)
    frame[...] = number % 200
    frame[top:top + SIDE, left:left + SIDE] = 255


def find_square(frame):
    """Its upper left corner."""
    top, left = divmod(int(frame[:, :, 0].argmax()), WIDTH)
    return top, left


def camera(name, frames, server):
    """Waits for a free block whenever the workers are slower."""
    with shmbroker.connect() as broker, broker.open_pool(name) as pool:
        for number in range(frames):
            with pool.acquire(timeout=60) as block:
                # what looks at the block is gone when draw() returns: otherwise give() would refuse
                draw(block.numpy(SHAPE), number)
                server.send((number, *block.give()))
        server.send(None)
        # until a block is taken it is this process's, and would come back when it ends
        server.recv()


def worker(name, server):
    """Answers until it is told to end."""
    with shmbroker.connect() as broker, broker.open_pool(name) as pool:
        for number, offset, generation in iter(server.recv, None):
            with pool.take(offset, generation) as block:
                found = find_square(block.numpy(SHAPE))
            server.send((number, found))


class Peer:
    """A process of the pipeline, and the pipe to it."""

    def __init__(self, function, *args):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=function, args=(*args, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.received = 0

    def receive(self):
        """A message; its size is counted. EOFError when the process has ended."""
        message = self.pipe.recv_bytes()
        self.received += len(message)
        return pickle.loads(message)


def serve(source, workers, frames):
    """Sends each frame on to the next worker; returns where they found the squares, and how many frames each has had."""
    found, handled, sent = {}, [0] * len(workers), 0
    pipes = {peer.pipe: peer for peer in (source, *workers)}
    while len(found) < frames:
        for pipe in wait(list(pipes)):
            message = pipes[pipe].receive()
            if pipes[pipe] is not source:
                number, where = message
                found[number] = where
                handled[workers.index(pipes[pipe])] += 1
            elif message is None:
                del pipes[pipe]
            else:
                workers[sent % len(workers)].pipe.send(message)
                sent += 1
    return found, handled


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=60)
    frames = parser.parse_args().frames
    size = int(numpy.prod(SHAPE))
    with shmbroker.connect() as broker:
        with broker.create_pool(f"example/frames-{os.getpid()}", BLOCKS, size) as pool:
            print(f"the pool {pool.name} has {pool.n_blocks} blocks of {pool.block_size} bytes")
            begin = time.monotonic()
            source = Peer(camera, pool.name, frames)
            workers = [Peer(worker, pool.name) for _ in range(WORKERS)]
            found, handled = serve(source, workers, frames)
            seconds = time.monotonic() - begin
            for peer in (source, *workers):
                peer.pipe.send(None)
                peer.process.join()
            free = pool.free_count
    wrong = [number for number in range(frames) if found[number] != place(number)]
    names = source.received + sum(peer.received for peer in workers)
    print(f"{frames} frames in {seconds:.2f} s, {frames * size} bytes; {names} bytes went through pipes")
    print("frames of each worker:", *handled)
    print(f"squares found: {frames - len(wrong)}; blocks that are free: {free}")
    good = not wrong and free == BLOCKS and names < 200 * frames and not any(
        peer.process.exitcode for peer in (source, *workers))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
