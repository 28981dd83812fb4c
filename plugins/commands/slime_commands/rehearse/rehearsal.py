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

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from slime_commands.check.preflight import all_findings
from slime_commands.plan.check import choices
from slime_commands.plan.roofline import model_numbers
from slime_commands.plan.run_plan import plan_run
from slime_commands.rehearse import connections, scoring
from slime_commands.rehearse.inputs import Inputs, leave_out_unfound, model_config
from slime_commands.rehearse.prediction import predicted, prices
from slime_commands.rehearse.report import Report
from slime_commands.rehearse.running import Outcome, SmallRun, not_finite
from slime_commands.rehearse.scaled import (
    DEADLINES,
    Here,
    Options,
    RunFile,
    check_sizes,
    leave_out_servers,
    settings_small,
    trackers,
)
from slime_core.errors import SlimeError
from slime_core.launch.components import Resolver
from slime_core.launch.prepare import Prepared, prepare
from slime_core.models.hf_io import write_config
from slime_core.plugins.discovery import search_as
from slime_core.plugins.presets import load_settings
from slime_core.protocols import RolloutTraits, traits_of
from slime_core.protocols.command import Level

_ANY = 1 << 14
"""GPUs of the cluster that a plan gets, to say how many of them the run takes."""
_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/local")
"""Directories that each node has for itself."""
_ONE_S, _EACH_S, _SERVER_S = 90.0, 30.0, 120.0
"""Seconds for a start of the small run in one process, and for each of several processes and for servers more."""
_OF_THE_MODEL = ("processes", "dtype", "settings", "disk")
"""Subjects of `slime check` that depend on the size of the model."""


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
            config = model_config(self.settings, self.report)
            self._layout(config)
        with self._stage("inputs"):
            inputs = Inputs(self.argv, self.settings, self.trainer, self.engine, self.options, self.folder, self.report)
            here = inputs.here(config)
            self.settings = inputs.settings
        with self._stage("check"):
            self._check(here)
        file = self._small(here)
        with self._stage("score", file):
            self._score(file)
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
            leave_out_unfound(settings, resolver, self.report)
        self.trainer = None if args.debug_rollout_only else resolver.setting("trainers", "train_backend")
        function = resolver.setting("rollouts", "rollout_function_path")
        generates = traits_of(function, RolloutTraits).needs_engine and not args.debug_train_only
        self.engine = resolver.setting("engines", "rollout_engine") if generates else None

    def _layout(self, config: Mapping[str, Any] | None) -> None:
        if config is not None and self.trainer is not None:
            write_config(self.folder / "config", config)
            check_sizes(self.settings, self.trainer, self.folder / "config")
        gpus = self.options.num_gpus
        if gpus is None:
            gpus = 0 if self.settings.args.device == "cpu" else _ANY
        plan = plan_run(self.settings, num_gpus=gpus)
        self.report.plan = plan.to_dict()
        self.report.prices = prices(self.settings, plan)
        self.report.predicted = list(predicted(self.settings, plan, self.report.prices))
        with suppress(SlimeError, OSError, ValueError):
            self.parameters = model_numbers(self.settings.args, self.trainer)[1].total
        self._places()

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

    # -- check, score ----------------------------------------------------------------------------------------

    def _check(self, here: Here) -> None:
        """Do as `slime check`, with the user's own sizes and places."""
        values = {**here.values, **({"load": self.settings.args.load} if not self.options.stand_ins else {})}
        file = RunFile.write(self.folder / "check.yaml", values, self.options.command)
        try:
            run = prepare(file.load(), make=False)
            findings = all_findings(run)
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
            rows = f"{scores.rows} of {scores.total} rows"
            self.report.done.append(("score", f"{rows}, {scores.compared} of them with {scoring.ANSWERS} answers"))
            for level, text, rollouts in scores.problems(self.settings):
                self._add("score", level, text, rollouts, file)
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

    def _connections(self, noted: Path) -> None:
        for host, place in connections.hosts(noted):
            text = f"{place} connects to {host}: fails on nodes that do not reach it"
            self._add("generate", Level.WARNING, text)

    # -- the small run ---------------------------------------------------------------------------------------

    def _run(self, file: RunFile, here: Here) -> None:
        noted = self.folder / "connections.tsv"
        small = SmallRun(file.path, self.folder / "run", self.options.command, connections.environment(noted))
        first = self._first(small, here)
        if here.servers and first.last is None and small.stage() == "start":
            why = (first.error or "; ".join(first.waits)).strip().partition("\n")[0]
            leave_out_servers(self.settings, here, f"its server does not start on this CPU ({why})")
            self.report.gaps += here.gaps[-1:]
            shutil.rmtree(small.directory, ignore_errors=True)
            file = self._small(here)
            first = self._first(small, here)
        self._told(small, first, file, small.stage() if first.last is None else "commit")
        self._metrics(small)
        self._connections(noted)
        places = [here.layout or "one process"] + [f"a server of {self.settings.args.rollout_engine}"] * here.servers
        text = f"{_count(first)} in {first.seconds:.0f} s on {' and '.join(places)}; killed"
        self.report.done.append(("run", text))
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

    def _small(self, here: Here) -> RunFile:
        """Write the settings of the small run."""
        values = settings_small(self.settings, here, self.folder)
        known = [f"{told}: left as it is" for told in trackers(values)]
        self.report.gaps += [told for told in known if told not in self.report.gaps]
        return RunFile.write(self.folder / "run.yaml", values, self.options.command)

    def _first(self, small: SmallRun, here: Here) -> Outcome:
        """Run the small run until its first commit."""
        more = (_EACH_S * here.processes if here.processes > 1 else 0) + _SERVER_S * here.servers
        self.seconds = self.options.seconds or _ONE_S + more
        return small.until_commit(self.seconds)

    def _is_own(self, what: str) -> bool:
        """Return whether a wait is a hook plugin or a function that the user names by a flag."""
        name = what.split(maxsplit=1)[0].rstrip(":").removeprefix("--").replace("-", "_")
        return not what.startswith("--") or (name in self.settings.origins and self.settings.is_given(name))

    def _told(self, small: SmallRun, outcome: Outcome, file: RunFile, stage: str) -> None:
        """Add the findings of one start of the run."""
        if outcome.late:
            waits = f"waits for {'; '.join(outcome.waits)}" if outcome.waits else outcome.error
            self._add(stage, Level.ERROR, f"{outcome.late}: {waits}", file=file)
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
            self._add("generate", Level.ERROR if failed == 1 else Level.WARNING, small.failure(failed))
        for incident in small.incidents()[:8]:
            self._add("train", Level.WARNING, f"incident: {incident[:300]}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave warnings to the report."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _count(outcome: Outcome) -> str:
    return "no commit" if outcome.last is None else f"commit after rollout {outcome.last + 1}"
