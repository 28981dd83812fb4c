from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from slime_core.config import Args
from slime_core.errors import PluginError, PluginLoadError
from slime_core.plugins.adapters import GenerateCaller, RewardCaller
from slime_core.plugins.registry import Registry
from slime_core.plugins.resolve import Resolved, resolve
from slime_core.protocols import GenerateContext
from slime_core.sample import Sample

ARGS = Args(reward_key=None)


def resolved(kind: str, obj: Any) -> Resolved:
    registry = Registry()
    registry.add_object(kind, "mine", obj)
    return resolve(kind, "mine", registry=registry)


def caller(obj: Any, args: Any = ARGS, **options: Any) -> RewardCaller:
    return RewardCaller(resolved("rewards", obj), args, **options)


def samples(count: int = 3) -> list[Sample]:
    return [Sample(index=i, prompt=f"p{i}", response="r" * i) for i in range(count)]


def score(obj: Any, count: int = 3, evaluation: bool = False, **options: Any) -> list[Any]:
    return asyncio.run(caller(obj, **options).score(samples(count), evaluation))


def single(args: Any, sample: Sample, **kwargs: Any) -> int:
    assert not kwargs
    return sample.index or 0


async def single_async(args: Any, sample: Sample) -> float:
    await asyncio.sleep(0)
    return float(sample.index or 0)


def batch(args: Any, samples: list[Sample], evaluation: bool = False) -> list[float]:
    return [(s.index or 0) + (100 if evaluation else 0) for s in samples]


async def batch_async(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    return np.array([s.index for s in samples], dtype=np.float32)


class Texts:
    def compute_reward(self, prompts: list[str], responses: list[str]) -> tuple[float, ...]:
        assert prompts == [f"p{i}" for i in range(len(prompts))]
        return tuple(float(len(response)) for response in responses)


class AsyncCall:
    async def __call__(self, args: Any, sample: Sample) -> float:
        return float(sample.index or 0)


@pytest.mark.parametrize("obj", [single, single_async, batch, batch_async, Texts, Texts(), AsyncCall, AsyncCall()])
@pytest.mark.parametrize("inline", [False, True])
def test_every_form_gives_one_float_per_sample(obj: Any, inline: bool) -> None:
    assert score(obj, inline=inline) == [0.0, 1.0, 2.0]
    assert all(isinstance(value, float) for value in score(obj, inline=inline))


def test_group_rm_passes_single_samples_to_a_function_of_one(caplog: pytest.LogCaptureFixture) -> None:
    for obj in (batch, lambda args, group: [], Texts):
        assert caller(obj, group=True).batched
    caller(single)
    assert caplog.messages == []
    for obj in (single, single_async, AsyncCall):
        assert score(obj, group=True) == score(obj, group=True, inline=True) == [0.0, 1.0, 2.0]
    assert [message.partition(" so ")[0] for message in caplog.messages] == [
        "reward 'mine' scores one 'sample' at a time,"
    ] * 3
    assert not caller(single, group=True).scores_groups


def test_evaluation_is_passed_to_who_declares_it() -> None:
    assert score(batch, evaluation=True) == [100.0, 101.0, 102.0]
    assert score(single, evaluation=True) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1.0", r"reward 'mine' returned str for sample 0; expected a number or a mapping"),
        (None, "returned NoneType for sample 0"),
        (float("nan"), "returned nan for sample 0; expected a finite number"),
        (float("-inf"), "returned -inf for sample 0"),
        (1e300, r"reward 'mine' returned 1e\+300 for sample 0; expected a finite number between -1e\+15 and 1e\+15"),
        (10**400, "returned 10000.* for sample 0"),
        ([1.0], "returned list for sample 0"),
    ],
)
def test_what_is_no_reward_is_refused(value: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        score(lambda args, sample: value, 1)


@pytest.mark.parametrize("value", [[1.0], 1.0, "abc", {"a": 1}, None])
def test_a_batch_must_answer_every_sample(value: Any) -> None:
    with pytest.raises(PluginError, match=r"expected a list of 3 rewards"):
        score(lambda args, samples: value)


def test_numpy_scalars_and_mappings() -> None:
    assert score(lambda args, sample: np.float32(0.5), 1) == [0.5]
    assert score(lambda args, sample: True, 1) == [1.0]
    mapping = {"score": 1.0, "pred": "x"}
    shaped = Args(reward_key=None, custom_reward_post_process_path="shape.py")
    assert asyncio.run(caller(lambda args, sample: mapping, shaped).score(samples(1))) == [mapping]
    with pytest.raises(PluginError, match=r"keys 'score', 'pred' for sample 0; say which .*--reward-key KEY"):
        score(lambda args, sample: mapping, 1)
    keyed = caller(lambda args, sample: mapping, Args(reward_key="acc"))
    with pytest.raises(PluginError, match=r"returned keys 'score', 'pred' for sample 0; --reward-key asks for 'acc'"):
        asyncio.run(keyed.score(samples(1)))
    plain = caller(lambda args, sample: 1.0, Args(reward_key="acc"))
    with pytest.raises(PluginError, match=r"the number 1.0 for sample 0; --reward-key asks for a mapping with 'acc'"):
        asyncio.run(plain.score(samples(1)))
    assert asyncio.run(plain.score(samples(1), evaluation=True)) == [1.0]


def raising(error: BaseException) -> list[Any]:
    def plain(args: Any, sample: Sample) -> float:
        raise error

    async def awaited(args: Any, sample: Sample) -> float:
        raise error

    return [plain, awaited]


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(0), asyncio.CancelledError(), BaseException("odd")])
@pytest.mark.parametrize("inline", [False, True])
def test_nothing_a_reward_raises_ends_the_run_or_hangs_it(error: BaseException, inline: bool) -> None:
    for reward in raising(error):
        with pytest.raises((PluginError, RuntimeError), match=type(error).__name__):
            asyncio.run(asyncio.wait_for(caller(reward, inline=inline).score(samples(1)), 10))


def test_a_class_that_cannot_be_built_names_its_line() -> None:
    class Broken:
        def __init__(self, args: Any) -> None:
            raise RuntimeError("no judge")

        def compute_reward(self, prompts: list[str], responses: list[str]) -> list[float]:
            return [0.0] * len(prompts)

    with pytest.raises(
        PluginLoadError, match=r"building Broken failed at .*test_adapters\.py:\d+: RuntimeError: no judge"
    ):
        caller(Broken)


# -- generate functions ----------------------------------------------------------------------------------


def generate(function: Any, params: dict[str, Any] | None = None, **options: Any) -> Any:
    call = GenerateCaller(resolved("generators", function))
    return asyncio.run(call.call(ARGS, Sample(index=5), params or {}, **options))


def test_generate_functions_get_the_keywords_they_declare() -> None:
    seen: list[Any] = []

    async def bare(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        seen.append(None)
        return sample

    async def keywords(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
        seen.append(evaluation)
        return sample

    async def context_only(args: Any, sample: Sample, sampling_params: Any, *, context: Any) -> Sample:
        seen.append(context)
        return sample

    async def open_ended(args: Any, sample: Sample, sampling_params: Any, **kwargs: Any) -> Sample:
        seen.append(kwargs)
        return sample

    context = GenerateContext(engine=None, tokenizer=None)  # type: ignore[arg-type]
    for function in (bare, keywords, context_only, open_ended):
        assert generate(function, evaluation=True, context=context).index == 5
    assert seen == [None, True, context, {}]


def test_sampling_params_are_a_copy() -> None:
    async def changes(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
        sampling_params["temperature"] = 9
        return [sample, sample]

    params = {"temperature": 1}
    assert len(generate(changes, params)) == 2
    assert params == {"temperature": 1}


@pytest.mark.parametrize("value", [None, [], "text", [1]])
def test_what_is_no_sample_is_refused(value: Any) -> None:
    async def wrong(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
        return value

    with pytest.raises(PluginError, match=r"generator 'mine' returned \w+ for sample 5; expected a Sample"):
        generate(wrong)
