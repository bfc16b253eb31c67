"""A serialized layer gives the same outputs, gradients and statistics in another process."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import HostCallback, System, greedy
from jax_moe_lb.core import prepare_export
from tests.layer_cases import make_layer, make_mesh

LOAD = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax_moe_lb import use_virtual_cpu_devices
from jax_moe_lb.core import prepare_export, raise_on_fault

use_virtual_cpu_devices(4)
prepare_export()
folder = sys.argv[1]
program = jax.export.deserialize(bytearray(open(f"{folder}/layer.bin", "rb").read()))
mesh = jax.make_mesh((4,), ("expert",))
args = jax.device_put(dict(np.load(f"{folder}/args.npz")), NamedSharding(mesh, PartitionSpec()))
weights = {name: args[name] for name in args if name != "x"}
gradients, (y, stats) = jax.jit(program.call)(weights, args["x"])
raise_on_fault(stats)
np.savez(f"{folder}/out.npz", y=y, counts=stats.counts, **gradients)
"""


@pytest.mark.thorough
def test_in_a_fresh_process(tmp_path):
    graph, state = nnx.split(make_layer(make_mesh((4,), ("expert",)), greedy(1)))
    weights, x = dict(nnx.to_pure_dict(state)), jax.random.normal(jax.random.key(0), (16, 8))

    @jax.jit
    def step(weights, x):
        def loss(weights):
            y, stats = nnx.merge(graph, nnx.State(weights))(x)
            return (y**2).sum(), (y, stats)

        return jax.grad(loss, has_aux=True)(weights)

    exported = jax.export.export(step, disabled_checks=prepare_export())(weights, x)
    (tmp_path / "layer.bin").write_bytes(exported.serialize())
    np.savez(tmp_path / "args.npz", x=x, **weights)
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], check=True, timeout=100)
    gradients, (y, stats) = step(weights, x)
    found = np.load(tmp_path / "out.npz")
    np.testing.assert_array_equal(found["counts"], stats.counts)
    for name, want in {"y": y, **gradients}.items():
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_host_callback_is_refused():
    system = System(HostCallback(lambda counts, plan, topology: plan), replica_slots=1)
    layer = make_layer(make_mesh((4,), ("expert",)), system)
    exported = jax.export.export(jax.jit(lambda x: layer(x)), disabled_checks=prepare_export())
    with pytest.raises((ValueError, NotImplementedError), match=r"HostCallback|callback"):
        exported(jnp.ones((16, 8))).serialize()
