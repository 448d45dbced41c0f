#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A server of asyncio that multiplies matrices which it is told the names of, and three clients of it.

A client registers a region, puts matrices into it, and asks with a line of JSON which says where one is. The server
computes on the memory itself, under a lease, into a block of its own pool, and gives the block; the client takes it before
it asks again. When all blocks are out the server's coroutines wait for one; what a client had is back when it goes, also
when it crashes.

Needs NumPy and a broker ($SHMBROKER_SOCKET). Ends with 1 when a client got another answer than it should.
"""

import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import signal
import socket
import tempfile

import numpy

import shmbroker

SIDE = 64
BLOCKS = 2
CLIENTS = 3
REQUESTS = 50
WEIGHTS = numpy.arange(SIDE * SIDE, dtype="float32").reshape(SIDE, SIDE) % 7


class Server:
    """What it has for all connections."""

    def __init__(self, broker, pool):
        self.broker, self.pool = broker, pool
        self.answered = self.refused = 0

    @staticmethod
    def multiply(lease, shape, block):
        """On a thread; the arrays are gone when it returns."""
        numpy.matmul(lease.numpy(shape, "float32"), WEIGHTS, out=block.numpy(shape, "float32"))

    async def answer(self, request):
        """The block that has the product, and what the client needs to take it."""
        shape = [int(side) for side in request["shape"]]
        if len(shape) != 2 or shape[1] != SIDE or not 0 < shape[0] <= SIDE:
            raise ValueError(f"the server multiplies matrices of up to {SIDE} rows of {SIDE}")
        nbytes = 4 * math.prod(shape)
        with await self.broker.aio.get_memory_info(request["region"], request["offset"], nbytes) as lease:
            with await self.broker.aio.acquire(self.pool) as block:
                await asyncio.to_thread(self.multiply, lease, shape, block)
                offset, generation = block.give()
        self.answered += 1
        return block, {"region": self.pool.name, "offset": offset, "generation": generation}

    @staticmethod
    def take_back(block):
        """What a client has not taken; what it took is not the server's any more."""
        if block:
            with contextlib.suppress(shmbroker.Stale):
                block.release()

    async def serve(self, reader, writer):
        """One client, until it goes."""
        given = None
        try:
            async for line in reader:
                self.take_back(given)
                given = None
                try:
                    given, reply = await self.answer(json.loads(line))
                except shmbroker.Error as error:
                    self.refused += 1
                    reply = {"error": error.name, "text": str(error)}
                except (KeyError, TypeError, ValueError) as error:
                    self.refused += 1
                    reply = {"error": "INVALID", "text": str(error)}
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        finally:
            self.take_back(given)
            writer.close()


async def run_server(path, ready):
    """Until SIGTERM."""
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    with shmbroker.connect() as broker:
        with broker.create_pool(f"example/answers-{os.getpid()}", BLOCKS, 4 * SIDE * SIDE) as pool:
            server = Server(broker, pool)
            listening = await asyncio.start_unix_server(server.serve, path)
            ready.send("ready")
            async with listening:
                await end.wait()
            print(f"server: {server.answered} answered, {server.refused} refused, {pool.free_count} of {BLOCKS} blocks free",
                  flush=True)
            if pool.free_count != BLOCKS:
                raise SystemExit(1)


def server_process(path, ready):
    asyncio.run(run_server(path, ready))


def client_process(path, number):
    """Asks for products of matrices of a region of its own, and for what cannot be."""
    with shmbroker.connect() as broker, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw", encoding="utf-8") as lines:

            def ask(**request):
                lines.write(json.dumps(request) + "\n")
                lines.flush()
                return json.loads(lines.readline())

            name = f"example/matrices-{os.getpid()}"
            with broker.create(name, (REQUESTS, SIDE, SIDE), "float32") as region:
                matrices = region.numpy()
                matrices[...] = numpy.random.default_rng(number).integers(0, 10, matrices.shape)
                pool = None
                for i, matrix in enumerate(matrices):
                    reply = ask(region=name, offset=i * matrix.nbytes, shape=matrix.shape)
                    pool = pool or broker.open_pool(reply["region"])
                    with pool.take(reply["offset"], reply["generation"]) as block:
                        # numbers this small are exact in any order
                        if not (block.numpy(matrix.shape, "float32") == matrix @ WEIGHTS).all():
                            raise SystemExit(f"client {number}: answer {i} is wrong")
                refusals = [ask(region=name + "/no", offset=0, shape=(1, SIDE)),
                            ask(region=name, offset=region.nbytes, shape=(1, SIDE)), ask(region=name)]
                pool.close()
    got = [refusal["error"] for refusal in refusals]
    print(f"client {number}: {REQUESTS} answers were right; refused as they should be: {', '.join(got)}", flush=True)
    if got != ["NOT_FOUND", "OUT_OF_BOUNDS", "INVALID"]:
        raise SystemExit(1)


def main():
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "socket")
        ready, theirs = context.Pipe()
        server = context.Process(target=server_process, args=(path, theirs), daemon=True)
        server.start()
        theirs.close()
        ready.recv()
        clients = [context.Process(target=client_process, args=(path, number)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        server.terminate()
        server.join()
    return 1 if any(process.exitcode for process in (server, *clients)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
