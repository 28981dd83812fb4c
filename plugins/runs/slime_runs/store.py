"""Store every sample of a run in its directory, through the public hooks; on unless `--log-samples none`.

One file for each rollout and evaluation: `files.py` writes it, `index.py` says what is in it. What a run generates
again after a resume replaces what it had generated before, since a file has its rollout's number.
"""

from __future__ import annotations

import functools
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slime_core import hookimpl
from slime_core.errors import SlimeError
from slime_core.protocols import Args
from slime_core.sample import Group, Sample, SampleStatus
from slime_core.sample.stored import plain_values
from slime_runs.files import (
    FOLDER,
    Row,
    damage,
    file_name,
    json_lines,
    numbered,
    parse_name,
    read_frames,
    sample_files,
    shadow_name,
    trained_name,
    write_file,
)
from slime_runs.index import UNLIKE, Facts, is_thinned

logger = logging.getLogger(__name__)

_KEPT_OF_OLD = 16
"""Number of samples that a thinned rollout keeps."""
_PER_FRAME = 32
"""Samples in a frame. A long sample counts once per 4,096 tokens, which bounds the size of a frame for readers."""
_MOST_AHEAD = 16
"""Number of rollouts that may be generated before one is trained on, for counting the budget."""
_STATE = "slime-runs"


class SampleStore:
    """Hooks that store samples. A separate thread writes, at most one file behind."""

    def __init__(self) -> None:
        self._all_groups: list[Group] | None = None
        self._reasons: Mapping[int, str] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[Any] | None = None
        self._writer: _Writer | None = None
        self._run_dir: Path | None = None
        self._trained = -1
        self._seen_rollout = False
        self._stopped = False

    # -- the run -------------------------------------------------------------------------------------------

    @hookimpl
    def slime_run_start(self, args: Args, run_dir: Path) -> None:
        """Remember the run directory; delete stored samples if the run starts from the beginning (without a commit)."""
        self._run_dir = run_dir
        if not args.start_rollout_id:
            self._forget_after(-1)

    @hookimpl
    def slime_step_end(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Record the last rollout that the next checkpoint is trained on."""
        self._trained = rollout_id

    @hookimpl
    def slime_save_state(self) -> dict[str, Any]:
        """Return the last rollout whose stored samples belong to the checkpoint's run."""
        return {_STATE: {"trained": self._trained}}

    @hookimpl
    def slime_load_state(self, state: Mapping[str, Any]) -> None:
        """Delete the files of rollouts that the resumed run will generate again."""
        own = state.get(_STATE)
        if own is None or self._run_dir is None:
            return
        self._trained = int(own["trained"])
        self._forget_after(self._trained)
        self._later(functools.partial(_tell_damaged, self._run_dir / FOLDER))

    def _forget_after(self, trained: int) -> None:
        """Delete stored samples of rollouts after `trained`."""
        assert self._run_dir is not None, "a run has begun"
        for path in sample_files(self._run_dir / FOLDER):
            found = parse_name(path.name)
            if found is not None and found[0] > trained + found[1]:
                path.unlink()
                for beside in (trained_name, shadow_name):
                    (path.parent / beside(found[0])).unlink(missing_ok=True)

    @hookimpl
    def slime_run_end(self, error: BaseException | None) -> None:
        """Finish writing the last file and stop the thread."""
        if self._thread is not None:
            self._written()
            self._thread.shutdown(wait=True)
            self._thread = None

    # -- samples -------------------------------------------------------------------------------------------

    @hookimpl
    def slime_process_all_samples(self, all_groups: list[Group], reasons: Mapping[int, str]) -> None:
        """Remember all groups: dropped and failed groups are known only in this hook."""
        self._all_groups, self._reasons = all_groups, reasons

    @hookimpl
    def slime_log_rollout(self, rollout_id: int, args: Args, samples: list[Sample]) -> None:
        """Store the samples of a finished rollout."""
        self._seen_rollout = True
        groups, self._all_groups = self._all_groups or _by_group(samples), None
        trained = {id(sample) for sample in samples}

        def row(sample: Sample) -> Row:
            if id(sample) in trained:
                return _row(args, sample, "trained")
            fate = "failed" if sample.status == SampleStatus.FAILED else "dropped"
            reason = None if sample.group_index is None else self._reasons.get(sample.group_index)
            return _row(args, sample, fate, reason=reason)

        self._store(args, file_name(rollout_id), (list(map(row, group)) for group in groups), rollout_id)

    @hookimpl
    def slime_log_eval(self, rollout_id: int, args: Args, data: dict[str, dict[str, Any]]) -> None:
        """Store the samples of a finished evaluation."""
        groups = [(name, group) for name, found in data.items() for group in _by_group(found.get("samples") or [])]
        rows = ([_row(args, sample, "evaluated", data_set=name) for sample in group] for name, group in groups)
        # The evaluation before the first rollout has the number of the next evaluation.
        first = rollout_id == 0 and not self._seen_rollout
        self._store(args, file_name(0 if first else rollout_id + 1, evaluation=True), rows, rollout_id)

    @hookimpl
    def slime_rollout_trained(self, args: Args, trained: Any) -> None:
        """Store the trainer's values of a rollout: all processes gather them, rank 0 writes them."""
        if args.log_samples == "none":
            return
        rows = trained.rows(*_TRAINER_COLUMNS)
        if not rows or self._stopped or not args.run_dir:
            return
        starts = range(0, len(rows), _PER_FRAME)
        frames = [json_lines(_trained_row(row) for row in rows[i : i + _PER_FRAME]) for i in starts]
        path = Path(args.run_dir) / FOLDER / trained_name(trained.batch.rollout_id)
        self._later(lambda: write_file(path, frames))

    def _store(self, args: Args, name: str, groups: Iterable[list[Row]], seed: int) -> None:
        """Encode frame by frame, because getting memory back from the system costs more than making a row."""
        if args.log_samples == "none" or self._stopped or not args.run_dir:
            return
        groups = map(numbered, groups)
        frames: list[bytes] = []

        def told(frame: list[Row]) -> list[Row]:
            frames.append(json_lines(frame))
            return frame

        try:
            if args.log_samples != "all":
                groups = thinned(list(groups), int(args.log_samples), seed=seed)
            facts = Facts(map(told, _frames(groups)))
        except (SlimeError, *UNLIKE) as error:  # a user's function put a bad value into a sample
            self._stop(error)
            return
        if not frames:
            return
        if self._writer is None:
            self._writer = _Writer(Path(args.run_dir) / FOLDER, args.log_samples_budget)
        writer = self._writer
        self._later(lambda: writer.write(name, facts, frames))

    def _later(self, write: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="slime-samples")
        if self._written():
            self._writing = self._thread.submit(write)

    def _written(self) -> bool:
        """Wait for the previous file and return whether it was written."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            self._stop(error)
        return not self._stopped

    def _stop(self, error: BaseException) -> None:
        """Stop storing samples and warn; training continues without them."""
        self._stopped = True
        logger.warning("samples are no longer stored in this run: %s: %s", type(error).__name__, error)


def _tell_damaged(folder: Path) -> None:
    for path in sorted(folder.glob("*.jsonl.zst")):
        if problem := damage(path):
            logger.warning(
                "%s: damaged: %s. The run goes on; what reads samples leaves that out. rm %s", path, problem, path
            )


class _Writer:
    """Files and budget of one run; used by one thread."""

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder = folder
        self._budget = budget
        self._sizes = {path.name: path.stat().st_size for path in folder.glob("*.zst")}
        """Bytes of every file, so that a write need not read the sizes of all files."""
        self._thinned: dict[str, bool] = {}
        """Whether each file is thinned; filled as files are checked."""
        self._untrained: deque[int] = deque(maxlen=_MOST_AHEAD)
        """Rollouts whose trainer file, perhaps from another process, is not written yet."""

    def write(self, name: str, facts: Facts, frames: list[bytes]) -> None:
        """Write a file, and thin or remove older files until the budget holds. Raises OSError."""
        path = self._folder / name
        facts.write(path, frames)
        self._thinned[name] = False
        self._measure(path)
        for rollout in list(self._untrained):
            if self._measure(self._folder / trained_name(rollout)):
                self._untrained.remove(rollout)
        rollout, evaluation = parse_name(name) or (0, True)
        if not evaluation:
            self._untrained.append(rollout)
        if sum(self._sizes.values()) > self._budget:  # files that the user has removed count no more
            there = set(os.listdir(self._folder))
            self._sizes = {name: size for name, size in self._sizes.items() if name in there}
        while sum(self._sizes.values()) > self._budget and self._make_room():
            pass

    def _measure(self, path: Path) -> bool:
        """Record the size of the file and return whether it exists."""
        try:
            self._sizes[path.name] = path.stat().st_size
        except FileNotFoundError:
            self._sizes.pop(path.name, None)
        return path.name in self._sizes

    def _make_room(self) -> bool:
        """Thin the oldest file that is whole, or else remove the oldest; return False if only the newest is left."""
        *old, _ = sample_files(self._folder)
        whole = next((path for path in old if not self._is_thinned(path)), None)
        if whole is not None:
            groups = thinned([numbered(rows) for _, rows in read_frames(whole)], _KEPT_OF_OLD, seed=0)
            Facts(groups).write(whole, map(json_lines, groups), thinned=True)
            self._thinned[whole.name] = True
            self._measure(whole)
            self._thin_beside(whole, {row.get("index") for group in groups for row in group})
        elif old:
            old[0].unlink()
            self._measure(old[0])
            self._thin_beside(old[0], set())
        return bool(old)

    def _is_thinned(self, path: Path) -> bool:
        if path.name not in self._thinned:
            self._thinned[path.name] = is_thinned(path)
        return self._thinned[path.name]

    def _thin_beside(self, path: Path, kept: set[int | None]) -> None:
        """Reduce a rollout's trainer and shadow files to the rows of its remaining samples."""
        rollout, evaluation = parse_name(path.name) or (0, True)
        for name in (trained_name(rollout), shadow_name(rollout)):
            beside = self._folder / name
            if evaluation or not beside.is_file():
                continue
            rows = [row for _, frame in read_frames(beside) for row in frame if row["index"] in kept]
            if rows:
                write_file(beside, [json_lines(rows)])
            else:
                beside.unlink()
            self._measure(beside)


def thinned(groups: Sequence[Sequence[Row]], count: int, *, seed: int) -> list[list[Row]]:
    """Return at most `count` samples: best, worst, failed and random ones in turn; groups and order stay."""
    rows = [row for group in groups for row in group]
    shuffled = random.Random(seed).sample(rows, len(rows))
    scored = sorted((r for r in shuffled if _score(r) is not None), key=lambda r: -float(r["kept"]["score"]))
    failed = [row for row in shuffled if row["status"] == SampleStatus.FAILED.value]
    chosen: dict[int, None] = {}
    kinds = [iter(kind) for kind in (scored, scored[::-1], failed, shuffled)]
    while kinds and len(chosen) < min(count, len(rows)):
        for kind in list(kinds):
            row = next((r for r in kind if id(r) not in chosen), None)
            if row is None:
                kinds.remove(kind)
            elif len(chosen) < count:
                chosen[id(row)] = None
    kept = [[row for row in group if id(row) in chosen] for group in groups]
    return [group for group in kept if group]


def _score(row: Row) -> float | None:
    score: float | None = (row.get("kept") or {}).get("score")
    return score


_OFTEN_ONE = {"advantages", "returns"}
_TRAINER_COLUMNS = ("advantages", "log_probs", "entropy", "ref_log_probs", "teacher_log_probs", "values", "returns")


def _trained_row(row: Mapping[str, Any]) -> Row:
    """Return the trainer's columns; a single number if all tokens have the same value, as most advantages do."""
    found = {"index": row["sample_indices"]}
    for name in _TRAINER_COLUMNS:
        if (column := row.get(name)) is not None:
            found[name] = column[0] if name in _OFTEN_ONE and _is_one_number(column) else column
    return found


def _is_one_number(column: Any) -> bool:
    # For so few numbers, comparing bytes takes a tenth of numpy's time. A list is the rollout's, not the trainer's.
    numbers, size = (column, 1) if isinstance(column, list) else (column.tobytes(), column.itemsize)
    return bool(numbers) and bool(numbers == numbers[:size] * len(column))


def _frames(groups: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Yield frames of groups that are large enough to compress; split a group that is too large into samples."""
    frame, room = list[Row](), _PER_FRAME
    for group in groups:
        sizes = [1 + len(row.get("tokens") or ()) // 4096 for row in group]
        whole = sum(sizes) <= _PER_FRAME
        for size, part in [(sum(sizes), group)] if whole else [(size, [row]) for size, row in zip(sizes, group)]:
            if frame and size > room:
                yield frame
                frame, room = [], _PER_FRAME
            frame += part
            room -= size
    if frame:
        yield frame


def _row(args: Args, sample: Sample, fate: str, *, data_set: str | None = None, reason: str | None = None) -> Row:
    """Return the row of a sample. It shares the sample's lists, so write it before anything else runs."""
    # `attributes` would make a dict of all fields, mostly None, which is a twentieth of the cost of storing.
    row: Row = {name: value for name in Sample.__match_args__ if (value := getattr(sample, name)) is not None}
    row.update(vars(sample))
    row = plain_values(row, shared=True)
    row["kept"] = {"fate": fate, "data_set": data_set, "score": sample.finite_reward(args)}
    if fate in ("failed", "dropped"):
        row["kept"]["reason"] = reason
    return row


def _by_group(samples: Iterable[Sample]) -> list[Group]:
    groups: dict[Any, Group] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(("alone", place) if sample.group_index is None else sample.group_index, []).append(sample)
    return list(groups.values())
