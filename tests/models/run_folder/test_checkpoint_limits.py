"""Sizes declared by a checkpoint are checked before Orbax and TensorStore allocate memory for them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import nnx

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import LimitError
from models.run_folder.checkpoints import CheckpointMetadata, Checkpoints, parts, restore_newest

pytestmark = pytest.mark.slow

STATE = nnx.State({"a": nnx.Param(jnp.arange(12.0).reshape(3, 4)), "b": nnx.Param(jnp.bfloat16(2))})
SHAPES = jax.eval_shape(lambda: STATE)
NAME = next(iter(parts(STATE)["state"]))


@pytest.fixture
def folder(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, CheckpointMetadata({"x": 1}, {"steps": 1}))
    return tmp_path


def restore(folder, limits=FileLimits()):
    return restore_newest(folder, SHAPES, pytest.fail, limits=limits)


def test_an_intact_checkpoint_is_restored(folder):
    step, state, kept = restore(folder)
    assert (step, kept) == (1, CheckpointMetadata({"x": 1}, {"steps": 1}))
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(STATE), strict=True):
        np.testing.assert_array_equal(got, want)


def refuses(folder, message, limits=FileLimits()):
    with pytest.raises(ValueError, match=message), Checkpoints(folder, limits=limits) as checkpoints:
        checkpoints.restore(1, SHAPES)


def declare(folder, content):
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/1/state/"}).result()
    store.write(f"{NAME}/.zarray", content).result()


def declared(folder):
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/1/state/"}).result()
    return json.loads(store.read(f"{NAME}/.zarray").result().value)


@pytest.mark.thorough
@pytest.mark.parametrize("content", ["[]", "{", b"\xff"])
def test_a_damaged_declaration(folder, content):
    declare(folder, content)
    refuses(folder, f"^'.*state': '{NAME}' has ")


DECLARATIONS = [
    ({"chunks": [3, 4, 5]}, r"chunks \[3, 4, 5\]; expected at most \[3, 4\]"),
    ({"chunks": [3, -4]}, r"chunks \[3, -4\]; expected at most \[3, 4\]"),
    ({"shape": [30000, 40000]}, r"shape \[30000, 40000\]; expected \[3, 4\]"),
    ({"shape": 12}, r"shape 12; expected \[3, 4\]"),
    ({"dtype": "|V1000000000"}, r"dtype '\|V1000000000'; expected a number type"),
    ({"dtype": [["x", "<f4", [10**9]]]}, r"dtype \[\['x', '<f4', \[1000000000\]\]\]; expected a number type"),
    ({"compressor": {"id": "blosc"}}, r"compressor {'id': 'blosc'}; expected zstd"),
    ({"filters": [{"id": "delta"}]}, r"filters \[{'id': 'delta'}\]; expected none"),
    ({"attributes": [0] * 300}, r"a JSON text of \d+ values; expected at most 250"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": [30000, 40000]}, r"chunks \[30000, 40000\]; expected at most \[3, 4\]"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in DECLARATIONS),
    ],
    ids=str,
)
def test_declarations_of_arrays(folder, change, message):
    declare(folder, json.dumps(declared(folder) | change))
    (folder / "1" / "sha256.json").unlink()
    lines, limits = [], FileLimits(values=250)
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        restore_newest(folder, SHAPES, lines.append, limits=limits)
    (line,) = lines
    assert "\n" not in line
    refuses(folder, rf"^'.*state': '{NAME}' has {message}", limits)


@pytest.mark.thorough
@pytest.mark.parametrize("form", [{"use_zarr3": True}, {"use_ocdbt": False}, None])
def test_other_forms_of_arrays(folder, form):
    path = folder / "1" / "state" / "_METADATA"
    path.write_text(json.dumps(None if form is None else json.loads(path.read_text()) | form))
    refuses(folder, "has another form; expected arrays in OCDBT and Zarr 2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["_CHECKPOINT_METADATA", "run/metadata", "state/_METADATA", "state/_sharding", "state/array_metadatas/process_0"],
)
def test_texts_of_a_checkpoint(folder, name):
    path = folder / "1" / name
    assert path.exists()
    path.write_text(json.dumps([0] * 2000))
    with pytest.raises(LimitError, match=rf"/{name}': a JSON text of 2000 values; expected at most 1000\. Pass"):
        Checkpoints(folder, limits=FileLimits(values=1000))
    with pytest.raises(LimitError, match=rf"/{name}': 6000 bytes; expected at most 5000\. Pass"):
        Checkpoints(folder, limits=FileLimits(text_bytes=5000))
