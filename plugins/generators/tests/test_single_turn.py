from __future__ import annotations

import asyncio

import pytest
from slime_generators.single_turn import generate
from slime_testing_contracts import CharTokenizer, ScriptedEngine

from slime_core import GenerateContext, Sample, SampleStatus


def run(engine: ScriptedEngine, sample: Sample, max_new_tokens: int = 20) -> Sample:
    context = GenerateContext(engine, engine.tokenizer)
    return asyncio.run(generate(None, sample, {"max_new_tokens": max_new_tokens, "top_p": 0.9}, context=context))


def prompt() -> Sample:
    return Sample(index=0, tokens=CharTokenizer().encode("1+1="), session_id="abc")


def test_the_engine_gets_prompt_params_and_session() -> None:
    engine = ScriptedEngine(["2"], weight_version=6)
    sample = run(engine, prompt())
    (request,) = engine.requests
    assert request.input_ids == CharTokenizer().encode("1+1=")
    assert request.sampling_params == {"max_new_tokens": 20, "top_p": 0.9}
    assert request.session_id == "abc"
    assert (sample.response, sample.status) == ("2", SampleStatus.COMPLETED)
    assert sample.weight_versions == ["6"]
    assert sample.token_weight_versions == [6, 6]


def test_a_sample_without_prompt_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 3 has no prompt tokens"):
        run(ScriptedEngine([]), Sample(index=3, prompt="text"))
