"""Several processes compute the same as one, over gloo: 2 with 4 devices, and 4 with 2."""

import json

import numpy as np
import pytest

from tests.models.processes import end, free_port, start
from tests.models.tiny_systems import losses

pytestmark = pytest.mark.slow

MAX_WAIT_S = 600.0


@pytest.fixture(scope="module")
def of_one_process(all_devices):
    """Return the losses of plain expert parallelism, which equal those of every system."""
    return losses(["plain"])["plain"]


# Each process compiles each program.
@pytest.mark.thorough
@pytest.mark.parametrize(("num_processes", "systems"), [(2, ["hybridep"]), (4, ["exact"])], ids=["2x4", "4x2"])
def test_losses_are_those_of_one_process(of_one_process, num_processes, systems):
    port, program = str(free_port()), "tests.models.tiny_systems"
    ids = map(str, range(num_processes))
    ended = end([start(program, port, str(num_processes), i, *systems) for i in ids], MAX_WAIT_S)
    assert [code for code, _, _ in ended] == [0] * num_processes, [errors for _, _, errors in ended]
    # gloo prints lines before the result.
    found = json.loads(ended[0][1].splitlines()[-1])
    assert list(found) == systems
    assert of_one_process[-1] < of_one_process[0]
    for name in systems:
        np.testing.assert_allclose(found[name], of_one_process, rtol=1e-5)
