# SPDX-License-Identifier: Apache-2.0
"""Test programs in C: those of the build directory, or, where it has none, built here from the library's sources."""

import functools
import pathlib
import subprocess
import tempfile

from broker import BUILD

TOP = pathlib.Path(__file__).resolve().parents[2]


@functools.cache
def build_place():
    """Kept until the tests end, and open to every uid."""
    place = tempfile.TemporaryDirectory(prefix="shmb")
    pathlib.Path(place.name).chmod(0o755)
    return place


@functools.cache
def program(name):
    """The path of tests/system/NAME."""
    built = BUILD / "tests/system" / name
    if built.exists():
        return built
    built = pathlib.Path(build_place().name) / name
    library = (path for place in ("client", "wire") for path in (TOP / "libbroker" / place).glob("*.c"))
    sources = [TOP / f"tests/system/{name}.c", *(path for path in library if not path.stem.endswith("-fallback"))]
    subprocess.run(["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", f"-I{TOP / 'libbroker'}",
                    f"-I{TOP / 'libbroker/client'}", "-o", built, *sources], check=True)
    return built
