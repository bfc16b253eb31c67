"""The Flax layer with expert domains equals its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import Topology, plain
from jax_moe_lb.nn import GradientResidual, keep_residuals
from jax_moe_lb.nn.sharding import logical_axis_rules
from jax_moe_lb.transport import Codec, CodecBase, ExpertDomains, GatherExpertDomain, hybrid_mesh
from tests.layer_cases import assert_close, expert_domains, make_layer, make_mesh
from tests.marks import parametrize


def migrating(mesh, domains, codec, sizes=(8, 4, 12), **options):
    return make_layer(mesh, plain().replace(migrate=GatherExpertDomain(domains, codec)), sizes, **options)


@pytest.mark.parametrize(
    ("codec", "data_axis", "tensor_axis"),
    [(Codec(8.0), None, "other"), (Codec(8.0), "other", None), (Codec(gradient_ratio=8.0), "other", None)],
)
def test_a_codec_with_states_of_whole_experts_is_refused_beside_their_shards(codec, data_axis, tensor_axis):
    base = make_mesh((2, 4), ("other", "expert"))
    topology = Topology.from_mesh(base, tensor_axes=tensor_axis or ())
    mesh = hybrid_mesh(base, {"expert": 2})
    domains = ExpertDomains.from_mesh(mesh, topology)
    usual = logical_axis_rules(domains.between, GatherExpertDomain(domains, codec))
    rules = tuple((name, data_axis if name == "embed" else axes) for name, axes in usual)
    with pytest.raises(ValueError, match=r"system.migrate.codec is Codec\(.*; expected Codec\(\), as axes .'other'"):
        migrating(mesh, domains, codec, (16, 8, 24), rules=rules)


@pytest.mark.thorough
def test_a_codec_that_remembers_begins_exact_and_catches_up():
    mesh, domains = expert_domains(make_mesh((4,), ("expert",)), {"expert": 2})
    exact, encoded = (migrating(mesh, domains, one, (16, 8, 24)) for one in (Codec(), Codec(8.0, gradient_ratio=1.0)))
    x = jax.random.normal(jax.random.key(1), (64, 16))

    @nnx.jit
    def run(layer):
        gradient = nnx.grad(lambda layer: jnp.square(layer(x)[0]).mean())
        return layer(x)[0], gradient(layer)

    assert_close(run(encoded), run(exact), 1e-6)
    for model in (exact, encoded):
        model.up[...] = jnp.roll(model.up[...], 1, 0)
    want = run(exact)[0]
    errors = [float(jnp.abs(run(encoded)[0] - want).max()) for _ in range(8)]
    assert errors[0] > 100 * errors[-1]
    assert_close(run(encoded)[0], want, 1e-6)
    encoded.down[...] = exact.down[...] = 2 * exact.down[...]
    assert float(jnp.abs(run(encoded)[0] - run(exact)[0]).max()) > 0.1
    encoded.reset_codec()
    assert_close(run(encoded)[0], run(exact)[0], 1e-6)
    assert [weights.sharding.spec for weights in encoded.known] == [encoded.up.sharding.spec] * 3


def test_the_topology_of_another_mesh_is_refused():
    base = make_mesh((4,), ("expert",))
    mesh, domains = expert_domains(base, {"expert": 2})
    with pytest.raises(ValueError, match=r"topology differs from system.migrate.domains.between"):
        migrating(mesh, domains, Codec(2.0), topology=Topology.from_mesh(base))
    with pytest.raises(ValueError, match="num_experts is 6; expected a positive multiple of the 4 ranks"):
        migrating(mesh, domains, Codec(2.0), (8, 6, 4))


@pytest.mark.slow
@parametrize("remat", [False], [True])
def test_gradients_of_a_layer_and_its_residuals_sum_to_the_exact_ones(remat):
    """With a data axis, whose sum comes first, so that its groups have one residual."""
    mesh, domains = expert_domains(make_mesh((2, 2), ("data", "expert")), {"expert": 2})
    exact, encoded = (migrating(mesh, domains, one) for one in (Codec(), Codec(gradient_ratio=8.0)))
    x = jax.random.normal(jax.random.key(1), (64, 8))

    @nnx.jit
    def step(layer):
        def loss(layer):
            apply = nnx.remat(lambda layer, x: layer(x)) if remat else lambda layer, x: layer(x)
            return jnp.square(apply(layer, x)[0]).mean()

        variables = nnx.DiffState(0, nnx.Any(nnx.Param, GradientResidual))
        return keep_residuals(layer, nnx.grad(loss, argnums=variables)(layer))

    want, steps = step(exact), [step(encoded) for _ in range(3)]
    assert [left.shape for left in encoded.residual] == [(8, 8, 12), (8, 12, 8), (8, 8, 12)]
    assert encoded.residual[0].sharding.spec == encoded.up.sharding.spec
    # Parameters stay, so the exact gradients do, too.
    for name, left in zip(("up", "down", "gate"), encoded.residual, strict=True):
        total = sum(np.asarray(gradients[name][...]) for gradients in steps)
        rest = np.asarray(left[...])
        assert np.any(rest)
        np.testing.assert_allclose(total + rest[:4] + rest[4:], 3 * np.asarray(want[name][...]), atol=1e-6)
    np.testing.assert_allclose(steps[0]["kernel"][...], want["kernel"][...], atol=1e-6)
    encoded.reset_codec()
    assert not any(np.any(left[...]) for left in encoded.residual)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Codec(gradient_ratio=8.0), Codec(8.0, CodecBase.REMEMBERED, gradient_ratio=8.0)])
def test_a_gradient_without_its_residual_is_refused(codec):
    """It would lose the entries not sent; gradients of other arguments do not need it."""
    mesh, domains = expert_domains(make_mesh((2,), ("expert",)), {"expert": 2})
    layer = migrating(mesh, domains, codec)
    x = jnp.ones((4, 8))

    def shapes(variables, transform=lambda call: call):
        graph, of, rest = nnx.split(layer, variables, ...)

        def loss(of, x):
            apply = transform(lambda x: nnx.merge(graph, of, rest, copy=True)(x)[0].sum())
            return apply(x)

        return jax.eval_shape(jax.grad(loss), of, x)

    for transform in (lambda call: call, jax.checkpoint, jax.jit):
        with pytest.raises(
            ValueError, match=r"gradient_ratio is 8\.0; expected gradients with respect to the residual"
        ):
            shapes(nnx.Param, transform)
        assert shapes(nnx.Any(nnx.Param, GradientResidual), transform)
    assert shapes(nnx.PathContains("kernel"))


def test_a_base_without_differences_warns():
    _, domains = expert_domains(make_mesh((2,), ("expert",)), {"expert": 2})
    with pytest.warns(UserWarning, match=r"codec.base is CodecBase.ZERO without effect; expected a ratio above 1"):
        GatherExpertDomain(domains, Codec(base=CodecBase.ZERO))
