"""Recorded expert loads, and a stand-in for them."""

import argparse
import pathlib

import numpy as np

Layers = dict[str, np.ndarray]
"""Tokens `[layers, E]` of each recording."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loads",
        nargs="+",
        type=pathlib.Path,
        default=[],
        metavar="FILE",
        help="NumPy files of tokens [layers, experts]; without any, 58 synthetic layers of 256 experts",
    )
    parser.add_argument("--step", type=int, default=1, help="every so many layers")


def read(options: argparse.Namespace) -> Layers:
    if not options.loads:
        return {"synthetic": synthetic()[:: options.step]}
    return {file.stem: np.load(file)[:: options.step].astype(np.int32, casting="same_kind") for file in options.loads}


def synthetic(num_layers: int = 58, num_experts: int = 256) -> np.ndarray:
    """Lognormal experts."""
    popularity = np.random.default_rng(0).lognormal(0, 1, (num_layers, num_experts))
    return (1e4 * popularity).astype(np.int32)


def on_first_rank(tokens: np.ndarray, num_ranks: int) -> np.ndarray:
    """Count `[..., R, E]` with these sums; all tokens start on rank 0."""
    counts = np.zeros((*tokens.shape[:-1], num_ranks, tokens.shape[-1]), np.int32)
    counts[..., 0, :] = tokens
    return counts


def scattered(tokens: np.ndarray, num_ranks: int) -> np.ndarray:
    """Count `[..., R, E]` with these sums; most tokens of an expert start on a few ranks."""
    rng = np.random.default_rng(0)
    starts = rng.dirichlet(np.full(num_ranks, 0.3), tokens.shape)
    return np.moveaxis(rng.multinomial(tokens, starts), -1, -2).astype(np.int32)
