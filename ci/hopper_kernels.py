"""Compile the Hopper kernels for an absent H100, and check limits of registers and spills, as `ptxas` reports them.

They are compiled inside `jax.shard_map` with `check_vma=True`, at the sizes of one rank of Qwen3-30B-A3B, and with all
deprecation warnings as errors. `ci/accelerators.sh` runs it.
"""

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_moe_lb.aot import Target, use_no_accelerators
from jax_moe_lb.core.experts import ClampedSwiGLU, Experts, geglu
from jax_moe_lb.kernels.operands import RowGroups

ROWS, HIDDEN, INNER, PARTS = 65536, 2048, 768, (16, 2)
DUMPS = {"PTXAS": "1", "PTX": "1"}
MOST_REGISTERS = 168
"""Registers of a thread: 384 threads share 65,536, and move these between warpgroups."""

SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")

MOST_SPILLED = {"hidden and products": 48, "activation gradients": 16}
"""Most bytes of spilled registers, stored or loaded, once per tile of a result; 0 for the other kernels."""


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield the name, the function and the shapes of each kernel."""
    # Imported after the environment is set.
    from jax_moe_lb.kernels import fused_ffn, mosaic_outer, mosaic_product

    def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    def experts(fused: bool = False, activation: Any = None) -> tuple[Experts, ...]:
        def part(n: int) -> Experts:
            gate = None if fused else shape(n, HIDDEN, INNER)
            return Experts(shape(n, HIDDEN, INNER * (1 + fused)), shape(n, INNER, HIDDEN), gate, activation)  # type: ignore[arg-type]

        return tuple(map(part, PARTS))

    sizes = shape(sum(PARTS), dtype=jnp.int32)
    rows, hidden, weights = shape(ROWS, HIDDEN), shape(ROWS, INNER), shape(ROWS, 1, dtype=jnp.float32)
    down = tuple(part.down for part in experts())
    for transposed in (False, True):

        def product(rows: Any, parts: Any, sizes: Any, transposed: bool = transposed) -> Any:
            return mosaic_product.product(rows, *parts, group_sizes=sizes, transposed=transposed)

        yield "transposed" if transposed else "product", product, (rows if transposed else hidden, down, sizes)
    for dtype in (jnp.bfloat16, jnp.float32):

        def outer(rows: Any, others: Any, sizes: Any, dtype: Any = dtype) -> Any:
            return mosaic_outer.outer(rows, others, RowGroups(sizes), parts=PARTS, dtype=dtype)

        yield f"outer in {jnp.dtype(dtype).name}", outer, (rows, (hidden, hidden), sizes)
    for keeps in (False, True):

        def inner(rows: Any, experts: Any, sizes: Any, keeps: bool = keeps) -> Any:
            return fused_ffn.hidden_and_products(rows, experts, sizes, keeps_products=keeps)

        yield "hidden and products" if keeps else "hidden", inner, (rows, experts(fused=keeps), sizes)
    yield "inner products", fused_ffn.inner_products, (rows, experts(), sizes)
    of_activation = fused_ffn.activation_gradients
    for name, activation in {"": None, " of ClampedSwiGLU": ClampedSwiGLU(), " of geglu": geglu}.items():
        yield (
            f"activation gradients{name}",
            of_activation,
            ((hidden, hidden), weights, experts(activation=activation), sizes, rows),
        )
    yield "row gradients", fused_ffn.row_gradients, ((hidden, hidden), experts(), sizes)


def compile_on(target: Target, function: Callable[..., Any], shapes: tuple[Any, ...]) -> None:
    """Compile a function of per-device arrays inside `jax.shard_map`."""
    mesh = target.mesh()
    spec = PartitionSpec(mesh.axis_names)

    def whole(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dims = (one.shape[0] * mesh.size, *one.shape[1:])
        return jax.ShapeDtypeStruct(dims, one.dtype, sharding=NamedSharding(mesh, spec))

    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True))
    with jax.default_device(target.devices()[0]):
        run.trace(*jax.tree.map(whole, shapes)).lower(lowering_platforms=("cuda",)).compile()


def faults(name: str, report: str) -> Iterator[str]:
    """Yield a message for each exceeded limit of a report of `ptxas -v`, and print its numbers."""
    spilled = max((int(one) for found in SPILLS.findall(report) for one in found), default=None)
    registers = max(map(int, REGISTERS.findall(report)), default=None)
    print(f"{name}: {registers} registers, at most {spilled} bytes spilled", flush=True)
    if spilled is None or registers is None:
        yield f"{name}: ptxas reports no kernel"
        return
    if registers > MOST_REGISTERS:
        yield f"{name}: {registers} registers; expected at most {MOST_REGISTERS}"
    # Other activations than SwiGLU have more values at a time.
    if " of " not in name and spilled > (most := MOST_SPILLED.get(name, 0)):
        yield f"{name}: {spilled} bytes spilled; expected at most {most}"


def main() -> int:
    """Compile all kernels; return 1 after a fault."""
    use_no_accelerators()
    warnings.simplefilter("error", DeprecationWarning)
    wrong = []
    for name, function, shapes in cases():
        with tempfile.TemporaryDirectory() as folder:
            # The compiler reads these when it compiles.
            os.environ |= {
                "MOSAIC_GPU_DUMP_TO": folder,
                **{f"MOSAIC_GPU_DUMP_{kind}": on for kind, on in DUMPS.items()},
            }
            compile_on(Target.parse("h100:1x8"), function, shapes)
            reports = [path.read_text(errors="replace") for path in Path(folder).rglob("*.ptxas")]
        wrong += faults(name, "\n".join(reports))
    print("\n".join(wrong), end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
