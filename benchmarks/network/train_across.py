"""Training of the tiny language model across two datacenters.

Two processes of two devices each run in network namespaces. Plain expert parallelism over all devices is compared with
HybridEP with domains across the datacenters, with plain and with encoded experts. Seed and batches are the same.
"""

import argparse
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.network import sandbox
from benchmarks.network.launch import Rank
from benchmarks.network.shaping import check_rate
from benchmarks.network.topologies import TwoDatacenters
from benchmarks.results import Table, Value

RUNS = {"plain": (1, 1.0), "HybridEP, CR 1": (2, 1.0), "HybridEP, CR 50": (2, 50.0)}
"""Members of a domain across datacenters, and the ratio of the codec."""

DEVICES_PER_PROCESS = 2

WARMUP_STEPS = 2
"""Number of first steps excluded from times."""


def body(rank: Rank, steps: int) -> dict[str, Any]:
    """Train all runs interleaved; return losses, seconds of every step, and bytes sent by each datacenter."""
    from benchmarks.network.jax_ranks import barrier, check_same_program
    from benchmarks.network.layer import Choice, domains_of
    from jax_moe_lb import plain
    from jax_moe_lb.transport import GatherExpertDomain
    from models.config import preset
    from models.data.sources import default_corpus
    from models.mesh import place_batch
    from models.training.step import make_programs

    config = dataclasses.replace(preset("tiny"), steps=steps)
    corpus, results = default_corpus(config.data.max_corpus_bytes), {}
    for name, (domain_size, ratio) in RUNS.items():
        choice = Choice(domain_size, 1, ratio)
        mesh, domains = domains_of(choice)
        programs = make_programs(config, mesh, plain().replace(migrate=GatherExpertDomain(domains, choice.codec)))
        state = programs.init()
        losses, times_s = [], []
        program = None
        for number in range(1, steps + 1):
            batch = corpus.batch(config.seed, number, config.batch.size, config.batch.sequence_length)
            tokens = place_batch(batch, mesh)
            if program is None:
                lowered = programs.step.lower(state, tokens)
                check_same_program(lowered.as_text())
                program = lowered.compile()
            if number == WARMUP_STEPS + 1:
                barrier("warm")
                before = rank.network.counters()
            start_s = time.perf_counter()
            state, loss, *_ = program(state, tokens)
            losses.append(float(loss.addressable_data(0)))
            times_s.append(time.perf_counter() - start_s)
        barrier("done")
        sent = [after.sent_bytes - b.sent_bytes for after, b in zip(rank.network.counters(), before, strict=True)]
        timed = times_s[WARMUP_STEPS:]
        results[name] = {
            "losses": losses,
            "seconds": timed,
            "tokens_per_s": config.tokens_per_step * len(timed) / sum(timed),
            "sent_bytes_per_step": max(sent) / len(timed),
        }
        if rank.index == 0:
            print(f"{name}: loss {losses[-1]:.6f}, {results[name]['tokens_per_s']:.0f} tokens/s", flush=True)
    return results


def table(results: dict[str, dict[str, Any]]) -> Table:
    """Return losses and speeds of all runs."""
    reference = np.asarray(results["plain"]["losses"])
    rows: list[list[Value]] = []
    for name, result in results.items():
        difference = float(np.abs(np.asarray(result["losses"]) - reference).max())
        gain = result["tokens_per_s"] / results["plain"]["tokens_per_s"]
        sent_mb, speed = result["sent_bytes_per_step"] / 1e6, result["tokens_per_s"]
        rows.append([name, result["losses"][-1], difference, sent_mb, speed, gain])
    columns = {"": "", "last loss": ".6f", "largest difference": ".1g", "MB per step": ".1f"}
    return Table(columns | {"tokens/s": ".0f", "times plain": ".2f"}, rows)


def rate(text: str) -> float:
    """Return a rate of the shaper; type of an option."""
    check_rate("--wan-bits-per-s", float(text))
    return float(text)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20, choices=range(WARMUP_STEPS + 1, 1001), metavar="N")
    parser.add_argument("--wan-bits-per-s", type=rate, default=100e6)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    sandbox.enter()
    import models.training.step  # noqa: F401 (once, before ranks are forked)
    from benchmarks.network.jax_ranks import launch_jax

    with TwoDatacenters(1, given.wan_bits_per_s).build() as network:
        ranks = launch_jax(
            network, lambda rank: body(rank, given.steps), devices_per_process=DEVICES_PER_PROCESS, deadline_s=600
        )
    return {"training": table(ranks[0])}
