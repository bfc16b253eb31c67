"""`summarise` takes the final numbers of a run from its folder."""

import json
import math
from statistics import mean, median

from models.recording import RunFolder

RECENT_STEPS = 50
"""Numbers that change from step to step are averaged over the last so many steps."""


def summarise(folder: RunFolder) -> dict:
    """Sums up loss, balance and speed at the end of a run."""
    steps = folder.rows("step")
    recent, validation = steps[-RECENT_STEPS:], folder.rows("validation")[-1]
    data = json.loads(folder.config.read_text())["data"]
    entropy_nats = data["unigram_entropy_nats"]

    def recently(name: str) -> float:
        return mean(row[name] for row in recent)

    return {
        "steps": steps[-1]["step"],
        # A run that is older than tokenizers has bytes.
        "unit": data.get("unit", "byte"),
        "validation_loss_nats": validation["loss"],
        "validation_loss_bits": validation["loss_bits"],
        "unigram_entropy_nats": entropy_nats,
        "unigram_entropy_bits": entropy_nats / math.log(2),
        "train_loss_nats": recently("loss"),
        "imbalance_before": recently("imbalance_before_mean"),
        "imbalance_after": recently("imbalance_after_mean"),
        "straggler_before_tokens": recently("straggler_before"),
        "straggler_after_tokens": recently("straggler_after"),
        "one_round_share": mean(row["rounds_max"] == 1 for row in recent),
        "rounds_max": max(row["rounds_max"] for row in recent),
        "rows_moved": recently("rows_moved"),
        "weight_bytes_moved": recently("weight_bytes_moved"),
        # The median, as checkpoints make some steps slow.
        "tokens_per_s": median(row["tokens_per_s"] for row in recent),
        "step_time_s": median(row["step_time_s"] for row in recent),
    }
