"""A run directory as a run would have left it, without running: of any size, and with any text in it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from slime_runs.files import FOLDER, file_name, json_lines, shadow_name, trained_name, write_file
from slime_runs.index import Facts

from slime_core.data.ledger_files import SegmentRef, write_segment

_PER_FRAME = 32
_BEGAN = 1_795_000_000.0
_METRICS = (
    "rollout/raw_reward", "rollout/response_len/mean", "rollout/truncated_ratio", "train/loss", "train/entropy_loss",
    "train/grad_norm", "train/kl_loss", "train/train_rollout_logprob_abs_diff", "perf/tokens_per_sec",
    "rollout/staleness", *(f"perf/stage_{i}_time" for i in range(20)), *(f"train/extra_{i}" for i in range(20)),
)  # fmt: skip


@dataclass
class MadeRun:
    """What to make."""

    path: Path
    rollouts: int = 4
    groups: int = 4
    per_group: int = 4
    tokens: int = 12
    """Of a response; a prompt has a third."""
    evaluations: int = 2
    items: int = 6
    commit_every: int = 2
    traced: int = 400_000
    """Samples whose times are in the trace, as many as a run keeps."""
    shadowed: int = 0
    """Newest rollouts that a shadow reward and a shadow filter have judged."""
    texts: Sequence[str] = ()
    """Responses of the first samples of each rollout."""
    seed: int = 0

    def write(self) -> Path:
        """Make it; the directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._rng = random.Random(self.seed)
        settings = {
            "hf_checkpoint": "no-such-model",
            "num_rollout": self.rollouts,
            "rm_type": "exact",
            "seed": self.seed,
        }
        lines = [f"{name}: {json.dumps(value)}  # flag\n" for name, value in settings.items()]
        (self.path / "config.yaml").write_text("# name: value  # origin\n\n" + "".join(lines))
        (self.path / "metrics.jsonl").write_bytes(b"".join(self._metrics(step) for step in range(self.rollouts + 1)))
        with (self.path / "trace.jsonl").open("wb") as trace:
            for number in range(self.rollouts):
                rows = self._rollout(number)
                self._keep(file_name(number), rows)
                self._trained(number, rows)
                if number >= self.rollouts - self.shadowed:
                    self._shadow(number, rows)
                if number * self.groups * self.per_group < self.traced:
                    trace.write(self._times(number, rows))
        for at in range(self.evaluations):
            self._keep(file_name(at * self.rollouts // max(1, self.evaluations - 1), evaluation=True), self._items())
        self._ledger()
        return self.path

    def _metrics(self, step: int) -> bytes:
        values = {name: self._rng.random() for name in _METRICS} | {"rollout/raw_reward_stderr": 0.125}
        if step % max(1, self.rollouts // max(1, self.evaluations - 1)) == 0:
            values["eval/held"] = self._rng.random()
        return orjson.dumps({"step": step, **values}) + b"\n"

    def _rollout(self, number: int) -> list[dict[str, Any]]:
        first = number * self.groups
        return [
            self._row(number, first + g, (first + g) * self.per_group + i, g * self.per_group + i)
            for g in range(self.groups)
            for i in range(self.per_group)
        ]

    def _row(self, number: int, group: int, index: int, place: int) -> dict[str, Any]:
        length = self.tokens - place % 3
        prompt = self.tokens // 3
        text = self.texts[place] if place < len(self.texts) else f"answer {index} to {group}"
        fate = "dropped" if group % 7 == 6 else "trained"
        return {
            "group_index": group, "index": index, "prompt": f"question {group % 1000}",
            "tokens": [(index + t) % 250 for t in range(prompt + length)], "response": text, "response_length": length,
            "label": str(group), "reward": round(self._rng.random(), 3), "loss_mask": [1] * length,
            "weight_versions": [str(number)], "token_weight_versions": [number] * length,
            "rollout_log_probs": [-self._rng.random() for _ in range(length)],
            "status": "truncated" if place % 11 == 10 else "completed", "metadata": {"source_name": "train"},
            "row": group % 1000, "spans": [["user", prompt], ["sampled", length]],
            "kept": {"fate": fate, "data_set": None, "score": round(self._rng.random(), 3)},
        }  # fmt: skip

    def _items(self) -> list[dict[str, Any]]:
        rows = []
        for item in range(self.items):
            row = self._row(0, item, item, item)
            row["kept"] = {"fate": "evaluated", "data_set": "held", "score": float(self._rng.random() > 0.5)}
            rows.append({**row, "row": None})
        return rows

    def _keep(self, name: str, rows: list[dict[str, Any]]) -> None:
        frames = [rows[i : i + _PER_FRAME] for i in range(0, len(rows), _PER_FRAME)]
        Facts(frames).write(self.path / FOLDER / name, map(json_lines, frames))

    def _trained(self, number: int, rows: list[dict[str, Any]]) -> None:
        found = [
            {"index": row["index"], "advantages": row["reward"] - 0.5, "log_probs": row["rollout_log_probs"]}
            for row in rows
            if row["kept"]["fate"] == "trained"
        ]
        frames = [json_lines(found[i : i + _PER_FRAME]) for i in range(0, len(found), _PER_FRAME)]
        write_file(self.path / FOLDER / trained_name(number), frames)

    def _shadow(self, number: int, rows: list[dict[str, Any]]) -> None:
        verdicts = [
            {
                "index": row["index"], "group_index": row["group_index"], "kept": row["kept"]["fate"] == "trained",
                "score": row["kept"]["score"], "filters": {"zero_std": True},
                "rewards": {"mine.py:reward": round(self._rng.random(), 3)}, "seconds": {"mine.py:reward": 1e-4},
            }
            for row in rows
        ]  # fmt: skip
        frames = [verdicts[i : i + self.per_group] for i in range(0, len(verdicts), self.per_group)]
        path = self.path / FOLDER / shadow_name(number)
        write_file(path, map(json_lines, frames))

    def _times(self, number: int, rows: list[dict[str, Any]]) -> bytes:
        start = _BEGAN + 10.0 * number
        events: list[dict[str, Any]] = [{"e": "rollout", "t": [start, start + 6], "r": number}]
        events += [
            {
                "e": "sample", "r": number, "g": row["group_index"], "i": row["index"], "p": 4, "k": 0,
                "t": [start + 0.1, start + 4, start + 5], "n": row["response_length"], "turns": 1,
                "s": row["status"], "v": number, **({"w": 0.05, "o": 1.5} if row["index"] % 5 == 0 else {}),
            }
            for row in rows
        ]  # fmt: skip
        events += [
            {"e": "train", "t": [start + 6, start + 9], "r": number},
            {"e": "push", "t": [start + 9, start + 9.1]},
        ]
        return b"".join(orjson.dumps(event) + b"\n" for event in events)

    def _ledger(self) -> None:
        checkpoints, before = self.path / "checkpoints", None
        for start in range(0, self.rollouts, self.commit_every):
            end = min(self.rollouts, start + self.commit_every) - 1
            lines = [line for number in range(start, end + 1) for line in self._events(number)]
            before = write_segment(checkpoints / "ledger", before, {"rollout": end, "policy": {}, "start": None}, lines)
        if before is not None:
            self._commit(checkpoints / f"rollout_{self.rollouts - 1:07}", before)

    def _commit(self, commit: Path, segment: SegmentRef) -> None:
        commit.mkdir(parents=True, exist_ok=True)
        named = {"name": segment.name, "blake2b": segment.blake2b, "size": segment.size}
        (commit / "ledger.json").write_text(json.dumps({"format": "slime-ledger-1", "open": [], "segment": named}))

    def _events(self, number: int) -> list[bytes]:
        events: list[dict[str, Any]] = []
        for group in range(number * self.groups, (number + 1) * self.groups):
            samples = list(range(group * self.per_group, (group + 1) * self.per_group))
            ends = [{"event": what, "group": group, "rollout": number} for what in ("taken", "trained")]
            if group % 7 == 6:
                ends = [{"event": "dropped", "group": group, "reason": "zero_std_0"}]
            events += [
                {"event": "drawn", "group": group, "samples": samples, "row": group % 1000, "epoch": group // 1000},
                {"event": "generating", "group": group}, {"event": "scored", "group": group}, *ends,
            ]  # fmt: skip
        return [orjson.dumps(event) for event in events]
