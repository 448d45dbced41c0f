# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel in a checkout: the library's sources go into the extension, which needs no library then."""

import atexit
import pathlib
import shutil
import tempfile

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).resolve().parent
LIBRARY = [path for place in ("client", "wire") for path in sorted((HERE.parent / place).glob("*.c"))
           if not path.stem.endswith("-fallback")]


class AbiWheel(bdist_wheel):
    """One wheel for every CPython from 3.11 on."""

    def finalize_options(self):
        self.py_limited_api = "cp311"
        super().finalize_options()


class BuildWithLibrary(build_ext):
    """Adds sources from beside this directory, which may not be named in setup()."""

    def build_extension(self, ext):
        ext.sources += [str(path) for path in LIBRARY]
        super().build_extension(ext)


if not LIBRARY:
    raise SystemExit("the library's sources are not beside this directory: build in a checkout of shmbroker")
# nothing is left in the checkout
scratch = tempfile.mkdtemp(prefix="shmbroker-wheel")
atexit.register(shutil.rmtree, scratch, ignore_errors=True)

setup(
    packages=["shmbroker", "shmbroker.triton"],
    package_data={"shmbroker": ["*.pyi", "py.typed"]},
    ext_modules=[Extension(
        "shmbroker._shmbroker",
        sources=sorted(path.name for path in HERE.glob("*.c")),
        include_dirs=[str(HERE.parent), str(HERE.parent / "wire"), str(HERE.parent / "client")],
        define_macros=[("_GNU_SOURCE", None), ("Py_LIMITED_API", "0x030B0000")],
        extra_compile_args=["-std=gnu11", "-fvisibility=hidden", "-pthread"],
        extra_link_args=["-pthread", "-Wl,-Bsymbolic"],
        py_limited_api=True,
    )],
    options={"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}},
    cmdclass={"bdist_wheel": AbiWheel, "build_ext": BuildWithLibrary},
)
