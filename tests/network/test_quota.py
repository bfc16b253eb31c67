"""A quota limits the CPU time of a process."""

import multiprocessing
import time

import pytest

from benchmarks.network.quota import CpuGroup, cpu_groups, version


def missing() -> str | None:
    """Return the reason why no quota is possible."""
    try:
        version()
    except RuntimeError as error:
        return str(error)
    return None


def burn(group: CpuGroup, used: multiprocessing.SimpleQueue) -> None:
    group.enter()
    end_s, start_s = time.monotonic() + 0.5, time.process_time()
    while time.monotonic() < end_s:
        pass
    used.put(time.process_time() - start_s)


@pytest.mark.netns
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_process_gets_no_more_than_its_quota_and_the_group_is_removed():
    context = multiprocessing.get_context("fork")
    with cpu_groups(1) as (group,):
        group.limit(0.2)
        used = context.SimpleQueue()
        process = context.Process(target=burn, args=(group, used))
        process.start()
        process.join()
        assert used.get() < 0.3 * 0.5
        with pytest.raises(ValueError, match=r"cores is 0\.01; expected at least 0\.2"):
            group.limit(0.01)
        assert group.folder.exists()
    assert not group.folder.exists()
