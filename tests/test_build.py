"""Installations without a C++ compiler are pure JAX; a compiler that fails stops the build."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CMAKE = Path(sys.executable).with_name("cmake")

pytestmark = pytest.mark.skipif(not CMAKE.exists(), reason="cmake of the build tools is not installed")


def configure(build, path, *options, **environment):
    """Run the configuration of an installation with only the programs of one folder on the path."""
    path.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    command = [CMAKE, "-S", ROOT, "-B", build, "-G", "Ninja", "-DSKBUILD=2", "-DPython_EXECUTABLE=" + sys.executable]
    command += [f"-DCMAKE_MAKE_PROGRAM={CMAKE.with_name('ninja')}", *options]
    # CMake also searches /usr/bin, so confine every find_program to the path.
    command += ["-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", "-DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=ON"]
    environment = kept | {"PATH": str(path)} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("environment", [{}, {"CXX": "g++ -pthread"}], ids=["no CXX", "CXX of Python's build"])
def test_without_a_compiler_nothing_is_compiled(tmp_path, environment):
    ran = configure(tmp_path / "build", tmp_path / "bin", **environment)
    assert ran.returncode == 0, ran.stderr
    words = " ".join(ran.stderr.split())
    assert "No C++ compiler: installing jax_moe_lb in pure JAX" in words
    assert "apt install g++" in words
    installed = subprocess.run(
        [CMAKE, "--install", tmp_path / "build", "--prefix", tmp_path / "out"], capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr
    assert not list(tmp_path.glob("out/**/*.so"))


@pytest.mark.parametrize("how", ["on the path", "CXX", "required"])
def test_a_compiler_that_fails_stops_the_build(tmp_path, how):
    broken = tmp_path / "bin" / "c++"
    broken.parent.mkdir()
    if how != "required":
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
    options = ("-DJAX_MOE_LB_NATIVE=ON",) if how == "required" else ()
    environment = {"CXX": str(broken)} if how == "CXX" else {}
    ran = configure(tmp_path / "build", broken.parent, *options, **environment)
    assert ran.returncode != 0
    assert "pure JAX" not in ran.stderr
