from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from slime_generators.self_consistency import generate
from slime_testing_contracts import CharTokenizer, Reply, ScriptedEngine

from slime_core import GenerateContext, Sample
from slime_core.config import Args
from slime_core.errors import ConfigError


def run(engine: ScriptedEngine, *, evaluation: bool = True, rm_type: str | None = "exact", **own: Any) -> Any:
    sample = Sample(index=3, tokens=CharTokenizer().encode("1+1="), session_id="s", label="2")
    args = Args(rm_type=rm_type, plugins={"self_consistency": own})
    context = GenerateContext(engine, engine.tokenizer, evaluation=evaluation)
    return asyncio.run(generate(args, sample, {"max_new_tokens": 40, "sampling_seed": 1}, context=context))


def test_the_commonest_answer_wins_whatever_the_label_says() -> None:
    engine = ScriptedEngine(["2", "so \\boxed{3}", "3", "\\boxed{ 3 }", "4"], weight_version=2)
    chosen = run(engine, n=5)
    assert (chosen.response, chosen.session_id, chosen.reward) == ("so \\boxed{3}", "s", None)
    assert chosen.token_weight_versions == [2] * chosen.response_length
    facts = chosen.metadata["self_consistency"]
    assert (facts["answer"], facts["votes"], facts["chosen"]) == ("3", {"2": 1, "3": 3, "4": 1}, 1)
    assert run(ScriptedEngine(["2", "so \\boxed{3}", "3"]), n=3, pick="shortest").response == "3"


def test_a_tie_goes_to_the_answer_that_came_first_and_no_answer_is_no_vote() -> None:
    replies = ["\\boxed{never closed", "7", "8", "8", "7"]
    assert run(ScriptedEngine(replies), n=5).response == "7"
    silent = run(ScriptedEngine(["\\boxed{a", "\\boxed{b"]), n=2)
    assert (silent.response, silent.metadata["self_consistency"]["answer"]) == ("\\boxed{a", None)


def test_the_likeliest_of_the_winners(tmp_path: Path) -> None:
    sure, unsure = Reply("yes 3", log_probs=[-0.1] * 6), Reply("no 3", log_probs=[-2.0] * 5)
    (tmp_path / "last.py").write_text("def last_word(sample):\n    return sample.response.split()[-1]\n")
    spec = f"{tmp_path / 'last.py'}:last_word"
    chosen = run(ScriptedEngine([unsure, sure, "4"]), n=3, pick="likeliest", answer=spec, rm_type=None)
    assert chosen.response == "yes 3"


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ConfigError, match="nothing tells the candidates' answers"):
        run(ScriptedEngine([]), rm_type="f1")
    with pytest.raises(ConfigError, match="the reward 'f1' offers no extract_answer"):
        run(ScriptedEngine([]), answer="f1")
    with pytest.raises(ConfigError, match="self_consistency is for evaluation"):
        run(ScriptedEngine([]), evaluation=False)
