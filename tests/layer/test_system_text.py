"""Systems as text equal systems by function, for every name and every option."""

import inspect
from dataclasses import replace

import jax
import pytest
from flax import nnx

from jax_moe_lb import Buffers, ExpertConfig, System, TopK, Topology, as_linen, balance, exact, plain, rails, systems
from jax_moe_lb.cli.compile import system_of
from jax_moe_lb.layer.system import DISPATCHES, OPTIONS
from jax_moe_lb.transport import AutoDispatch, Direct, Once
from models.config import ParallelConfig, TrainConfig
from models.mesh import make_system
from models.settings import read_assignments, read_system, updated
from tests.layer_cases import make_layer, make_mesh

VALUES = {"replica_slots": (0, 3), "headroom": (1.25, 8.0), "max_rounds": (1, 4), "dispatch": tuple(DISPATCHES)}
"""Values of each option; a new option fails the test of this table."""

CASES = [(name, option, value) for name in systems.system_names() for option in OPTIONS for value in VALUES[option]]


def outcome(make):
    """Return the system, or the message of its refusal."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        return f"refused: {type(error).__name__}"


def test_every_option_has_values_and_every_function_the_same_options():
    assert VALUES.keys() == OPTIONS.keys()
    assert set(systems.system_names()) == set(systems.__all__) - {"System", "system_named", "system_names"}
    for name in systems.system_names():
        found = set(inspect.signature(getattr(systems, name)).parameters)
        assert found - {"replica_slots"} == {"buffers", *OPTIONS} - {"replica_slots"}
        assert all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(getattr(systems, name)).parameters.values())


@pytest.mark.parametrize(("name", "option", "value"), CASES)
def test_text_and_function_give_equal_systems(name, option, value):
    text, function = f"{name}:{option}={value}", getattr(systems, name)
    made = outcome(lambda: systems.system_named(text))
    expected = outcome(lambda: function(**{option: value}))
    if isinstance(expected, str):
        # The function has no such argument, or refuses its value; text has wrong values only.
        assert made == "refused: ValueError"
        return
    assert made == expected
    assert made != function() or value in (function().replica_slots, function().dispatch.buffers.headroom)
    assert system_of(text) == expected
    for given in (read_system(text), read_assignments([f"parallel.system={text}"])):
        assert make_system(updated(TrainConfig(), given).parallel) == expected
    assert make_system(ParallelConfig(system=text)) == make_system(ParallelConfig(system=name, **{option: value}))


@pytest.mark.parametrize("name", systems.system_names())
def test_a_name_alone_is_the_function_without_arguments(name):
    assert systems.system_named(name) == getattr(systems, name)()
    assert systems.system_named(f"{name}:headroom=none,max_rounds=none,dispatch=none") == getattr(systems, name)()


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_a_dispatch_may_follow_the_system(dispatch):
    text = f"exact:replica_slots=3,headroom=1.5+{dispatch}"
    assert systems.system_named(text) == exact(3, headroom=1.5, dispatch=dispatch)
    assert systems.system_named(f"plain+{dispatch}") == plain(dispatch=dispatch)


def test_options_combine():
    assert exact(2, Buffers(chunks=2), headroom=2.0).dispatch.buffers == Buffers(2.0, chunks=2)
    assert exact(dispatch=Once(Buffers(3.0)), max_rounds=1).dispatch == Once(Buffers(3.0, 1))
    assert systems.feplb(max_rounds=2).dispatch.buffers == Buffers(2.0, 2)
    assert plain(dispatch="rails") == rails()
    assert System().dispatch == AutoDispatch()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exactly", "system is 'exactly'; expected one of eplb, eplb_plus, exact, "),
        ("exact:", "system is 'exact:' with option ''; expected OPTION=VALUE of replica_slots, headroom, "),
        ("exact:slots=2", "system is 'exact:slots=2' with option 'slots'; expected OPTION=VALUE of replica_slots, "),
        ("exact:headroom", "system is 'exact:headroom' with option 'headroom'; expected OPTION=VALUE of "),
        ("exact:headroom=x", "headroom is 'x'; expected a number or none"),
        ("exact:headroom=-1", "headroom is -1.0; expected a finite number above 0"),
        ("exact:replica_slots=2.5", "replica_slots is '2.5'; expected an integer or none"),
        ("exact:replica_slots=-1", "replica_slots is -1; expected at least 0"),
        ("exact:headroom=1,headroom=2", "headroom given twice; expected it once"),
        ("exact:dispatch=once+once", "dispatch given twice; expected it once"),
        ("exact:dispatch=twice", "dispatch is 'twice'; expected one of direct, once, forward, rails or none"),
        ("greedy+ultraep", "system is 'greedy+ultraep'; expected one of direct, once, forward, rails after +"),
        ("plain:replica_slots=2", "replica_slots is 2; expected none, as plain takes headroom, max_rounds, dispatch"),
        ("feplb+once", "dispatch is 'once'; expected none for a system with TwoPhase, its own dispatch"),
    ],
)
def test_other_texts_are_refused_in_one_line(text, message):
    with pytest.raises(ValueError) as refused:
        systems.system_named(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_wrong_dispatch_of_a_function_is_named():
    with pytest.raises(ValueError, match=r"^dispatch is 'twice'; expected a Dispatch or one of direct, once, "):
        exact(dispatch="twice")


def layers(system, per_token=2, axes=("expert",), sizes=(2,)):
    mesh = make_mesh(sizes, axes)
    topology = Topology.from_mesh(mesh, axes)
    return make_layer(mesh, system, (8, 8, 8), TopK(per_token), topology=topology).system


@pytest.mark.parametrize("case", [{}, {"per_token": 4}, {"axes": ("node", "gpu"), "sizes": (2, 2)}])
def test_a_layer_is_the_same_by_text_and_by_function(case):
    assert layers("exact", **case) == layers(exact(), **case)
    assert type(layers("exact", **case).dispatch) is not AutoDispatch
    text, made = "exact:replica_slots=1,headroom=1.25", exact(1, headroom=1.25)
    assert layers(text, **case) == layers(made, **case) == replace(made, dispatch=layers(made, **case).dispatch)
    assert layers(exact(dispatch="direct"), **case).dispatch == layers(exact(dispatch=Direct()), **case).dispatch
    assert layers("exact+direct", **case).dispatch == Direct()


def test_linen_and_other_libraries_parse_the_same_text():
    mesh = make_mesh((2,), ("expert",))
    with pytest.raises(ValueError, match=r"system is 'exact:slots=2' with option 'slots'"):
        as_linen(8, 8, TopK(2), mesh=mesh, system="exact:slots=2", experts=ExpertConfig(8)).init(
            jax.random.key(0), jax.numpy.ones((4, 8))
        )
    with pytest.raises(ValueError, match=r"system is 'exact:slots=2' with option 'slots'"):
        balance(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), mesh=mesh, system="exact:slots=2")
