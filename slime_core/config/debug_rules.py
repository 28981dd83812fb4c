"""Rules of the dumps and of half a loop: what may be combined, and where files go by default.

`rules.RULES` runs them. `--load-debug-rollout-data` alone already means training only.
"""

from __future__ import annotations

import os.path

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError

_TEMPLATES = ("save_debug_rollout_data", "save_debug_train_data", "load_debug_rollout_data", "save_hf")
_ONE_FILE_EACH = ("save_debug_rollout_data", "save_debug_train_data")


def half_a_loop(s: Settings) -> None:
    """Only generating, or only training on saved samples."""
    a = s.args
    loads = a.load_debug_rollout_data is not None
    if a.debug_train_only and not loads and a.rollout_function_path is None:
        raise ConfigError(
            f"{s.cite('debug_train_only')} needs --load-debug-rollout-data FILE, or a rollout function that needs no"
            " engine, such as --rollout-function-path sft: nothing is generated."
        )
    if a.load_debug_rollout_data_subsample is not None and not loads:
        raise ConfigError(f"{s.cite('load_debug_rollout_data_subsample')} needs --load-debug-rollout-data FILE.")
    if loads and s.command not in ("train", "sft", "show"):
        raise ConfigError(f"{s.cite('load_debug_rollout_data')}: slime {s.command} does not train; use slime train.")
    if a.debug_rollout_only:
        if loads:
            raise ConfigError(f"{s.cite('debug_rollout_only')} contradicts {s.cite('load_debug_rollout_data')}.")
        if s.command not in ("train", "rollout", "show"):
            raise ConfigError(f"{s.cite('debug_rollout_only')}: slime {s.command} has no rollouts; use slime train.")
        for name in ("load", "save_interval", "keep_checkpoints", "save_hf", "save_debug_train_data"):
            if s.is_given(name) and getattr(a, name):
                s.warnings.append(f"{s.cite(name)} has no effect with --debug-rollout-only: nothing is trained.")
    if loads and not a.debug_train_only:
        s.derive("debug_train_only", True, "load_debug_rollout_data")
    if loads:
        s.warnings.append(
            f"{s.cite('load_debug_rollout_data')}: nothing is generated, so settings of data, engine, rewards, filters,"
            " hooks of the rollout and evaluation have no effect."
        )


def dumps(s: Settings) -> None:
    """Where samples and train batches are written."""
    a = s.args
    if a.dump_details is not None:
        for name, folder in (("save_debug_rollout_data", "rollout_data"), ("save_debug_train_data", "train_data")):
            if getattr(a, name) is None:
                s.derive(name, os.path.join(a.dump_details, folder, "{rollout_id}.jsonl"), "dump_details")
    if (s.command == "rollout" or a.debug_rollout_only) and a.save_debug_rollout_data is None:
        path = os.path.join(a.run_dir or "", "rollouts", "rollout_{rollout_id:07d}.jsonl")
        s.derive("save_debug_rollout_data", path, "run_dir")
    for name in _TEMPLATES:
        _check_template(s, name)
    _check_distinct(s)


def _check_template(s: Settings, name: str) -> None:
    template = getattr(s.args, name)
    if template is None:
        return
    try:
        paths = {template.format(rollout_id=number) for number in (0, 1)}
    except (KeyError, IndexError, ValueError):
        raise ConfigError(f"{s.cite(name)}: the only placeholder is {{rollout_id}}") from None
    if len(paths) == 1 and name in _ONE_FILE_EACH:
        raise ConfigError(f"{s.cite(name)}: rollouts would overwrite each other; put {{rollout_id}} into it")
    if template.endswith(".pt") and name in _ONE_FILE_EACH:
        s.warnings.append(f"{s.cite(name)}: the files hold JSON lines, whatever they are called.")


def _check_distinct(s: Settings) -> None:
    """No dump may replace another one, or what is read."""
    seen: dict[str, str] = {}
    for name in ("load_debug_rollout_data", *_ONE_FILE_EACH):
        template = getattr(s.args, name)
        if template is None:
            continue
        path = os.path.abspath(template.format(rollout_id=0))
        if path in seen:
            raise ConfigError(f"{s.cite(name)} and {s.cite(seen[path])} are the same file; choose another name.")
        seen[path] = name
