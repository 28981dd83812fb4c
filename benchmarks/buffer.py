"""Measure the cost of waiting groups: adding, taking, storing and restoring them, and memory, against plain containers.

    .venv/bin/python benchmarks/buffer.py                     # a tenth of the full size
    .venv/bin/python benchmarks/buffer.py --groups 125000     # a million samples: 3.5 GB of memory

Every side runs in a process of its own, so that its memory can be measured; time is CPU time. The plain sides are a
`collections.deque` and a list (cut at the front) of groups of dicts with the same content, without checks. The other
sides are `SampleBuffer` with each named buffer, and with a function in THUDM/slime's form. Storing is measured on fewer
groups (`--state-groups`), since the state of a million samples takes several gigabytes of Python objects in addition to
the samples.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson
from _harness import Parser, table

from slime_core.config import Args

BATCH = 64
"""Groups per call of add and take."""
PLAIN = ("deque of dicts", "list of dicts")
FUNCTION = "function (THUDM/slime's form)"
BUFFERS = ("fifo", FUNCTION, "priority", "stratified", "replay", "curriculum")


# -- content ---------------------------------------------------------------------------------------------


def settings(group_size: int) -> Any:
    """Return the settings that the buffers read."""
    return Args(
        reward_key=None, rollout_batch_size=BATCH, n_samples_per_prompt=group_size, rollout_seed=1, use_tis=True,
        use_rollout_logprobs=False, mask_offpolicy_in_partial_rollout=False, plugins={}, buffer_filter_path="benchmark",
    )  # fmt: skip


def make_group(index: int, size: int, tokens: int) -> list[Any]:
    """Make a finished group of short samples, each with lists of its own."""
    from slime_core import Sample, SampleStatus

    return [
        Sample(
            group_index=index, index=index * size + i, prompt="12+34=?", tokens=list(range(1000, 1004 + tokens)),
            response="46", response_length=tokens, label="46", reward=float(i % 2), loss_mask=[1] * tokens,
            token_weight_versions=[index % 7] * tokens, rollout_log_probs=[-0.125 * (i + 1)] * tokens,
            status=SampleStatus.COMPLETED, row=index, metadata={"source_name": f"source {index % 3}"},
        )
        for i in range(size)
    ]  # fmt: skip


def pop_first(args: Any, rollout_id: int | None, buffer: list[Any], num_samples: int) -> list[Any]:
    """Take the first groups of the buffer, as THUDM/slime's default does."""
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken


# -- sides -----------------------------------------------------------------------------------------------


class PlainSide:
    """Groups of dicts in a container, with the least possible overhead."""

    def __init__(self, name: str, size: int) -> None:
        self.groups: Any = deque() if name.startswith("deque") else []

    def add(self, groups: list[Any]) -> None:
        self.groups.extend(groups)

    def take(self, count: int) -> list[Any]:
        if isinstance(self.groups, deque):
            return [self.groups.popleft() for _ in range(min(count, len(self.groups)))]
        return pop_first(None, None, self.groups, count)

    def dump(self) -> bytes:
        return orjson.dumps(list(self.groups))

    def load(self, state: bytes) -> None:
        self.groups = type(self.groups)(orjson.loads(state))


class BufferSide:
    """`SampleBuffer` with one of the plugins."""

    def __init__(self, name: str, size: int) -> None:
        from slime_core.data.buffer import SampleBuffer
        from slime_core.plugins.resolve import resolve

        args = settings(size)
        plugin = pop_first if name == FUNCTION else resolve("buffers", name).obj(args)
        self.buffer = SampleBuffer(args, size, plugin)
        self.add, self.take = self.buffer.add, self.buffer.take

    def dump(self) -> bytes:
        return orjson.dumps(self.buffer.state_dict())

    def load(self, state: bytes) -> None:
        self.buffer.load_state_dict(orjson.loads(state))


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds and the result of a call."""
    gc.collect()
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def fill(side: Any, num_groups: int, size: int, tokens: int, plain: bool) -> float:
    """Return the CPU seconds of adding `num_groups` groups, without the time to make them."""
    seconds = 0.0
    for first in range(0, num_groups, BATCH):
        batch = [make_group(index, size, tokens) for index in range(first, min(first + BATCH, num_groups))]
        if plain:
            batch = [[sample.to_dict() for sample in group] for group in batch]
        started = time.process_time()
        side.add(batch)
        seconds += time.process_time() - started
    return seconds


def measure(name: str, num_groups: int, state_groups: int, size: int, tokens: int) -> dict[str, float]:
    """Measure one side, in this process."""
    plain = name in PLAIN
    make: Callable[[], Any] = lambda: (PlainSide if plain else BufferSide)(name, size)  # noqa: E731
    fill(make(), 1, size, tokens, plain)  # imports are done before memory is measured
    found: dict[str, float] = {}
    side = make()
    gc.collect()
    gc.disable()
    before = resident()
    found["add"] = fill(side, num_groups, size, tokens, plain)
    found["bytes"] = float(resident() - before)
    found["take"], taken = timed(lambda: [side.take(BATCH) for _ in range(-(-num_groups // BATCH))])
    assert sum(map(len, taken)) == num_groups, "groups were lost"
    stored = [group for batch in taken for group in batch][:state_groups]
    del taken
    side = make()
    side.add(stored)
    found["state"], state = timed(side.dump)
    side = make()
    found["load"] = timed(lambda: side.load(state))[0]
    rest = 0
    while batch := side.take(BATCH):
        rest += len(batch)
    assert rest == state_groups, "groups were lost"
    return found


def decisions(size: int, tokens: int, count: int) -> list[list[str]]:
    """Measure `observe` and `wants` of buffers: calls per second, on `count` prompts or groups."""
    rows = []
    for name in ("stratified", "curriculum", "replay"):
        side = BufferSide(name, size)
        groups = [make_group(index, size, tokens) for index in range(count)]
        side.buffer.begin_rollout(0, 0)
        observed = timed(lambda: side.buffer.observe(groups, True))[0]  # noqa: B023
        wanted = timed(lambda: [side.buffer.wants(group[0]) for group in groups])[0]  # noqa: B023
        rows.append([name, f"{count / observed:,.0f}", f"{count / wanted:,.0f}"])
    return rows


# -- report ----------------------------------------------------------------------------------------------


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--groups", type=int, default=12_500)
    parser.add_argument("--state-groups", type=int, help="groups to store and restore; a tenth, 2,500 at most")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8, help="response tokens of a sample")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    state_groups = options.state_groups or max(1, min(2_500, options.groups // 10))
    sizes = options.groups, state_groups, options.group_size, options.tokens
    if options.side:
        print(json.dumps(measure(options.side, *sizes)))
        return
    found: dict[str, dict[str, float]] = {}
    for name in (*PLAIN, *BUFFERS):
        words = [
            sys.executable,
            __file__,
            "--busy-anyway",
            "--side",
            name,
            "--groups",
            str(sizes[0]),
            "--state-groups",
            str(sizes[1]),
        ]
        words += ["--group-size", str(sizes[2]), "--tokens", str(sizes[3])]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr}")
        found[name] = json.loads(done.stdout)
    samples = options.groups * options.group_size
    base = found[PLAIN[0]]
    rows = []
    for name, values in found.items():
        counts = {"add": options.groups, "take": options.groups, "state": state_groups, "load": state_groups}
        rates = [f"{count / values[what]:,.0f}" for what, count in counts.items()]
        ratios = [f"{values[what] / base[what]:.1f}x" for what in counts]
        memory = values["bytes"] / samples
        cells = [cell for pair in zip(rates, ratios) for cell in pair]
        rows.append([name, *cells, f"{memory:,.0f}", f"{values['bytes'] / base['bytes']:.2f}x"])
    header = [f"{samples:,} samples in {options.groups:,} groups", "add/s", "", "take/s", "", "state/s", ""]
    print(table([*header, "load/s", "", "bytes/sample", "of deque"], rows))
    print(f"groups per CPU second; state and load of {state_groups:,} groups with JSON; x: time over the deque's\n")
    print(table(["groups or prompts per CPU second", "observe", "wants"], decisions(*sizes[2:], min(2000, sizes[0]))))


if __name__ == "__main__":
    main()
