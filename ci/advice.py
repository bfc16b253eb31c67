"""Run the programs of `jax-moe-lb advise` for presets on virtual CPU devices, each as pasted into a new process.

By default, every cluster has its own model, and the best choice that fits into memory; `--all` takes all pairs of
presets, and the three best choices of each. Equal programs run once.
"""

import itertools
import json
import os
import subprocess
import sys

from typer.testing import CliRunner

from jax_moe_lb.cli.app import app
from jax_moe_lb.sim.config import preset_names

ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}


def best_programs(model: str, cluster: str, number: int) -> list[tuple[str, str]]:
    """Return name and program of the best choices; empty if no choice fits."""
    command = ["advise", model, cluster, "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    if done.exit_code > 1:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    systems = json.loads(done.stdout).get("systems", [])
    return [(one["system"], one["usage"]["code"]) for one in systems[:number]]


def main(arguments: list[str]) -> None:
    """Run all programs, and exit with an error after the first that fails."""
    clusters = preset_names("cluster")
    if arguments == ["--all"]:
        found = {pair: best_programs(*pair, 3) for pair in itertools.product(preset_names("model"), clusters)}
    else:
        found = {(name, name): best_programs(name, name, 1) for name in clusters}
        if without := [name for (name, _), programs in found.items() if not programs]:
            raise SystemExit(f"nothing fits on {', '.join(without)}; expected a choice for each cluster's own model")
    done: dict[str, str] = {}
    for pair, programs in found.items():
        for name, code in programs:
            if code not in done:
                run = [sys.executable, "-W", "error::UserWarning", "-"]
                result = subprocess.run(run, input=code, env=ENVIRONMENT, capture_output=True, text=True)
                if result.returncode or not result.stdout.startswith("imbalance ["):
                    raise SystemExit(f"{' on '.join(pair)}, {name}:\n{code}\n{result.stdout}{result.stderr}")
                done[code] = result.stdout.strip()
            print(f"{' on '.join(pair)}, {name}: {done[code]}", flush=True)
    print(f"{len(done)} programs of {sum(map(bool, found.values()))} pairs ran")


if __name__ == "__main__":
    main(sys.argv[1:])
