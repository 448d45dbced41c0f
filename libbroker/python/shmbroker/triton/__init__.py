# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for the shared memory helpers of Triton's Python client: a program changes one import line.

    import shmbroker.triton.shared_memory as shm            # was: tritonclient.utils.shared_memory
    import shmbroker.triton.cuda_shared_memory as cudashm   # was: tritonclient.utils.cuda_shared_memory

Names, signatures, results and exceptions are those of tritonclient 2.73; it is not needed, NumPy is. The memory is a
region of the broker, which knows whose it is and who uses it, and is given back with the process that made it.

A key of system memory, with or without a leading slash, is the region "shm:KEY"; the key "shmbroker.NAME" is the region
NAME, whoever has made that. What processes make and attach to by the same key is one region. It is for this user alone,
as the mode 0600 of the original has it, unless configure() or $SHMBROKER_TRITON_ALLOWED_UIDS says who else may use it: a
gateway that runs as another user must be among them.

What a region is made of is the process's choice, by configure() or $SHMBROKER_TRITON_BACKING:

"memfd", the default: sealed memory without a name in the file system. Nobody can truncate it, any broker accepts it, it
needs no room in /dev/shm, and nothing is left of it when its maker is killed. Whoever asks the broker finds it: this module,
libshmbroker, and shmbroker-gateway, where register_system_shared_memory() of a client takes its key. A server that opens
/dev/shm/KEY by itself does not.

"posix": an object /dev/shm/KEY of mode 0600, as the original makes it, for servers that open keys by themselves. It can be
truncated, so that the broker must be told to accept it (unsealed = accept, or unsealed_users, in its configuration). It is
removed with the last handle of the process that made it, and at that process's end, but it stays when that is killed. An
object that somebody else has made is attached to and never removed.
"""

from ._session import configure

__all__ = ["configure"]
