"""`slime.rollout.rm_hub`, `filter_hub` and `on_policy_distillation`."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from slime.rollout import rm_hub
from slime.rollout.filter_hub import base_types, dynamic_sampling_filters
from slime.rollout.on_policy_distillation import post_process_rewards, reward_func
from slime.rollout.rm_hub import async_rm, batched_async_rm, extract_boxed_answer, math_dapo_utils, remote_rm
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score, normalize_answer
from slime.rollout.rm_hub.gpqa import DEFAULT_VALID_LETTERS, compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import (
    compute_score,
    is_correct_minerva,
    is_correct_strict_box,
    normalize_final_answer,
)
from slime.rollout.rm_hub.math_utils import (
    extract_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
    last_boxed_only_string,
    mathd_normalize_answer,
    remove_boxed,
)
from slime.utils.types import Sample

from slime_core.errors import ConfigError, PluginError
from slime_core.sample import FilterDecision

MakeArgs = Callable[..., Any]


def done(response: str = "x", label: Any = "x", **fields: Any) -> Sample:
    return Sample(response=response, label=label, status=Sample.Status.COMPLETED, **fields)


# -- the hub ---------------------------------------------------------------------------------------------


async def test_the_runs_reward_and_a_rows_own(make_args: MakeArgs) -> None:
    args = make_args(rm_type="exact")
    assert await async_rm(args, done("4", "4")) == 1.0
    assert await async_rm(args, done("4", "5")) == 0.0
    assert await async_rm(args, done("the brown fox", "a quick brown fox", metadata={"rm_type": "f1"})) == 0.8
    assert await async_rm(args, done(r"so \boxed{4}", "4", metadata={"rm_type": "boxed_exact"})) == 1.0


async def test_settings_of_a_script_of_ones_own() -> None:
    """As THUDM/slime's parser makes them: without what only slime_core has."""
    args = SimpleNamespace(rm_type="exact", custom_rm_path=None, reward_key=None, group_rm=False)
    assert await batched_async_rm(args, [done("4", "4"), done("4", "5")]) == [1.0, 0.0]


async def test_custom_functions_single_and_batch(make_args: MakeArgs, tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "calls = []\n"
        "async def single(args, sample, **kwargs):\n    return len(sample.response)\n"
        "async def batch(args, samples, **kwargs):\n"
        "    calls.append(len(samples))\n    return [float(len(s.response)) for s in samples]\n"
    )
    args = make_args(custom_rm_path=f"{file}:single", rm_type=None)
    assert await async_rm(args, done("abc")) == 3.0
    samples = [done("a"), done("bb", custom_rm_path=f"{file}:batch"), done("cc", "cc", metadata={"rm_type": "exact"})]
    samples.append(done("dddd", custom_rm_path=f"{file}:batch"))
    assert await batched_async_rm(args, samples) == [1.0, 2.0, 1.0, 4.0]
    module = next(m for n, m in sys.modules.items() if n.startswith("slime_file_mine_") and m.__file__ == str(file))
    assert module.calls == [2]
    assert [s.reward for s in samples] == [None] * 4


async def test_what_goes_wrong_is_raised(make_args: MakeArgs) -> None:
    args = make_args()
    with pytest.raises(PluginError, match="rm_hub"):
        await async_rm(args, done(metadata={"rm_type": "no_such_reward"}))
    with pytest.raises(LookupError, match="--rm-type"):
        await async_rm(SimpleNamespace(custom_rm_path=None, rm_type=None), done())


@pytest.mark.slow
async def test_settings_are_not_mixed_up(make_args: MakeArgs) -> None:
    first, second = make_args(rm_type="exact"), make_args(rm_type="f1")
    sample = done("the brown fox", "a quick brown fox")
    assert await asyncio.gather(async_rm(first, sample), async_rm(second, sample)) == [0.0, 0.8]
    for _ in range(100):
        await async_rm(make_args(), sample)
    assert len(rm_hub._CALLERS) <= 64


async def test_remote(make_args: MakeArgs, engine: Any) -> None:
    args = make_args(rm_url=f"{engine.url}/rm")
    assert await remote_rm(args, done("4", "5", prompt="2+2")) == 0.5
    assert engine.bodies("/rm") == [{"prompt": "2+2", "response": "4", "label": "5"}]
    with pytest.raises(ValueError, match="attempts"):
        await remote_rm(args, done(), max_retries=3)


# -- graders of texts ------------------------------------------------------------------------------------


def test_boxes() -> None:
    text = r"\boxed{1} then \boxed{\frac{1}{2}} end"
    assert extract_answer(text) == extract_boxed_answer(text) == r"\frac{1}{2}"
    assert last_boxed_only_string(text) == r"\boxed{\frac{1}{2}}"
    assert remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert [remove_boxed(text) for text in (r"\boxed 5", "5", None)] == [None] * 3
    assert math_dapo_utils.remove_boxed(r"\boxed{5}") == "5"
    with pytest.raises(AssertionError, match=r"no \\boxed"):
        math_dapo_utils.remove_boxed("5")
    assert last_boxed_only_string(r"so \fbox{7}") == r"\fbox{7}"
    assert extract_answer("no box") is None
    assert last_boxed_only_string("no box") is None


def test_math_graders() -> None:
    assert mathd_normalize_answer("0.5") == r"\frac{1}{2}"
    assert mathd_normalize_answer(None) is None
    assert grade_answer_mathd("3/4", r"\frac{3}{4}")
    assert not grade_answer_mathd("", "")
    assert grade_answer_sympy("x+1", "1+x")
    assert not grade_answer_sympy(r"\frac{2}{4}", r"\frac{1}{2}")
    assert grade_answer_verl(r"so \boxed{x+1}", r"\boxed{1+x}")
    assert grade_answer_verl(r"so \boxed{2}", "2")
    assert not grade_answer_verl("so 2", "2")
    assert not grade_answer_verl(r"so \boxed{2}", "")


def test_deepscaler() -> None:
    assert get_deepscaler_rule_based_reward(r"<think>a</think> \boxed{1/2}", "0.5") == 1
    assert get_deepscaler_rule_based_reward(r"###Response \boxed{5}", 5) == 1
    assert get_deepscaler_rule_based_reward(r"\boxed{5}", 5) == 0


def test_dapo() -> None:
    assert compute_score("Answer: 34", "34") == {"score": 1.0, "acc": True, "pred": "34"}
    assert compute_score("Answer: x", r"\frac{1}{2}")["score"] == -1.0
    assert compute_score(r"so \boxed{34}", 34, strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "34"}
    assert compute_score(r"so \boxed{34} " + "z" * 100, 34, strict_box_verify=True)["score"] == -1.0
    assert normalize_final_answer("1,234,567") == "1234567"
    assert is_correct_minerva("Answer: 100 dollars", "100") == (True, "100")
    assert is_correct_strict_box("none", "1") == (-1, None)
    assert math_dapo_utils.verify("Answer: 100 dollars", "100") == (True, "100")
    with pytest.raises(ValueError, match="pause_tokens_index"):
        compute_score("x", "y", pause_tokens_index=[1])


def test_f1() -> None:
    f1, precision, recall = f1_score("the brown fox", "a quick brown fox")
    assert (f1, precision, recall) == pytest.approx((0.8, 1.0, 2 / 3))
    assert f1_score("yes", "yes it is") == (0.0, 0.0, 0.0)
    assert f1_score(None, "x") == (0.0, 0.0, 0.0)
    assert (normalize_answer("the"), f1_score("the", "the")) == ("", (0.0, 0.0, 0.0))
    assert normalize_answer("The  Fox!") == "fox"


def test_gpqa_and_ifbench() -> None:
    assert compute_gpqa_reward("The answer is (B).", "B") == 1.0
    assert compute_gpqa_reward("The answer is (B).", "paris", {"choices": ["rome", "paris"]}) == 1.0
    assert compute_gpqa_reward("The answer is (A).", "B") == compute_gpqa_reward(None, "B") == 0.0
    assert (DEFAULT_VALID_LETTERS[-1], len(DEFAULT_VALID_LETTERS)) == ("J", 10)
    rule = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert compute_ifbench_reward("no comma", None, rule) == 1.0
    assert compute_ifbench_reward("a, comma", rule) == 0.0


@pytest.mark.parametrize(
    ("module", "name", "plugin"),
    [
        ("deepscaler", "get_deepscaler_rule_based_reward", "slime_rewards.deepscaler"),
        ("math_utils", "grade_answer_sympy", "slime_rewards.deepscaler"),
        ("math_dapo_utils", "compute_score", "slime_rewards.dapo"),
        ("gpqa", "compute_gpqa_reward", "slime_rewards.gpqa"),
        ("ifbench", "compute_ifbench_reward", "slime_rewards.ifbench"),
    ],
)
def test_a_grader_without_its_plugin_says_what_to_install(
    module: str, name: str, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(importlib.import_module(f"slime.rollout.rm_hub.{module}"), name)
    monkeypatch.setitem(sys.modules, plugin, None)
    with pytest.raises(ImportError, match="pip install slime-rl") as caught:
        function("x", "y")
    wanted_by = f"slime.rollout.rm_hub.{module}.{name}"
    assert f"{wanted_by} needs {plugin} of slime-rl, which is not installed" in str(caught.value)


# -- filters ---------------------------------------------------------------------------------------------


def group(*rewards: float) -> list[Sample]:
    return [done(reward=reward) for reward in rewards]


def test_filters() -> None:
    args = SimpleNamespace(reward_key=None)
    strict = dynamic_sampling_filters.check_reward_nonzero_std
    lenient = dynamic_sampling_filters.check_reward_nonzero_std_with_fallback
    assert strict(args, group(0, 1)).keep
    assert strict(args, group(1, 1)) == FilterDecision(False, "zero_std_1.0")
    assert lenient(args, group(1, 1), extra=1) == FilterDecision(False, "zero_std_1.0", True)
    assert strict(args, group(1)).keep  # THUDM/slime drops a group of one
    assert base_types.DynamicFilterOutput is FilterDecision


def test_calling_and_counting_filters() -> None:
    call = base_types.call_dynamic_filter
    assert call(None, 1, 2) == FilterDecision(True)
    assert call(lambda args, samples: False, 1, 2) == FilterDecision(False)
    decision = FilterDecision(False, "short")
    assert call(lambda args, samples, **kw: decision, 1, 2, rollout_id=3) is decision
    gatherer = base_types.MetricGatherer()
    for reason in ("a", "b", "a", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_a": 2, "rollout/dynamic_filter/drop_b": 1}


# -- on-policy distillation ------------------------------------------------------------------------------


async def test_the_teachers_answer_becomes_log_probs(make_args: MakeArgs, engine: Any) -> None:
    args = make_args(rm_url=f"{engine.url}/teacher", rollout_temperature=0.7)
    sample = done(tokens=[1, 2, 3], response_length=2)
    answer = await reward_func(args, sample)
    (asked,) = engine.bodies("/teacher")
    assert answer == {"echo": asked}
    assert asked["input_ids"] == [1, 2, 3]
    assert (asked["sampling_params"]["max_new_tokens"], asked["sampling_params"]["temperature"]) == (0, 0.7)
    assert asked["return_logprob"] is True
    entries = [[None, 1, None], [-0.5, 2, None], [-0.75, 3, None]]
    sample.reward = {"meta_info": {"input_token_logprobs": entries}}
    assert post_process_rewards(args, [sample]) == ([0.0], [0.0])
    assert sample.teacher_log_probs == [-0.5, -0.75]
    with pytest.raises(ConfigError, match="--rm-url"):
        await reward_func(SimpleNamespace(rm_url=None), sample)
