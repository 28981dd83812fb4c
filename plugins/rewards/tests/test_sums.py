"""Rewards that need no label, and sums of rewards."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from slime_rewards.length_penalty import LengthPenalty
from slime_rewards.random import reward
from slime_rewards.weighted_sum import WeightedSum

from slime_core import RewardCaller, Sample, resolve
from slime_core.config import Args
from slime_core.errors import ConfigError, PluginError, PluginNotFoundError
from slime_core.rollout.reward import RewardStage


def made(limit: int | None = None, **options: Any) -> LengthPenalty:
    return LengthPenalty(Args(rollout_max_response_len=limit, plugins={"length_penalty": options}))


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (10**9, -1.0)],
)
def test_dapo_with_the_numbers_of_its_paper(length: int, expected: float) -> None:
    reward = made(max_length=20480, buffer=4096)
    assert reward(None, Sample(tokens=[0], response_length=length)) == pytest.approx(expected)


@pytest.mark.parametrize("length", range(0, 30, 3))
def test_distances(length: int) -> None:
    share = min(1.0, abs(length - 12) / 8)
    linear, cosine = (made(shape=s, target=12, window=8, factor=0.5) for s in ("linear", "cosine"))
    sample = Sample(tokens=[0], response_length=length)
    assert linear(None, sample) == pytest.approx(-0.5 * share)
    assert cosine(None, sample) == pytest.approx(-0.5 * math.sin(math.pi * share / 2) ** 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"^plugins\.length_penalty\.max_length: must be given"),
        ({"shape": "linear"}, r"plugins\.length_penalty\.target: must be given"),
        ({"max_length": 4, "buffer": 5}, "must not exceed"),
    ],
)
def test_wrong_options_stop_the_run_before_it_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**options)


def coins(seed: int, count: int = 4000) -> list[float]:
    args = Args(rollout_seed=seed)
    return [reward(args, Sample(group_index=i // 8, index=i, response=f"r{i}")) for i in range(count)]


def test_fair_repeatable_and_seeded() -> None:
    first = coins(1)
    assert set(first) == {0.0, 1.0}
    assert abs(sum(first) - 2000) < 5 * 4000**0.5 / 2  # five standard deviations
    assert coins(1) == first
    both = sum(a == b for a, b in zip(first, coins(2)))
    assert abs(both - 2000) < 5 * 4000**0.5 / 2


RIGHT = Sample(prompt="1+1=", response="Answer: 2", label="2", index=0)
WRONG = Sample(prompt="1+1=", response="Answer: 3", label="2", index=1)

FILE = """
import asyncio
from slime_core import RewardTraits, declares

def length(args, sample):
    return float(len(sample.response))

async def waits(args, sample):
    await asyncio.sleep(0)
    return 0.5

@declares(RewardTraits(scores_groups=True))
def ranks(args, samples):
    return [float(i) for i in range(len(samples))]

def parts(args, sample):
    return {"a": 1.0, "b": 2.0}

def broken(args, sample):
    raise ValueError("no idea")

async def slow(args, sample):
    await asyncio.sleep(20)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "rm.py").write_text(FILE)
    return str(tmp_path / "rm.py")


def settings(*terms: dict[str, Any], **more: Any) -> Args:
    return Args(**{"reward_key": None, "plugins": {"weighted_sum": {"terms": list(terms)}}, **more})


def score(args: Args, *samples: Sample, evaluation: bool = False) -> list[Any]:
    caller = RewardCaller(resolve("rewards", "weighted_sum"), args)
    return asyncio.run(caller.score(list(samples), evaluation))


def test_terms_of_every_form(file: str) -> None:
    args = settings(
        {"reward": "dapo", "weight": 2.0}, {"reward": f"{file}:length", "weight": 0.1, "name": "length"},
        {"reward": f"{file}:waits", "name": "waits"}, {"reward": f"{file}:ranks", "weight": 10, "name": "ranks"},
        {"reward": f"{file}:parts", "key": "b", "weight": -1, "name": "parts"},
        {"reward": "boxed_exact"},
    )  # fmt: skip
    assert score(args, RIGHT, WRONG) == pytest.approx([2 + 0.9 + 0.5 - 2, -2 + 0.9 + 0.5 + 10 - 2])
    args.reward_key = "score"
    rows = score(args, RIGHT, WRONG)
    assert rows[1] == pytest.approx(
        {"score": 7.4, "dapo": -1, "length": 9, "waits": 0.5, "ranks": 1, "parts": 2, "boxed_exact": 0}
    )
    assert list(rows[0]) == ["score", "dapo", "length", "waits", "ranks", "parts", "boxed_exact"]


@pytest.mark.parametrize("key", [None, "score"])
def test_its_terms_are_parts_of_the_reward(key: str | None) -> None:
    terms = [{"reward": "exact", "weight": 2.0, "name": "answer"}, {"reward": "f1", "name": "overlap"}]
    args = settings(*terms, reward_key=key, custom_rm_path="weighted_sum")
    sample = Sample(prompt="1+1=", response="Answer: 2", label="2", index=0)
    stage = RewardStage(args, RewardCaller(resolve("rewards", "weighted_sum"), args), lambda spec: None)  # type: ignore[arg-type, return-value]
    asyncio.run(stage.score([sample]))
    assert set(sample.reward_components or ()) == {"answer", "overlap"}
    total = sample.reward["score"] if isinstance(sample.reward, dict) else sample.reward
    assert sample.reward_components is not None
    assert total == 2 * sample.reward_components["answer"] + sample.reward_components["overlap"]


def test_training_and_evaluation_may_read_it_differently() -> None:
    args = settings({"reward": "dapo"}, eval_reward_key="score")
    assert score(args, RIGHT) == [1.0]
    assert score(args, RIGHT, evaluation=True) == [{"score": 1.0, "dapo": 1.0}]


def test_a_failing_term_is_named(file: str) -> None:
    args = settings({"reward": "dapo"}, {"reward": f"{file}:broken", "name": "bad"})
    with pytest.raises(ValueError, match=r"^term 'bad': no idea$"):
        score(args, RIGHT)
    with pytest.raises(PluginError, match=r"^term .*parts.*needs `key`"):
        score(settings({"reward": f"{file}:parts"}), RIGHT)
    with pytest.raises(PluginError, match=r"term 'slow': .*--rm-timeout 0\.\d"):
        score(settings({"reward": f"{file}:slow", "name": "slow"}, rm_timeout=1.0), RIGHT)


def test_where_it_runs(file: str) -> None:
    def execution(*terms: dict[str, Any]) -> Any:
        return WeightedSum(settings(*terms)).traits.execution

    assert execution({"reward": f"{file}:waits"}) is None  # on the event loop, as any async reward
    assert execution({"reward": "random"}) is None
    assert execution({"reward": f"{file}:waits"}, {"reward": "math"}) == "process"
    assert WeightedSum(settings({"reward": f"{file}:ranks"})).traits.scores_groups
    assert not WeightedSum(settings({"reward": "math"})).traits.scores_groups


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        ([], ConfigError, r"plugins\.weighted_sum\.terms"),
        ([{"reward": "exact", "weight": float("nan")}], ConfigError, "finite"),
        ([{"reward": "exact"}, {"reward": "exact"}], ConfigError, "'exact' is taken; give each term a name"),
        ([{"reward": "exact", "name": "score"}], ConfigError, "'score' is taken"),
        ([{"reward": "weighted_sum"}], ConfigError, "cannot be a term of itself"),
        ([{"reward": "exakt"}], PluginNotFoundError, r"^plugins\.weighted_sum\.terms\[0\]\.reward: .*exakt.*exact"),
        ([{"reward": "length_penalty"}], ConfigError, r"plugins\.length_penalty\.max_length"),
    ],
)
def test_wrong_terms_stop_the_run_before_it_starts(
    terms: list[dict[str, Any]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        WeightedSum(settings(*terms))
