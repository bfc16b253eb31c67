"""MaxText's block of experts (`maxtext` on PyPI) for comparison; importing this module requires MaxText.

MaxText depends on jaxlib builds of its `cuda12` and `tpu` extras. For its layers on a CPU this is enough: `pip install
--no-deps maxtext==0.2.5 tokamax qwix aqtp omegaconf antlr4-python3-runtime==4.9.3` and `pip install jinja2
pathwaysutils immutabledict xprof einshape transformers drjax`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import maxtext
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.layers.initializers import nd_dense_init
from maxtext.layers.moe import RoutedMoE

from jax_moe_lb import Experts
from jax_moe_lb.aot import LayerSizes

ON_TPUS = {"hardware": "tpu", "megablox": True, "use_ring_of_experts": True, "use_ragged_sort": True}
ON_TPUS |= {"dtype": "bfloat16", "weight_dtype": "bfloat16", "matmul_precision": "default"}
BOUNDED = {**ON_TPUS, "ragged_buffer_factor": 1.5}
RING = {
    "MaxText ring, worst-case buffer": ON_TPUS,
    "MaxText ring, buffer 1.5 (drops)": BOUNDED,
    "MaxText ring, buffer 1.5, fallback of a layer": {**BOUNDED, "moe_dropless_fallback": "layer"},
}
"""MaxText's ring of experts on TPUs. Its fallback of a step runs the second of these programs and, if that dropped
rows, the step again by the first.
"""


def maxtext_layer(sizes: LayerSizes, mesh: Mesh, options: dict[str, object]) -> Callable:
    """Return MaxText's `RoutedMoE` as `(x, kernel, experts) -> y` on global arrays."""
    config = maxtext_config(sizes, mesh.size, options)
    names = tuple(config.mesh_axes)
    shape = tuple(mesh.size if name == "expert" else 1 for name in names)
    theirs = Mesh(np.asarray(mesh.devices).reshape(shape), names)
    with jax.set_mesh(theirs), nnx.logical_axis_rules(config.logical_axis_rules):
        # Without arrays, as the devices may be absent; the layer replaces the parameters.
        init = nd_dense_init(1.0, "fan_in", "truncated_normal")
        given = config, sizes.experts, sizes.per_token, theirs, init, ("embed", None)
        types = {"weight_dtype": config.weight_dtype, "dtype": config.dtype}
        block = nnx.eval_shape(lambda: RoutedMoE(*given, nnx.Rngs(0), intermediate_dim=sizes.inner, **types))
    graph, parameters, rest = nnx.split(block, nnx.Param, ...)

    def layer(x: jax.Array, kernel: jax.Array, experts: Experts) -> jax.Array:
        # Merge inside, as Flax allows changing a variable only at the trace level of its creation.
        block = nnx.merge(graph, parameters, rest, copy=True)
        block.gate.kernel.set_value(kernel)
        for variable, array in ((block.wi_0, experts.gate), (block.wi_1, experts.up), (block.wo, experts.down)):
            variable.set_value(array)
        with nnx.logical_axis_rules(config.logical_axis_rules):
            y, *_ = block(x.reshape(mesh.size, sizes.tokens, sizes.hidden))
        return y.reshape(x.shape)

    return layer


def maxtext_config(sizes: LayerSizes, num_ranks: int, options: dict[str, object]) -> Any:
    """Return MaxText's configuration of a layer."""
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    return pyconfig.initialize(
        [None, str(base)],
        run_name="peers",
        enable_checkpointing=False,
        skip_jax_distributed_system=True,
        base_emb_dim=sizes.hidden,
        base_moe_mlp_dim=sizes.inner,
        base_mlp_dim=sizes.inner,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.per_token,
        max_target_length=sizes.tokens,
        per_device_batch_size=1,
        ici_expert_parallelism=num_ranks,
        ici_fsdp_parallelism=1,
        model_call_mode="train",
        **options,
    )
