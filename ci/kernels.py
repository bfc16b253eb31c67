"""Check limits of the planners' kernels: registers of a thread, spills and shared memory, as `ptxas` reports them.

    python ci/kernels.py NVCC [--nightly]

It compiles `ffi/planning/device/kernels.cu` for Hopper, with `--nightly` for each architecture, and needs no GPU.
"""

import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path("ffi/planning/device/kernels.cu")
HOPPER, ARCHITECTURES = 90, (80, 90, 100)
MOST_REGISTERS = 255
"""Registers of a thread: 256 threads of a block share 65,536."""
LARGE_WORDS, LARGE_STACK = 4, 256
"""Words of the sets of more than 64 ranks, whose arrays of a thread exceed its registers, and bytes of their stack."""
KERNEL = re.compile(r"Compiling entry function '\w*?PlanKernel\w*?\d([A-Z]\w+?Planner)\w*?Li(\d)\w*' for '(sm_\d+)'")
"""Its planner, the words of a set of ranks, and the architecture."""
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
STATIC = re.compile(r"(\d+) bytes smem")


def faults(report: str) -> list[str]:
    """Return a message for each exceeded limit in a report of `ptxas -v`, and print its numbers."""
    found, wrong, kernel = 0, [], ""
    for line in report.splitlines():
        if entry := KERNEL.search(line):
            kernel = f"{entry[1]} of {entry[2]} words for {entry[3]}"
        elif spills := SPILLS.search(line):
            frame, *spilled = map(int, spills.groups())
            most = LARGE_STACK if f" of {LARGE_WORDS} words" in kernel else 0
            if frame > most or any(spilled):
                wrong.append(f"{kernel}: {spills[0]}; expected at most {most}, 0 and 0")
        elif registers := REGISTERS.search(line):
            found += 1
            static = STATIC.search(line)
            print(f"{kernel}: {registers[1]} registers, {static[1] if static else 0} bytes of static shared memory")
            if int(registers[1]) > MOST_REGISTERS:
                wrong.append(f"{kernel}: {registers[1]} registers; expected at most {MOST_REGISTERS}")
            if static:
                wrong.append(f"{kernel}: {static[0]}; expected none beside the dynamic shared memory")
    return wrong if found else ["ptxas reports no kernel"]


def main(nvcc: str, *options: str) -> int:
    """Compile for Hopper, or for all architectures with `--nightly`; return 1 after a fault."""
    status = 0
    for architecture in ARCHITECTURES if "--nightly" in options else (HOPPER,):
        command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-I.", "-cubin"]
        done = subprocess.run([*command, str(SOURCE), "-o", "/dev/null"], capture_output=True, text=True, check=False)
        wrong = faults(done.stderr) if done.returncode == 0 else [done.stderr]
        print("\n".join(wrong), end="\n" if wrong else "")
        status |= bool(wrong)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
