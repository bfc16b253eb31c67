"""Mutants apply to the tree as it is: a change of a mutated line changes `mutants.yaml` too."""

import ast

import pytest

from tests.mutation.run import KINDS, ROOT, load_mutants

ALL = load_mutants()


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_compiles(mutant):
    source = (ROOT / mutant.file).read_text()
    mutated = mutant.apply(source)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    assert mutant.kind in KINDS
    assert mutant.tests
    assert all((ROOT / test).is_file() for test in mutant.tests)


def test_mutants_are_in_every_room():
    assert len({mutant.name for mutant in ALL}) == len(ALL) >= 60
    assert {mutant.kind for mutant in ALL} == KINDS
    rooms = [path.parent.name for path in (ROOT / "jax_moe_lb").glob("*/__init__.py")]
    for room in rooms:
        mutants = [mutant for mutant in ALL if mutant.file.startswith(f"jax_moe_lb/{room}/")]
        assert len(mutants) >= 2, room
        assert all(mutant.name.startswith(f"{room}-") for mutant in mutants)
    assert len([mutant for mutant in ALL if mutant.file.startswith("models/")]) >= 5
