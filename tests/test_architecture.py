"""The documented structure of the package, checked on the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import jax_moe_lb

PACKAGE = Path(jax_moe_lb.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = [
    ["core"],
    ["routing", "planners", "kernels"],
    ["balancers", "collectives"],
    ["contrib", "transport"],
    ["layer", "recordings"],
    ["nn", "sim", "aot"],
    ["advise", "integrations"],
    ["cli"],
]
"""The rooms of the package. A module imports only from its own room and from lower floors."""

MOST_ROOMS, MOST_ARROWS = 16, 59
"""Limits of the rooms, and of the pairs of rooms of which one imports the other."""

SYSTEMS = {"Direct", "Forward", "Gather", "MultiRailDispatch", "Once", "PeerCopy", "Relay", "TwoPhase"}
SYSTEMS |= {"Chain", "HybridEP", "Plain", "RailS"}
"""Strategies, by whose class executor and simulator never branch."""


def room_of(module):
    return module.removeprefix("jax_moe_lb").removeprefix(".").partition(".")[0]


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            of_package = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from of_package if node.module == "jax_moe_lb" else [node.module]
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def strategies_told_apart(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            yield from SYSTEMS & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}


def faults_of(path):
    """Yield each rule broken by a file."""
    module, text = module_name(path), path.read_text()
    tree = ast.parse(text)
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    if module and room_of(module) not in floor:
        yield f"{module} is in no room of FLOORS"
        return
    for name in imported(tree):
        if name.partition(".")[0] in {"models", "benchmarks", "tests"}:
            yield f"{module} imports {name}"
        other = room_of(name)
        inside = name.startswith("jax_moe_lb.") and other in floor and module
        if inside and other != room_of(module) and floor[other] >= floor[room_of(module)]:
            yield f"{module} imports {name}, which is not on a lower floor"
    if path.stem.startswith("_") and path.stem not in {"__init__", "__main__"}:
        yield f"{module} is an underscore module"
    if text.count("\n") > 800:
        yield f"{module} has more than 800 lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 80:
            yield f"{module}.{node.name} has more than 80 lines"
        if isinstance(node, ast.Global):
            yield f"{module}:{node.lineno} keeps a global"
        # XLA and JAX plugins read their flags only from the environment.
        is_read = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
        if is_read and path.name not in {"virtual_devices.py", "targets.py"}:
            yield f"{module}:{node.lineno} reads the environment"
    for name in strategies_told_apart(tree):
        yield f"{module} asks whether a strategy is a {name}"
    if path.name == "__init__.py" and path.parent != PACKAGE:
        allowed = (ast.Expr, ast.ImportFrom, ast.Assign, ast.FunctionDef)
        if not all(isinstance(node, allowed) for node in tree.body):
            yield f"{module} does more than export names"


def rooms_imported_by(path):
    """Yield the other rooms that a file imports."""
    module = module_name(path)
    for name in imported(ast.parse(path.read_text())) if module else ():
        if name.startswith("jax_moe_lb.") and room_of(name) != room_of(module):
            yield room_of(name)


def test_rooms_and_their_arrows_stay_few():
    rooms = {room for floor in FLOORS for room in floor}
    arrows = {(room_of(module_name(path)), other) for path in FILES for other in rooms_imported_by(path)}
    assert len(rooms) <= MOST_ROOMS
    assert len({arrow for arrow in arrows if arrow[1] in rooms}) <= MOST_ARROWS


def test_every_file_keeps_the_rules():
    assert [fault for path in FILES for fault in faults_of(path)] == []


def test_public_modules_show_public_names_only():
    assert dir(jax_moe_lb) == sorted(jax_moe_lb.__all__)
    for name in jax_moe_lb.__all__:
        value = getattr(jax_moe_lb, name)
        if type(value) is type(sys):
            assert dir(value) == sorted(value.__all__)
            assert all(getattr(value, public) is not None for public in value.__all__)


def test_planning_on_numpy_does_not_import_jax():
    code = "import sys; from jax_moe_lb import _planning; print('jax' in sys.modules)"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert answer.stdout == "False\n"
