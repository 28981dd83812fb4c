"""Tools of the user's: several calls at once, errors for the model to read, interruptions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from slime_generators.tool_use import generate
from slime_testing_contracts import CharTokenizer, Reply, ScriptedEngine, ToolContract

from slime_core import GenerateContext, Sample, SampleStatus
from slime_core.config import Args

TOKENIZER = CharTokenizer([*CharTokenizer.SPECIALS, "<tool_call>", "</tool_call>"])
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


def run(args: Any, engine: ScriptedEngine, sample: Sample | None = None, limit: int = 2000) -> Sample:
    engine.tokenizer = TOKENIZER
    sample = sample or Sample(index=7, prompt="?", tokens=TOKENIZER.encode("?"))
    params = {"max_new_tokens": limit, "skip_special_tokens": False}
    return asyncio.run(generate(args, sample, params, context=GenerateContext(engine, TOKENIZER)))


def tool_messages(sample: Sample) -> list[str]:
    return [m["content"] for m in sample.metadata["tool_messages"] if m["role"] == "tool"]


def test_calls_of_a_turn_run_at_the_same_time_and_are_answered_in_order(args: Args) -> None:
    turn = call("weather", '{"city": "Oslo"}') + call("weather", '{"city": "Rome"}') + "<|end|>"
    sample = run(args, ScriptedEngine([Reply(turn), "Both fine."]))
    assert tool_messages(sample) == ["Oslo is fine", "Rome is fine"], "each waits for the other"
    seen = "<|tool|>Oslo is fine<|end|><|tool|>Rome is fine<|end|><|assistant|>"
    assert TOKENIZER.decode(sample.response_tokens) == f"{turn}{seen}Both fine.<|end|>"
    count = len(TOKENIZER.encode(turn))
    assert sample.loss_mask == [1] * count + [0] * len(TOKENIZER.encode(seen)) + [1] * len("Both fine.!")
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
    sample = run(args, ScriptedEngine([Reply(turn + "<|end|>"), "I see."]))
    assert sample.status == SampleStatus.COMPLETED
    assert tool_messages(sample)[0].startswith(answer)
    stats = sample.metadata["tool_stats"][counted]
    assert (stats["calls"], stats["errors"]) == (1, 1)


def test_a_call_that_hangs_is_answered_at_its_deadline(args: Args) -> None:
    args.tool_timeout = 0.05
    sample = run(args, ScriptedEngine([call("forever"), "Never mind."]))
    assert tool_messages(sample) == ["error: forever did not answer within 0.05 s"]
    assert sample.metadata["tool_stats"]["forever"]["seconds"] >= 0.05


def test_results_are_cut_and_calls_are_bounded(args: Args) -> None:
    args.tool_result_tokens, args.max_calls_per_turn = 5, 2
    sample = run(args, ScriptedEngine([call("long", '{"n": 9}') + call("who") + call("who"), "ok"]))
    assert tool_messages(sample) == [
        "xxxxx ... (cut)", "sampl ... (cut)", "error ... (cut)",
    ]  # fmt: skip
    assert sample.metadata["tool_stats"]["who"] == {
        "calls": 2, "errors": 1, "seconds": pytest.approx(0.0, abs=30.0),
    }  # fmt: skip


def test_a_rows_own_tools_are_what_it_may_call(args: Args) -> None:
    own = {"type": "function", "function": {"name": "who", "description": "", "parameters": {"type": "object"}}}
    sample = Sample(index=7, prompt="?", tokens=TOKENIZER.encode("?"), metadata={"tools": [own]})
    run(args, ScriptedEngine([call("broken"), "ok"]), sample)
    assert tool_messages(sample) == ["error: no tool named 'broken'; tools: who"]


def test_an_interruption_while_tools_run_calls_them_again(args: Args) -> None:
    """The turn is sampled, its calls are not answered: the next rollout begins with the calls."""

    async def cancelled() -> Sample:
        engine = ScriptedEngine([call("forever")], tokenizer=TOKENIZER)
        sample = Sample(index=7, prompt="?", tokens=TOKENIZER.encode("?"))
        params = {"max_new_tokens": 500, "skip_special_tokens": False}
        task = asyncio.create_task(generate(args, sample, params, context=GenerateContext(engine, TOKENIZER)))
        while not sample.metadata.get("tool_calls_pending"):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return Sample.from_dict(sample.to_dict())

    sample = asyncio.run(cancelled())
    args.tool_timeout = 0.05
    engine = ScriptedEngine(["gave up"])
    run(args, engine, sample)
    assert tool_messages(sample) == ["error: forever did not answer within 0.05 s"]
    assert len(engine.requests) == 1
    assert sample.status == SampleStatus.COMPLETED


class TestCalculator(ToolContract):
    component = "calculator"
    examples = (
        ("calculator", {"expression": "12*34"}, "408"),
        ("calculator", {"expression": "1/0"}, "error: division by zero"),
    )
