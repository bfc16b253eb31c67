"""`usage` says how to use a choice: as lines of Python, and as flags of the programs that can say it."""

from dataclasses import dataclass, replace

from jax_moe_lb.sim.choice import Choice
from jax_moe_lb.sim.cluster import Cluster

RELOCATE_INTERVAL = 50
"""The steps between relocations in the flags, the training program's own default for systems that relocate."""


@dataclass(frozen=True)
class Usage:
    """A usage says how to use a choice.

    Args:
        code: lines of Python, which name only what `jax_moe_lb` exports, `MoE` of `jax_moe_lb.nn` and `replace` of
            `dataclasses`; `mesh` and `topology` are yours.
        train: flags of `python -m models.train`; `None` where it has none for this.
        simulate: flags of `jax-moe-lb simulate`; `None` where it has none for this.
    """

    code: tuple[str, ...]
    train: str | None
    simulate: str | None


def usage(choice: Choice, cluster: Cluster, gather_again: bool = False) -> Usage:
    """Says how to use a choice.

    Args:
        choice: what to use.
        cluster: its levels name the axes of the mesh, and its domains bound where weights may move.
        gather_again: whether the backward pass gathers again.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links
        >>> machine = Cluster((Links("node", 16, 50e9, links=8), Links("gpu", 8, 360e9)))
        >>> usage(Choice("exact", 2), machine).train
        '--system exact --replica-slots 2 --ranks-per-domain 8'
        >>> for line in usage(Choice("exact", 2, domain_sizes=(2, 1)), machine).code:
        ...     print(line)
        mesh = hybrid_mesh(mesh, {"node": 2, "gpu": 1})
        domains = ExpertDomains.from_mesh(mesh, topology)
        MoE(..., mesh=mesh, topology=domains.between, migrate=Migrate(domains), system=exact(replica_slots=2))
    """
    return Usage(
        _code(choice, cluster, gather_again), _train(choice, cluster), None if gather_again else _simulate(choice)
    )


def _code(choice: Choice, cluster: Cluster, gather_again: bool) -> tuple[str, ...]:
    system = f"system={system_code(choice)}"
    if not choice.domain_sizes:
        return (f"MoE(..., {system})",)
    levels = zip(cluster.levels, choice.domain_sizes, strict=True)
    sizes = ", ".join(f'"{level.name}": {size}' for level, size in levels)
    codec = f", Codec(ratio={choice.ratio})" if choice.ratio != 1 else ""
    lines = (
        f"mesh = hybrid_mesh(mesh, {{{sizes}}})",
        "domains = ExpertDomains.from_mesh(mesh, topology)",
        f"MoE(..., mesh=mesh, topology=domains.between, migrate=Migrate(domains{codec}), {system})",
    )
    return (*lines, "scan_prefetched(..., gather_again=True)") if gather_again else lines


def system_code(choice: Choice) -> str:
    """Writes the system as Python.

    Args:
        choice: whose system to write.

    Examples:
        >>> system_code(Choice("exact", 2, eps=0.05, sprayed=True))
        'replace(exact(replica_slots=2), balancer=Chain((Exact(eps=0.05), RailS())), dispatch=Spray())'
    """
    if choice == replace(Choice(sprayed=True), domain_sizes=choice.domain_sizes, ratio=choice.ratio):
        return "rails()"
    if _is_two_tier(choice):
        return f"two_tier(replica_slots={choice.replica_slots})"
    base = f"{choice.system}(replica_slots={choice.replica_slots})" if choice.replica_slots else f"{choice.system}()"
    balancer = f"{base}.balancer" if choice.eps is None else f"Exact(eps={choice.eps})"
    changes = [f"balancer={balancer}"] if choice.eps is not None else []
    if choice.sprayed:
        after = "RailS()" if choice.system == "plain" else f"Chain(({balancer}, RailS()))"
        changes = [f"balancer={after}", "dispatch=Spray()"]
    if choice.headroom is not None:
        dispatch = "Spray" if choice.sprayed else "Direct"
        changes = [one for one in changes if not one.startswith("dispatch=")]
        changes.append(f"dispatch={dispatch}(headroom={choice.headroom})")
    changes += ["replicate=Relay()"] * choice.relayed + ["relocates=True"] * choice.relocated
    return f"replace({base}, {', '.join(changes)})" if changes else base


def _is_two_tier(choice: Choice) -> bool:
    return replace(choice, domain_sizes=(), ratio=1.0) == Choice(
        "exact", choice.replica_slots, relayed=True, relocated=True
    )


def _is_named(choice: Choice) -> bool:
    """Tells whether nothing is changed in the system but its slots."""
    return choice.eps is None and not choice.relayed and not (choice.sprayed and choice.system != "plain")


def _train(choice: Choice, cluster: Cluster) -> str | None:
    two_tier = _is_two_tier(choice)
    if choice.domain_sizes or not (two_tier or _is_named(choice)):
        return None
    name = "two_tier" if two_tier else "rails" if choice.sprayed else choice.system
    domain = [f"--ranks-per-domain {cluster.ranks_per_domain}"] if choice.replica_slots or choice.relocated else []
    room = [f"--headroom {choice.headroom:g}"] if choice.headroom is not None else []
    moves = [f"--relocate-interval {RELOCATE_INTERVAL}"] if choice.relocated and not two_tier else []
    return " ".join([f"--system {name}", *_slots(choice), *domain, *room, *moves])


def _simulate(choice: Choice) -> str | None:
    if choice.relocated or choice.relayed or choice.eps is not None or choice.ratio != 1 or choice.headroom is not None:
        return None
    inner = [choice.system] if choice.system != "plain" or not (choice.sprayed or choice.domain_sizes) else []
    parts = ["hybridep"] * bool(choice.domain_sizes) + inner + ["rails"] * choice.sprayed
    sizes = [f"--domain-sizes {','.join(map(str, choice.domain_sizes))}"] if choice.domain_sizes else []
    return " ".join([f"--system {'+'.join(parts)}", *_slots(choice), *sizes])


def _slots(choice: Choice) -> list[str]:
    return [f"--replica-slots {choice.replica_slots}"] if choice.replica_slots else []
