import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int32]

def lpt(weights: Integers, num_bins: int, capacity: int) -> Integers: ...
