"""Stored samples generated again: the same bits where nothing was changed, another text from where something was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slime_runs import Run, RunError
from slime_runs.index import Filter
from slime_runs.resample import Change, Resampled, resample

from slime_core.sample.provenance import Source
from tests.conftest import TinyRun

TOOLS = '''
from slime_core.tools import ParsedTurn, ToolCall


def look(key: str) -> str:
    """Look something up.

    Args:
        key: What.
    """
    return f"[{key}]"


class EveryTurn:
    """Reads every turn as a call, so that a random model has a tool."""

    def parse(self, text, tools=(), *, reasoning_open=False):
        return ParsedTurn(text, attempts=(ToolCall("", "look", {"key": text[-3:]}),))

    def render(self, calls):
        return "".join(call.name for call in calls)

    def claims(self, chat_template):
        return False
'''


def flags(root: Path, **changes: Any) -> dict[str, Any]:
    tools = root / "looking.py"
    tools.write_text(TOOLS)
    return {
        "custom_generate_function_path": "tool_use",
        "tools_path": f"{tools}:look",
        "tool_call_parser": f"{tools}:EveryTurn",
        "set": "plugins.tool_use.max_turns=3",
        "rollout_max_response_len": 60,
        "rollout_stop_token_ids": list(range(0, 256, 4)),  # turns are short
        "num_rollout": 2,
        "true_on_policy_mode": True,
        "run_dir": root,
        **changes,
    }


@pytest.fixture(scope="module")
def run(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("resample")
    slime("train", *tiny.argv(root, **flags(root, eval_interval=1)))
    return Run(root)


def check_three_modes(run: Run, at_least: int) -> None:
    """Whole, from the middle, and with another answer of a tool: the same ids and bits up to the change."""
    stored = list(run.samples(Filter(data_set="")))
    assert len(stored) >= at_least
    for change in (Change(), Change(from_token=2)):
        chosen = [s for s in stored if s.entry.response_tokens > change.from_token]
        for found in resample(run, chosen, change):
            check_same(found)
    answered = [s for s in stored if _answers(s) > 1]
    assert len(answered) >= at_least - at_least // 8
    for found in resample(run, answered, Change(tool_answer="nothing")):
        check_fork(found)


def check_same(found: Resampled) -> None:
    old, again = found.stored.sample, found.found[0]
    assert again.first_difference is None
    assert again.distance == 0.0
    new = again.sample
    assert (new.tokens, new.rollout_log_probs) == (old.tokens, old.rollout_log_probs)
    assert new.status == old.status
    if not found.kept or "\ufffd" not in old.response + new.response:  # a character may have been cut in two
        assert (new.response, new.reward) == (old.response, old.reward)
    assert (new.loss_mask, new.token_weight_versions) == (old.loss_mask, old.token_weight_versions)
    assert new.known_spans() == old.known_spans()


def check_fork(found: Resampled) -> None:
    old, new = found.stored.sample, found.found[0].sample
    spans = old.known_spans()
    first = next(i for i, span in enumerate(spans) if span.source == Source.TOOL)
    before = sum(span.length for span in spans[:first])
    kept = before - len(old.prompt_tokens)
    assert new.tokens[:before] == old.tokens[:before]
    assert (new.rollout_log_probs or [])[:kept] == (old.rollout_log_probs or [])[:kept]
    assert "nothing" in new.response
    assert new.known_spans()[:first] == spans[:first]
    messages = new.metadata["tool_messages"]
    assert len(messages) == 2 * sum(span.source == Source.TOOL for span in new.known_spans())


def _answers(found: Any) -> int:
    return sum(span.source == Source.TOOL for span in found.sample.known_spans())


def test_it_is_typed_and_read(run: Run, slime: Any) -> None:
    found = next(run.samples(Filter(data_set="held"), limit=1))
    number = found.entry.sample_index
    again = slime("resample", run.path, number, "--eval", "held", "--rollout", found.entry.rollout)
    assert f"as it is stored: {found.entry.response_tokens} tokens id for id, log-probs bit for bit" in again.stdout
    assert "warning" not in again.stderr
    words = ("--from-token", 3, "--temperature", 1.5, "--times", 3, "--json")
    stored = next(run.samples(Filter(data_set="", rollout=1), limit=1))
    forks = [
        json.loads(line)
        for line in slime("resample", run.path, stored.entry.sample_index, *words).stdout.split("\n")[:-1]
    ]
    assert len(forks) == 3
    prefix = len(stored.sample.prompt_tokens) + 3
    assert {tuple(fork["sample"]["tokens"][:prefix]) for fork in forks} == {tuple(stored.sample.tokens[:prefix])}
    assert len({tuple(fork["sample"]["tokens"]) for fork in forks}) == 3
    assert {fork["weights"]["step"] for fork in forks} == {1}


def test_without_true_on_policy_mode_a_whole_rollout_gives_the_bits(tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    there = tmp_path / "run"
    slime("train", *tiny.argv(there, num_rollout=2, save_interval=None))
    run = Run(there.rename(tmp_path / "moved"))  # where it is now is what counts
    first, second = (next(run.samples(Filter(data_set="", rollout=n), limit=1)) for n in (0, 1))
    check_same(resample(run, [first])[0])
    with pytest.raises(RunError, match=r"the weights of version 2, .* Kept are .*: 0, 2; .* --save-interval 1"):
        resample(run, [second])
    (other,) = resample(run, [second], Change(step=2))
    assert other.weights.step == 2
    assert other.found[0].first_difference is not None or other.found[0].distance > 0


def test_what_cannot_be_done_is_said_in_a_line(run: Run, refused: Any, tmp_path: Path) -> None:
    number = next(run.samples(Filter(data_set="", rollout=1), limit=1)).entry.sample_index
    answer = tmp_path / "answer"
    answer.write_bytes(b"\xff")
    for words, said in [
        ([999999], "no sample 999999 is kept"),
        ([number, "--weights", 7], "the weights after 7 rollouts were not kept. Kept are those after so many"),
        ([number, "--from-token", 99], "--from-token 99: sample"),
        ([number, "--tool-answer", answer], "cannot be read"),
        ([number, "--times", 0], "must be at least 1"),
    ]:
        message = refused("resample", run.path, *words)
        assert said in message
        assert message.count("\n") == 1


def test_a_sample_of_several_weights_names_where_one_begins(run: Run, tmp_path: Path) -> None:
    found = next(s for s in run.samples(Filter(data_set="", rollout=1)) if s.entry.response_tokens > 4)
    row = {**found.row, "token_weight_versions": [1, 1, *found.row["token_weight_versions"][2:]]}
    with pytest.raises(RunError, match="versions 1, 2 sampled it; from token 2 on it was 2: --from-token 2"):
        resample(run, [replace(found, row=row)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_samples_in_three_modes(tiny: TinyRun, slime: Any, tmp_path: Path) -> None:
    many = {"rollout_batch_size": 70, "n_samples_per_prompt": 8, "eval_interval": None, "debug_rollout_only": True}
    slime("train", *tiny.argv(None, **flags(tmp_path, **many)), timeout=600)
    check_three_modes(Run(tmp_path), 1000)
