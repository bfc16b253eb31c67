"""Benchmarks of one subject as subcommands: `python -m benchmarks.SUBJECT NAME [options]`.

A benchmark is a module of the subject's folder with `benchmark(given)`, which returns its tables by name, and with
`options(parser)` if it has options. `--out FILE.json` saves the tables, see `benchmarks.render.results`.
"""

import argparse
import ast
import importlib
import sys
from pathlib import Path

from benchmarks.render.results import out_option, report


def names_of(folder: Path) -> dict[str, str]:
    """Return the benchmarks of a subject and the first line of each docstring, without importing them."""
    trees = {path.stem: ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))}
    return {
        name: (ast.get_docstring(tree) or "").partition("\n")[0]
        for name, tree in trees.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "benchmark" for node in tree.body)
    }


def run(subject: str) -> None:
    """Run the benchmark named by the command line, of a folder of `benchmarks`."""
    names = names_of(Path(__file__).parents[1] / subject)
    width = max(map(len, names))
    shown = "\n".join(f"  {name:{width}}  {line}" for name, line in names.items())
    prog = f"python -m benchmarks.{subject}"
    form = argparse.RawDescriptionHelpFormatter
    choice = argparse.ArgumentParser(prog=prog, description=f"Benchmarks:\n{shown}", formatter_class=form)
    choice.add_argument("name", choices=names, metavar="NAME", help="Benchmark to run; NAME --help lists its options.")
    name = choice.parse_args(sys.argv[1:2]).name
    module = importlib.import_module(f"benchmarks.{subject}.{name}")
    parser = argparse.ArgumentParser(prog=f"{prog} {name}", description=module.__doc__, formatter_class=form)
    if hasattr(module, "options"):
        module.options(parser)
    out_option(parser)
    given = parser.parse_args(sys.argv[2:])
    report(module.benchmark(given), given.out)
