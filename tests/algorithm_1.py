"""HybridEP's Algorithm 1, rank by rank, for comparison with the replica groups of a compiled program."""

import re

import numpy as np


def location(rank, sizes):
    """Return the rank's member index at each level, outermost first (Equation 13)."""
    return tuple(int(digit) for digit in np.unravel_index(rank, sizes))


def link(m, n, level, sizes, domain_sizes):
    """Return the connection of two ranks at a level: `"gather"`, `"exchange"` or `None`.

    The paper's listing compares only the finer levels of the two locations. Links would then join any two members of
    different datacenters at the inner level, so this version also requires equal coarser levels.
    """
    a, b = location(m, sizes), location(n, sizes)
    if a == b or a[:level] != b[:level] or a[level + 1 :] != b[level + 1 :]:
        return None
    (domain_a, offset_a), (domain_b, offset_b) = (divmod(x[level], domain_sizes[level]) for x in (a, b))
    if domain_a == domain_b:
        return "gather"
    return "exchange" if offset_a == offset_b else None


def links(kind, level, sizes, domain_sizes):
    """Return all directed pairs of ranks with this kind of link at a level."""
    ranks = range(int(np.prod(sizes)))
    return {(m, n) for m in ranks for n in ranks if link(m, n, level, sizes, domain_sizes) == kind}


def pairs(groups):
    """Return all directed pairs of members of a group."""
    return {(m, n) for group in groups for m in group for n in group if m != n}


def connected(edges):
    """Return the transitive closure of `edges`."""
    closed = set(edges)
    while True:
        more = {(a, d) for a, b in closed for c, d in closed if b == c and a != d} - closed
        if not more:
            return closed
        closed |= more


COLLECTIVE = re.compile(
    r"= \(?(\w+)\[.*? (all-gather|all-to-all|reduce-scatter|all-reduce|collective-permute)(?:-start)?\("
    r".*?(?:replica_groups|source_target_pairs)="
    r"(mesh\[.*?\] ?\{.*?\}|\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)


def collectives(hlo):
    """Return `(operation, dtype, groups)` of every collective of a compiled program."""
    found = COLLECTIVE.findall(hlo)
    assert len(found) == len(re.findall(r"replica_groups=|source_target_pairs=", hlo))
    return [(operation, dtype, _groups(text)) for dtype, operation, text in found]


def _groups(text):
    numbers = lambda part: [int(n) for n in re.findall(r"\d+", part)]  # noqa: E731
    if text.startswith("mesh"):
        axes, chosen = text.split("]")[0], re.findall(r"'(\w+)'", text.split("]")[1])
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
        ids = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
        order = [list(sizes).index(name) for name in [n for n in sizes if n not in chosen] + chosen]
        return ids.transpose(order).reshape(-1, int(np.prod([sizes[name] for name in chosen]))).tolist()
    if "<=" in text:
        shape, _, rest = text.partition("<=")
        source, _, order = rest.partition("T")
        ids = np.arange(np.prod(numbers(source))).reshape(numbers(source))
        return (ids.transpose(numbers(order)) if order else ids).reshape(numbers(shape)).tolist()
    return [numbers(group) for group in re.findall(r"\{([\d,]*)\}", text)]
