"""Time travel: generate a stored sample again, from its seed and the weights that it was sampled with.

`resample` starts the run's own embedded engine, generate function and rewards with weights that the run kept. They
continue from a beginning of the stored sample, as a partial rollout would. Without a change, the result is the stored
sample. Ids do not depend on other requests in the engine. The last bits of log-probs do, unless the run had
`--true-on-policy-mode`; without it, whole samples are generated together with all others of their rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slime_core.checkpoint.run_dir import CHECKPOINTS, CONFIG
from slime_core.checkpoint.store import STATE, CheckpointStore, verify
from slime_core.config import Settings, load_settings
from slime_core.launch.prepare import prepare
from slime_core.protocols import Args
from slime_core.rollout.evaluate import dataset_args, eval_sampling_params
from slime_core.rollout.generate import sampling_seed, train_sampling_params
from slime_core.rollout.pool import RolloutContext
from slime_core.sample import Group, RolloutFnEvalOutput, Sample
from slime_runs.files import read_object
from slime_runs.index import Entry, Filter
from slime_runs.numbering import shown_place
from slime_runs.prefix import Beginning, beginning, begun
from slime_runs.run import Run, RunError, StoredSample


@dataclass(frozen=True)
class Change:
    """Differences from the original generation; the default changes nothing."""

    from_token: int = 0
    """Number of response tokens to keep, tool answers among them included."""
    step: int | None = None
    """Number of rollouts after which to take the weights; None: the weights that sampled it."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, by SGLang's names."""
    tool_answer: str | None = None
    """Text that replaces the first tool answer from `from_token` on."""
    times: int = 1
    """Number of generations; all but the first use other seeds."""


@dataclass(frozen=True)
class Again:
    """A sample that was generated again."""

    sample: Sample
    first_difference: int | None
    """Index of the first response token that differs from the stored sample; None if all are the same."""
    distance: float
    """Largest distance of a log-prob from the stored one, in nats, over the tokens before that; 0.0: the same bits."""


@dataclass(frozen=True)
class Resampled:
    """A stored sample and its new generations."""

    stored: StoredSample
    kept: int
    """Number of response tokens that were kept instead of generated again."""
    weights: Weights
    found: list[Again]
    """The new generations, `Change.times` in number."""


def resample(run: Run, stored: Sequence[StoredSample], change: Change | None = None) -> list[Resampled]:
    """Generate stored samples again, with all samples of the same weights in one engine.

    Raises:
        RunError: The weights were not kept, the sample cannot continue at that token, or another engine sampled it.
        ConfigError: The run's settings cannot be used here.
    """
    change = change or Change()
    settings = _settings(run)
    begins = [_beginning(found, change) for found in stored]
    chosen = [weights_at(settings.args, step=change.step, version=at.version) for at in begins]
    results: dict[int, Resampled] = {}
    for weights in dict.fromkeys(chosen):
        own = [i for i, w in enumerate(chosen) if w == weights]
        again = _Again(run, settings, change, [(stored[i], begins[i]) for i in own])
        for i, samples in zip(own, again.generated(weights)):
            compared = [_compared(stored[i].sample, sample) for sample in samples]
            results[i] = Resampled(stored[i], begins[i].length, weights, compared)
    return [results[i] for i in range(len(stored))]


def _settings(run: Run) -> Settings:
    """Return the run's settings, changed for a single process that writes nothing. Raises ConfigError, RunError."""
    config = run.path / CONFIG
    if not config.is_file():
        raise RunError(f"{run.path}: has no {CONFIG}, so its settings are not known")
    with _told():
        settings = load_settings(["--config", str(config)], command="show")
    args = settings.args
    if args.rollout_engine != "embedded":
        raise RunError(
            f"{run.path}: its engine is {args.rollout_engine!r}, which does not sample the same tokens again;"
            " --rollout-engine embedded does"
        )
    args.run_dir, args.save = str(run.path), str(run.checkpoints.parent)  # a moved run has other paths
    args.async_training = args.offload_train = args.offload_rollout = args.colocate = False
    args.mask_offpolicy_in_partial_rollout = False
    return settings


@contextmanager
def _told() -> Iterator[None]:
    """Suppress the warnings that the run has already printed."""
    logger = logging.getLogger("slime_core.config.load")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _beginning(found: StoredSample, change: Change) -> Beginning:
    sample, entry = found.sample, found.entry
    where = f"sample {entry.sample_index} of {shown_place(entry.rollout, entry.data_set)}"
    if not sample.tokens or not sample.response_length:
        raise RunError(f"{where}: has no response, so there is nothing to generate again")
    return beginning(
        sample, change.from_token, replaces_answer=change.tool_answer is not None,
        any_weights=change.step is not None, where=where,
    )  # fmt: skip


class _Again:
    """Stored samples of the same weights, and the stage that generates them."""

    def __init__(
        self, run: Run, settings: Settings, change: Change, wanted: Sequence[tuple[StoredSample, Beginning]]
    ) -> None:
        self._run, self._settings, self._change, self._wanted = run, settings, change, wanted
        whole = not (change.from_token or change.params or change.tool_answer is not None)
        self._together = whole and not settings.args.true_on_policy_mode

    def generated(self, weights: Weights) -> list[list[Sample]]:
        """Generate each sample `times` times and return the results."""
        prepared = prepare(self._settings, learn=False)
        self._settings.args.run_dir = None  # nothing is written into the run
        stage = prepared.rollout_stage(draws=False)
        stage.parts.eval_function = self._generate
        try:
            stage.start()
            stage.update_weights("disk", weights.path, weights.version)
            (columns,) = stage.evaluate_samples(0)[0].values()
        finally:
            stage.stop()
            self._settings.args.run_dir = str(self._run.path)
        samples: list[Sample] = columns["samples"]
        times = self._change.times
        return [samples[i : i + times] for i in range(0, len(samples), times)]

    async def _generate(
        self, args: Args, rollout_id: int, data_source: Any, evaluation: bool = True, *, context: RolloutContext
    ) -> RolloutFnEvalOutput:
        found = [await self._of_rollouts(args, context)] if self._together else []
        first = 1 if self._together else 0
        alone = [
            self._run_group(args, context, [self._begun(args, context, stored, at)], stored.entry, time)
            for stored, at in self._wanted
            for time in range(first, self._change.times)
        ]
        groups = await asyncio.gather(*alone)
        samples = [group[0] for group in groups]
        rows = []
        for i in range(len(self._wanted)):
            count = self._change.times - first
            rows += [*(of_rollouts[i] for of_rollouts in found), *samples[i * count : (i + 1) * count]]
        return RolloutFnEvalOutput({"again": {"rewards": [0.0] * len(rows), "truncated": [], "samples": rows}})

    def _begun(self, args: Args, context: RolloutContext, stored: StoredSample, at: Beginning) -> Sample:
        return begun(args, stored.sample, at, context.runner.tokenizer, self._change.tool_answer)

    async def _of_rollouts(self, args: Args, context: RolloutContext) -> list[Sample]:
        """Generate the samples; the samples of a file are generated together with the rest of the file."""
        found: dict[tuple[Any, ...], Sample] = {}
        for file in dict.fromkeys(stored.entry.file for stored, _ in self._wanted):
            groups: dict[tuple[Any, Any], list[StoredSample]] = {}
            for one in self._run.samples(Filter(file=file), order="file"):
                groups.setdefault((one.entry.data_set, one.entry.group_index), []).append(one)
            runs = []
            for group in groups.values():
                samples = [one.sample for one in group]
                for sample in samples:
                    sample.reset_for_retry()
                runs.append(self._run_group(args, context, samples, group[0].entry, 0))
            for group, again in zip(groups.values(), await asyncio.gather(*runs)):
                found |= {_key(one.entry): sample for one, sample in zip(group, again)}
        return [found[_key(stored.entry)] for stored, _ in self._wanted]

    async def _run_group(self, args: Args, context: RolloutContext, group: Group, entry: Entry, time: int) -> Group:
        """Generate and score the samples, the first time with their original seeds."""
        own, params = args, train_sampling_params(args)
        if entry.data_set is not None:
            dataset = next((d for d in args.eval_datasets if d.name == entry.data_set), None)
            if dataset is None:
                raise RunError(f"{entry.data_set!r} is no evaluation data set in the settings of {self._run.path}")
            own, params = dataset_args(args, dataset), eval_sampling_params(args, dataset)
        params = {**params, **self._change.params}
        if time:
            seed = sampling_seed(args.rollout_seed, "again", entry.rollout, entry.data_set, group[0].index, time)
            params["sampling_seed"] = seed
            for sample in group:
                sample.session_id = f"{sample.session_id}-again-{time}"
        evaluation = entry.data_set is not None
        prefixes = [list(sample.tokens) for sample in group]
        done = await context.runner.run_group(
            group, params, rollout_id=entry.rollout, evaluation=evaluation, args=own
        )  # fmt: skip
        if len(done) != len(group):
            raise RunError(
                f"sample {entry.sample_index}: the run's generate function makes several samples of one execution, and"
                " which of them is which is not known, so they cannot be compared"
            )
        for sample, prefix in zip(done, prefixes):
            if sample.tokens[: len(prefix)] != prefix:
                raise RunError(
                    f"sample {entry.sample_index}: the run's generate function begins a sample anew that was begun, so"
                    " nothing can be changed inside of it; leave out --from-token and --tool-answer"
                )
        return done


def _key(entry: Entry) -> tuple[Any, ...]:
    return entry.file, entry.offset, entry.place


def _compared(stored: Sample, again: Sample) -> Again:
    old, new = stored.response_tokens, again.response_tokens
    same = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    pairs = zip((stored.rollout_log_probs or [])[:same], (again.rollout_log_probs or [])[:same])
    differs = same < max(len(old), len(new))
    return Again(again, same if differs else None, max((abs(a - b) for a, b in pairs), default=0.0))


class Weights(NamedTuple):
    """Weights that a run had at some time."""

    step: int
    """Finished rollouts that they were trained on."""
    version: int
    """Under which the engine served them."""
    path: Path
    """A directory in Hugging Face layout."""


def kept_weights(args: Args) -> Mapping[int, Weights]:
    """By step, in order, of commits that say so; those of the beginning are the model's that the settings name."""
    begun = Path(str(args.hf_checkpoint))
    found = {}
    if (begun / "config.json").is_file() and not args.load:
        found[0] = Weights(0, args.update_weight_start_version + 1, begun)
    for path in CheckpointStore(Path(str(args.save or args.run_dir)) / CHECKPOINTS).commits():
        if state := read_object(path / STATE):
            step = int(state["rollout_id"]) + 1
            found[step] = Weights(step, int(state["weight_version"]), path)
    return found


def weights_at(args: Args, *, step: int | None, version: int | None) -> Weights:
    """The weights after `step` rollouts, or else those served as `version`, verified.

    Raises:
        RunError: They were not kept; says which were, and the flags that keep them.
        CheckpointError: The commit is torn.
    """
    kept = kept_weights(args)
    if step is None and version == args.update_weight_start_version and 0 in kept:
        return kept[0]._replace(version=version)  # of a run that does not train, nothing is sent to the engine
    chosen = [w for w in kept.values() if (w.step == step if step is not None else w.version == version)]
    if not chosen:
        wanted = f"after {step} rollouts" if step is not None else f"of version {version}, which sampled it,"
        there = ", ".join(map(str, kept)) or "none"
        raise RunError(
            f"the weights {wanted} were not kept. Kept are those after so many rollouts: {there}; choose with"
            " --weights STEP. A run keeps more with --save-interval 1, and all of them without --keep-checkpoints"
        )
    if chosen[0].step:
        verify(chosen[0].path)
    return chosen[0]
