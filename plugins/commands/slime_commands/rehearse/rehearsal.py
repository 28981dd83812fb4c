"""Flags of a run -> the report of its rehearsal, stage by stage.

    settings   read and compared, as every command does
    layout     parallel sizes, counted out over the run's own model and its own GPUs; `slime plan`
    inputs     data, and a small model of the same architecture
    check      `slime check`
    score      rows of the data with right and wrong answers (`scoring.py`)
    start .. resume   a small run, killed after its first commit and resumed (`running.py`)

A stage with an error ends the rehearsal, since the run ends there, too.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from slime_runs.files import read_frames, sample_files

from slime_commands.check.check import made_elsewhere
from slime_commands.check.preflight import num_elements, starting
from slime_commands.models.presets import ModelPreset, find_preset, model_presets
from slime_commands.plan.check import choices
from slime_commands.plan.memory import shown
from slime_commands.plan.roofline import model_numbers
from slime_commands.plan.run_plan import RunPlan, plan_run
from slime_commands.rehearse import connections, scoring
from slime_commands.rehearse.report import Prices, Report
from slime_commands.rehearse.running import Outcome, SmallRun, not_finite
from slime_commands.rehearse.scaled import (
    DEADLINES,
    MODELS,
    Here,
    RunFile,
    check_sizes,
    settings_here,
    settings_small,
    trackers,
    with_model,
)
from slime_commands.rehearse.small_model import shrink, write_small_model
from slime_core.checkpoint.sources import required_source
from slime_core.data.dataset import split_path
from slime_core.errors import ConfigError, SlimeError
from slime_core.launch.components import Resolver
from slime_core.launch.prepare import Prepared, preflight, prepare
from slime_core.models.config import read_hf_config
from slime_core.models.hf_io import write_config
from slime_core.plugins.discovery import search_as
from slime_core.plugins.presets import load_settings
from slime_core.protocols import RolloutTraits, traits_of
from slime_core.protocols.command import Level

_ANY = 1 << 14
"""GPUs of the cluster that a plan gets, to say how many of them the run takes."""
_SMALL = 20e6
"""Parameters of a model that is rehearsed as it is."""
_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/local")
"""Directories that each node has for itself."""
_ONE_S, _EACH_S = 90.0, 30.0
"""Seconds for a start of the small run in one process, and for each of several processes more."""
_STAND_IN_ROWS = 64
_OF_THE_MODEL = ("processes", "dtype", "settings", "disk")
"""Subjects of `slime check` that depend on the size of the model."""


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    command: str = "train"
    num_gpus: int | None = None
    processes: int = 4
    seconds: float | None = None
    """Seconds for each start of the small run; None: by the number of processes."""
    stand_ins: bool = False
    until: str = "resume"
    """Last stage."""


class _Ended(Exception):
    """Raised to end the rehearsal after a stage with an error."""


def rehearse(argv: Sequence[str], options: Options, folder: Path) -> Report:
    """Rehearse a run in an empty folder, and return the report; nothing else is written."""
    began, report = time.monotonic(), Report()
    rehearsal = _Rehearsal(list(argv), options, folder, report)
    with suppress(_Ended):
        rehearsal.go()
    report.seconds = time.monotonic() - began
    return report


class _Rehearsal:
    def __init__(self, argv: list[str], options: Options, folder: Path, report: Report) -> None:
        self.argv, self.options, self.folder, self.report = argv, options, folder, report
        self.parameters = 0
        """Parameters of the run's own model; 0 if unknown."""

    def go(self) -> None:
        """Go through the stages."""
        with self._stage("settings"):
            files = not self.options.stand_ins
            self.settings = load_settings(self.argv, command=self.options.command, fetch=False, files=files)
            search_as(self.settings.args)
            self._components()
            for warning in self.settings.warnings:
                self._add("settings", Level.WARNING, warning)
        with self._stage("layout"):
            config = self._model_config()
            self._layout(config)
        with self._stage("inputs"):
            here = self._inputs(config)
        with self._stage("check"):
            self._check(here)
        small = settings_small(self.settings, here, self.folder)
        file = RunFile.write(self.folder / "run.yaml", small, self.options.command)
        with self._stage("score", file):
            self._score(file)
        self.report.gaps += [f"{told}: left as it is" for told in trackers(small)]
        self._run(file, here)

    @contextmanager
    def _stage(self, name: str, file: RunFile | None = None) -> Iterator[None]:
        try:
            with redirect_stdout(sys.stderr), _quiet():
                yield
        except SlimeError as error:
            self._add(name, Level.ERROR, str(error), file=file)
        self._end_after(name)

    def _end_after(self, stage: str) -> None:
        """Raise _Ended after an error, and after the last stage."""
        if self.report.fails() or stage == self.options.until:
            raise _Ended

    def _add(self, stage: str, level: Level, text: str, rollouts: int = 0, file: RunFile | None = None) -> None:
        text = text if file is None else file.in_words_of(self.settings, text)
        self.report.add(stage, level, text.replace(f"{self.folder}{os.sep}", ""), rollouts)

    # -- settings, layout ------------------------------------------------------------------------------------

    def _components(self) -> None:
        """Find trainer, engine and rollout function, without what the rehearsal may do without."""
        settings, args = self.settings, self.settings.args
        resolver = Resolver(settings)
        if self.options.stand_ins:
            self._leave_out_unfound(resolver)
        self.trainer = None if args.debug_rollout_only else resolver.setting("trainers", "train_backend")
        function = resolver.setting("rollouts", "rollout_function_path")
        generates = traits_of(function, RolloutTraits).needs_engine and not args.debug_train_only
        self.engine = resolver.setting("engines", "rollout_engine") if generates else None

    def _leave_out_unfound(self, resolver: Resolver) -> None:
        """Leave out functions of files that are not on this machine."""
        from slime_commands.check.config import named_components

        for kind, spec, flag in list(named_components(self.settings)):
            name = flag.removeprefix("--").replace("-", "_")
            try:
                resolver.spec(kind, spec, flag)
            except SlimeError as error:
                if not isinstance(getattr(self.settings.args, name), str) or not self.settings.is_given(name):
                    raise
                self.report.gaps.append(f"{flag} {spec}: {str(error).splitlines()[0]}")
                self.settings.derive(name, None, "--stand-ins")

    def _model_config(self) -> dict[str, Any] | None:
        """Return the model's config.json; that of a preset if it is not here, None without one."""
        args = self.settings.args
        directory = Path(args.hf_checkpoint or "")
        if (directory / "config.json").is_file():
            return read_hf_config(directory)
        if args.prepare_path:
            return None
        known = {end.lower(): p for p in model_presets().values() for end in (p.name, p.hub.split("/")[-1])}
        preset = find_preset(args.model) if args.model else known.get(directory.name.lower())
        alike = filter(self._has_given_numbers, model_presets().values())
        preset = preset or max(alike, key=lambda p: _likeness(p.name, directory.name), default=None)
        cited = self.settings.cite("hf_checkpoint")
        if preset is None:
            raise ConfigError(
                f"{cited}: no model here, and no preset of its name; type --model NAME (slime models list)"
            )
        self.report.gaps.append(f"{cited}: not on this machine; numbers of the preset {preset.name}, and a tokenizer")
        if not args.model:
            self.settings.derive("model", preset.name, "hf_checkpoint")
        return dict(preset.config)

    def _has_given_numbers(self, preset: ModelPreset) -> bool:
        """Return whether the flags state the preset's numbers."""
        n = preset.numbers
        stated: dict[str, float] = {
            "num_layers": n.layers,
            "hidden_size": n.hidden_size,
            "num_attention_heads": n.heads,
        }
        stated |= {"vocab_size": n.vocab_size, "rotary_base": n.rope_base}
        given = {name: number for name, number in stated.items() if name in self.settings.foreign}
        return "num_layers" in given and all(getattr(self.settings.args, name) == x for name, x in given.items())

    def _layout(self, config: Mapping[str, Any] | None) -> None:
        if config is not None and self.trainer is not None:
            write_config(self.folder / "config", config)
            check_sizes(self.settings, self.trainer, self.folder / "config")
        gpus = self.options.num_gpus
        if gpus is None:
            gpus = 0 if self.settings.args.device == "cpu" else _ANY
        plan = plan_run(self.settings, num_gpus=gpus)
        self.report.plan = plan.to_dict()
        self.report.prices = self._prices(plan)
        self.report.predicted = list(self._predicted(plan))
        with suppress(SlimeError, OSError, ValueError):
            self.parameters = model_numbers(self.settings.args, self.trainer)[1].total
        self._places()

    def _prices(self, plan: RunPlan) -> Prices:
        args, seconds = self.settings.args, plan.seconds
        share = 0.0
        if seconds is not None and plan.batches and args.eval_datasets and args.eval_interval:
            share = sum(map(_rows, args.eval_datasets)) / plan.batches.samples
        return Prices(
            plan.placement.num_gpus,
            None if seconds is None else seconds.generate,
            None if seconds is None else seconds.train,
            plan.overlap,
            None if seconds is None else share * seconds.generate,
            bool(args.eval_datasets and args.eval_interval and not args.skip_eval_before_train),
            args.save_interval,
        )

    def _predicted(self, plan: RunPlan) -> Iterator[str]:
        yield f"{plan.placement.num_gpus} GPUs"
        yield from plan.batches.describe() if plan.batches else ()
        for device in plan.memory:
            yield f"{device.device}: {shown(device.total)}{f', to {device.peak}' if device.peak else ''}"
        if plan.seconds:
            yield plan.seconds.describe(plan.overlap)
            if self.settings.args.num_rollout:
                p = self.report.prices
                all_minutes = p.minutes("generate", self.settings.args.num_rollout)
                if all_minutes is not None:
                    yield f"the whole run: {all_minutes / 60:,.3g} GPU hours at most"
        yield from (note for note in plan.notes if "GPUs are idle" not in note)

    def _places(self) -> None:
        """Warn of directories that nodes do not share."""
        args, settings = self.settings.args, self.settings
        if args.actor_num_nodes < 2:
            return
        for name in ("save", "run_dir", "update_weight_disk_dir"):
            path = getattr(args, name)
            if path and settings.is_given(name) and str(Path(path).absolute()).startswith(_LOCAL):
                text = (
                    f"{settings.cite(name)}: each of the {args.actor_num_nodes} nodes has a directory of its own there"
                )
                self._add("commit", Level.ERROR, f"{text}; name one on a shared file system")

    # -- inputs ----------------------------------------------------------------------------------------------

    def _inputs(self, config: dict[str, Any] | None) -> Here:
        """Return values with a model, data and engine that are here."""
        if flags := made_elsewhere(self.settings, self.folder):
            self.settings = load_settings([*self.argv, *flags], command=self.options.command, fetch=False)
            config = self._made()
        assert config is not None, "a recipe has made the model"
        here = settings_here(self.settings, self.trainer, self.engine, self.options.processes)
        directory = Path(self.settings.args.hf_checkpoint)
        there = (directory / "config.json").is_file()
        parameters = sum(map(num_elements, directory.glob("*.safetensors"))) if there else 0
        if 0 < parameters <= _SMALL:
            model = directory
            self.report.done.append(("model", f"{directory.name}, {parameters:,} parameters, as it is"))
        else:
            model = self.folder / "model"
            small = shrink(config, stages=here.stages)
            count = write_small_model(directory if there else None, model, small, self.settings.args.seed)
            text = f"{config['model_type']}, {count:,} random parameters, {_layers(small)} layers"
            self.report.done.append(("model", text))
            self.report.gaps.append("the checkpoint's weights: the rehearsal's are random")
            if not there:
                here.values.pop("rollout_stop_token_ids", None)
        for name in MODELS:
            path = getattr(self.settings.args, name)
            if path and self.settings.is_given(name):
                self._further_model(name, path, there)
        with_model(here, model, small=model != directory)
        if self.options.stand_ins:
            self._stand_ins(here)
        self.report.gaps += here.gaps
        return here

    def _further_model(self, name: str, path: str, there: bool) -> None:
        """Note a reference, teacher or critic. Raises CheckpointError if it alone is not on this machine."""
        if there and not self.options.stand_ins:
            folder = "critic" if name == "critic_load" else None
            required_source(path, None, cite=self.settings.cite(name), folder=folder)
        self.report.gaps.append(f"{self.settings.cite(name)}: the rehearsal's model takes its place")

    def _made(self) -> dict[str, Any]:
        """Let the recipe make inputs in the folder, and return the model's config.json."""
        args = self.settings.args
        values = settings_here(self.settings, self.trainer, self.engine, self.options.processes).values
        values = {**values, "prepare_path": args.prepare_path, "save": str(self.folder / "made")}
        made = prepare(RunFile.write(self.folder / "made.yaml", values, self.options.command).load()).args
        args.hf_checkpoint = made.hf_checkpoint
        return read_hf_config(made.hf_checkpoint)

    def _stand_ins(self, here: Here) -> None:
        """Write rows where the data are not on this machine."""
        args, supervised = self.settings.args, not self.settings.args.compute_advantages_and_returns
        if args.prompt_data and not split_path(args.prompt_data)[0].exists():
            here.values["prompt_data"] = str(_rows_like(self.folder / "prompt_data.jsonl", args, supervised))
            self.report.gaps.append(f"{self.settings.cite('prompt_data')}: not on this machine; rows that stand in")
        for dataset in args.eval_datasets:
            if not split_path(dataset.path)[0].exists():
                self.report.gaps.append(f"evaluation data set {dataset.name!r} {dataset.path}: rows that stand in")
                dataset.path = str(_rows_like(self.folder / f"{dataset.name}.jsonl", dataset, supervised))
        if args.eval_datasets:
            here.values |= {"eval_prompt_data": [x for d in args.eval_datasets for x in (d.name, d.path)]}
        path = here.values.get("megatron_config_path")
        if path and not os.path.exists(path):
            self.report.gaps.append(f"--megatron-config-path {path}: not on this machine")
            del here.values["megatron_config_path"]

    # -- check, score ----------------------------------------------------------------------------------------

    def _check(self, here: Here) -> None:
        """Do as `slime check`, with the user's own sizes and places."""
        values = {**here.values, **({"load": self.settings.args.load} if not self.options.stand_ins else {})}
        file = RunFile.write(self.folder / "check.yaml", values, self.options.command)
        try:
            run = prepare(file.load(), make=False)
            findings = [*preflight(run), *starting(run)]
        except SlimeError as error:
            self._add("check", Level.ERROR, str(error), file=file)
            return
        finally:
            shutil.rmtree(self.folder / "config", ignore_errors=True)
        findings = [finding for finding in findings if finding.subject not in _OF_THE_MODEL]
        findings += choices(self.settings, self.parameters)
        for finding in findings:
            if finding.level in (Level.ERROR, Level.WARNING):
                self._add("check", finding.level, f"{finding.subject}: {finding.message}", file=file)
        self.report.done.append(("check", f"{len(findings)} findings of slime check"))

    def _score(self, file: RunFile) -> None:
        """Play the environment, and score rows with right and wrong answers."""
        args = self.settings.args
        if not (args.compute_advantages_and_returns and self.engine is not None and args.prompt_data):
            return
        run = prepare(file.load(), make=False)
        if args.environment_path:
            self._play(run, file)
        if run.parts.reward is not None:
            noted = self.folder / "connections.tsv"
            with connections.noted(noted):
                scores = scoring.score_rows(run)
            self._scored(scores, file)
            self._connections(noted)

    def _play(self, run: Prepared, file: RunFile) -> None:
        cited = self.settings.cite("environment_path")
        try:
            turns, ended = scoring.play(run)
        except SlimeError as error:
            self._add("generate", Level.ERROR, f"{cited}: {self._with_own_deadlines(str(error))}", file=file)
            return
        self.report.done.append(("environment", f"{turns} turns"))
        if not ended:
            most = self.settings.args.rollout_max_response_len
            text = f"{cited}: not done after {turns} turns, so samples may take all of {most} tokens"
            self._add("generate", Level.WARNING, f"{text}; --max-turns N ends them")

    def _scored(self, scores: scoring.Scores, file: RunFile) -> None:
        args = self.settings.args
        rows = f"{scores.rows} of {scores.total} rows"
        self.report.done.append(("score", f"{rows}, {scores.compared} of them with {scoring.ANSWERS} answers"))
        per_rollout = args.rollout_batch_size or 1
        for bad, what in ((scores.unread, "cannot be read"), (scores.failed, "cannot be scored")):
            if bad:
                number, error = bad[0]
                text = f"row {number + 1} of {args.prompt_data} {what}: {error}"
                more = f"; {len(bad)} of {rows}" if len(bad) > 1 else ""
                whole = bad is scores.unread or len(bad) == scores.rows
                self._add("score", Level.ERROR if whole else Level.WARNING, text + more, number // per_rollout, file)
        if scores.compared and not scores.distinct:
            text = f"every answer to {scores.compared} rows, right or wrong, gets"
            text += f" {_some(scores.values)}: nothing is learned"
            filtered = args.dynamic_sampling_filter_path is not None
            self._add("score", Level.ERROR if filtered else Level.WARNING, f"{self._reward()}: {text}")
        if scores.filter_error:
            self._add("score", Level.ERROR, scores.filter_error, file=file)
        elif scores.judged and not scores.kept:
            cited = self.settings.cite("dynamic_sampling_filter_path")
            text = f"{cited}: keeps none of {scores.judged} groups with different rewards"
            self._add("score", Level.ERROR, f"{text}, so a rollout never fills")
        if scores.seconds > scoring.SLOW_S:
            self._add("score", Level.WARNING, f"{self._reward()}: {scores.seconds:.1f} s an answer")

    def _reward(self) -> str:
        return self.settings.cite("custom_rm_path" if self.settings.args.custom_rm_path else "rm_type")

    def _connections(self, noted: Path) -> None:
        for host, place in connections.hosts(noted):
            text = f"{place} connects to {host}: fails on nodes that do not reach it"
            self._add("generate", Level.WARNING, text)

    # -- the small run ---------------------------------------------------------------------------------------

    def _run(self, file: RunFile, here: Here) -> None:
        noted = self.folder / "connections.tsv"
        small = SmallRun(file.path, self.folder / "run", self.options.command, connections.environment(noted))
        self.seconds = self.options.seconds or _ONE_S + (_EACH_S * here.processes if here.processes > 1 else 0)
        first = small.until_commit(self.seconds)
        self._told(small, first, file, small.stage() if first.last is None else "commit")
        self._metrics(small)
        self._connections(noted)
        processes = here.layout or "one process"
        self.report.done.append(("run", f"{_count(first)} in {first.seconds:.0f} s on {processes}; killed"))
        for what, seconds in small.slow.items():
            if not self._is_own(what):
                continue
            text = f"{what}: took {seconds:.0f} s or more for a few samples, while GPUs wait"
            self._add("generate", Level.WARNING, text, file=file)
        self._end_after("commit")
        again = small.until_commit(self.seconds, more=True, load=True)
        self._told(small, again, file, "resume")
        if not self.report.fails() and again.last == first.last:
            self._add("resume", Level.ERROR, f"resumed from rollout {first.last}, and no further commit was made")
        self._metrics(small)
        evaluations = sum(any(name.startswith("eval/") for name in line) for line in small.metrics())
        text = f"{_count(again)} in {again.seconds:.0f} s, ended by SIGTERM; {evaluations} evaluations"
        self.report.done.append(("resume", text))

    def _is_own(self, what: str) -> bool:
        """Return whether a wait is a hook plugin or a function that the user names by a flag."""
        name = what.split(maxsplit=1)[0].rstrip(":").removeprefix("--").replace("-", "_")
        return not what.startswith("--") or (name in self.settings.origins and self.settings.is_given(name))

    def _told(self, small: SmallRun, outcome: Outcome, file: RunFile, stage: str) -> None:
        """Add the findings of one start of the run."""
        if outcome.late:
            waits = f"waits for {'; '.join(outcome.waits)}" if outcome.waits else outcome.error
            text = f"not done within {self.seconds:.0f} s (--seconds): {waits}"
            self._add(stage, Level.ERROR, text, file=file)
        elif outcome.status not in (0, None):
            text = outcome.error or f"ended with exit status {outcome.status}"
            self._add(stage, Level.ERROR, self._with_own_deadlines(text), file=file)
        for warning in outcome.warnings:
            if "failed" in warning or "Error" in warning or "slow" in warning:
                self._add(stage if stage != "commit" else "generate", Level.WARNING, warning, file=file)

    def _with_own_deadlines(self, text: str) -> str:
        short = [name for name in DEADLINES if f"--{name.replace('_', '-')}" in text]
        own = [self.settings.cite(name) for name in short]
        return f"{text} (deadlines are shorter in a rehearsal; the run has {', '.join(own)})" if own else text

    def _metrics(self, small: SmallRun) -> None:
        """Look at the metrics of the rollouts that were done."""
        lines = small.metrics()
        if names := not_finite(lines):
            self._add("train", Level.ERROR, f"not finite: {', '.join(names[:6])}")
        trained = [line for line in lines if "train/lr" in line]
        if not trained:
            return
        if all(line["train/lr"] == 0 for line in trained) and not self.settings.args.lr_warmup_iters:
            self._add("train", Level.WARNING, f"{self.settings.cite('lr')}: no step changes the weights")
        if skipped := sum(line.get("train/skipped_steps", 0) for line in trained):
            self._add("train", Level.ERROR, f"{skipped:.0f} steps skipped, since their gradient is not finite")
        failed = max(line.get("rollout/failed_ratio", 0.0) for line in trained)
        if failed:
            self._add("generate", Level.ERROR if failed == 1 else Level.WARNING, self._failure(small, failed))
        for path in small.directory.glob("incidents.jsonl"):
            for row in path.read_text(encoding="utf-8").splitlines()[:8]:
                self._add("train", Level.WARNING, f"incident: {json.loads(row).get('message', row)[:300]}")

    def _failure(self, small: SmallRun, share: float) -> str:
        """Return the first failure among the samples."""
        for path in sample_files(small.directory / "samples"):
            for sample in (row for _, rows in read_frames(path) for row in rows):
                if failure := sample.get("metadata", {}).get("failure"):
                    return f"{share:.0%} of the samples failed: {failure['where']}: {failure['error']}"
        return f"{share:.0%} of the samples failed"


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave warnings to the report."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def _rows(dataset: Any) -> int:
    """Return the samples of an evaluation data set; 0 if it cannot be read."""
    from slime_core.data.dataset import open_rows

    try:
        rows = open_rows(dataset.path, dataset.name)
    except SlimeError:
        return 0
    try:
        return len(rows) * int(dataset.n_samples_per_eval_prompt)
    finally:
        rows.close()


def _rows_like(path: Path, columns: Any, supervised: bool) -> Path:
    """Write rows of sums with the columns that the settings name; return the path."""
    rng, rows = random.Random(0), []
    for _ in range(_STAND_IN_ROWS):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        question, answer = f"{a}+{b}=?", str(a + b)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        row: dict[str, Any] = {columns.input_key or "input": messages if supervised else question}
        row |= {columns.label_key: answer} if columns.label_key else {}
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _some(values: set[Any]) -> str:
    shown_values = sorted(map(str, values))
    return " or ".join(shown_values[:3])


def _layers(config: Mapping[str, Any]) -> Any:
    text = config.get("text_config", config)
    return text.get("num_hidden_layers") or text.get("n_layer") or "?"


def _count(outcome: Outcome) -> str:
    return "no commit" if outcome.last is None else f"commit after rollout {outcome.last + 1}"
