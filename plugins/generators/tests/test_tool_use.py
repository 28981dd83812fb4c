from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from slime_generators.tool_use import generate
from slime_generators.tool_use.calculator import calculate
from slime_testing_contracts import CharTokenizer, Reply, ScriptedEngine

from slime_core import GenerateContext, Sample, SampleStatus
from slime_core.config import Args
from tests.sweeps import sweep

TOKENIZER = CharTokenizer()
CALL, SEEN, ANSWER = "<tool>12*34</tool>", "<|tool|>408<|end|><|assistant|>", r"\boxed{408}"


def prompt(**metadata: Any) -> Sample:
    return Sample(index=0, tokens=TOKENIZER.encode("12*34=?"), metadata=metadata)


def run(engine: ScriptedEngine, sample: Sample, limit: int = 200, **args: Any) -> Sample:
    params = {"max_new_tokens": limit, "skip_special_tokens": True}
    return asyncio.run(generate(Args(**args), sample, params, context=GenerateContext(engine, TOKENIZER)))


def test_a_call_is_answered_and_not_trained_on() -> None:
    engine = ScriptedEngine([CALL, ANSWER], weight_version=2)
    sample = run(engine, prompt())
    assert TOKENIZER.decode(sample.response_tokens) == CALL + "<|end|>" + SEEN + ANSWER + "<|end|>"
    call, seen, answer = (len(TOKENIZER.encode(t)) for t in (CALL + "<|end|>", SEEN, ANSWER + "<|end|>"))
    assert sample.loss_mask == [1] * call + [0] * seen + [1] * answer
    assert sample.rollout_log_probs == [-0.5] * call + [0.0] * seen + [-0.5] * answer
    assert sample.token_weight_versions == [2] * call + [-1] * seen + [2] * answer
    assert sample.status == SampleStatus.COMPLETED
    assert engine.requests[1].input_ids == sample.prompt_tokens + sample.response_tokens[: call + seen]
    assert engine.requests[1].sampling_params["max_new_tokens"] == 200 - call - seen
    assert sample.non_generation_time > 0


@pytest.mark.parametrize("text", ["I could <tool>1+1</tool> but 2", "<tool>1+1", "tool>1+1</tool>", "2"])
def test_what_is_no_call_is_the_answer(text: str) -> None:
    engine = ScriptedEngine([text])
    assert run(engine, prompt()).status == SampleStatus.COMPLETED
    assert len(engine.requests) == 1


def test_turns_are_limited_by_metadata_then_args() -> None:
    for sample, args, turns in (
        (prompt(), {}, 4),
        (prompt(), {"max_turns": 2}, 2),
        (prompt(max_turns=1), {"max_turns": 2}, 1),
    ):
        engine = ScriptedEngine(lambda request: CALL)
        assert run(engine, sample, **args).status == SampleStatus.TRUNCATED
        assert len(engine.requests) == turns
        assert TOKENIZER.decode(sample.response_tokens).endswith(CALL + "<|end|>"), "no observation nobody reads"


def test_an_observation_that_does_not_fit_is_left_out() -> None:
    sample = run(ScriptedEngine([CALL]), prompt(), limit=12)
    assert sample.status == SampleStatus.TRUNCATED
    assert TOKENIZER.decode(sample.response_tokens) == CALL + "<|end|>"


@pytest.mark.parametrize("masked", [False, True])
def test_an_interruption_inside_a_call_is_picked_up(masked: bool) -> None:
    sample = run(ScriptedEngine([CALL, Reply("<tool>40", "abort")]), prompt())
    assert sample.status == SampleStatus.ABORTED
    if masked:
        sample.loss_mask = [0] * sample.response_length  # --mask-offpolicy-in-partial-rollout
    engine = ScriptedEngine(["8+1</tool>", "409"])
    run(engine, sample)
    text = TOKENIZER.decode(sample.response_tokens)
    assert text.endswith("<tool>408+1</tool><|end|><|tool|>409<|end|><|assistant|>409<|end|>")
    assert sample.status == SampleStatus.COMPLETED


@sweep(
    "expression, value",
    [
        ("12*34", "408"),
        (" 2 + 3 * 4 ", "14"),
        ("-(7 - 10)", "3"),
        ("7/2", "3.5"),
        ("8/2", "4"),
        ("7//2", "3"),
        ("7%4", "3"),
        ("2**10", "1024"),
        ("123*456", "56088"),
        ("0.1+0.2", "0.30000000000000004"),
        ("1/0", "error: division by zero"),
        ("1e308*10", "error: number too large"),
        ("9**9**9", "error: exponent too large"),
        ("(9**999)*(9**999)", "error: number too large"),
        ("10.0**1000", "error: number too large"),
        ("(-8)**0.5", "error: no real value"),
        ("2 +", "error: not arithmetic"),
        ("", "error: not arithmetic"),
        ("1\x00", "error: not arithmetic"),
        ("(" * 150, "error: not arithmetic"),
        ("1" * 201, "error: longer than 200 characters"),
        ("__import__('os')", "error: only numbers and + - * / // % ** ( ) are allowed"),
        ("True+1", "error: only numbers and + - * / // % ** ( ) are allowed"),
        ("'a'*9", "error: only numbers and + - * / // % ** ( ) are allowed"),
        ("1,000", "error: only numbers and + - * / // % ** ( ) are allowed"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    started = time.monotonic()
    assert calculate(expression) == value
    assert time.monotonic() - started < 10
