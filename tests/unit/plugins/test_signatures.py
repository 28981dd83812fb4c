from __future__ import annotations

import functools
from collections.abc import Awaitable
from typing import Any

import pytest

from slime_core.config import Args
from slime_core.errors import ConfigError, PluginSignatureError
from slime_core.estimator import EstimatorBase
from slime_core.plugins.kinds import kind_of
from slime_core.plugins.signatures import check_signature, construct


class LossLike:
    def __init__(self, args: Any, estimator: Any) -> None: ...

    def bind(self, batch: Any, tensors: Any, denominators: Any) -> Any: ...


def check(kind: str, obj: Any) -> None:
    check_signature(kind_of(kind), obj, "--flag")


class ComputeReward:
    def __init__(self, args: Any) -> None:
        self.args = args

    def compute_reward(self, prompts: list[str], responses: list[str]) -> list[float]:
        return [1.0 for _ in responses]


class StaticReward:
    @staticmethod
    def compute_reward(prompts: list[str], responses: list[str]) -> list[float]:
        return [1.0 for _ in responses]


class CallableReward:
    def __call__(self, args: Any, sample: Any) -> float:
        return 1.0


def single(args: Any, sample: Any) -> float: ...
def single_keyword(args: Any, sample: Any, *, evaluation: bool) -> float: ...
async def batch_async(args: Any, samples: Any, **kwargs: Any) -> list[float]: ...
async def generate(args: Any, sample: Any, sampling_params: Any) -> Any: ...
def generate_annotated(args: Any, sample: Any, sampling_params: Any) -> Awaitable[Any]: ...


class Generator:
    async def __call__(self, args: Any, sample: Any, sampling_params: Any, *, context: Any) -> Any: ...


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("kind", "obj"),
    [
        ("rewards", single_keyword),
        ("rewards", batch_async),
        ("rewards", lambda *args, **kwargs: 0.0),
        ("rewards", functools.partial(lambda weight, args, sample: weight, 1.0)),
        ("rewards", ComputeReward),
        ("rewards", ComputeReward(None)),
        ("rewards", StaticReward),
        ("rewards", type("StaticCall", (), {"__call__": staticmethod(single)})),
        ("rewards", CallableReward()),
        ("rewards", max),
        ("generators", generate_annotated),
        ("generators", Generator()),
        ("generators", wrapped(generate)),
        ("generators", functools.partial(generate)),
    ],
)
def test_forms_that_are_accepted(kind: str, obj: Any) -> None:
    check(kind, obj)


@pytest.mark.parametrize(
    ("obj", "expected", "found"),
    [
        (lambda sample: 0.0, r"(args, sample[, evaluation], **kwargs) -> float", "<lambda>(sample)"),
        (lambda args, samples, extra: 0, "(args, samples[, evaluation], **kwargs) -> list", "(args, samples, extra)"),
        (lambda args, sample, *, weight: 0, "(args, sample", "(args, sample, *, weight)"),
        (3, "a class with [async] compute_reward(self, prompts, responses[, evaluation])", "found int 3"),
        (pytest, "expected a function", "module pytest; name the function in it"),
        (type("Empty", (), {}), "a class with [async] compute_reward", "class Empty without compute_reward"),
        (
            type("Wrong", (), {"compute_reward": lambda self, prompts: []}),
            "Wrong.compute_reward: expected [async] (self, prompts, responses[, evaluation])",
            "found <lambda>(prompts)",
        ),
        (
            type("Static", (), {"compute_reward": staticmethod(lambda self, prompts, responses: [])}),
            "Static.compute_reward: expected [async] (self, prompts, responses[, evaluation])",
            "found <lambda>(self, prompts, responses)",
        ),
        (
            type("Call", (), {"__call__": lambda self, sample: 0}),
            "Call.__call__: expected [async] (args, sample",
            "found <lambda>(sample)",
        ),
    ],
)
def test_a_wrong_reward_is_shown_beside_the_right_one(obj: Any, expected: str, found: str) -> None:
    with pytest.raises(PluginSignatureError) as caught:
        check("rewards", obj)
    message = str(caught.value)
    assert message.startswith("--flag: ")
    assert expected in message
    assert found in message


def test_a_generate_function_is_async_and_takes_the_sampling_params() -> None:
    def plain(args: Any, sample: Any, sampling_params: Any) -> Any: ...

    with pytest.raises(PluginSignatureError, match=r"found plain\(args: .*Make it `async def`"):
        check("generators", plain)

    async def short(args: Any, sample: Any) -> Any: ...

    with pytest.raises(PluginSignatureError, match=r"expected async \(args, sample, samp.*found async short"):
        check("generators", short)


@pytest.mark.parametrize("kind", ["estimators", "buffers", "recipes", "corrections", "advantages", "loss_reducers"])
def test_a_function_whose_result_is_not_awaited_is_plain(kind: str) -> None:
    async def function(*args: Any, **kwargs: Any) -> Any: ...

    with pytest.raises(PluginSignatureError, match="Make it a plain `def`"):
        check(kind, function)


class Called:
    def __call__(self, args: Any, rollout_data: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "obj", "found"),
    [
        ("estimators", Called, "found class Called without shape_rewards"),
        ("estimators", EstimatorBase(Args()), "found EstimatorBase <"),
        ("losses", LossLike(None, None), "found LossLike <"),
    ],
)
def test_a_kind_that_is_built_takes_no_object_and_no_class_that_is_called(kind: str, obj: Any, found: str) -> None:
    with pytest.raises(PluginSignatureError, match=found) as caught:
        check(kind, obj)
    assert "a class with " in str(caught.value)


class Source:
    def __init__(self, args: Any) -> None: ...
    def get_samples(self, num_samples: int) -> list[Any]: ...
    def add_samples(self, samples: list[Any]) -> None: ...


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("buffers", lambda args, rollout_id, buffer, num_samples: [], lambda args, buffer: []),
        ("filters", lambda args, samples, **kwargs: True, lambda samples: True),
        ("models", lambda hf: None, lambda: None),
        ("recipes", lambda args: None, lambda args, more: None),
        ("rollouts", lambda args, rollout_id, data_source, evaluation=False: None, lambda args, rollout_id: None),
        ("losses", LossLike, lambda args, batch, logits, sum_of_sample_mean: None),
        ("losses", LossLike, type("NoBind", (), {"__init__": lambda self, args, estimator: None})),
        ("data_sources", Source, type("Half", (), {"get_samples": Source.get_samples})),
        ("data_sources", Source, lambda args: None),
        ("estimators", EstimatorBase, type("Partial", (), {"advantages": EstimatorBase.advantages})),
        ("estimators", lambda args, rollout_data: None, lambda args: None),
        ("reward_post_processes", lambda args, samples: ([], []), lambda samples: ([], [])),
        ("sample_converters", lambda args, samples, extra=0: {}, lambda args: {}),
        ("advantages", lambda args, rollout_data: None, lambda args, rollout_data, batch: None),
        ("advantages", lambda args, rollout_data: None, EstimatorBase),
        ("functions", lambda: None, "not a function"),
    ],
)
def test_every_kind_has_its_call(kind: str, good: Any, bad: Any) -> None:
    check(kind, good)
    with pytest.raises(PluginSignatureError, match="expected"):
        check(kind, bad)


class Asks:
    """Everything a constructor may ask for."""

    def __init__(self, model_path: str, run_args: Any, device: str = "cpu", *, top: int, dtype: str = "f32") -> None:
        self.found = (model_path, run_args, device, top, dtype)


def test_a_constructor_asks_by_name() -> None:
    args = Args(plugins={"judge": {"model_path": "/m", "dtype": "bf16"}}, top=3)
    assert construct(Asks, args, name="judge").found == ("/m", args, "auto", 3, "bf16")
    assert construct(Asks, args, name="judge", device="cuda").found[2] == "cuda"
    with pytest.raises(ConfigError, match=r"needs 'model_path'; type --set plugins\.other\.model_path=VALUE, or write"):
        construct(Asks, args, name="other")


def test_a_list_of_tools_is_one_component() -> None:
    def tool(city: str) -> str:
        return city

    check("tools", [tool, tool])
    check("tools", tool)
    with pytest.raises(PluginSignatureError, match="expected a function, found str 'weather'"):
        check("tools", [tool, "weather"])
    with pytest.raises(PluginSignatureError, match="expected a function, found list"):
        check("functions", [tool])
