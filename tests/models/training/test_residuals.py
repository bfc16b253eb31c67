"""Microbatches pass the residuals of encoded gradients on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import plain
from jax_moe_lb.transport import Codec, GatherExpertDomain
from models.data.marks import num_predicted
from models.training.step import loss_and_gradients
from tests.layer_cases import expert_domains, make_layer, make_mesh
from tests.models.reference_loss import next_token_loss


class Model(nnx.Module):
    def __init__(self, mesh, system):
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(16, 8, rngs=rngs)
        self.moe = make_layer(mesh, system, (8, 4, 12), rngs=rngs)

    def __call__(self, tokens):
        y, stats = self.moe(self.table(tokens))
        return self.table.attend(y), jax.tree.map(lambda leaf: leaf[None], stats)


@pytest.mark.thorough
def test_gradients_of_microbatches_and_the_last_residual_sum_to_the_exact_ones():
    mesh, domains = expert_domains(make_mesh((2,), ("expert",)), {"expert": 2})
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 16, (8, 9)), "int32")

    def gradients(codec, accumulate):
        model = Model(mesh, plain().replace(migrate=GatherExpertDomain(domains, codec)))

        @nnx.jit
        def run(model):
            counts = num_predicted(tokens)
            return loss_and_gradients(model, nnx.Param, next_token_loss, tokens, counts, accumulate, mesh)[2]

        return run(model), model

    want, _ = gradients(Codec(), 1)
    got, model = gradients(Codec(gradient_ratio=8.0), 2)
    rest = np.asarray(model.moe.residual[0][...])
    assert np.any(rest)
    np.testing.assert_allclose(got["moe"]["up"][...] + rest[:4] + rest[4:], want["moe"]["up"][...], atol=1e-6)
    assert "residual" not in got["moe"]
