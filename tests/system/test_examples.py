# SPDX-License-Identifier: Apache-2.0
"""The owner and the consumer of libshmbroker(3), as they are printed: extracted, compiled and run."""

import pathlib
import re
import shutil
import subprocess

from broker import ADMIN, BUILD, CONSUMER, DEADLINE, OWNER, become, until

TOP = pathlib.Path(__file__).resolve().parents[2]


def compile_examples(directory):
    page = (TOP / "libbroker/client/libshmbroker.3").read_text()
    texts = re.findall(r"^\.Bd -literal\n(.*?)^\.Ed", page, re.M | re.S)
    assert len(texts) == 2
    library = directory / "libshmbroker.so.0"
    shutil.copy((BUILD / ".libs/libshmbroker.so.0").resolve(), library)
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    flags = ["-fsanitize=address,undefined"] if "libasan" in needed else []
    programs = []
    for name, text in zip(("owner", "consumer"), texts):
        source = directory / f"{name}.c"
        # what roff would print
        source.write_text(text.replace("\\en", "\\n").replace("\\-", "-"))
        programs.append(directory / name)
        subprocess.run(["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", *flags, f"-I{TOP / 'libbroker'}", source, library,
                        f"-Wl,-rpath,{directory}", "-o", programs[-1]], check=True)
    return programs


def test_the_examples_of_the_manual_page_run_as_printed(broker):
    owner, consumer = compile_examples(broker.socket.parent)
    environment = {"SHMBROKER_SOCKET": str(broker.socket), "PATH": "/usr/bin:/bin"}
    holder = subprocess.Popen([owner], stdin=subprocess.PIPE, env=environment, preexec_fn=lambda: become(OWNER))
    try:
        admin = broker.peer(ADMIN)
        until(lambda: broker.region(admin, "greeting"), "the owner's region")
        done = subprocess.run([consumer], capture_output=True, text=True, env=environment, check=False,
                              preexec_fn=lambda: become(CONSUMER), timeout=DEADLINE)
        assert done.stdout == "hello\n", done
        assert done.returncode == 0
        holder.communicate(b"\n", timeout=DEADLINE)
        assert holder.returncode == 0
        until(lambda: not broker.region(admin, "greeting"), "the end of the region")
        admin.kill()
    finally:
        holder.kill()
        holder.wait()
