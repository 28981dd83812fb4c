"""Make a tiny model and teach it a task's answer format; the common part of recipes with tiny models.

The recipe `addition` and the recipes of `examples/` call this module. Every file is written atomically, the model last,
so a killed preparation can be repeated, and other processes may wait for the model. A phase is an ordinary `slime sft`
run with the settings of a YAML file.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slime_commands.init.tiny_model import write_random_model
from slime_core.config import load_settings
from slime_core.data.dataset import split_path
from slime_core.data.dumps import write_lines
from slime_core.errors import ConfigError
from slime_core.launch import run
from slime_core.models.hf_io import copy_assets, read_weights, write_weights
from slime_core.protocols import Args

Rows: TypeAlias = Sequence[Mapping[str, Any]]
STAMP = "slime_quickstart.json"
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")

PHASES = tuple(Path(__file__).with_name(f"warmup-{number}.yaml") for number in (1, 2))
"""Settings of the two phases of the recipe `addition`: the whole task first, then the initial habit for training."""


@dataclass(frozen=True)
class Recipe:
    """The recipe that made a model, stored with its weights."""

    name: str
    version: int = 1
    """Version, incremented when the recipe makes different models than before."""

    def stamp(self, seed: int) -> dict[str, Any]:
        """Return the contents of the file `STAMP`."""
        return {"recipe": self.name, "version": self.version, "seed": seed}


def write_missing(spec: str, rows: Rows) -> None:
    """Write a JSONL data set, unless it is there; `spec` as in `--prompt-data`."""
    path, _ = split_path(spec)
    if not path.exists():
        write_jsonl(path, rows)
        say(f"wrote {path}: {len(rows)} problems")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a file that appears whole. Raises RecordError."""
    write_lines(path, (json.dumps(row).encode() for row in rows))


def make_missing(args: Args, recipe: Recipe, train: Rows, held_out: Rows, phases: Iterable[Rows]) -> None:
    """Write what is missing of `--prompt-data`, the files of `--eval-prompt-data`, and `--hf-checkpoint`.

    Args:
        args: The run's settings.
        recipe: Who asks.
        train: Rows of the first.
        held_out: Rows of the second.
        phases: Rows of the two phases of the model's warm-up (`messages`).
    """
    if args.prompt_data:
        write_missing(args.prompt_data, train)
    for path in (args.eval_prompt_data or [])[1::2]:
        write_missing(path, held_out)
    make_missing_model(args, recipe, dict(zip(PHASES, phases, strict=True)))


def make_missing_model(args: Args, recipe: Recipe, phases: Mapping[Path, Rows]) -> None:
    """Make the model of this run's seed if it is missing, and set `args.hf_checkpoint` to its directory.

    If `args.hf_checkpoint` has a model of another seed, this run's model goes to a separate directory next to it.

    Args:
        args: The run's settings.
        recipe: The calling recipe.
        phases: Settings of `slime sft` -> rows (`messages`), in order.
    """
    model = _model_of_seed(Path(args.hf_checkpoint), recipe, args.seed)
    if is_missing(model):
        _make_model(args, model, recipe, phases)
    args.hf_checkpoint = str(model)


def is_missing(model: Path) -> bool:
    """Return whether a recipe may make a model there; False if there is one.

    Raises:
        ConfigError: Something else is there.
    """
    if (model / "config.json").is_file():
        return False
    if model.is_symlink() or (model.exists() and not (model.is_dir() and not any(model.iterdir()))):
        raise ConfigError(
            f"--hf-checkpoint {model} is there already and is no model (no config.json). A recipe makes a model only in"
            " a new or empty directory: name another, or a directory that holds a model"
        )
    return True


def _model_of_seed(model: Path, recipe: Recipe, seed: int) -> Path:
    """Return the directory for the model of this seed: `model`, unless it has a model of another seed."""
    stamp = model / STAMP
    if not stamp.is_file() or json.loads(stamp.read_text(encoding="utf-8")) == recipe.stamp(seed):
        return model  # missing, made by this recipe, or the user's own model
    return model.with_name(f"{model.name}-seed-{seed}")


def _make_model(args: Args, target: Path, recipe: Recipe, phases: Mapping[Path, Rows]) -> None:
    """Make a random model, fine-tune it in phases, and move it to `target`."""
    started = time.perf_counter()
    work = target.with_name(f".{target.name}.preparing")
    if work.exists():  # left by a killed preparation
        shutil.rmtree(work)
    model = work / "random"
    parameters = write_random_model(model, args.seed)
    say(f"wrote a random model of {parameters:,} parameters; warming it up by supervised fine-tuning")
    for number, (phase, rows) in enumerate(phases.items(), start=1):
        data = work / f"phase-{number}.jsonl"
        write_jsonl(data, rows)
        model = _fine_tune(args, phase, model, data, work / f"phase-{number}")
    warm = work / "warm"
    copy_assets(model, warm)
    write_weights(warm, read_weights(model))
    (warm / STAMP).write_text(json.dumps(recipe.stamp(args.seed)) + "\n", encoding="utf-8")
    os.rename(warm, target)  # fails if the target was created meanwhile
    shutil.rmtree(work)
    say(f"wrote {target}: the warmed-up model, in {time.perf_counter() - started:.0f} s")


def _fine_tune(args: Args, phase: Path, model: Path, data: Path, save: Path) -> Path:
    """Run `slime sft` without preflight checks, and return the directory of the trained model."""
    argv = ["--no-preflight", "--config", str(phase), "--hf-checkpoint", str(model), "--prompt-data", str(data)]
    argv += ["--save", str(save), "--seed", str(args.seed), "--device", args.device, "--dtype", "float32"]
    argv += ["--num-threads", str(args.num_threads)] if args.num_threads else []
    for directory in args.plugin_dir:
        argv += ["--plugin-dir", directory]
    with _single_process():
        summary = run(load_settings(argv, command="sft", env={}))
    return Path(str(summary["checkpoint"]))


@contextmanager
def _single_process() -> Iterator[None]:
    """Hide torchrun's variables: only this rank warms up the model, and the other ranks wait for it."""
    hidden = {name: os.environ.pop(name) for name in _TORCHRUN if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def say(text: str) -> None:
    """Print a progress message."""
    print(f"quick start: {text}", flush=True)
