"""Router and its losses in NumPy and float64, forward and backward, implemented from their definitions."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Rules:
    """Rules and losses of a router, as plain data."""

    per_tok: int
    score: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: tuple[int, int, int] | None = None  # number of groups, groups per token, experts per score
    forced: bool = False
    switch: float = 0.0
    sequence: float = 0.0
    z: float = 0.0
    sequence_length: int = 1


class Routed(NamedTuple):
    """Routing of the `N` tokens of a group, rank by rank."""

    logits: np.ndarray
    log_scores: np.ndarray
    experts: np.ndarray  # [N, K]
    weights: np.ndarray  # [N, K]
    active: np.ndarray  # [N]
    loss: float
    margin: float  # margin of the closest choice


def route(rules: Rules, logits: np.ndarray, bias: np.ndarray | None, active: np.ndarray) -> Routed:
    log_scores = log_softmax(logits) if rules.score == "softmax" else -np.logaddexp(0, -logits)
    if rules.forced:
        num_tokens, num_experts = logits.shape
        experts, margin = np.arange(num_tokens * rules.per_tok).reshape(num_tokens, -1) % num_experts, np.inf
    else:
        experts, margin = choose(rules, np.exp(log_scores) + (0 if bias is None else bias), active)
    chosen = np.take_along_axis(log_scores, experts, 1)
    weights = rules.scale * np.exp(log_softmax(chosen) if rules.renormalise else chosen) * active[:, None]
    routed = Routed(logits, log_scores, experts, weights, active, 0.0, margin)
    return routed._replace(loss=total_loss(rules, routed))


def choose(rules: Rules, scores: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the experts of the highest scores, with ties to the lower index, and the margin of the choice."""
    margin = np.inf
    if rules.groups is not None:
        num_groups, top_groups, experts_per_score = rules.groups
        grouped = scores.reshape(len(scores), num_groups, -1)
        group_scores = -np.sort(-grouped, axis=2)[:, :, :experts_per_score].sum(2)
        best, margin = highest(group_scores, top_groups, active)
        allowed = np.zeros(group_scores.shape, bool)
        np.put_along_axis(allowed, best, True, 1)
        scores = np.where(allowed[:, :, None], grouped, -np.inf).reshape(scores.shape)
    experts, among_experts = highest(scores, rules.per_tok, active)
    return experts, min(margin, among_experts)


def highest(scores: np.ndarray, number: int, active: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the columns of the highest scores, and the smallest distance to the next score other than an exact tie."""
    order = np.argsort(-scores, axis=1, kind="stable")
    taken = np.take_along_axis(scores, order, 1)[active]
    if number == scores.shape[1]:
        return order, np.inf
    last, following = taken[:, number - 1], taken[:, number]
    # Relative to the score, but at least to the smallest float32 scale.
    gaps = ((last - following) / np.maximum(np.abs(last), 1e-30))[last != following]
    return order[:, :number], gaps.min(initial=np.inf)


def log_softmax(values: np.ndarray) -> np.ndarray:
    values = values - values.max(1, keepdims=True)
    return values - np.log(np.exp(values).sum(1, keepdims=True))


def log_partition(logits: np.ndarray) -> np.ndarray:
    """`[N, 1]`."""
    highest_logit = logits.max(1, keepdims=True)
    return highest_logit + np.log(np.exp(logits - highest_logit).sum(1, keepdims=True))


def total_loss(rules: Rules, routed: Routed) -> float:
    shares, active = np.exp(log_softmax(routed.log_scores)), routed.active[:, None]
    z_loss = (active * log_partition(routed.logits) ** 2).sum() / max(active.sum(), 1)
    return float((loss_by_share(rules, routed) * shares).sum() + rules.z * z_loss)


def loss_by_share(rules: Rules, routed: Routed) -> np.ndarray:
    """Return the loss per share of a token in an expert, `[N, E]`; the losses are linear in the shares.

    Both are `E * sum_e fraction_e * mean of share_e`, over a whole group or over each sequence.
    """
    num_tokens, num_experts = routed.logits.shape
    taken = np.zeros((num_tokens, num_experts))
    np.put_along_axis(taken, routed.experts, 1.0, 1)
    factor = np.zeros((num_tokens, num_experts))
    for coefficient, length in ((rules.switch, num_tokens), (rules.sequence, rules.sequence_length)):
        if coefficient == 0 or num_tokens == 0:
            continue
        for start in range(0, num_tokens, length):
            block = slice(start, start + length)
            active = routed.active[block, None]
            num_active = max(active.sum(), 1)
            fraction = (taken[block] * active).sum(0) / (num_active * rules.per_tok)
            share = num_experts * fraction * active / num_active
            factor[block] += coefficient * share / (num_tokens / length)
    return factor


def pull_back(
    rules: Rules, routed: Routed, by_weight: np.ndarray, weight_sizes: np.ndarray, by_loss: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradient of the logits, and the size of its terms.

    Args:
        rules: rules of the router.
        routed: its result.
        by_weight: `[N, K]`, gradient of the weights.
        weight_sizes: `[N, K]`, size of the terms of `by_weight`.
        by_loss: gradient of the loss.
    """
    weights, active = routed.weights, routed.active[:, None]
    if rules.renormalise:
        chosen, sizes = through_softmax(weights / rules.scale, rules.scale * by_weight, rules.scale * weight_sizes)
    else:
        # The derivative of exp is exp.
        chosen, sizes = weights * by_weight, weights * weight_sizes
    shares, factor = np.exp(log_softmax(routed.log_scores)), by_loss * loss_by_share(rules, routed)
    by_score, score_sizes = through_softmax(shares, factor, np.abs(factor))
    for total, part in ((by_score, chosen), (score_sizes, sizes)):
        np.put_along_axis(total, routed.experts, np.take_along_axis(total, routed.experts, 1) + part, 1)
    probabilities = np.exp(log_softmax(routed.logits))
    if rules.score == "softmax":
        by_logit = by_score - probabilities * by_score.sum(1, keepdims=True)
        logit_sizes = score_sizes + probabilities * score_sizes.sum(1, keepdims=True)
    else:
        # The derivative of log sigmoid(z) is sigmoid(-z).
        slope = np.exp(-np.logaddexp(0, routed.logits))
        by_logit, logit_sizes = slope * by_score, slope * score_sizes
    by_z = by_loss * rules.z * 2 * log_partition(routed.logits) * probabilities / max(active.sum(), 1)
    return active * (by_logit + by_z), active * (logit_sizes + np.abs(by_z))


def through_softmax(p: np.ndarray, upstream: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradient of the argument of softmax `p`, from the gradient of `p`, and the size of its terms."""
    gradient = p * (upstream - (p * upstream).sum(1, keepdims=True))
    return gradient, p * (sizes + (p * sizes).sum(1, keepdims=True))
