# SPDX-License-Identifier: Apache-2.0
"""Denies system calls, as a container's profile does: a seccomp filter, put on a process before its program starts."""

import ctypes
import os
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # classic BPF: ld [k]; jeq #k; ret #k
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
# offsets in struct seccomp_data; the low half of an argument comes first
NUMBER, ARGUMENTS = 0, 16
COMMON = {"io_uring_setup": 425, "pidfd_open": 434}
CALLS = {
    "x86_64": {**COMMON, "bind": 49, "getsockopt": 55, "setsockopt": 54, "membarrier": 324},
    "aarch64": {**COMMON, "bind": 200, "getsockopt": 209, "setsockopt": 208, "membarrier": 283},
}[os.uname().machine]
OPTION = 2  # which argument of getsockopt and setsockopt names the option
SO_PEERPIDFD, SO_PASSRIGHTS = 77, 83


def program(denied):
    """The filter: @denied has (call, errno) or (call, errno, argument, value)."""
    code = []
    for name, number, *argument in denied:
        code.append((LOAD, 0, 0, NUMBER))
        # how far it is to the next rule
        code.append((EQUAL, 0, 3 if argument else 1, CALLS[name]))
        if argument:
            code.append((LOAD, 0, 0, ARGUMENTS + 8 * argument[0]))
            code.append((EQUAL, 0, 1, argument[1]))
        code.append((RETURN, 0, 0, ERRNO | number))
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *line) for line in code), len(code)


def deny(*denied):
    """Denies calls to this thread and what it starts, for good."""
    code, count = program(denied)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", count, ctypes.addressof(buffer)))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)):
        if LIBC.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")
