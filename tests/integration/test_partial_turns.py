"""An interrupted conversation lies in a commit; the run that goes on from there writes behind the same spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_data.saved import read_samples
from slime_runs.view.server import make_app
from slime_testing_contracts.loop import run_loop
from slime_testing_contracts.tiny import write_rows
from starlette.testclient import TestClient

from slime_core.sample import Sample
from slime_core.sample.provenance import Source, Span
from tests.docs.test_pages import blocks

WORLD = '''
from slime_core import Step

class Environment:
    """Longer for every second sample, so that some are still at it when a rollout has enough."""

    def __init__(self, args):
        self.steps = self.turns = 0

    def reset(self, sample):
        self.turns = 2 if sample.group_index % 2 else 6

    def step(self, action):
        self.steps += 1
        done = self.steps == self.turns
        return Step(f"{self.steps}+1=", 1.5, done, components={"step": 1.0, "style": 0.5}, state=f"at {self.steps}")

    def snapshot(self):
        return [self.steps, self.turns]

    def restore(self, sample, state):
        self.steps, self.turns = state

    def close(self):
        pass
'''


def waiting(checkpoint: Path) -> dict[int | None, Sample]:
    """Samples of the groups that wait in a commit's buffer, by index."""
    found: list[Any] = [json.loads((checkpoint / "data_source.json").read_text())]
    samples = {}
    while found:
        value = found.pop()
        if isinstance(value, dict) and "response_length" in value:
            samples[value["index"]] = Sample.from_dict(value)
        elif isinstance(value, dict | list):
            found += value.values() if isinstance(value, dict) else value
    return samples


def begins(spans: list[Span], beginning: list[Span]) -> bool:
    """Whether `spans` are `beginning` and more; the last of it may have grown."""

    def letters(of: list[Span]) -> list[tuple[Source, str]]:
        return [(s.source, s.withheld) for s in of for _ in range(s.length)]

    return letters(spans)[: len(letters(beginning))] == letters(beginning)


def flags_of(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "world.py").write_text(WORLD)
    return {
        "prompt_data": write_rows(tmp_path / "rows.jsonl", 64), "apply_chat_template": False, "label_key": None,
        "custom_generate_function_path": "multi_turn", "environment_path": tmp_path / "world.py",
        "plugins": {"multi_turn": {"max_turn_tokens": 3, "reward": "sum"}}, "custom_rm_path": None,
        "rollout_max_response_len": 60, "rollout_batch_size": 2, "n_samples_per_prompt": 2,
        "over_sampling_batch_size": 4, "partial_rollout": True, "save_interval": 1,
    }  # fmt: skip


def test_the_estimator_of_the_page_gives_credit_turn_by_turn_and_resumes_bitwise(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/plugins/estimators.md"
    (tmp_path / "my_turns.py").write_text(
        next(b for b in blocks(page.read_text(encoding="utf-8"), "python") if "my_turns" in b)
    )
    parts = {"multi_turn": {"max_turn_tokens": 3, "reward": "sum"}, "nonzero_std": {"of": "step"}}
    flags = {
        **flags_of(tmp_path), "advantage_estimator": tmp_path / "my_turns.py", "plugins": parts,
        "shadow_filter_path": ["nonzero_std"],
    }  # fmt: skip
    straight = run_loop(tmp_path / "straight", 2, **flags)
    first = run_loop(tmp_path / "first", 1, **flags)
    resumed = run_loop(tmp_path / "resumed", 2, **flags, load=first.checkpoint)
    assert resumed.weight_checksums == straight.weight_checksums
    for step in straight.steps:
        assert step["rollout/reward/step"] == 2 * step["rollout/reward/style"] > 0
    view = TestClient(make_app(straight.run_dir), base_url="http://127.0.0.1")
    page = view.get("api/run", params={"run": "."}).json()
    assert {"reward: step", "reward: style"} <= page["curves"].keys()
    best = {name: column[0] for name, column in page["best"].items()}
    asked = {"run": ".", "rollout": best["rollout"], "group": best["group_index"], "sample": best["sample_index"]}
    shown = view.get("api/sample", params=asked).json()
    assert shown["components"]["step"] == 2 * shown["components"]["style"] > 0
    first, last, reward, role, _, state = shown["tokens"]["turns"][1]
    assert first < last
    assert (reward, role, state) == (1.5, "", "at 1")


def test_spans_of_several_turns_go_through_a_commit(tmp_path: Path) -> None:
    flags = flags_of(tmp_path)
    first = run_loop(tmp_path / "first", 1, **flags)
    assert first.checkpoint is not None
    left = {i: s for i, s in waiting(first.checkpoint).items() if s.response_length}
    assert any([s.source for s in sample.spans or ()].count(Source.SAMPLED) > 1 for sample in left.values())
    more = run_loop(tmp_path / "more", 2, **flags, load=first.checkpoint)
    finished = {s.index: s for s in read_samples(tmp_path / "more/run/rollouts/1.jsonl")}
    assert left.keys() & finished.keys()
    for index in left.keys() & finished.keys():
        before, after = left[index], finished[index]
        assert after.tokens[: len(before.tokens)] == before.tokens
        assert begins(after.spans or [], before.spans or [])
        length = before.response_length
        for name in ("loss_mask", "rollout_log_probs", "token_weight_versions"):
            assert getattr(after, name)[:length] == getattr(before, name)
        assert len(after.tokens) > len(before.tokens)
        assert (after.turns or [])[: len(before.turns or ())] == (before.turns or [])
        steps = after.metadata["environment"]["turns"]
        assert [turn.reward for turn in after.turns or ()] == [1.5] * steps
        assert [turn.state for turn in after.turns or ()] == [None, *(f"at {k}" for k in range(1, steps))]
        assert after.reward_components == {"step": 1.0 * steps, "style": 0.5 * steps}
        assert after.metadata["environment"].get("restarts", 0) == 0
    again = {s.index for s in waiting(more.checkpoint).values()} if more.checkpoint else set()
    assert left.keys() <= again | finished.keys(), "none is lost"
