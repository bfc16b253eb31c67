"""Peak of a rank's resident memory in the first steps of a program."""

import re
from pathlib import Path

from benchmarks.network.testbed import CONFIG, Case, Program, Testbed, release_memory
from benchmarks.network.training_rounds import records

STEPS = 2
STATUS = Path("/proc/self/status")


def measured_peak(bed: Testbed, case: Case) -> int:
    """Return the bytes of state and temporaries of a rank: the peak of the process over that of the compiled program.

    The allocator returns freed memory before, so that the memory of compilation does not count.
    """
    from models.data.sources import default_corpus

    corpus = default_corpus(CONFIG.data.max_corpus_bytes)
    program = Program(case, CONFIG, bed.mesh, records()[0])
    release_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    bed.times(program, corpus, STEPS, 1, None, 0)
    return resident_bytes("VmHWM") - before


def resident_bytes(name: str) -> int:
    """Return an entry of the status of this process, in bytes."""
    match = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert match is not None
    return 1024 * int(match[1])
