"""Options of a layer: validation and results."""

import jax
import jax.numpy as jnp
import pytest

from jax_moe_lb import (
    Buffers,
    ExpertConfig,
    Precision,
    SharedExpert,
    TopK,
    exact,
    plain,
)
from jax_moe_lb.routing import ForceBalanced, NoisyTopK, Router
from jax_moe_lb.transport import QuantizedTransfer
from tests.layer_cases import make_layer, make_mesh
from tests.marks import parametrize


def test_options_are_hashable_and_equal_in_any_form():
    assert hash(Precision("bfloat16")) == hash(Precision(jnp.bfloat16))
    assert Precision("bfloat16") == Precision(jnp.dtype("bfloat16"))
    assert len({ExpertConfig(4), ExpertConfig(4), SharedExpert(4), Buffers(), Buffers(1.05)}) == 3


def test_systems_keep_what_is_not_replaced():
    system = exact().replace(buffers=Buffers(2.0), transfer=QuantizedTransfer())
    assert (system.dispatch.buffers, system.dispatch.transfer) == (Buffers(2.0), QuantizedTransfer())
    assert system.replace(replica_slots=1, relocates=True).dispatch == system.dispatch
    assert system.replace() == system


@pytest.mark.slow
@parametrize("num_ranks, num_experts, slots", [(2, 2, 1)], [(4, 8, 2), (1, 4, 0)])
def test_the_default_system_balances_with_slots_that_fit(num_ranks, num_experts, slots):
    mesh = make_mesh((num_ranks,), ("expert",))
    layer = make_layer(mesh, "exact", (8, num_experts, 4))
    assert layer.system == exact(slots, dispatch="direct")
    # Given slots are limited in the same way.
    given = make_layer(mesh, exact(9), (8, num_experts, 4))
    assert given.system.replica_slots == num_experts - num_experts // num_ranks
    assert jax.eval_shape(layer, jnp.ones((8, 8)))[0].shape == (8, 8)


@pytest.mark.slow
def test_precision_sets_the_transfer_of_the_system():
    mesh = make_mesh((2,), ("expert",))
    narrow = make_layer(mesh, "exact", (128, 4, 4), precision=Precision(transfer_dtype=jnp.int8))
    assert narrow.system.dispatch.transfer == QuantizedTransfer(jnp.int8)
    own = plain().replace(transfer=QuantizedTransfer(block=64))
    assert make_layer(mesh, own, (128, 4, 4)).system.dispatch.transfer.block == 64


def test_wrapping_routers_take_the_options_of_the_wrapped():
    inner = TopK(2, selection_bias=True, capacity_factor=1.5)
    for router in (NoisyTopK(inner), ForceBalanced(inner)):
        assert (router.selection_bias, router.logit_bias, router.capacity_factor) == (True, False, 1.5)
        assert isinstance(router, Router)


@pytest.mark.slow
def test_a_function_is_a_router_with_the_default_options():
    mesh = make_mesh((2,), ("expert",))
    layer = make_layer(mesh, "exact", router=TopK(2).__call__)
    assert (layer.bias, layer.kernel_bias) == (None, None)
