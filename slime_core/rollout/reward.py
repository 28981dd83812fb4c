"""Stage 4: finished samples -> rewards.

`rollout.generate` calls `score` per sample, or once per complete group (`--group-rm`). If a reward function raises,
exceeds `--rm-timeout`, ends its process or returns a value that is not a number, its samples become FAILED with the
reason, a file to reproduce the failure is saved (`FailureLog`), and the run continues. The scorer of a sample is its
own `custom_rm_path`, else its row's or data set's `rm_type` in `metadata`, else the run's reward. An evaluation data
set with its own plugin options also has its own scorer.

The rewards that rows name are resolved before anything starts (`check_named_rewards`), so that a typo in row 90,000
ends the command and not, an hour later, its sample. JSONL is searched as bytes and only rows with a new name are
parsed, which takes about a second per GB; names that escape this search (spelled with backslashes, past the first GiB,
past row 10,000 of another format) fail their samples instead.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import mmap
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from slime_core.data.dataset import JsonlRows, Rows, open_rows
from slime_core.data.dumps import to_json
from slime_core.errors import ConfigError, PluginError
from slime_core.protocols import Args
from slime_core.sample import LARGEST_SCORE, Sample, SampleStatus, is_score
from slime_core.sample.admission import Sealed
from slime_core.secrets import hidden_values
from slime_core.waits import waiting, when_placed
from slime_core.workers.call import DeadlineExceeded

logger = logging.getLogger(__name__)


class Scorer(Protocol):
    """A resolved reward function (`plugins.adapters.RewardCaller`) that returns checked rewards or raises."""

    label: str
    spec: str
    """Spec from which the function was resolved."""
    provenance: Mapping[str, Any]
    batched: bool
    """True if a call takes several samples."""
    scores_groups: bool
    """True if a call must contain the whole group."""

    async def start(self) -> None:
        """Prepare for calls; raise if the reward cannot work."""

    async def score(self, samples: list[Sample], evaluation: bool) -> list[Any]:
        """Return one reward per sample; the deadline of the call begins when the scorer reports it (`waits.placed`).

        May raise any exception.
        """

    def under(self, args: Args) -> Scorer:
        """Return the same reward with settings whose `plugins` differ."""


class Workers(Protocol):
    """Processes in which rewards run (`workers.pool.WorkerPool`)."""

    def settings_changed(self) -> None:
        """Send the current settings to the processes."""

    def close(self) -> None:
        """End the processes."""


class RewardStage:
    """The stage that calls reward functions and records their failures in the samples."""

    def __init__(
        self,
        args: Args,
        default: Scorer | None,
        resolve: Callable[[str], Scorer],
        *,
        workers: Workers | None = None,
    ) -> None:
        self.args = args
        self.default = default
        self._resolve = resolve
        self._workers = workers
        self._cache: dict[str, Scorer] = {}
        self._under: dict[tuple[str, bytes], Scorer] = {}
        """(spec, plugin options) -> the reward with these options."""

    @cached_property
    def failures(self) -> FailureLog:
        """Log that saves failed calls."""
        return FailureLog(self.args)

    @property
    def scores_groups(self) -> bool:
        """True if complete groups are scored together (`--group-rm`, or declared by the reward)."""
        return self.default is not None and self.default.scores_groups

    def require(self, spec: str, where: str) -> None:
        """Resolve the reward of a row before the run starts. Raises ConfigError beginning with `where`."""
        if spec in self._cache:
            return
        try:
            self._cache[spec] = self._resolve(spec)
        except PluginError as error:
            raise ConfigError(f"{where} names the reward {spec!r}: {error}") from error

    async def start(self) -> None:
        """Start the worker processes with the run's reward. Raises PluginError if it does not load there."""
        if self.default is not None:
            await self.default.start()

    def settings_changed(self) -> None:
        """Update the worker processes' copy of `args`; call it when `args` was changed after `start`."""
        if self._workers is not None:
            self._workers.settings_changed()

    def close(self) -> None:
        """End the worker processes; safe to call twice."""
        if self._workers is not None:
            self._workers.close()

    def scorer_of(self, sample: Sample, args: Args | None = None) -> Scorer:
        """Return the function that scores this sample, with the plugin options of `args` (None: the run's).

        Raises:
            PluginError: No reward has that name, or it does not accept these options.
        """
        scorer = self._run_scorer(sample)
        if args is None or args.plugins == self.args.plugins:
            return scorer
        key = scorer.spec, pickle.dumps(args.plugins)
        if key not in self._under:
            self._under[key] = scorer.under(args)
        return self._under[key]

    def _run_scorer(self, sample: Sample) -> Scorer:
        spec = sample.custom_rm_path or sample.metadata.get("custom_rm_path") or sample.metadata.get("rm_type")
        if not spec:
            if self.default is None:
                raise LookupError("no reward function: set --rm-type or --custom-rm-path")
            return self.default
        if spec not in self._cache:
            self._cache[spec] = self._resolve(spec)
        return self._cache[spec]

    async def score(
        self,
        samples: list[Sample],
        *,
        evaluation: bool = False,
        rollout_id: int | None = None,
        args: Args | None = None,
    ) -> None:
        """Set `sample.reward`, in one call per function where the function takes several; `args` as `scorer_of`.

        Aborted, failed and already rewarded samples are skipped. A copy replaces a sample to which an abandoned call
        may still write.
        """
        by_scorer: dict[int, tuple[Scorer, list[Sample]]] = {}
        for sample in samples:
            if sample.reward is not None or sample.status in (SampleStatus.ABORTED, SampleStatus.FAILED):
                continue
            try:
                scorer = self.scorer_of(sample, args)
            except Exception as error:
                sample.fail("reward", error)
                continue
            by_scorer.setdefault(id(scorer), (scorer, []))[1].append(sample)
        calls: list[tuple[Scorer, list[Sample]]] = []
        for scorer, members in by_scorer.values():
            calls.extend([(scorer, members)] if scorer.batched else [(scorer, [s]) for s in members])
        if len(calls) == 1:  # the usual case needs no separate task
            await self.call(*calls[0], evaluation=evaluation, rollout_id=rollout_id, args=args)
        else:
            await asyncio.gather(
                *(self.call(*each, evaluation=evaluation, rollout_id=rollout_id, args=args) for each in calls)
            )
        for place, sample in enumerate(samples):
            if sample.metadata.get("failure", {}).pop("left_behind", False):
                samples[place] = copy.deepcopy(sample)

    async def call(
        self,
        scorer: Scorer,
        samples: list[Sample],
        *,
        evaluation: bool = False,
        rollout_id: int | None = None,
        args: Args | None = None,
    ) -> None:
        """Call one function; afterwards its samples have rewards or have failed. `args`: the function's settings."""
        sealed = Sealed(samples)
        try:
            of = f" of sample {samples[0].index}" if len(samples) == 1 else f" of group {samples[0].group_index}"
            with waiting(scorer.label + of, deadline=None, then="the samples fail", queued=True) as wait:
                when_placed(lambda: wait.restart(self.args.rm_timeout))
                rewards = await scorer.score(samples, evaluation)
        except Exception as error:
            logger.debug("%s failed", scorer.label, exc_info=True)
            saved = self.failures.save(
                samples,
                scorer.spec,
                scorer.provenance,
                scorer.label,
                error,
                evaluation=evaluation,
                rollout_id=rollout_id,
                args=args,
            )
            for sample in samples:
                was = sample.status.value
                sample.fail(scorer.label, error)
                sample.metadata["failure"] |= {"status": was, **({"saved": saved} if saved else {})}
                if isinstance(error, DeadlineExceeded) and error.left_behind:
                    sample.metadata["failure"]["left_behind"] = True
            return
        for sample, reward in zip(samples, rewards):
            try:
                sample.validate()  # a reward may write to its sample
            except ValueError as problem:
                sample.fail(scorer.label, problem)
            else:
                sample.reward = reward
        for sample, change in sealed.edits():
            sample.fail(scorer.label, change)


def reward_problem(reward: Any) -> str | None:
    """Return why a reward that a generate function set cannot be used; None if it can."""
    if reward is None or isinstance(reward, Mapping):
        return None
    if isinstance(reward, str) or not hasattr(reward, "__float__"):
        return f"set sample.reward to {type(reward).__name__}; expected a number or a mapping of numbers"
    problem = number_problem(reward)
    return None if problem is None else f"set sample.reward to what {problem}"


def number_problem(value: Any) -> str | None:
    """Return why a value is not a score, as text to follow "it"; None if it is a score."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return f"is {type(value).__name__}, not a number"
    if is_score(value := value if isinstance(value, int) else float(value)):
        return None
    if isinstance(value, int) or math.isfinite(value):
        return f"is beyond {LARGEST_SCORE:g}: {value!s:.40}"
    return f"is not finite: {value}"


# -- rewards that rows name --------------------------------------------------------------------------

KEYS = ("custom_rm_path", "rm_type")
"""Keys of a row's metadata that name a reward."""
_SEARCHED_BYTES = 1 << 30
_SEARCHED_ROWS = 10_000
_PATTERNS = {key: re.compile(key.encode() + rb'\\*"\s*:\s*\\*"([^"\\]+)') for key in KEYS}


def check_named_rewards(rewards: RewardStage, args: Args, source: Any) -> None:
    """Resolve the rewards that rows of the training and the evaluation data name.

    Args:
        rewards: The stage, which keeps the resolved rewards.
        args: The run's settings.
        source: The data source; one without `rows` cannot be searched. None if the run only evaluates.

    Raises:
        ConfigError: A row names a reward that does not exist, or does not load; the message names the row.
        DataError: An evaluation file cannot be read.
    """
    rows: Rows | None = getattr(source, "rows", None)
    if rows is not None:
        _check(rewards, rows, args.metadata_key, {})
    for dataset in args.eval_datasets:
        rows = open_rows(dataset.path, origin=f"evaluation data set {dataset.name!r}:")
        try:
            _check(rewards, rows, dataset.metadata_key, dataset.metadata_overrides or {})
        finally:
            rows.close()


def _check(rewards: RewardStage, rows: Rows, metadata_key: str | None, overrides: Mapping[str, Any]) -> None:
    for key, spec, index in named_rewards(rows, metadata_key):
        if key not in overrides:
            rewards.require(spec, f"{rows.where(index)}: {key} in the row's {metadata_key!r}")


def named_rewards(rows: Rows, metadata_key: str | None) -> Iterator[tuple[str, str, int]]:
    """Yield (key, value, index of the first row found with it) for every distinct value."""
    if metadata_key is None:
        return
    seen: set[tuple[str, str]] = set()
    candidates = _jsonl_candidates(rows) if isinstance(rows, JsonlRows) else range(min(len(rows), _SEARCHED_ROWS))
    for index in candidates:
        metadata = _metadata(rows[index].get(metadata_key))
        for key in KEYS:
            value = metadata.get(key)
            if isinstance(value, str) and value and (key, value) not in seen:
                seen.add((key, value))
                yield key, value, index


def _jsonl_candidates(rows: JsonlRows) -> Iterator[int]:
    """Yield the rows in which a value first appears after one of the keys, in their metadata or not."""
    import numpy as np

    starts = rows.starts
    first, last = int(starts[0]), int(min(starts[-1], starts[0] + _SEARCHED_BYTES))
    with rows.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for pattern in _PATTERNS.values():
            found: dict[bytes, int] = {}
            for match in pattern.finditer(data, first, last):
                found.setdefault(match[1], match.start())
            yield from (int(np.searchsorted(starts, offset, side="right")) - 1 for offset in found.values())


def _metadata(value: Any) -> Mapping[str, Any]:
    """Return the metadata of a row; the reader of rows reports values that are not objects."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


# -- failures ----------------------------------------------------------------------------------------

DIRECTORY = "failures"
MAX_SAVED = 100
"""Maximum number of saved failures per run directory."""
FORMAT = "slime reward failure 1"

_SETTINGS = (
    "rm_type", "custom_rm_path", "reward_key", "eval_reward_key", "group_rm", "rm_url", "rm_timeout",
    "custom_reward_post_process_path", "plugin_dir", "seed",
)  # fmt: skip
"""Settings that affect a reward; the user's own (`custom:`) and plugin options are saved as well."""


class FailureLog:
    """Saves failed calls below a run directory, with all data to reproduce them; without a directory it counts them.

    `slime rewards replay FILE` reads a file. A reward that always fails does not fill the disk: further failures are
    only counted.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        run_dir = args.run_dir
        self.directory = Path(run_dir) / DIRECTORY if run_dir else None
        self.num_failed = 0
        """Number of failed calls."""
        self._num_saved: int | None = None

    def save(
        self,
        samples: Sequence[Sample],
        spec: str,
        provenance: Mapping[str, Any],
        where: str,
        error: BaseException,
        *,
        evaluation: bool,
        rollout_id: int | None,
        args: Args | None = None,
    ) -> str | None:
        """Write the file of one failed call, before its samples are marked. `args`: the call's, if not the run's.

        Returns:
            The file's path, or None if it was not saved (no run directory, limit reached, full disk).
        """
        self.num_failed += 1
        if self.directory is None:
            return None
        if self._num_saved is None:
            self._num_saved = sum(1 for _ in self.directory.glob("reward-*.json"))
        if self._num_saved >= MAX_SAVED:
            if self._num_saved == MAX_SAVED:
                logger.warning("%s holds %d failed scores; further ones are not saved", self.directory, MAX_SAVED)
                self._num_saved += 1
            return None
        path = self.directory / file_name(samples[0], evaluation, rollout_id)
        record = {
            "format": FORMAT,
            "replay": f"slime rewards replay {path}",
            "error": {
                "where": where,
                "error": f"{type(error).__name__}: {error}",
                "traceback": getattr(error, "worker_traceback", None) or None,
            },
            "component": {"spec": spec, **provenance},
            "rollout_id": rollout_id,
            "evaluation": evaluation,
            "args": reward_settings(self.args if args is None else args),
            "samples": [sample.to_dict() for sample in samples],
        }
        try:
            self.directory.mkdir(exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(to_json(hidden_values(record), f"sample {samples[0].index}"))
            is_new = not path.exists()
            partial.replace(path)
        except Exception as failure:  # the sample has already failed; a failed save must not end the run
            logger.warning("cannot save the failed score %s: %s", path, failure)
            return None
        self._num_saved += is_new
        return str(path)


def file_name(sample: Sample, evaluation: bool, rollout_id: int | None) -> str:
    """Return `reward-<rollout>-<sample index>.json`; evaluation adds the data set's name, since indices repeat."""
    rollout = "none" if rollout_id is None else str(rollout_id)
    index = "none" if sample.index is None else str(sample.index)
    if not evaluation:
        return f"reward-{rollout}-{index}.json"
    name = re.sub(r"[^A-Za-z0-9_.]+", "_", str(sample.metadata.get("source_name", "")))
    return f"reward-eval{rollout}-{name}-{index}.json"


def reward_settings(args: Args) -> dict[str, Any]:
    """Return the settings that a reward may depend on, except values that JSON cannot represent."""
    values = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    values |= {"plugins": args.plugins, **(args.model_extra or {})}
    kept = {}
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        if value is not None:
            kept[name] = value
    return kept
