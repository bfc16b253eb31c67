"""Count the lines of docstrings of internal names; fail above a limit.

A name is public if the `__all__` of a room of `jax_moe_lb` has it, or if it belongs to a public class. Public names
have full docstrings. Internal names have one line, annotations, and comments for reasons. Abstract methods describe a
contract and commands are their own help, so neither counts.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES = 1500
"""Limit for `jax_moe_lb`: a line for each internal name, and few more."""

Definition = ast.FunctionDef | ast.ClassDef


def public_names() -> set[tuple[str, str]]:
    """Return the modules and names that rooms export."""
    found = set()
    for path in [*ROOT.glob("jax_moe_lb/*/__init__.py"), ROOT / "jax_moe_lb" / "layer" / "systems.py"]:
        tree = ast.parse(path.read_text())
        assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        exported = set(ast.literal_eval(assigned.get("__all__", ast.List([]))))
        found |= {(".".join(path.relative_to(ROOT).with_suffix("").parts), name) for name in exported}
        # Rooms that import at first use name the modules in a stub.
        stub = path.with_suffix(".pyi")
        room = ".".join(path.relative_to(ROOT).parent.parts)
        for node in (*tree.body, *(ast.parse(stub.read_text()).body if stub.exists() else ())):
            if isinstance(node, ast.ImportFrom):
                module = f"{room}.{node.module}" if node.level else node.module
                found |= {(module, alias.name) for alias in node.names if alias.name in exported}
    return found


def definitions(body: list[ast.stmt], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Definition]]:
    """Yield the functions and classes of a module with their qualified names."""
    for node in body:
        if isinstance(node, Definition):
            yield (*before, node.name), node
            yield from definitions(node.body, (*before, node.name))


def commands() -> set[str]:
    """Return the names of functions that the command line registers without a decorator."""
    tree = ast.parse((ROOT / "jax_moe_lb" / "cli" / "app.py").read_text())
    given = [one.args for one in ast.walk(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Call)]
    loops = [one.iter.elts for one in tree.body if isinstance(one, ast.For) and isinstance(one.iter, ast.Tuple)]
    return {one.id for some in [*given, *loops] for one in some if isinstance(one, ast.Name)}


def is_exempt(node: Definition, registered: set[str]) -> bool:
    """Return whether a docstring is a contract of subclasses or the help of a command."""
    marks = [ast.unparse(one) for one in node.decorator_list]
    marked = any("abstractmethod" in one or ".command" in one or ".callback" in one for one in marks)
    return marked or node.name in registered


def is_private(name: str) -> bool:
    """Return whether a member is private; `__call__` and its like are public."""
    return name.startswith("_") and not name.endswith("__")


def internal_lines() -> Iterator[tuple[int, str]]:
    """Yield the lines of each docstring of an internal name."""
    public, registered = public_names(), commands()
    for path in sorted((ROOT / "jax_moe_lb").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for names, node in definitions(ast.parse(path.read_text()).body):
            is_public = (module, names[0]) in public and not any(is_private(name) for name in names[1:])
            if not is_public and not is_exempt(node, registered) and ast.get_docstring(node):
                yield node.body[0].end_lineno - node.body[0].lineno + 1, f"{module}.{'.'.join(names)}"


def main() -> None:
    """Print the longest docstrings and their sum; exit with 1 above the limit."""
    found = sorted(internal_lines(), reverse=True)
    total = sum(lines for lines, _ in found)
    if total > MOST_LINES:
        print(*(f"{lines} lines: {name}" for lines, name in found[:20]), sep="\n")
        sys.exit(f"docstrings of internal names have {total} lines; expected at most {MOST_LINES}")


if __name__ == "__main__":
    main()
