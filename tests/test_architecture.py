"""The structure that the documentation promises, read from the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jax_moe_lb

PACKAGE = Path(jax_moe_lb.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# A module imports only from lower layers, or from its own.
LAYERS = [
    [
        "_pytree",
        "_first_order",
        "_varying",
        "_unvarying_call",
        "_custom_calls",
        "_neighbours",
        "activations",
        "checks",
        "types",
        "virtual_devices",
        "measure",
        "compiler_options",
    ],
    ["topology", "experts", "split", "_floor_share", "_plan_file"],
    ["planners"],
    ["plan", "ops", "routing", "hybrid", "streams"],
    ["legality", "faults", "losses", "capacity"],
    ["routers", "stats"],
    ["relocation", "balancers"],
    [
        "transport.codec",
        "transport.copies",
        "transport.exchange",
        "transport.migrate",
        "transport.packing",
        "transport.prefetch",
        "transport.rail_hops",
        "transport.rail_traffic",
        "transport.replicate",
        "transport.shards",
        "transport.wire",
    ],
    ["transport.gather", "transport.peer_copy", "transport.relay", "transport.rounds"],
    ["transport.dispatch"],
    ["transport.direct", "transport.spray"],
    ["transport.phase_receipts", "transport.phases"],
    ["transport.two_phase"],
    ["systems"],
    ["pipeline"],
    ["nn"],
    ["sim", "compiled"],
    ["cli"],
]


def layer_of(module: str) -> int:
    for depth, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return depth
    raise AssertionError(f"{module} has no layer")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_one_way(path):
    module = module_name(path)
    for name in imported(path):
        assert name.split(".")[0] not in {"models", "benchmarks", "tests"}, f"{module} imports {name}"
        inner = name.removeprefix("jax_moe_lb.")
        if module not in {"__init__", ""} and name.startswith("jax_moe_lb."):
            assert layer_of(inner) <= layer_of(module), f"{module} imports {inner}, which is above it"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_and_functions_stay_short(path):
    assert path.read_text().count("\n") <= 500
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 80, node.name


# What has a clock knows plans and systems, not what runs on devices; only the command line knows it.
SIMULATED = {"plan", "topology", "split", "balancers", "systems", "streams", "checks", "experts", "types"}
# Relocation is planned on the host.
SIMULATED |= {"transport", "sim", "relocation"}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_the_simulator_stands_apart(path):
    inside = module_name(path).split(".")[0] == "sim"
    for name in imported(path):
        if name.startswith("jax_moe_lb."):
            part = name.split(".")[1]
            if inside:
                assert part in SIMULATED, f"{path} imports {name}"
            elif not inside and module_name(path).split(".")[0] != "cli":
                assert part != "sim", f"{path} imports {name}"


INIT_FILES = [path for path in FILES if path.name == "__init__.py" and path.parent != PACKAGE]


@pytest.mark.parametrize("path", [*INIT_FILES, PACKAGE / "__init__.pyi"], ids=lambda path: path.parent.name)
def test_init_files_only_export(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Expr):
            continue  # the docstring
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "__version__":
            continue
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.name == alias.asname for alias in node.names)


def test_every_public_name_can_be_imported():
    assert jax_moe_lb.__all__
    for name in jax_moe_lb.__all__:
        assert getattr(jax_moe_lb, name) is not None


def test_planning_on_numpy_does_not_import_jax():
    code = "import sys; from jax_moe_lb import _planning; print('jax' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert answer.stdout == "False\n"


def test_a_balancers_file_is_its_name():
    for path in (PACKAGE / "balancers").glob("*.py"):
        classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        public = [node.name for node in classes if not node.name.startswith("_")]
        if path.stem not in {"__init__", "base", "host", "cost", "facts", "history", "repacking"}:
            assert [name.lower() for name in public] == [path.stem.replace("_", "")]


@pytest.mark.slow
def test_nothing_reads_the_environment_or_keeps_globals():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            reads = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
            # XLA and the plugins of JAX take their flags from nowhere else.
            assert not reads or path.name in {"virtual_devices.py", "targets.py"}, path
            assert not isinstance(node, ast.Global), path


def test_no_strategy_is_known_by_its_class():
    """Executor and simulator ask strategies what they need; the executor makes no exception for one of them."""
    strategies = {
        "TwoPhase",
        "Direct",
        "MultiRailDispatch",
        "Gather",
        "PeerCopy",
        "Relay",
        "HybridEP",
        "Plain",
        "Chain",
        "RailS",
    }
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                assert not asked & strategies, f"{module_name(path)}:{node.lineno}"
