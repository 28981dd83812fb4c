"""Shared code of the benchmark scripts: options, check for a free machine, alternating sides, CPU time, tables, ratios.

Standard library only: `end_to_end.py` runs under other interpreters, too.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")
MOST_BUSY = 0.25
"""Maximum number of cores that other processes use at the start."""
MOST_STOLEN = 0.02
"""Maximum share of the time that the hypervisor takes."""


class Parser(argparse.ArgumentParser):
    """A parser with a script's docstring as help; it exits with status 3 on a busy machine."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--busy-anyway", action="store_true", help="measure although others use the machine")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse; exit with 3 if the machine is busy."""
        options = super().parse_args(args, namespace)
        if not options.busy_anyway and (why := busy()):
            self.exit(3, f"{why}: numbers would be of the others; wait, or type --busy-anyway\n")
        return options


def busy(seconds: float = 1.0) -> str | None:
    """Return a message about other load on the machine; None if it is negligible."""
    before, cores = _jiffies(), os.cpu_count() or 1
    time.sleep(seconds)
    spent = [after - b for after, b in zip(_jiffies(), before)]
    total = max(sum(spent), 1)
    used, stolen = cores * (total - spent[3] - spent[4]) / total, spent[7] / total
    if stolen > MOST_STOLEN:
        return f"{100 * stolen:.0f}% of the processors' time is stolen by the hypervisor"
    return f"other processes use {used:.1f} of {cores} cores" if used > MOST_BUSY else None


def _jiffies() -> list[int]:
    return [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]]


def cpu_seconds() -> float:
    """Return the processor time of this process and all its children, including ended ones."""
    ended, tick = getrusage(RUSAGE_CHILDREN), os.sysconf("SC_CLK_TCK")
    total, parents = time.process_time() + ended.ru_utime + ended.ru_stime, [os.getpid()]
    while parents:
        for listed in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            try:
                children = listed.read_text(encoding="ascii").split()
                for child in children:
                    fields = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                    total += sum(map(int, fields[11:15])) / tick
                    parents.append(int(child))
            except OSError:  # it has just ended: its parent counts its time
                continue
    return total


def peak_mib() -> float:
    """Return the most memory that this process has had, in MiB (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def in_turns(sides: Mapping[K, Callable[[], T]], repeats: int) -> dict[K, list[T]]:
    """Run every side once per turn, so that other load on the machine affects all sides."""
    found: dict[K, list[T]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            gc.collect()
            found[name].append(side())
    return found


def ratio(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    floor: float | None = None,
    aim: float | str | None = None,
) -> None:
    """Print the ratio of the sides' seconds, with spreads and the floor; also a row of BENCH_TABLE, if set.

    Args:
        name: Name of the comparison.
        ours: slime's seconds, one value for each repeat.
        theirs: The other side's seconds, likewise.
        floor: Lower bound of the seconds for any implementation.
        aim: Target ratio, or a text that describes it.
    """
    mine, other = statistics.median(ours), statistics.median(theirs)
    noise = f"{spread(ours)}, {spread(theirs)}"
    above = "-" if floor is None else f"{mine / floor:.1f}x"
    print(f"{name}: {other / mine:.2f}x, aim {aim or 'none'}; spread {noise}; ours over the floor: {above}")
    if path := os.environ.get("BENCH_TABLE"):
        with Path(path).open("a", encoding="utf-8") as file:
            if not file.tell():
                file.write(f"{machine()}\n\n| what | ratio | aim | spread | over the floor |\n|---|---|---|---|---|\n")
            file.write(f"| {name} | {other / mine:.2f} | {aim or '-'} | {noise} | {above} |\n")


def machine() -> str:
    """Return date and machine of a measurement."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return f"{time.strftime('%d %B %Y')}, {os.cpu_count()} cores ({model}), Python {platform.python_version()}."


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with columns as wide as their widest cell; the first is left-aligned, the others right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rendered = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]
    return "\n".join([rendered[0], "  ".join("-" * width for width in widths), *rendered[1:]])


def spread(values: Sequence[float]) -> str:
    """Return the noise of a measurement: (largest - smallest) / median, in percent."""
    median = statistics.median(values)
    return f"{100 * (max(values) - min(values)) / median:.0f}%" if len(values) > 1 and median else "-"
