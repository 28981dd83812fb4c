"""Read the files of a run directory (`Run(path)`), without writing; the run may be active, killed or copied.

Every method reads its files when it is called, so a later call returns newer data. Missing data (a run without samples
or before its first rollout) is returned as empty, not as an error; an incomplete last line is skipped.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slime_core.checkpoint.run_dir import CHECKPOINTS, CONFIG, SUMMARY
from slime_core.checkpoint.store import find
from slime_core.errors import CheckpointError, ConfigError
from slime_core.sample import Sample
from slime_runs.boards import Report, read_boards
from slime_runs.events import FILE as EVENTS
from slime_runs.files import (
    FOLDER,
    Row,
    read_frame,
    read_frames,
    read_lines,
    read_object,
    read_text,
    sample_files,
    shadow_name,
    trained_name,
)
from slime_runs.history import History, read_history
from slime_runs.notes import read_note
from slime_runs.timeline import FILE as TIMELINE
from slime_runs.trace import TraceIndex, starts

if TYPE_CHECKING:  # it imports numpy, which `slime why` can do without
    from slime_runs.index import Entry, Filter, Index, Key, Order

logger = logging.getLogger(__name__)

PROFILE = "profile/trace.json"
"""File in the run directory that `slime train --profile` writes for Perfetto."""
_SETTING = re.compile(r"(?:# )?(\w+): (.*?)  # (.*)")
_LONGEST_VALUE = 100_000
"""Maximum length in characters of a setting that is parsed as YAML."""
_METRICS, EVALUATION = "metrics.jsonl", "eval.json"
_OF_RUN = (CONFIG, _METRICS, FOLDER, SUMMARY, CHECKPOINTS, "waits", "incidents.jsonl", EVALUATION)


class RunError(ConfigError):
    """Raised if the run or the requested part does not exist; a command ends with status 2."""


@dataclass(frozen=True)
class StoredSample:
    """A stored sample of a run, with its index entry."""

    entry: Entry
    row: Row
    """Row as stored; `sample` is built from it."""

    @property
    def sample(self) -> Sample:
        """The row as a `Sample`."""
        return Sample.from_dict({name: value for name, value in self.row.items() if name != "kept"})

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as messages; a plain prompt becomes a user message."""
        prompt = self.row.get("prompt")
        if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
            return prompt
        return [{"role": "user", "content": "" if prompt is None else str(prompt)}]

    @property
    def text(self) -> str:
        """Text of the response."""
        return str(self.row.get("response") or "")


class Run:
    """A run directory."""

    def __init__(self, path: str | Path) -> None:
        """Open the directory. Raises RunError if it is not a run directory."""
        self.path = Path(path)
        if not self.path.is_dir():
            what = "is a file, not a run directory" if self.path.exists() else "no such directory"
            raise RunError(f"{self.path}: {what}; name a run directory, such as outputs/train")
        if not is_run(self.path):
            raise RunError(f"{self.path}: no run has written there; name a --run-dir, such as outputs/train")

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.resolve().name

    # -- what it is ----------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """Directory of the run's checkpoints; below `--save` if it differs from `--run-dir`."""
        own, save = self.path / CHECKPOINTS, self.settings().get("save", (None, ""))[0]
        elsewhere = own if save is None else Path(str(save)) / CHECKPOINTS
        return elsewhere if elsewhere.is_dir() and not own.is_dir() else own

    def summary(self) -> dict[str, Any] | None:
        """Return `summary.json`, or None if the run has not ended regularly."""
        return read_object(self.path / SUMMARY)

    def state(self) -> str:
        """Return "running", "ended" (regularly), "drained" (ended early on request) or "stopped" (killed, failed)."""
        if self.waits().alive:
            return "running"
        summary = self.summary()
        if summary is None and self.is_evaluation():
            summary = self.evaluation()
        return "stopped" if summary is None else "drained" if summary.get("drained") else "ended"

    def note(self) -> str:
        """Return the user's note on the run; empty without one."""
        return read_note(self.path)

    def is_evaluation(self) -> bool:
        """Return True if `slime eval` wrote the directory and no training run did."""
        has_record = (self.path / EVALUATION).is_file() or (self.path / "eval" / "state.json").is_file()
        return has_record and not (self.path / _METRICS).exists()

    def evaluation(self) -> dict[str, Any] | None:
        """Return the final report of `slime eval`, or None."""
        return read_object(self.path / EVALUATION)

    def scores(self) -> dict[str, float]:
        """Return data set -> reward of an evaluation by `slime eval`."""
        sets = (self.evaluation() or {}).get("datasets", {})
        return {name: of["scores"]["reward"]["value"] for name, of in sets.items() if "reward" in of["scores"]}

    def waits(self) -> Report:
        """Return the waits of the run's processes, and the live processes."""
        return read_boards(self.path)

    def settings(self) -> dict[str, tuple[Any, str]]:
        """Return name -> (value, origin) from `config.yaml`."""
        found = {}
        for line in read_text(self.path / CONFIG).splitlines():
            if match := _SETTING.fullmatch(line):
                found[match[1]] = (_value(match[2]), match[3])
        return found

    def plugins(self) -> list[dict[str, Any]]:
        """Return the used plugins (distribution, version, source digest), from the summary or the newest checkpoint."""
        summary = self.summary() or self.evaluation() or self._newest_state() or {}
        found = summary.get("plugins")
        return [plugin for plugin in found if isinstance(plugin, dict)] if isinstance(found, list) else []

    def _newest_state(self) -> dict[str, Any] | None:
        commits = sorted(self.checkpoints.glob("rollout_*/state.json"))
        return read_object(commits[-1]) if commits else None

    # -- numbers -------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """Return one mapping per step (finished rollouts); step 0 is the evaluation before the first rollout."""
        return by_step(read_lines(self.path / _METRICS))

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return [(step, value)] of a metric."""
        return [(line["step"], line[name]) for line in self.metrics() if line.get(name) is not None]

    def events(self) -> list[dict[str, Any]]:
        """Return the recorded engine events."""
        return [event for event in read_lines(self.path / EVENTS) if isinstance(event.get("event"), str)]

    def trace(self) -> Iterator[dict[str, Any]]:
        """Yield the timeline events in the format of `slime_runs.timeline`."""
        return read_lines(self.path / TIMELINE)

    @property
    def timeline(self) -> TraceIndex:
        """The timeline by rollout, with sums; call `update` on it."""
        return TraceIndex(self.path / TIMELINE)

    def parts(self) -> list[tuple[float, int]]:
        """Return (Unix time, first rollout) of each start of the run; empty without a timeline."""
        return [(event["t"], event["start"]) for event in starts(self.path / TIMELINE)]

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents that the run detected in its numbers: "rollout_id", "check", "cause", "numbers".

        A resumed run may detect an incident again; it is returned once. Lines without a rollout are skipped.
        """
        found: dict[Any, dict[str, Any]] = {}
        for one in read_lines(self.path / "incidents.jsonl"):
            if isinstance(one.get("rollout_id"), int):
                texts = {name: _text(one.get(name, "")) for name in ("check", "cause", "numbers")}
                found[one["rollout_id"], texts["check"]] = {**one, **texts}
        return list(found.values())

    def stalls(self) -> list[Path]:
        """Return the reports of overdue waits."""
        return sorted((self.path / "stalls").glob("*.txt"))

    def history(self, rollout: int | None = None) -> History:
        """Return the ledger of the checkpoint after a rollout (default: the newest), with checked digests.

        Raises:
            CheckpointError: The checkpoint does not exist, or its ledger is missing or damaged.
        """
        commit = find(self.checkpoints, rollout)
        if commit is None:
            raise CheckpointError(f"{self.checkpoints}: no commit there")
        return read_history(commit)

    # -- samples -------------------------------------------------------------------------------------------

    def index(self, wanted: Filter | None = None) -> Index:
        """Return the current index of the samples; `wanted` limits it to files that may contain such samples."""
        from slime_runs.index import Index

        return Index(self.path / FOLDER, None if wanted is None else wanted.files())

    def samples(
        self,
        wanted: Filter | None = None,
        *,
        order: Order = "rollout",
        limit: int | None = None,
        text: str | None = None,
    ) -> Iterator[StoredSample]:
        """Yield stored samples, newest rollout first; `text` selects prompts or responses, ignoring case."""
        from slime_runs.index import Filter

        wanted = wanted or Filter()
        entries = self.index(wanted).find(wanted, order=order, limit=-1 if limit is None or text else limit)
        count = 0
        for found in self.stored(entries):
            if text is not None and text.lower() not in f"{found.row.get('prompt')}\n{found.text}".lower():
                continue
            yield found
            count += 1
            if count == limit:
                return

    def stored(self, entries: Iterable[Entry]) -> Iterator[StoredSample]:
        """Yield the samples of index entries. Raises RunError if the run has replaced them."""
        frame, rows = None, list[Row]()
        for entry in entries:
            if frame != (entry.file, entry.frame):
                frame, rows = (entry.file, entry.frame), self._group(entry)
            if not 0 <= entry.place < len(rows):
                place = f"{self.path / FOLDER / entry.file}: bytes {entry.offset} to {entry.offset + entry.size}"
                raise RunError(f"{place} hold {len(rows)} samples, not number {entry.place}; rm the file to see others")
            yield StoredSample(entry, rows[entry.place])

    def trained(self, rollout: int, only: Collection[int] | None = None) -> dict[Key, Row]:
        """Return `Entry.key` -> inputs of the optimizer: `advantages`, the trainer's `log_probs`, ...; may be empty.

        A list has one number per response token; a single number applies to all tokens. `only` limits the result to
        these sample indices.
        """
        starts = None if only is None else tuple(b'{"index":%d,' % index for index in only)
        return self._beside(trained_name(rollout), starts)

    def shadow(self, rollout: int) -> dict[Key, Row]:
        """Return `Entry.key` -> results of shadow components: "rewards", "filters", "seconds", by their specs."""
        return {key: row for key, row in self._beside(shadow_name(rollout)).items() if _is_shadow(row)}

    def _beside(self, name: str, starts: tuple[bytes, ...] | None = None) -> dict[Key, Row]:
        """Group rows in the order of the samples; rows with the same index are its parts."""
        path, seen = self.path / FOLDER / name, Counter[int]()
        found: dict[Key, Row] = {}
        if not path.exists():
            return found
        try:
            for row in (row for _, frame in read_frames(path, starts) for row in frame):
                if isinstance(index := row.get("index"), int):
                    found[index, seen[index]] = row
                    seen[index] += 1
        except OSError as error:
            logger.warning("%s: left out: %s", path, error.strerror or error)
        return found

    def _group(self, entry: Entry) -> list[Row]:
        path = self.path / FOLDER / entry.file
        try:
            return read_frame(path, entry.frame)
        except (OSError, ValueError) as error:
            raise RunError(f"{path}: cannot be read: {error}; the run may have replaced it just now") from error


def _is_shadow(row: Row) -> bool:
    parts = [part for name in ("rewards", "filters", "seconds") if isinstance(part := row.get(name), dict)]
    whole = len(parts) == 3 and parts[2].keys() >= parts[0].keys()
    return whole and row.keys() >= {"kept", "score", "group_index"}


class _NoAliases(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def _text(value: Any) -> str:
    """Return text as it is, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _value(text: str) -> Any:
    """Return a setting's value, or its text if it is no YAML (a half-written line) or has aliases, which multiply."""
    try:
        return yaml.load(text, _NoAliases) if len(text) <= _LONGEST_VALUE else text
    except (yaml.YAMLError, RecursionError, ValueError):
        return text


def by_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the numbers of metrics' lines as one mapping per step, in order, without lines of no step."""
    merged: dict[int, dict[str, Any]] = {}
    for line in lines:
        if isinstance(line.get("step"), int):
            numbers = {name: value for name, value in line.items() if value is None or isinstance(value, int | float)}
            merged.setdefault(line["step"], {}).update(numbers)
    return [merged[step] for step in sorted(merged)]


def is_run(path: Path) -> bool:
    """Return True if a run has written into the directory."""
    return any((path / name).exists() for name in _OF_RUN)


def find_runs(folder: str | Path) -> list[Run]:
    """Return the run of a directory, or the runs below it at any depth, newest last. Raises RunError."""
    top = Path(folder)
    if is_run(top):
        return [Run(top)]
    found = list[tuple[float, Run]]()
    for name, folders, files in os.walk(top):
        path = Path(name)
        if not {CONFIG, _METRICS}.isdisjoint(files) or (FOLDER in folders and sample_files(path / FOLDER)):
            began = path / CONFIG if CONFIG in files else path
            found.append((began.stat().st_mtime, Run(path)))
            folders[:] = set(folders).difference(_OF_RUN)
    if not found:
        raise RunError(f"{top}: no runs there; name a directory that has some, such as outputs")
    return [run for _, run in sorted(found, key=lambda one: one[0])]


_ANYWHERE = ("run_dir", "save", "config", "tb_project_name", "overwrite", "load", "ref_load")
"""Settings that `differences` ignores: locations do not change the training."""


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return setting -> its value in each run, for settings that differ between runs."""
    found = [run.settings() for run in runs]
    names = sorted({name for settings in found for name in settings} - {*_ANYWHERE})
    values = {name: [settings.get(name, (None, ""))[0] for settings in found] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}
