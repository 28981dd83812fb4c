"""Whole multi-turn trajectories: the trainer's log-prob of every sampled token is, bit for bit, the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_data.saved import read_samples

from slime_core.sample.provenance import Source
from tests.conftest import Slime, TinyRun
from tests.run_files import gaps, metrics

PARSER = '''
from slime_core.tools import ParsedTurn, ToolCall
from slime_tool_parsers import ToolParserBase


class EveryTurn(ToolParserBase):
    """A random model calls nothing: whatever it says is a call."""

    def parse(self, text, tools=(), *, reasoning_open=False):
        return ParsedTurn(attempts=(ToolCall("", "add", {"a": len(text), "b": 1}),))

    def render(self, calls):
        return ""

    def claims(self, chat_template):
        return False
'''
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b
'''


@pytest.mark.slow
def test_engine_and_trainer_agree_on_every_sampled_token_of_every_turn(
    slime: Slime, tiny: TinyRun, tmp_path: Path
) -> None:
    (tmp_path / "parser.py").write_text(PARSER)
    (tmp_path / "tools.py").write_text(TOOLS)
    argv = tiny.argv(
        tmp_path / "run",
        true_on_policy_mode=True,
        num_rollout=3,
        eval_interval=None,
        eval_prompt_data=None,
        rollout_max_response_len=120,
        rollout_stop_token_ids=list(range(1, 120, 2)),  # turns of a few tokens
        custom_generate_function_path="tool_use",
        tools_path=[f"{tmp_path / 'tools.py'}:add"],
        tool_call_parser=f"{tmp_path / 'parser.py'}:EveryTurn",
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=800,
        save_debug_rollout_data=tmp_path / "{rollout_id}.jsonl",
    )
    slime("train", *argv)
    assert gaps(tmp_path / "run") == [0.0] * 3
    assert all(row["rollout/failed_ratio"] == 0 for row in metrics(tmp_path / "run") if "rollout/failed_ratio" in row)
    samples = [s for rollout in range(3) for s in read_samples(tmp_path / f"{rollout}.jsonl")]
    turns = [sum(span.source == Source.SAMPLED for span in s.spans or ()) for s in samples]
    assert sum(turns) / len(turns) > 2, "several turns each"
    assert {span.source for s in samples for span in s.spans or ()} >= {Source.SAMPLED, Source.USER, Source.TEMPLATE}
    for sample in samples:
        assert sum(span.length for span in sample.spans or ()) == len(sample.tokens)
        told = [span.source for span in sample.spans or () for _ in range(span.length)][-sample.response_length :]
        assert sample.loss_mask == [int(source == Source.SAMPLED) for source in told]
        assert sample.loss_mask == [int(v >= 0) for v in sample.token_weight_versions]
