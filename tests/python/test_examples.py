# SPDX-License-Identifier: Apache-2.0
"""The examples, as a user runs them."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "libbroker/python/examples"
PATIENCE = 300


def run(name, *args, python=sys.executable):
    done = subprocess.run([python, "-B", EXAMPLES / f"{name}.py", *args], capture_output=True, text=True,
                          timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def with_torch():
    """An interpreter that has PyTorch: Debian's is for its own one, not for a virtual environment."""
    for python in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(python) and not subprocess.run([python, "-c", "import torch, sys; sys.exit(sys.version_info < (3, 11))"],
                                                         capture_output=True, check=False).returncode:
            return python
    return None


def test_every_example_has_a_test():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


@pytest.mark.usefixtures("daemon")
def test_pipeline():
    printed = run("pipeline", "--frames", "20")
    assert "frames of each worker: 10 10" in printed and "squares found: 20; blocks that are free: 4" in printed


@pytest.mark.usefixtures("daemon")
def test_server():
    printed = run("server")
    assert printed.count("50 answers were right") == 3 and "150 answered, 9 refused, 2 of 2 blocks free" in printed


@pytest.mark.usefixtures("daemon")
def test_torch_consumer():
    python = with_torch()
    if not python:
        pytest.skip("no PyTorch: python3-torch")
    printed = run("torch_consumer", python=python)
    assert "the pixel was 21 and is 42" in printed


@pytest.mark.usefixtures("daemon")
def test_crash():
    printed = run("crash")
    assert "kill -9" in printed and "event: OWNER_DIED" in printed and "all 4 blocks are acquired again" in printed
    assert "still reads b'hello'" in printed and "is gone" in printed


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.py"))])
def test_without_a_broker(name, tmp_path):
    """It does not succeed, and shows nothing."""
    done = subprocess.run([sys.executable, "-B", EXAMPLES / f"{name}.py"], capture_output=True, text=True,
                          timeout=PATIENCE, check=False, env={**os.environ, "SHMBROKER_SOCKET": str(tmp_path / "none")})
    assert done.returncode == 1 and not done.stdout, done
