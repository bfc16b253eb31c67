"""Exchanges are reported with mesh axes, sizes, and concurrent operations."""

import itertools

import numpy as np
import pytest

from jax_moe_lb.aot.collectives import axes_of, collectives
from jax_moe_lb.aot.hlo import Instruction
from jax_moe_lb.aot.memory import MemoryTraffic
from tests.aot.programs import SIZES, module_of


def test_kinds_axes_and_bytes(exchanging):
    module = exchanging.module
    found = collectives(module, SIZES, MemoryTraffic(module).nbytes)
    array = 16 * 16 * 4
    assert {(one.kind, one.axes): (one.count, one.nbytes, one.asynchronous) for one in found} == {
        ("all-reduce", ("expert",)): (1, array, 0),
        # A device receives more than it sends.
        ("all-gather", ("node",)): (1, 2 * array, 0),
        ("all-to-all", ("node", "expert")): (1, 2 * array, 0),
        ("collective-permute", ("expert",)): (1, 2 * array, 0),
    }


def with_groups(attributes: str) -> Instruction:
    return Instruction("x", "all-reduce", (), (), "", attributes, True)


AXES = {"a": 2, "b": 3, "c": 4}
DEVICES = np.arange(24).reshape(2, 3, 4)
CHOICES = [chosen for size in range(4) for chosen in itertools.combinations("abc", size)]


def groups_over(chosen):
    order = [axis for axis, name in enumerate("abc") if name not in chosen]
    order += ["abc".index(name) for name in chosen]
    width = int(np.prod([AXES[name] for name in chosen], dtype=int))
    return order, DEVICES.transpose(order).reshape(-1, width)


@pytest.mark.parametrize("chosen", CHOICES, ids="".join)
def test_axes_of_groups(chosen):
    """Listed or numbered groups, or groups over a named mesh, which may have other names and split axes."""
    order, groups = groups_over(chosen)
    listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    numbered = f"[{groups.shape[0]},{groups.shape[1]}]<=[2,3,4]T({','.join(map(str, order))})"
    names = {"a": ["x"], "b": ["y"], "c": ["z", "w"]}
    over = ",".join(f"'{part}'" for name in chosen for part in names[name])
    forms = [f"{{{listed}}}", numbered, *([f"mesh['x'=2,'y'=3,'z'=2,'w'=2] {{{over}}}"] if chosen else [])]
    for form in forms:
        assert axes_of(with_groups(f"channel_id=1, replica_groups={form}, dimensions={{0}}"), AXES) == chosen, form


def test_axes_of_pairs():
    pairs = [(int(DEVICES[a, b, c]), int(DEVICES[a, b, (c + 1) % 4])) for a, b, c in np.ndindex(2, 3, 4)]
    listed = ",".join(f"{{{source},{target}}}" for source, target in pairs)
    assert axes_of(with_groups(f"source_target_pairs={{{listed}}}"), AXES) == ("c",)


def test_other_groups():
    for groups, axes in {"{{0,1,2},{3,4,5}}": None, "something new": None, "{}": ("a", "b", "c")}.items():
        assert axes_of(with_groups(f"replica_groups={groups}"), AXES) == axes


SCHEDULED = """
%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%wrapped (q: f32[1024,1024]) -> f32[128,1024] {
  ROOT %rs = f32[128,1024]{1,0} reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%sum
}

ENTRY %main (x: f32[1024,1024], n: s32[8]) -> f32[1024,1024] {
  %start = ((f32[1024,1024]{1,0}, f32[1024,1024]{1,0}), f32[1024,1024]{1,0}) ragged-all-to-all-start(%x, %x, %n, %n, %n, %n), replica_groups=[1,8]<=[8]
  %small = s32[8]{0} negate(%n)
  %large = f32[1024,1024]{1,0} sine(%x)
  %other = f32[1024,1024]{1,0} all-to-all(%large), replica_groups=[1,8]<=[8], dimensions={0}
  %done = f32[1024,1024]{1,0} ragged-all-to-all-done(%start)
  %rs.start = ((f32[1024,1024]{1,0}), f32[128,1024]{1,0}) async-start(%x), calls=%wrapped
  %cosine = f32[1024,1024]{1,0} cosine(%x)
  %update = ((f32[1024,1024]{1,0}), f32[128,1024]{1,0}) async-update(%rs.start)
  %rs.done = f32[128,1024]{1,0} async-done(%update)
  %lone.start = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0}) all-reduce-start(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%sum
  ROOT %lone = f32[1024,1024]{1,0} all-reduce-done(%lone.start)
}
"""  # noqa: E501 (XLA's lines)


def test_exchanges_have_axes_bytes_and_what_runs_beside_them():
    module = module_of(SCHEDULED)
    found = collectives(module, {"expert": 8}, MemoryTraffic(module).nbytes)
    # A small operation or another exchange hides none, and an operation that ends at once is synchronous.
    assert {one.kind: (one.over, one.asynchronous, one.axes) for one in found} == {
        "ragged-all-to-all": (("large",), 1, ("expert",)),
        "reduce-scatter": (("cosine",), 1, ("expert",)),
        "all-to-all": ((), 0, ("expert",)),
        # An exchange of a device with itself crosses no axis.
        "all-reduce": ((), 0, ()),
    }
    # The larger of both ways.
    assert {one.nbytes for one in found} == {4 * 1024 * 1024}
