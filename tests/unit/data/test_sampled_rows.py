"""Saved samples -> rows -> the same tokens; and which samples are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slime_agent_base_url.trajectory import Trajectory
from slime_commands.sft.rollout import fill_supervised
from slime_commands.sft.sampled_rows import KEY, to_row
from slime_runs.inspect.selection import Wanted, select

from slime_core.cli.main import main
from slime_core.config import Args
from slime_core.data.dumps import write_samples
from slime_core.errors import DataError
from slime_core.sample import Sample, SampleStatus
from slime_core.sample.provenance import Source, Span
from tests.chat_tokenizers import chat_tokenizer

PROMPT = [{"role": "user", "content": "1+2?"}]


def sampled(index: int = 0, reward: Any = 1.0, answer: str = "It is 3.", tools: bool = False, **more: Any) -> Sample:
    """One that a policy generated: with `tools`, of two turns with a tool's answer between."""
    tokenizer = chat_tokenizer("qwen2.5")
    sample = Sample(
        index=index, group_index=index // 4, prompt=PROMPT, label="3", status=SampleStatus.COMPLETED,
        tokens=tokenizer.encode("<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"),
    )  # fmt: skip
    trajectory = Trajectory.of(sample)
    if tools:
        ids = tokenizer.encode("add(1,2)<|im_end|>")
        trajectory.add_sampled(ids, [-0.1] * len(ids), 3, text="add(1,2)")
        trajectory.add(tokenizer.encode("\n<|im_start|>user\nthree<|im_end|>\n"), Source.TOOL, "three")
    # Not how the tokenizer would write it: one token per letter.
    ids = [token for letter in answer for token in tokenizer.encode(letter)] + tokenizer.encode("<|im_end|>")
    trajectory.add_sampled(ids, [-0.5] * len(ids), 4, text=answer)
    trajectory.write(sample)
    sample.reward = reward
    for name, value in more.items():
        setattr(sample, name, value)
    return sample


def as_row(sample: Sample) -> Sample:
    """As the data source reads what `to_row` wrote."""
    row = json.loads(json.dumps(to_row(sample, chat_tokenizer("qwen2.5"))))
    metadata = {**row["metadata"], "source_name": "kept", "source_index": 7}
    return Sample(prompt=row["input"], label=row["label"], metadata=metadata)


@pytest.mark.parametrize("tools", [False, True])
def test_the_tokens_are_those_that_were_sampled(tools: bool) -> None:
    tokenizer, original = chat_tokenizer("qwen2.5"), sampled(tools=tools, answer="the thin end")
    original.withhold(0, 2, "role reader")
    row = as_row(original)
    assert fill_supervised(row, tokenizer, Args())
    mask = original.loss_mask
    assert mask is not None
    assert row.tokens == original.tokens
    assert row.tokens != tokenizer.encode(tokenizer.decode(row.tokens))
    assert row.loss_mask == mask[mask.index(1) :]
    assert row.spans is not None
    assert {s.source for s in row.spans if s.trained} == {Source.DEMONSTRATION}
    assert any(s.withheld == "role reader" for s in row.spans)
    assert [s.length for s in row.spans if s.source == Source.TOOL] == [
        s.length for s in original.spans or () if s.source == Source.TOOL
    ]
    assert (row.rollout_log_probs, row.token_weight_versions, row.reward) == (None, [], 0.0)


def test_another_vocabulary_trains_by_text_where_that_is_the_same_answer() -> None:
    other = chat_tokenizer("llama3")
    row = as_row(sampled())
    assert not fill_supervised(row, other, Args())
    assert row.response == "It is 3.<|eot_id|>"
    assert other.decode(row.tokens).startswith("<|begin_of_text|>")
    with pytest.raises(DataError, match=r"kept, row 7 .*several turns or with tools"):
        fill_supervised(as_row(sampled(tools=True)), other, Args())
    rendered = sampled(prompt="<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(DataError, match="after a prompt that its chat template wrote"):
        fill_supervised(as_row(rendered), other, Args())


# -- what is kept ----------------------------------------------------------------------------------------


def kept(samples: list[Sample], **wanted: Any) -> tuple[list[Any], dict[str, int]]:
    found = select([(Path("run/rollouts/rollout_0.jsonl"), samples)], Wanted(**wanted))
    assert found.total == len(samples)
    return [s.index for s in found.kept], dict(found.left_out)


def test_each_reason_is_told() -> None:
    broken = sampled(7)
    broken.spans = [Span(Source.SAMPLED, 1)]
    samples = [
        sampled(0),
        sampled(1, reward=0.0),
        sampled(2, reward=None),
        sampled(3, status=SampleStatus.FAILED),
        sampled(4, status=SampleStatus.TRUNCATED),
        sampled(5, remove_sample=True),
        sampled(6, answer="It is, I believe, 3."),
        broken,
        sampled(8),
    ]
    indices, reasons = kept(samples, min_reward=0.5, max_response_tokens=12, dedupe=True)
    assert indices == [0]
    assert {reason[:20]: count for reason, count in reasons.items()} == {
        "reward below 0.5": 1,
        "no reward": 1,
        "status failed": 1,
        "cut at the token lim": 1,
        "taken out by a filte": 1,
        "more than 12 respons": 1,
        "tokens that do not f": 1,
        "the same tokens as o": 1,
    }
    assert kept(samples, truncated=True)[0] == [0, 1, 4, 6, 8]


def test_the_best_of_each_prompt_in_their_order() -> None:
    rewards = [0.5, 1.0, 0.2, 1.0, 0.1, 0.3]
    samples = [sampled(i, reward=r, answer=f"{i}.") for i, r in enumerate(rewards)]
    assert kept(samples, best_of_group=1) == ([1, 5], {"not among the best 1 of the prompt": 4})
    assert kept(samples, best_of_group=3)[0] == [0, 1, 3, 4, 5]
    for sample in samples[:2]:
        sample.rollout_id = 11  # one execution, of mean reward 0.75
    assert kept(samples, best_of_group=1)[0] == [3, 5]
    assert kept(samples, best_of_group=2)[0] == [0, 1, 3, 4, 5]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run, rows = tmp_path / "model", tmp_path / "run", tmp_path / "kept.jsonl"
    chat_tokenizer("qwen2.5").save_pretrained(model)
    for number in range(2):
        write_samples(
            run / "rollouts" / f"rollout_{number:07d}.jsonl",
            [sampled(4 * number + i, reward=float(i % 2), answer=f"{number} {i}") for i in range(4)],
        )
    write_samples(run / "rollouts" / "rollout_eval_0.jsonl", [sampled(99)])
    argv = ["samples", "filter", str(run), "--hf-checkpoint", str(model), "-o", str(rows)]
    assert main([*argv, "--min-reward", "1"]) == 0
    assert capsys.readouterr().out == (
        f"kept 4 of 8 samples, of 2 of 2 prompts -> {rows}\n       4  reward below 1\n"
    )  # fmt: skip
    first = rows.read_bytes()
    assert [json.loads(line)["metadata"][KEY]["rollout"]["index"] for line in first.splitlines()] == [1, 3, 5, 7]
    assert main([*argv, "--min-reward", "1", "--json"]) == 2  # the file is there already
    rows.unlink()
    capsys.readouterr()
    assert main([*argv, "--min-reward", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {"reward below 1": 4}
    assert rows.read_bytes() == first
    rows.unlink()
    assert main([*argv, "--min-reward", "2"]) == 1
    assert not rows.exists()
    assert main(["samples", "filter", str(tmp_path / "no"), "--hf-checkpoint", str(model), "-o", str(rows)]) == 1
    assert "no samples there" in capsys.readouterr().err


def test_rewards_that_are_mappings_need_a_key() -> None:
    samples = [sampled(i, reward={"right": float(i), "short": 1.0}) for i in range(2)]
    assert kept(samples, reward_key="right", min_reward=1)[0] == [1]
    with pytest.raises(DataError, match="a mapping of right, short; name one: --reward-key"):
        kept(samples)
