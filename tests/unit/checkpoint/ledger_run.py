"""A run in miniature whose commits and ledger are the real ones: stage, data source, buffer, store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from slime_runs.history import read_history
from slime_runs.inspect.ledger_verify import Report, verify

from slime_core.checkpoint.store import CheckpointStore
from slime_core.config import Args
from slime_core.data.ledger_files import LEDGER_FILE, SEGMENTS, SegmentRef, write_segment
from slime_core.data.prompts import DatasetSource
from slime_core.protocols import RolloutTraits, declares
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.rollout.state import STATE_FILE
from slime_core.sample import Group

BATCH, ROWS, SKIPPED_ROW = 3, 10, 4


def write_rows(path: Path) -> Path:
    """Ten prompts, of which one is too long."""
    rows = [{"input": "7" * 60 if i == SKIPPED_ROW else f"{i}+1=?", "label": str(i + 1)} for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(root: Path, **changes: Any) -> Any:
    """A run's settings."""
    return Args.model_construct(
        **{
            "prompt_data": str(write_rows(root / "train.jsonl")), "input_key": "input", "label_key": "label",
            "rollout_max_prompt_len": 40, "n_samples_per_prompt": 2, "rollout_batch_size": BATCH,
            "start_rollout_id": 0, "partial_rollout": True, **changes,
        }
    )  # fmt: skip


class LedgerRun:
    """Rollouts that draw five groups, drop every seventh, train on three and give the rest back."""

    def __init__(self, root: Path, tokenizer: Any, source: Any = None, **changes: Any) -> None:
        self.args = settings(root, **changes)
        self.store = CheckpointStore(root / "checkpoints")
        source = source or DatasetSource(self.args, tokenizer)
        rollout = self.rollout

        @declares(RolloutTraits(leaves_out=False))
        def function(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Group]:
            return rollout(rollout_id, data_source)

        self.stage = RolloutStage(self.args, RolloutParts(source, function, None))

    def rollout(self, rollout_id: int, source: Any) -> list[Group]:
        """One rollout, in place of the built-in function."""
        ledger, kept, drawn = self.stage.ledger, list[Group](), source.get_samples(BATCH + 2)
        while drawn or len(kept) < BATCH:
            group = drawn.pop(0) if drawn else source.get_samples(1)[0]
            if len(kept) == BATCH:
                source.add_samples([group])
                continue
            ledger.generating([group])
            for sample in group:
                if not sample.response_length:
                    version = self.stage.weight_version
                    sample.append_response_tokens(
                        tokens=[5], log_probs=[-1.0], meta_info={"finish_reason": "stop", "weight_version": version}
                    )
                sample.reward = 1.0
            ledger.scored(group)
            if group[0].group_index % 7 == 3:
                ledger.dropped(group, "too easy")
            else:
                kept.append(group)
        return kept

    def go(self, rollouts: range, *, keep: int | None = None) -> Path:
        """Generate and commit; the last commit."""
        for rollout_id in rollouts:
            self.stage.update_weights("tensor", [], rollout_id + 1)
            self.stage.generate_groups(rollout_id)
            commit = self.commit(rollout_id, keep=keep)
        return commit

    def commit(self, rollout_id: int, *, keep: int | None = None) -> Path:
        """Save as a journal does."""
        return self.store.commit(rollout_id, {}, [lambda d: self.stage.save(d, rollout_id)], keep=keep)

    def resume(self, commit: Path) -> str:
        """Restore as `launch.resume` does."""
        if commit.parent == self.store.root:
            self.store.rewind(commit)
        return self.stage.load(commit, int(commit.name.partition("_")[2].partition(".")[0]))


def check(commit: Path) -> Report:
    """The verdict on one commit."""
    return verify(read_history(commit))


Edit = Callable[[list[dict[str, Any]], dict[str, Any], dict[str, Any]], None]
"""(all events, ledger.json, data_source.json): changes them in place."""


def rewrite(commit: Path, edit: Edit, **policy: Any) -> None:
    """Replace a commit's history by an edited one whose digests are right again, as one segment."""
    history = read_history(commit)
    events = [event for _, event in history.events()]
    found, state = history.found, orjson.loads((commit / STATE_FILE).read_bytes())
    edit(events, found, state)
    header = {**history.segments[0].header, "policy": {**history.segments[0].header["policy"], **policy}}
    del header["format"], header["segment"], header["previous"]
    ref: SegmentRef = write_segment(commit.parent / SEGMENTS, None, header, [orjson.dumps(e) for e in events])
    found["segment"] = {"name": ref.name, "blake2b": ref.blake2b, "size": ref.size}
    (commit / LEDGER_FILE).write_bytes(orjson.dumps(found))
    (commit / STATE_FILE).write_bytes(orjson.dumps(state))
