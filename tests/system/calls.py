# SPDX-License-Identifier: Apache-2.0
"""client-calls, a program in C that makes the library's calls as it is told."""

import os
import select
import subprocess

from broker import BUILD, become
from programs import program
from protocol_client import DEADLINE, ERROR_NAMES

DONE = "OK"


def name_of(result):
    """What a result of the library is called: OK, the name of a code, or a negative errno as it is."""
    return DONE if not result else ERROR_NAMES.get(result, result)


class Calls:
    """One process of client-calls, and its connection, under @uid."""

    def __init__(self, broker, uid):
        self.process = subprocess.Popen([program("client-calls"), broker.socket], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, bufsize=1, preexec_fn=lambda: become(uid),
                                        env={**os.environ, "LD_LIBRARY_PATH": str(BUILD / ".libs")})
        self.pid = self.process.pid
        assert self.answer() == ["0"], "it is connected"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()

    def tell(self, *words):
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()

    def answer(self):
        ready, _, _ = select.select([self.process.stdout], [], [], 2 * DEADLINE)
        assert ready, "no answer"
        return self.process.stdout.readline().split(maxsplit=1)

    def number(self, *words):
        self.tell(*words)
        return int(self.answer()[0])

    def call(self, *words):
        """The name of the call's result."""
        return name_of(self.number(*words))

    def key(self, name):
        self.tell("key", name)
        result, *key = self.answer()
        assert result == "0"
        return key[0].rstrip("\n") if key else ""

    def results(self, *words):
        """The name of the call's result when it is refused, else those of its parts."""
        self.tell(*words)
        result, *parts = self.answer()
        return name_of(int(result)) if result != "0" else [name_of(int(part)) for part in parts[0].split()]

    def end(self):
        """It ends in order."""
        self.process.communicate(timeout=2 * DEADLINE)
        assert self.process.returncode == 0
