"""`refuse` is an operation that refuses to be lowered, in words, for platforms on which a program cannot run."""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

refusal_p = Primitive("moe_lb_refusal")
refusal_p.multiple_results = True


def refuse(*operands: Any, results: tuple[Any, ...], explain: Callable[[str], str]) -> tuple[Any, ...]:
    """Stands in for results on platforms that have no way to compute them.

    Use it as the default of `jax.lax.platform_dependent`: it costs nothing where another branch is taken.

    Args:
        *operands: arrays that the results would depend on.
        results: the results' shapes, dtypes and placements; see `like`.
        explain: says in one line, given the platform, what is needed and what to use there.

    Raises:
        RuntimeError: when the program is lowered for a platform that takes this branch.
    """
    return tuple(refusal_p.bind(*operands, results=results, explain=explain))


@refusal_p.def_abstract_eval
def _types(*operands: Any, results: tuple[Any, ...], explain: Callable[[str], str]) -> tuple[Any, ...]:
    del operands, explain
    return results


def _lower(ctx: Any, *operands: Any, results: tuple[Any, ...], explain: Callable[[str], str]) -> Any:
    del operands, results
    # Only now is the platform known. A traced program holds branches for all platforms, and just one is lowered.
    raise RuntimeError(explain(", ".join(ctx.platforms or ctx.module_context.platforms)))


def _batch(operands: Any, dims: Any, *, results: tuple[Any, ...], explain: Callable[[str], str]) -> Any:
    # `jax.vmap` must be able to trace the branch that nobody takes.
    size = next(operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None)
    shapes = tuple(
        result.update(shape=(size, *result.shape), sharding=result.sharding.update(spec=(None, *result.sharding.spec)))
        for result in results
    )
    return refuse(*operands, results=shapes, explain=explain), (0,) * len(results)


mlir.register_lowering(refusal_p, _lower)
batching.primitive_batchers[refusal_p] = _batch
