"""Installations without a C++ compiler on the path are pure JAX; a compiler that fails stops the build."""

import os
import subprocess
import sys
import tomllib
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
    environment = kept | {"PATH": str(path)} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("environment", [{}, {"CXX": "g++ -pthread"}], ids=["no CXX", "CXX of Python's build"])
def test_without_a_compiler_nothing_is_compiled(tmp_path, environment):
    ran = configure(tmp_path / "build", tmp_path / "bin", **environment)
    assert ran.returncode == 0, ran.stderr
    words = " ".join(ran.stderr.split())
    assert "No C++ compiler on PATH: installing jax_moe_lb in pure JAX" in words
    assert "apt install g++" in words
    install = [CMAKE, "--install", tmp_path / "build", "--prefix", tmp_path / "out"]
    installed = subprocess.run(install, capture_output=True, text=True)
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
    assert "installing jax_moe_lb in pure JAX" not in ran.stderr
    if how != "required":
        assert len(ran.stderr.splitlines()) < 20
        assert ran.stderr.rstrip().endswith("\n    pip install . -C wheel.cmake=false")


def test_a_failed_build_ends_with_the_remedy():
    """Of all failures, such as of a compilation; scikit-build-core prints this text last."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert settings["messages"]["after-failure"].endswith(": pip install . -C wheel.cmake=false\n")


@pytest.fixture
def compiler(tmp_path):
    """Return the system's compiler under the only name of a compiler in a folder."""
    path = tmp_path / "bin" / "clang++"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]} exec c++ "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_a_compiler_other_than_that_of_pythons_build_is_used(tmp_path, compiler):
    configure(tmp_path / "build", compiler.parent, CXX="absent-g++ -pthread")
    assert f"CMAKE_CXX_COMPILER:FILEPATH={compiler}\n" in (tmp_path / "build/CMakeCache.txt").read_text()


@pytest.mark.slow
def test_gpu_handlers_are_built_only_on_a_machine_with_a_gpu(tmp_path, compiler):
    """If a toolkit is installed, too; the line names the option for a build for other machines."""
    folders = {"nanobind": ("nanobind", "--cmake_dir"), "pybind11": ("pybind11", "--cmakedir")}
    options = [f"-D{name}_DIR={output_of(sys.executable, '-m', *words)}" for name, words in folders.items()]
    ran = configure(tmp_path / "build", compiler.parent, *options)
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("-- jax_moe_lb: custom calls for CPUs")]
    gpus = [*Path("/dev").glob("nvidia*"), *Path("/dev").glob("dxg")]
    assert ("this machine has no NVIDIA GPU" in line) == (not gpus)
    assert "-C cmake.define.JAX_MOE_LB_CUDA=" in line


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
