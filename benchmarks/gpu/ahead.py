"""Compile the programs of `kit`.

    python -m benchmarks.gpu.ahead --targets h100 h200   # here, for absent GPUs: those that equal programs made there
    python -m benchmarks.gpu.ahead --here qwen3          # on a machine with a GPU: the steps of a rank of one layer

Programs with dense products are compiled on the machine, as XLA measures their algorithms there. So are those with
large sorts, for which XLA takes a slower kernel without a GPU.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from benchmarks.gpu import comparison, kit, products, tiles
from benchmarks.gpu.findings import Finding, Scale
from benchmarks.gpu.once import guarded
from jax_moe_lb.aot import Target, use_no_accelerators
from jax_moe_lb.kernels.backends import BACKENDS

LARGEST_SORT = 16384
"""Elements up to which XLA sorts in a kernel of its own, with a GPU or without."""

PROBE = kit.Program(lambda x: x * 2 + 1, (jax.ShapeDtypeStruct((4096,), "float32"),))


def absent_programs() -> dict[tuple[Any, ...], kit.AheadProgram]:
    """Return the programs that are compiled for an absent GPU, which is the default device."""
    found: dict[tuple[Any, ...], kit.AheadProgram] = {("probe",): PROBE}
    for backend in (one for one in BACKENDS if one.platform in ("cuda", None)):
        compared = products.products_of(backend, products.VALUE_ROWS, products.SHAPES)
        found |= products.value_programs(backend, compared)
    for model in tiles.MODELS.values():
        found |= {key: one for key, one in tiles.model_programs(model).items() if key[1] != tiles.DENSE}
    for layer in comparison.LAYERS.values():
        if layer.copies <= LARGEST_SORT:
            found |= comparison.rank_programs(layer)
    return found


def build(
    programs: Mapping[tuple[Any, ...], kit.AheadProgram], kind: str | None, device: jax.Device | None, threads: int
) -> bool:
    """Compile and store programs, print the outcomes, and return whether all are stored."""
    begin = time.monotonic()
    outcomes = kit.build({kit.name_of(key): one for key, one in programs.items()}, kind, device, threads)
    failed = [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome.startswith("failed")]
    files = [kit.path_of(name, kind) for name in outcomes]
    nbytes = sum(path.stat().st_size for path in files if path.exists())
    print("\n".join(failed), file=sys.stderr)
    seconds, stored = time.monotonic() - begin, len(outcomes) - len(failed)
    print(f"{kind or 'here'}: {stored} of {len(outcomes)} programs, {nbytes / 1e6:.1f} MB, {seconds:.0f} s", flush=True)
    return not failed


def stored_programs_load(scale: Scale) -> Finding:
    """Check that a program compiled for an absent GPU loads, and returns the bits of one compiled here."""
    x = jax.random.normal(jax.random.key(0), (4096,))
    here = PROBE.lower(None).compile()
    if scale.dry:
        kit.store("probe", here)
    if not kit.path_of("probe").exists():
        return Finding(None, f"{kit.path_of('probe').parent} has no programs; make gpu-kit writes them")
    loaded = kit.load("probe")
    if loaded is None:
        return Finding(False, "it does not load; see the output")
    # A kernel may load and not run; an exception makes the claim false.
    ran = run_stored_product("Triton kernel")
    number = len(list(kit.path_of("probe").parent.iterdir()))
    return Finding(bool((loaded(x) == here(x)).all()), f"{number} programs{ran}")


def run_stored_product(backend: str) -> str:
    """Run a stored product of a backend, if there is one."""
    product = products.products_of(products.named(backend), products.VALUE_ROWS, products.SHAPES)[0]
    key = products.run_key(product, backend)
    if not kit.path_of(kit.name_of(key)).exists() or (loaded := kit.load(kit.name_of(key))) is None:
        return ""
    with guarded("stored product"):
        jax.block_until_ready(loaded(*products.operands_of(product, 0)))
    return f"; one of {backend} runs"


def main() -> None:
    """Parse the command line and compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=[], metavar="GPU", help="absent GPUs")
    parser.add_argument("--here", nargs="+", default=[], choices=comparison.LAYERS, help="layers")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compilations at once")
    parser.add_argument("--dry-run", action="store_true", help="compile tiny layers for the CPU")
    given = parser.parse_args()
    if given.targets:
        use_no_accelerators()
    elif given.dry_run:
        jax.config.update("jax_platforms", "cpu")
    all_stored = True
    for kind in given.targets:
        (device,) = Target.parse(f"{kind}:1x1").devices()
        with jax.default_device(device):
            programs = absent_programs()
        kit.remove_others(kind)
        all_stored &= build(programs, kind, device, given.threads)
    for name in given.here:
        full = comparison.rank_programs(comparison.LAYERS[name])
        # One tiny program of a dry run shows that it loads.
        tiny = dict(list(comparison.rank_programs(comparison.TINY, ()).items())[:1])
        all_stored &= build(tiny if given.dry_run else full, None, None, given.threads)
    sys.exit(not all_stored)


if __name__ == "__main__":
    main()
