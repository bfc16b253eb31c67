"""Every block of a page runs alone in the environment of the wheel, or names its needs; every command exists; every
explained message is one of the code.
"""

import dataclasses
import importlib
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from jax_moe_lb.cli.app import UsageError, app
from jax_moe_lb.cli.planning import balancer_names
from jax_moe_lb.layer.systems import system_named, system_names
from tests.marks import parametrize
from tests.page_blocks import CHECKOUT, ELSEWHERE, Block, blocks, run_alone, same_output
from tests.plain_environment import write_sitecustomize
from tests.test_doctests import ROOMS

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/**/*.md"))

EVERY = [block for page in PAGES for block in blocks(page)]
BLOCKS = [block for block in EVERY if not ELSEWHERE.keys() & set(block.needs)]

CHEAP = {"install-0", "simulator-0", "traces-0"}
"""Blocks that compile little: they also run in `make check` and `make test`.

The others are further cases of the same faults: an import, a name or an argument of another version.
"""


def marks(block):
    return () if block.name in CHEAP else (pytest.mark.thorough,)


@pytest.mark.slow
@pytest.mark.parametrize("block", [pytest.param(block, marks=marks(block), id=block.name) for block in BLOCKS])
def test_a_block_runs_alone(block, tmp_path):
    printed = run_after_pip_install(block, tmp_path)
    assert block.output is None or same_output(printed, block.output), printed


def run_after_pip_install(block, folder):
    """Run a block with the modules of `pip install .` and of the needs of the block, and no others."""
    (folder / "path").mkdir()
    (folder / "empty").mkdir()
    write_sitecustomize(folder / "path", block.requirements, OF_A_CHECKOUT if CHECKOUT in block.needs else ())
    return run_alone(block, folder / "empty", folder / "path")


OF_A_CHECKOUT = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"models", "benchmarks"}


MODULES = {
    "pydantic": "`pip install '.[tools]'`",
    "flatbuffers": "`pip install flatbuffers`",
    "tokenizers": "`pip install '.[models]'`",
    "grain": "`pip install '.[train]'`",
    "models.config": CHECKOUT,
    "benchmarks.layer.workloads": CHECKOUT,
}
"""A module of each need."""


@pytest.mark.slow
@parametrize("module", ["pydantic", "models.config"], MODULES)
def test_a_block_sees_only_what_it_needs(module, tmp_path):
    """The environment of these tests has all of them, and each block runs as after `pip install .`."""
    block = Block(ROOT / "page.md", 0, (), f"import {module}, jax_moe_lb\nprint('imported')\n", None)
    for folder in ("plain", "labelled"):
        (tmp_path / folder).mkdir()
    with pytest.raises(AssertionError, match=f"No module named '{module.partition('.')[0]}"):
        run_after_pip_install(block, tmp_path / "plain")
    labelled = dataclasses.replace(block, needs=(MODULES[module],))
    assert run_after_pip_install(labelled, tmp_path / "labelled") == "imported\n"


def test_every_need_is_known():
    """A sentence before a block names a checkout, an installation, or a program that runs elsewhere."""
    for block in EVERY:
        unknown = {need for need in block.needs if not need.startswith("`pip install ")} - ELSEWHERE.keys() - {CHECKOUT}
        assert not unknown, block.name


def test_marked_blocks_exist():
    assert {block.name for block in BLOCKS} >= CHEAP


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("imbalance 2.02 -> 1.01, rounds 1\n", True),
        ("imbalance  2.03 -> 1.01,\nrounds 1", True),
        ("imbalance 2.02 -> 1.31, rounds 1\n", False),
        ("imbalance 2.02 -> 1.01, rounds 3\n", False),
        ("imbalance 2.02 -> 1.01\n", False),
        ("balance 2.02 -> 1.01, rounds 1\n", False),
    ],
)
def test_output_is_compared_up_to_rounding(printed, same):
    assert same_output(printed, "imbalance 2.02 -> 1.01, rounds 1\n") is same


def test_what_runs_elsewhere_names_the_page():
    elsewhere = {(need, block.page.stem) for block in EVERY for need in block.needs if need in ELSEWHERE}
    assert {need for need, _ in elsewhere} == ELSEWHERE.keys()
    assert all(page in (ROOT / ELSEWHERE[need]).read_text() for need, page in elsewhere)


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    # files of the repository root, see ci/site_hooks.py
    beside = {"results/README.md", "changelog.md", "contributing.md"}
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent.name != "systems"}
    assert set(listed) == pages | beside


def test_every_public_module_has_a_page_of_the_reference():
    """The page lists `__all__` of the module."""
    pages = {page.stem: page.read_text() for page in (ROOT / "docs/reference").glob("*.md")}
    assert pages.pop("README")
    rooms = {room.rpartition(".")[2]: room for room in ROOMS}
    assert pages.keys() == rooms.keys()
    assert all(pages[name].endswith(f"\n::: {room}\n") for name, room in rooms.items())


def commands():
    """Yield the lines of blocks without a language that start with a program, without comments."""
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in [] if language else block.splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True) if PROGRAM.match(line) else []
                yield from [(page, words[: words.index("&")] if "&" in words else words)] if words else []


PROGRAM = re.compile(r"(\$ )?(jax-moe-lb|python|pip|bash|make|pytest) ")
OPENED = {"models.train", "models.generate", "models.upcycle", "models.tiny_checkpoint"}
"""Modules with checked options."""


def problem(words):
    """Return the error of a command without running it; `None` if it is valid."""
    match words:
        case ["jax-moe-lb", *arguments]:
            return refused(app, arguments)
        case ["python", "-m", module, *arguments]:
            if module in OPENED:
                return refused(importlib.import_module(module).app, arguments)
            return None if importlib.util.find_spec(module) else "no such module"
        case ["make", target, *_]:
            found = re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return None if found else "no such target"
        case ["pip", "install", *what]:
            return None if extras(" ".join(what)) <= DECLARED else "no such extra"
        case ["bash" | "pytest", path, *_]:
            return None if (ROOT / path).exists() else "no such file"
    return "no form that this test knows"


DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()


def extras(text):
    return {extra for found in re.findall(r"\[([\w,]+)\]", text) for extra in found.split(",")}


def refused(program, arguments):
    """Return typer's error for unknown or missing arguments, without calling the program."""
    command = typer.main.get_command(program)
    try:
        if named := getattr(command, "commands", None):
            if arguments[0] not in named:
                return "no such command"
            command, arguments = named[arguments[0]], arguments[1:]
        command.make_context("command", list(arguments))
    except UsageError as error:
        return error.format_message()
    return None


def test_the_commands_of_pages_are_such():
    found = list(commands())
    assert len(found) > 40, found
    wrong = {f"{page.name}: {' '.join(words)}": why for page, words in found if (why := problem(words))}
    assert not wrong


@pytest.mark.parametrize(
    "words",
    [
        ["jax-moe-lb", "plan", "COUNTS.npy", "--slot-number", "4"],
        ["jax-moe-lb", "guess"],
        ["python", "-m", "models.train", "--stepps", "3"],
        ["python", "-m", "models.nothing"],
        ["make", "coffee"],
        ["pip", "install", ".[gpu]"],
        ["bash", "ci/nothing.sh"],
    ],
    ids=" ".join,
)
def test_commands_that_are_none_are_found(words):
    assert problem(words)


OF_JAX = {
    "Number of devices 1",
    "jax_num_cpu_devices config",
    "in_specs passed to shard_map",
    "shard_map applied to the function",
    "attempt to get argmin",
    "Cannot mutate",
}
"""Prefixes of messages from JAX and Flax."""


def test_the_messages_of_troubleshooting_exist():
    """The constant parts of a message occur in a source file, in strings that may span several lines."""
    sources = [p for root in ("jax_moe_lb", "models", "ffi") for s in ("*.py", "*.cc") for p in (ROOT / root).rglob(s)]
    text = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in sources)
    messages = re.findall(r"^- `(.+?)`:", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    own = [message for message in messages if not message.startswith(tuple(OF_JAX))]
    assert len(messages) - len(own) == len(OF_JAX)
    parts = {part.strip() for message in own for part in message.split("...")}
    assert not {part for part in parts if part.strip("();, ") and part not in text}


SYSTEM_PAGES = [page for page in PAGES if page.parent.name == "systems" and page.stem != "README"]


@pytest.mark.parametrize("page", SYSTEM_PAGES, ids=lambda page: page.stem)
def test_a_page_of_a_system_says_how_to_train_with_it(page):
    (line,) = re.findall(r"^Train with it: (.+)$", page.read_text(), re.MULTILINE)
    command = re.match(r"`(python -m models\.train .+?)`", line)
    assert command or line.startswith("`MoE(")
    assert command is None or problem(shlex.split(command[1])) is None
    if command and (system := re.search(r"--system (\w+)", command[1])):
        system_named(system[1])


def test_every_system_and_every_page_has_a_name_in_the_table():
    table = (ROOT / "docs/systems/README.md").read_text()
    linked = re.findall(r"\]\((\w+)\.md\) \|$", table, re.MULTILINE)
    assert sorted(linked) == sorted(page.stem for page in SYSTEM_PAGES)
    named = re.findall(r'^\| `(\w+)`.* \| `system="(\w+)"` \| `--system (\w+)`', table, re.MULTILINE)
    assert all(len(set(names)) == 1 for names in named)
    assert {names[0] for names in named} >= set(system_names())
    balancers = re.findall(r"`--balancer (\w+)`", table)
    assert sorted(balancers) == sorted(balancer_names())
