"""A layer imports no tools, and a missing extra is one line with its remedy."""

import subprocess
import sys

import pytest

from jax_moe_lb import cli
from jax_moe_lb.contrib import LPLB
from jax_moe_lb.core import extras

MOST_LINES = 15_500
"""Limit of the lines of this package that a layer imports."""

IMPORTED = """
import sys
import flax.nnx  # flax itself imports rich and yaml
before = set(sys.modules)
from jax_moe_lb import MoE
modules = {name: value for name, value in sys.modules.items() if name.startswith("jax_moe_lb.")}
print({"pydantic", "scipy", "typer", "yaml"} & (set(sys.modules) - before))
print({name.split(".")[1] for name in modules} & {TOOLS})
print(sum(len(open(value.__file__, "rb").readlines()) for value in modules.values() if value.__file__[-3:] == ".py"))
import jax_moe_lb
jax_moe_lb.balance
print({"tunix", "maxtext", "easydel"} & set(sys.modules))
"""

COMPILED = """
import jax
import optax
from flax import nnx
from jax_moe_lb import ExpertConfig, MoE, TopK, use_virtual_cpu_devices
use_virtual_cpu_devices(2)
experts = ExpertConfig(hidden_dim=8)
mesh = jax.make_mesh((2,), ("expert",))
jax.set_mesh(mesh)
layer = MoE(8, 2, TopK(1), mesh=mesh, experts=experts, rngs=nnx.Rngs(0))
graph, state = nnx.split((layer, nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)))

@jax.jit
def step(state, x):
    layer, optimizer = nnx.merge(graph, state)
    optimizer.update(layer, nnx.grad(lambda layer: layer(x)[0].mean())(layer))
    return nnx.state((layer, optimizer))

for seed in range(3):
    state = step(state, jax.random.normal(jax.random.key(seed), (2, 4, 8)))
print(step._cache_size())
"""

TOOLS = {"advise", "aot", "cli", "contrib", "integrations", "sim"}


@pytest.mark.slow
def test_a_layer_imports_neither_tools_nor_their_packages():
    program = IMPORTED.replace("{TOOLS}", repr(TOOLS))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    packages, tools, lines, adopters = ran.stdout.splitlines()
    assert packages == tools == adopters == "set()"
    assert int(lines) < MOST_LINES


@pytest.mark.slow
def test_the_first_training_step_of_a_process_is_compiled_once():
    """Neither an import during the first trace nor the first update changes the key of the program."""
    ran = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=True)
    assert ran.stdout == "1\n"


def test_without_the_extra_each_tool_names_the_command(monkeypatch, capsys):
    remedy = "absent is not installed; run pip install 'jax_moe_lb[tools]'"
    monkeypatch.setattr(extras, "TOOLS", ("absent",))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == f"error: {remedy}\n"
    with pytest.raises(ModuleNotFoundError) as refused:
        LPLB()
    assert str(refused.value) == remedy


def test_the_simulator_without_the_extra_names_the_command():
    hidden = "import sys; sys.modules['pydantic'] = None; import jax_moe_lb.sim"
    ran = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    line = "ModuleNotFoundError: pydantic is not installed; run pip install 'jax_moe_lb[tools]'"
    assert ran.stderr.splitlines()[-1] == line
