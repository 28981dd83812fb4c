"""Settings, a data source, a reward, an engine and a whole rollout that the tests of rollouts share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.config import Args
from slime_core.rollout.fate import FilterStage
from slime_core.rollout.gate import GatedEngine
from slime_core.rollout.generate import SampleRunner
from slime_core.rollout.pool import RolloutContext, generate_rollout
from slime_core.rollout.reward import RewardStage
from slime_core.sample import Group, Sample


def rollout_args(**changes: Any) -> Args:
    """Return settings of rollouts with two groups of two samples, with deadlines of 5 s."""
    base = {
        "rollout_batch_size": 2, "over_sampling_batch_size": 2, "n_samples_per_prompt": 2, "rollout_seed": 1,
        "rm_timeout": 5.0, "rollout_timeout": 5.0, "max_consecutive_failures": 100, "sglang_server_concurrency": 64,
        "dynamic_sampling_budget": 10, "global_batch_size": 2, "rollout_max_response_len": 4,
    }  # fmt: skip
    return Args(**{**base, **changes})


class Source:
    """Counts up groups; groups given back come first."""

    def __init__(self, size: int = 2, metadata: Mapping[str, Any] | None = None) -> None:
        self.size, self.next, self.metadata = size, 0, dict(metadata or {})
        self.returned: list[Group] = []
        self.draws: list[int] = []
        self.begun: list[tuple[int, int]] = []
        self.gone: list[int] = []

    def get_samples(self, num_samples: int) -> list[Group]:
        self.draws.append(num_samples)
        groups = [self.returned.pop(0) for _ in range(min(num_samples, len(self.returned)))]
        while len(groups) < num_samples:
            groups.append([self._sample(i) for i in range(self.size)])
            self.next += 1
        return groups

    def _sample(self, place: int) -> Sample:
        index = self.next * self.size + place
        return Sample(group_index=self.next, index=index, tokens=[1], prompt="p", metadata=dict(self.metadata))

    def add_samples(self, samples: list[Group]) -> None:
        self.returned.extend(samples)

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        self.begun.append((rollout_id, weight_version))

    def observe(self, groups: list[Group], trained: bool) -> None:
        self.gone += [g[0].group_index or 0 for g in groups]


class Scorer:
    """Pays the parity of the index, or what `rewards` says."""

    label = spec = "reward 'test'"
    provenance: Mapping[str, str] = {}
    batched = False
    scores_groups = False

    def __init__(self, rewards: Callable[[Sample], float] = lambda sample: float((sample.index or 0) % 2)) -> None:
        self.rewards = rewards

    async def score(self, samples: list[Sample], evaluation: bool) -> list[float]:
        return [self.rewards(sample) for sample in samples]


class Engine:
    """Stands still until aborted."""

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    async def abort(self, rid: str | None = None) -> None:
        self.aborted.set()


def make_runner(
    args: Args, generator: Any, scorer: Any = None, *, resolve: Any = {}.__getitem__, **more: Any
) -> SampleRunner:
    """Return what runs groups by `generator`, scored by `scorer`, or by the parity of their index."""
    engine: Any = Engine()
    gated = GatedEngine(engine, deterministic=True, places=args.sglang_server_concurrency)
    rewards = RewardStage(args, scorer or Scorer(), {}.__getitem__)
    return SampleRunner(args, gated, None, generator, rewards, resolve, **more)


async def roll(
    args: Args, generator: Any, source: Source | None = None, *, scorer: Any = None, keep: Any = None, **more: Any
) -> Any:
    """Return what rollout 3 gives, with `keep` as dynamic filter."""
    context = RolloutContext(make_runner(args, generator, scorer, **more), FilterStage(args, keep, "test"))
    return await generate_rollout(args, 3, source or Source(), context=context)
