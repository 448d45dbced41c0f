#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A tensor of PyTorch in another process's memory: no byte is copied, as its address shows.

The owner registers a frame. The consumer, another process, makes a tensor of a lease by DLPack: it begins at the
address where the owner's file is mapped, and what it computes in place is there for the owner. A lease for reading is
refused by a PyTorch that DLPack cannot tell what is read-only.

Needs PyTorch (python3-torch is enough) and a broker ($SHMBROKER_SOCKET). Ends with 1 when anything is not so.
"""

import multiprocessing
import os

import shmbroker

SHAPE = (3, 1080, 1920)
PIXEL = (1, 540, 960)


def inode_at(address):
    """Of the file that is mapped there."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            place, _, _, _, inode = line.split()[:5]
            begin, end = (int(part, 16) for part in place.split("-"))
            if begin <= address < end:
                return int(inode)
    return 0


class Asked:
    """Gives its lease on, and keeps what the consumer said of itself."""

    def __init__(self, lease):
        self.lease, self.how = lease, {}

    def __dlpack__(self, **how):
        self.how = how
        return self.lease.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.lease.__dlpack_device__()


def consumer(name, inode):
    """Doubles every element where it is."""
    import torch  # pylint: disable=import-outside-toplevel

    with shmbroker.connect() as broker:
        lease = broker.get_memory_info(name, write=True)
        tensor = torch.from_dlpack(lease.view(SHAPE, "float32"))
        print(f"consumer {os.getpid()}: torch {torch.__version__}, {tuple(tensor.shape)} of {tensor.dtype}")
        print(f"consumer: the tensor is at {tensor.data_ptr():#x}, the lease at {lease.address:#x}, in the file {inode_at(lease.address)}")
        good = tensor.data_ptr() == lease.address and inode_at(tensor.data_ptr()) == inode
        good = good and tensor[PIXEL].item() == 21 and tensor.is_contiguous()
        tensor.mul_(2)
        # the memory stays as long as the tensor, whatever else is given back
        good = good and not lease.release() and tensor[PIXEL].item() == 42
        del tensor
        good = good and lease.released

        with broker.get_memory_info(name) as lease:
            asked = Asked(lease.view(SHAPE, "float32"))
            try:
                torch.from_dlpack(asked)
                refused = False
                print("consumer: this PyTorch is told that the memory is read-only")
            except BufferError as error:
                refused = True
                print(f"consumer: a lease for reading is refused: {error}")
            good = good and (refused or bool(asked.how.get("max_version")))
    raise SystemExit(0 if good else 1)


def main():
    name = f"example/tensor-{os.getpid()}"
    with shmbroker.connect() as broker, broker.create(name, SHAPE, "float32") as region:
        channel, row, column = PIXEL
        at = (channel * SHAPE[1] + row) * SHAPE[2] + column
        with memoryview(region).cast("B").cast("f") as pixels:
            pixels[at] = 21
        inode = os.fstat(region.fd).st_ino
        print(f"owner {os.getpid()}: {region.nbytes} bytes at {region.address:#x}, in the file {inode}")
        process = multiprocessing.get_context("spawn").Process(target=consumer, args=(name, inode))
        process.start()
        process.join()
        with memoryview(region).cast("B").cast("f") as pixels:
            doubled = pixels[at]
        print(f"owner: the pixel was 21 and is {doubled:g}")
    return 0 if process.exitcode == 0 and doubled == 42 else 1


if __name__ == "__main__":
    raise SystemExit(main())
