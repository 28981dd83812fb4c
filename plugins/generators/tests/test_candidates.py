"""Generators that choose among candidates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from slime_generators.best_of_n import generate
from slime_generators.self_consistency import generate as self_consistency_generate
from slime_testing_contracts import CharTokenizer, Reply, ScriptedEngine

from slime_core import GenerateContext, Sample, SampleStatus
from slime_core.config import Args
from slime_core.errors import ConfigError, EngineError

LENGTH = """
def reward(args, sample):
    if "bad" in sample.response:
        raise RuntimeError("no score")
    return float(len(sample.response))
"""
FAN = """
import copy
from slime_core import resolve

async def generate(args, sample, sampling_params, *, context):
    first = await resolve("generators", "single_turn").obj(args, sample, sampling_params, context=context)
    return [first, copy.deepcopy(first)]
"""


def run(engine: ScriptedEngine, *, evaluation: bool = True, label: str = "2", seed: int = 7, **own: Any) -> Any:
    sample = Sample(index=3, tokens=CharTokenizer().encode("1+1="), session_id="s", label=label)
    args = Args(rm_type="exact", plugins={"best_of_n": own})
    context = GenerateContext(engine, engine.tokenizer, evaluation=evaluation)
    params = {"max_new_tokens": 40, "temperature": 0.5, "sampling_seed": seed}
    return asyncio.run(generate(args, sample, params, context=context))


def test_the_best_candidate_comes_back_as_it_was_sampled() -> None:
    engine = ScriptedEngine(["1", "2", "2", "x"], weight_version=4)
    chosen = run(engine, n=4)
    assert (chosen.response, chosen.status, chosen.session_id) == ("2", SampleStatus.COMPLETED, "s")
    alone = ScriptedEngine(["2"], weight_version=4)
    same = run(alone, n=1)
    assert (chosen.tokens, chosen.rollout_log_probs, chosen.spans) == (same.tokens, same.rollout_log_probs, same.spans)
    assert chosen.reward is None, "the run's reward scores it"
    facts = chosen.metadata["best_of_n"]
    assert (facts["chosen"], facts["rewards"]) == (1, [0.0, 1.0, 1.0, 0.0])
    assert facts["response_tokens"] == 8
    requests = engine.requests
    assert len({r.sampling_params["sampling_seed"] for r in requests}) == 4
    assert {r.session_id for r in requests} == {"s-c0", "s-c1", "s-c2", "s-c3"}


def test_a_named_reward_chooses_and_candidates_that_fail_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "rm.py").write_text(LENGTH)
    engine = ScriptedEngine(["22", EngineError("gone"), "bad bad bad", "22222", "2"])
    chosen = run(engine, n=5, reward=f"{tmp_path / 'rm.py'}")
    assert chosen.response == "22222"
    facts = chosen.metadata["best_of_n"]
    assert (facts["candidates"], facts["rewards"]) == ([0, 2, 3, 4], [2.0, None, 5.0, 1.0])
    with pytest.raises(EngineError, match="gone"):
        run(ScriptedEngine([EngineError("gone"), EngineError("gone")]), n=2)
    with pytest.raises(RuntimeError, match="no score"):
        run(ScriptedEngine(["bad", "bad"]), n=2, reward=f"{tmp_path / 'rm.py'}")


def test_weighted_adds_up_the_rewards_of_equal_answers(tmp_path: Path) -> None:
    (tmp_path / "rm.py").write_text(LENGTH)
    replies = ["a longer way to \\boxed{9}", "so \\boxed{2}", "and so \\boxed{2}", "\\boxed{2}"]
    spec = f"{tmp_path / 'rm.py'}"
    assert run(ScriptedEngine(list(replies)), n=4, reward=spec).response == replies[0]
    weighted = run(ScriptedEngine(list(replies)), n=4, reward=spec, select="weighted", answer="exact")
    assert weighted.response == "and so \\boxed{2}"


def test_a_candidate_may_be_several_samples(tmp_path: Path) -> None:
    (tmp_path / "fan.py").write_text(FAN)
    chosen = run(ScriptedEngine(["1", "2"]), n=2, generator=f"{tmp_path / 'fan.py'}")
    assert [s.response for s in chosen] == ["2", "2"]
    assert [s.metadata["best_of_n"]["chosen"] for s in chosen] == [1, 1]


def test_an_interrupted_candidate_puts_the_sample_back() -> None:
    sample = run(ScriptedEngine(["1", Reply("so ", finish="abort")]), n=2)
    assert (sample.status, sample.response_length, sample.index) == (SampleStatus.ABORTED, 0, 3)


def test_training_is_refused_unless_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"best_of_n is for evaluation: .*--set plugins.best_of_n.in_training=true"):
        run(ScriptedEngine([]), evaluation=False)
    with pytest.raises(ConfigError, match="for evaluation"):
        generate.traits.check(Args(), training=True)  # type: ignore[attr-defined]
    assert run(ScriptedEngine(["2", "1"]), evaluation=False, n=2, in_training=True).response == "2"


def run_self_consistency(
    engine: ScriptedEngine, *, evaluation: bool = True, rm_type: str | None = "exact", **own: Any
) -> Any:
    sample = Sample(index=3, tokens=CharTokenizer().encode("1+1="), session_id="s", label="2")
    args = Args(rm_type=rm_type, plugins={"self_consistency": own})
    context = GenerateContext(engine, engine.tokenizer, evaluation=evaluation)
    return asyncio.run(
        self_consistency_generate(args, sample, {"max_new_tokens": 40, "sampling_seed": 1}, context=context)
    )


def test_the_commonest_answer_wins_whatever_the_label_says() -> None:
    engine = ScriptedEngine(["2", "so \\boxed{3}", "3", "\\boxed{ 3 }", "4"], weight_version=2)
    chosen = run_self_consistency(engine, n=5)
    assert (chosen.response, chosen.session_id, chosen.reward) == ("so \\boxed{3}", "s", None)
    assert chosen.token_weight_versions == [2] * chosen.response_length
    facts = chosen.metadata["self_consistency"]
    assert (facts["answer"], facts["votes"], facts["chosen"]) == ("3", {"2": 1, "3": 3, "4": 1}, 1)
    assert run_self_consistency(ScriptedEngine(["2", "so \\boxed{3}", "3"]), n=3, pick="shortest").response == "3"


def test_a_tie_goes_to_the_answer_that_came_first_and_no_answer_is_no_vote() -> None:
    replies = ["\\boxed{never closed", "7", "8", "8", "7"]
    assert run_self_consistency(ScriptedEngine(replies), n=5).response == "7"
    silent = run_self_consistency(ScriptedEngine(["\\boxed{a", "\\boxed{b"]), n=2)
    assert (silent.response, silent.metadata["self_consistency"]["answer"]) == ("\\boxed{a", None)


def test_a_failed_candidate_neither_votes_nor_wins(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "from slime_core import resolve\n"
        "async def generate(args, sample, sampling_params, *, context):\n"
        "    await resolve('generators', 'single_turn').obj(args, sample, sampling_params, context=context)\n"
        "    if 'bad' in sample.response:\n"
        "        sample.fail('program', 'it crashed')\n"
        "    return sample\n"
    )
    own = {"generator": f"{tmp_path / 'fails.py'}"}
    replies = [r"bad \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"bad \boxed{6}"]
    chosen = run_self_consistency(ScriptedEngine(replies), n=4, **own)
    assert (chosen.status, chosen.response) == (SampleStatus.COMPLETED, r"\boxed{5}")
    assert chosen.metadata["self_consistency"]["candidates"] == [1, 2]
    assert run_self_consistency(ScriptedEngine(["bad"]), n=1, **own).status == SampleStatus.FAILED


def test_the_likeliest_of_the_winners(tmp_path: Path) -> None:
    sure, unsure = Reply("yes 3", log_probs=[-0.1] * 6), Reply("no 3", log_probs=[-2.0] * 5)
    (tmp_path / "last.py").write_text("def last_word(sample):\n    return sample.response.split()[-1]\n")
    spec = f"{tmp_path / 'last.py'}:last_word"
    chosen = run_self_consistency(ScriptedEngine([unsure, sure, "4"]), n=3, pick="likeliest", answer=spec, rm_type=None)
    assert chosen.response == "yes 3"


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ConfigError, match="nothing tells the candidates' answers"):
        run_self_consistency(ScriptedEngine([]), rm_type="f1")
    with pytest.raises(ConfigError, match="the reward 'f1' offers no extract_answer"):
        run_self_consistency(ScriptedEngine([]), answer="f1")
    with pytest.raises(ConfigError, match="self_consistency is for evaluation"):
        run_self_consistency(ScriptedEngine([]), evaluation=False)
