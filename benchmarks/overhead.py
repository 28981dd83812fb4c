"""Measure the framework's overhead: a hook call against a plain call, and dispatch per sample by number of samples.

    .venv/bin/python benchmarks/overhead.py

Both sides of a pair are measured alternately in this process, in CPU time of all threads, which other load on the
machine affects little; times are medians over the turns. `rollout_overhead.py` measures the cost of a sample against a
bare loop, with rewards of every kind.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from _harness import Parser, in_turns, ratio, spread, table
from slime_testing_probes.scripted import CharTokenizer, Reply, ScriptedEngine

from slime_core import Sample, hookimpl
from slime_core.config import load_settings
from slime_core.launch.components import Resolver
from slime_core.launch.ranks import set_up_process
from slime_core.plugins.manager import build_manager
from slime_core.rollout.event_loop import LoopThread
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.pool import generate_rollout
from slime_core.rollout.reward import RewardStage
from slime_core.rollout.stage import RolloutParts, RolloutStage

K = TypeVar("K")
GROUP_SIZE = 8
PROMPT = [1, 2, 3]
REPLY = Reply("7")


class Listener:
    """A listener of one hook that does almost nothing."""

    @hookimpl
    def slime_step_end(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        self.last = rollout_id


class Prompts:
    """A data source without a file."""

    def __init__(self) -> None:
        self.next = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        first, self.next = self.next, self.next + num_samples
        return [
            [Sample(group_index=g, index=g * GROUP_SIZE + i, tokens=list(PROMPT)) for i in range(GROUP_SIZE)]
            for g in range(first, self.next)
        ]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise AssertionError("nothing is given back in this benchmark")


# -- hooks -----------------------------------------------------------------------------------------------


def nanoseconds(function: Callable[[], Any], calls: int) -> float:
    """Return the CPU time of a call in nanoseconds."""
    started = time.process_time_ns()
    for _ in range(calls):
        function()
    return (time.process_time_ns() - started) / calls


def hook_calls(calls: int, repeats: int) -> None:
    """Compare a direct call with the hook relay with 0, 1 and 4 listeners."""
    os.environ["SLIME_PLUGINS"] = ""  # only the listeners below
    metrics = {"train/loss": 0.5}
    direct = Listener()
    sides: dict[str, Callable[[], Any]] = {
        "direct call": lambda: direct.slime_step_end(rollout_id=1, metrics=metrics),
    }
    for count in (0, 1, 4):
        hook = build_manager(extra=[Listener() for _ in range(count)]).hook
        sides[f"hook, {count} listener(s)"] = lambda hook=hook: hook.slime_step_end(rollout_id=1, metrics=metrics)  # type: ignore[misc]
    found = in_turns({name: lambda side=side: nanoseconds(side, calls) for name, side in sides.items()}, repeats)  # type: ignore[misc]
    base = statistics.median(found["direct call"])
    rows = [
        [name, f"{statistics.median(times):.0f}", spread(times), f"{statistics.median(times) / base:.1f}x"]
        for name, times in found.items()
    ]
    print(table(["one call", "ns", "spread", "of direct"], rows))


# -- samples ---------------------------------------------------------------------------------------------


def settings(num_samples: int) -> Any:
    """Load the settings as `slime rollout` does."""
    groups = str(num_samples // GROUP_SIZE)
    flags = ["--rollout-batch-size", groups, "--n-samples-per-prompt", str(GROUP_SIZE), "--num-rollout", "1"]
    flags += ["--rollout-max-response-len", "4", "--hf-checkpoint", "unused", "--run-dir", "unused"]
    flags += ["--rm-type", "none", "--rm-workers", "0", "--sglang-server-concurrency", str(num_samples)]
    return load_settings(flags, command="show")


def instant_engine() -> ScriptedEngine:
    """Return an engine that keeps no requests, since they are not part of the stage's cost."""
    engine = ScriptedEngine(lambda _: REPLY)
    engine.requests = deque(maxlen=1)  # type: ignore[assignment]
    return engine


def make_stage(loaded: Any, reward_file: Path, engine: Any = None, runner: Any = None) -> RolloutStage:
    """Return the stage, not yet started."""
    args, resolver = loaded.args, Resolver(loaded)
    args.over_sampling_batch_size = args.over_sampling_batch_size or args.rollout_batch_size
    scorer = resolver.reward(f"{reward_file}:reward", "benchmark")
    parts = RolloutParts(
        data_source=Prompts(),
        rollout_function=generate_rollout,
        eval_function=generate_rollout,
        tokenizer=CharTokenizer(),
        engine=instant_engine() if engine is None else engine,
        generator=resolver.generator("single_turn", "benchmark"),
        rewards=RewardStage(args, scorer, resolver.reward, workers=resolver),
        filters=FilterStage(args, None),
        resolve_generator=resolver.generator,
    )
    return RolloutStage(args, parts, runner)


def run_stage(
    loaded: Any, reward_file: Path, clock: Callable[[], float], engine: Any = None
) -> tuple[float, list[Sample]]:
    """A second rollout of the stage: draw, generate, score, filter, order, metrics. Bringing it up is not counted, nor
    are workers' interpreters, which start during the first."""
    stage = make_stage(loaded, reward_file, engine)
    stage.start()
    try:
        stage.generate_groups(0)
        started = clock()
        groups, _ = stage.generate_groups(1)
        seconds = clock() - started
    finally:
        stage.stop()
    return seconds, [sample for group in groups for sample in group]


def baseline_seconds(num_samples: int, clock: Callable[[], float]) -> float:
    """Measure the same answers and appends in one `asyncio.gather`."""
    engine = instant_engine()
    params = {"temperature": 1.0, "max_new_tokens": 4}

    async def one(sample: Sample) -> None:
        output = await engine.generate(sample.tokens, params)
        sample.append_response_tokens(
            None, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
        )
        sample.reward = 1.0

    async def everything(samples: list[Sample]) -> None:
        await asyncio.gather(*(one(sample) for sample in samples))

    started = clock()
    samples = [sample for group in Prompts().get_samples(num_samples // GROUP_SIZE) for sample in group]
    asyncio.run(everything(samples))
    seconds = clock() - started
    check(samples, num_samples)
    return seconds


def check(samples: list[Sample], num_samples: int) -> None:
    assert len(samples) == num_samples, len(samples)
    bad = next((s for s in samples if s.reward != 1.0 or s.status != Sample.Status.COMPLETED), None)
    assert bad is None, bad


def growth(sizes: Sequence[int], repeats: int) -> None:
    """Measure CPU time per sample in rollouts of several sizes, 512 samples at once, also with `--async-mode full`."""
    with TemporaryDirectory(prefix="slime-bench-") as directory:
        reward = Path(directory) / "reward.py"
        reward.write_text("async def reward(args, sample):\n    return 1.0\n", encoding="utf-8")
        sides = {(mode, size): partial(one_rollout, mode, size, reward) for mode in ("sync", "full") for size in sizes}
        found = in_turns(sides, repeats)
    rows = []
    for (mode, size), times in found.items():
        each, base = min(times) / size, min(found[mode, sizes[0]]) / sizes[0]
        rows.append([f"{mode}, {size} samples", f"{each * 1e6:.0f}", spread(times), f"{each / base:.2f}x"])
        if size != sizes[0]:
            ours, theirs = [s / size for s in times], [s / sizes[0] for s in found[mode, sizes[0]]]
            ratio(f"a sample of {sizes[0]:,} / of {size:,} in a rollout, {mode}", ours, theirs, aim=0.91)
    print(table(["one rollout", "us each", "spread", f"of {sizes[0]}"], rows))


def one_rollout(mode: str, size: int, reward_file: Path) -> float:
    """Return the CPU time of a rollout."""
    loaded = settings(size)
    loaded.args.sglang_server_concurrency = 512
    runner = LoopThread() if mode == "full" else None
    stage = make_stage(loaded, reward_file, runner=runner)
    stage.never_stops = runner is not None
    stage.start()
    try:
        started = time.process_time()
        stage.generate_groups(0)
        return time.process_time() - started
    finally:
        stage.stop()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--calls", type=int, default=20_000, help="hook calls per measurement")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8_000, 32_000], help="samples of whole rollouts")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    set_up_process(settings(GROUP_SIZE).args)  # set the garbage collector's thresholds as in a run
    hook_calls(options.calls, options.repeats)
    print()
    growth(options.sizes, options.repeats)


if __name__ == "__main__":
    main()
