"""Several processes compute what one does, over gloo: 2 of 4 devices, and 4 of 2."""

import json

import numpy as np
import pytest

from tests.models.processes import end, free_port, start
from tests.models.tiny_systems import DEVICES, SYSTEMS, losses

pytestmark = pytest.mark.slow

MAX_WAIT_S = 600.0


@pytest.fixture(scope="module")
def of_one_process(all_devices):
    return losses()


@pytest.mark.parametrize("num_processes", [2, 4])
def test_losses_are_those_of_one_process(of_one_process, num_processes):
    port = free_port()
    processes = [
        start("tests.models.tiny_systems", str(port), str(num_processes), str(i)) for i in range(num_processes)
    ]
    (code, output, errors), *others = end(processes, MAX_WAIT_S)
    assert code == 0, errors
    assert [other[0] for other in others] == [0] * (num_processes - 1)
    # gloo has lines of its own before it.
    found = json.loads(output.splitlines()[-1])
    for system in SYSTEMS:
        assert of_one_process[system][-1] < of_one_process[system][0]
        np.testing.assert_allclose(found[system], of_one_process[system], rtol=1e-5)
    assert DEVICES % num_processes == 0
