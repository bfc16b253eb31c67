"""The mutants of `ci/mutants.py` change one place, and those with a wrong operand select it by their number."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ci"))

import mutants  # noqa: E402

PROGRAM = """#include <cstdio>
struct Gpu {
  int copies() const { return 1; }
  int fetches() const { return 2; }
  int device() const { return 0; }
};
struct Event {
  const char* name;
  const char* get() const { return name; }
};
struct Call {
  Event copied{"copied"}, ready{"ready"};
};
int Minus(int a, int b) { return a - b; }
int main() {
  const Gpu gpu_;
  const Gpu* const gpu = &gpu_;
  const Call call;
  const int from = 7, to = 3, size = 4, step = 10;
  std::printf("%d ", gpu->copies());
  std::printf("%d ", gpu->fetches());
  std::printf("%s ", call.copied.get());
  std::printf("%d ", gpu->device());
  std::printf("%d ", Minus(from, to));
  std::printf("%d", size * step);
}
"""

WRONG = {
    "another stream": "2 2 copied 0 4 40",
    "the other stream": "1 1 copied 0 4 40",
    "another event": "1 2 ready 0 4 40",
    "another device": "1 2 copied 1 4 40",
    "arguments exchanged": "1 2 copied 0 -4 40",
    "off by one element": "1 2 copied 0 4 30",
}


def build(folder, text):
    source, program = folder / "program.cc", folder / "program"
    source.write_text(text)
    command = ["c++", "-std=c++17", "-include", str(ROOT / "ci" / "mutants.h"), "-o", str(program), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    return program, done.stderr


def selected(found):
    texts = [mutants.OPERATORS[one.operator].selected.format(n, **dict(one.groups)) for n, one in enumerate(found, 1)]
    return mutants.mutated(PROGRAM, list(zip(found, texts, strict=True)))


def test_a_wrong_operand_is_selected_by_its_number(tmp_path):
    found = [one for one in mutants.mutants_of("program.cc", PROGRAM) if one.operator in WRONG]
    assert sorted(one.operator for one in found) == sorted(WRONG)
    program, errors = build(tmp_path, selected(found))
    assert not errors

    def printed(number):
        return subprocess.run([program], env={"MUTANT": str(number)}, capture_output=True, text=True).stdout

    assert printed(0) == "1 2 copied 0 4 40"
    assert {one.operator: printed(number) for number, one in enumerate(found, 1)} == WRONG


def test_the_compiler_names_exchanged_arguments_of_different_types(tmp_path):
    """Other mutants of the same line remain."""
    text = PROGRAM.replace("Minus(from, to)", "Minus(from, to) + Wide(from, wide, size)")
    text = text.replace("int main", "long wide = 5;\nint Wide(int a, long b, int c) { return a + c; }\nint main")
    found = [one for one in mutants.mutants_of("program.cc", text) if one.operator == "arguments exchanged"]
    texts = [mutants.OPERATORS[one.operator].selected.format(n, **dict(one.groups)) for n, one in enumerate(found, 1)]
    _, errors = build(tmp_path, mutants.mutated(text, list(zip(found, texts, strict=True))))
    named = mutants.Build(tmp_path, found)._named_by(errors)
    exchanged = [dict(one.groups)["b"] for one in found]
    assert (exchanged, [dict(one.groups)["b"] for one in named]) == (["to", "wide"], ["wide"])


def test_an_error_elsewhere_names_all_mutants_of_its_line(tmp_path):
    found = mutants.mutants_of("ffi/x.cc", "  cudaSetDevice(gpu->device());\n")
    named = mutants.Build(tmp_path, found)._named_by("source/ffi/x.cc:1:3: error: no")
    # The operand has no form alone, and is left out first.
    assert [one.operator for one in named] == ["another device"]


@pytest.mark.parametrize("outcome", ["failure of sockets_test", mutants.SURVIVED, mutants.NOT_BUILT])
def test_recorded_survivors_keep_their_reasons(outcome, tmp_path):
    path, key = tmp_path / "record.json", "ffi/x.cc: another device: f(gpu->device());"
    mutants.record(path, {key: mutants.SURVIVED})
    path.write_text(path.read_text().replace(f'"{key}": ""', f'"{key}": "a reason"'))
    mutants.record(path, {key: outcome})
    assert ("a reason" in path.read_text()) == (outcome == mutants.SURVIVED)


@pytest.mark.parametrize("record", ["cpp.json", "operands.json"])
def test_recorded_survivors_are_mutants_of_the_tree(record):
    """A reason about a line that has changed proves nothing: drop it, or move it with the line."""
    survivors = json.loads(Path(__file__).with_name(record).read_text())["survivors"]
    files = {key.partition(": ")[0] for key in survivors}
    mutants_there = {one.key for file in files for one in mutants.mutants_of(file, (ROOT / file).read_text())}
    assert [key for key in survivors if key not in mutants_there] == []
