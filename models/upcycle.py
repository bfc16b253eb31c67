"""Convert a dense checkpoint into a mixture of experts: `python -m models.upcycle --checkpoint DIR --out DIR`.

Every expert is a copy of the dense network (sparse upcycling, arXiv 2212.05055). The expert weights of a token sum to
1, so the outputs are unchanged before training.

With `--share`, the dense network, which is the mean of these copies, becomes a shared expert. Each other expert is its
difference from the mean, initially zero. HybridEP (arXiv 2510.19470, section IV-B) splits expert weights in the same
way for transport; here outputs are added, as in published models with a shared expert.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from jax_moe_lb.cli.output import CheckedCommand, OutputPath
from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import Natural, check_value
from models.architectures.config_json import Fields, read_fields
from models.architectures.registry import configured, pieces_of
from models.console import USER_ERRORS, FileLimitsOption, say
from models.pretrained.safetensors import FLOATS, NUMPY, TensorFolder
from models.pretrained.saving import KEPT_FILES, copy_files, vacant, write_tensors
from models.run_folder.files import write_whole

ROUTER_SCALE = 0.02  # standard deviation of the router weights; initial routing is random

# Projections of Mixtral's experts by name, and their names in a Llama.
DENSE_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

# Fields of a dense model that GLM-4.5 lacks; they have no effect without windows.
WINDOW_FIELDS = ("max_window_layers", "sliding_window", "use_sliding_window")

# Name of the last projection of an expert. If it is 0, the expert adds 0 but its gradient is not 0.
LAST_PROJECTION = r"\.experts\.\d+\.down_proj\.weight$"
GLM = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "n_shared_experts": 1, "n_group": 1}
GLM |= {"first_k_dense_replace": 0, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
GLM |= {"partial_rotary_factor": 1.0}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def upcycled_config(fields: Fields, num_experts: int, experts_per_token: int, share: bool = False) -> str:
    """Return the `config.json` of the mixture: Mixtral from Llama, Qwen3-MoE from Qwen3, or GLM-4.5 with `share`."""
    if not 1 <= experts_per_token <= num_experts:
        raise ValueError(f"experts_per_token is {experts_per_token}; expected 1 to num_experts {num_experts}")
    kind = fields.raw.get("model_type")
    shared: dict[str, Any] = {"num_experts_per_tok": experts_per_token}
    if share or kind == "llama":
        fields.require("attention_bias", False)
        fields.require("mlp_bias", False)
    if share:
        fields.require("use_sliding_window", False)
    if share and kind in ("llama", "qwen3"):
        width = fields.integer("hidden_size") // max(fields.integer("num_attention_heads"), 1)
        new = shared | GLM | {"use_qk_norm": kind == "qwen3", "n_routed_experts": num_experts}
        new |= {"moe_intermediate_size": fields.integer("intermediate_size")}
        new |= {"head_dim": fields.integer("head_dim", width)}
        rope = fields.raw.get("rope_parameters")
        new |= {"rope_parameters": rope | {"partial_rotary_factor": 1.0}} if isinstance(rope, dict) else {}
    elif kind == "llama":
        new = shared | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        new |= {"num_local_experts": num_experts, "sliding_window": None}
    elif kind == "qwen3":
        new = shared | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
        new |= {"num_experts": num_experts, "moe_intermediate_size": fields.integer("intermediate_size")}
        new |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    else:
        raise ValueError(f"config.json: model_type is {kind!r}; expected llama or qwen3, a dense model")
    kept = {name: value for name, value in fields.raw.items() if not (share and name in WINDOW_FIELDS)}
    return json.dumps(kept | new, indent=2) + "\n"


def dense_name(name: str) -> str | None:
    """Return the tensor of the dense model copied to a tensor of the mixture; `None` for a router."""
    if re.search(r"\.(mlp|block_sparse_moe)\.gate\.(weight|e_score_correction_bias)$", name):
        return None
    found = re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe)\.(?:shared_experts|experts\.\d+)\.(\w+)\.weight", name)
    if found is None:
        return name
    return f"{found[1]}.mlp.{DENSE_NAMES.get(found[2], found[2])}.weight"


def upcycle(
    folder: Path,
    out: Path,
    num_experts: int,
    experts_per_token: int,
    *,
    share: bool = False,
    seed: int = 0,
    limits: FileLimits = FileLimits(),
) -> None:
    """Write a mixture checkpoint whose experts are copies of a dense model's network."""
    check_value("seed", seed, Natural)
    text = upcycled_config(read_fields(folder, limits), num_experts, experts_per_token, share)
    shapes = {piece.name: piece.shape for piece in pieces_of(configured(Fields(text, limits)))}
    rng = np.random.default_rng(seed)
    tensors = TensorFolder(folder, limits)
    with vacant(out) as aside:
        for name, shape in shapes.items():
            _check(tensors, dense_name(name), shape)
        dtype = tensors.read("model.norm.weight").dtype

        def dtype_of(name: str) -> Any:
            source = dense_name(name)
            if source is not None:
                return np.dtype(NUMPY[tensors.home[source].dtypes[source]])
            return np.dtype(np.float32) if name.endswith("e_score_correction_bias") else dtype

        def made(name: str) -> np.ndarray:
            source, wanted = dense_name(name), written[name]
            if name.endswith("e_score_correction_bias") or (share and re.search(LAST_PROJECTION, name)):
                return np.zeros(wanted.shape, wanted.dtype)
            if source is not None:
                return tensors.read(source)
            return (rng.standard_normal(wanted.shape, np.float32) * ROUTER_SCALE).astype(wanted.dtype)

        written = {name: jax.ShapeDtypeStruct(shape, dtype_of(name)) for name, shape in shapes.items()}
        write_tensors(aside, written, map(made, written))
        write_whole(aside / "config.json", text.encode())
        copy_files(KEPT_FILES, folder, aside)


def _check(tensors: TensorFolder, name: str | None, shape: tuple[int, ...]) -> None:
    if name is None:
        return
    header = tensors.home.get(name)
    if header is None:
        raise ValueError(f"{tensors.folder}: missing: {name}; expected the tensors of config.json's sizes")
    if header.shapes[name] != shape or header.dtypes[name] not in FLOATS:
        found = f"{header.dtypes[name]} {list(header.shapes[name])}"
        raise ValueError(f"{header.path}: {name} is {found}; expected floats {list(shape)}")


@app.command(cls=CheckedCommand)
def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of a dense Llama or Qwen3.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder; new or empty."), OutputPath("")],
    num_experts: Annotated[int, typer.Option(help="Experts per layer.")] = 8,
    experts_per_token: Annotated[int, typer.Option(help="Experts per token.")] = 2,
    share: Annotated[
        bool, typer.Option("--share", help="Add a shared expert, initialized to the dense network.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the routers.")] = 0,
    file_limits: FileLimitsOption = 1,
) -> None:
    """Convert a dense checkpoint into a mixture of experts."""
    try:
        limits = FileLimits().scaled(file_limits)
        upcycle(checkpoint, out, num_experts, experts_per_token, share=share, seed=seed, limits=limits)
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error


if __name__ == "__main__":
    app()
