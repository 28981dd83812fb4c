"""Generators of one turn, and of turns with tools."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_generators.single_turn import generate
from slime_generators.tool_use import ToolResult, call_tool, running
from slime_generators.tool_use import generate as tool_use_generate
from slime_generators.tool_use.calculator import calculate
from slime_testing_contracts import CharTokenizer, Reply, ScriptedEngine, ToolContract
from slime_tool_parsers import Tool

from slime_core import GenerateContext, Sample, SampleStatus
from slime_core.config import Args
from tests.sweeps import sweep


def run(engine: ScriptedEngine, sample: Sample, max_new_tokens: int = 20) -> Sample:
    context = GenerateContext(engine, engine.tokenizer)
    return asyncio.run(generate(None, sample, {"max_new_tokens": max_new_tokens, "top_p": 0.9}, context=context))


TOKENIZER = CharTokenizer()
CALL, SEEN, ANSWER = "<tool>12*34</tool>", "<|tool|>408<|end|><|assistant|>", r"\boxed{408}"


def prompt_tool_use(**metadata: Any) -> Sample:
    return Sample(index=0, tokens=TOKENIZER.encode("12*34=?"), metadata=metadata)


def run_tool_use(engine: ScriptedEngine, sample: Sample, limit: int = 200, **args: Any) -> Sample:
    params = {"max_new_tokens": limit, "skip_special_tokens": True}
    return asyncio.run(tool_use_generate(Args(**args), sample, params, context=GenerateContext(engine, TOKENIZER)))


@pytest.mark.parametrize("one", [run, run_tool_use])
def test_a_sample_without_prompt_tokens_is_refused(one: Callable[..., Sample]) -> None:
    with pytest.raises(ValueError, match="sample 3 has no prompt tokens"):
        one(ScriptedEngine([]), Sample(index=3, prompt="text"))


def test_a_call_is_answered_and_not_trained_on() -> None:
    engine = ScriptedEngine([CALL, ANSWER], weight_version=2)
    sample = run_tool_use(engine, prompt_tool_use())
    assert TOKENIZER.decode(sample.response_tokens) == CALL + "<|end|>" + SEEN + ANSWER + "<|end|>"
    call, seen, answer = (len(TOKENIZER.encode(t)) for t in (CALL + "<|end|>", SEEN, ANSWER + "<|end|>"))
    assert sample.loss_mask == [1] * call + [0] * seen + [1] * answer
    assert sample.rollout_log_probs == [-0.5] * call + [0.0] * seen + [-0.5] * answer
    assert sample.token_weight_versions == [2] * call + [-1] * seen + [2] * answer
    assert sample.status == SampleStatus.COMPLETED
    assert engine.requests[1].input_ids == sample.prompt_tokens + sample.response_tokens[: call + seen]
    assert engine.requests[1].sampling_params["max_new_tokens"] == 200 - call - seen
    assert sample.non_generation_time > 0


def test_turns_are_limited_by_metadata_then_args_and_by_length() -> None:
    for sample, args, turns in (
        (prompt_tool_use(), {}, 4),
        (prompt_tool_use(), {"max_turns": 2}, 2),
        (prompt_tool_use(max_turns=1), {"max_turns": 2}, 1),
    ):
        engine = ScriptedEngine(lambda request: CALL)
        assert run_tool_use(engine, sample, **args).status == SampleStatus.TRUNCATED
        assert len(engine.requests) == turns
        assert TOKENIZER.decode(sample.response_tokens).endswith(CALL + "<|end|>"), "no observation nobody reads"
    sample = run_tool_use(ScriptedEngine([CALL]), prompt_tool_use(), limit=12)
    assert sample.status == SampleStatus.TRUNCATED
    assert TOKENIZER.decode(sample.response_tokens) == CALL + "<|end|>"


@pytest.mark.parametrize("masked", [False, True])
def test_an_interruption_inside_a_call_is_picked_up(masked: bool) -> None:
    sample = run_tool_use(ScriptedEngine([CALL, Reply("<tool>40", "abort")]), prompt_tool_use())
    assert sample.status == SampleStatus.ABORTED
    if masked:
        sample.loss_mask = [0] * sample.response_length  # --mask-offpolicy-in-partial-rollout
    engine = ScriptedEngine(["8+1</tool>", "409"])
    run_tool_use(engine, sample)
    text = TOKENIZER.decode(sample.response_tokens)
    assert text.endswith("<tool>408+1</tool><|end|><|tool|>409<|end|><|assistant|>409<|end|>")
    assert sample.status == SampleStatus.COMPLETED


@sweep(
    "expression, value",
    [
        ("12*34", "408"),
        ("-(7 - 10)", "3"),
        ("7/2", "3.5"),
        ("2**10", "1024"),
        ("1/0", "error: division by zero"),
        ("1e308*10", "error: number too large"),
        ("9**9**9", "error: exponent too large"),
        ("10.0**1000", "error: number too large"),
        ("(-8)**0.5", "error: no real value"),
        ("2 +", "error: not arithmetic"),
        ("(" * 150, "error: not arithmetic"),
        ("1" * 201, "error: longer than 200 characters"),
        ("__import__('os')", "error: only numbers and + - * / // % ** ( ) are allowed"),
        ("'a'*9", "error: only numbers and + - * / // % ** ( ) are allowed"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    started = time.monotonic()
    assert calculate(expression) == value
    assert time.monotonic() - started < 10


TOKENIZER_TOOLS = CharTokenizer([*CharTokenizer.SPECIALS, "<tool_call>", "</tool_call>"])
TOOLS = '''
import asyncio, threading

meet = threading.Barrier(2)

def weather(city: str) -> str:
    """The weather of a city."""
    meet.wait(30)
    return f"{city} is fine"

def long(n: int) -> str:
    """Many letters."""
    return "x" * n

def broken() -> str:
    """Fails."""
    raise RuntimeError("no network")

async def forever() -> str:
    """Hangs."""
    await asyncio.Event().wait()

def who(*, sample) -> str:
    """Which sample asks."""
    return f"sample {sample.index}"

tools = [weather, long, broken, forever, who]
'''


@pytest.fixture
def args(tmp_path: Path) -> Args:
    file = tmp_path / "mine.py"
    file.write_text(TOOLS)
    return Args(tools_path=[str(file)], tool_call_parser="hermes", tool_timeout=60.0)


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def run_tools(args: Any, engine: ScriptedEngine, sample: Sample | None = None, limit: int = 2000) -> Sample:
    engine.tokenizer = TOKENIZER_TOOLS
    sample = sample or Sample(index=7, prompt="?", tokens=TOKENIZER_TOOLS.encode("?"))
    params = {"max_new_tokens": limit, "skip_special_tokens": False}
    return asyncio.run(tool_use_generate(args, sample, params, context=GenerateContext(engine, TOKENIZER_TOOLS)))


def tool_messages(sample: Sample) -> list[str]:
    return [m["content"] for m in sample.metadata["tool_messages"] if m["role"] == "tool"]


def test_calls_of_a_turn_run_at_the_same_time_and_are_answered_in_order(args: Args) -> None:
    turn = call("weather", '{"city": "Oslo"}') + call("weather", '{"city": "Rome"}') + "<|end|>"
    sample = run_tools(args, ScriptedEngine([Reply(turn), "Both fine."]))
    assert tool_messages(sample) == ["Oslo is fine", "Rome is fine"], "each waits for the other"
    seen = "<|tool|>Oslo is fine<|end|><|tool|>Rome is fine<|end|><|assistant|>"
    assert TOKENIZER_TOOLS.decode(sample.response_tokens) == f"{turn}{seen}Both fine.<|end|>"
    count = len(TOKENIZER_TOOLS.encode(turn))
    assert sample.loss_mask == [1] * count + [0] * len(TOKENIZER_TOOLS.encode(seen)) + [1] * len("Both fine.!")
    assert sample.metadata["tool_stats"]["weather"]["calls"] == 2
    assert sample.metadata["num_turns"] == 2


@pytest.mark.parametrize(
    ("turn", "answer", "counted"),
    [
        (call("broken"), "error: RuntimeError: no network", "broken"),
        (call("nothing"), "error: no tool named 'nothing'; tools: weather, long, broken, forever, who", "unknown"),
        (call("long", '{"n": "x"}'), "error: argument n: 'x' is not of type 'integer'", "long"),
        (call("long", "{"), "error: the call cannot be read: not JSON", "ill_formed"),
        ("<tool_call>", "error: the call cannot be read: the call has no </tool_call>", "ill_formed"),
    ],
)
def test_errors_are_observations(args: Args, turn: str, answer: str, counted: str) -> None:
    sample = run_tools(args, ScriptedEngine([Reply(turn + "<|end|>"), "I see."]))
    assert sample.status == SampleStatus.COMPLETED
    assert tool_messages(sample)[0].startswith(answer)
    stats = sample.metadata["tool_stats"][counted]
    assert (stats["calls"], stats["errors"]) == (1, 1)


def test_results_are_cut_and_calls_are_bounded(args: Args) -> None:
    args.tool_result_tokens, args.max_calls_per_turn = 5, 2
    sample = run_tools(args, ScriptedEngine([call("long", '{"n": 9}') + call("who") + call("who"), "ok"]))
    assert tool_messages(sample) == [
        "xxxxx ... (cut)", "sampl ... (cut)", "error ... (cut)",
    ]  # fmt: skip
    assert sample.metadata["tool_stats"]["who"] == {
        "calls": 2, "errors": 1, "seconds": pytest.approx(0.0, abs=30.0),
    }  # fmt: skip


def test_a_row_may_call_its_own_tools_only(args: Args) -> None:
    own = {"type": "function", "function": {"name": "who", "description": "", "parameters": {"type": "object"}}}
    sample = Sample(index=7, prompt="?", tokens=TOKENIZER_TOOLS.encode("?"), metadata={"tools": [own]})
    run_tools(args, ScriptedEngine([call("broken"), "ok"]), sample)
    assert tool_messages(sample) == ["error: no tool named 'broken'; tools: who"]


def test_an_interruption_while_tools_run_calls_them_again(args: Args) -> None:
    """The turn is sampled, its calls are not answered: the next rollout begins with the calls."""

    async def cancelled() -> Sample:
        engine = ScriptedEngine([call("forever")], tokenizer=TOKENIZER_TOOLS)
        sample = Sample(index=7, prompt="?", tokens=TOKENIZER_TOOLS.encode("?"))
        params = {"max_new_tokens": 500, "skip_special_tokens": False}
        task = asyncio.create_task(
            tool_use_generate(args, sample, params, context=GenerateContext(engine, TOKENIZER_TOOLS))
        )
        while not sample.metadata.get("tool_calls_pending"):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return Sample.from_dict(sample.to_dict())

    sample = asyncio.run(cancelled())
    args.tool_timeout = 0.05
    engine = ScriptedEngine(["gave up"])
    run_tools(args, engine, sample)
    assert tool_messages(sample) == ["error: forever did not answer within 0.05 s"]
    assert len(engine.requests) == 1
    assert sample.status == SampleStatus.COMPLETED


def test_a_sample_that_was_reset_while_tools_ran_begins_with_a_turn() -> None:
    left = {"tool_calls_pending": 30, "tool_messages": [{"role": "assistant", "content": CALL}], "num_turns": 1}
    sample = run_tool_use(ScriptedEngine([ANSWER]), prompt_tool_use(**left))
    assert (sample.status, TOKENIZER.decode(sample.response_tokens)) == (SampleStatus.COMPLETED, ANSWER + "<|end|>")


class TestCalculator(ToolContract):
    component = "calculator"
    examples = (
        ("calculator", {"expression": "12*34"}, "408"),
        ("calculator", {"expression": "1/0"}, "error: division by zero"),
    )


RELEASE = threading.Event()


@pytest.fixture(autouse=True)
def nothing_hangs_on() -> Iterator[None]:
    """Calls that overran are counted until they return, which would be in the middle of the next test."""
    before = set(threading.enumerate())
    RELEASE.clear()
    yield
    RELEASE.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def double(x: int) -> int:
    return 2 * x


def broken() -> str:
    raise KeyError("no\nsuch city")


def leaves() -> str:
    raise SystemExit(3)


def surrogate() -> str:
    return "\ud800"


def hang() -> str:
    RELEASE.wait(60)
    return "late"


def mine(*, sample: Any, args: Any) -> str:
    return f"{sample}{args}"


def call_running(function: Any, deadline: float = 30.0, **arguments: Any) -> ToolResult:
    return asyncio.run(call_tool(Tool.of(function), arguments, deadline=deadline, args="A", sample="S"))


@pytest.mark.parametrize(
    ("function", "arguments", "text", "failed"),
    [
        (double, {"x": 4}, "8", False),
        (broken, {}, "error: KeyError: 'no\\nsuch city'", True),
        (leaves, {}, "error: RuntimeError: SystemExit: 3", True),
        (surrogate, {}, "?", False),
        (mine, {}, "SA", False),
    ],
)
def test_results_and_errors_are_text(function: Any, arguments: dict[str, Any], text: str, failed: bool) -> None:
    result = call_running(function, **arguments)
    assert (result.text, result.failed) == (text, failed)
    assert result.seconds >= 0


def test_calls_that_hang_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_LEFT_BEHIND", running._Overdue.count + 2)

    async def many() -> list[ToolResult]:
        return [await call_tool(Tool.of(hang), {}, deadline=0.02) for _ in range(3)]

    texts = [result.text for result in asyncio.run(many())]
    assert [("did not answer" in text, "no other is started" in text) for text in texts] == [
        (True, False),
        (True, False),
        (False, True),
    ]
