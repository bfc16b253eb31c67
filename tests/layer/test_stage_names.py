"""Relevant operations carry the name of their pipeline stage, for profiles."""

import re

import jax
import jax.numpy as jnp
import pytest

from jax_moe_lb import Topology
from jax_moe_lb.layer.systems import system_named
from tests.layer_cases import Case, make_mesh, sharded_moe, with_gradients

STAGES = {"route", "count", "plan", "address", "replicate", "dispatch", "experts", "combine"}
AGAIN = {"replicate", "dispatch", "experts", "combine"}
"""Stages of the backward pass, without routing and planning."""


def operations(system: str) -> list[tuple[str, list[str]]]:
    """Return the operations of a layer and its gradients, each with its scopes."""
    mesh, case = make_mesh((8,), ("expert",)), Case()
    run = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system_named(system)))
    kernel, experts = jax.eval_shape(lambda: case.params(jnp.float32))
    x = jax.ShapeDtypeStruct((8 * case.num_tokens, case.width), jnp.float32)
    text = run.lower(x, jax.ShapeDtypeStruct(x.shape[:1], bool), kernel, experts, x).as_text(debug_info=True)
    names = dict(re.findall(r'^(#loc\d+) = loc\("([^"]*)"', text, re.MULTILINE))
    found = re.findall(r"stablehlo\.(\w+).*loc\((#loc\d+)\)$", text, re.MULTILINE)
    # A region starts at the first line of its operation; the location is on the last.
    found += re.findall(r'"?stablehlo\.(all_\w+|collective_\w+).*?\}\) .*?loc\((#loc\d+)\)$', text, re.M | re.S)
    return [(kind, re.split(r"[/()]+", names.get(at, ""))) for kind, at in found]


@pytest.mark.thorough
@pytest.mark.parametrize("system", ["greedy", "feplb"])
def test_every_stage_has_its_name(system):
    found = operations(system)
    forward = {name for _, scopes in found if "backward" not in scopes for name in scopes}
    backward = {name for _, scopes in found if "backward" in scopes for name in scopes}
    assert forward >= STAGES
    assert backward & STAGES == AGAIN
    exchanges = [scopes for kind, scopes in found if kind.startswith(("all_gather", "all_to_all", "collective"))]
    assert len(exchanges) > 3
    assert all(STAGES & set(scopes) for scopes in exchanges), "an exchange belongs to no stage"
