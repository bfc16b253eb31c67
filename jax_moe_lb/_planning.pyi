import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int32]

def lpt(weights: Integers, num_bins: int, capacity: int) -> Integers: ...
def quota(tokens: Integers, placement: Integers) -> Integers: ...
def greedy(placement: Integers, quota: Integers, domain: int, min_tokens: int = 1) -> tuple[Integers, Integers]: ...
def ultraep(
    placement: Integers, quota: Integers, domain: int, eps: float = 0.01, min_tokens: int = 1024
) -> tuple[Integers, Integers]: ...
def exact(
    counts: Integers,
    num_slots: int,
    domain: int,
    eps: float = 0.01,
    max_fan_out: int | None = None,
    localize: bool = True,
) -> tuple[Integers, Integers]: ...
