"""The package without its extension modules: a copy of its Python files, in a separate process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.thorough

BINARIES = ("jax_moe_lb._ffi", "jax_moe_lb._ffi_cuda", "jax_moe_lb._planning")
RANKS, WIDTH = 4, 8


def greedy_layer():
    """Return outputs, token gradients, and statistics of a small layer with skewed routing."""
    import jax
    from flax import nnx

    from jax_moe_lb import ExpertConfig, MoE, TopK, Topology, greedy

    devices = jax.devices()[:RANKS]
    mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    options = {"mesh": mesh, "topology": Topology.from_mesh(mesh), "system": greedy(2), "experts": ExpertConfig(16)}
    layer = MoE(WIDTH, 8, TopK(2), **options, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (RANKS, 32, WIDTH)) + 1

    def loss(layer, x):
        y, stats = layer(x)
        return (y**2).sum(), (y, stats)

    gradients, (y, stats) = nnx.jit(nnx.grad(loss, argnums=1, has_aux=True))(layer, x)
    integers = [leaf for leaf in jax.tree.leaves(stats) if leaf.dtype == np.int32]
    return {"y": y, "gradients": gradients, "imbalance": stats.imbalance_after, "rounds": stats.rounds}, integers


def main(copy: str, out: str) -> None:
    # The import hook of an editable installation precedes sys.path.
    sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
    sys.path.insert(0, copy)
    import jax_moe_lb
    from jax_moe_lb.cli import main as command_line

    assert Path(jax_moe_lb.__file__).is_relative_to(copy)
    jax_moe_lb.use_virtual_cpu_devices(8)
    floats, integers = greedy_layer()
    np.savez(out, **floats, **{f"integer{i}": leaf for i, leaf in enumerate(integers)})
    sys.exit(command_line(["doctor"]))


@pytest.fixture(scope="module")
def without_binaries(tmp_path_factory):
    """Return stdout and stderr of the process, and its arrays."""
    import jax_moe_lb

    copy, package = tmp_path_factory.mktemp("copy"), Path(jax_moe_lb.__file__).parent
    shutil.copytree(package, copy / "jax_moe_lb", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    command = [sys.executable, __file__, copy, copy / "out.npz"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=copy, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, ran.stderr, dict(np.load(copy / "out.npz"))


def test_a_greedy_layer_equals_the_one_with_binaries(without_binaries):
    from tests.layer_cases import assert_close

    floats, integers = greedy_layer()
    *_, found = without_binaries
    assert len(found) == len(floats) + len(integers)
    # Sums in another order differ in the last bits of their largest terms, so errors are relative to these.
    assert_close({name: found[name] for name in floats}, floats, 1e-6)
    for i, value in enumerate(integers):
        np.testing.assert_array_equal(found[f"integer{i}"], value)


def test_doctor_names_what_is_missing_and_how_to_get_it(without_binaries):
    printed, *_ = without_binaries
    for module in BINARIES:
        (line,) = [line for line in printed.splitlines() if line.split()[:1] == [module]]
        assert "missing" in line
        assert "pip install ." in line
    assert "custom call moe_lb_" not in printed
    assert "shadows" in printed


def test_the_first_layer_warns_once(without_binaries):
    _, stderr, _ = without_binaries
    assert stderr.count("jax_moe_lb was installed without extension modules and runs in plain JAX") == 1


if __name__ == "__main__":
    main(*sys.argv[1:])
