"""Source of a run's model: a checkpoint to tune, or a published model with random parameters."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_moe_lb import Losses, TopK
from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import shown
from models.architectures.config_json import TRAINING_NOISE, Fields, read_fields
from models.architectures.published import PUBLISHED
from models.architectures.registry import configured
from models.config import COMPUTE_DTYPES, ModelConfig
from models.decoder.config import DecoderConfig
from models.decoder.rope import Rope
from models.decoder.sparse_mixer import SparseMixer
from models.settings import Given, layered

# Names of the published models by their command-line names in lower case.
PUBLISHED_NAMES = {name.lower(): name for name in PUBLISHED}
SIZES = ("num_layers", "embed_dim", "num_heads", "mlp_dim", "num_experts", "vocab_size")

# Keys by section for models without a checkpoint.
OF_PRESETS = {
    "model": (*SIZES, "experts_per_token"),
    "relocation": ("interval",),
}

# Default of `model.bias_rate` for random parameters with routing biases (DeepSeek-V3, section 4.2; GLM-4.5).
BIAS_RATE = 1e-3


@dataclass(frozen=True)
class Source:
    """Architecture of a run, and its parameters."""

    config: DecoderConfig  # sizes of the model
    folder: Path | None  # folder of the checkpoint; `None` for random parameters
    limits: FileLimits  # limits of the files of the checkpoint

    @property
    def stored_dtype(self) -> str:
        """Dtype of the tuned checkpoint: the source's, or float32 if it is not supported."""
        raw = Fields(self.config.source, self.limits).raw
        stored = raw.get("dtype", raw.get("torch_dtype"))
        return stored if stored in COMPUTE_DTYPES else "float32"

    @property
    def noise(self) -> list[str]:
        """A line for each field of dropout or noise in the `config.json`; training has neither."""
        raw = Fields(self.config.source, self.limits).raw
        given = ((name, raw.get(name)) for name in TRAINING_NOISE)
        return [f"config.json: {name} is {shown(value)}; training has none" for name, value in given if value]


def source_of(model: ModelConfig, limits: FileLimits = FileLimits()) -> Source | None:
    """Return the source of a model, `None` for a preset."""
    if model.checkpoint is None:
        return None
    options: dict[str, Any] = {"compute_dtype": model.compute_dtype, "param_dtype": model.param_dtype}
    name, folder = PUBLISHED_NAMES.get(model.checkpoint), Path(model.checkpoint)
    fields = read_fields(folder, limits) if name is None else Fields(json.dumps(PUBLISHED[name]))
    config = configured(fields, predict_further=model.further_weight > 0, **options)
    if isinstance(config.router, SparseMixer):
        raise ValueError("model_type is 'phimoe'; expected another one, as its training samples experts (SparseMixer)")
    if model.bias_rate and not config.router.selection_bias:
        raise ValueError(f"model.bias_rate is {model.bias_rate}; expected 0, as the model has no routing biases")
    losses = Losses(switch=model.aux_loss, z=model.z_loss)
    return Source(dataclasses.replace(config, losses=losses), folder if name is None else None, limits)


def preset_config(model: ModelConfig) -> DecoderConfig:
    """Return the decoder of a model without a checkpoint, which has the architecture of Mixtral."""
    head_dim = model.embed_dim // model.num_heads
    shared: dict[str, Any] = {key: getattr(model, key) for key in (*SIZES, "compute_dtype", "param_dtype")}
    return DecoderConfig(
        **shared,
        num_kv_heads=model.num_heads,
        head_dim=head_dim,
        router=TopK(model.experts_per_token, selection_bias=model.bias_rate > 0),
        norm_eps=1e-6,
        rope=Rope(head_dim),
        attention_scale=head_dim**-0.5,
        source=json.dumps({"model_type": "mixtral"}),
        losses=Losses(switch=model.aux_loss, z=model.z_loss),
    )


def with_sizes(given: Given, source: Source | None) -> Given:
    """Add the sizes of the source to the given fields of a run, and the rate of untrained routing biases."""
    if source is None:
        return given
    for section, keys in OF_PRESETS.items():
        for key in keys:
            if value := given.get(section, {}).get(key):
                raise ValueError(f"{section}.{key} is {value!r}; expected none with a checkpoint")
    sizes: dict[str, Any] = {key: getattr(source.config, key) for key in SIZES}
    sizes["experts_per_token"] = source.config.router.num_experts_per_tok
    is_random = source.folder is None
    rates = {"bias_rate": BIAS_RATE} if is_random and source.config.router.selection_bias else {}
    return layered({"model": rates}, given, {"model": sizes})
