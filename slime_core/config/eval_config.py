"""Evaluation data: `--eval-prompt-data name path` pairs or an `--eval-config` file -> `args.eval_datasets`.

Each value comes from the data set's own entry, else the file's `defaults`, else `--eval-*`, else the rollout's
setting. Example file::

    eval:                       # optional; the mapping may be the root itself
      defaults: {max_response_len: 4096, top_p: 0.7}
      datasets:
        - {name: aime, path: data/aime.jsonl, rm_type: math, n_samples_per_eval_prompt: 16}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from slime_core.config.schema import Args
from slime_core.config.sections.evaluation import EvalDataset
from slime_core.config.spec import flag_specs
from slime_core.config.yaml_file import Item, read_document
from slime_core.errors import ConfigError, did_you_mean

_OF_THE_RUN = ("plugins", "environment_path", "tools_path")
"""Keys that override the run's settings where they are used; None means the run's setting."""
_SAME_KIND: Mapping[str, str] = {"path": "prompt_data", "answer_path": "eval_answer_path"}
"""Key -> the setting with the same meaning; other keys have a setting's name, or hold no path."""
_WITHOUT_EFFECT = (
    "app_service",
    "eval_task_timeout",
    "min_eval_samples",
    "eval_early_stop_remaining",
    "eval_early_stop_idle_timeout",
    "message_processor",
    "reward_model",
    "remote_environment",
)
"""Keys in THUDM/slime's files that have no effect, in THUDM/slime or here."""


def resolve_eval_datasets(args: Args, place: str = "flag") -> tuple[list[EvalDataset], list[str]]:
    """Return the evaluation data sets of these settings, and warnings. Raises ConfigError.

    Args:
        args: Settings after all layers.
        place: Origin of `eval_config` or `eval_prompt_data`, for messages.
    """
    if args.eval_config:
        return _from_file(args, args.eval_config, place)
    return _from_pairs(args, args.eval_prompt_data or [], place), []


def _from_pairs(args: Args, words: list[str], place: str) -> list[EvalDataset]:
    if len(words) == 1:  # a path alone gets the name of its file
        words = [PurePath(words[0].partition("@[")[0]).stem, words[0]]
    if len(words) % 2:
        given = " ".join(repr(w) for w in words)
        raise ConfigError(
            f"--eval-prompt-data {given} ({place}): expected pairs of a name and a path,"
            " e.g. --eval-prompt-data aime data/aime.jsonl"
        )
    entries = [{"name": n, "path": p} for n, p in zip(words[::2], words[1::2])]
    _check_names([e["name"] for e in entries], f"--eval-prompt-data ({place})")
    return [_make(args, entry, {}, f"--eval-prompt-data ({place})") for entry in entries]


def _from_file(args: Args, path: str, place: str) -> tuple[list[EvalDataset], list[str]]:
    document = read_document(path, f"--eval-config {path!r} ({place})")
    root: tuple[Any, ...] = ("eval",) if "eval" in document.items() else ()
    sections = document.items(*root)
    for key, item in sections.items():
        if key not in ("defaults", "datasets"):
            raise ConfigError(f"{item.where}: unknown key {key!r}; expected 'defaults' and 'datasets'.")
    warnings: list[str] = []
    defaults = {}
    if "defaults" in sections:
        defaults = _values(document.items(*root, "defaults"), warnings, banned=("name", "path"))
    listed = sections["datasets"].value if "datasets" in sections else None
    if not isinstance(listed, dict | list):
        raise ConfigError(f"{path}: 'datasets' must be a list of mappings with 'name' and 'path'.")
    datasets = []
    for each in listed if isinstance(listed, dict) else range(len(listed)):
        keys = (*root, "datasets", each)
        entry = _values(document.items(*keys, expected="a mapping with 'name' and 'path'."), warnings)
        named = {"name": str(each)} if isinstance(listed, dict) else {}
        datasets.append(_make(args, named | entry, defaults, document.where(*keys)))
    _check_names([d.name for d in datasets], path)
    return datasets, warnings


def _values(items: Mapping[str, Item], warnings: list[str], *, banned: tuple[str, ...] = ()) -> dict[str, Any]:
    values = {}
    for key, item in items.items():
        name = key.replace("-", "_")
        if name in _WITHOUT_EFFECT:
            warnings.append(f"{item.where}: {key!r} has no effect.")
            continue
        if name in banned or name not in EvalDataset.model_fields:
            allowed = [k for k in EvalDataset.model_fields if k not in banned]
            hint = did_you_mean(name, allowed) or f" Known: {', '.join(allowed)}."
            raise ConfigError(f"{item.where}: unknown evaluation setting {key!r}.{hint}")
        values[name] = _located(name, item.value, item.directory)
    return values


def _located(name: str, value: Any, directory: str) -> Any:
    setting = flag_specs().get(_SAME_KIND.get(name, name))
    return setting.located(value, directory) if setting is not None else value


def located_deep(content: Any, directory: str) -> Any:
    """Return the content of an evaluation file of `directory`, with paths relative to the working directory."""
    if isinstance(content, dict):
        return {key: _located(str(key), located_deep(value, directory), directory) for key, value in content.items()}
    return [located_deep(value, directory) for value in content] if isinstance(content, list) else content


def _make(args: Args, entry: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> EvalDataset:
    merged = {**_from_args(args), **defaults, **entry}
    # The entry's reward has priority over the defaults' reward, under either of the two keys.
    for layer in (entry, defaults):
        if ("rm_type" in layer) != ("custom_rm_path" in layer):
            merged["custom_rm_path" if "rm_type" in layer else "rm_type"] = None
            break
        if "rm_type" in layer:
            break
    for key in ("name", "path"):
        if not merged.get(key):
            raise ConfigError(f"{where}: an evaluation data set needs {key!r}.")
    try:
        return EvalDataset.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].replace("Input should be", "must be")
        if not first["loc"]:  # an error about several settings
            raise ConfigError(f"{where}: {reason.removeprefix('Value error, ')}") from None
        raise ConfigError(f"{where}: {first['loc'][0]} {first['input']!r}: {reason}") from None


def _from_args(args: Args) -> dict[str, Any]:
    """Return each key's value from `--eval-NAME`, else `--rollout-NAME`, else `--NAME`; unset keys are left out."""
    values = {}
    for name in EvalDataset.model_fields.keys() - {*_OF_THE_RUN}:
        settings = [s for s in (f"eval_{name}", f"rollout_{name}", name) if s in flag_specs()]
        given = [getattr(args, s) for s in settings if getattr(args, s) is not None]
        if given:
            values[name] = given[0]
    return values


def _check_names(names: list[str], place: str) -> None:
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        raise ConfigError(f"{place}: evaluation data set {repeated[0]!r} is named twice; names must differ.")
