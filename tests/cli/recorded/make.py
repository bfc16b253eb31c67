"""Write the dumps of this folder in the format of SGLang's recorder; requires torch, version 2.13 for these files.

`stat.pt` has 8 steps, the last 4 empty as in a partly filled ring buffer, and 3 layers, the first empty. `passes` has
the passes of two ranks, with two copies more than experts, and `received` the copies received by each.
"""

from pathlib import Path

import torch

HERE = Path(__file__).parent


def write(path: Path, data: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save(data, path)


def passes(folder: str, keep) -> None:
    places = torch.tensor([[0, 1, 2, 0, 3, 3]]).expand(2, 6).clone()
    for rank in range(2):
        steps = [7, 8] if rank else [6, 7, 8]
        counts = [torch.arange(12, dtype=torch.int32).reshape(2, 6) * (rank + 1) + step for step in steps]
        common = {"rank": rank, "gatherer_key": "primary"}
        records = [
            {"forward_pass_id": step, **common, "global_physical_count": keep(rank, count)}
            for step, count in zip(steps, counts, strict=True)
        ]
        path = HERE / folder / f"expert_distribution_recorder_1.5_{rank}.pt"
        write(path, {"records": records, "last_physical_to_logical_map": places})


def of_rank(rank, count):
    mine = torch.zeros_like(count)
    mine[:, 3 * rank : 3 * rank + 3] = count[:, 3 * rank : 3 * rank + 3]
    return mine


if __name__ == "__main__":
    count = torch.arange(8 * 3 * 4, dtype=torch.int32).reshape(8, 3, 4)
    count[4:], count[:, 0] = 0, 0
    write(HERE / "stat.pt", {"rank": 0, "logical_count": count, "average_utilization_rate_over_window": None})
    passes("passes", lambda rank, count: count)
    passes("received", of_rank)
