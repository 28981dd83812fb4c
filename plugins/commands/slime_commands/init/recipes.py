"""Let a recipe (`--prepare-path`) make missing inputs of a run, under a lock (`launch.prepare` calls it)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slime_core.config import Settings
from slime_core.config.spec import flag_specs
from slime_core.data.dataset import split_path
from slime_core.errors import ConfigError
from slime_core.launch.components import Resolver
from slime_core.launch.lock import file_lock
from slime_core.waits import part_of_start

LOCK_DEADLINE = 3600.0
"""Seconds to wait for another process's preparation."""


def inputs_by_recipe(settings: Settings, resolver: Resolver, *, make: bool) -> None:
    """Check that the recipe may make the missing inputs; with `make`, let it. Raises ConfigError, PluginError."""
    _check_made_inputs(settings)
    recipe = resolver.function("recipes", "prepare_path")
    if make:
        _make_inputs(settings, recipe)


def _check_made_inputs(settings: Settings) -> None:
    """Raise ConfigError if the recipe would make a missing input that was not named together with the recipe.

    A run file names its recipe and the recipe's paths. A model or data set that is named elsewhere, for example by a
    flag, is the user's own, and the recipe must not replace it. A recipe that a flag names makes all missing inputs.
    """
    args = settings.args
    paths = {"hf_checkpoint": [args.hf_checkpoint or ""], "prompt_data": [args.prompt_data or ""]}
    paths["eval_prompt_data"] = list(args.eval_prompt_data or [])[1::2]
    recipe = settings.origins["prepare_path"]
    for name, named in paths.items():
        origin = settings.origins[name]
        for path in filter(None, named):
            model = name == "hf_checkpoint"
            there = (Path(path) / "config.json").is_file() if model else split_path(path)[0].exists()
            if there or not settings.is_given(name):
                continue
            cited = f"{flag_specs()[name].flag} {path} ({origin})"
            if model and Path(path).exists() and not (Path(path).is_dir() and not os.listdir(path)):
                raise ConfigError(
                    f"{cited} is there and holds no model (no config.json), so --prepare-path {args.prepare_path} makes"
                    " none there. Name a model directory, or a new or empty one"
                )
            together = (origin.kind, origin.where.rpartition(":")[0]) == (recipe.kind, recipe.where.rpartition(":")[0])
            if recipe.kind != "flag" and not together:
                raise ConfigError(
                    f"{cited} is not there, and --prepare-path {args.prepare_path} ({recipe}) makes only what is named"
                    f" together with it. Name {'a model directory' if model else 'a file'} that is there; to have it"
                    f" made, type --prepare-path {args.prepare_path} as well"
                )


def _make_inputs(settings: Settings, recipe: Callable[..., object]) -> None:
    """Run the recipe under the lock. Raises ConfigError if another process holds the lock for too long.

    Every process (all ranks under torchrun, two runs that share inputs) takes the same lock and calls the recipe. The
    first process makes the inputs, the others find them. So a recipe must be idempotent. It may set
    `args.hf_checkpoint` if it writes the model to another directory.
    """
    args = settings.args
    named = args.hf_checkpoint
    refusal = f"--prepare-path: another process has been preparing the inputs for {LOCK_DEADLINE:.0f} s; end it first"
    lock = file_lock(Path(f"{named or args.run_dir}.lock"), deadline=LOCK_DEADLINE, refusal=refusal)
    with lock, part_of_start():
        recipe(args)
    if args.hf_checkpoint != named:
        if args.ref_load == named:
            settings.derive("ref_load", args.hf_checkpoint, "hf_checkpoint")
        settings.derive("hf_checkpoint", args.hf_checkpoint, f"prepare_path, instead of {named}")
