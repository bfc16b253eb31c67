"""Adapters equal merged weights, and frozen matrices have no gradient."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.architectures.config_json import Fields
from models.architectures.registry import configured
from models.config import BatchConfig, LoraConfig, ModelConfig, ParallelConfig, TrainConfig
from models.decoder.layers import adapted
from models.mesh import batch_sharding, make_mesh, make_system
from models.tiny_checkpoint import tiny_config
from models.training.step import make_programs
from tests.models.small import filled

NUM_LAYERS, RANK = 3, 2
WIDTHS = {"hidden_size": 96, "head_dim": 40, "intermediate_size": 160, "num_local_experts": 4}
MATRICES = {(96, 160), (96, 80), (160, 96)}
"""Shapes of the matrices of attention and experts."""


def programs_of(rank, parallel):
    """Return the programs of a small Mixtral, and its tokens."""
    fields = json.loads(tiny_config("mixtral")) | WIDTHS | {"num_hidden_layers": NUM_LAYERS}
    decoder, mesh = configured(Fields(json.dumps(fields))), make_mesh(parallel)
    config = TrainConfig(
        model=ModelConfig(checkpoint="tiny"),
        parallel=parallel,
        lora=LoraConfig(rank=rank),
        batch=BatchConfig(size=4, sequence_length=32),
        steps=10,
    )
    tokens = jax.ShapeDtypeStruct((4, 33), jnp.int32, sharding=batch_sharding(mesh))
    return make_programs(config, mesh, make_system(parallel), decoder), tokens


def products_like(jaxpr, shapes):
    """Return the shapes of matrix products in a program that are, transposed or not, among `shapes`."""
    found = [tuple(map(int, dims.split(","))) for dims in re.findall(r":f32\[([0-9,]+)\] = dot_general", str(jaxpr))]
    return [shape for shape in found if shape in shapes or shape[::-1] in shapes]


def equations(jaxpr):
    """Yield all equations of a program; a printed program has a part that is used twice only once."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            yield from equations(inner) if hasattr(inner, "eqns") else ()


def sums_of_groups(jaxpr):
    """Return the shapes of the matrices in the results of `grouped_outer`, in the first round and in further ones."""
    calls = [one for one in equations(jaxpr.jaxpr) if one.primitive.name == "ffi_call"]
    sums = [call for call in calls if call.params["target_name"].endswith("grouped_outer")]
    return [var.aval.shape[1:] for call in sums for var in call.outvars]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "num_products", "num_sums"), [(0, 4, 6), (RANK, 0, 0)])
def test_matrices_have_no_gradient_beside_adapters(rank, num_products, num_sums):
    programs, tokens = programs_of(rank, ParallelConfig(2, 2, "plain"))
    jaxpr = programs.step.trace(programs.state_shapes, tokens).jaxpr
    assert len(products_like(jaxpr, MATRICES)) == num_products
    sums = sums_of_groups(jaxpr)
    assert len(sums) == (12 if rank else 6)
    assert sum(shape in MATRICES for shape in sums) == num_sums


@pytest.mark.thorough
def test_no_gradients_of_all_layers_are_held():
    """The temporaries of a step with adapters are smaller by more than the frozen parameters."""
    compiled = []
    for rank in (0, RANK):
        programs, tokens = programs_of(rank, ParallelConfig(1, 1, "plain"))
        compiled.append(programs.step.trace(programs.state_shapes, tokens).lower().compile())
    frozen = NUM_LAYERS * 4 * sum(np.prod(shape) for shape in [*MATRICES, (96, 80), *[(96, 160)] * 12])
    full, low_rank = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    assert full - low_rank > frozen


@pytest.mark.slow
def test_adapters_equal_merged_weights():
    programs, _ = programs_of(RANK, ParallelConfig(1, 2, "plain", headroom=2.0, max_rounds=1))
    model = programs.model(filled(programs.state_shapes))
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    base, merged = dict(flat), dict(flat)
    for *inside, name in flat:
        matrix, a, b = ((*inside, f"{name}{suffix}") for suffix in ("", "_a", "_b"))
        if a in flat:
            whole = adapted(flat[matrix][...], flat[a][...], flat[b][...], model.adapter_scale)
            base[b] = merged[b] = flat[b].replace(jnp.zeros_like(flat[b][...]))
            merged[matrix] = flat[matrix].replace(whole)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 256)
    run = jax.jit(lambda state: nnx.merge(graph, state)(tokens)[0])
    start, got, want = (run(nnx.from_flat_state(list(given.items()))) for given in (base, flat, merged))
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    assert np.abs(got - start).max() > 1e-3
