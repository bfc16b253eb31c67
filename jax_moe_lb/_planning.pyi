import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int32]
Paths = list[tuple[int, int, int, int, int]]

def greedy(placement: Integers, quota: Integers, domain: int, min_tokens: int = 1) -> tuple[Integers, Integers]: ...
def ultraep(
    placement: Integers, quota: Integers, domain: int, eps: float = 0.01, min_tokens: int = 1024
) -> tuple[Integers, Integers]: ...
def ultraep_kernel(
    placement: Integers, quota: Integers, domain: int, eps: float = 0.01, min_tokens: int = 1024
) -> tuple[Integers, Integers, Paths]: ...
def relay(
    placement: Integers, num_home: int, min_replicas: int = 4, max_relays: int = 8, min_gain: int = 2
) -> Integers: ...
def exact(
    counts: Integers,
    num_slots: int,
    domain: int,
    eps: float = 0.01,
    max_fan_out: int | None = None,
    localize: bool = True,
) -> tuple[Integers, Integers]: ...
def exact_kernel(
    counts: Integers,
    num_slots: int,
    domain: int,
    eps: float = 0.01,
    max_fan_out: int | None = None,
    localize: bool = True,
) -> tuple[Integers, Integers, Paths]: ...
def feplb(
    placement: Integers,
    quota: Integers,
    domain: int,
    num_dynamic: int = ...,
    max_num_dyn: int = ...,
    tau: int = ...,
    skip: bool = ...,
) -> tuple[Integers, Integers]: ...
def relay_kernel(
    placement: Integers, num_home: int, min_replicas: int = 4, max_relays: int = 8, min_gain: int = 2
) -> tuple[Integers, Paths]: ...
def fastermoe(
    placement: Integers, quota: Integers, counts: Integers, domain: int, min_saved: int
) -> tuple[Integers, Integers]: ...
def spray(rows: Integers, ticks: Integers, ranks_per_node: int, chunks: int) -> Integers: ...
def eplb_plus(tokens: Integers, placement: Integers, domain: int) -> tuple[Integers, Integers]: ...
